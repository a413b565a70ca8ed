"""Sessions of generic apps on whole servers: learned IDs, what handlers may say, adopting and refusing, idle time.

Under `homing run` and, with `homing.sticky` in the app's own module, under plain `uvicorn --workers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.pair import PairOptions, open_pair
from tests.support.raw import CLOSE, WebSocketWire, Wire, connect, request
from tests.support.recorder import (
    Recorder,
    Stage,
    body,
    fail,
    note,
    open_stage,
    read_body,
    read_until,
    respond,
    start,
    wait,
)
from tests.support.servers import STARTED, homing_run, serve_workers, serving, uvicorn_run
from tests.support.staged import CANARY, Shared, asked, call, open_staged
from tests.support.watching import until_gone
from tests.support.workers import connections

import homing
from homing.routing.options import DAY_SECONDS
from homing.routing.unnamed import NAMELESS_REQUESTS
from homing.types import SESSION as SESSION_KIND
from homing.types import ASGIApp, SessionId, key_digest, session_tag

STICKY = "tests.support.sticky_app:app"
WORKERS = 3
LAUNCHERS: dict[str, Callable[..., list[str]]] = {"homing run": homing_run, "uvicorn": uvicorn_run}


@contextlib.asynccontextmanager
async def launched(launcher: str, **env: str) -> AsyncIterator[Any]:
    argv = LAUNCHERS[launcher](STICKY, "--workers", str(WORKERS), "--no-access-log")
    async with serve_workers(argv, workers=WORKERS, env={"HOMING_SESSION_SOCKET_DIR": None, **env}) as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        shared = Shared(runner)
        yield shared
        shared.close()


async def ask(wire: Wire, method: str, path: str, status: int = 200) -> Any:
    await wire.send(request(method, path, body=b"" if method == "POST" else None))
    reply = await wire.reply(method)
    assert reply.status == status, reply
    return json.loads(reply.body)


def record_in(directory: Path | str, session: str) -> Path:
    return Path(directory) / "session-owners" / key_digest(SESSION_KIND, session)


# --- under any launcher ---


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_scenario_2_a_learned_id_is_found_by_the_next_request_wherever_it_lands(shared: Shared, launcher: str) -> None:
    async def test() -> None:
        server = shared_server
        async with connections(server.address, WORKERS) as wires:
            creators = set()
            for number in range(30):
                first, *others = (list(wires.values()) * 2)[number % WORKERS :][:WORKERS]
                await first.send(request("POST", "/sessions", body=b""))
                # The very bytes that carry the ID: nothing of the reply after it is waited for.
                data = await first.until(b'"worker":')
                session = re.findall(rb'"session":"([^"]+)"', data)[0].decode()
                seen = await asyncio.gather(*(ask(wire, "GET", f"/sessions/{session}") for wire in others))
                made = await first.until(b"}")
                assert {each["worker"] for each in seen} == {json.loads(b'{"worker":' + made)["worker"]}
                assert sorted(each["count"] for each in seen) == list(range(1, WORKERS))
                creators.add(seen[0]["worker"])
            assert len(creators) == WORKERS

    shared_server = shared.get(launcher, lambda: launched(launcher))
    shared.run(test())


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_an_id_that_no_start_has_made_is_gone(shared: Shared, launcher: str) -> None:
    async def test() -> None:
        async with connections(server.address, WORKERS) as wires:
            for wire in wires.values():
                assert (await ask(wire, "GET", "/sessions/never", 410))["error"]["code"] == "session_gone"

    server = shared.get(launcher, lambda: launched(launcher))
    shared.run(test())


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_a_handler_touches_another_session_only_where_it_is(shared: Shared, launcher: str) -> None:
    async def test() -> None:
        async with connections(server.address, WORKERS) as wires:
            one, two, _ = wires.values()
            mine, also_mine = [(await ask(one, "POST", "/sessions"))["session"] for _ in range(2)]
            theirs = (await ask(two, "POST", "/sessions"))["session"]
            for wire in wires.values():
                assert await ask(wire, "POST", f"/sessions/{mine}/touch/{theirs}") == {"here": False}
                assert await ask(wire, "POST", f"/sessions/{mine}/touch/never") == {"here": False}
                assert await ask(wire, "POST", f"/sessions/{theirs}/touch/{mine}") == {"here": False}
            for number, wire in enumerate(wires.values(), 1):
                assert await ask(wire, "POST", f"/sessions/{mine}/touch/{also_mine}") == {"here": True, "count": number}
                assert (await ask(wire, "POST", f"/sessions/{mine}/touch/{mine}"))["here"]

    server = shared.get(launcher, lambda: launched(launcher))
    shared.run(test())


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_a_worker_id_is_the_process_starts_own_and_new_after_a_restart(shared: Shared, launcher: str) -> None:
    """Last of its server's tests: one worker is killed, and its sessions are gone under any launcher."""

    async def test() -> None:
        async with connections(server.address, WORKERS) as wires:
            identifiers, sessions = {}, {}
            for pid, wire in wires.items():
                made = await ask(wire, "POST", "/sessions")
                identifiers[pid], sessions[pid] = made["worker"], made["session"]
                assert (await ask(wire, "POST", "/sessions"))["worker"] == identifiers[pid]
            assert len(set(identifiers.values())) == WORKERS
            assert all(re.fullmatch("[0-9a-f]{32}", each) for each in identifiers.values())
            killed, *others = wires
            descriptor = os.pidfd_open(killed)
            os.kill(killed, signal.SIGKILL)
            await readable(descriptor)
            for pid in others:
                await ask(wires[pid], "GET", f"/sessions/{sessions[killed]}", 410)
        await server.log.until(STARTED, WORKERS + 1)
        async with connections(server.address, WORKERS) as wires:
            (new,) = set(wires) - set(others)
            assert (await ask(wires[new], "POST", "/sessions"))["worker"] not in identifiers.values()
            await ask(wires[new], "GET", f"/sessions/{sessions[killed]}", 410)
            assert (await ask(wires[new], "GET", f"/sessions/{sessions[others[0]]}"))["worker"] == identifiers[
                others[0]
            ]

    server = shared.get(launcher, lambda: launched(launcher))
    shared.run(test())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_of_one_process_leaves_no_run_directory_behind(workers: int) -> None:
    """That of several stays for workers that their launcher may start yet, and goes with the next server's start."""

    async def test(base: str) -> None:
        argv = uvicorn_run(STICKY, "--no-access-log", *(["--workers", str(workers)] if workers > 1 else []))
        env = {"HOMING_SESSION_SOCKET_DIR": None, "XDG_RUNTIME_DIR": base}
        async with serve_workers(argv, workers=workers, env=env):
            (served,) = os.listdir(base)
        assert os.listdir(base) == ([] if workers == 1 else [served])

    # Not `tmp_path`, which is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="homing-base-") as base:
        for _ in range(2):
            asyncio.run(test(base))


