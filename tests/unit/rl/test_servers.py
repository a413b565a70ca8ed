"""RL servers in this process: what they let go of by themselves, whose middleware sees a request, and their secret."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from tests.support import rl_envs
from tests.support.lifespans import lifespan_of
from tests.support.rl_servers import CounterServer
from tests.support.seed_servers import ManualClock

from homing.errors import ConfigurationError
from homing.rl import GymnasiumServer, ResourcesServer, tool
from homing.rl.server import RlServer
from homing.routing import RoutingOptions
from homing.runtime.secret import SERVER_SECRET_ENV, make_server_secret, server_secret


@asynccontextmanager
async def client_of(server: RlServer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose lifespan runs around it."""
    transport = httpx.ASGITransport(app=server)
    async with lifespan_of(server), httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def shared_by_two(server: RlServer, directory: Path) -> None:
    os.chmod(directory, 0o700)
    server.use_routing_options(RoutingOptions(socket_dir=str(directory), workers=2))


NAMES = {"resources_session_id": "x" * 20, "episode_id": {"rollout_id": "r"}}
TASK = {"task_id": {"taskset": "t", "task_id": "1"}, "task_data": {}}


def test_an_environment_that_nobody_uses_is_closed() -> None:
    closed: list[str] = []

    class Noted(rl_envs.Count):
        def close(self) -> None:
            closed.append("closed")

    async def scenario() -> None:
        clock = ManualClock()
        server = GymnasiumServer(Noted, idle_seconds=60, clock=clock, threads=1)
        closed.clear()  # the one that was made to look at its spaces
        async with client_of(server) as client:
            await client.post("/reset")
            clock.advance(50)
            assert (await client.post("/step", json={"action": 1})).status_code == 200
            clock.advance(50)
            await server.sweep()
            assert closed == []
            clock.advance(20)
            await server.sweep()
            assert closed == ["closed"]
            assert (await client.post("/step", json={"action": 1})).status_code == 404

    run(scenario)


def test_state_whose_ownership_has_gone_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = CounterServer()
        shared_by_two(server, tmp_path)
        async with client_of(server) as client:
            assert (await client.post("/seed_session", json=NAMES | TASK)).status_code == 200
            await server.sweep()
            assert server.releases == 0
            router = server.router
            assert router.worker is not None
            router.lifetimes.forget(NAMES["resources_session_id"])  # type: ignore[attr-defined]
            router.worker.owners.release(str(NAMES["resources_session_id"]))
            await server.sweep()
            assert (server.releases, len(server.sessions)) == (1, 0)

    run(scenario)


def test_a_release_that_fails_after_a_verify_is_tried_again_and_the_verdict_stands() -> None:
    async def scenario() -> None:
        server = CounterServer()
        async with client_of(server) as client:
            await client.post("/seed_session", json={"fail_release": 2, "expected": 0})
            assert (await client.post("/verify")).json()["reward"] == 1.0
            assert (server.releases, len(server.sessions)) == (0, 0)
            await server.sweep()
            assert server.releases == 0
            await server.sweep()
            assert server.releases == 1

    run(scenario)


def test_what_is_open_is_released_as_the_server_stops() -> None:
    async def scenario() -> None:
        server = CounterServer()
        async with client_of(server) as client:
            await client.post("/seed_session", json={})
        assert server.releases == 1

    run(scenario)


def test_a_seed_whose_sandbox_cannot_be_reached_leaves_nothing_and_can_be_sent_again() -> None:
    class Sandboxed(CounterServer):
        broken = True

        async def sandbox_access(self, state: Any) -> dict[str, Any]:
            if self.broken:
                raise RuntimeError("the test wants this sandbox to be out of reach")
            return {"kind": "shell"}

    async def scenario() -> None:
        server = Sandboxed()
        async with client_of(server) as client:
            assert (await client.post("/seed_session", json=NAMES | TASK)).status_code == 500
            assert (server.releases, len(server.sessions)) == (1, 0)
            server.broken = False
            for _ in range(2):
                seeded = (await client.post("/seed_session", json=NAMES | TASK)).json()
                assert seeded["sandbox_access"] == {"kind": "shell"}
            assert (await client.post("/sandbox_access")).json() == {"kind": "shell"}
            assert (await client.post("/close_session", json=NAMES)).status_code == 200
        assert server.releases == 2

    run(scenario)


def test_a_middleware_of_the_subclass_sees_every_request() -> None:
    seen: list[str] = []

    class Watched(CounterServer):
        def add_routes(self, app: FastAPI) -> None:
            super().add_routes(app)

            @app.middleware("http")
            async def watch(request: Request, call_next: Any) -> Response:
                seen.append(request.url.path)
                answer: Response = await call_next(request)
                return answer

    async def scenario() -> None:
        async with client_of(Watched()) as client:
            await client.post("/seed_session", json={})
            assert (await client.post("/increment")).json()["count"] == 1
        assert seen == ["/seed_session", "/increment"]

    run(scenario)


def test_tools_that_cannot_work_are_refused_by_name() -> None:
    class Plain(ResourcesServer[None]):
        async def seed(self, seed: Any) -> None:
            return None

        async def verify(self, state: None, request: Any) -> float:
            return 0.0

    class Reserved(Plain):
        @tool(name="verify")
        async def check(self, state: None) -> None: ...

    class NotAsync(Plain):
        @tool  # type: ignore[type-var]  # what is tested
        def look(self, state: None) -> int:
            return 1

    class Unannotated(Plain):
        @tool
        async def move(self, state: None, to) -> None: ...  # type: ignore[no-untyped-def]  # what is tested

    class Stateless(Plain):
        @tool
        async def move(self) -> None: ...

    class Twice(Plain):
        @tool
        async def move(self, state: None) -> None: ...

        @tool(name="move")
        async def go(self, state: None) -> None: ...

    for made, message in (
        (Reserved, "verify .* is a route of the server"),
        (NotAsync, "look .* is not async"),
        (Unannotated, "annotate to"),
        (Stateless, "takes no state"),
        (Twice, "two tools named move"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            made()


def test_settings_that_cannot_work_are_refused() -> None:
    for settings in ({"close_retry_window_seconds": 0}, {"close_retry_window_seconds": float("inf")}, {"secret": ""}):
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            CounterServer(**settings)
    for settings in ({"threads": 0}, {"idle_seconds": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(settings))):
            GymnasiumServer("CartPole-v1", **settings)
    with pytest.raises(ConfigurationError, match="cannot make the environment NoSuch-v0: "):
        GymnasiumServer("NoSuch-v0")


def test_workers_without_a_supervisor_agree_on_one_secret_that_only_they_can_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SERVER_SECRET_ENV, raising=False)
    monkeypatch.setattr("homing.runtime.secret._kept", None)  # of whatever this process has served before
    with tempfile.TemporaryDirectory() as directory:
        found = {server_secret(directory) for _ in range(5)}
        assert len(found) == 1
        assert len(found.pop()) >= 32
        (file,) = Path(directory).iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert server_secret(None) != server_secret(None)
    monkeypatch.setenv(SERVER_SECRET_ENV, "given" * 8)
    make_server_secret()
    assert server_secret(None) == "given" * 8
