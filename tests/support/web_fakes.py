"""The collaborators of a web session manager as small classes that keep the truth: what is open, and what was done.

Each call first asks the `Faults` what is to become of it. What is open is entered and taken out at the very instant, so
that the manager's books can be held against it at every await.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from homing.web.base import (
    AnyBackend,
    BackendSpec,
    BrowserHandle,
    BrowserSpec,
    RecordedEvent,
    Runner,
    SiteLease,
)
from homing.web.errors import InvalidTaskError
from homing.web.models import Action, ArtifactRef, Observation, StepResult, Task, VerifierResult
from homing.web.runners import LoopRunner, OperationGate


class FaultError(Exception):
    """What a fake raises when it is told to fail."""


class Faults:
    """What is to become of the next calls: per call name, a list that is used up.

    - `raise`: it fails, having done nothing;
    - `late`: it fails after it has done its work (a release), or does it after `LATE_SECONDS`;
    - `hang`: it never ends, until it is cancelled;
    - `slow`: it takes 0.3 s;
    - `stubborn`: it ends after `LATE_SECONDS`, and does not heed its cancellation.
    """

    LATE_SECONDS = 500.0

    def __init__(self) -> None:
        self.next: dict[str, list[str]] = {}
        self.calls: list[str] = []
        self.late_seconds = self.LATE_SECONDS
        self.met = 0

    def add(self, name: str, *kinds: str) -> None:
        self.next.setdefault(name, []).extend(kinds)

    async def before(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        queue = self.next.get(name)
        kind = queue.pop(0) if queue else "ok"
        self.met += kind != "ok"
        if kind == "raise":
            raise FaultError(f"{name} was told to fail")
        if kind == "value":
            raise ValueError(f"{name} was told that something is wrong")
        if kind == "slow":
            await asyncio.sleep(0.3)
        if kind == "late":
            await asyncio.sleep(self.late_seconds)
        elif kind == "hang":
            await asyncio.get_running_loop().create_future()
        elif kind == "stubborn":
            until = asyncio.get_running_loop().time() + self.late_seconds
            while (left := until - asyncio.get_running_loop().time()) > 0:
                try:
                    await asyncio.sleep(left)
                except asyncio.CancelledError:
                    continue
        await asyncio.sleep(0)


class FakeBrowsers:
    """A browser provider. `open`: the leases that exist, by ID."""

    name = "fake"

    def __init__(self, faults: Faults, *, renewable: bool = False) -> None:
        self.faults = faults
        self.renewable = renewable
        self.open: dict[str, BrowserHandle] = {}
        self.made = 0
        self.interrupted: list[str] = []
        self.started = 0
        self.closed = False

    async def start(self) -> None:
        await self.faults.before("start")
        self.started += 1

    async def acquire(self, spec: BrowserSpec) -> BrowserHandle:
        await self.faults.before("acquire")
        self.made += 1
        handle = BrowserHandle(f"lease-{self.made}", spec.session_id, self.name, "fake")
        self.open[handle.lease_id] = handle
        return handle

    async def release(self, handle: BrowserHandle) -> None:
        await self.faults.before("release")
        self.open.pop(handle.lease_id, None)

    async def heartbeat(self, handle: BrowserHandle) -> None:
        await self.faults.before("heartbeat")
        if handle.lease_id not in self.open:
            raise FaultError("no such lease")

    async def interrupt(self, handle: BrowserHandle) -> None:
        self.interrupted.append(handle.lease_id)
        await self.faults.before("interrupt")

    async def aclose(self) -> None:
        await self.faults.before("aclose")
        self.closed = True

    def health(self) -> Mapping[str, Any]:
        return {"fakes": len(self.open)}


class FakeSites:
    """A site pool that lets everybody in. `open`: the leases that exist."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.open: dict[str, SiteLease] = {}
        self.healthy: dict[str, bool] = {}
        self._ids = itertools.count(1)

    async def acquire(self, session_id: str, task: Task) -> SiteLease:
        await self.faults.before("site")
        lease = SiteLease(f"site-{next(self._ids)}", session_id, task.sites, isolated=False)
        self.open[lease.lease_id] = lease
        return lease

    async def release(self, lease: SiteLease, *, healthy: bool) -> None:
        await self.faults.before("release site")
        self.open.pop(lease.lease_id, None)
        self.healthy[lease.session_id] = healthy

    def health(self) -> Mapping[str, Any]:
        return {"leases": len(self.open)}

    async def aclose(self) -> None:
        pass