@pytest.mark.parametrize("where", ["siblings", "explicit"])
def test_two_apps_that_one_module_routes_alike_keep_their_sessions_apart(where: str) -> None:
    async def test(directory: str) -> None:
        argv = uvicorn_run("tests.support.two_apps:app", "--workers", "2", "--no-access-log")
        env = {"HOMING_SESSION_SOCKET_DIR": directory if where == "explicit" else None}
        async with (
            serve_workers(argv, workers=2, env=env) as server,
            connections(server.address, 2) as wires,
        ):
            for name in ("one", "two"):
                pids = set()
                for wire in wires.values():
                    await wire.send(request("GET", f"/{name}/", [("x-session", "shared")]))
                    app, pid = (await wire.reply()).body.decode().split()
                    assert app == name
                    pids.add(pid)
                assert len(pids) == 1

    with tempfile.TemporaryDirectory(prefix="homing-apps-") as directory:
        asyncio.run(test(directory))


def test_two_servers_in_one_explicit_directory_whose_apps_tell_sessions_differently_keep_them_apart(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        by_header = homing.sticky(ending_app(None), sessions=[homing.header("x-session")])
        by_query = homing.sticky(ending_app(None), sessions=[homing.query("session")])
        async with serving(by_header) as one, serving(by_query) as two, connect(one) as first, connect(two) as second:
            await call(first, "shared")
            assert (await call(second, path="/?session=shared")).status == 200
            assert len(by_header.lifetimes) == len(by_query.lifetimes) == 1

    (tmp_path / "run").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOMING_SESSION_SOCKET_DIR", str(tmp_path / "run"))
        asyncio.run(test())


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_explicit_directory_that_another_server_used_begins_anew(workers: int) -> None:
    """Else its sessions would be gone for a client that begins them again, and files would pile up."""

    async def test(directory: str) -> list[str]:
        argv = uvicorn_run("tests.support.two_apps:app", "--no-access-log")
        argv += ["--workers", str(workers)] if workers > 1 else []
        async with (
            serve_workers(argv, workers=workers, env={"HOMING_SESSION_SOCKET_DIR": directory}) as server,
            connections(server.address, workers) as wires,
        ):
            for number, wire in enumerate([*wires.values()] * 2):
                await wire.send(request("GET", "/one/", [("x-session", f"session {number}")]))
                assert (await wire.reply()).status == 200
        return os.listdir(directory)

    with tempfile.TemporaryDirectory(prefix="homing-again-") as directory:
        left = [asyncio.run(test(directory)) for _ in range(2)]
        assert len(left[0]) == len(left[1])


def test_outside_a_server_there_is_no_worker_id_and_no_request() -> None:
    with pytest.raises(LookupError, match="no homing worker runs"):
        homing.worker_id()
    for use in (homing.end, lambda scope: homing.serving(scope, "other")):
        with pytest.raises(LookupError, match="not a request that homing routed"):
            use({"type": "http"})


async def readable(descriptor: int) -> None:
    """Wait until a process has ended; closes its descriptor."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(10):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


# --- how sessions end ---


@contextlib.asynccontextmanager
async def routed(
    app: ASGIApp, directory: Path, **settings: Any
) -> AsyncIterator[tuple[homing.SessionRoutingMiddleware, Wire]]:
    """The app behind `homing.sticky`, in a directory of its own, and a connection to it."""
    run = directory / "run"
    run.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOMING_SESSION_SOCKET_DIR", str(run))
        router = homing.sticky(app, sessions=[homing.header("x-session")], **settings)
        async with serving(router) as address, connect(address) as wire:
            yield router, wire


def ending_app(raised: type[BaseException] | None) -> ASGIApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/touch":
            with homing.serving(scope, "ended"):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        if scope["path"] == "/end" and raised is not None:
            raise raised

    return app


def test_a_session_stays_while_a_handler_on_a_thread_touches_it(tmp_path: Path) -> None:
    """Frameworks run plain functions on threads. The look at the record lets the loop run, which is about to let go of it."""
    looked, over = threading.Event(), threading.Event()
    answer = asyncio.Event()
    owners_inside: list[object] = []

    def touch(scope: Any) -> None:
        with homing.serving(scope, "touched"):
            assert over.wait(10)
            owners_inside.append(scope["owner of"]("touched"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status = 200
        if scope["path"] == "/touch":
            assert used[0].worker is not None
            scope["owner of"] = used[0].worker.owners.owner
            await asyncio.to_thread(touch, scope)
        elif scope["path"] == "/refused":
            await answer.wait()
            status = 404
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    used: list[homing.SessionRoutingMiddleware] = []

    async def test() -> None:
        async with routed(app, tmp_path, unowned="adopt") as (router, wire):
            used.append(router)
            assert router.worker is not None
            owners, records = router.worker.owners, router.worker.owners._records
            async with connect(wire.remote) as refused, connect(wire.remote) as touching:
                # A request that leaves nothing behind: its session goes with it.
                first = asyncio.create_task(call(refused, "touched", path="/refused"))
                while not owners.served_now("touched"):
                    await asyncio.sleep(0.001)
                loop_thread, names_us = threading.get_ident(), records.names_us
                touched = key_digest(SESSION_KIND + router.worker._app, "touched")

                def slow(name: str) -> bool:
                    found = names_us(name)
                    if name == touched:
                        looked.set()
                        assert threading.get_ident() == loop_thread or over.wait(10)
                    return found

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(records, "names_us", slow)
                    second = asyncio.create_task(call(touching, "another", path="/touch"))
                    assert await asyncio.to_thread(looked.wait, 10)
                answer.set()
                assert (await first).status == 404
                await call(wire, "another")  # the refused request has left
                over.set()
                assert (await second).status == 200
            assert owners_inside == [router.worker.id]
            await call(wire, "another")
            assert owners.owner("touched") is None

    asyncio.run(test())


@pytest.mark.parametrize("raised", [None, ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_handler_that_raises_after_its_whole_reply_has_done_what_it_said(
    tmp_path: Path, raised: type[BaseException] | None
) -> None:
    async def test() -> None:
        async with routed(ending_app(raised), tmp_path, ends=["POST /end"]) as (router, wire):
            await call(wire, "ended")
            async with connect(wire.remote) as other:
                assert (await call(other, "ended", method="POST", path="/end", body=b"")).status == 200
                await other.to_end() if raised else None
            await call(wire, "another")  # the handler has returned
            assert router.lifetimes.count_ended() == 1

    asyncio.run(test())


def test_a_session_that_has_ended_stays_ended_when_another_ones_handler_touches_it(tmp_path: Path) -> None:
    """Even where a request of its own would open it again."""

    async def test() -> None:
        async with routed(ending_app(None), tmp_path, ends=["POST /end"], unowned="adopt") as (router, wire):
            await call(wire, "ended", method="POST", path="/end", body=b"")
            assert (await call(wire, "another", path="/touch")).status == 200
            await call(wire, "another")
            assert router.lifetimes.count_ended() == 1
            await call(wire, "ended")
            await call(wire, "another")
            assert router.lifetimes.count_ended() == 0

    asyncio.run(test())


def streaming_app(go_on: asyncio.Event) -> ASGIApp:
    """`/events` is a reply, and a WebSocket, that has begun and completes once it may go on."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await go_on.wait()
            await send({"type": "websocket.close"})
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"ok", "more_body": True})
            if scope["path"] == "/events":
                await go_on.wait()
            await send({"type": "http.response.body", "body": b"ok"})

    return app


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_what_was_under_way_when_its_session_ended_does_not_open_it_again_and_what_comes_later_does(
    tmp_path: Path, kind: str
) -> None:
    """A page's event stream, say, is still open at the log-out; the log-in after it has the same cookie."""

    async def test() -> None:
        go_on = asyncio.Event()
        settings = {"ends": ["POST /end"], "unowned": "adopt"}
        async with (
            routed(streaming_app(go_on), tmp_path, **settings) as (router, wire),
            connect(wire.remote) as under_way,
        ):
            assert router.worker is not None
            client = WebSocketWire(under_way)
            if kind == "websocket":
                assert (await client.open("/events", [("x-session", "one")])).status == 101
            else:
                await under_way.send(request("GET", "/events", [("x-session", "one")]))
                await under_way.until(b"ok")
            assert (await call(wire, "one", method="POST", path="/end", body=b"")).status == 200
            await call(wire, "another")  # the end has left
            assert router.lifetimes.count_ended() == 1
            go_on.set()
            if kind == "websocket":
                assert (await client.frame()).opcode == CLOSE
            else:
                await under_way.until(b"ok")
            while router.worker.owners.served_now("one"):
                await asyncio.sleep(0)
            assert (router.lifetimes.count_ended(), router.worker.open_sessions) == (1, 1)
            await call(wire, "one")
            await call(wire, "another")
            assert (router.lifetimes.count_ended(), router.worker.open_sessions) == (0, 2)

    asyncio.run(test())


