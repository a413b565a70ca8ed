"""Episodes in this process: their order, what is closed, and what is said when something goes wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.support.episode_world import episode, episode_world
from tests.support.rl_agents import EchoAgent, SandboxedAgent, said
from tests.support.seed_servers import ManualClock

from homing.errors import ConfigurationError
from homing.rl import EnvironmentServer
from homing.rl.outgoing import CallError
from homing.types import Message, Receive, Scope, Send

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def failure_of(reply: dict[str, Any]) -> tuple[str, str, bool]:
    """Kind, stage, and whether it is terminal; there is no result beside it."""
    assert reply["result"] is None
    found = reply["failure"]
    return found["failure_kind"], found["stage"], found["terminal"]


async def test_the_order_of_an_episode_and_its_prefix() -> None:
    async with episode_world() as world:
        reply = await world.run(attempt=2)
        assert reply["result"]["reward"] == 1.0
        assert reply["failure"] is None
        assert reply["episode_id"] == {"rollout_id": "r", "attempt": 2}
        assert reply["task_id"] == {"taskset": "test", "task_id": "1"}
        assert world.calls == [
            "resources /ng-rollout/r-a2/seed_session",
            "agent /ng-rollout/r-a2/v1/agent_sessions",
            "agent /ng-rollout/r-a2/v1/responses",
            "agent /ng-rollout/r-a2/v1/agent_sessions/close",
            "resources /ng-rollout/r-a2/verify",
            "resources /ng-rollout/r-a2/close_session",
        ]
        assert world.open_sessions() == 0


async def test_where_tokens_are_captured_activations_say_so_in_their_path() -> None:
    async with episode_world(training_token_capture=True) as world:
        assert (await world.run())["result"]["reward"] == 1.0
        assert "agent /ng-rollout/r/training-token-capture/v1/responses" in world.calls


FAULTS: list[tuple[str, dict[str, Any], str, str, bool]] = [
    ("hello", {"reject": True}, "seed_rejected", "seed", True),
    ("hello", {"task_id": "reject"}, "seed_rejected", "seed", True),
    ("hello", {"task_id": "unavailable"}, "server_unavailable", "seed", False),
    ("hello", {"task_id": "broken"}, "server_error", "seed", False),
    ("lost", {}, "session_lost", "agent", False),
    ("bug", {}, "server_error", "agent", False),
    ("hello", {"responses_create_params": 5}, "invalid_task", "agent", True),
    ("hello", {"task_id": "stays"}, "server_unavailable", "cleanup", False),
    ("hello", {"broken_verify": True}, "server_error", "verification", False),
]


async def test_what_goes_wrong_is_said_as_data_and_everything_is_closed() -> None:
    async with episode_world() as world:
        for number, (asked, task, *expected) in enumerate(FAULTS):
            reply = await world.run(asked, rollout=f"r{number}", **task)
            assert [*failure_of(reply)] == expected, (asked, task, reply)
            assert world.open_sessions() == 0
            # Each close was registered before its seed, so it is sent even where the seed failed.
            assert world.calls[-1] == f"resources /ng-rollout/r{number}/close_session"
            if f"agent /ng-rollout/r{number}/v1/agent_sessions" in world.calls:
                assert f"agent /ng-rollout/r{number}/v1/agent_sessions/close" in world.calls


async def test_a_close_that_fails_does_not_take_the_verdict_and_a_masked_verdict_is_a_result() -> None:
    async with episode_world() as world:
        reply = await world.run(stays=2)
        assert reply["result"]["reward"] == 1.0
        assert world.calls.count("resources /ng-rollout/r/close_session") == 2  # one more try, and no more
        reply = await world.run(mask=True, rollout="masked")
        assert reply["result"]["mask_sample"] is True
        assert reply["result"]["failure_kind"] == "judge_unreachable"


async def test_a_close_whose_reply_was_lost_and_whose_receipt_has_expired_is_a_close() -> None:
    clock = ManualClock()
    agent = EchoAgent(name="echo", clock=clock, close_retry_window_seconds=1.0)
    closes = 0

    async def lose_the_first_receipt(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal closes
        if scope["type"] != "http" or not scope["path"].endswith("/close"):
            await agent(scope, receive, send)
            return
        closes += 1
        if closes > 1:
            await agent(scope, receive, send)
            return
        await agent(scope, receive, _drop)
        clock.advance(2.0)
        raise RuntimeError("the test wants this reply to be lost")

    async with episode_world(agent=lose_the_first_receipt) as world:
        reply = await world.run()
        assert reply["result"]["reward"] == 1.0, reply
    assert (closes, agent.open_sessions()) == (2, [])


async def _drop(message: Message) -> None:
    pass


async def test_an_agent_at_its_deadline_is_stopped_and_what_it_has_is_verified() -> None:
    async with episode_world(agent_timeout_seconds=2.0) as world:
        reply = await world.run("wait")
        response = reply["result"]["response"]
        assert (reply["result"]["reward"], response["incomplete_details"]) == (1.0, {"reason": "deadline"})
        assert "agent /ng-rollout/r/rollouts/r/stop" in world.calls


async def test_an_agent_that_does_not_stop_is_cut_off_and_what_it_had_is_verified() -> None:
    async with episode_world(agent_timeout_seconds=2.0, stop_grace_seconds=0.1) as world:
        reply = await world.run("hang /dev/null")
        response = reply["result"]["response"]
        assert (reply["result"]["reward"], response["status"]) == (1.0, "incomplete")
        assert "hang" in json.dumps(response["output"])
        assert world.open_sessions() == 0


async def test_an_episode_that_takes_too_long_is_a_failure_and_not_a_verdict() -> None:
    async with episode_world(default_episode_timeout_seconds=3.0) as world:
        assert failure_of(await world.run("hang /dev/null")) == ("episode_timeout", "agent", False)
        assert world.open_sessions() == 0


async def test_an_episode_whose_caller_left_closes_what_it_opened_last_first() -> None:
    async with episode_world() as world:
        asking = asyncio.create_task(world.run("hang /dev/null"))
        await world.until("agent /ng-rollout/r/v1/responses")
        asking.cancel()
        await asyncio.wait({asking})
        await world.until("resources /ng-rollout/r/close_session")
        assert world.calls[-2:] == [
            "agent /ng-rollout/r/v1/agent_sessions/close",
            "resources /ng-rollout/r/close_session",
        ]
    # The servers have stopped, so the closes were answered.
    assert world.open_sessions() == 0


async def test_servers_that_do_not_answer_are_a_fault_of_the_moment() -> None:
    # Port 9 discards, where anything listens there at all.
    async with episode_world(agent_url="http://127.0.0.1:9") as world:
        assert failure_of(await world.run()) == ("connection_error", "seed", False)
        assert world.open_sessions() == 0
    async with episode_world(resources_url="http://127.0.0.1:9") as world:
        assert failure_of(await world.run()) == ("connection_error", "seed", False)


async def answer_an_empty_object(scope: Scope, receive: Receive, send: Send) -> None:
    """Agrees to everything, and does nothing of it."""
    if scope["type"] != "http":
        raise RuntimeError("no lifespan")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def test_a_server_that_does_not_keep_to_the_protocol_is_said_to_be_wrong() -> None:
    async with episode_world(agent=_with_lifespan(answer_an_empty_object)) as world:
        assert failure_of(await world.run()) == ("bad_reply", "seed", True)


def _with_lifespan(app: Any) -> Any:
    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await app(scope, receive, send)

    return wrapped


@pytest.mark.parametrize(
    ("reply", "headers", "says"),
    [
        ({"resources_session_id": "another"}, [(b"set-cookie", b"a=b")], "another session"),
        (None, [], "no session cookie"),
        ({}, [(b"set-cookie", b"a=b")], "resources_session_id"),
    ],
)
async def test_a_seed_that_is_answered_for_another_session_or_without_a_cookie_ends_the_episode(
    reply: dict[str, Any] | None, headers: list[tuple[bytes, bytes]], says: str
) -> None:
    """`None`: the reply that it should be."""
    paths: list[str] = []

    async def resources(scope: Scope, receive: Receive, send: Send) -> None:
        asked = json.loads((await receive())["body"])
        paths.append(scope["path"])
        body = {"resources_session_id": asked["resources_session_id"]} if reply is None else reply
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async with episode_world(resources=_with_lifespan(resources)) as world:
        found = await world.run()
        assert failure_of(found) == ("bad_reply", "seed", True)
        assert says in found["failure"]["failure_reason"]
        assert world.calls == []  # the agent was not asked
    # What the seed may have opened is closed all the same.
    assert paths == ["/ng-rollout/r/seed_session", "/ng-rollout/r/close_session"]


async def test_a_sandbox_that_the_session_lends_is_granted_to_the_agent() -> None:
    sandbox = {"kind": "shell", "url": "http://sandbox"}
    async with episode_world(agent=SandboxedAgent(name="sandboxed")) as world:
        reply = await world.run(sandbox=sandbox)
        assert json.loads(" ".join(said(reply["result"]["response"]))) == sandbox
        reply = await world.run(rollout="without")
        assert said(reply["result"]["response"]) == ["null"]
    async with episode_world() as world:
        refused = await world.run(sandbox=sandbox)
        assert failure_of(refused) == ("seed_rejected", "seed", True)
        assert "sandbox_access" in refused["failure"]["failure_reason"]
        assert world.open_sessions() == 0


async def test_a_body_over_the_limit_is_refused() -> None:
    async with episode_world() as world:
        with pytest.raises(CallError) as refused:
            await world.outgoing.post(world.url + "/run", episode("x" * 17 * 2**20), timeout_seconds=60)
        assert (refused.value.status, refused.value.kind) == (413, "body_too_large")
        assert (await world.run())["result"]["reward"] == 1.0


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"episode_id": {"rollout_id": "r-a1"}}, "episode_id.rollout_id"),
    ({"episode_id": {"rollout_id": "r", "attempt": -1}}, "episode_id.attempt"),
    ({"episode_id": {"rollout_id": "../r"}}, "episode_id.rollout_id"),
    ({"task": {"task_id": "1", "task_input": {}}}, "task.task_id"),
    ({"task": {"task_id": {"taskset": "a", "task_id": "1"}, "task_input": []}}, "task.task_input"),
    ({"more": 1}, "more"),
]


async def test_a_malformed_body_is_refused_with_the_field_at_fault() -> None:
    async with episode_world() as world:
        for change, field in MALFORMED:
            with pytest.raises(CallError) as refused:
                await world.outgoing.post(world.url + "/run", episode("hello") | change, timeout_seconds=20)
            assert refused.value.status == 422
            assert field in refused.value.said
        assert world.calls == []


async def test_episodes_beyond_the_limit_wait_or_are_told_that_they_were_not_admitted() -> None:
    async with episode_world(queue_timeout_seconds=60, max_concurrent_episodes=1, max_queued_episodes=1) as world:
        running = asyncio.create_task(world.run("hang /dev/null", rollout="first"))
        await world.until("agent /ng-rollout/first/v1/responses")
        waiting = asyncio.create_task(world.run(rollout="second"))
        while world.environment.waiting < 1:
            await asyncio.sleep(0)
        assert failure_of(await world.run(rollout="third")) == ("queue_full", "admission", False)
        assert not any("second" in call or "third" in call for call in world.calls)
        running.cancel()
        await asyncio.wait({running})
        assert (await waiting)["result"]["reward"] == 1.0
        replies = [await world.run(rollout=f"r{number}") for number in range(3)]
        assert [reply["result"]["reward"] for reply in replies] == [1.0] * 3


async def test_an_episode_whose_turn_does_not_come_in_time_was_not_admitted() -> None:
    async with episode_world(queue_timeout_seconds=0.2, max_concurrent_episodes=1) as world:
        running = asyncio.create_task(world.run("hang /dev/null", rollout="first"))
        await world.until("agent /ng-rollout/first/v1/responses")
        assert failure_of(await world.run(rollout="second")) == ("queue_timeout", "admission", False)
        assert not any("second" in call for call in world.calls)
        running.cancel()
        await asyncio.wait({running})


async def test_the_environment_server_says_that_it_is_alive_and_describes_itself() -> None:
    async with episode_world() as world:
        for path in ("/", "/healthz"):
            assert (await world.outgoing.get(world.url + path, timeout_seconds=20))["status"] == "ok"
        described = await world.outgoing.get(world.url + "/openapi.json", timeout_seconds=20)
        assert "/run" in described["paths"]
        with pytest.raises(CallError) as unknown:
            await world.outgoing.post(world.url + "/no_such_route", {}, timeout_seconds=20)
        assert unknown.value.status == 404


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_concurrent_episodes": 3}, "queue_timeout_seconds"),
        ({"max_concurrent_episodes": 3, "queue_timeout_seconds": 0}, "queue_timeout_seconds"),
        ({"cleanup_timeout_seconds": float("inf")}, "cleanup_timeout_seconds"),
        ({"tool_transports": ()}, "tool_transports"),
        ({"tool_transports": ("smoke",)}, "tool_transports"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        EnvironmentServer(resources_url="http://a", agent_url="http://b", **settings)
