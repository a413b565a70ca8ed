"""Puts a routed session's ID into the app's signed session cookie, if and only if the handler used the session.

The invariants: no cookie names a session that nobody owns, and no handler sees another session than the one its request
was routed by. The ID is in the session mapping while the handler runs; as the reply begins, either the session was used
(or started) and is owned before the cookie is written, or the ID leaves the mapping again and no cookie is set.

Not here: reading the cookie (`homing.identity.cookie`), which the router does before any of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.sessions import Session, SessionMiddleware

from homing.identity import SESSION_MAX_AGE_SECONDS
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

    def __reversed__(self) -> Iterator[str]:
        self.mark_accessed()
        return super().__reversed__()

    def __eq__(self, other: object) -> bool:
        self.mark_accessed()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        self.mark_accessed()
        return super().__ne__(other)

    __hash__ = None  # type: ignore[assignment]  # as of every dict

    def __or__(self, other: Any) -> Any:
        self.mark_accessed()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self.mark_accessed()
        return super().__ror__(other)

    def __repr__(self) -> str:
        self.mark_accessed()
        return super().__repr__()

    def copy(self) -> dict[str, Any]:
        self.mark_accessed()
        return super().copy()

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
    """Sits inside the session middleware, next to it (`put_session_id_next_to_session`)."""

    def __init__(self, app: ASGIApp, cookie_key: str) -> None:
        self.app = app
        self._cookie_key = cookie_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = scope.get(REQUEST_SCOPE_KEY)
        if request is None or "session" not in scope:
            await self.app(scope, receive, send)
            return
        given, key = scope["session"], self._cookie_key
        in_cookie = dict.get(given, key)
        # A cookie that did not count, since a token names the session on this path: what it holds is another session's.
        other = isinstance(in_cookie, str) and in_cookie not in ("", request.session_id)
        session = TrackedSession({} if other else given, request)
        session.accessed, session.modified = given.accessed, given.modified
        scope["session"] = session
        new = request.session_id is not None and in_cookie != request.session_id
        if new:
            dict.__setitem__(session, key, request.session_id)

        async def settle(message: Message) -> None:
            if new and message["type"] == "http.response.start":
                if request.makes_known(scope, message["status"]):
                    request.acquire()
                    session.mark_modified()
                elif dict.get(session, key) == request.session_id:
                    dict.__delitem__(session, key)
            await send(message)

        await self.app(scope, receive, settle)


def cookie_max_age(middleware: list[Middleware]) -> int | None:
    """How long the app's session middleware takes a cookie for good, in seconds; None: for ever."""
    for each in middleware:
        if _is_session_middleware(each):
            given = inspect.signature(SessionMiddleware).bind_partial(None, *each.args, **each.kwargs)
            given.apply_defaults()
            found: int | None = given.arguments["max_age"]
            return found
    return SESSION_MAX_AGE_SECONDS


def put_session_id_next_to_session(middleware: list[Middleware], cookie_key: str) -> None:
    """Insert `SessionIdMiddleware` into an app's middleware, given outermost first.

    Directly inside the session middleware: whatever sits further in sees the ID, and counts as use if it looks at the
    session. Next to the app where there is none.
    """
    inside = [place for place, each in enumerate(middleware, 1) if _is_session_middleware(each)]
    middleware.insert(inside[-1] if inside else len(middleware), Middleware(SessionIdMiddleware, cookie_key=cookie_key))


def _is_session_middleware(middleware: Middleware) -> bool:
    return isinstance(middleware.cls, type) and issubclass(middleware.cls, SessionMiddleware)
