"""What the public socket's HTTP protocol adds: where a request's head ended, how to cut a reply, one write for a short one.

uvicorn with httptools appends a request's trailers to the list of headers that the app sees; a trailer never names a
session, so the length of the head is kept. A reply that was cut must look cut: one that ends with its connection
(HTTP/1.0) looks complete once the connection is closed, so it is reset.

uvicorn writes a reply's head and its body apart. A write to a TCP socket costs about 6 µs, as much as the parsing of the
whole request, so the head waits for a body that follows in the same turn of the event loop.

Not here: other protocols. Under h11 or zttp neither key is set, and all headers count.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from homing.identity import HEAD_LENGTH_SCOPE_KEY
from homing.routing.middleware import ABORT_SCOPE_KEY

# On, for 0 s: what is unsent is dropped, and the peer gets a reset where a close would look like an end. socket(7).
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

_JOINED_BYTES: Final = 64 * 1024
"""Up to this size a body is copied behind its head for one write."""


class ReplyWriter:
    """The transport as the replies of one connection use it: the first write after `begin` joins the next one.

    It is written at the latest in the event loop's next turn, so a head whose body is still to come does not wait for it,
    and at most one write is ever held back. Borrows the transport.
    """

    __slots__ = ("_begins", "_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._begins = False
        self._held: bytes | None = None

    def begin(self) -> None:
        """A reply begins: its first write may be held back."""
        self._begins = True

    def write(self, data: bytes) -> None:
        held = self._held
        if held is not None:
            if len(data) <= _JOINED_BYTES:
                data = held + data  # a body that is no bytes raises here, and the head is written without it
            else:
                self._transport.write(held)
            self._held = None
            self._transport.write(data)
        elif self._begins and len(data) <= _JOINED_BYTES:
            self._begins = False
            self._held = data
            self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write what is held back, unless the connection is closing."""
        held, self._held = self._held, None
        if held is not None and not self._transport.is_closing():
            self._transport.write(held)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class HomingHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol, which also sets two keys of an HTTP scope.

    `homing.head_length`: how many of the headers are the head's (int); later ones are trailers.
    `homing.abort`: a callable without arguments that resets the client's connection.
    """

    def on_headers_complete(self) -> None:
        scope = cast("dict[str, Any]", self.scope)
        scope[HEAD_LENGTH_SCOPE_KEY] = len(self.headers)
        scope[ABORT_SCOPE_KEY] = self.reset_connection
        super().on_headers_complete()
        cycle = self.cycle
        # A HEAD's reply is complete without another write, and the protocol may close the connection at once after it.
        if cycle is not None and cycle.scope is scope and scope["method"] != "HEAD":
            self._replies.begin()
            cycle.transport = cast("asyncio.Transport", self._replies)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._replies = ReplyWriter(transport, self.loop)

    def send_400_response(self, msg: str) -> None:
        self._replies.flush()
        super().send_400_response(msg)

    def reset_connection(self) -> None:
        """Reset the client's connection, so that no reply on it can look complete. Nothing happens if it is closed."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            # Closed already, the client having left: asyncio's socket says so with an OSError, uvloop's with a ValueError.
            with contextlib.suppress(OSError, ValueError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()
