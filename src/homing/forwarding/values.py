"""What crosses the hop inside the head of a frame: values as msgpack.

Invariant: what is decoded equals what was encoded, types included. What msgpack cannot tell apart crosses as an
extension of it (tuples, texts with lone surrogates); what cannot cross at all is refused where it would be sent.

Not here: what the values are (`heads.py`, `frames.py`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from homing.errors import HomingError

MAX_HEAD_BYTES: Final = 2**24 - 1


class MalformedFrameError(HomingError):
    """The other end of a hop does not speak its protocol: the connection is closed, and nothing of the frame used."""


class NotCarriedError(HomingError, TypeError):
    """A value that cannot cross to another worker; raised at the app's `send`, before anything of the event is sent."""


_SURROGATES: Final = 1
_TUPLE: Final = 2

encode = msgspec.msgpack.Encoder().encode


def restore(code: int, data: memoryview) -> object:
    if code == _SURROGATES:
        return str(data, "utf-8", "surrogatepass")
    if code == _TUPLE:
        return tuple(_decode(data))
    raise ValueError(f"no extension {code} is known")


_decode = msgspec.msgpack.Decoder(ext_hook=restore).decode


def carried(value: object) -> object:
    """`value` in a form that msgpack carries and `restore` turns back into an equal value of the same types."""
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
            return msgspec.msgpack.Ext(_TUPLE, encode([carried(item) for item in value]))
        case list():
            return [carried(item) for item in value]
        case dict():
            return {_carried_key(key): carried(item) for key, item in value.items()}
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
        head = encode(carried(value))
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


def crosses(value: object) -> bool:
    try:
        encode_value(value, "it")
    except NotCarriedError:
        return False
    return True
