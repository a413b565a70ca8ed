"""Resources servers for tests: `homing run tests.support.rl_servers:counter`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, Field

from homing.rl import ResourcesServer, Seed, Seeded, SeedRejectedError, ToolError, Verdict, VerifyRequest, tool


class CounterTask(BaseModel):
    """A task: what to count from, and to what."""

    start: int = 0
    expected: int = 0
    fail_release: int = 0
    unseedable: bool = False
    tools: list[str] | None = None


class CounterVerify(VerifyRequest):
    """The task's own field, beside what the policy was asked and answered."""

    expected: int | None = None


@dataclass
class Count:
    """A session's state."""

    count: int
    expected: int
    failing_releases: int = 0
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    proceed: asyncio.Event = field(default_factory=asyncio.Event)


class CounterServer(ResourcesServer[Count]):
    """Counts. A session's count is in the memory of the process that seeded it."""

    releases = 0

    async def seed(self, seed: CounterTask) -> Seeded[Count]:
        if seed.unseedable:
            raise SeedRejectedError("there is no such task")
        state = Count(seed.start, seed.expected, seed.fail_release)
        return Seeded(state, observation={"count": seed.start}, tools=seed.tools)

    @tool
    async def increment(self, state: Count, by: Annotated[int, Field(ge=1)] = 1) -> dict[str, int]:
        """Add to the count."""
        state.count += by
        return {"count": state.count, "pid": os.getpid()}

    @tool
    async def divide(self, state: Count, by: int) -> int:
        """Divide the count, which has to come out even."""
        if by == 0:
            raise ToolError("nothing can be divided by 0")
        quotient, rest = divmod(state.count, by)
        if rest:
            raise RuntimeError("a bug that the test wants")
        state.count = quotient
        return state.count

    @tool
    async def wait(self, state: Count) -> int:
        """Wait until `go_on` is called in the same session."""
        state.entered.set()
        await state.proceed.wait()
        return state.count

    @tool
    async def go_on(self, state: Count) -> bool:
        """Let `wait` go on, once it waits."""
        await state.entered.wait()
        state.proceed.set()
        return True

    async def verify(self, state: Count, request: CounterVerify) -> float | Verdict:
        expected = state.expected if request.expected is None else request.expected
        if expected < 0:
            return Verdict(reward=0.0, mask_sample=True, failure_kind="judge_unreachable")
        return float("nan") if expected == 999 else float(state.count == expected)

    async def release(self, state: Count) -> None:
        if state.failing_releases:
            state.failing_releases -= 1
            raise RuntimeError("the test wants this release to fail")
        self.releases += 1


class Nothing(ResourcesServer[None]):
    """A server that takes any seed and has no tools."""

    async def seed(self, seed: Seed) -> None:
        return None

    async def verify(self, state: None, request: VerifyRequest) -> float:
        return 1.0


counter = CounterServer(name="srv")
counter_mcp = CounterServer(name="srv", expose_tools_over_mcp=True)
nothing = Nothing()
