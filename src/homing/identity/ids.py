"""Is a text that was found where sessions are named a session ID?

Any text of 1 to 1,024 bytes is one. An empty text names no session.

Not here: where the text was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from homing.errors import SessionIdTooLongError
from homing.types import MAX_SESSION_ID_BYTES, Scope, SessionId, key_bytes

HEAD_LENGTH_SCOPE_KEY: Final = "homing.head_length"
"""How many of the scope's headers came with the request's head: an int, set by `homing run`; absent: all."""

SURELY_FITS: Final = MAX_SESSION_ID_BYTES // 4
"""A text of so many characters is no longer than a session ID may be: no character takes more than 4 bytes."""


def session_id(text: str | None) -> SessionId | None:
    """`text` as a session ID; None for an empty text and for None.

    Raises:
        SessionIdTooLongError: it is over 1,024 bytes long as UTF-8.
    """
    if not text:
        return None
    if len(text) > SURELY_FITS and not fits(text):
        raise SessionIdTooLongError(f"a request names its session by a text of over {MAX_SESSION_ID_BYTES} bytes")
    return SessionId(text)


def fits(text: str) -> bool:
    """Whether a text is no longer than a session ID may be."""
    length = len(text)
    return length <= SURELY_FITS or (length <= MAX_SESSION_ID_BYTES and len(key_bytes(text)) <= MAX_SESSION_ID_BYTES)


def header_text(value: bytes) -> str:
    """A header's bytes as text: UTF-8; Latin-1 where they are none.

    Clients differ in how they send a text, and either way it is the session that a JSON reply named by that text. So two
    headers are one ID only if they are the two encodings of one text.
    """
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")


def head_headers(scope: Scope) -> Sequence[tuple[bytes, bytes]]:
    """The headers that came with the request's head.

    Some servers add a request's trailers to its headers; `homing run` notes how many came with the head. A trailer,
    which a client can send after the router has looked, never names a session.
    """
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    length: int | None = scope.get(HEAD_LENGTH_SCOPE_KEY)
    return headers if length is None or length >= len(headers) else list(headers)[:length]