def made_by_app(scopes: list[Any]) -> ASGIApp:
    """Names a session in its reply to a request that names none, and keeps the scopes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        scopes.append(scope)
        named = any(name == b"x-session" for name, _ in scope["headers"])
        headers = [] if named else [(b"x-session", b"made")]
        status = 404 if scope["path"] == "/unknown" else 200
        await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        if scope["path"] == "/end":
            homing.end(scope)

    return app


async def end_here(scope: Any) -> None:
    homing.end(scope)


async def end_on_a_thread(scope: Any) -> None:
    await asyncio.to_thread(homing.end, scope)


@pytest.mark.parametrize("end", [end_here, end_on_a_thread])
@pytest.mark.parametrize("session", ["named", None])
def test_an_end_that_comes_after_its_request_ends_the_session_that_it_named_or_made(
    tmp_path: Path, session: str | None, end: Callable[[Any], Awaitable[None]]
) -> None:
    scopes: list[Any] = []

    async def test() -> None:
        async with routed(made_by_app(scopes), tmp_path) as (router, wire):
            assert router.worker is not None
            await call(wire, session)
            await call(wire, "another")
            assert (router.worker.count_live(), router.lifetimes.count_ended()) == (2, 0)
            await end(scopes[0])
            assert (router.worker.count_live(), router.lifetimes.count_ended()) == (1, 1)
            assert router.worker.owners.mine(session or "made")  # a late close still finds it

    asyncio.run(test())


def test_a_handler_ends_what_its_own_reply_has_made_known(tmp_path: Path) -> None:
    async def test() -> None:
        async with routed(made_by_app([]), tmp_path) as (router, wire):
            await call(wire, None, path="/end")
            await call(wire, "another")
            assert router.lifetimes.count_ended() == 1

    asyncio.run(test())


def test_an_end_that_comes_after_its_session_has_gone_ends_no_later_one_of_that_name_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scopes: list[Any] = []

    async def test() -> None:
        async with routed(made_by_app(scopes), tmp_path, unowned="adopt") as (router, wire):
            await call(wire, "named", path="/unknown")  # leaves no record
            await call(wire, "named")
            await call(wire, "another")
            homing.end(scopes[0])
            assert router.lifetimes.count_ended() == 0
            homing.end(scopes[1])
            assert router.lifetimes.count_ended() == 1

    asyncio.run(test())
    said = f"an end that came after its request has ended nothing: not here session={session_tag(SessionId('named'))}"
    assert caplog.messages.count(said) == 1


# --- signals ---


def test_a_stop_signal_that_the_process_ignores_stops_nobody(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def test() -> None:
        async with routed(ending_app(None), tmp_path) as (_, wire):
            signal.raise_signal(signal.SIGTERM)
            assert (await call(wire, "one")).status == 200
            assert not list((tmp_path / "run").glob("*.stopping"))
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    try:
        asyncio.run(test())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stop_signal_whose_handler_is_not_pythons_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python knows no way to call such a handler, or to put it back (a process that embeds Python may have one)."""
    known, installed = signal.getsignal, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else known(number))

    async def test() -> None:
        async with routed(ending_app(None), tmp_path) as (_, wire):
            assert (await call(wire, "one")).status == 200
            assert known(signal.SIGTERM) is installed

    asyncio.run(test())
    assert known(signal.SIGTERM) is installed


