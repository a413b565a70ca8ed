"""`homing.sticky` under the real launchers of ASGI workers: their workers meet, however each was started, and stop in order.

Each launcher is its own command, with its own way to replace, add, recycle and stop workers. The app has one line of homing
in it, and the environment none.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.launchers import (
    GUNICORN,
    HYPERCORN,
    LAUNCHERS,
    Launcher,
    gunicorn_with,
    launched,
    run_directory_base,
    worker_ids,
)
from tests.support.raw import WebSocketWire, Wire, request
from tests.support.servers import ServerProcess, run_process
from tests.support.watching import until_there
from tests.support.workers import connections

APP = "tests.support.sticky_app:app"
WORKERS = 2


async def ask(wire: Wire, method: str, path: str, status: int = 200) -> Any:
    await wire.send(request(method, path, body=b"" if method == "POST" else None))
    reply = await wire.reply(method)
    assert reply.status == status, reply
    return json.loads(reply.body)


class Server:
    """A server of one launcher, with its run directory."""

    def __init__(self, launcher: Launcher, process: ServerProcess, base: Path) -> None:
        self.launcher = launcher
        self.process = process
        self.base = base
        self.started = WORKERS

    @property
    def directory(self) -> Path:
        (found,) = self.base.glob("homing-*")
        return found

    async def until_started(self, more: int) -> None:
        self.started += more
        await self.process.log.until(self.launcher.started, self.started)

    async def meet(self, workers: int = WORKERS) -> dict[int, str]:
        """See that all workers find the sessions of all; returns a session of each, by process ID."""
        async with connections(self.process.address, workers) as wires:
            sessions = {pid: (await ask(wire, "POST", "/sessions"))["session"] for pid, wire in wires.items()}
            for pid, session in sessions.items():
                owner = (await ask(wires[pid], "GET", f"/sessions/{session}"))["worker"]
                for wire in wires.values():
                    assert (await ask(wire, "GET", f"/sessions/{session}"))["worker"] == owner
            return sessions

    async def gone(self, sessions: list[str], workers: int = WORKERS) -> None:
        async with connections(self.process.address, workers) as wires:
            for wire in wires.values():
                for session in sessions:
                    assert (await ask(wire, "GET", f"/sessions/{session}", 410))["error"]["code"] == "session_gone"


@asynccontextmanager
async def served(launcher: Launcher, *options: str, clean: bool = True) -> AsyncIterator[Server]:
    with run_directory_base() as base:
        env = {"XDG_RUNTIME_DIR": str(base)}
        async with launched(launcher, APP, *options, workers=WORKERS, env=env, clean=clean) as process:
            yield Server(launcher, process, base)


async def ended(pid: int) -> None:
    """Wait until a process that is not ours to reap has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    seen = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, seen.set)
    try:
        async with asyncio.timeout(20):
            await seen.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


# --- requests ---


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_workers_meet_and_forward_whatever_the_app_serves(launcher: str) -> None:
    async def test() -> None:
        async with served(LAUNCHERS[launcher]) as server:
            await server.meet()
            async with connections(server.process.address, WORKERS) as wires:
                one, two = wires.values()
                session = (await ask(one, "POST", "/sessions"))["session"]
                body = bytes(range(256)) * 2000
                for wire in (one, two):
                    await wire.send(request("POST", f"/sessions/{session}/echo", body=body))
                    reply = await wire.reply("POST")
                    assert (reply.status, reply.body, reply.complete) == (200, body, True)
                    head = await ask_head(wire, f"/sessions/{session}/echo")
                    assert head == 405
                for number, wire in enumerate((one, two), 1):
                    talk = WebSocketWire(wire)
                    assert (await talk.open(f"/sessions/{session}/talk")).status == 101
                    await talk.send_text("hello")
                    assert (await talk.frame()).data == f"hello {number}".encode()
            await stops_in_order(server)

    asyncio.run(test())


