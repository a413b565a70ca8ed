"""What crosses the hop between two workers: frames, and the events inside them.

A frame is a prefix of 8 bytes, a head and a payload. The prefix is one little-endian integer: 8 bits of kind, 24 bits
of head size, 32 bits of payload size. The head is msgpack, or empty; the payload is the bytes or text of a body or
message as they are, so a large one is never copied into msgpack and out again.

Not here: what is in a head (`values.py`; of a request and the start of its reply `heads.py`), reading and writing
(`stream.py`), when a frame is sent (`forwarder.py`, `exchange.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from homing.forwarding.heads import NOT_CROSSING
from homing.forwarding.values import MalformedFrameError, NotCarriedError, crosses, decode_value, encode_value
from homing.types import Message, with_lasting_headers

PREFIX: Final = struct.Struct("<II")
"""The prefix as it is read and written, quicker than as one integer: kind and head size, and then the payload's size."""

PREFIX_BYTES: Final = PREFIX.size
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
SHARE: Final = 20  # from here on this connection carries numbered frames (`numbered.py`)
JOIN: Final = 21  # head: what CALL said; the exchange goes on over this connection

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
CALL: Final = 42  # on a shared connection; head: what to JOIN a connection of its own with
DROPPED: Final = 43  # on a shared connection: this worker stops before the app is done
LAST_READ: Final = 44  # on a shared connection; number: of the last request that was, or will be, read
SHARED: Final = 45  # on a shared connection: requests may come
BUSY: Final = 40  # this worker has no descriptor to take the connection with, and has read nothing of what it carries

MINE_FIRST: Final = 0x80
"""Flag on any of the owner's frames: *mine* comes first."""

BOTH_KEYS: Final = 0x40
"""Flag on TEXT and DATA: the event has the keys `text` and `bytes`, one of them None."""

FROM_FORWARDER: Final = frozenset(
    {BODY, LAST, EVENT, TEXT, DATA, TEXT | BOTH_KEYS, DATA | BOTH_KEYS, REQUEST, GONE, ASK, SHOW, SHARE, JOIN}
)
FROM_OWNER: Final = frozenset(
    {BODY, LAST, EVENT, TEXT, DATA, TEXT | BOTH_KEYS, DATA | BOTH_KEYS}
    | {MINE, NOT_MINE, START, WHOLE, PULL, END, RAISED, ANSWER, BUSY}
)


def frame(kind: int, head: bytes = b"", payload: bytes = b"") -> bytes:
    """One frame as bytes. Sizes are the caller's to check (`encode_value`, `check_payload`)."""
    return b"".join((PREFIX.pack(kind | len(head) << 8, len(payload)), head, payload))


def check_payload(payload: bytes, what: str) -> None:
    """Raises NotCarriedError if `payload` is larger than what the other end accepts."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise NotCarriedError(f"{what} has {len(payload)} bytes, and at most {MAX_PAYLOAD_BYTES} cross in one event")


# --- events of any type ---

_KEYS: Final = {
    "http.response.start": frozenset({"type", "status", "headers", "trailers"}),
    "http.response.body": frozenset({"type", "body", "more_body"}),
    "http.response.trailers": frozenset({"type", "headers", "more_trailers"}),
    "websocket.accept": frozenset({"type", "subprotocol", "headers"}),
    "websocket.send": frozenset({"type", "text", "bytes"}),
    "websocket.close": frozenset({"type", "code", "reason"}),
    "websocket.http.response.start": frozenset({"type", "status", "headers"}),
    "websocket.http.response.body": frozenset({"type", "body", "more_body"}),
}
"""What the ASGI specification puts in an app's events (HTTP & WebSocket 2.5, Trailers and Denial Response extensions)."""


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
    if kind in NOT_CROSSING:
        raise NotCarriedError(f"{kind} cannot cross to the worker that serves this connection")
    event = with_lasting_headers(event)
    try:
        return EVENT, encode_value(event, kind), b""
    except NotCarriedError:
        known = _KEYS.get(kind)
        if known is None:
            raise
        # A server looks at no other keys of these events, so what cannot cross of them is nobody's loss.
        crossing = {key: value for key, value in event.items() if key in known or crosses({key: value})}
        return EVENT, encode_value(crossing, kind), b""


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
