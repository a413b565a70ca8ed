"""A task that does not heed its cancellation is waited for, and named."""

from __future__ import annotations

import asyncio

import pytest

from homing.tasks import ended


async def _stubborn(free: asyncio.Event) -> None:
    while not free.is_set():
        try:
            await free.wait()
        except asyncio.CancelledError:
            continue


def test_a_task_that_goes_on_is_named_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_goes_on(caplog))


async def _goes_on(caplog: pytest.LogCaptureFixture) -> None:
    free = asyncio.Event()
    task = asyncio.create_task(_stubborn(free))
    await asyncio.sleep(0)
    task.cancel()
    waiting = asyncio.create_task(ended([task], within_seconds=0.01))
    try:
        while not caplog.records:
            await asyncio.sleep(0)
        assert "_stubborn" in caplog.text
        await asyncio.sleep(0)
        assert not waiting.done()
    finally:
        free.set()  # else a failure would wait for the task, which nothing else ends
    await waiting
    assert task.done()


def test_tasks_that_end_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_end(caplog))


async def _end(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
    for task in tasks:
        task.cancel()
    await ended(tasks)
    await ended(tasks)
    assert all(task.cancelled() for task in tasks)
    assert not caplog.records
