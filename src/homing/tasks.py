"""Waiting for the end of tasks that were told to end, and for what another thread's event loop is to do.

A worker is dead only once nothing of it runs (`docs/design/protocol.md`, rule 4), so it waits for a task that does not heed its
cancellation for as long as it takes, as servers do. What must not be is that nobody can tell why it does not stop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from homing.errors import HomingError

logger = logging.getLogger(__name__)

ENDS_WITHIN_SECONDS: Final = 5.0
"""A task that was cancelled ends in a turn or two of the event loop; one that takes so long is named in the log."""

_LOOK_AT_LOOP_SECONDS: Final = 1.0
"""How often a thread that waits for an event loop looks whether there still is one: what a closed one has left it never does."""

_T = TypeVar("_T")


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


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], _T]) -> _T:
    """Call on an event loop that runs in another thread, and wait for the outcome.

    Raises:
        HomingError: the loop has ended. And what `call` raises.
    """
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def settle() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(settle)
    while not concurrent.futures.wait([outcome], _LOOK_AT_LOOP_SECONDS).done:
        if loop.is_closed():
            raise HomingError("this worker's event loop has ended, and nothing is served here any more")
    return outcome.result()