VARIANTS = {
    "app made before the fork": (GUNICORN, "--preload"),
    "processes renamed by the launcher": (GUNICORN, "--name", "shop"),
    "gunicorn's own worker": (gunicorn_with("gunicorn asgi", "asgi", started=r"ASGI server listening"),),
    "uvicorn's own worker class": (gunicorn_with("gunicorn uvicorn.workers", "uvicorn.workers.UvicornWorker"),),
    "a socket for each worker": (
        gunicorn_with("gunicorn reuse-port", "uvicorn_worker.UvicornWorker", finds_a_port=False),
        "--reuse-port",
    ),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.long
def test_workers_meet_under_each_way_to_run_gunicorn(variant: str) -> None:
    async def test() -> None:
        launcher, *options = VARIANTS[variant]
        async with served(launcher, *options, clean=False) as server:
            await server.meet()

    asyncio.run(test())


async def ask_head(wire: Wire, path: str) -> int:
    await wire.send(request("HEAD", path))
    return (await wire.reply("HEAD")).status


async def stops_in_order(server: Server) -> None:
    """A request that another worker forwarded is still answered when the server is told to stop."""
    async with connections(server.process.address, WORKERS) as wires:
        owner, front = wires.values()
        made = await ask(owner, "POST", "/sessions")
        owner.close()  # so it has nothing of its own to wait for
        fifo = server.base / "fifo"
        os.mkfifo(fifo)
        await front.send(request("GET", f"/sessions/{made['session']}/pipe?path={fifo}"))
        writing = await asyncio.to_thread(open, fifo, "w")  # once the handler reads
        server.process.signal(signal.SIGTERM)
        # The owner has been told, and would close now if nobody had sent it anything.
        await until_there(server.directory / f"{made['worker']}.drained")
        assert made["worker"] in worker_ids(server.directory)
        with writing:
            writing.write("answered")
        reply = await front.reply()
        assert (reply.status, reply.body, reply.complete) == (200, b"answered", True)
    assert await server.process.wait(timeout_seconds=20) in server.launcher.exit_codes
    assert worker_ids(server.directory) == set(), server.process.log


def test_an_event_loop_that_is_not_asyncios_is_refused_with_a_line() -> None:
    async def test() -> None:
        argv = [*HYPERCORN.command[:1], "-k", "trio", "-b", "127.0.0.1:0", APP]
        async with run_process(argv, env={"HOMING_SESSION_SOCKET_DIR": None}) as process:
            await process.log.until("homing: an asyncio event loop is needed, and this server runs the app on another")
            await process.wait()

    asyncio.run(test())


# --- workers that come and go ---

RESPAWNS = {"gunicorn": (), "granian": ("--respawn-failed-workers",)}


@pytest.mark.parametrize("launcher", list(RESPAWNS))
def test_the_replacement_of_a_killed_worker_meets_the_survivors_whose_sessions_live_on(launcher: str) -> None:
    async def test() -> None:
        async with served(LAUNCHERS[launcher], *RESPAWNS[launcher], clean=False) as server:
            sessions = await server.meet()
            killed, survivor = sessions
            os.kill(killed, signal.SIGKILL)
            await ended(killed)
            async with AsyncExitStack() as stack:
                wires = await stack.enter_async_context(connections(server.process.address, 1))
                await ask(wires[survivor], "GET", f"/sessions/{sessions[killed]}", 410)
            await server.until_started(1)
            assert set(await server.meet()) > {survivor}
            await server.gone([sessions[killed]])
            async with connections(server.process.address, WORKERS) as wires:
                for wire in wires.values():
                    await ask(wire, "GET", f"/sessions/{sessions[survivor]}")

    asyncio.run(test())


# What uvicorn does is slow (it looks every half second), and `homing run` shows much of it: `test_run_lifecycle.py`.
SLOW = pytest.param("uvicorn", marks=pytest.mark.long)
OPTIONS = {"granian": ("--respawn-interval", "0.1")}


@pytest.mark.parametrize("launcher", [SLOW, "gunicorn", "hypercorn", "granian"])
def test_after_a_reload_the_new_workers_meet_and_the_sessions_of_the_old_are_gone(launcher: str) -> None:
    async def test() -> None:
        async with served(LAUNCHERS[launcher], *OPTIONS.get(launcher, ())) as server:
            sessions = await server.meet()
            directory = server.directory
            if launcher == "hypercorn":
                # Its workers ignore Ctrl-C, which is its own to act on: none of them counts as stopping.
                for pid in sessions:
                    os.kill(pid, signal.SIGINT)
                await server.meet()
                assert not list(directory.glob("*.stopping"))
            server.process.signal(signal.SIGHUP)
            await server.until_started(WORKERS)
            for pid in sessions:
                await ended(pid)
            await server.gone(list(sessions.values()))
            assert not sessions.keys() & (await server.meet()).keys()
            assert server.directory == directory
            if launcher in ("uvicorn", "gunicorn"):
                server.process.signal(signal.SIGTTIN)
                await server.until_started(1)
                assert len(await server.meet(WORKERS + 1)) == WORKERS + 1
                server.process.signal(signal.SIGTTOU)

    asyncio.run(test())


RECYCLING = {"uvicorn": "--limit-max-requests", "gunicorn": "--max-requests", "hypercorn": "--max-requests"}


@pytest.mark.parametrize("launcher", [SLOW, "gunicorn", "hypercorn"])
def test_a_recycled_worker_is_replaced_by_one_that_meets_the_others(launcher: str) -> None:
    async def test() -> None:
        limit = 60  # more than it takes to find a connection to each worker, twice
        options = RECYCLING[launcher], str(limit)
        async with served(LAUNCHERS[launcher], *options, clean=False) as server, AsyncExitStack() as stack:
            wires = await stack.enter_async_context(connections(server.process.address, WORKERS))
            (recycled, worn), (_, other) = wires.items()
            lost, kept = [(await ask(wire, "POST", "/sessions"))["session"] for wire in (worn, other)]
            for _ in range(limit * 2):
                await worn.send(request("GET", "/"))
                reply = await worn.reply()
                if not reply.complete or not reply.keeps_alive or worn.end != "open":
                    break
            worn.close()
            await ended(recycled)
            assert (await ask(other, "GET", f"/sessions/{lost}", 410))["error"]["code"] == "session_gone"
            await server.until_started(1)
            new = await stack.enter_async_context(connections(server.process.address, 2))
            assert new.keys() - wires.keys()
            for wire in new.values():
                await ask(wire, "GET", f"/sessions/{kept}")

    asyncio.run(test())
