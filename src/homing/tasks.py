"""Waiting for the end of tasks that were told to end.

A worker is dead only once nothing of it runs (`docs/design/protocol.md`, rule 4), so it waits for a task that does not heed its
cancellation for as long as it takes, as servers do. What must not be is that nobody can tell why it does not stop.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterable
from typing import Any, Final

logger = logging.getLogger(__name__)

ENDS_WITHIN_SECONDS: Final = 5.0
"""A task that was cancelled ends in a turn or two of the event loop; one that takes so long is named in the log."""


async def ended(tasks: Iterable[asyncio.Task[Any]], *, within_seconds: float = ENDS_WITHIN_SECONDS) -> None:
    """Wait until tasks that were cancelled have ended; log where those are that take longer than `within_seconds`."""
    waiting = {task for task in tasks if not task.done()}
    if not waiting:
        return
    _, late = await asyncio.wait(waiting, timeout=within_seconds)
    if not late:
        return
    for task in late:
        where = io.StringIO()
        task.print_stack(file=where)
        logger.warning(
            "a task goes on although it was cancelled, and the stop waits for it: %s", where.getvalue().rstrip()
        )
    await asyncio.wait(late)
