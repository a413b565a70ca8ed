"""Lifetimes of the sessions of RL servers: a resources server's, judged from its requests, and an agent's, from its
records.

Not here: lifetimes of a generic app's sessions (`window`), and the servers themselves (`homing.rl`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Final, Protocol

from homing.clock import SYSTEM_CLOCK, Clock
from homing.lifetime.window import ENDED_SCOPE_KEY, Deadlines, Seen, never_served, succeeded
from homing.routes import Routes
from homing.types import Scope

CLOSE_FOLLOWS_HEADER: Final = "x-ng-close-follows"
"""Sent with the value `1` on an end route, such as `/verify`, by a caller that will close the session afterwards."""

DEFAULT_MAX_AGE_SECONDS: Final = 86_400.0
"""How long a session waits for a close that was announced, or for the end of a retire, before it is dropped."""


class _State(enum.Enum):
    OPEN = "open"
    CLOSE_FOLLOWS = "close follows"
    RETAINED = "retained"
    CLOSED = "closed"


def _nobody(session_id: str) -> None:
    pass


class ResourcesSessionLifetimes:
    """How long a resources server's worker keeps ownership of a session, judged from the requests it served.

    - A 2xx of a start route, or `opened`, opens the session: it is kept until it ends, with no limit of time.
    - A 2xx of an end route, or `ended`, ends it, unless the request says that a close follows: then it stays open for
    that
      close, but at most `max_age_seconds` from the first request that said so.
    - A session that is not open is kept `close_retry_window_seconds` from the last request for it: a retried or cleanup
    close
      reaches its owner, and so does a late seed after a close, which the server refuses there.
    - A failed start or end of an open session leaves it open.
    - A session that is being served when its time comes is kept for another such time.

    `status`, wherever it is given, is the status of the reply that the app completed, whether or not the client was
    still there; None if the app did not complete a reply, because it raised or was cut off. None starts and ends
    nothing: whether a broken seed or close took effect is unknown, and keeping the session is the safe side. HEAD,
    OPTIONS and TRACE start and end nothing either.

    Args:
        starts: Route texts (`"/seed_session"`, `"POST /reset"`), each also under a rollout prefix.
        ends: The same, of what ends one.
        close_follows_header: The header's name, in any case; None if requests cannot say that a close follows.
        max_age_seconds: The limit for an announced close, and for a session that is retained and never ended.
        being_served: How many requests of a session are in flight here (`SessionOwners.served_now`).

    Attributes:
        on_idle: Called with each session that a sweep drops though nothing has closed it.

    Source: the documented behaviour of `ResourcesSessionLifetimes` in the newer seed; the limits are ours.
    """

    ends: Final = 0

    def __init__(
        self,
        close_retry_window_seconds: float,
        starts: tuple[str, ...],
        ends: tuple[str, ...],
        close_follows_header: str | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        max_age_seconds: float = DEFAULT_MAX_AGE_SECONDS,
        being_served: Callable[[str], int] = never_served,
    ) -> None:
        self._seconds = {
            _State.OPEN: None,
            _State.CLOSE_FOLLOWS: max_age_seconds,
            _State.RETAINED: max_age_seconds,
            _State.CLOSED: close_retry_window_seconds,
        }
        self._starts = Routes.parse(starts, rollout_prefix=True)
        self._ends = Routes.parse(ends, rollout_prefix=True)
        self._close_follows = None if close_follows_header is None else close_follows_header.lower().encode("latin-1")
        self._being_served = being_served
        self._deadlines: Deadlines[_State] = Deadlines(clock)
        self._monotonic = clock.monotonic
        self.on_idle: Callable[[str], object] = _nobody
        self._closed = 0

    @property
    def judges_routes(self) -> bool:
        """True: seeds and closes are routes."""
        return True

    def starts(self, path: str) -> bool:
        """Whether a request on `path`, whole and below `root_path`, starts a session, so it acquires before its
        handler."""
        return self._starts.match_path(path)

    def served(self, session_id: str, scope: Scope, status: int | None) -> None:
        """Record a request for a session this worker owns, once it is served."""
        if scope.get(ENDED_SCOPE_KEY):
            self._keep(session_id, _State.CLOSED)
            return
        kept = self._deadlines.get(session_id)
        if succeeded(scope, status):
            if self._starts.match(scope):
                self._keep(session_id, _State.OPEN)
                return
            if self._ends.match(scope):
                if kept is None or kept.state is _State.CLOSED or not self._close_follows_in(scope):
                    self._keep(session_id, _State.CLOSED)
                elif kept.state is _State.OPEN:
                    self._keep(session_id, _State.CLOSE_FOLLOWS)
                # Said again, it does not move the limit: a client cannot keep a session for ever.
                return
        if kept is None or kept.state is _State.CLOSED:
            self._keep(session_id, _State.CLOSED)
        else:
            kept.used = self._monotonic()

    def holds(self, session_id: str) -> bool:
        """Whether the session is open, retained, or within its close retry window."""
        return session_id in self._deadlines

    def ended(self, session_id: str) -> None:
        """End a session this worker owns, from a route that ends it under another name; it has its window from now."""
        self._keep(session_id, _State.CLOSED)

    def opened(self, session_id: str) -> None:
        """Open a session that a restore installed on this worker, as a successful seed would."""
        self._keep(session_id, _State.OPEN)

    def retain(self, session_id: str) -> None:
        """Keep ownership of a session that a retire released until `ended`, when the retire's refusal ends.

        Until then a late request that carries only the session's cookie reaches this worker, which refuses it. If that
        end never comes, the session is dropped after `max_age_seconds`.
        """
        self._keep(session_id, _State.RETAINED)

    def forget(self, session_id: str) -> None:
        """Drop a session whose install a failed restore undid, so that its ownership can be released at once."""
        kept = self._deadlines.get(session_id)
        self._closed -= kept is not None and kept.state is _State.CLOSED
        self._deadlines.remove(session_id)

    def postpone(self, seconds: float) -> None:
        """Move every deadline by what the event loop lagged."""
        self._deadlines.postpone(seconds)

    def sweep(self) -> list[str]:
        """Drop the sessions whose time has passed and that are not being served; return them, to be released."""
        dropped: list[str] = []
        for kept in self._deadlines.pop_due():
            self._closed -= kept.state is _State.CLOSED
            if self._being_served(kept.key):
                self._keep(kept.key, kept.state)
            else:
                dropped.append(kept.key)
                if kept.state is not _State.CLOSED:
                    self.on_idle(kept.key)
        return dropped

    def seen(self, session_id: str) -> Seen | None:
        """What is known of a session that is kept; None if it is not."""
        kept = self._deadlines.get(session_id)
        if kept is None:
            return None
        return Seen(kept.state is _State.CLOSED, max(0.0, self._monotonic() - kept.used))

    def count_ended(self) -> int:
        """How many of the sessions kept are not open: there is nothing left of them but the way to their worker."""
        return self._closed

    def __len__(self) -> int:
        """Sessions kept, so an empty one is falsy: never `lifetimes or default`."""
        return len(self._deadlines)

    def __repr__(self) -> str:
        return f"<ResourcesSessionLifetimes: {len(self)} sessions>"

    def _keep(self, session_id: str, state: _State) -> None:
        if (kept := self._deadlines.get(session_id)) is not None:
            self._closed -= kept.state is _State.CLOSED
        self._closed += state is _State.CLOSED
        self._deadlines.keep(session_id, state, self._seconds[state]).used = self._monotonic()

    def _close_follows_in(self, scope: Scope) -> bool:
        """Whether the head has the header once, with the value `1` and nothing else."""
        if self._close_follows is None:
            return False
        head = scope["headers"][: scope.get("homing.head_length")]  # what follows are trailers
        return [value for name, value in head if name.lower() == self._close_follows] == [b"1"]


class OwnershipReleaser(Protocol):
    """What an agent keeps of `SessionOwners`: it releases a session when it drops the session's last record."""

    def release(self, session_id: str) -> None: ...


