"""The table of answers (`docs/design/protocol.md`), row by row, on servers of real worker processes.

Rows that other tests show: 409 and `x-ng-session-owner` are of the kinds that declare them
(`tests/integration/seeds/test_where_the_id_comes_from.py`, `test_named_workers.py`), and so is a lock deadline, which only
restores meet (`test_owners_deaths.py`). A frame that was provably not read: `tests/integration/forwarding`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.support.few_descriptors import descriptors
from tests.support.raw import CLOSE, Reply, WebSocketWire, WireError, connect
from tests.support.recorder import body, note, read_body, receive, respond, send, start, wait
from tests.support.staged import CANARY, SESSION, Shared, Staged, asked, call, open_staged

from homing.types import SESSION as SESSION_KIND
from homing.types import key_digest

PAUSED_TIMEOUT_SECONDS = 2


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        shared = Shared(runner)
        yield shared
        shared.close()


@pytest.fixture
def killing(shared: Shared) -> Staged:
    """Three workers; tests kill some, and the supervisor replaces them."""
    options = (*SESSION, "--session", "body:session@/named", "--log-level", "debug")
    return shared.get("killing", lambda: open_staged(*options, workers=3))


@pytest.fixture
def pausing(shared: Shared) -> Staged:
    """Two workers with a short owner timeout and the smallest backlog."""
    options = (*SESSION, "--owner-timeout", str(PAUSED_TIMEOUT_SECONDS), "--backlog", "1", "--log-level", "debug")
    return shared.get("pausing", lambda: open_staged(*options, workers=2))


def refused(server: Staged, reply: Reply, status: int, code: str) -> None:
    """The reply is homing's own, of this status and code, and gives nothing away."""
    assert (reply.status, reply.all(b"homing-error")) == (status, [code.encode()]), f"{reply!r}{server.server.log}"
    assert reply.one(b"content-type") == b"application/json"
    error = json.loads(reply.body)["error"]
    assert error["code"] == code
    assert set(error) == {"code", "detail"}
    assert reply.all(b"retry-after") == ([b"1"] if status == 503 else [])
    told = (reply.head + reply.body).decode()
    assert CANARY not in told
    assert not re.search(r"[0-9a-f]{16}|[Ee]rrno|\.sock|/dev/|/tmp|/run", told), told


def record_of(server: Staged, session: str) -> Path:
    return server.run_directory / "session-owners" / key_digest(SESSION_KIND, session)


def quickly(since: float) -> None:
    taken = time.monotonic() - since
    assert taken < 0.9, f"the answer took {taken:.2f} s"


# --- gone ---


def test_a_killed_owners_session_is_gone_from_every_worker_every_time_and_after_a_restart(
    shared: Shared, killing: Staged
) -> None:
    async def test() -> None:
        case = killing.script(read_body(), *respond())
        async with killing.wires() as wires:
            owner, *others = wires
            session = await killing.start_session(wires[owner])
            assert (await call(wires[others[0]], session)).body.split()[-1] == str(owner).encode()
            await killing.kill(owner)
            for _ in range(3):
                for other in others:
                    began = time.monotonic()
                    reply = await call(wires[other], session, case)
                    quickly(began)
                    refused(killing, reply, 410, "session_gone")
        await killing.replaced()
        async with killing.wires() as wires:
            assert owner not in wires
            for wire in wires.values():
                refused(killing, await call(wire, session, case), 410, "session_gone")
                refused(killing, await call(wire, session, case, method="POST", body=b"{}"), 410, "session_gone")
                await killing.start_session(wire)
        assert killing.stage.performances(case) == []

    shared.run(test())


def test_killed_inside_the_handler_the_outcome_is_unknown_then_the_session_is_gone(
    shared: Shared, killing: Staged
) -> None:
    async def test() -> None:
        case = killing.script(read_body(), note("effect"), wait("for ever"))
        async with killing.wires() as wires:
            owner, front, other = wires
            session = await killing.start_session(wires[owner])
            await wires[front].send(asked(session, case, method="POST", body=b'{"n": 1}'))
            await (await killing.performance(case)).noted("effect")
            await killing.kill(owner)
            began = time.monotonic()
            refused(killing, await wires[front].reply("POST"), 502, "owner_unreachable")
            quickly(began)
            for pid in (front, other):
                refused(killing, await call(wires[pid], session, case), 410, "session_gone")
        await killing.replaced()
        assert len(killing.stage.performances(case)) == 1

    shared.run(test())


