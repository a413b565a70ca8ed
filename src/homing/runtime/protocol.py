"""What the public socket's HTTP protocol notes for the router: where a request's head ended, and how to abort it.

uvicorn with httptools appends a request's trailers to the list of headers that the app sees; a trailer never names a
session, so the length of the head is kept. Aborting makes a cut reply look cut where closing might not.

Not here: other protocols. Under h11 or zttp neither key is set, and all headers count.
"""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from homing.identity import HEAD_LENGTH_SCOPE_KEY
from homing.routing.middleware import ABORT_SCOPE_KEY


class HomingHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol, which also sets two keys of an HTTP scope.

    `homing.head_length`: how many of the headers are the head's (int); later ones are trailers.
    `homing.abort`: a callable without arguments that resets the client's connection.
    """

    def on_headers_complete(self) -> None:
        scope = cast("dict[str, Any]", self.scope)
        scope[HEAD_LENGTH_SCOPE_KEY] = len(self.headers)
        scope[ABORT_SCOPE_KEY] = self.transport.abort
        super().on_headers_complete()
