"""What a user may choose about routing: one value, checked, and picklable so that a supervisor can hand it to its workers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

from homing.errors import ConfigurationError
from homing.identity import McpHandleSource, Preset, Source, parse_source, preset
from homing.placement import POLICIES, Place, PlacementOptions
from homing.routes import Routes

DAY_SECONDS = 86_400
MOST_SESSIONS = 1_000_000_000
"""The largest limit: each session that it lets in is one byte of a file that may be locked (`homing.placement.locks`)."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How the workers of one server tell sessions, and how they treat them.

    Attributes:
        sessions: Where requests name their session, in order; a source, or its SPEC as on the command line.
        learn: Further places that occur only in replies.
        starts, ends: Routes that start and end a session, as `"METHOD /route"`.
        preset: A protocol's bundle of the above, such as `"mcp"`.
        idle_seconds: How long a session without a request keeps its owner.
        unowned: What happens to a request whose session nobody owns: `"adopt"` serves it where it lands, `"refuse"`
            answers *gone*. None chooses: refuse where sessions begin at a known place, else adopt, or as the preset says.
        gone_status: The status of *gone*; None: the preset's, or 410.
        max_body_bytes: The longest JSON body that is read to find a session in it.
        owner_timeout_seconds: How long an owner may take to say that a forwarded request is its own.
        place: Where a declared start runs: `"balanced"`, `"fewest"`, `"accepting"` (where it arrived) or `"random"`.
        max_sessions: How many live sessions the whole server may have; a declared start over it is answered 503; None: no limit.
        max_sessions_per_worker: The same of each worker.
        queue_seconds: How long a start over a limit waits for room, first come, first served; 0: not at all.
        scatter: Test mode: every request first lands on a wrong worker.
        secret: What signs the session cookie, for sources that need it and are given as a SPEC.
        socket_dir: The run directory; None: `HOMING_SESSION_SOCKET_DIR`, or one that siblings of one launcher share.
        workers: How many workers the server has; 1 means that nothing is routed; None: not known.
        graceful_seconds: How long a stopping worker waits for the others to drain.
        backlog: Connections that may wait at a private socket.
        lifespan_required: An app without lifespan is an error, as under `--lifespan on`.
    """

    sessions: tuple[Source | str, ...] = ()
    learn: tuple[Source | str, ...] = ()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    preset: str | None = None
    idle_seconds: float = DAY_SECONDS
    unowned: Literal["adopt", "refuse"] | None = None
    gone_status: int | None = None
    max_body_bytes: int = 2**20
    owner_timeout_seconds: float = 30.0
    place: Place = "accepting"
    max_sessions: int | None = None
    max_sessions_per_worker: int | None = None
    queue_seconds: float = 0.0
    scatter: bool = False
    secret: str | None = None
    socket_dir: str | None = None
    workers: int | None = None
    graceful_seconds: float | None = None
    backlog: int = 2048
    lifespan_required: bool = False

    def __repr__(self) -> str:
        secret = None if self.secret is None else "…"
        shown = {name: getattr(self, name) for name in self.__slots__}
        return f"RoutingOptions({', '.join(f'{k}={v!r}' for k, v in (shown | {'secret': secret}).items())})"

    @property
    def app(self) -> str:
        """What tells an app from another by how its sessions are told, in a few words.

        How they are treated is left out: a server whose idle time was changed goes on with the same sessions.
        """
        told = (self.sessions, self.learn, self.starts, self.ends, self.preset)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:24]

    @property
    def tells_sessions(self) -> bool:
        """Whether there is any way to tell sessions."""
        return bool(self.sessions or self.learn or self.preset)

    @property
    def placing(self) -> PlacementOptions:
        """How new sessions are placed and limited."""
        return PlacementOptions(
            self.place, self.max_sessions, self.max_sessions_per_worker, self.queue_seconds, self.workers
        )

    @property
    def learns_nothing(self) -> str | None:
        """The path or query source of a server that would never know a session its app has made; None if it would.

        Nothing says where sessions begin, no source is in replies too, and `unowned` was left to the default: whoever
        says `"adopt"` or `"refuse"` has thought of it.

        Raises:
            ConfigurationError: as `checked`.
        """
        if self.learn or self.starts or self.preset or self.unowned or not self.sessions:
            return None
        sessions = self.checked().sessions
        return None if any(source.learns for source in sessions) else sessions[0].spec

    def checked(self) -> CheckedOptions:
        """The same, parsed and checked.

        Raises:
            ConfigurationError: a setting cannot work; the message is one line that says what to do.
        """
        chosen = None
        if self.preset is not None:
            chosen = preset(self.preset)
        if self.unowned not in (None, "adopt", "refuse"):
            raise ConfigurationError(f"unowned is {self.unowned!r}: use 'adopt' or 'refuse'")
        if self.gone_status is not None and not 400 <= self.gone_status <= 599:
            raise ConfigurationError(
                f"the gone status is {self.gone_status}: use one from 400 to 599, such as 404 or 410"
            )
        for name in ("idle_seconds", "owner_timeout_seconds", "max_body_bytes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: use a number greater than 0")
        if self.place not in POLICIES:
            raise ConfigurationError(f"place is {self.place!r}: use one of {', '.join(POLICIES)}")
        for what, limit in (("sessions", self.max_sessions), ("sessions per worker", self.max_sessions_per_worker)):
            if limit is not None and not 1 <= limit <= MOST_SESSIONS:
                raise ConfigurationError(f"the limit of {what} is {limit}: use 1 to {MOST_SESSIONS}, or leave it out")
        if not 0 <= self.queue_seconds < float("inf"):
            raise ConfigurationError(
                f"the queue's time is {self.queue_seconds!r}: use a number of seconds, 0 for no queue"
            )
        if self.queue_seconds and self.max_sessions is None and self.max_sessions_per_worker is None:
            raise ConfigurationError(
                "a queue without a limit of sessions: add --max-sessions N or --max-sessions-per-worker N, or leave out --queue"
            )
        sessions, learn = (
            tuple(parse_source(s, secret=self.secret) if isinstance(s, str) else s for s in given)
            for given in (self.sessions, self.learn)
        )
        if learn and not sessions and chosen is None:
            raise ConfigurationError(
                f"learn {learn[0].spec!r} alone: replies name a session there, and no later request is looked into: add "
                "where requests name it, such as --session 'path:/sessions/{session}' (in code: sessions=)"
            )
        starts, ends = Routes.parse(self.starts), Routes.parse(self.ends)
        begins_somewhere = bool(
            starts
            or learn
            or (chosen is not None and chosen.unowned == "refuse")
            or any(isinstance(s, McpHandleSource) for s in sessions)
        )
        return CheckedOptions(
            options=replace(self, sessions=sessions, learn=learn),
            sessions=sessions,
            learn=learn,
            starts=starts,
            ends=ends,
            preset=chosen,
            idle_seconds=self._idle_seconds(chosen),
            adopts=self.unowned == "adopt" if self.unowned else not begins_somewhere,
        )

    def _idle_seconds(self, chosen: Preset | None) -> float:
        if chosen is None or chosen.idle_seconds is None or self.sessions:
            return self.idle_seconds
        return min(self.idle_seconds, chosen.idle_seconds)


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """`RoutingOptions` parsed: sources, routes, the preset itself, how long a session without a request is kept, and
    whether an unowned one is adopted."""

    options: RoutingOptions
    sessions: tuple[Source, ...]
    learn: tuple[Source, ...]
    starts: Routes
    ends: Routes
    preset: Preset | None
    idle_seconds: float
    adopts: bool
