"""What crosses the hop between two workers: frames, and the scopes and events inside them.

A frame is a prefix of 8 bytes, a head and a payload. The prefix is one little-endian integer: 8 bits of kind, 24 bits
of head size, 32 bits of payload size. The head is msgpack, or empty; the payload is the bytes or text of a body or
message as they are, so a large one is never copied into msgpack and out again.

Invariant: what is decoded equals what was encoded, types included. What msgpack cannot tell apart crosses as an
extension of it (tuples, texts with lone surrogates); what cannot cross at all is refused where it would be sent.

Not here: reading and writing (`stream.py`), when a frame is sent (`forwarder.py`, `exchange.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from homing.errors import HeadTooLargeError, HomingError
from homing.types import Message, Scope

PREFIX: Final = struct.Struct("<II")
"""The prefix as it is read and written, quicker than as one integer: kind and head size, and then the payload's size."""

PREFIX_BYTES: Final = PREFIX.size
MAX_HEAD_BYTES: Final = 2**24 - 1
MAX_PAYLOAD_BYTES: Final = 2**30

EARLY_BODY_BYTES: Final = 64 * 1024
"""How much of a body the forwarder takes before *mine*: it may travel with the first frame, and is kept till then."""

WHOLE_EVENT_BYTES: Final = 512 * 1024
"""A body event up to this size crosses as one event. A larger one is split, so that a stream's memory stays bounded."""

PIECE_BYTES: Final = 256 * 1024
"""The size of the pieces of a split body event."""

# Kinds of frames, as plain integers: they are compared for every frame.

# Either way: an event of the request or of the reply.
BODY: Final = 1  # payload: part of a body, more follows
LAST: Final = 2  # payload: the last part of a body; head: trailers that the server has added to the request's headers
EVENT: Final = 3  # head: an event of any other type, as a dict
TEXT: Final = 4  # payload: a WebSocket message, UTF-8
DATA: Final = 5  # payload: a WebSocket message

# Forwarder to owner.
REQUEST: Final = 16  # head: `Request`; payload: early body events, one after the other
GONE: Final = 17  # the client has left: `http.disconnect`, or a send that failed
ASK: Final = 18  # head: [kind, key, asker]
SHOW: Final = 19  # head: how many sessions at most

# Owner to forwarder.
MINE: Final = 32
NOT_MINE: Final = 33
START: Final = 34  # head: [status, headers]
WHOLE: Final = 35  # head: [status, headers]; payload: the whole body
PULL: Final = 36  # the app waits for what the client does next
END: Final = 37  # the app returned, and its reply is not complete
RAISED: Final = 38  # the app raised
ANSWER: Final = 39  # head: the answer to ASK
SHOWN: Final = 41  # payload: a part of what SHOW asks for; an empty one ends it
BUSY: Final = 40  # this worker has no descriptor to take the connection with, and has read nothing of what it carries

MINE_FIRST: Final = 0x80
"""Flag on any of the owner's frames: *mine* comes first."""

BOTH_KEYS: Final = 0x40
"""Flag on TEXT and DATA: the event has the keys `text` and `bytes`, one of them None."""

FROM_FORWARDER: Final = frozenset(
    {BODY, LAST, EVENT, TEXT, DATA, TEXT | BOTH_KEYS, DATA | BOTH_KEYS, REQUEST, GONE, ASK, SHOW}
)
FROM_OWNER: Final = frozenset(
    {BODY, LAST, EVENT, TEXT, DATA, TEXT | BOTH_KEYS, DATA | BOTH_KEYS}
    | {MINE, NOT_MINE, START, WHOLE, PULL, END, RAISED, ANSWER, BUSY}
)

# How the body of a request crosses (`Request.body`).
BODY_NONE: Final = 0  # there is none: the owner makes up the only event, and the server's own is skipped
BODY_WHOLE: Final = 1  # all of it is in the first frame
BODY_OPEN: Final = 2  # the rest follows after *mine*
BODY_ASKED: Final = 3  # the client waits for `100 Continue`: nothing is read before the app reads


