"""The seam between the hop and the router: what a forwarded request brings, and how its receiver answers.

The receiver calls the app with `scope["homing.hop"]` set to a `Hop`. Only the receiver sets that key: no client can.
"""

from __future__ import annotations

import enum
from typing import Final, Protocol

from homing.types import Reason

HOP_SCOPE_KEY: Final = "homing.hop"

WHOLE_BODY_SCOPE_KEY: Final = "homing.whole_body"
"""Set by a server that can tell: called with the scope and a `receive`, it gives the request's body if all of it is here, and if
`receive` is its own, which gives it too; else None."""


class Hop(Protocol):
    """A request that another worker sent here. One of `mine` and `not_mine` is called, before anything is sent.

    Attributes:
        reason: Why it was sent.
        note: What the sender's router knew of it, as it gave it to `Forwarder.forward`: values msgpack carries.
    """

    reason: Reason
    note: tuple[object, ...]

    def mine(self) -> None:
        """This worker handles it, so the sender may give up its copy of the body. Shares a write with a ready reply."""
        ...

    def not_mine(self) -> None:
        """This worker does not own the session (any more): nothing ran, and the sender looks again."""
        ...


class Answer(enum.IntEnum):
    """What an owner answers to a worker that asks for a session (a restore)."""

    GIVEN = 0
    BUSY = 1
    NOT_MINE = 2
