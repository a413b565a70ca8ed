"""What the HTTP surface answers when a call fails: `{"detail", "error_kind", "retryable"}`, whoever found the error.

The invariant: no reply repeats what was sent. A body that cannot be read is answered with places and messages only, since
it may hold a close token.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from homing.errors import ReplyError
from homing.routing.answers import Reply
from homing.types import ASGIApp, Message, Receive, Scope, Send
from homing.web.errors import WebError

logger = logging.getLogger(__name__)

_ROUTER_KINDS: Final = {
    "session_gone": "session_gone",
    "session_conflict": "session_conflict",
    "session_limit": "capacity_unavailable",
    "owner_busy": "capacity_unavailable",
    "session_moving": "capacity_unavailable",
    "not_here": "capacity_unavailable",
    "directory_unavailable": "capacity_unavailable",
    "directory_busy": "capacity_unavailable",
    "unavailable": "capacity_unavailable",
    "owner_timeout": "operation_timeout",
    "owner_unreachable": "session_lost",
}
"""The router's codes as kinds of this surface; any other below 500 is `invalid_request`."""

_RETRYABLE: Final = frozenset(
    {"session_conflict", "session_gone", "capacity_unavailable", "operation_timeout", "session_lost"}
)


def body_of(detail: object, error_kind: str, retryable: bool) -> bytes:
    return json.dumps({"detail": detail, "error_kind": error_kind, "retryable": retryable}).encode()


def router_reply(error: ReplyError) -> Reply:
    """An error of the router in this surface's shape; its code stays in the header `homing-error`."""
    kind = _ROUTER_KINDS.get(error.code, "invalid_request" if error.status < 500 else "internal_error")
    body = body_of(error.detail, kind, kind in _RETRYABLE)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    return error.status, headers, body


def error_response(error: WebError) -> Response:
    """The reply for an error of this room."""
    headers = {"retry-after": "1"} if error.status == 503 and error.retryable else {}
    return Response(
        body_of(error.shown, error.error_kind, error.retryable), error.status, headers, media_type="application/json"
    )


def add_error_replies(app: FastAPI) -> None:
    """Answer every error in this surface's shape."""

    @app.exception_handler(WebError)
    async def web_error(_: Request, error: WebError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        found = [_place_and_message(each) for each in error.errors()]
        return Response(body_of(found, "invalid_request", False), 422, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return _http_error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: ClientDisconnect) -> Response:
        # Mostly nobody is there to read it; who has only closed its own side is, and is told in words like anybody.
        told = body_of("The request's connection was closed before its reply: send it again.", "invalid_request", True)
        return Response(told, 400, media_type="application/json")

    @app.exception_handler(Exception)
    async def other_error(_: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return Response(
            body_of("The server failed; its log says how.", "internal_error", False), 500, media_type="application/json"
        )


def _place_and_message(error: dict[str, Any]) -> dict[str, Any]:
    # Field names are ours, or the client's own keys of a field that is refused: the place is cut, not repeated at length.
    place = [part if isinstance(part, int) else str(part)[:64] for part in error["loc"]]
    return {"loc": place, "msg": error["msg"] if "ctx" not in error else _without_input(error)}


def _without_input(error: dict[str, Any]) -> str:
    # A message may be made of a validator's own text, which is ours, or of a JSON parser's, which quotes nothing.
    return str(error["msg"])[:200]


class BodyLimit:
    """Refuses bodies over a limit, before they are read where they say how long they are, else while they are read."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > self._max:
                    raise self._too_long()
            return message

        declared = [value for name, value in scope["headers"] if name == b"content-length"]
        if declared and declared[0].isdigit() and int(declared[0]) > self._max:
            await _http_error_response(self._too_long())(scope, receive, send)
            return
        await self.app(scope, limited, send)

    def _too_long(self) -> HTTPException:
        return HTTPException(413, f"A body may have {self._max} bytes.", {"connection": "close"})


def _http_error_response(error: HTTPException) -> Response:
    return Response(
        body_of(error.detail, "invalid_request", False), error.status_code, error.headers, media_type="application/json"
    )
