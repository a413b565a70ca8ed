"""A session's trace, where its server or its seed asks for one: what Playwright's own viewer opens.

It has every call with the page before and after, and costs about as much as the steps do; so it ends after so many steps,
and one that has become too large is not kept. It is written when the session closes: before that its file is empty, which
an index tells as failed. A browser that is gone takes its trace along; the recording's pictures stay.

Not here: the pictures of each step (`screencast.py`), the index (`homing.web.recording`).
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from homing.web.recording import TRACE_FILE, make_empty
from homing.web.tasks import Tasks

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

logger = logging.getLogger(__name__)

MAX_STEPS: Final = 200
MAX_BYTES: Final = 50 * 2**20
_START_SECONDS: Final = 5.0
_WRITE_SECONDS: Final = 4.0


class Trace:
    """One session's trace. Owns its file until `aclose`; borrows the context.

    Args:
        folder: The recording's.
        max_bytes: A larger file is emptied.
    """

    def __init__(
        self, context: BrowserContext, folder: Path, *, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._context = context
        self._path = folder / TRACE_FILE
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._steps = 0
        self._runs = False
        self._tasks = Tasks()

    async def start(self) -> None:
        """Trace from now on. Once: a session that is reset goes on in the same trace."""
        if self._runs or self._steps:
            return
        async with asyncio.timeout(_START_SECONDS):
            await self._context.tracing.start(screenshots=True, snapshots=True)
        self._runs = True
        try:
            await asyncio.to_thread(self._make_empty)
        except OSError:
            logger.warning("a trace cannot be written", exc_info=True)

    async def count_step(self) -> None:
        """A step has been done; after the last that is traced, the trace is written."""
        self._steps += 1
        if self._steps >= self._max_steps:
            await self.aclose()

    async def aclose(self) -> None:
        """Write it, as far as the browser still gives it. Safe to call twice; does not raise, and is bounded."""
        if not self._runs:
            return
        self._runs = False
        try:
            await self._tasks.bounded(self._context.tracing.stop(path=self._path), _WRITE_SECONDS, "write trace")
            await asyncio.to_thread(self._bound)
        except Exception:
            logger.warning("a trace could not be written", exc_info=True)
            await asyncio.to_thread(make_empty, self._path)  # a part of it is none
        await self._tasks.aclose(0.1)

    def _make_empty(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(b"")

    def _bound(self) -> None:
        size = self._path.stat().st_size
        if size > self._max_bytes:
            logger.warning("a trace of %d bytes is larger than is kept", size)
            self._path.write_bytes(b"")
