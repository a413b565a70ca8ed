"""The heads of the frames that begin a request and its reply: an ASGI scope, and `http.response.start`.

Not here: values of any kind as msgpack (`values.py`), frames, and all other events (`frames.py`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from homing.errors import HeadTooLargeError
from homing.forwarding.values import (
    MAX_HEAD_BYTES,
    MalformedFrameError,
    NotCarriedError,
    carried,
    crosses,
    decode_value,
    encode,
    encode_value,
    restore,
)
from homing.types import Message, Scope

# How the body of a request crosses (`Request.body`).
BODY_NONE: Final = 0  # there is none: the owner makes up the only event, and the server's own is skipped
BODY_WHOLE: Final = 1  # all of it is in the first frame
BODY_OPEN: Final = 2  # the rest follows after *mine*
BODY_ASKED: Final = 3  # the client waits for `100 Continue`: nothing is read before the app reads


class Request(msgspec.Struct, array_like=True):
    """The head of the first frame of a request; `request_head` writes it, `request_scope` makes the app's scope of it.

    What every HTTP scope has lies at a fixed place, which is quicker than by name. `rest` holds all other keys, and for
    other scopes all of them but the headers and the two addresses.
    """

    reason: int
    note: tuple[Any, ...]
    body: int
    early: tuple[int, ...]
    headers: list[tuple[bytes, bytes]]
    client: tuple[Any, ...] | None
    server: tuple[Any, ...] | None
    rest: dict[str, Any] | None
    asgi: dict[str, Any] | None = None
    http_version: Any = None
    method: Any = None
    scheme: Any = None
    path: Any = None
    raw_path: Any = None
    query_string: Any = None
    root_path: Any = None
    head_length: int | None = None


class Start(msgspec.Struct, array_like=True, frozen=True):
    """The head of a frame that starts a reply."""

    status: int
    headers: list[tuple[bytes, bytes]]


_decode_request = msgspec.msgpack.Decoder(Request, ext_hook=restore).decode
_decode_start = msgspec.msgpack.Decoder(Start).decode

# --- requests ---

_TYPED: Final = frozenset({"headers", "client", "server"})
_LEFT_OUT: Final = frozenset({"state", "app", "extensions", *_TYPED})
_HEAD_LENGTH: Final = "homing.head_length"
"""Of our own keys the one that crosses: a receiving router that looks for the session again must skip trailers too."""

_USUAL: Final = frozenset(
    {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "state"}
    | {_HEAD_LENGTH, "homing.abort", "homing.client_left", "homing.forwarded", "homing.hop", "homing.whole_body"}
    | {"homing.session_id", "homing.acquire_session"}
    | _TYPED
)
"""A scope with no other keys takes the quick way."""

NOT_CROSSING: Final = frozenset({"http.response.zerocopysend", "http.response.debug", "http.response.template"})
"""Extensions, and events of the same name, that hold descriptors or live objects: a descriptor's number means another file in
another process."""


def crossable_extensions(scope: Scope) -> dict[str, Any] | None:
    """The scope's extensions less those that cannot cross to another worker; None if the scope has none.

    The router gives the app these in a request served where it arrived, too, so that the app sees the same either way.
    """
    extensions: dict[str, Any] | None = scope.get("extensions")
    if not extensions:
        return extensions
    return {name: value for name, value in extensions.items() if name not in NOT_CROSSING and crosses(value)}


def request_head(reason: int, note: tuple[object, ...], scope: Scope, body: int, early: tuple[int, ...]) -> bytes:
    """The head of a request's first frame; `Request` says what is in it.

    Every key of the scope crosses whose value msgpack carries, except `state` and `app` (the owner has its own),
    `homing.*` (this worker's own words) and extensions that cannot cross.

    Raises:
        NotCarriedError: the note, or a key that ASGI gives every scope, cannot cross.
        HeadTooLargeError: it is larger than what the other end accepts.
    """
    if _USUAL.issuperset(scope) and scope["type"] == "http":
        try:
            head = encode(
                (
                    reason,
                    note,
                    body,
                    early,
                    scope["headers"],
                    scope["client"],
                    scope["server"],
                    None,
                    scope["asgi"],
                    scope["http_version"],
                    scope["method"],
                    scope["scheme"],
                    scope["path"],
                    scope["raw_path"],
                    scope["query_string"],
                    scope["root_path"],
                    scope.get(_HEAD_LENGTH),
                )
            )
        except (UnicodeEncodeError, KeyError, TypeError):
            pass  # a lone surrogate in the path or in a session ID, a key that is optional: the long way
        else:
            if len(head) <= MAX_HEAD_BYTES:
                return head
    return _unusual_head(reason, note, scope, body, early)


def _unusual_head(reason: int, note: tuple[object, ...], scope: Scope, body: int, early: tuple[int, ...]) -> bytes:
    rest: dict[str, object] = {}
    for key, value in scope.items():
        if key in _LEFT_OUT or (key.startswith("homing.") and key != _HEAD_LENGTH):
            continue
        if key in _USUAL or crosses(value):
            rest[key] = value
    if "extensions" in scope:
        rest["extensions"] = crossable_extensions(scope)
    client, server = scope.get("client"), scope.get("server")
    try:
        head = encode(
            (
                reason,
                [carried(item) for item in note],
                body,
                early,
                [(bytes(name), bytes(value)) for name, value in scope["headers"]],
                None if client is None else [carried(item) for item in client],
                None if server is None else [carried(item) for item in server],
                carried(rest),
            )
        )
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise NotCarriedError(f"the request cannot cross to another worker: {error}") from error
    if len(head) > MAX_HEAD_BYTES:
        raise HeadTooLargeError(f"the request's head has {len(head)} bytes, and at most {MAX_HEAD_BYTES} cross")
    return head


def read_request(head: bytes) -> Request:
    """The request in a first frame; `request_scope` makes the app's scope of it.

    Raises:
        MalformedFrameError: it is not one.
    """
    try:
        request = _decode_request(head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrameError(f"the head of a request cannot be read: {error}") from error
    if request.asgi is None and (request.rest is None or request.rest.get("type") not in ("http", "websocket")):
        raise MalformedFrameError("the scope of a request is of no known type")
    return request


def request_scope(request: Request) -> Scope:
    """The scope as the worker that accepted the request has it, less what cannot cross."""
    if request.asgi is None:
        rest = request.rest or {}
        return rest | {"headers": request.headers, "client": request.client, "server": request.server}
    scope: Scope = {
        "type": "http",
        "asgi": request.asgi,
        "http_version": request.http_version,
        "server": request.server,
        "client": request.client,
        "scheme": request.scheme,
        "root_path": request.root_path,
        "headers": request.headers,
        "method": request.method,
        "path": request.path,
        "raw_path": request.raw_path,
        "query_string": request.query_string,
    }
    if request.head_length is not None:
        scope[_HEAD_LENGTH] = request.head_length
    return scope


# --- replies ---


def start_head(message: Message) -> bytes | None:
    """The head of a START or WHOLE frame for an `http.response.start`; None if only EVENT carries all that it holds."""
    status, headers = message["status"], message.get("headers", ())
    if len(message) > 3 or (len(message) == 3 and "headers" not in message):
        return None
    try:
        head = encode((status, headers))
    except (TypeError, OverflowError):
        # An iterator, or header values that are no bytes: the server that gets them judges, as it would here.
        return encode_value((status, [tuple(pair) for pair in headers]), "http.response.start")
    if len(head) > MAX_HEAD_BYTES:
        raise NotCarriedError(f"http.response.start has {len(head)} bytes, and at most {MAX_HEAD_BYTES} cross")
    return head


def read_start(head: bytes) -> Message:
    """The `http.response.start` in a START or WHOLE frame."""
    try:
        start = _decode_start(head)
    except msgspec.MsgspecError:
        status, headers = _pair(decode_value(head))
        return {"type": "http.response.start", "status": status, "headers": headers}
    return {"type": "http.response.start", "status": start.status, "headers": start.headers}


def _pair(value: object) -> tuple[object, object]:
    if isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    raise MalformedFrameError("the start of a reply holds a status and headers")


_decode_trailers = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]]).decode


def trailers_head(trailers: list[tuple[bytes, bytes]]) -> bytes:
    """The head of a LAST frame: headers that came after the request's head had been sent; empty for none."""
    return encode([(bytes(name), bytes(value)) for name, value in trailers]) if trailers else b""


def read_trailers(head: bytes) -> list[tuple[bytes, bytes]]:
    """The trailers in a LAST frame's head."""
    try:
        return _decode_trailers(head)
    except msgspec.MsgspecError as error:
        raise MalformedFrameError("the trailers of a request are header pairs") from error
