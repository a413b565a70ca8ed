"""The ready agent against a scripted model behind OpenAI's routes, with tools as plain routes and over MCP."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.support.rl_servers import CounterServer
from tests.support.servers import serving

# Imported here, as `mcp` takes seconds on a busy machine, in which four servers of one process would answer nobody.
import homing.rl.agents.mcp_client
import homing.rl.mcp  # noqa: F401
from homing.rl import EnvironmentServer, ToolCallingAgent
from homing.rl.demo import model as demo_model
from homing.rl.demo.task import TOOLS, SumServer, demo_task
from homing.rl.outgoing import OutgoingCalls
from homing.types import ASGIApp

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Chat:
    """A chat model that a test scripts: each request is noted, and answered by the next of its turns.

    A turn is what the model says, or a list of `(tool, arguments)`; an int is a status to fail with.
    """

    def __init__(self, *turns: str | int | list[tuple[str, Any]]) -> None:
        self.turns = list(turns)
        self.asked: list[dict[str, Any]] = []
        self.waits = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.app = Starlette()
        self.app.add_route("/v1/chat/completions", self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.waits.set()
        await self.may_go_on.wait()
        turn = self.turns.pop(0)
        if isinstance(turn, int):
            return JSONResponse({"error": {"message": "the test wants this"}}, status_code=turn)
        message: dict[str, Any] = {"role": "assistant", "content": turn if isinstance(turn, str) else None}
        if not isinstance(turn, str):
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(4)}",
                    "type": "function",
                    "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
                }
                for name, given in turn
            ]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return JSONResponse(body | {"usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}})


@asynccontextmanager
async def served(
    model: ASGIApp, resources: ASGIApp, environment: dict[str, Any] | None = None, /, **agent: Any
) -> AsyncIterator[Callable[..., Any]]:
    """Serve all four; what this gives runs an episode."""
    async with AsyncExitStack() as stack:

        async def at(app: ASGIApp) -> str:
            host, port = await stack.enter_async_context(serving(app))
            return f"http://{host}:{port}"

        resources_url = await at(resources)
        model_url = await at(model) + "/v1"
        ready = ToolCallingAgent(model_url=model_url, resources_url=resources_url, model_retries=0, **agent)
        url = await at(EnvironmentServer(resources_url=resources_url, agent_url=await at(ready), **environment or {}))
        calls = await stack.enter_async_context(OutgoingCalls())

        async def run(task_input: dict[str, Any], rollout: str = "r") -> dict[str, Any]:
            task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": task_input}
            body = {"episode_id": {"rollout_id": rollout, "attempt": 0}, "task": task}
            found: dict[str, Any] = await calls.post(url + "/run", body, timeout_seconds=60)
            return found

        yield run


@pytest.mark.parametrize(("model_api", "transport"), [("chat", "direct_http"), ("responses", "mcp")])
async def test_it_works_with_both_kinds_of_endpoint_and_of_tools(model_api: str, transport: str) -> None:
    resources = SumServer(name="sum", expose_tools_over_mcp=transport == "mcp")
    settings = {"tool_transports": (transport,)}
    async with served(demo_model.make_app(), resources, settings, model_api=model_api) as run:
        for number in range(5):  # the last of which asks for a wrong answer
            _, task_input, reward = demo_task(number)
            if transport == "mcp":
                # The server lists its own tools.
                task_input["responses_create_params"].pop("tools")
            reply = await run(task_input, f"r{number}")
            assert reply["failure"] is None, reply
            assert reply["result"]["reward"] == reward
            response = reply["result"]["response"]
            assert response["status"] == "completed"
            names = [item["name"] for item in response["output"] if item["type"] == "function_call"]
            assert names == ["add"] * len(task_input["numbers"]) + ["total"]


def counting(*names: str, **params: Any) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]
    return {"expected": 3, "responses_create_params": {"input": "count", "tools": tools, **params}}


def outputs(reply: dict[str, Any]) -> list[Any]:
    """What the model was told of its calls."""
    items = reply["result"]["response"]["output"]
    return [json.loads(item["output"]) for item in items if item["type"] == "function_call_output"]


async def test_what_the_model_does_wrong_is_an_answer_to_the_model() -> None:
    chat = Chat(
        [("increment", {"by": "x"}), ("increment", "no JSON"), ("increment", "[1]"), ("fly", {})],
        [("divide", {"by": 0}), ("nowhere", {})],
        [("increment", {"by": 3})],
        "done",
    )
    async with served(chat.app, CounterServer()) as run:
        reply = await run(counting("increment", "divide", "nowhere"))
    assert reply["result"]["reward"] == 1.0, reply
    found = outputs(reply)
    assert all("error" in each for each in found[:-1])
    assert "by" in found[0]["error"]
    assert found[4]["error"] == "nothing can be divided by 0"
    assert found[-1]["count"] == 3
    assert reply["result"]["response"]["usage"]["total_tokens"] == 4 * 7
    # The conversation as the endpoint got it: calls of one turn are one message, and each has its answer.
    last = chat.asked[-1]["messages"]
    roles = ["user", "user", "assistant", *["tool"] * 4, "assistant", *["tool"] * 2, "assistant", "tool"]
    assert [message["role"] for message in last] == roles
    assert [call["id"] for call in last[2]["tool_calls"]] == [message["tool_call_id"] for message in last[3:7]]


async def test_parameters_of_the_request_reach_the_model() -> None:
    chat = Chat("done")
    async with served(chat.app, CounterServer(), model="house") as run:
        await run(counting("increment", temperature=0.5, max_output_tokens=9, instructions="be brief"))
    asked = chat.asked[0]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("house", 0.5, 9)
    assert asked["messages"][0] == {"role": "system", "content": "be brief"}
    # What the resources server lets the policy see first comes after what the task asks.
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "user"]
    assert json.loads(asked["messages"][2]["content"]) == {"count": 0}


@pytest.mark.parametrize(
    ("turns", "kind", "terminal"),
    [
        ([[("divide", {"by": 2})]], "server_error", False),  # the tool has a bug
        ([503], "model_unavailable", False),
        ([400], "model_refused", True),
    ],
)
async def test_what_goes_wrong_elsewhere_ends_the_run_as_a_fault(turns: list[Any], kind: str, terminal: bool) -> None:
    async with served(Chat(*turns).app, CounterServer()) as run:
        reply = await run(counting("divide") | {"start": 3})
    assert reply["result"] is None
    assert (reply["failure"]["failure_kind"], reply["failure"]["terminal"]) == (kind, terminal)


async def test_a_model_that_never_ends_is_ended() -> None:
    async with served(Chat(*[[("increment", {})]] * 3).app, CounterServer(), max_steps=3) as run:
        reply = await run(counting("increment"))
    assert reply["result"]["response"]["incomplete_details"] == {"reason": "max_steps"}
    assert reply["result"]["reward"] == 1.0  # it has counted to three all the same


async def test_a_stop_gives_up_the_question_to_the_model_and_keeps_what_was_done() -> None:
    chat = Chat([("increment", {"by": 3})], "never said")
    async with served(chat.app, CounterServer(), {"agent_timeout_seconds": 1.0}) as run:
        running = asyncio.create_task(run(counting("increment")))
        await chat.waits.wait()
        chat.waits.clear()
        chat.may_go_on.clear()
        reply = await running
        chat.may_go_on.set()
    assert reply["result"]["response"]["incomplete_details"] == {"reason": "deadline"}
    assert reply["result"]["response"]["status"] == "incomplete"


def test_the_tools_of_the_demo_are_what_its_server_has() -> None:
    assert {tool["name"] for tool in TOOLS} == set(SumServer().tools)
