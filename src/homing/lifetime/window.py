"""Deadlines of sessions, and the lifetimes of a generic app's sessions: open until an end or until idle.

Invariant: a session has one record at most, and only that record's own deadline ever drops it: what a heap still holds
of an earlier one never fires for a session that was opened again, or removed, since.

Not here: whether a request used its session, which the router judges; how ownership ends (`homing.directory`).
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from homing.clock import SYSTEM_CLOCK, Clock
from homing.routes import Routes
from homing.types import Scope

ENDED_SCOPE_KEY: Final = "homing.ended"
"""Set to true in a request's scope by a handler that has ended the request's session, whatever its route and status."""

BEGAN_SCOPE_KEY: Final = "homing.began"
"""How many ends had been recorded (`SessionLifetimes.ends`) when the request began; set where more have been since."""

DEFAULT_IDLE_SECONDS: Final = 86_400.0
DEFAULT_WINDOW_SECONDS: Final = 300.0

_UNCHANGING_METHODS: Final = frozenset({"HEAD", "OPTIONS", "TRACE"})

_StateT = TypeVar("_StateT")


class Kept(Generic[_StateT]):
    """One session's record: the state it is in, and when that ends (None: never by itself)."""

    __slots__ = ("end", "key", "queued", "state", "until", "used")

    def __init__(self, key: str, state: _StateT) -> None:
        self.used = 0.0  # where a deadline does not tell it
        self.end = 0  # the number of its last end, where ends are numbered
        self.key = key
        self.state = state
        self.until: float | None = None
        self.queued: float | None = None  # when its one live heap item fires; any other item of it is stale


class Deadlines(Generic[_StateT]):
    """The sessions that are kept, each with its state and at most one deadline. Every step is O(log n) or better.

    A deadline that moves later costs nothing until its old time comes, so a request per session and second does not
    grow the heap; stale items never outnumber the sessions for long.
    """

    def __init__(self, clock: Clock) -> None:
        self._monotonic = clock.monotonic
        self._kept: dict[str, Kept[_StateT]] = {}
        self._heap: list[tuple[float, int, Kept[_StateT]]] = []
        self._pushed = 0
        self._postponed = 0.0  # times are kept less what was postponed before they were set, so that all move at once

    @property
    def kept(self) -> Mapping[str, Kept[_StateT]]:
        """The records, to read; always the same mapping, so whoever asks it often may keep it."""
        return self._kept

    def get(self, key: str) -> Kept[_StateT] | None:
        """The session's record, to read; None if it is not kept."""
        return self._kept.get(key)

    def keep(self, key: str, state: _StateT, seconds: float | None) -> Kept[_StateT]:
        """Keep the session in that state for so long from now, or for ever; what was known of it before is replaced."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = Kept(key, state)
        kept.state = state
        self.renew(kept, seconds)
        return kept

    def renew(self, kept: Kept[_StateT], seconds: float | None) -> None:
        """As `keep`, of a record that is kept and stays in its state: what most requests do."""
        if seconds is None:
            kept.until = None
            return
        kept.until = until = self._monotonic() - self._postponed + seconds
        if kept.queued is None or until < kept.queued:
            self._push(kept, until)

    def renewed_ago(self, kept: Kept[_StateT], seconds: float) -> float:
        """How long ago a record was last renewed for so many seconds, less what was postponed since."""
        until = kept.until
        return 0.0 if until is None else max(0.0, self._monotonic() - self._postponed - until + seconds)

    def remove(self, key: str) -> None:
        """Keep the session no longer; nothing happens if it is not kept."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.queued = None
            self._tidy()

    def pop_due(self) -> list[Kept[_StateT]]:
        """Remove and return the records whose time has come, in no order."""
        now = self._now()
        due: list[Kept[_StateT]] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, kept = heapq.heappop(self._heap)
            if kept.queued != at:
                continue
            kept.queued = None
            if kept.until is None:
                continue
            if kept.until > now:
                self._push(kept, kept.until)
            else:
                del self._kept[kept.key]
                due.append(kept)
        return due

    def postpone(self, seconds: float) -> None:
        """Move every deadline that is set now later by so much."""
        self._postponed += max(0.0, seconds)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def _now(self) -> float:
        return self._monotonic() - self._postponed

    def _push(self, kept: Kept[_StateT], at: float) -> None:
        kept.queued = at
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, kept))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._heap) > 64 + 2 * len(self._kept):
            self._heap = [item for item in self._heap if item[2].queued == item[0]]
            heapq.heapify(self._heap)


def never_served(session_id: str) -> int:
    """No request is being served: for lifetimes whose requests are over when they are recorded."""
    return 0


def succeeded(scope: Scope, status: int | None) -> bool:
    """Whether a request may have started or ended its session: a 2xx reply to a method that changes anything.

    HEAD, OPTIONS and TRACE never do (RFC 9110, 9.2.1), so a CORS preflight of a close route ends nothing.
    """
    changing = scope["type"] != "http" or scope["method"] not in _UNCHANGING_METHODS
    return changing and status is not None and 200 <= status < 300


class Seen(NamedTuple):
    """A session as its lifetime is: whether it has ended, and is in its window; and since when no request came, if known."""

    ended: bool
    unused_seconds: float | None


def _nobody(session_id: str) -> None:
    pass


class _State(enum.Enum):
    OPEN = "open"
    ENDED = "ended"


