"""A manager with fakes around it, on virtual time, whose books are held against the fakes' truth at every await."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.virtual_time import VirtualLoop
from tests.support.web_fakes import FakeBrowsers, FakeFactory, FakeRecordings, FakeSites, Faults

from homing.web.ledger import Kind
from homing.web.manager import WebSessionManager
from homing.web.models import Task
from homing.web.settings import WebSettings

SETTINGS: dict[str, Any] = {
    "max_sessions": 4,
    "idle_seconds": 3600.0,
    "max_age_seconds": 14_400.0,
    "operation_seconds": 30.0,
    "reset_seconds": 60.0,
    "wait_seconds": 60.0,
    "site_wait_seconds": 100.0,
    "acquire_seconds": 100.0,
    "close_seconds": 5.0,
    "release_seconds": 20.0,
    "stop_seconds": 2000.0,
}


def task(task_id: str = "count", **more: Any) -> Task:
    return Task(benchmark="fake", task_id=task_id, **more)


class World:
    """One manager, its fakes, and the rule that their books agree."""

    def __init__(self, loop: VirtualLoop, **settings: Any) -> None:
        renewable = settings.pop("renewable", False)
        self.loop = loop
        self.faults = Faults()
        self.browsers = FakeBrowsers(self.faults, renewable=renewable)
        self.sites = FakeSites(self.faults)
        self.factory = FakeFactory(self.faults, self.browsers)
        self.recordings = FakeRecordings(self.faults)
        self.prepared = 0
        self.manager = WebSessionManager(
            WebSettings(**{**SETTINGS, **settings}),
            self.factory,
            site_pool=self.sites,
            browser_session_provider=self.browsers,
            recordings=self.recordings,
            clock=loop,
        )
        self.ticks = 0
        loop.on_tick = self.check

    def check(self) -> None:
        """acquired = live + pending + released, and what the books hold is what is open."""
        self.ticks += 1
        truth = {
            Kind.SITE: len(self.sites.open),
            Kind.BROWSER: len(self.browsers.open),
            Kind.BACKEND: len(self.factory.open),
            Kind.RUNNER: len(self.factory.runners),
        }
        for kind, really in truth.items():
            counts = self.manager.ledger.counts(kind)
            assert counts.acquired == counts.live + counts.pending + counts.released, (kind, counts)
            # Nothing is open that is not in the books. What has just been released may be in them a moment longer.
            assert counts.live + counts.pending >= really, (kind, counts, really)
        assert len(self.manager) <= self.manager.settings.max_sessions

    async def settle(self, seconds: float = 5000.0) -> None:
        """Let the time pass that failed and late things take."""
        await asyncio.sleep(seconds)

    def check_nothing_left(self) -> None:
        assert not self.manager.ledger, self.manager.ledger
        assert not self.browsers.open
        assert not self.sites.open
        assert not self.factory.open
        assert not self.factory.runners
        assert len(self.manager) == 0


@asynccontextmanager
async def world(loop: VirtualLoop, **settings: Any) -> AsyncIterator[World]:
    """A started world; at its end everything is released, whatever the test did."""
    made = World(loop, **settings)
    await made.manager.start()
    try:
        yield made
    except BaseException:
        loop.on_tick = _nothing
        raise
    made.faults.next.clear()
    await made.settle(1500.0)
    left = await made.manager.stop()
    assert left == []
    made.check_nothing_left()


def _nothing() -> None:
    pass


async def after_ticks(count: int, act: Callable[[], object]) -> None:
    """Act after so many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)
    act()
