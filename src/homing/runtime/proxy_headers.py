"""uvicorn's middleware for proxies' headers, called only for a request that has one of them.

Most have none, and then it changes nothing: to find that out here costs less than half of the call, and a coroutine less for
every event to pass through.

Not here: whom to trust, and what the headers mean, which are uvicorn's to judge.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

# Beside those that uvicorn reads, those that it might: of what is in here by mistake, uvicorn thinks nothing.
PROXY_HEADERS: Final = frozenset(
    {
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-forwarded-proto",
        b"x-real-ip",
    }
)


class ProxyHeadersWhereGiven(ProxyHeadersMiddleware):
    """As uvicorn's own; no coroutine function, so that a request without such headers is the inner app's alone."""

    def __call__(self, scope: Any, receive: Any, send: Any) -> Coroutine[Any, Any, None]:
        for name, _ in scope.get("headers", ()):
            if name in PROXY_HEADERS:
                return super().__call__(scope, receive, send)
        return self.app(scope, receive, send)  # type: ignore[return-value]  # awaited, whatever it is
