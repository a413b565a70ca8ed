"""A resources server, an agent and an environment server in this process, one worker each, and every call that they got."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pydantic import BaseModel
from tests.support.rl_agents import EchoAgent
from tests.support.servers import serving

from homing.rl import EnvironmentServer, ResourcesServer, SeedRejectedError, Verdict, VerifyRequest, tool
from homing.rl.outgoing import OutgoingCalls
from homing.types import ASGIApp, Receive, Scope, Send


class Task(BaseModel):
    """What the resources server is to do: reject the seed, fail, mask (for so many attempts), or fail to let go so often."""

    reject: bool = False
    broken_verify: bool = False
    mask: bool = False
    mask_first: int = 0
    key: str = ""
    reward: float = 1.0
    stays: int = 0
    sandbox: dict[str, Any] | None = None


class TaskVerify(Task, VerifyRequest):
    """The same, beside what the agent answered."""


class Judge(ResourcesServer[Task]):
    """The reward is the task's for any answer, and so is what goes wrong."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.verified: Counter[str] = Counter()

    async def seed(self, seed: Task) -> Task:
        if seed.reject:
            raise SeedRejectedError("there is no such task")
        return seed

    @tool
    async def note(self, state: Task) -> str:
        """Do nothing."""
        return "noted"

    async def verify(self, state: Task, request: TaskVerify) -> float | Verdict:
        if state.broken_verify:
            raise RuntimeError("the test wants this verifier to fail")
        if state.key:
            self.verified[state.key] += 1
        if state.mask or 0 < state.mask_first >= self.verified[state.key]:
            return Verdict(reward=0.0, mask_sample=True, failure_kind="judge_unreachable")
        return state.reward

    async def sandbox_access(self, state: Task) -> dict[str, Any] | None:
        return state.sandbox

    async def release(self, state: Task) -> None:
        if state.stays:
            state.stays -= 1
            raise RuntimeError("the test wants this release to fail")


class Noted:
    """An app, and the path of each request that it got, beside whose it is."""

    homing_routed = True

    def __init__(self, name: str, app: ASGIApp, calls: list[str], changed: asyncio.Event) -> None:
        self.app = app
        self._name = name
        self._calls = calls
        self._changed = changed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._calls.append(f"{self._name} {scope['path']}")
            self._changed.set()
        await self.app(scope, receive, send)


class EpisodeWorld:
    """The three servers.

    Attributes:
        calls: `"<server> <path>"` of every request, in order; `changed` is set with each.
        url: Of the environment server.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.url = ""
        self.judge = Judge(name="judge")
        self.echo = EchoAgent(name="echo")
        self.changed = asyncio.Event()
        self.agent = Noted("agent", self.echo, self.calls, self.changed)
        self.resources = Noted("resources", self.judge, self.calls, self.changed)
        self.outgoing = OutgoingCalls(new_connection_per_call=True)
        self.environment: EnvironmentServer

    async def run(self, asked: str = "hello", *, rollout: str = "r", attempt: int = 0, **task: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self.outgoing.post(
            self.url + "/run", episode(asked, rollout=rollout, attempt=attempt, **task), timeout_seconds=60
        )
        return found

    async def until(self, call: str) -> None:
        """Wait until a server has got this call."""
        while call not in self.calls:
            self.changed.clear()
            await self.changed.wait()

    def open_sessions(self) -> int:
        """Sessions that are still open, at both servers."""
        return len(self.judge.sessions) + len(self.echo.open_sessions())


def episode(asked: str, *, rollout: str = "r", attempt: int = 0, **task: Any) -> dict[str, Any]:
    return {
        "episode_id": {"rollout_id": rollout, "attempt": attempt},
        "task": {
            "task_id": {"taskset": "test", "task_id": task.pop("task_id", "1")},
            "task_input": {"responses_create_params": {"input": asked}, **task},
        },
    }


@asynccontextmanager
async def episode_world(
    *, agent: ASGIApp | None = None, resources: ASGIApp | None = None, **settings: Any
) -> AsyncIterator[EpisodeWorld]:
    """Serve them, with an environment server of these settings.

    Args:
        agent: In place of the echo agent.
        resources: In place of the judge.
    """
    world = EpisodeWorld()
    async with AsyncExitStack() as stack:
        urls = {}
        apps: dict[str, ASGIApp] = {"resources": resources or world.resources, "agent": agent or world.agent}
        for name, app in apps.items():
            host, port = await stack.enter_async_context(serving(app, lifespan="on"))
            urls[f"{name}_url"] = f"http://{host}:{port}"
        world.environment = EnvironmentServer(**{**urls, **settings})
        host, port = await stack.enter_async_context(serving(world.environment, lifespan="on"))
        world.url = f"http://{host}:{port}"
        await stack.enter_async_context(world.outgoing)
        yield world