class FakeBackend:
    """A counter: `step` adds one, whatever the action (`stop()` ends the task); `evaluate` gives the count as reward."""

    def __init__(self, factory: FakeFactory, spec: BackendSpec) -> None:
        self.factory = factory
        self.spec = spec
        self.count = 0
        self.running = 0
        self.most_running = 0
        factory.open.add(self)

    async def _operation(self, name: str) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        assert self.running == 1, "two operations of one backend at once"
        assert self.spec.browser.lease_id in self.factory.browsers.open, f"{name} in a browser that has been released"
        try:
            await self.factory.faults.before(name)
        finally:
            self.running -= 1

    def _observation(self, action: str = "") -> Observation:
        return Observation(observation_id=f"o{self.count}", axtree=f"count {self.count}", last_action=action)

    async def reset(self, task: Task) -> tuple[Observation, dict[str, Any]]:
        await self._operation("reset")
        self.count = 0
        return self._observation(), {"seed": task.seed}

    async def observe(self) -> Observation:
        await self._operation("observe")
        return self._observation()

    async def step(self, action: Action) -> StepResult:
        await self._operation("step")
        self.count += 1
        self.factory.effects[self.spec.session_id] = self.factory.effects.get(self.spec.session_id, 0) + 1
        return StepResult(
            observation=self._observation(str(action)), reward=float(self.count), terminated=action == "stop()"
        )

    async def evaluate(self, final_answer: str | None) -> VerifierResult:
        await self._operation("evaluate")
        self.factory.verdicts[self.spec.session_id] = self.factory.verdicts.get(self.spec.session_id, 0) + 1
        return VerifierResult(reward=float(self.count), task_success=self.count > 0)

    async def close(self) -> None:
        await self.factory.faults.before("close backend")
        self.factory.open.discard(self)


class FakeFactory:
    """Makes `FakeBackend`s. `open`: those not closed; `runners`: those not closed."""

    def __init__(self, faults: Faults, browsers: FakeBrowsers) -> None:
        self.faults = faults
        self.browsers = browsers
        self.gate = OperationGate(2, 60.0)
        self.open: set[FakeBackend] = set()
        self.runners: set[CountedRunner] = set()
        self.effects: dict[str, int] = {}
        self.verdicts: dict[str, int] = {}

    def check(self, task: Task) -> Task:
        if task.benchmark != "fake":
            raise InvalidTaskError("no such benchmark")
        return task

    def backend(self, spec: BackendSpec) -> AnyBackend:
        if self.faults.next.get("backend") and self.faults.next["backend"].pop(0) == "raise":
            raise FaultError("no backend")
        return FakeBackend(self, spec)

    def runner(self, session_id: str) -> Runner:
        if self.faults.next.get("runner") and self.faults.next["runner"].pop(0) == "raise":
            raise FaultError("no runner")
        runner = CountedRunner(self)
        self.runners.add(runner)
        return runner


class CountedRunner(LoopRunner):
    def __init__(self, factory: FakeFactory) -> None:
        super().__init__(factory.gate)
        self._factory = factory

    async def aclose(self) -> None:
        await self._factory.faults.before("close runner")
        await super().aclose()
        self._factory.runners.discard(self)


class FakeRecording:
    def __init__(self, recordings: FakeRecordings, session_id: str) -> None:
        self.recordings = recordings
        self.session_id = session_id
        self.events: list[RecordedEvent] = []
        self.finished = 0

    @property
    def folder(self) -> Path | None:
        return None

    def note(self, event: RecordedEvent) -> None:
        self.events.append(event)

    async def finish(self) -> Sequence[ArtifactRef]:
        await self.recordings.faults.before("finish")
        self.finished += 1
        return [ArtifactRef(uri=f"{len(self.events)}.html", mime_type="text/html", size_bytes=1, sha256="0" * 64)]


class FakeRecordings:
    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.made: list[FakeRecording] = []

    def open(self, session_id: str, task: Task) -> FakeRecording:
        recording = FakeRecording(self, session_id)
        self.made.append(recording)
        return recording