# --- how long ---


def test_idle_sessions_end_by_themselves_and_those_in_use_are_kept(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "run").mkdir(mode=0o700)
        env = {"TEST_IDLE_SECONDS": "0.4", "HOMING_SESSION_SOCKET_DIR": str(tmp_path / "run")}
        async with launched("uvicorn", **env) as server, connections(server.address, WORKERS) as wires:
            one, two, three = wires.values()
            idle, used = [(await ask(one, "POST", "/sessions"))["session"] for _ in range(2)]
            await three.send(request("GET", f"/sessions/{used}/hold"))
            await until_gone(record_in(tmp_path / "run", idle))
            assert (await ask(two, "GET", f"/sessions/{idle}", 410))["error"]["code"] == "session_gone"
            # A request in flight counts, though it came before.
            assert record_in(tmp_path / "run", used).is_symlink()
            await ask(one, "POST", f"/sessions/{used}/let-go")
            assert json.loads((await three.reply()).body) == {"held": True}
            await until_gone(record_in(tmp_path / "run", used))

    asyncio.run(test())


def test_the_idle_time_is_a_day_unless_set() -> None:
    assert inspect.signature(homing.sticky).parameters["idle_seconds"].default == 86_400 == DAY_SECONDS


# --- adopting and refusing: one worker in this process, which routes all the same ---


