"""The session mapping that the handler sees, under the installed Starlette's own `SessionMiddleware`."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from itsdangerous import TimestampSigner
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import Response

from homing.identity import Named
from homing.routing.request import REQUEST_SCOPE_KEY, RoutedRequest
from homing.routing.session_id import (
    SessionIdMiddleware,
    TrackedSession,
    cookie_max_age,
    put_session_id_next_to_session,
)
from homing.types import ASGIApp, SessionId

SECRET = "a secret"


def routed(session_id: str | None, *, start: bool = False) -> RoutedRequest:
    """A request of the one-worker mode: nothing is recorded."""
    return RoutedRequest(None, Named(None, start=start), None if session_id is None else SessionId(session_id))


def signed(content: dict[str, Any]) -> str:
    return TimestampSigner(SECRET).sign(base64.b64encode(json.dumps(content).encode())).decode()


def served(
    handler: Callable[[Request], Any],
    request: RoutedRequest,
    cookie: dict[str, Any] | None = None,
    *,
    status: int = 200,
    method: str = "POST",
) -> tuple[dict[str, Any] | None, list[str]]:
    """The content of the cookie that the reply set, or None, and its `Vary`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handler(Request(scope))
        await Response(status_code=status)(scope, receive, send)

    headers = [] if cookie is None else [(b"cookie", f"session={signed(cookie)}".encode())]
    scope = {
        "type": "http",
        "method": method,
        "path": "/x",
        "query_string": b"",
        "headers": headers,
        REQUEST_SCOPE_KEY: request,
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    asyncio.run(SessionMiddleware(SessionIdMiddleware(app, "sid"), SECRET)(scope, receive, send))
    found = [value.decode() for name, value in sent[0]["headers"] if name == b"set-cookie"]
    vary = [value.decode() for name, value in sent[0]["headers"] if name == b"vary"]
    if not found:
        return None, vary
    (only,) = found
    value = only.split(";")[0].removeprefix("session=")
    return ({} if value == "null" else json.loads(base64.b64decode(value.rsplit(".", 2)[0]))), vary


def nothing(request: Request) -> None:
    pass


READS: dict[str, Callable[[Any], Any]] = {
    "getitem": lambda session: session["sid"],
    "get": lambda session: session.get("other"),
    "in": lambda session: "other" in session,
    "iter": lambda session: list(session),
    "reversed": lambda session: list(reversed(session)),
    "keys": lambda session: session.keys(),
    "values": lambda session: session.values(),
    "items": lambda session: session.items(),
    "copy": lambda session: session.copy(),
    "dict": dict,
    "star": lambda session: {**session},
    "or": lambda session: session | {},
    "ror": lambda session: {} | session,
    "equal": lambda session: session == {},
    "unequal": lambda session: session != {},
    "repr": repr,
    "json": json.dumps,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "setitem": lambda session: session.__setitem__("a", 1),
    "delitem": lambda session: session.__delitem__("sid"),
    "pop": lambda session: session.pop("sid"),
    "pop missing": lambda session: session.pop("a", None),
    "popitem": lambda session: session.popitem(),
    "setdefault": lambda session: session.setdefault("a", 1),
    "update": lambda session: session.update(a=1),
    "ior": lambda session: session.__ior__({"a": 1}),
    "clear": lambda session: session.clear(),
}


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_reading_or_writing_the_mapping_is_use(name: str) -> None:
    request = routed("s1")
    session = TrackedSession({"sid": "s1"}, request)
    assert not request.used
    {**READS, **WRITES}[name](session)
    assert request.used


@pytest.mark.parametrize("name", sorted(set(dir(dict)) - set(dir(object)) - {"fromkeys", "__class_getitem__"}))
def test_no_method_of_a_dict_is_forgotten(name: str) -> None:
    uncounted = {"__len__", "__getstate__"}
    overridden = any(name in each.__dict__ for each in TrackedSession.__mro__[:2])
    assert overridden or name in uncounted


def test_length_and_truth_are_no_use() -> None:
    request = routed("s1")
    session = TrackedSession({"sid": "s1"}, request)
    assert (len(session), bool(session)) == (1, True)
    assert not request.used


def test_a_session_that_was_not_used_gets_no_cookie() -> None:
    request = routed("s1")
    assert served(nothing, request) == (None, [])
    assert not request.used


def test_a_session_that_was_used_gets_its_id() -> None:
    assert served(lambda request: request.session.get("x"), routed("s1")) == ({"sid": "s1"}, ["Cookie"])


@pytest.mark.parametrize(("status", "cookie"), [(200, {"sid": "s1"}), (299, {"sid": "s1"}), (300, None), (404, None)])
def test_a_start_names_its_session_if_it_succeeds(status: int, cookie: dict[str, str] | None) -> None:
    request = routed("s1", start=True)
    assert served(nothing, request, status=status)[0] == cookie
    # The ID has left, so the session counts as used, whatever becomes of the reply.
    assert request.used == (cookie is not None)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE"])
def test_a_method_that_changes_nothing_starts_nothing(method: str) -> None:
    assert served(nothing, routed("s1", start=True), method=method)[0] is None


def test_a_cookie_that_names_the_session_already_is_not_set_again() -> None:
    for start in (False, True):
        request = routed("s1", start=start)
        content, _ = served(lambda request: request.session.get("x"), request, {"sid": "s1", "x": 1})
        assert content is None


def test_what_else_the_cookie_holds_stays() -> None:
    found = served(lambda request: request.session.get("x"), routed("s1"), {"user": "u"})[0]
    assert found == {"user": "u", "sid": "s1"}


def test_the_id_leaves_the_mapping_again_where_it_was_not_used() -> None:
    seen: list[Any] = []

    def handler(request: Request) -> None:
        seen.append(request.scope["session"])

    served(handler, routed("s1"), {"user": "u"})
    assert dict(seen[0]) == {"user": "u"}


@pytest.mark.parametrize("session_id", ["s1", None])
def test_a_cookie_of_another_session_than_the_request_was_routed_by_is_not_seen(session_id: str | None) -> None:
    seen: list[dict[str, Any]] = []
    cookie = {"sid": "another's", "bound": True}
    content, _ = served(lambda request: seen.append(dict(request.session)), routed(session_id), cookie)
    expected = {} if session_id is None else {"sid": session_id}
    assert seen == [expected]
    assert content == (expected or None)


@pytest.mark.parametrize("odd", ["", 5, None, ["a"]])
def test_what_is_no_id_is_left_to_the_app(odd: Any) -> None:
    seen: list[dict[str, Any]] = []
    served(lambda request: seen.append(dict(request.session)), routed(None), {"sid": odd})
    assert seen == [{"sid": odd}]


def test_a_handler_that_clears_the_session_is_obeyed() -> None:
    assert served(lambda request: request.session.clear(), routed("s1"), {"sid": "s1", "user": "u"})[0] == {}
    assert served(lambda request: request.session.clear(), routed("s1"))[0] is None


def test_a_request_that_homing_did_not_route_passes_untouched() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    async def never(*_: Any) -> Any:
        raise AssertionError

    middleware = SessionIdMiddleware(app, "sid")
    for scope in ({"type": "lifespan"}, {"type": "http", "session": {}}, {REQUEST_SCOPE_KEY: routed("s1")}):
        asyncio.run(middleware(scope, never, never))
        assert seen.pop() is scope
        assert not isinstance(scope.get("session"), TrackedSession)


# --- where it sits ---


class Other:
    def __init__(self, app: ASGIApp) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class Subclass(SessionMiddleware):
    pass


@pytest.mark.parametrize(
    ("middleware", "seconds"),
    [
        ([], 14 * 86_400),
        ([Middleware(Other)], 14 * 86_400),
        ([Middleware(SessionMiddleware, secret_key="s")], 14 * 86_400),
        ([Middleware(Other), Middleware(SessionMiddleware, secret_key="s", max_age=60)], 60),
        ([Middleware(Subclass, "s", "name", None)], None),
    ],
)
def test_a_cookie_is_as_long_good_for_the_router_as_for_the_session_middleware(
    middleware: list[Middleware], seconds: int | None
) -> None:
    assert cookie_max_age(middleware) == seconds


@pytest.mark.parametrize(
    ("before", "place"),
    [([SessionMiddleware, Other], 1), ([Other, Subclass, Other], 2), ([Other], 1), ([], 0), ([lambda app: app], 1)],
)
def test_it_sits_directly_inside_the_session_middleware(before: list[Any], place: int) -> None:
    middleware = [Middleware(each) for each in before]
    put_session_id_next_to_session(middleware, "sid")
    assert middleware[place].cls is SessionIdMiddleware
    assert [each.cls for each in middleware if each.cls is not SessionIdMiddleware] == before
