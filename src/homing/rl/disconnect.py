"""Work that is done for as long as a client waits for it, and how long what was cancelled may take to end.

The invariant: nobody waits for ever for work that was told to end. Work that ignores that is logged, and kept until it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_SECONDS: Final = 30.0
"""How long cancelled work may take to end, unless it has clean-ups of its own with a limit of their own."""

# Cancelled, and still running: an event loop keeps no reference to a task.
_unended: set[asyncio.Task[Any]] = set()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], *, seconds: float = END_SECONDS) -> bool:
    """Cancel tasks and wait until they have ended, but not longer than that; whether all have.

    What they raised is looked at by whoever asks them for their result; what goes on is logged, with where it is.
    """
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if not running:
        return True
    _, unended = await asyncio.wait(running, timeout=seconds)
    for task in unended:
        logger.error("%s was cancelled, and goes on after %g s: %s", task.get_name(), seconds, task.get_stack()[-1:])
        _unended.add(task)
        task.add_done_callback(_unended.discard)
    return not unended


async def client_left(request: Request) -> None:
    """Return once the client has gone. The body has to be read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(
    request: Request, work: Coroutine[Any, Any, T], *, end_seconds: float = END_SECONDS
) -> T:
    """Await `work`; if the client leaves first, or this is cancelled, cancel it and wait until it has ended.

    Args:
        end_seconds: How long it may take to end.

    Raises:
        ClientDisconnect: the client left.
    """
    running = asyncio.create_task(work)
    leaving = asyncio.create_task(client_left(request))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and (not await end_tasks([running], seconds=end_seconds) or running.cancelled()):
            raise ClientDisconnect
        return running.result()
    finally:
        await end_tasks([running, leaving], seconds=end_seconds)
