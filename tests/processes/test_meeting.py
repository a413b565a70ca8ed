"""Servers that never meet: started by one shell, by one Python program, or in two PID namespaces, all else being equal.

Each pair of servers serves one app with the same settings and the same command line, finds the same place for its run
directory, and would take the other's sessions for its own if it looked there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.support.launchers import LAUNCHERS, free_port, launched, run_directory_base
from tests.support.raw import Address, connect, request
from tests.support.servers import LEFT_BEHIND, ROOT, STARTED, ServerProcess, children, descendants, run_process

APP = "tests.support.sticky_app:app"
ADDRESS = r"Uvicorn running on http://127\.0\.0\.1:(\d+)"

PROGRAM = f"""
import multiprocessing, signal, socket, sys
import uvicorn

def serve(*options):
    uvicorn.run("{APP}", port=0)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    # It has work of its own to do, for which it listens.
    with socket.create_server(("127.0.0.1", 0)):
        servers = [context.Process(target=serve) for _ in range(2)]
        signal.signal(signal.SIGTERM, lambda *_: [server.terminate() for server in servers])
        for server in servers:
            server.start()
        for server in servers:
            server.join()
"""

STARTS_ANOTHER = f"""
import json, subprocess, sys
from tests.support.sticky_app import app as routed

async def app(scope, receive, send):
    if scope.get("path") != "/start-another":
        return await routed(scope, receive, send)
    another = subprocess.Popen([sys.executable, "-m", "uvicorn", "{APP}", "--port", "0"])
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    await send({{"type": "http.response.body", "body": json.dumps(another.pid).encode()}})

