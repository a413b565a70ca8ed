"""Which listening sockets does this worker accept from? Its own slot's, and those that are lent to it meanwhile.

A slot's queue is lent to the other workers while none of its own accepts from it: its worker has died, stops, hangs, or is not
there yet. Several may accept from one queue at once, and each connection reaches one of them.

The invariant: what was accepted is served. Under asyncio's own loop an accepted connection is only seen by its server in the
loop's next turn, and a server that was closed by then drops it; so a socket is first taken out of the loop, and closed later.

Not here: which sockets there are (`listeners.py`), and when one is lent (`supervisor.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Final

from homing.rundir import close_after_fork

_TURNS: Final = 3
"""Of the event loop, until what was accepted has its transport."""


class Accepting:
    """The servers of one worker's listening sockets. Made in the event loop; `aclose` is safe to call twice.

    Args:
        servers: uvicorn's list of them, which has the one of the slot's own socket and goes on being uvicorn's.
        make_protocol: Makes what serves a connection.
    """

    def __init__(
        self,
        servers: list[asyncio.base_events.Server],
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        backlog: int,
    ) -> None:
        self._servers = servers
        self._make_protocol = make_protocol
        self._tls = tls
        self._backlog = backlog
        self._loop = asyncio.get_running_loop()
        self._lent: dict[int, tuple[asyncio.base_events.Server, Callable[[], None]]] = {}
        self.on_not_lent: Callable[[int, str], None] | None = None
        """Told of a socket that was lent, and is not accepted from, and why."""
        self._closed = False
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Accepting: {len(self._lent)} lent>"

    def lend(self, number: int, lent: socket.socket) -> None:
        """Accept from this socket too, until it is taken back. Owns the socket."""
        self._do(self._open(number, lent))

    def take_back(self, number: int) -> None:
        """Accept no more from it: its slot has a worker again."""
        self._do(self._let_go(number))

    async def aclose(self) -> None:
        """Accept no more at all. What was accepted is served."""
        self._closed = True
        async with self._turn:
            servers = [*self._servers, *(server for server, _ in self._lent.values())]
            for _, undo in self._lent.values():
                undo()
            self._lent.clear()
            await self._close(servers)

    def _do(self, what: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, number: int, lent: socket.socket) -> None:
        async with self._turn:
            if self._closed or number in self._lent:
                lent.close()
                return
            undo = close_after_fork(lent)
            try:
                server = await self._loop.create_server(
                    self._make_protocol, sock=lent, ssl=self._tls, backlog=self._backlog
                )
            except OSError as error:
                undo()
                lent.close()
                if self.on_not_lent is not None:
                    self.on_not_lent(number, error.strerror or str(error))
                return
            self._lent[number] = server, undo

    async def _let_go(self, number: int) -> None:
        async with self._turn:
            server, undo = self._lent.pop(number, (None, None))
            if server is not None and undo is not None:
                undo()
                await self._close([server])

    async def _close(self, servers: list[asyncio.base_events.Server]) -> None:
        if isinstance(self._loop, asyncio.SelectorEventLoop):
            for server in servers:
                for listening in server.sockets:
                    with contextlib.suppress(OSError, ValueError):
                        self._loop.remove_reader(listening.fileno())
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        for server in servers:
            server.close()
