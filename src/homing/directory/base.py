"""The words of the directory: what an owner answers, what records can do, and the errors that only callers here see."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from homing.errors import HomingError, NotHereError
from homing.histogram import Histogram
from homing.types import WorkerId, session_tag


class Given(enum.IntEnum):
    """What an owner answers to a worker that asks for a session.

    GIVEN: the record names the asker now. BUSY: nothing has changed; ask again later. NOT_MINE: this worker does not
    own it.
    """

    GIVEN = 0
    BUSY = 1
    NOT_MINE = 2


class Why(enum.StrEnum):
    """Why a session that was open at a worker is there no more."""

    CLOSED = "closed"
    IDLE = "idle"
    MOVED = "moved"
    WORKER_EXIT = "worker exit"


class Ending(NamedTuple):
    """A session that this worker has owned. `since` and `at` are on the monotonic clock."""

    key: str
    why: Why
    since: float
    at: float


ENDINGS_KEPT = 1000
"""How many of the sessions that ended last a worker remembers."""


Ask: TypeAlias = Callable[[WorkerId, str], Awaitable[Given]]
"""Ask a live worker for a session, over its private socket. It may raise; it has to end by itself in bounded time."""


class OwnerAliveError(NotHereError):
    """A live worker owns the session, so it has to be asked (`restore`, `rewrite_all`): only the owner gives."""

    def __init__(self, session_id: str, owner: WorkerId) -> None:
        super().__init__(f"session {session_tag(session_id)} is owned by worker {owner}, which is alive: ask it")
        self.session_id = session_id
        self.owner = owner


class StillOwnedError(HomingError):
    """`disown` of a session whose record names this worker: forgetting it would leave the record to nobody."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"the record of session {session_tag(session_id)} names this worker: release it, or give it")
        self.session_id = session_id


@dataclass(slots=True)
class Counters:
    """What happened to this worker's sessions since it started; each only grows.

    acquired, released, given: by rule 3, 5 and 6. restored: opened by a restore or a rewrite. taken: of these, from a
    dead worker. lost: owned here in memory while the record said otherwise. busy: asks that were answered so.
    release_failures: records that could not be removed at once. lock_timeouts: waits for the lock that ended without
    it. compacted: records of dead workers removed beyond the limit. ended: sessions, by why (`Why`). lock_waits: for the
    lock on dead workers' records.
    """

    acquired: int = 0
    released: int = 0
    given: int = 0
    restored: int = 0
    taken: int = 0
    lost: int = 0
    busy: int = 0
    release_failures: int = 0
    lock_timeouts: int = 0
    compacted: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    lock_waits: Histogram = field(default_factory=Histogram)


class Records(Protocol):
    """The owner records as one worker sees them: each method is one step that others see whole or not at all.

    `name` is a record's name (`key_digest`), `text` what a record says, whoever wrote it. Everything here is a few
    microseconds except `survey` and `names_of`, which read every record and run in a thread.
    """

    def names_us(self, name: str) -> bool:
        """Whether the record names this worker: False for absent, another's, or unreadable. The hot path."""
        ...

    def read(self, name: str) -> str | None:
        """What the record says, as it is; None if it is absent and the directory is intact.

        Raises:
            MalformedRecordError: it is no record at all. DirectoryError: it cannot be read.
        """
        ...

    def owner_in(self, text: str, name: str) -> WorkerId:
        """The worker that a record names.

        Raises:
            ForeignRecordError: it is of another boot. MalformedRecordError: it names no worker.
        """
        ...

    def create(self, name: str) -> bool:
        """Make the record, naming this worker; False if there is one. DirectoryError: neither."""
        ...

    def remove(self, name: str) -> None:
        """Remove the record, if it is there. DirectoryError: it may still be there."""
        ...

    def prepare(self, worker_id: WorkerId) -> str:
        """Make what `replace` will put in a record's place, naming `worker_id`: the step of the two that can fail."""
        ...

    def discard(self, prepared: str) -> None:
        """Remove what was prepared and not used."""
        ...

    def replace(self, prepared: str, name: str) -> None:
        """Put what was prepared in the record's place."""
        ...

    def is_dead(self, worker_id: WorkerId) -> bool:
        """Whether a worker is proved dead; DirectoryError if that cannot be told."""
        ...

    def try_lock(self) -> AbstractContextManager[bool]:
        """Hold the lock on dead workers' records for the block, if it is free: gives whether it was. Never waits."""
        ...

    def survey(self, limit: int) -> dict[str, int] | None:
        """How many records say each text, or None if there are at most `limit` in all. In a thread."""
        ...

    def names_of(self, text: str) -> Iterable[str]:
        """The names of the records that say `text`. In a thread."""
        ...

    def started_at(self, worker_id: WorkerId) -> float:
        """When a worker started, to tell which is oldest; 0 if unknown."""
        ...

    def close(self) -> None:
        """Let go of what was opened for this. Twice is fine."""
        ...
