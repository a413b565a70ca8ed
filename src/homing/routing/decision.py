"""What a worker does with a request, as a plain function of who owns its session and why the request is here.

The invariant: only a client's own request is passed on (and the test mode's scattered one, once). Two workers that
disagree about an owner never send a request to and fro; the one that sent it looks up again.

Not here: looking up, acquiring and serving (`middleware.py`), which act on the decision.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from homing.types import Reason, WorkerId


class Unowned(enum.Enum):
    """What to do with a request that names a session nobody owns.

    ACQUIRE: become its owner, then serve it (a start; or an app whose clients choose their IDs).
    REFUSE: answer *gone*: the session ended, or never was.
    SERVE: serve it and leave no record (a path key that is looked up, never acquired).
    """

    ACQUIRE = enum.auto()
    REFUSE = enum.auto()
    SERVE = enum.auto()


@dataclass(frozen=True, slots=True)
class Serve:
    """This worker owns the session."""


@dataclass(frozen=True, slots=True)
class ServeUnowned:
    """Nobody owns what the request names, and nobody comes to own it."""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Nobody owns the session: this worker becomes its owner before the handler runs."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Another worker owns the session."""

    owner: WorkerId


@dataclass(frozen=True, slots=True)
class NotMine:
    """The request was sent here in error: say so, and its sender looks again."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody owns the session, and the request does not start one."""


@dataclass(frozen=True, slots=True)
class Moving:
    """The record names this worker, and this worker does not have the session (yet, or any more)."""


Decision = Serve | ServeUnowned | Acquire | Forward | NotMine | Gone | Moving

_SERVE = Serve()
_SERVE_UNOWNED = ServeUnowned()
_ACQUIRE = Acquire()
_NOT_MINE = NotMine()
_GONE = Gone()
_MOVING = Moving()


def decide(*, owner: WorkerId | None, here: WorkerId, mine: bool, reason: Reason | None, unowned: Unowned) -> Decision:
    """What to do with a request that names a session (or a path key).

    Args:
        owner: The worker that the record names; None if there is no record.
        here: This worker.
        mine: Whether this worker counts the session among its own.
        reason: Why a peer sent the request; None for a client's own.
        unowned: What to do if nobody owns it.
    """
    if owner == here:
        return _SERVE if mine else _MOVING
    if owner is not None:
        # A named or placed request may still find that another worker was quicker: that is its sender's to look up.
        return Forward(owner) if reason is None or reason is Reason.SCATTERED else _NOT_MINE
    if reason is Reason.OWNED:
        return _NOT_MINE
    match unowned:
        case Unowned.ACQUIRE:
            return _ACQUIRE
        case Unowned.SERVE:
            return _SERVE_UNOWNED
        case Unowned.REFUSE:
            return _GONE
