"""The words that every room shares: IDs, the ASGI callables, and why a worker sends a request to another.

Not here: anything that decides or waits. This module imports nothing of ours.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, NewType, TypeAlias

SessionId = NewType("SessionId", str)
"""The name a request carries for its session: 1 to 1,024 bytes of UTF-8, any text. Whoever knows it has the session."""

WorkerId = NewType("WorkerId", str)
"""One start of one worker process: 128 random bits as 32 lowercase hex digits. Never reused, never a PID."""

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_SESSION_ID_BYTES: Final = 1024

SESSION: Final = "session"
"""The kind of key that a session ID is."""

PATH: Final = "path"
"""The kind of key that a path is, such as `/rollouts/<id>`; hashed apart, so no session ID can pose as one."""


class Reason(enum.IntEnum):
    """Why a request was sent to this worker: what the receiver may do with it depends on this.

    OWNED: the sender saw that this worker owns the session; served only if that is still so.
    NAMED: the client named this worker (`x-ng-session-owner`); treated as if it had arrived here.
    PLACED: a start that nobody owned, placed here; treated as if it had arrived here.
    SCATTERED: the test mode's detour; treated as a client's own request, so it may be forwarded once more.
    """

    OWNED = 0
    NAMED = 1
    PLACED = 2
    SCATTERED = 3


def key_bytes(key: str) -> bytes:
    """A session ID or path key as bytes: UTF-8, with lone surrogates as they are, so distinct texts stay distinct."""
    return key.encode("utf-8", "surrogatepass")


def key_digest(kind: str, key: str) -> str:
    """The name of the owner record of `key`: 64 hex digits, `sha256(kind ‖ NUL ‖ key)`."""
    return hashlib.sha256(kind.encode() + b"\0" + key_bytes(key)).hexdigest()


def session_tag(session_id: str) -> str:
    """What logs and messages show in place of a session ID: the first 12 digits of its owner record's name."""
    return key_digest(SESSION, session_id)[:12]


def with_lasting_headers(message: Message) -> Message:
    """The message, with headers that can be read here and by the server after: an app may give an iterator."""
    headers = message.get("headers", ())
    return message if isinstance(headers, list | tuple) else {**message, "headers": list(headers)}