@contextlib.asynccontextmanager
async def recorded(directory: Path, **settings: Any) -> AsyncIterator[tuple[Stage, Wire]]:
    """The recorder behind `homing.sticky`, and a connection to it."""
    run = directory / "run"
    run.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOMING_SESSION_SOCKET_DIR", str(run))
        async with open_stage(str(directory / "stage")) as stage:
            app = Recorder(str(directory / "stage"))
            settings = {"sessions": [homing.header("x-session")], **settings}
            async with serving(homing.sticky(app, **settings)) as address, connect(address) as wire:
                yield stage, wire


UNOWNED = {
    "a header alone": ({}, 200),
    "a cookie alone": ({"sessions": [homing.cookie("x"), homing.header("x-session")]}, 200),
    "an end alone": ({"ends": ["DELETE /s"]}, 200),
    "a start": ({"starts": ["POST /start"]}, 410),
    "learn": ({"learn": [homing.header("x-made")]}, 410),
    "a preset": ({"preset": "mcp"}, 404),
    "a handle": ({"sessions": [homing.header("x-session"), homing.mcp_handle("book")]}, 410),
    "a start, and adopt": ({"starts": ["POST /start"], "unowned": "adopt"}, 200),
    "a header, and refuse": ({"unowned": "refuse"}, 410),
    "a status of its own": ({"unowned": "refuse", "gone_status": 404}, 404),
}


