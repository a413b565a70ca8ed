"""Tasks that outlive their callers: every one is held, named, and waited for at the end.

The invariant: no wait here is longer than it says, whatever the awaited code does. What does not heed its cancellation
in time is left running, held here, and listed until it ends.

Not here: what the tasks do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """The tasks of one owner. Owned by whoever made it, who ends with `aclose`."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that is held until it ends. Its error is its waiter's; with none, it is logged."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def bounded(self, coroutine: Coroutine[Any, Any, T], seconds: float, name: str) -> T:
        """What the coroutine gives, if it does so in time. Cancelled, or out of time, it is told to stop and not waited
        for.

        Raises:
            TimeoutError: it did not end in time. It may still be running.
            Exception: what it raised.
        """
        task = self.spawn(coroutine, name)
        try:
            await asyncio.wait((task,), timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            raise TimeoutError(f"{name} did not end within {seconds:g} s")
        if task.cancelled():
            raise RuntimeError(f"{name} was cancelled from inside")
        return task.result()

    async def wait(self, seconds: float) -> bool:
        """Wait for those that run; whether all of them ended in time."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=seconds)
        return not self._running

    async def aclose(self, seconds: float) -> list[str]:
        """Tell every task to stop, and wait; the names of those that did not stop in time."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=seconds)
        return self.names()

    def names(self) -> list[str]:
        """The tasks that run."""
        return sorted(task.get_name() for task in self._running)

    def __len__(self) -> int:
        return len(self._running)

    def __repr__(self) -> str:
        return f"<Tasks: {len(self)} running>"

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Read here, so that a task nobody waits for any more does not warn when it is collected.
            logger.debug("%s ended with %r", task.get_name(), task.exception())
