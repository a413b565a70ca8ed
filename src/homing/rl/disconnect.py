"""Work that is done for as long as a client waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def client_left(request: Request) -> None:
    """Return once the client has gone. The body has to be read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; if the client leaves first, or this is cancelled, cancel it and wait until it has ended.

    Raises:
        ClientDisconnect: the client left.
    """
    running = asyncio.create_task(work)
    leaving = asyncio.create_task(client_left(request))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
            if running.cancelled():
                raise ClientDisconnect
        return running.result()
    finally:
        for task in (running, leaving):
            task.cancel()
        await asyncio.wait({running, leaving})