SIZED = start(headers=[(b"content-length", b"1000")])
OPEN_ENDED = start(headers=[(b"content-type", b"application/octet-stream")])
EVENTS = start(headers=[(b"content-type", b"text/event-stream")])


@pytest.mark.parametrize(
    ("head", "version"),
    [(SIZED, "1.1"), (OPEN_ENDED, "1.1"), (EVENTS, "1.1"), (OPEN_ENDED, "1.0"), (SIZED, "1.0")],
    ids=["content-length", "chunked", "events", "http-1.0", "http-1.0-content-length"],
)
def test_killed_inside_its_reply_the_clients_connection_is_aborted(
    shared: Shared, killing: Staged, head: Any, version: str
) -> None:
    async def test() -> None:
        part = b"data: 1\n\n"
        case = killing.script(read_body(), head, body(part, more=True), note("begun"), wait("for ever"))
        async with killing.wires() as wires:
            owner, front, _ = wires
            session = await killing.start_session(wires[owner])
            await wires[front].send(asked(session, case, version=version))
            await wires[front].until(part)
            await killing.kill(owner)
            rest = await wires[front].to_end()
            assert wires[front].end == "reset"
            assert b"0\r\n\r\n" not in rest
        await killing.replaced()
        assert len(killing.stage.performances(case)) == 1

    shared.run(test())


# --- WebSockets ---


