"""The lifespan of an app that another app runs, as one that mounts it does for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from homing.types import ASGIApp


@asynccontextmanager
async def lifespan_of(app: ASGIApp) -> AsyncIterator[None]:
    """The app's start-up, and its shutdown at the end."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.ensure_future(app({"type": "lifespan", "asgi": {"version": "3.0"}}, told.get, said.put))
    told.put_nowait({"type": "lifespan.startup"})
    first = await said.get()
    assert first["type"] == "lifespan.startup.complete", first
    try:
        yield
    finally:
        told.put_nowait({"type": "lifespan.shutdown"})
        await running