@pytest.mark.parametrize("given", list(UNOWNED))
def test_an_unowned_session_is_adopted_where_clients_choose_ids_and_refused_where_they_do_not(
    tmp_path: Path, given: str
) -> None:
    settings, expected = UNOWNED[given]

    async def test() -> None:
        async with recorded(tmp_path, **settings) as (stage, wire):
            stage.script("here", [read_body(), *respond()])
            reply = await call(wire, f"{CANARY}-1", "here")
            assert reply.status == expected
            assert len(stage.performances("here")) == (expected == 200)
            assert record_in(tmp_path / "run", f"{CANARY}-1").is_symlink() == (expected == 200)

    asyncio.run(test())


def test_a_start_whose_reply_names_no_session_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with recorded(tmp_path, starts=["POST /start"]) as (stage, wire):
            stage.script("named", [read_body(), *respond(200, [(b"x-session", b"made")])])
            stage.script("refused", [read_body(), *respond(503)])
            stage.script("unnamed", [read_body(), *respond()])
            for case in ("named", "refused", "unnamed", "unnamed"):
                await wire.send(request("POST", "/start", [("x-case", case)]))
                assert (await wire.reply()).status == (503 if case == "refused" else 200)
            await call(wire)  # the last handler has returned

    asyncio.run(test())
    lines = [line for line in caplog.messages if "names no session" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "POST /start answered 200, but its reply names no session: add --learn body:FIELD@/start"
    )


NAMELESS = ["header:x-session", "path:/rooms/{session}"]


