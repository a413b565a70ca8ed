"""What the public socket's HTTP protocol notes for the router: where a request's head ended, and how to cut a reply.

uvicorn with httptools appends a request's trailers to the list of headers that the app sees; a trailer never names a
session, so the length of the head is kept. A reply that was cut must look cut: one that ends with its connection
(HTTP/1.0) looks complete once the connection is closed, so it is reset.

Not here: other protocols. Under h11 or zttp neither key is set, and all headers count.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from homing.identity import HEAD_LENGTH_SCOPE_KEY
from homing.routing.middleware import ABORT_SCOPE_KEY

# On, for 0 s: what is unsent is dropped, and the peer gets a reset where a close would look like an end. socket(7).
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


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

    def reset_connection(self) -> None:
        """Reset the client's connection, so that no reply on it can look complete. Nothing happens if it is closed."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            # Closed already, the client having left: asyncio's socket says so with an OSError, uvloop's with a ValueError.
            with contextlib.suppress(OSError, ValueError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()
