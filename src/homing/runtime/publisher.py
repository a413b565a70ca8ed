"""A worker's figures, written into its row of the server's page once a second while it serves.

Not here: what the figures are, and who reads them (`homing.watch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from homing.clock import SYSTEM_CLOCK, boot_seconds
from homing.errors import RunDirectoryError
from homing.histogram import Histogram
from homing.routing.worker import Worker
from homing.runtime.config import RunConfig
from homing.tasks import ended
from homing.watch.figures import encode_figures, figures_of
from homing.watch.page import Row, open_row

logger = logging.getLogger(__name__)

WRITE_SECONDS: Final = 1.0


class Publisher:
    """Writes the row, from `start` until `aclose`. Owns the row and its task.

    Args:
        config: Where the worker's handoffs are, once there are any.
    """

    def __init__(self, worker: Worker, config: RunConfig) -> None:
        self._worker = worker
        self._config = config
        self._started, self._began = SYSTEM_CLOCK.wall(), boot_seconds()
        self._lags = Histogram()
        self._row: Row | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take a row, and write it from now on. A worker that cannot get one serves all the same, unseen until it can."""
        self._task = asyncio.create_task(self._publish(), name="homing publisher")

    async def aclose(self) -> None:
        """Write for the last time, and let go of the row. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await ended([task])
        row, self._row = self._row, None
        if row is not None:
            with contextlib.closing(row):
                self._write_to(row, 0.0)

    async def _publish(self) -> None:
        try:
            self._row = await self._open()
        except RunDirectoryError as error:
            logger.warning("homing ps and metrics do not see this worker: %s", error)
            self._row = await self._open_later()
            logger.info("homing ps and metrics see this worker from now on")
        self._write(0.0)
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + WRITE_SECONDS
            await asyncio.sleep(WRITE_SECONDS)
            lag_seconds = max(0.0, loop.time() - due)
            self._lags.observe(lag_seconds)
            self._write(lag_seconds)

    async def _open(self) -> Row:
        opening = asyncio.ensure_future(asyncio.to_thread(open_row, self._worker.run_directory.path))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            with contextlib.suppress(RunDirectoryError):
                (await opening).close()
            raise

    async def _open_later(self) -> Row:
        """A row once there is room for one, whose want was said already."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            with contextlib.suppress(RunDirectoryError):
                return await self._open()

    def _write(self, lag_seconds: float) -> None:
        if self._row is not None:
            self._write_to(self._row, lag_seconds)

    def _write_to(self, row: Row, lag_seconds: float) -> None:
        moved = None if self._config.handoffs is None else self._config.handoffs.counters
        figures = figures_of(
            self._worker,
            started=self._started,
            began=self._began,
            given=0 if moved is None else moved.given,
            adopted=0 if moved is None else moved.adopted,
            handed_off=0 if moved is None else moved.followed,
            undecided=0 if moved is None else moved.about_to_follow,
            lag_seconds=lag_seconds,
            lags=self._lags,
        )
        row.write(encode_figures(figures))
