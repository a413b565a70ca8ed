"""A listener on loopback, on a free port, with every connection that it has accepted.

Not here: what is said on them (`pages.py`, `chromium/gateway.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from homing.web.tasks import Tasks

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_CLOSE_SECONDS = 1.0


class Loopback:
    """Serves each connection in a task of its own. Owns its listener and its connections.

    Args:
        serve: Serves one connection, and closes it.
        name: Of its tasks.
        limit_bytes: The longest head that a reader takes in.
    """

    def __init__(self, serve: Serve, name: str, limit_bytes: int) -> None:
        self._serve = serve
        self._name = name
        self._limit_bytes = limit_bytes
        self._server: asyncio.Server | None = None
        self._connections = Tasks()

    @property
    def origin(self) -> str:
        """`http://127.0.0.1:port`.

        Raises:
            RuntimeError: it does not listen.
        """
        if self._server is None:
            raise RuntimeError(f"the listener for {self._name} is not open")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Listen. Safe to call twice."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=self._limit_bytes)

    async def aclose(self) -> None:
        """End every connection. Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._connections.aclose(_CLOSE_SECONDS)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def serve() -> None:
            await self._serve(reader, writer)

        self._connections.spawn(serve(), self._name)
