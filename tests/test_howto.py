"""The how-to pages of servers in front of homing and launchers under it: their configurations and commands are run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.launchers import LAUNCHERS, free_port
from tests.support.proxies import haproxy, nginx
from tests.support.raw import Address, Reply, WebSocketWire, connect, request
from tests.support.servers import ROOT, ServerProcess, children, run_process
from tests.support.workers import connections

HOWTO = ROOT / "docs" / "howto"
FRONTED = ROOT / "tests" / "support" / "fronted_app.py"
PROXIES: dict[str, Callable[..., Any]] = {"nginx": nginx, "haproxy": haproxy}
WORKERS = 2


def block(page: str, language: str) -> str:
    """The only block of this language on a page."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", (HOWTO / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


@asynccontextmanager
async def homing_of(page: str) -> AsyncIterator[ServerProcess]:
    """The server that a page starts, on a port of its own and with two workers; its app is `fronted_app`."""
    words = shlex.split(block(page, "sh"))
    assert words[:3] == ["homing", "run", "my_server:app"]
    words[words.index("--workers") + 1] = str(WORKERS)
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(FRONTED, f"{directory}/my_server.py")
        argv = [sys.executable, "-m", "homing", *words[1:], "--port", "0"]
        async with run_process(argv, cwd=directory, env={"HOMING_SESSION_SOCKET_DIR": None}) as server:
            (match, *_) = await server.log.until(r"Uvicorn running on http://[\d.]+:(\d+)")
            server.address = ("127.0.0.1", int(match[1]))
            await server.log.until("all 2 workers are ready")
            yield server


async def once(address: Address, method: str, path: str, session: str | None = None) -> Reply:
    """One request on a connection of its own."""
    headers = [] if session is None else [("x-session", session)]
    async with connect(address) as wire:
        await wire.send(request(method, path, headers, b"" if method == "POST" else None))
        return await wire.reply(method)


async def step(address: Address, session: str) -> Any:
    reply = await once(address, "GET", "/step", session)
    assert reply.status == 200, reply
    return json.loads(reply.body)


# --- one machine ---


@pytest.mark.parametrize("proxy", list(PROXIES))
def test_behind_a_proxy_sessions_stay_together_and_everything_passes(proxy: str) -> None:
    page = f"{proxy}.md"

    async def test() -> None:
        async with homing_of(page) as server, PROXIES[proxy](block(page, proxy), {8000: server.address[1]}) as front:
            public, workers = front.address, set()
            async with AsyncExitStack() as streams:
                for number in range(40):
                    session = "one" if not number else f"session {number}"
                    seen = [await step(public, session) for _ in range(4)]
                    assert [each["count"] for each in seen] == [1, 2, 3, 4]
                    assert len({each["worker"] for each in seen}) == 1
                    assert {(each["client"], each["scheme"]) for each in seen} == {("127.0.0.1", "http")}
                    workers.add(seen[0]["worker"])
                    if len(workers) == WORKERS:
                        break
                    # A proxy takes the connection again that it has; while this stream lasts, it needs another.
                    stream = await streams.enter_async_context(connect(public))
                    await stream.send(request("GET", "/events", [("x-session", session)]))
                    await stream.until(b"data: begun")
            assert len(workers) == WORKERS
            # An event leaves when the app sends it: the second is sent once the first is here.
            async with connect(public) as wire:
                await wire.send(request("GET", "/events", [("x-session", "one")]))
                await wire.until(b"data: begun")
                assert (await once(public, "POST", "/go", "one")).status == 204
                await wire.until(b"data: gone on")
            async with connect(public) as wire:
                talk = WebSocketWire(wire)
                assert (await talk.open("/talk", [("x-session", "one")])).status == 101
                await talk.send_text("hello")
                assert (await talk.frame()).data == b"hello 5"
            # A worker that dies: what homing says passes as it is.
            owner = (await step(public, "one"))["worker"]
            os.kill(owner, signal.SIGKILL)
            await server.log.until(rf"worker \[{owner}\] exited")
            reply = await once(public, "GET", "/step", "one")
            assert (reply.status, reply.one(b"homing-error")) == (410, b"session_gone")

    asyncio.run(test())


# --- several machines ---

MACHINES = "several-machines.md"


@asynccontextmanager
async def two_machines() -> AsyncIterator[tuple[ServerProcess, ServerProcess]]:
    async with AsyncExitStack() as stack:
        one, two = await asyncio.gather(*(stack.enter_async_context(homing_of(MACHINES)) for _ in range(2)))
        yield one, two


@pytest.mark.parametrize("proxy", list(PROXIES))
def test_several_machines_keep_each_session_at_its_machine_and_its_worker(proxy: str) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            one, two = machines = await stack.enter_async_context(two_machines())
            ports = {8001: one.address[1], 8002: two.address[1]}
            front = await stack.enter_async_context(PROXIES[proxy](block(MACHINES, proxy), ports))
            public = front.address
            # nginx hashes what clients choose, HAProxy learns what the app makes.
            chosen = [f"session {number}" if proxy == "nginx" else None for number in range(32)]
            made = [await once(public, "POST", "/sessions", each) for each in chosen]
            sessions = [json.loads(reply.body)["session"] for reply in made]
            homes: dict[str, int] = {}
            for count in (1, 2, 3):
                for session in sessions:
                    seen = await step(public, session)
                    assert seen["count"] == count
                    assert homes.setdefault(session, seen["worker"]) == seen["worker"]
            assert set(homes.values()) <= {pid for machine in machines for pid in children(machine.pid)}
            at_one = [session for session in sessions if homes[session] in children(one.pid)]
            assert 0 < len(at_one) < len(sessions)
            # A session that nobody began, wherever it lands.
            assert (await once(public, "GET", "/step", "never begun")).status == 410
            if proxy == "haproxy":
                await one.stop()
                # Until HAProxy has seen that the machine is down, it answers 503 by itself.
                await front.log.until("Server machines/one is DOWN")
                for session in at_one:
                    assert (await once(public, "GET", "/step", session)).status == 410
                for session in set(sessions) - set(at_one):
                    assert (await step(public, session))["count"] == 4

    asyncio.run(test())


# --- launchers ---


@pytest.mark.parametrize("page", ["gunicorn.md", "hypercorn.md", "granian.md"])
def test_the_one_line_and_the_command_of_a_launchers_page_keep_sessions_together(page: str) -> None:
    async def test() -> None:
        words = shlex.split(block(page, "sh"))
        launcher = LAUNCHERS[words[0]]
        words[words.index("--workers") + 1] = str(WORKERS)
        with free_port() as held, tempfile.TemporaryDirectory() as directory:
            port = 0 if launcher.finds_a_port else held
            words = [re.sub(r"\b8000$", str(port), word) for word in words]
            source = FRONTED.read_text() + block(page, "python")
            Path(directory, "my_server.py").write_text(source)
            argv = [str(Path(sys.executable).parent / words[0]), *words[1:]]
            env = {"HOMING_SESSION_SOCKET_DIR": None, "PYTHONPATH": directory}
            async with run_process(argv, cwd=directory, env=env) as server:
                if launcher.finds_a_port:
                    port = int((await server.log.until(launcher.address))[0][1])
                await server.log.until(launcher.started, WORKERS)
                async with connections(("127.0.0.1", port), WORKERS) as wires:
                    for pid, first in wires.items():
                        for count, wire in enumerate((first, *wires.values()), 1):
                            await wire.send(request("GET", "/step", [("x-session", f"begun at {pid}")]))
                            seen = json.loads((await wire.reply()).body)
                            assert (seen["count"], seen["worker"]) == (count, pid)

    asyncio.run(test())
