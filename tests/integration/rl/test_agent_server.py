"""An agent server in this process: cookies that outlive their sessions, what a stop of the server leaves, and the check."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from itsdangerous import TimestampSigner
from tests.support.rl_agents import EchoAgent
from tests.support.seed_servers import ManualClock
from tests.support.servers import serving

from homing.rl import AgentSession
from homing.rl.agents.checks import names
from homing.rl.calls import Answer, Caller
from homing.rl.testing import check_agent_server
from homing.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio

WINDOW = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """A caller with cookies of its own, in a thread so that the server's loop goes on."""

    def __init__(self, url: str) -> None:
        self.caller = Caller(url)

    async def post(self, path: str, content: Any = None, **settings: Any) -> Answer:
        return await asyncio.to_thread(self.caller.post, path, content, **settings)


@asynccontextmanager
async def served(agent: Any) -> AsyncIterator[str]:
    async with serving(agent, lifespan="on") as (host, port):
        yield f"http://{host}:{port}"


def seed_body(task_id: str = "1") -> tuple[dict[str, Any], dict[str, Any]]:
    session = names()
    return session, session | {"task_id": {"taskset": "test", "task_id": task_id}}


async def test_a_cookie_that_outlives_its_session_begins_nothing_new() -> None:
    clock = ManualClock()
    async with served(EchoAgent(clock=clock, close_retry_window_seconds=WINDOW)) as url:
        client, (session, body) = Client(url), seed_body()
        assert (await client.post("/v1/agent_sessions", body)).status == 200
        assert (await client.post("/v1/agent_sessions/close", session)).status == 200
        clock.advance(WINDOW + 1)
        for path, late in {
            "/v1/agent_sessions": body,
            "/v1/agent_sessions/close": session,
            "/v1/responses": {"input": "hello"},
        }.items():
            refused = await client.post(path, late)
            assert (refused.status, refused.code) == (409, "session_conflict"), path
        # Without the cookie nobody says that it was ever open, and its fence has passed.
        assert (await Client(url).post("/v1/agent_sessions", body)).status == 200
        assert (await Client(url).post("/v1/agent_sessions/close", session)).status == 200


@pytest.mark.parametrize("marker", [5, "", None, ["a"]])
async def test_a_cookie_that_names_no_session_that_can_be_read_is_refused(marker: Any) -> None:
    agent = EchoAgent(secret="known")
    async with served(agent) as url:
        client, (session, body) = Client(url), seed_body()
        content = base64.b64encode(json.dumps({"agent_session_id": marker}).encode())
        client.caller.cookies[agent.cookie_name] = TimestampSigner("known").sign(content).decode()
        for path, sent in {
            "/v1/agent_sessions": body,
            "/v1/agent_sessions/close": session,
            "/v1/responses": {"input": "hello"},
        }.items():
            assert (await client.post(path, sent, cookies=True)).status == 409, path
        assert agent.open_sessions() == []


async def test_what_is_open_when_the_server_stops_is_cleaned_up() -> None:
    agent = EchoAgent()
    async with served(agent) as url:
        for task_id in ("1", "stays"):
            assert (await Client(url).post("/v1/agent_sessions", seed_body(task_id)[1])).status == 200
        assert len(agent.open_sessions()) == 2
    assert agent.open_sessions() == []


async def test_a_body_over_the_limit_is_refused() -> None:
    async with served(EchoAgent(max_body_bytes=2000)) as url:
        for path in ("/v1/responses", "/run", "/rollouts/r/stop", "/aggregate_metrics"):
            assert (await Client(url).post(path, {"input": "x" * 3000})).status == 413, path
        assert (await Client(url).post("/v1/responses", {"input": "hello"})).status == 200


async def test_an_agent_without_a_resources_server_runs_nothing() -> None:
    async with served(EchoAgent()) as url:
        refused = await Client(url).post("/run", {"responses_create_params": {"input": "hello"}})
        assert (refused.status, refused.code) == (404, "not_found")


async def test_the_stop_route_is_described_with_its_parameter() -> None:
    described = EchoAgent().app.openapi()["paths"]["/rollouts/{rollout_id}/stop"]["post"]
    assert [(each["name"], each["in"]) for each in described["parameters"]] == [("rollout_id", "path")]


async def say_yes(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers everything with the same."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    headers = [(b"content-type", b"application/json"), (b"set-cookie", b"a=b")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"tool_transports": [], "agent_session_id": ""}'})


class Forgetful(EchoAgent):
    """Forgets a session as soon as it is closed."""

    def __init__(self) -> None:
        super().__init__(close_retry_window_seconds=1e-9)


class Dropped(list[Any]):
    """Keeps nothing."""

    def append(self, item: Any) -> None:
        pass


class Repeating(EchoAgent):
    """Runs an activation again that it has completed."""

    async def set_up(self, session: AgentSession) -> None:
        session.responses = Dropped()
        await super().set_up(session)


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        (say_yes, "repeats agent_session_id"),
        (Forgetful(), "it again is answered 200, not 409"),
        (Repeating(), "answered again, and not run again"),
    ],
)
async def test_the_check_finds_a_server_that_does_not_keep_the_contract(agent: Any, says: str) -> None:
    async with served(agent) as url:
        with pytest.raises(AssertionError, match=says):
            await asyncio.to_thread(check_agent_server, url, responses={"input": "hello"})
