"""Bodies of Gymnasium servers: JSON, or msgpack where the caller asks for it; the same content in both.

Not here: observations and actions themselves (`spaces.py`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from pydantic_core import from_json, to_json

from homing.rl.errors import InvalidRequestError
from homing.rl.spaces import extension

MSGPACK: Final = "application/msgpack"
JSON: Final = "application/json"
_BINARY_TYPES: Final = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")

_decoder: Final = msgspec.msgpack.Decoder(ext_hook=extension)
_encoder: Final = msgspec.msgpack.Encoder()


def is_binary(content_type: str | None) -> bool:
    """Whether a `Content-Type` is msgpack's."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() in _BINARY_TYPES


def asks_for_binary(accept: str | None) -> bool:
    """Whether an `Accept` names msgpack; preferences (`q`) are not weighed, but 0 is no."""
    if accept is None or "msgpack" not in accept:
        return False
    for each in accept.split(","):
        name, *parameters = each.split(";")
        refused = any(parameter.strip().lower() in ("q=0", "q=0.0", "q=0.00", "q=0.000") for parameter in parameters)
        if name.strip().lower() in _BINARY_TYPES and not refused:
            return True
    return False


def pack(content: Any, *, binary: bool) -> bytes:
    """Plain types as a body."""
    return _encoder.encode(content) if binary else to_json(content, inf_nan_mode="strings")


def unpack(raw: bytes, *, binary: bool) -> dict[str, Any]:
    """A body that is an object; none is an empty one.

    Raises:
        InvalidRequestError: it is none.
    """
    if not raw:
        return {}
    try:
        found = _decoder.decode(raw) if binary else from_json(raw, allow_inf_nan=False)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body: no valid {'msgpack' if binary else 'JSON'} ({error})") from error
    if not isinstance(found, dict):
        raise InvalidRequestError("the body: an object is expected")
    return found