@pytest.mark.parametrize("before", [None, "named", "started", "learned"])
def test_it_is_warned_of_once_that_no_request_has_named_a_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str | None
) -> None:
    """One that was named, declared as a start or learned shows that the sources are there; what comes after it says nothing."""

    async def test() -> None:
        async with recorded(tmp_path, sessions=NAMELESS, starts=["POST /start"], unowned="adopt") as (stage, wire):
            stage.script("plain", [read_body(), *respond()])
            stage.script("made", [read_body(), *respond(200, [(b"x-session", b"made")])])
            if before is not None:
                path, case = ("/start", "plain") if before == "started" else ("/", "plain")
                headers = [("x-case", "made" if before == "learned" else case)]
                headers += [("x-session", f"{CANARY}-1")] if before == "named" else []
                await wire.send(request("POST", path, headers))
                assert (await wire.reply()).status == 200
            for number in range(2 * NAMELESS_REQUESTS):
                lines = [line for line in caplog.messages if "has named a session" in line]
                assert len(lines) == (before is None and number >= NAMELESS_REQUESTS)
                await wire.send(request("GET", "/", [("x-case", "plain")]))
                assert (await wire.reply()).status == 200

    asyncio.run(test())
    lines = [line for line in caplog.messages if "has named a session" in line]
    assert len(lines) == (before is None)
    for line in lines:
        assert "looked for header:x-session, path:/rooms/{session};" in line


@pytest.mark.parametrize("status", [200, 302, 400, 404, 500, 503])
def test_an_adopted_session_is_kept_only_if_its_reply_is_below_400(tmp_path: Path, status: int) -> None:
    async def test() -> None:
        async with recorded(tmp_path) as (stage, wire):
            stage.script("here", [read_body(), *respond(status)])
            stage.script("look", [read_body(), note("in"), *respond()])
            assert (await call(wire, f"{CANARY}-1", "here")).status == status
            await call(wire)  # its handler has returned when the next one is called
            kept = record_in(tmp_path / "run", f"{CANARY}-1").is_symlink()
            assert kept == (status < 400)

    asyncio.run(test())


def test_of_two_requests_that_leave_nothing_the_last_one_to_leave_takes_the_record_along(tmp_path: Path) -> None:
    async def test() -> None:
        async with recorded(tmp_path) as (stage, wire), connect(wire.remote) as other:
            stage.script("slow", [read_body(), note("in"), wait("go"), *respond(404)])
            stage.script("quick", [read_body(), *respond(404)])
            await wire.send(asked(f"{CANARY}-1", "slow"))
            slow = await stage.performance("slow")
            await slow.noted("in")
            assert (await call(other, f"{CANARY}-1", "quick")).status == 404
            await call(other)
            assert record_in(tmp_path / "run", f"{CANARY}-1").is_symlink()
            slow.open("go")
            assert (await wire.reply()).status == 404
            await call(wire)
            assert not record_in(tmp_path / "run", f"{CANARY}-1").is_symlink()

    asyncio.run(test())


@pytest.mark.parametrize("when", ["body", "handler", "stream"])
def test_a_client_that_leaves_takes_along_what_nobody_used(tmp_path: Path, when: str) -> None:
    """Whatever the server does with a request whose client has left, what was counted is uncounted."""
    scripts: dict[str, Sequence[Any]] = {
        "body": [note("in"), read_until("http.disconnect"), *respond(404)],
        "handler": [read_body(), note("in"), read_until("http.disconnect"), fail()],
        "stream": [read_body(), start(404), body(b"x", more=True), note("in"), read_until("http.disconnect"), fail()],
    }

    async def test() -> None:
        async with recorded(tmp_path) as (stage, wire), connect(wire.remote) as leaving:
            stage.script("left", scripts[when])
            whole = asked(f"{CANARY}-1", "left", method="POST", body=b"0123456789")
            await leaving.send(whole[:-5] if when == "body" else whole)
            performance = await stage.performance("left")
            await performance.noted("in")
            assert record_in(tmp_path / "run", f"{CANARY}-1").is_symlink()
            leaving.abort()
            await performance.done()
            await until_gone(record_in(tmp_path / "run", f"{CANARY}-1"))
            assert (await call(wire, f"{CANARY}-1")).status == 200

    asyncio.run(test())