class MalformedFrameError(HomingError):
    """The other end of a hop does not speak its protocol: the connection is closed, and nothing of the frame used."""


class NotCarriedError(HomingError, TypeError):
    """A value that cannot cross to another worker; raised at the app's `send`, before anything of the event is sent."""


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


# --- values ---

_SURROGATES: Final = 1
_TUPLE: Final = 2

_encode = msgspec.msgpack.Encoder().encode


def _restore(code: int, data: memoryview) -> object:
    if code == _SURROGATES:
        return str(data, "utf-8", "surrogatepass")
    if code == _TUPLE:
        return tuple(_decode(data))
    raise ValueError(f"no extension {code} is known")


_decode = msgspec.msgpack.Decoder(ext_hook=_restore).decode
_decode_request = msgspec.msgpack.Decoder(Request, ext_hook=_restore).decode
_decode_start = msgspec.msgpack.Decoder(Start).decode


def _carried(value: object) -> object:
    """`value` in a form that msgpack carries and `_restore` turns back into an equal value of the same types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(_SURROGATES, value.encode("utf-8", "surrogatepass"))
        return str(value)
    match value:
        case int():
            return int(value)
        case float():
            return float(value)
        case bytes():
            return bytes(value)
        case bytearray() | memoryview():
            return bytes(value)
        case tuple():
            return msgspec.msgpack.Ext(_TUPLE, _encode([_carried(item) for item in value]))
        case list():
            return [_carried(item) for item in value]
        case dict():
            return {_carried_key(key): _carried(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another worker")


def _carried_key(key: object) -> str:
    if isinstance(key, str) and key.isprintable():  # lone surrogates are not printable
        return str(key)
    raise TypeError("only plain texts can be keys of what is sent to another worker")


def encode_value(value: object, what: str) -> bytes:
    """`value` as the head of a frame.

    Raises:
        NotCarriedError: it holds something that msgpack has no word for, or is too large for a head.
    """
    try:
        head = _encode(_carried(value))
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise NotCarriedError(f"{what} cannot cross to the worker that serves this connection: {error}") from error
    if len(head) > MAX_HEAD_BYTES:
        raise NotCarriedError(f"{what} has {len(head)} bytes, and at most {MAX_HEAD_BYTES} cross to another worker")
    return head


def decode_value(head: bytes) -> Any:
    """What `encode_value` was given.

    Raises:
        MalformedFrameError: the head is not msgpack.
    """
    try:
        return _decode(head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrameError(f"the head of a frame cannot be read: {error}") from error


def _crosses(value: object) -> bool:
    try:
        encode_value(value, "it")
    except NotCarriedError:
        return False
    return True


# --- frames ---


def frame(kind: int, head: bytes = b"", payload: bytes = b"") -> bytes:
    """One frame as bytes. Sizes are the caller's to check (`encode_value`, `check_payload`)."""
    return b"".join((PREFIX.pack(kind | len(head) << 8, len(payload)), head, payload))


def check_payload(payload: bytes, what: str) -> None:
    """Raises NotCarriedError if `payload` is larger than what the other end accepts."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise NotCarriedError(f"{what} has {len(payload)} bytes, and at most {MAX_PAYLOAD_BYTES} cross in one event")


# --- scopes ---

_TYPED: Final = frozenset({"headers", "client", "server"})
_LEFT_OUT: Final = frozenset({"state", "app", "extensions", *_TYPED})
_HEAD_LENGTH: Final = "homing.head_length"
"""Of our own keys the one that crosses: a receiving router that looks for the session again must skip trailers too."""

_USUAL: Final = frozenset(
    {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "state"}
    | {_HEAD_LENGTH, "homing.abort", "homing.forwarded", "homing.hop", "homing.session_id", "homing.acquire_session"}
    | _TYPED
)
"""A scope with no other keys takes the quick way."""

_NOT_CROSSING_EXTENSIONS: Final = frozenset(
    {"http.response.zerocopysend", "http.response.debug", "http.response.template"}
)
_NOT_CROSSING_EVENTS: Final = _NOT_CROSSING_EXTENSIONS
"""Event types that hold descriptors or live objects: a descriptor's number means another file in another process."""