app.homing_routed = True
"""


async def ask(address: Address, method: str, path: str) -> tuple[int, Any]:
    async with connect(address) as wire:
        await wire.send(request(method, path, body=b"" if method == "POST" else None))
        reply = await wire.reply(method)
        return reply.status, json.loads(reply.body)


async def see_that_they_never_meet(one: Address, two: Address) -> None:
    """A session of one server is unknown to the other, whichever of their workers is asked."""
    for here, there in ((one, two), (two, one)):
        _, made = await ask(here, "POST", "/sessions")
        for _ in range(8):
            assert (await ask(here, "GET", f"/sessions/{made['session']}"))[0] == 200
            assert (await ask(there, "GET", f"/sessions/{made['session']}"))[0] == 410


@asynccontextmanager
async def two_from(*argv: str, **env: str) -> AsyncIterator[tuple[Address, Address]]:
    """Two one-worker servers that one process has started."""
    async with run_process(argv, env={"HOMING_SESSION_SOCKET_DIR": None, **env}) as process:
        await process.log.until(STARTED, 2)
        one, two = (int(match[1]) for match in await process.log.until(ADDRESS, 2))
        yield ("127.0.0.1", one), ("127.0.0.1", two)
    assert not process.log.find(LEFT_BEHIND), process.log


def test_two_servers_that_one_shell_started_never_meet() -> None:
    async def test() -> None:
        command = f"{sys.executable} -m uvicorn {APP} --port 0"
        shell = f"{command} & one=$!; {command} & two=$!; trap 'kill $one $two' TERM; wait $one; wait $two"
        with run_directory_base() as base:
            async with two_from("sh", "-c", shell, XDG_RUNTIME_DIR=str(base)) as addresses:
                await see_that_they_never_meet(*addresses)
                assert len(list(base.glob("homing-*"))) == 2
            assert os.listdir(base) == []

    asyncio.run(test())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_two_servers_that_one_python_program_started_never_meet(method: str, tmp_path: Any) -> None:
    async def test() -> None:
        (tmp_path / "program.py").write_text(PROGRAM)
        with run_directory_base() as base:
            env = {"XDG_RUNTIME_DIR": str(base), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
            async with two_from(sys.executable, str(tmp_path / "program.py"), method, **env) as addresses:
                await see_that_they_never_meet(*addresses)
            assert os.listdir(base) == []

    asyncio.run(test())


@pytest.mark.parametrize("launcher", [pytest.param(each, marks=pytest.mark.long) for each in LAUNCHERS])
def test_two_servers_of_several_workers_that_one_shell_started_never_meet(launcher: str) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            base = stack.enter_context(run_directory_base())
            one, two = [
                await stack.enter_async_context(
                    launched(LAUNCHERS[launcher], APP, workers=2, env={"XDG_RUNTIME_DIR": str(base)})
                )
                for _ in range(2)
            ]
            await see_that_they_never_meet(one.address, two.address)

    asyncio.run(test())


@pytest.mark.parametrize("told", ["by homing run", "by the environment"])
def test_a_server_that_a_worker_of_another_has_started_never_meets_that(told: str, tmp_path: Any) -> None:
    async def test() -> None:
        (tmp_path / "outer.py").write_text(STARTS_ANOTHER)
        with run_directory_base() as base:
            given = None if told == "by homing run" else str(base / "of-the-outer")
            env = {"XDG_RUNTIME_DIR": str(base), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{tmp_path}"}
            argv = (sys.executable, "-m", "homing", "run", "outer:app", "--workers", "2", "--port", "0")
            async with run_process(argv, env={"HOMING_SESSION_SOCKET_DIR": given, **env}) as process:
                await process.log.until("all 2 workers are ready")
                outer = int((await process.log.until(ADDRESS))[0][1])
                _, another = await ask(("127.0.0.1", outer), "GET", "/start-another")
                try:
                    inner = int((await process.log.until(ADDRESS, 2))[1][1])
                    await process.log.until(STARTED, 3)
                    await see_that_they_never_meet(("127.0.0.1", outer), ("127.0.0.1", inner))
                finally:
                    os.kill(another, signal.SIGTERM)

    asyncio.run(test())


# --- PID namespaces ---


def _namespaces() -> list[str] | None:
    """The command that gives a PID namespace of its own, if this user may have one."""
    for rights in ([], ["--user", "--map-current-user"]):
        command = ["unshare", *rights, "--pid", "--fork"]
        if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode:
            return command
    return None


@asynccontextmanager
async def in_namespace(launcher: str, command: list[str], base: str, workers: int) -> AsyncIterator[ServerProcess]:
    """A server whose launcher is the first process of a PID namespace; `/proc` still shows the namespace outside."""
    made = LAUNCHERS[launcher]
    with contextlib.ExitStack() as stack:
        port = 0 if made.finds_a_port else stack.enter_context(free_port())
        words = {"workers": str(workers), "port": str(port), "bind": f"127.0.0.1:{port}"}
        argv = [*command, *(word.format_map(words) for word in made.command), APP]
        async with run_process(argv, env={"HOMING_SESSION_SOCKET_DIR": None, "XDG_RUNTIME_DIR": base}) as server:
            if made.finds_a_port:
                port = int((await server.log.until(made.address))[0][1])
            server.address = ("127.0.0.1", port)
            await server.log.until(made.started, workers)
            yield server
            for pid in children(server.pid):  # `unshare` itself passes no signal on
                os.kill(pid, signal.SIGTERM)
            await server.wait()
            assert not descendants(server.pid)


@pytest.mark.parametrize(
    "launcher",
    ["gunicorn", *(pytest.param(each, marks=pytest.mark.long) for each in ("uvicorn", "hypercorn", "granian"))],
)
def test_servers_in_two_pid_namespaces_never_meet_and_their_workers_do(launcher: str) -> None:
    command = _namespaces()
    if command is None:
        pytest.skip("this user may not make a PID namespace (unshare --pid): run the tests where it may")

    async def test() -> None:
        async with AsyncExitStack() as stack:
            base = stack.enter_context(run_directory_base())
            one, two = [
                await stack.enter_async_context(in_namespace(launcher, command, str(base), 2)) for _ in range(2)
            ]
            # Both launchers are process 1 of their namespace.
            assert len({path.name[:9] for path in base.glob("homing-1-*")}) == 1
            assert len(list(base.glob("homing-*"))) == 2
            await see_that_they_never_meet(one.address, two.address)

    asyncio.run(test())