def test_a_websocket_of_a_lost_session_is_refused_with_the_same_status(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        case = killing.script(receive(), note("connecting"), wait("for ever"))
        async with killing.wires() as wires:
            owner, front, other = wires
            session = await killing.start_session(wires[owner])
            opening = asyncio.create_task(
                WebSocketWire(wires[front]).open("/", [("x-session", session), ("x-case", case)])
            )
            await (await killing.performance(case)).noted("connecting")
            await killing.kill(owner)
            refused(killing, await opening, 502, "owner_unreachable")
            reply = await WebSocketWire(wires[other]).open("/", [("x-session", session), ("x-case", case)])
            refused(killing, reply, 410, "session_gone")
        await killing.replaced()
        assert len(killing.stage.performances(case)) == 1

    shared.run(test())


def test_a_forwarded_denial_keeps_its_body_under_uvicorns_legacy_websockets(shared: Shared) -> None:
    """It sends what it has in the turn after the start."""

    async def test() -> None:
        async with open_staged(*SESSION, "--ws", "websockets", "--scatter", workers=2) as server:
            denial = [
                send({"type": "websocket.http.response.start", "status": 418, "headers": []}),
                send({"type": "websocket.http.response.body", "body": b"teapot"}),
            ]
            session = server.new_session()
            for _ in range(40):
                case = server.script(receive(), denial)
                async with connect(server.server.address) as wire:
                    reply = await WebSocketWire(wire).open("/", [("x-session", session), ("x-case", case)])
                assert (reply.status, reply.body) == (418, b"teapot")

    shared.run(test())


def test_an_accepted_websocket_whose_owner_is_lost_is_closed_1011(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        case = killing.script(receive(), send({"type": "websocket.accept"}), note("open"), wait("for ever"))
        async with killing.wires() as wires:
            owner, front, _ = wires
            session = await killing.start_session(wires[owner])
            client = WebSocketWire(wires[front])
            assert (await client.open("/", [("x-session", session), ("x-case", case)])).status == 101
            await (await killing.performance(case)).noted("open")
            await killing.kill(owner)
            frame = await client.frame()
            assert (frame.opcode, frame.close_code, frame.close_reason) == (CLOSE, 1011, "")
        await killing.replaced()

    shared.run(test())


# --- records that name no worker of this server ---


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_a_record_of_another_boot_is_gone(shared: Shared, killing: Staged, method: str) -> None:
    async def test() -> None:
        session = killing.new_session()
        record_of(killing, session).symlink_to(f"{'0' * 32}.{'1' * 32}")
        case = killing.script(read_body(), *respond())
        async with killing.wires() as wires:
            for wire in wires.values():
                reply = await call(wire, session, case, method=method, body=b"" if method == "POST" else None)
                if method == "HEAD":
                    assert (reply.status, reply.one(b"homing-error")) == (410, b"session_gone")
                else:
                    refused(killing, reply, 410, "session_gone")
        assert killing.stage.performances(case) == []

    shared.run(test())


def plant(path: Path, what: str) -> None:
    match what:
        case "no worker":
            path.symlink_to("nonsense")
        case "a path":
            path.symlink_to("../../../../etc/passwd")
        case "too long":
            path.symlink_to("0" * 4000)
        case "upper case":
            path.symlink_to(
                f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip().replace('-', '')}.{'A' * 32}"
            )
        case "a file":
            path.write_bytes(b"x" * 100)
        case "a directory":
            path.mkdir()
        case "a fifo":
            os.mkfifo(path)


@pytest.mark.parametrize("what", ["no worker", "a path", "too long", "upper case", "a file", "a directory", "a fifo"])
def test_a_malformed_record_is_nobodys_guess(shared: Shared, killing: Staged, what: str) -> None:
    async def test() -> None:
        session = killing.new_session()
        plant(record_of(killing, session), what)
        case = killing.script(read_body(), *respond())
        async with killing.wires() as wires:
            for wire in wires.values():
                refused(killing, await call(wire, session, case), 503, "malformed_record")
            opened = await WebSocketWire(wire).open("/", [("x-session", session), ("x-case", case)])
            refused(killing, opened, 503, "malformed_record")
        assert killing.stage.performances(case) == []

    shared.run(test())


def test_a_record_that_names_this_worker_without_its_session_is_moving(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        case = killing.script(read_body(), *respond())
        async with killing.wires() as wires:
            owner, front, _ = wires
            session, planted = await killing.start_session(wires[owner]), killing.new_session()
            record_of(killing, planted).symlink_to(os.readlink(record_of(killing, session)))
            refused(killing, await call(wires[owner], planted, case), 503, "session_moving")
            refused(killing, await call(wires[front], planted, case), 503, "session_moving")
        assert killing.stage.performances(case) == []

    shared.run(test())


def test_a_record_that_vanished_is_not_taken_for_a_session_that_ended(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        case = killing.script(read_body(), *respond())
        async with killing.wires() as wires:
            owner, _, _ = wires
            session = await killing.start_session(wires[owner])
            record_of(killing, session).unlink()
            refused(killing, await call(wires[owner], session, case), 503, "directory_unavailable")
        assert killing.stage.performances(case) == []

    shared.run(test())


# --- what cannot be recorded, and what cannot be read ---


def test_an_id_that_two_workers_make_is_500_at_the_second_whose_handler_ran(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        made = killing.new_session()
        case = killing.script(read_body(), note("effect"), *respond(headers=[(b"x-session", made.encode())]))
        async with killing.wires() as wires:
            first, second, third = wires
            assert (await call(wires[first], None, case)).one(b"x-session") == made.encode()
            for pid in (second, third):
                reply = await call(wires[pid], None, case)
                refused(killing, reply, 500, "session_not_recorded")
                assert reply.all(b"x-session") == []
            assert (await call(wires[second], made)).body.split()[-1] == str(first).encode()
        assert len(killing.stage.performances(case)) == 3

    shared.run(test())


def test_an_id_that_cannot_be_recorded_inside_a_stream_cuts_it(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        made = killing.new_session()
        data = json.dumps({"session": made}).encode()
        steps = [EVENTS, body(b": hello\n\n", more=True), body(b"data: " + data + b"\n\n", more=True), body()]
        case = killing.script(read_body(), *steps)
        async with killing.wires() as wires:
            first, second, _ = wires
            assert made.encode() in (await call(wires[first], None, case, path="/named")).body
            reply = await call(wires[second], None, case, path="/named")
            assert reply.status == 200
            assert not reply.complete
            assert reply.end == "reset"
            assert made.encode() not in reply.framed

    shared.run(test())


def test_what_cannot_be_read_is_400_at_once(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        case = killing.script(read_body(), *respond())
        async with killing.wires() as wires:
            for wire in wires.values():
                refused(killing, await call(wire, "x" * 1025, case), 400, "session_id_too_long")
                twice = b'{"session": "one", "session": "two"}'
                reply = await call(wire, None, case, method="POST", path="/named", body=twice)
                refused(killing, reply, 400, "duplicate_field")
        assert killing.stage.performances(case) == []

    shared.run(test())


def test_a_head_that_no_frame_holds_is_431_where_it_would_have_to_be_forwarded(shared: Shared, killing: Staged) -> None:
    async def test() -> None:
        case, large = killing.script(read_body(), *respond()), ("x-large", "x" * (17 * 2**20))
        async with killing.wires() as wires:
            owner, front, _ = wires.values()
            session = await killing.start_session(owner)
            for body in (None, b"{}"):
                method = "GET" if body is None else "POST"
                reply = await call(
                    front, session, case, method=method, headers=[large], body=body, timeout_seconds=60.0
                )
                refused(killing, reply, 431, "head_too_large")
            assert killing.stage.performances(case) == []
            assert (await call(front, session, case)).status == 200
            # With one worker nobody counts it.
            assert (await call(owner, session, case, headers=[large], timeout_seconds=60.0)).status == 200

    shared.run(test())


# --- an owner that is alive and does not answer ---


def test_a_paused_owner_is_waited_for(shared: Shared, pausing: Staged) -> None:
    async def test() -> None:
        async with pausing.wires() as wires:
            owner, front = wires
            session = await pausing.start_session(wires[owner])
            with pausing.stopped(owner):
                await wires[front].send(asked(session))
                # Only the front runs, so a later request that is answered shows that it has taken the one before.
                async with connect(pausing.server.address) as second:
                    assert (await call(second)).status == 200
            reply = await wires[front].reply()
            assert reply.status == 200
            assert reply.body.split()[-1] == str(owner).encode()

    shared.run(test())


def test_an_owner_that_stays_paused_is_504_and_its_session_is_still_its_own(shared: Shared, pausing: Staged) -> None:
    async def test() -> None:
        late = pausing.script(read_body(), *respond(data=b"late"))
        fresh = pausing.script(read_body(), *respond(data=b"fresh"))
        async with pausing.wires() as wires:
            owner, front = wires
            session = await pausing.start_session(wires[owner])
            assert (await call(wires[front], session)).status == 200
            record = os.readlink(record_of(pausing, session))
            with pausing.stopped(owner):
                began = time.monotonic()
                refused(pausing, await call(wires[front], session, late), 504, "owner_timeout")
                assert time.monotonic() - began >= PAUSED_TIMEOUT_SECONDS
                assert (await call(wires[front], pausing.new_session())).status == 200
                assert os.readlink(record_of(pausing, session)) == record
            # Each request gets its own reply, and nobody the late one.
            for _ in range(3):
                reply = await call(wires[front], session, fresh)
                assert (reply.status, reply.body) == (200, b"fresh")
            assert os.readlink(record_of(pausing, session)) == record
        assert len(pausing.stage.performances(late)) <= 1

    shared.run(test())


def test_a_full_backlog_is_503_and_neither_gone_nor_unknown(shared: Shared, pausing: Staged) -> None:
    requests, may_wait = 8, 4  # a connection of the pool, the backlog's, and what the kernel allows beyond

    async def test() -> None:
        case = pausing.script(read_body(), *respond())
        async with pausing.wires() as wires, contextlib.AsyncExitStack() as stack:
            owner, front = wires
            session = await pausing.start_session(wires[owner])
            replies: list[asyncio.Task[Reply]] = []
            with pausing.stopped(owner):
                for _ in range(requests):
                    wire = await stack.enter_async_context(connect(pausing.server.address))
                    await wire.send(asked(session, case))
                    replies.append(asyncio.create_task(wire.reply()))
                full = 0
                for answered in asyncio.as_completed(replies):
                    reply = await answered
                    if reply.status == 504:
                        continue  # one that waited, on a machine that is slow
                    refused(pausing, reply, 503, "owner_busy")
                    full += 1
                    if full == requests - may_wait:
                        break
                assert full == requests - may_wait
            answers = [(await reply).status for reply in replies]
            # Those that waited were served, or told that they waited too long, by a machine that is too slow.
            assert set(answers) <= {200, 503, 504}
            assert len(pausing.stage.performances(case)) <= requests - answers.count(503)
            assert (await call(wires[front], session, case)).status == 200

    shared.run(test())


# --- a server without descriptors, without its directory, without room ---


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_without_descriptors_the_answer_is_503_and_the_server_recovers_by_itself(loop: str) -> None:
    async def test() -> None:
        async with (
            open_staged(*SESSION, "--loop", loop, "--log-level", "debug", workers=2) as server,
            server.wires() as wires,
            contextlib.AsyncExitStack() as stack,
        ):
            owner, front = wires
            session = await server.start_session(wires[owner])
            case = server.script(read_body(), *respond())
            with descriptors(front, 0):
                refused(server, await call(wires[front], session, case), 503, "owner_busy")
                with contextlib.suppress(WireError):
                    # The front cannot accept, and must not spin or die of it.
                    async with connect(server.server.address) as wire:
                        await call(wire, None, timeout_seconds=0.3)
            assert (await call(wires[front], session, case)).status == 200
            assert len(server.stage.performances(case)) == 1

            # Now the owner has room for one connection more. Whoever cannot be accepted is told so at once, and never that
            # the session is gone: its owner is alive.
            slow = server.script(read_body(), wait("room"), *respond())
            replies: list[asyncio.Task[Reply]] = []
            fronts = [wires[front]]
            while len(fronts) < 4:
                wire = await stack.enter_async_context(connect(server.server.address))
                if int((await call(wire)).body.split()[-1]) == front:
                    fronts.append(wire)
            with descriptors(owner, 1):
                for wire in fronts:
                    await wire.send(asked(session, slow))
                    replies.append(asyncio.create_task(wire.reply(timeout_seconds=30)))
                turned, waiting = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
                await server.server.log.until("cannot take a connection from another worker now")
                while len(waiting) > 2:  # one over the connection that there is, one over the one more
                    more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    turned |= more
                for each in turned:
                    refused(server, each.result(), 503, "owner_busy")
            for number in range(2):
                (await server.stage.performance(slow, number)).open("room")
            assert [(await reply).status for reply in waiting] == [200, 200]
            assert len(server.stage.performances(slow)) == 2
            assert (await call(fronts[-1], session, case)).status == 200

    asyncio.run(test())


def test_a_removed_run_directory_is_503_for_every_session_and_the_server_still_stops() -> None:
    async def test() -> None:
        async with open_staged(*SESSION, "--log-level", "debug", workers=2, clean=True) as server:
            async with server.wires() as wires:
                owner, front = wires
                session = await server.start_session(wires[owner])
                case = server.script(read_body(), *respond())
                learning = server.script(read_body(), *respond(headers=[(b"x-session", b"made by the app")]))
                shutil.rmtree(server.run_directory)
                for pid in (owner, front):
                    for named in (session, server.new_session()):
                        refused(server, await call(wires[pid], named, case), 503, "directory_unavailable")
                    # The handler may run where the ID is only made there; the ID must not leave.
                    refused(server, await call(wires[pid], None, learning), 500, "session_not_recorded")
                    assert (await call(wires[pid])).status == 200
                # Nor is another directory at the same path believed.
                os.makedirs(server.run_directory / "session-owners", mode=0o700)
                for pid in (owner, front):
                    refused(server, await call(wires[pid], session, case), 503, "directory_unavailable")
                    refused(server, await call(wires[pid], server.new_session(), case), 503, "directory_unavailable")
            assert server.stage.performances(case) == []
            assert await server.server.stop() == 0
            assert not server.server.log.find("Traceback")
            shutil.rmtree(server.run_directory)  # the one that was made here: the server leaves what is not its own

    asyncio.run(test())


LITTLE_ROOM = 40  # inodes: the run directory, its files, and a few records


def test_without_room_for_a_record_the_answer_is_503_before_the_handler(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o mode=0700,nr_inodes={LITTLE_ROOM} tmpfs {tmp_path}"
    namespace = ["unshare", "-Urm"]
    if subprocess.run([*namespace, "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here, even in a namespace of its own")

    async def test() -> None:
        wrap = [*namespace, "sh", "-c", f'{mount} && exec "$@"', "sh"]
        options = (*SESSION, "--start", "POST /start", "--run-dir", f"{tmp_path}/run", "--log-level", "debug")
        async with open_staged(*options, workers=2, wrap=wrap) as server, server.wires() as wires:
            owner, front = wires
            case = server.script(read_body(), *respond())
            started: list[str] = []
            while True:
                session = server.new_session()
                reply = await call(wires[owner], session, case, method="POST", path="/start", body=b"")
                if reply.status != 200:
                    break
                started.append(session)
            assert started
            assert len(started) < LITTLE_ROOM
            refused(server, reply, 503, "directory_unavailable")
            refused(
                server,
                await call(wires[front], session, case, method="POST", path="/start"),
                503,
                "directory_unavailable",
            )
            made = server.script(read_body(), *respond(headers=[(b"x-session", server.new_session().encode())]))
            refused(server, await call(wires[front], None, made), 500, "session_not_recorded")
            assert len(server.stage.performances(case)) == len(started)
            # Sessions that are there are served everywhere, and so is what has no session.
            for wire in wires.values():
                assert [(await call(wire, each)).status for each in started] == [200] * len(started)
                assert (await call(wire)).status == 200
            assert await server.server.stop() == 0
            assert not server.server.log.find("Traceback")

    asyncio.run(test())


def test_a_declared_start_over_the_limit_is_refused_before_its_handler_and_nothing_else_is() -> None:
    async def test() -> None:
        # Each connection stays where it was accepted: the other worker's has to be there to the end.
        limits = ("--max-sessions-per-worker", "2", "--start", "POST /start", "--end", "POST /end", "--no-handoff")
        async with open_staged(*SESSION, *limits, "--log-level", "debug", workers=2) as server, server.wires() as wires:
            owner, front = wires
            case = server.script(read_body(), *respond())

            async def post(pid: int, session: str, path: str = "/start") -> Reply:
                return await call(wires[pid], session, case, method="POST", path=path, body=b"{}")

            mine = [server.new_session(), server.new_session()]
            assert [(await post(owner, each)).status for each in mine] == [200, 200]
            refused(server, await post(owner, server.new_session()), 503, "session_limit")
            assert len(server.stage.performances(case)) == 2
            # The sessions there go on: requests, starts again, and closes, where they arrive and forwarded.
            for pid in wires:
                assert [(await post(pid, mine[0], path)).status for path in ("/step", "/start")] == [200, 200]
            # The other worker has room, also for what was refused.
            theirs = server.new_session()
            assert (await post(front, theirs)).status == 200
            assert (await post(owner, theirs, "/step")).status == 200
            assert (await post(front, mine[1], "/end")).status == 200

    asyncio.run(test())


def test_starts_under_way_count_towards_the_limit_and_ended_sessions_do_not() -> None:
    async def test() -> None:
        limits = ("--max-sessions-per-worker", "1", "--start", "POST /start", "--end", "POST /end")
        async with open_staged(*SESSION, *limits, workers=2) as server, server.wires() as wires:
            pid, wire = next(iter(wires.items()))
            made = [server.new_session() for _ in range(2)]
            slow, quick = (
                server.script(read_body(), note("in"), *more, *respond(headers=[(b"x-session", each.encode())]))
                for each, more in zip(made, ([wait("go")], []), strict=True)
            )
            start = {"method": "POST", "path": "/start", "body": b"{}"}
            async with server.connection(pid) as other:
                await wire.send(asked(None, slow, **start))  # type: ignore[arg-type]
                performance = await server.performance(slow)
                await performance.noted("in")
                refused(server, await call(other, None, quick, **start), 503, "session_limit")  # type: ignore[arg-type]
                performance.open("go")
                assert (await wire.reply("POST")).status == 200
                refused(server, await call(other, None, quick, **start), 503, "session_limit")  # type: ignore[arg-type]
                end = server.script(read_body(), *respond())
                assert (await call(other, made[0], end, method="POST", path="/end", body=b"")).status == 200
                assert (await call(other, None, quick, **start)).status == 200  # type: ignore[arg-type]
                # A late request for the ended one still finds its worker.
                assert (await call(wire, made[0], end, method="POST", path="/end", body=b"")).status == 200

    asyncio.run(test())


def test_with_the_mcp_preset_gone_is_404() -> None:
    async def test() -> None:
        async with open_staged("--preset", "mcp", "--log-level", "debug", workers=2) as server, server.wires() as wires:
            owner, front = wires
            made = server.new_session()
            case = server.script(read_body(), *respond(headers=[(b"mcp-session-id", made.encode())]))
            initialize = b'{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}'
            where = {"method": "POST", "path": "/mcp", "body": initialize}
            assert (await call(wires[owner], None, case, **where)).status == 200  # type: ignore[arg-type]
            later = server.script(read_body(), *respond())
            named = [("mcp-session-id", made)]
            assert (await call(wires[front], None, later, path="/mcp", headers=named)).status == 200
            await server.kill(owner)
            for method in ("GET", "POST", "DELETE"):
                began = time.monotonic()
                reply = await call(wires[front], None, later, method=method, path="/mcp", headers=named)
                quickly(began)
                assert (reply.status, reply.all(b"homing-error")) == (404, [b"session_gone"])
                assert CANARY.encode() not in reply.head + reply.body
            assert len(server.stage.performances(later)) == 1
            assert not server.server.log.find(CANARY)

    asyncio.run(test())


def test_no_id_breaks_or_colours_a_log_line(shared: Shared, killing: Staged) -> None:
    """Whatever an ID is, a line of homing's own holds its tag only."""

    async def test() -> None:
        case = killing.script(read_body(), *respond())
        ids = [
            "forged%0AINFO:     all is well",
            "forged%0D%0AERROR:    on fire",
            "forged%1B%5B31mred",
            "forged%00end",
            "forged-" + "x" * 990,
            "forged-" + "x" * 10_000,
        ]
        async with killing.wires() as wires:
            owner, *others = wires
            for each in ids:
                body = json.dumps({"session": unquote(each)}).encode()
                for pid in (owner, *others):
                    reply = await call(wires[pid], None, case, method="POST", path="/named", body=body)
                    assert reply.status == (400 if len(each) > 1024 else 200)
            await killing.kill(owner)
            for each in ids:
                body = json.dumps({"session": unquote(each)}).encode()
                for pid in others:
                    reply = await call(wires[pid], None, case, method="POST", path="/named", body=body)
                    assert reply.status == (400 if len(each) > 1024 else 410)
        await killing.replaced()
        assert len(killing.server.log.find("answered 410 session_gone")) >= len(others)
        assert not killing.server.log.find("forged|all is well|on fire|red$|\\x1b|x{50}")

    shared.run(test())


def test_no_log_line_of_any_of_this_holds_a_session_id(shared: Shared, killing: Staged, pausing: Staged) -> None:
    """After the tests above, at the lowest log level; and by itself for what a client can send."""

    async def test() -> None:
        case = killing.script(read_body(), *respond())
        async with killing.wires() as wires:
            first, second, _ = wires.values()
            session = await killing.start_session(first)
            assert (await call(second, session, case)).status == 200
            await call(second, f"{CANARY}-" + "x" * 1100, case)
            await call(second, None, case, method="POST", path="/named", body=f'{{"session": "{session}"}}'.encode())
            await call(second, None, case, path=f"/elsewhere?session={CANARY.upper()}")
        assert killing.server.log.find("answered 400 session_id_too_long")

    shared.run(test())
    for server in (killing, pausing):
        # At this level uvicorn's WebSocket library writes down every handshake, as it does without homing.
        leaks = [line for line in server.server.log.lines if CANARY in line and not line.startswith("DEBUG:    < ")]
        assert leaks == []
