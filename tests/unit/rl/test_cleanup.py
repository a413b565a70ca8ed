"""What one episode has to close: in which order, how often, and until when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from homing.rl.episodes.cleanup import CleanUp

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Closes:
    """Notes the closes in their order; those in `failing` raise, those in `hanging` never end."""

    def __init__(self, *, timeout_seconds: float = 60.0) -> None:
        self.order: list[str] = []
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.cleanup = CleanUp(timeout_seconds, self.tasks)

    def register(self, name: str) -> Any:
        async def close() -> str:
            self.order.append(name)
            self.begun.set()
            for _ in range(3):
                await asyncio.sleep(0)
            if name in self.hanging:
                await self.may_end.wait()
            if name in self.failing:
                raise RuntimeError(f"the test wants {name} to fail")
            return name

        return self.cleanup.register(name, close)


async def test_the_last_opened_is_closed_first_and_a_failure_stops_nothing() -> None:
    closes = Closes()
    for name in ("a", "b", "c"):
        closes.register(name)
    closes.failing = {"b"}
    assert await closes.cleanup.aclose() == ["b"]
    assert closes.order == ["c", "b", "a"]


async def test_what_was_closed_on_the_way_is_not_closed_again() -> None:
    closes = Closes()
    closes.register("a")
    early = closes.register("b")
    assert await early() == "b"
    assert await early() == "b"
    await closes.cleanup.aclose()
    await closes.cleanup.aclose()
    assert closes.order == ["b", "a"]


async def test_what_failed_on_the_way_is_closed_again() -> None:
    closes = Closes()
    early = closes.register("a")
    closes.failing = {"a"}
    with pytest.raises(RuntimeError):
        await early()
    closes.failing = set()
    assert await closes.cleanup.aclose() == []
    assert closes.order == ["a", "a"]


async def test_a_cancellation_waits_for_the_last_close_and_is_then_seen() -> None:
    closes = Closes()
    closes.register("a")
    closes.register("b")
    closes.hanging = {"b"}
    waiting = asyncio.create_task(closes.cleanup.aclose())
    await closes.begun.wait()
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    closes.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert closes.order == ["b", "a"]


async def test_a_close_that_hangs_takes_no_more_than_its_share_of_the_time() -> None:
    closes = Closes(timeout_seconds=1.0)
    closes.register("a")
    closes.register("b")
    closes.hanging = {"b"}
    async with asyncio.timeout(20):
        assert await closes.cleanup.aclose() == ["b"]
    assert closes.order == ["b", "a"]


async def test_whoever_outlives_the_episode_keeps_the_clean_up_under_way() -> None:
    closes = Closes()
    closes.register("a")
    closes.hanging = {"a"}
    waiting = asyncio.create_task(closes.cleanup.aclose())
    await closes.begun.wait()
    assert len(closes.tasks) == 1
    closes.may_end.set()
    await waiting
    await asyncio.sleep(0)
    assert closes.tasks == set()


async def test_nothing_is_opened_once_the_clean_up_has_begun() -> None:
    closes = Closes()
    await closes.cleanup.aclose()
    with pytest.raises(RuntimeError):
        closes.register("a")