# Read with every request, and an enum's members are slow to find.
_OPEN: Final = _State.OPEN
_ENDED: Final = _State.ENDED


class IdleLifetimes:
    """How long a worker keeps ownership of a generic app's sessions.

    A session is open from `opened`, a 2xx of a start route, or a request that used it, until a 2xx of an end route, or
    until `idle_seconds` pass with no request. After an end it is kept `window_seconds` from its last request, for
    retried and late requests. A session that is being served when its time comes is kept for another such time:
    requests in flight count.

    `status`, wherever it is given, is the status of the reply that the app completed (101 for a WebSocket it accepted),
    whether or not the client was still there; None if the app did not complete a reply, because it raised or was cut
    off. None starts, ends and opens nothing, and counts as a request.

    Args:
        starts, ends: The declared routes. A route that is both is a start: the session goes on.
        used_reopens: Whether a request that used a session, and began after its end, opens it again. So it is where clients
            choose IDs (`unowned` is "adopt"): a log-out ends the session and the same cookie goes on. What was under way at
            the log-out (the page's event stream) is over with it. Where only starts and replies make sessions ("refuse"), a
            late answer about an ended session is no new one.
        being_served: How many requests of a session are in flight here (`SessionOwners.served_now`).

    Attributes:
        on_idle: Called with each session that a sweep drops though nothing has ended it.
        ends: How many ends it has recorded.
    """

    def __init__(
        self,
        idle_seconds: float = DEFAULT_IDLE_SECONDS,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
        *,
        starts: Routes,
        ends: Routes,
        clock: Clock = SYSTEM_CLOCK,
        used_reopens: bool = True,
        being_served: Callable[[str], int] = never_served,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._window_seconds = window_seconds
        self._starts = starts
        self._ends = ends
        self._turns = bool(starts or ends)
        self._used_reopens = used_reopens
        self._being_served = being_served
        self._deadlines: Deadlines[_State] = Deadlines(clock)
        self.on_idle: Callable[[str], object] = _nobody
        self._ended = 0
        self.ends = 0
        self._kept = self._deadlines.kept

    @property
    def judges_routes(self) -> bool:
        """Whether a request's route may start or end its session."""
        return self._turns

    def starts(self, path: str) -> bool:
        """Whether a request on `path`, whole and below `root_path`, may start a session."""
        return self._starts.match_path(path)

    def served(self, session_id: str, scope: Scope, status: int | None) -> None:
        """Record a request that used, started or ended a session of this worker, or one of a session held here."""
        if scope.get(ENDED_SCOPE_KEY):
            self.ended(session_id)
            return
        if self._turns and succeeded(scope, status):
            if self._starts.match(scope):
                self._keep(session_id, _OPEN)
                return
            if self._ends.match(scope):
                self.ended(session_id)
                return
        used = status is not None and status < 400
        kept = self._kept.get(session_id)
        if kept is None:
            if used:
                self._keep(session_id, _OPEN)
        elif kept.state is _OPEN:
            self._deadlines.renew(kept, self._idle_seconds)
        elif used and self._used_reopens and scope.get(BEGAN_SCOPE_KEY, self.ends) >= kept.end:
            self._keep(session_id, _OPEN)
        else:
            self._deadlines.renew(kept, self._window_seconds)

    def holds(self, session_id: str) -> bool:
        """Whether the session is open here, or ended within the window."""
        return session_id in self._kept

    def opened(self, session_id: str) -> None:
        """Open a session that a reply has just made known, or that was installed here."""
        self._keep(session_id, _OPEN)

    def ended(self, session_id: str) -> None:
        """End a session. A handler that ends its own request's session sets `scope["homing.ended"]` instead."""
        self.ends += 1
        self._keep(session_id, _ENDED).end = self.ends

    def postpone(self, seconds: float) -> None:
        """Move every deadline by what the event loop lagged."""
        self._deadlines.postpone(seconds)

    def sweep(self) -> list[str]:
        """Drop the sessions whose time has passed and that are not being served; return them, to be released."""
        dropped: list[str] = []
        for kept in self._deadlines.pop_due():
            self._ended -= kept.state is _ENDED
            if self._being_served(kept.key):
                self._keep(kept.key, kept.state).end = kept.end
            else:
                dropped.append(kept.key)
                if kept.state is _OPEN:
                    self.on_idle(kept.key)
        return dropped

    def seen(self, session_id: str) -> Seen | None:
        """What is known of a session that is kept; None if it is not."""
        kept = self._kept.get(session_id)
        if kept is None:
            return None
        ended = kept.state is _ENDED
        # Every request moves the deadline, so nothing else has to be noted with it.
        return Seen(ended, self._deadlines.renewed_ago(kept, self._window_seconds if ended else self._idle_seconds))

    def count_ended(self) -> int:
        """How many of the sessions kept have ended: there is nothing left of them but the way to their worker."""
        return self._ended

    def __len__(self) -> int:
        """Sessions kept, so an empty one is falsy: never `lifetimes or default`."""
        return len(self._deadlines)

    def __repr__(self) -> str:
        return f"<IdleLifetimes: {len(self)} sessions>"

    def _keep(self, session_id: str, state: _State) -> Kept[_State]:
        if (kept := self._kept.get(session_id)) is not None:
            self._ended -= kept.state is _ENDED
        self._ended += state is _ENDED
        return self._deadlines.keep(session_id, state, self._idle_seconds if state is _OPEN else self._window_seconds)