def crossable_extensions(scope: Scope) -> dict[str, Any] | None:
    """The scope's extensions less those that cannot cross to another worker; None if the scope has none.

    The router gives the app these in a request served where it arrived, too, so that the app sees the same either way.
    """
    extensions: dict[str, Any] | None = scope.get("extensions")
    if not extensions:
        return extensions
    return {
        name: value for name, value in extensions.items() if name not in _NOT_CROSSING_EXTENSIONS and _crosses(value)
    }


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
            head = _encode(
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
        if key in _USUAL or _crosses(value):
            rest[key] = value
    if "extensions" in scope:
        rest["extensions"] = crossable_extensions(scope)
    client, server = scope.get("client"), scope.get("server")
    try:
        head = _encode(
            (
                reason,
                [_carried(item) for item in note],
                body,
                early,
                [(bytes(name), bytes(value)) for name, value in scope["headers"]],
                None if client is None else [_carried(item) for item in client],
                None if server is None else [_carried(item) for item in server],
                _carried(rest),
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
        head = _encode((status, headers))
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
    return _encode([(bytes(name), bytes(value)) for name, value in trailers]) if trailers else b""


def read_trailers(head: bytes) -> list[tuple[bytes, bytes]]:
    """The trailers in a LAST frame's head."""
    try:
        return _decode_trailers(head)
    except msgspec.MsgspecError as error:
        raise MalformedFrameError("the trailers of a request are header pairs") from error


# --- events of any type ---


def event_frame(event: Message) -> tuple[int, bytes, bytes]:
    """Kind, head and payload of a frame for an event of any type but HTTP bodies and starts.

    Raises:
        NotCarriedError: the event cannot cross.
    """
    kind: str = event["type"]
    if kind in ("websocket.receive", "websocket.send"):
        message = _message_frame(event)
        if message is not None:
            return message
    if kind in _NOT_CROSSING_EVENTS:
        raise NotCarriedError(f"{kind} cannot cross to the worker that serves this connection")
    return EVENT, encode_value(event, kind), b""


def _message_frame(event: Mapping[str, object]) -> tuple[int, bytes, bytes] | None:
    text, data = event.get("text"), event.get("bytes")
    if len(event) == 2:
        flag = 0
    elif len(event) == 3 and "text" in event and "bytes" in event:
        flag = BOTH_KEYS
    else:
        return None
    if type(text) is str and data is None:
        payload, kind = text.encode(), TEXT
    elif isinstance(data, bytes | bytearray | memoryview) and text is None:
        payload, kind = bytes(data), DATA
    else:
        return None
    check_payload(payload, "a WebSocket message")
    return kind | flag, b"", payload


def read_event(kind: int, head: bytes, payload: bytes, message_type: str) -> Message:
    """The event in an EVENT, TEXT or DATA frame; `message_type` is the type of a message in this direction."""
    if kind == EVENT:
        event = decode_value(head)
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise MalformedFrameError("an event is a dict with a type")
        return event
    event = {"type": message_type}
    if kind & BOTH_KEYS:
        event["text"] = event["bytes"] = None
        kind ^= BOTH_KEYS
    if kind == TEXT:
        try:
            event["text"] = payload.decode()
        except UnicodeDecodeError as error:
            raise MalformedFrameError("a text message is not UTF-8") from error
    elif kind == DATA:
        event["bytes"] = payload
    else:
        raise MalformedFrameError(f"a frame of kind {kind} carries no event")
    return event


def pieces(body: bytes) -> Iterable[bytes]:
    """`body` in pieces of at most `PIECE_BYTES`, without copying more than one of them at a time."""
    view = memoryview(body)
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])