def test_of_two_ids_in_one_reply_neither_is_kept_if_one_cannot_be_recorded(tmp_path: Path) -> None:
    """The reply does not leave, so nobody ever hears of the other."""
    one, two = f"{CANARY}-one", f"{CANARY}-two"

    async def test() -> None:
        async with recorded(tmp_path, learn=[homing.header("x-made")]) as (stage, wire):
            names = [(b"x-session", one.encode()), (b"x-made", two.encode())]
            stage.script("make", [read_body(), *respond(headers=names)])
            for unrecorded, other in ((one, two), (two, one)):
                record_in(tmp_path / "run", unrecorded).symlink_to("nobody")
                reply = await call(wire, None, "make")
                assert (reply.status, reply.one(b"homing-error")) == (500, b"session_not_recorded")
                await call(wire)
                assert not record_in(tmp_path / "run", other).is_symlink()
                record_in(tmp_path / "run", unrecorded).unlink()
            assert (await call(wire, None, "make")).status == 200
            assert all(record_in(tmp_path / "run", each).is_symlink() for each in (one, two))

    asyncio.run(test())


# --- before the bytes leave ---


def test_an_id_is_owned_before_the_bytes_that_carry_it_leave_however_slow_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner stands still between its record and everything after, as a disk may make it: nothing has left."""

    async def test() -> None:
        monkeypatch.setenv("HOMING_FAILPOINTS", "acquire.after_symlink=stop@1")
        # Here what is written leaves at once; uvloop, and homing's own protocol, keep it until the turn of the loop is over.
        writes_at_once = {"http": "h11", "loop": "asyncio"}
        async with open_pair(PairOptions(sticky={"unowned": "adopt"}, server=writes_at_once)) as pair:
            made = f"{CANARY}-made"
            pair.stage.script("make", [read_body(), note("made"), *respond(headers=[(b"x-session", made.encode())])])
            async with pair.connect(pair.owner) as wire, pair.connect(pair.front) as other:
                await wire.send(request("POST", "/", [("x-case", "make")], b""))
                await (await pair.stage.performance("make")).noted("made")
                stopped = await asyncio.to_thread(os.waitid, os.P_PID, pair.owner.pid, os.WSTOPPED | os.WNOWAIT)
                assert stopped is not None
                try:
                    assert record_in(pair.socket_dir, made).is_symlink()
                    assert wire.received == 0
                    # Nobody else can become its owner meanwhile.
                    await other.send(request("GET", "/", [("x-session", made)]))
                finally:
                    pair.owner.process.signal(signal.SIGCONT)
                assert (await wire.reply("POST")).one(b"x-session") == made.encode()
                reply = await other.reply()
                assert (reply.status, reply.body.split()[0]) == (200, b"owner")

    asyncio.run(test())


# --- the test mode ---


def test_with_scatter_every_request_takes_a_detour_and_the_app_is_still_right() -> None:
    async def test() -> None:
        counting = ("--session", "path:/sessions/{session}", "--learn", "body:session@/sessions")
        options = (*counting, "--start", "POST /sessions", "--scatter", "--owner-timeout", "1", "--no-access-log")
        async with open_staged(*options, app="tests.support.counter_app:app", workers=2) as server:
            assert server.server.log.find("--scatter is a test mode")

            async def session() -> None:
                async with connect(server.server.address) as wire, connect(server.server.address) as other:
                    made = await ask(wire, "POST", "/sessions")
                    for count in range(1, 6):
                        reply = await ask((wire, other)[count % 2], "POST", f"/sessions/{made['session']}/step")
                        assert (reply["count"], reply["incarnation"]) == (count, made["incarnation"])
                        assert not reply["hollow"]

            for _ in range(5):
                await asyncio.gather(*(session() for _ in range(8)))

            # Of two workers, the one that accepts a connection is not the one that answers on it.
            async with connect(server.server.address) as wire, contextlib.AsyncExitStack() as stack:
                detour = int((await call(wire)).body.split()[-1])
                while True:
                    other = await stack.enter_async_context(connect(server.server.address))
                    made = await ask(other, "POST", "/sessions")
                    if made["pid"] != detour:
                        break
                # So with that one standing still, even a session that is held where it is asked for is out of reach.
                step = f"/sessions/{made['session']}/step"
                assert (await ask(wire, "POST", step))["pid"] != detour
                with server.stopped(detour):
                    assert (await ask(wire, "POST", step, 504))["error"]["code"] == "owner_timeout"

    asyncio.run(test())
