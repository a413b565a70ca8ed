"""A web server with real Chromium whose provider and backends fail, hang and are late when a task says so.

A task's `original_metadata` tells them: `{"faults": {"reset": ["raise"], "release": ["hang"]}}`, by the calls of `CALLS`,
each list used up call by call. What is not told to fail is the real thing.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from tests.support.web_fakes import Faults

from homing.web.assembly import Assembly, SiteRule
from homing.web.base import (
    AnyBackend,
    Backend,
    BackendFactory,
    BackendSpec,
    BrowserHandle,
    BrowserProvider,
    BrowserSpec,
    Runner,
)
from homing.web.chromium.assembly import ChromiumAssembly
from homing.web.models import Action, Observation, StepResult, Task, VerifierResult
from homing.web.server import WebServer
from homing.web.settings import WebSettings

CALLS: Final = ("acquire", "reset", "step", "evaluate", "close backend", "interrupt", "release")
LATE_SECONDS: Final = 3.0

SETTINGS: Final[dict[str, Any]] = {
    "max_sessions": 16,
    "operation_seconds": 5.0,
    "reset_seconds": 12.0,
    "wait_seconds": 10.0,
    "site_wait_seconds": 15.0,
    "acquire_seconds": 15.0,
    "close_seconds": 2.0,
    "release_seconds": 8.0,
    "recording_seconds": 5.0,
    "retry_seconds": 0.5,
    "max_retry_seconds": 2.0,
    "idle_seconds": 60.0,
    "sweep_seconds": 2.0,
    "stop_seconds": 20.0,
}


def _faults_of(task: Task) -> Faults:
    faults = Faults()
    faults.late_seconds = LATE_SECONDS
    for name, kinds in task.original_metadata.get("faults", {}).items():
        faults.add(name, *kinds)
    return faults


class FaultyBackend:
    """A session's backend, after its faults. Two evaluations can be told apart, so that a doubled one is seen."""

    def __init__(self, real: Backend, faults: Faults) -> None:
        self._real = real
        self._faults = faults

    async def reset(self, task: Task) -> tuple[Observation, dict[str, Any]]:
        await self._faults.before("reset")
        return await self._real.reset(task)

    async def observe(self) -> Observation:
        return await self._real.observe()

    async def step(self, action: Action) -> StepResult:
        await self._faults.before("step")
        return await self._real.step(action)

    async def evaluate(self, final_answer: str | None) -> VerifierResult:
        await self._faults.before("evaluate")
        verdict = await self._real.evaluate(final_answer)
        return verdict.model_copy(update={"evidence": (*verdict.evidence, secrets.token_hex(8))})

    async def close(self) -> None:
        await self._faults.before("close backend")
        await self._real.close()


class FaultyBackends:
    """Real backends, each with its session's faults."""

    def __init__(self, real: BackendFactory, faults: Mapping[str, Faults]) -> None:
        self._real = real
        self._faults = faults

    def check(self, task: Task) -> Task:
        return self._real.check(task)

    def backend(self, spec: BackendSpec) -> AnyBackend:
        real: Any = self._real.backend(spec)
        return FaultyBackend(real, self._faults[spec.browser.lease_id])

    def runner(self, session_id: str) -> Runner:
        return self._real.runner(session_id)


class FaultyBrowsers:
    """The real provider. A lease that it never heard of the release of is still its own."""

    renewable = False

    def __init__(self, real: BrowserProvider) -> None:
        self._real = real
        self.faults: dict[str, Faults] = {}
        self._all: list[Faults] = []

    @property
    def name(self) -> str:
        return self._real.name

    async def start(self) -> None:
        await self._real.start()

    async def acquire(self, spec: BrowserSpec) -> BrowserHandle:
        faults = _faults_of(spec.task)
        self._all.append(faults)
        await faults.before("acquire")
        handle = await self._real.acquire(spec)
        self.faults[handle.lease_id] = faults
        return handle

    async def release(self, handle: BrowserHandle) -> None:
        await self.faults[handle.lease_id].before("release")
        await self._real.release(handle)

    async def heartbeat(self, handle: BrowserHandle) -> None:
        await self._real.heartbeat(handle)

    async def interrupt(self, handle: BrowserHandle) -> None:
        await self.faults[handle.lease_id].before("interrupt")
        await self._real.interrupt(handle)

    async def aclose(self) -> None:
        await self._real.aclose()

    def health(self) -> Mapping[str, Any]:
        return {**self._real.health(), "faults_met": self._met()}

    def _met(self) -> int:
        return sum(each.met for each in self._all)


@asynccontextmanager
async def assemble_faulty(settings: WebSettings) -> AsyncIterator[Assembly]:
    async with ChromiumAssembly(("miniwob",))(settings) as real:
        browsers = FaultyBrowsers(real.browsers)
        yield Assembly(FaultyBackends(real.backends, browsers.faults), browsers, real.recordings, real.prepare)


def soak_server() -> WebServer:
    """What the fault run in real browsers serves: limits short enough that what hangs is over soon."""
    return WebServer(assemble_faulty, WebSettings(**SETTINGS), sites=SiteRule("locked"), name="soak")
