"""Sync backends behind the manager: each session's driver on one thread of its own, from its first call to its close."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.support.web_fakes import FakeBrowsers, FakeRecordings, FakeSites, Faults

from homing.web.base import BackendSpec, BrowserHandle, Runner
from homing.web.errors import OperationTimeoutError, SessionLostError
from homing.web.manager import WebSessionManager
from homing.web.models import Action, Observation, StepResult, Task, VerifierResult
from homing.web.runners import ThreadRunner
from homing.web.settings import WebSettings


class Page:
    """What a driver hangs in until its renderer dies."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.dead = threading.Event()


class Driver:
    """A driver that belongs to the thread that first used it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.threads: set[int] = set()
        self.count = 0
        self.closed = False

    def _here(self) -> None:
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1, "used from another thread"

    def reset(self, task: Task) -> tuple[Observation, dict[str, Any]]:
        self._here()
        return self.observe(), {}

    def observe(self) -> Observation:
        self._here()
        return Observation(observation_id=str(self.count))

    def step(self, action: Action) -> StepResult:
        self._here()
        if action == "spin()":
            self.page.entered.set()
            assert self.page.dead.wait(20)
            raise RuntimeError("the renderer is gone")
        self.count += 1
        return StepResult(observation=self.observe(), reward=float(self.count))

    def evaluate(self, final_answer: str | None) -> VerifierResult:
        self._here()
        return VerifierResult(reward=float(self.count), task_success=True)

    def close(self) -> None:
        self._here()
        self.closed = True


class Factory:
    def __init__(self) -> None:
        self.drivers: dict[str, Driver] = {}

    def check(self, task: Task) -> Task:
        return task

    def backend(self, spec: BackendSpec) -> Driver:
        driver = self.drivers[spec.session_id] = Driver(Page())
        return driver

    def runner(self, session_id: str) -> Runner:
        return ThreadRunner(f"web-{session_id}", 5.0)


class Browsers(FakeBrowsers):
    """Its interrupt ends the renderer that a driver hangs in."""

    def __init__(self, faults: Faults, factory: Factory) -> None:
        super().__init__(faults)
        self.factory = factory

    async def interrupt(self, handle: BrowserHandle) -> None:
        await super().interrupt(handle)
        self.factory.drivers[handle.session_id].page.dead.set()


def test_every_call_is_on_its_sessions_thread_and_one_that_hangs_holds_up_no_other() -> None:
    before = threading.active_count()

    async def main() -> None:
        faults, factory = Faults(), Factory()
        settings = WebSettings(operation_seconds=1.0, close_seconds=2.0, stop_seconds=10.0)
        manager = WebSessionManager(
            settings,
            factory,
            site_pool=FakeSites(faults),
            browser_session_provider=Browsers(faults, factory),
            recordings=FakeRecordings(faults),
        )
        async with asyncio.timeout(60), manager:
            names = [f"s{number}" for number in range(8)]
            task = Task(benchmark="b", task_id="t")
            await asyncio.gather(*(manager.seed_session(name, task) for name in names))
            hanging = asyncio.create_task(manager.step("s0", "1", "spin()"))
            await asyncio.to_thread(factory.drivers["s0"].page.entered.wait, 10)
            for number in range(1, 6):
                results = await asyncio.gather(*(manager.step(name, str(number), "noop()") for name in names[1:]))
                assert [result.reward for result in results] == [float(number)] * 7
            cancelled = asyncio.create_task(manager.step("s1", "6", "noop()"))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait((cancelled,))
            with pytest.raises(OperationTimeoutError):
                await hanging
            with pytest.raises(SessionLostError):
                await manager.observe("s0")
            for name in names:
                assert await manager.close_session(name), await manager.health()
            assert all(driver.closed and len(driver.threads) == 1 for driver in factory.drivers.values())
            # The cancelled step went on: it was under way.
            assert factory.drivers["s1"].count == 6
            assert not manager.ledger

    asyncio.run(main())
    assert [each.name for each in threading.enumerate() if each.name.startswith("web-")] == []
    assert threading.active_count() <= before + 1  # the loop's own pool has ended with it