class AgentSessionHolder(Protocol):
    """An agent server, whose sessions are owned by `agent_session_id` across workers.

    One that also has a method `ended_agent_sessions()` gives by it, cheaply, the IDs of those that it only remembers, closed
    ones and failed seeds: they take no place under a limit, and nobody waits for their end. Of any other agent every record
    counts as a session until it is dropped.
    """

    def holds_agent_session(self, agent_session_id: str) -> bool:
        """Whether this worker still keeps any record of the session, open, failed or closed."""
        ...

    def expire_agent_session_records(self) -> None:
        """Drop the fences and failed seeds that expired, releasing ownership of their sessions."""
        ...

    def use_agent_session_owners(self, owners: OwnershipReleaser) -> None:
        """Keep the session owners, to release this worker's ownership when it drops a session's last record."""
        ...


class AgentSessionLifetimes:
    """An agent's own records decide its ownership: it releases a session when it drops the session's last record.

    What the requests did is the agent's to know, so recording them does nothing, and so does `postpone`: the agent's
    records expire by its own clock.
    """

    ends: Final = 0

    def __init__(self, agent: AgentSessionHolder, starts: tuple[str, ...] = ()) -> None:
        self._agent = agent
        self._ended: Callable[[], Collection[str]] | None = getattr(agent, "ended_agent_sessions", None)
        self._starts = Routes.parse(starts, rollout_prefix=True)

    @property
    def judges_routes(self) -> bool:
        """False: see the class."""
        return False

    def starts(self, path: str) -> bool:
        return self._starts.match_path(path)

    def served(self, session_id: str, scope: Scope, status: int | None) -> None:
        """Nothing: see the class."""

    def holds(self, session_id: str) -> bool:
        return self._agent.holds_agent_session(session_id)

    def opened(self, session_id: str) -> None:
        """Nothing: see the class."""

    def ended(self, session_id: str) -> None:
        """Nothing: see the class."""

    def postpone(self, seconds: float) -> None:
        """Nothing: see the class."""

    def seen(self, session_id: str) -> Seen | None:
        """Whether the session has ended; None if the agent does not say. Since when it is unused nobody knows."""
        return None if self._ended is None else Seen(session_id in self._ended(), None)

    def count_ended(self) -> int:
        """How many of the agent's sessions have ended, and are remembered."""
        return 0 if self._ended is None else len(self._ended())

    def sweep(self) -> list[str]:
        """Let the agent drop what has expired; it releases those sessions itself."""
        self._agent.expire_agent_session_records()
        return []
