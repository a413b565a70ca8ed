"""A session's pictures for its recording: the browser sends one whenever the page has changed, and the last of each step
is kept as `step-0001.jpg`.

That costs a step next to nothing, where a screenshot costs as much as the step. Pictures are written in a thread, as
they come, so that a crash leaves those up to it.

Not here: what is made of them (`homing.web.recording`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from homing.web.chromium.view import View
from homing.web.recording import write_whole
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

_WIDTH: Final = 800
_HEIGHT: Final = 600
_QUALITY: Final = 60
_MAX_STEPS: Final = 500
_CLOSE_SECONDS: Final = 2.0
_BATCH_SECONDS: Final = 0.2
"""Pictures that come within so long are written at once."""


def picture_name(step: int) -> str:
    """Where a step's picture is in the recording's folder; step 0 is the seed's."""
    return f"step-{step:04d}.jpg"


class Screencast:
    """The pictures of one session. Owns their writing; borrows the folder, and the pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = 0
        self._latest: dict[int, str] = {}
        self._ends = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._views: list[View] = []
        self._tasks = Tasks()

    async def start(self, view: View) -> None:
        """Take the pictures of this page from now on."""
        if view in self._views:
            return
        cdp = await view.cdp()
        self._views.append(view)

        def take(event: dict[str, Any]) -> None:
            if self._step < _MAX_STEPS:
                self._latest[self._step] = event["data"]
            self._tasks.spawn(_acknowledge(cdp, event["sessionId"]), "acknowledge picture")
            self._plan()

        cdp.on("Page.screencastFrame", take)
        await cdp.send(
            "Page.startScreencast",
            {"format": "jpeg", "quality": _QUALITY, "maxWidth": _WIDTH, "maxHeight": _HEIGHT, "everyNthFrame": 1},
        )

    def next_step(self) -> None:
        """What comes from now on is the next step's."""
        self._step += 1

    async def aclose(self) -> None:
        """Write what is still to be written. Safe to call twice."""
        self._ends.set()
        await self._tasks.wait(_CLOSE_SECONDS)
        await self._tasks.aclose(_CLOSE_SECONDS)

    def _plan(self) -> None:
        if self._latest and (self._writing is None or self._writing.done()):
            self._writing = self._tasks.spawn(self._write(), "write pictures")

    async def _write(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BATCH_SECONDS):
                await self._ends.wait()
        while self._latest:
            pictures, self._latest = self._latest, {}
            try:
                await asyncio.to_thread(self._save, pictures)
            except OSError:
                logger.warning("a picture of a recording could not be written", exc_info=True)
                return

    def _save(self, pictures: Mapping[int, str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for step, data in pictures.items():
            write_whole(self._folder / picture_name(step), base64.b64decode(data))


async def _acknowledge(cdp: Any, session_id: int) -> None:
    with contextlib.suppress(Exception):
        await cdp.send("Page.screencastFrameAck", {"sessionId": session_id})
