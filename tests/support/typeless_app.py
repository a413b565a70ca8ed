"""Apps that no server minds, and that take every scope for a request's: their lifespan, too, gets an HTTP reply.

Each replies to any request with its worker's process ID as the last word of a text. `double` is an app of ASGI 2, and has a
lifespan. Those that begin with `routed_` have the one line of homing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import homing


async def plain(scope: Any, receive: Any, send: Any) -> None:
    body = f"worker {os.getpid()}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reads_first(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await plain(scope, receive, send)


async def hides_errors(scope: Any, receive: Any, send: Any) -> None:
    with contextlib.suppress(Exception):
        await plain(scope, receive, send)


class double:
    def __init__(self, scope: Any) -> None:
        self.scope = scope

    async def __call__(self, receive: Any, send: Any) -> None:
        if self.scope["type"] != "lifespan":
            await plain(self.scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


routed_plain = homing.sticky(plain, sessions="header:x-session")
routed_reads_first = homing.sticky(reads_first, sessions="header:x-session")
routed_hides_errors = homing.sticky(hides_errors, sessions="header:x-session")
routed_double = homing.sticky(double, sessions="header:x-session")  # type: ignore[arg-type]  # an app of ASGI 2
