"""What one episode has to close, last opened first.

The invariant: every close that was registered is attempted, in LIFO order, one after the other, before one deadline for
all of them, each with its share of the time; a close that succeeded is not repeated; one that fails is logged and does
not keep the others from running; and no cancellation of whoever waits cuts it short.

Not here: what a close does (`episode.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)


class Closing:
    """One thing to close. Calling it closes it; once that succeeded, calling it again gives the same result."""

    def __init__(self, name: str, close: Callable[[], Awaitable[Any]]) -> None:
        self.name = name
        self.done = False
        self._close = close
        self._result: Any = None

    def __repr__(self) -> str:
        return f"<Closing {self.name}: {'done' if self.done else 'open'}>"

    async def __call__(self) -> Any:
        if not self.done:
            self._result = await self._close()
            self.done = True
        return self._result


class CleanUp:
    """The closes of one episode.

    Args:
        timeout_seconds: For all closes together.
        tasks: Whoever outlives the episode: it keeps the clean-up under way, and waits for it before it ends itself.
    """

    def __init__(self, timeout_seconds: float, tasks: set[asyncio.Task[Any]]) -> None:
        self._timeout_seconds = timeout_seconds
        self._tasks = tasks
        self._closings: list[Closing] = []
        self._task: asyncio.Task[list[str]] | None = None

    def __repr__(self) -> str:
        return f"<CleanUp: {sum(not each.done for each in self._closings)} of {len(self._closings)} open>"

    def register(self, name: str, close: Callable[[], Awaitable[Any]]) -> Closing:
        """Close this too. Call it before the thing is opened: whether an open that broke took effect is unknown."""
        if self._task is not None:
            raise RuntimeError("the clean-up has begun: open nothing more")
        closing = Closing(name, close)
        self._closings.append(closing)
        return closing

    async def aclose(self) -> list[str]:
        """Run every close that has not succeeded yet; the names of those that failed. Safe to call twice.

        Cancelled, it waits for the end all the same, and is then cancelled.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="homing episode clean-up")
            self._tasks.add(self._task)
            self._task.add_done_callback(self._tasks.discard)
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():
            try:
                await asyncio.wait({self._task})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return self._task.result()

    async def _run(self) -> list[str]:
        failed: list[str] = []
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_seconds
        for left in range(len(self._closings), 0, -1):
            closing = self._closings[left - 1]
            try:
                # Its share of what is left, so that one that hangs does not keep the others from being tried.
                async with asyncio.timeout((deadline - clock()) / left):
                    await closing()
            except Exception as error:
                failed.append(closing.name)
                logger.warning("%s could not be closed: %s: %s", closing.name, type(error).__name__, error)
        return failed
