"""Apps whose lifespan is not like Starlette's: a server serves them, so homing does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.launchers import LAUNCHERS, launched
from tests.support.raw import connect, request
from tests.support.servers import homing_run, serve_workers, serving
from tests.support.staged import call
from tests.support.workers import connections

import homing


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_an_app_whose_lifespan_ends_once_it_has_started_is_served_until_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("HOMING_SESSION_SOCKET_DIR", str(run))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            if end == "raises":
                raise RuntimeError("the test wants this")
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def test() -> None:
        routed = homing.sticky(app, sessions=[homing.header("x-session")])
        async with serving(routed) as address, connect(address) as wire:
            for _ in range(3):
                await wire.send(request("GET", "/", [("x-session", "one")]))
                assert (await wire.reply()).status == 200
            assert [name for name in os.listdir(run) if name.endswith(".sock")] == [f"{routed.worker_id}.sock"]
        assert routed.worker is None
        assert not [name for name in os.listdir(run) if name.endswith(".sock")]

    asyncio.run(test())


@pytest.mark.parametrize("app", ["plain", "reads_first", "hides_errors", "double"])
@pytest.mark.parametrize("launcher", ["homing run", *LAUNCHERS])
def test_an_app_that_takes_every_scope_for_a_request_is_served_as_without_homing(launcher: str, app: str) -> None:
    """Its server refuses what it sends in its lifespan, and serves it as one that has none."""

    async def test() -> None:
        name = "tests.support.typeless_app:"
        if launcher == "homing run":
            argv = homing_run(f"{name}{app}", "--workers", "2", "--session", "header:x-session")
            server = serve_workers(argv, workers=2)
        else:
            server = launched(LAUNCHERS[launcher], f"{name}routed_{app}", workers=2)
        async with server as process, connections(process.address, 2) as wires:
            one, two = [(await call(wire, "one")).body for wire in wires.values()]
            assert one == two
            assert one.startswith(b"worker ")

    asyncio.run(test())


def test_a_second_answer_of_a_lifespan_goes_to_the_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers take it (hypercorn): there is one worker, and it has not failed to start."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("HOMING_SESSION_SOCKET_DIR", str(run))
    answered: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for kind in ("startup", "startup", "shutdown"):
            if len(answered) != 1:
                assert (await receive())["type"] == f"lifespan.{kind}"
            await send({"type": f"lifespan.{kind}.complete"})

    async def test() -> None:
        routed = homing.sticky(app, sessions=[homing.header("x-session")])
        events = iter(["lifespan.startup", "lifespan.shutdown"])

        async def receive() -> Any:
            return {"type": next(events)}

        async def send(message: Any) -> None:
            answered.append(message["type"])

        await routed({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        assert answered == ["lifespan.startup.complete", "lifespan.startup.complete", "lifespan.shutdown.complete"]

    asyncio.run(test())
