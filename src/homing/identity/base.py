"""What a request says about its session, and the seam that the router asks through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from homing.types import Message, Receive, Scope, SessionId, WorkerId

# Named tuples, not frozen dataclasses: several are made for each request, at a third of the cost.


class Named(NamedTuple):
    """What a request says about its session.

    Attributes:
        session_id: The session the request names; None if it names none.
        start: The route is a declared start: it may begin the session it names, or a new one.
        end: The route is a declared end: a 2xx reply ends the session.
        mints: The request names no session and its kind lets the router make an ID for it.
        path_key: A key the path names, such as `/rollouts/<id>`; looked up, never acquired, and only where
            `session_id` is None.
        start_path_key: A key that this start acquires beside its session, read from its body.
        worker: The worker that the request names (`x-ng-session-owner`), only where it names no session.
        also: Other IDs that the request's body names. A reply that repeats one of them makes no session known, so they
            cross the hop with the rest.
    """

    session_id: SessionId | None = None
    start: bool = False
    end: bool = False
    mints: bool = False
    path_key: str | None = None
    start_path_key: str | None = None
    worker: WorkerId | None = None
    also: tuple[SessionId, ...] = ()


_new: Final = tuple.__new__


def named_only(session_id: str) -> Named:
    """`Named(SessionId(session_id))` at a quarter of its cost: what most requests say."""
    return _new(Named, (session_id, False, False, False, None, None, None, ()))


class Learned(NamedTuple):
    """What one event of a reply makes known.

    Attributes:
        session_ids: IDs that occur in `messages` for the first time; each must be owned before `messages` leave.
        messages: The events that may leave now, in order: often the one just fed, none while one is held back, or
            several once it is known what they carry.
    """

    session_ids: tuple[SessionId, ...]
    messages: tuple[Message, ...]


class Learner(Protocol):
    """Reads one reply as it passes, and holds back what may carry an ID until that ID is known.

    Attributes:
        done: Nothing is held back and nothing more can be learned: later events need not be fed.
    """

    @property
    def done(self) -> bool: ...

    def feed(self, message: Message) -> Learned:
        """Take the app's next event; say what may leave now, and which IDs that makes known."""
        ...


class HeadLearner(Protocol):
    """Reads one reply's start, or a WebSocket's accept, where replies can hold no ID but in their headers."""

    def __call__(self, scope: Scope, named: Named, message: Message) -> Sequence[SessionId]:
        """The IDs that `message` makes known; each must be owned before it leaves."""
        ...


class Identity(Protocol):
    """Which session does a request name? One object per app; it keeps nothing of a request.

    Attributes:
        head_learner: Learns from every reply of the app in place of a `learner`, at far less cost; None: ask for one.
    """

    @property
    def head_learner(self) -> HeadLearner | None: ...

    def from_head(self, scope: Scope) -> Named | None:
        """What the head says, or None if the body has to be read first (`from_body`).

        Raises:
            BadRequestError: the head names a session in a way that cannot be read.
        """
        ...

    async def from_body(self, scope: Scope, receive: Receive) -> tuple[Named, Receive]:
        """What head and body say, and a `receive` that gives the body once more and then the real events.

        Raises:
            BadRequestError: 400, 408, 413 or 415, as the subclass says.
            SessionConflictError: the head and the body name different sessions.
        """
        ...

    def learner(self, scope: Scope, named: Named) -> Learner | None:
        """What reads this request's reply for new IDs; None where the reply can hold none."""
        ...
