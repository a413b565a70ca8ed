"""The replies that homing itself gives: each names its code in the header `homing-error`, and no path, ID or errno.

Not here: which error a situation is (`homing.errors`, and whoever raises it).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Final

from homing.errors import ReplyError, SessionGoneError
from homing.types import Scope, Send

logger = logging.getLogger(__name__)

ERROR_HEADER: Final = b"homing-error"

CLOSED_ABNORMALLY: Final = 1011
"""RFC 6455, 7.4.1: the server met a condition that kept it from fulfilling the request."""

_DENIAL: Final = "websocket.http.response"


Reply = tuple[int, Sequence[tuple[bytes, bytes]], bytes]
"""A whole reply: status, header list (lowercase names), body."""

GoneReply = Callable[[Scope], Reply | None]
"""The shape a protocol gives its own *gone* answer, such as MCP's JSON-RPC error; None: the request is not its own."""


ErrorReply = Callable[[ReplyError], Reply]
"""The shape that a server gives every error of the router, instead of homing's own."""


def error_reply(error: ReplyError, *, gone_status: int | None = None) -> Reply:
    """The reply for an error: JSON `{"error": {"code": …, "detail": …}}`."""
    status = error.status
    if gone_status is not None and isinstance(error, SessionGoneError):
        status = gone_status
    body = json.dumps({"error": {"code": error.code, "detail": error.detail}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    return status, headers, body


async def answer(
    error: ReplyError,
    scope: Scope,
    send: Send,
    *,
    gone_status: int | None = None,
    gone_reply: GoneReply | None = None,
    shape: ErrorReply | None = None,
    session: str | None = None,
) -> None:
    """Answer a request with an error, before anything else was sent for it, and log it in one line.

    A WebSocket gets the same status as a denial response, or a plain 403 where the server has none.

    Args:
        session: The tag of the session that it names, for the log.
    """
    of_protocol = gone_reply(scope) if gone_reply is not None and isinstance(error, SessionGoneError) else None
    if of_protocol is not None:
        status, headers, body = of_protocol
    elif shape is not None:
        status, headers, body = shape(error)
    else:
        status, headers, body = error_reply(error, gone_status=gone_status)
    fields = {"event": "answered", "status": status, "code": error.code, "session": session, "kind": scope["type"]}
    logger.info("answered %s %s: %s", status, error.code, error, extra=fields)
    if scope["type"] == "websocket":
        if _DENIAL not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": CLOSED_ABNORMALLY, "reason": ""})
            return
        kind = _DENIAL
    else:
        kind = "http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": [*headers, (ERROR_HEADER, error.code.encode())]})
    if scope.get("method") == "HEAD":
        body = b""
    await send({"type": f"{kind}.body", "body": body, "more_body": False})
