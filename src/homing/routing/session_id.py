"""Puts a routed session's ID into the app's signed session cookie, if and only if the handler used the session.

The invariant: no cookie names a session that nobody owns. The ID is in the session mapping while the handler runs; as
the reply begins, either the session was used (or started) and is owned before the cookie is written, or the ID leaves the
mapping again and no cookie is set.

Not here: reading the cookie (`homing.identity.cookie`), which the router does before any of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.middleware.sessions import Session

from homing.routing.request import REQUEST_SCOPE_KEY, RoutedRequest
from homing.types import ASGIApp, Message, Receive, Scope, Send


class TrackedSession(Session):
    """A session mapping that knows whether the handler read or wrote it.

    Its length and truth are not counted: the session middleware asks for those of every request.
    """

    def __init__(self, content: dict[str, Any], request: RoutedRequest) -> None:
        super().__init__(content)
        self._request = request

    def mark_accessed(self) -> None:
        self._request.used = True
        super().mark_accessed()

    def mark_modified(self) -> None:
        self._request.used = True
        super().mark_modified()

    def __getitem__(self, key: str) -> Any:
        self.mark_accessed()
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.mark_accessed()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.mark_accessed()
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        self.mark_accessed()
        return super().get(key, default)

    def keys(self) -> Any:
        self.mark_accessed()
        return super().keys()

    def values(self) -> Any:
        self.mark_accessed()
        return super().values()

    def items(self) -> Any:
        self.mark_accessed()
        return super().items()


class SessionIdMiddleware:
    """Sits inside the session middleware, next to the app; `install_session_routing` puts it there."""

    def __init__(self, app: ASGIApp, cookie_key: str) -> None:
        self.app = app
        self._cookie_key = cookie_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = scope.get(REQUEST_SCOPE_KEY)
        if request is None or "session" not in scope:
            await self.app(scope, receive, send)
            return
        session = TrackedSession(scope["session"], request)
        session.accessed, session.modified = scope["session"].accessed, scope["session"].modified
        scope["session"] = session
        new = request.session_id is not None and dict.get(session, self._cookie_key) != request.session_id
        if new:
            dict.__setitem__(session, self._cookie_key, request.session_id)

        async def settle(message: Message) -> None:
            if new and message["type"] == "http.response.start":
                started = request.named.start and 200 <= message["status"] < 300
                if request.used or started:
                    request.acquire()
                    session.modified = True
                elif dict.get(session, self._cookie_key) == request.session_id:
                    dict.__delitem__(session, self._cookie_key)
            await send(message)

        await self.app(scope, receive, settle)
