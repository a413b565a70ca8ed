"""Waits of the directory: for the lock on dead workers' records, for a thread, for the first of several events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

from homing.directory.base import Counters, Records
from homing.errors import DirectoryBusyError

LOCK_SECONDS: Final = 0.25
"""How long anyone waits for the lock on dead workers' records: a paused holder must not stop the others."""

_T = TypeVar("_T")


async def locked(records: Records, counters: Counters, act: Callable[[], _T]) -> _T:
    """Do `act` under the lock; the lock is never held across an await.

    Nothing else runs on this event loop between `act` and what the caller does next.

    Raises:
        DirectoryBusyError: the lock was not free within 250 ms.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline = began + LOCK_SECONDS
    delay = 0.001
    while True:
        with records.try_lock() as held:
            if held:
                counters.lock_waits.observe(loop.time() - began)
                return act()
        if loop.time() + delay >= deadline:
            raise lock_busy(counters)
        await asyncio.sleep(delay)
        delay = min(delay * 2, 0.02)


def locked_in_thread(records: Records, counters: Counters, act: Callable[[], _T]) -> _T:
    """As `locked`, in a thread that may wait."""
    began = time.monotonic()
    deadline = began + LOCK_SECONDS
    delay = 0.001
    while True:
        with records.try_lock() as held:
            if held:
                counters.lock_waits.observe(time.monotonic() - began)
                return act()
        if time.monotonic() + delay >= deadline:
            raise lock_busy(counters)
        time.sleep(delay)
        delay = min(delay * 2, 0.02)


def lock_busy(counters: Counters) -> DirectoryBusyError:
    """What to raise where the lock was not free in time."""
    counters.lock_timeouts += 1
    return DirectoryBusyError("another worker holds the lock on owner records; it is paused, or very busy")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run file work in a thread, and wait for its end however often this is cancelled meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return running.result()


async def first_of(events: list[asyncio.Event], timeout_seconds: float | None) -> None:
    """Wait until one of the events is set, or the time has passed."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
