"""The sessions that one worker of a resources server holds: their state, and who may do what to it when.

The invariants: seeding and ending a session never interleave, with each other or with requests that use its state; a
session is forgotten only once its state was released; an ID that was closed refuses seeds until its fence expires.

Not here: HTTP, and which worker owns a session (`homing.directory`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from homing.clock import SYSTEM_CLOCK, Clock
from homing.rl.errors import (
    ConflictError,
    ReleaseFailedError,
    SessionBusyError,
    SessionClosedError,
    SessionClosingError,
    SessionLostError,
)
from homing.rl.protocol import EpisodeId

StateT = TypeVar("StateT")

DEFAULT_WAIT_SECONDS: Final = 60.0
"""How long a seed or close waits for whatever else uses its session."""


class Session(Generic[StateT]):
    """One open session.

    Attributes:
        episode: What a seed bound it to; None for a cookie's session.
        state: What the seed made.
        seed: What tells a repeated seed from another one.
        reply: What the seed was answered, to be answered again.
        closing: Its release has begun: nothing may use it any more.
    """

    __slots__ = ("_idle", "_in_use", "closing", "episode", "id", "lock", "reply", "seed", "state")

    def __init__(self, session_id: str, state: StateT, episode: EpisodeId | None, seed: Any, reply: Any) -> None:
        self.id = session_id
        self.state = state
        self.episode = episode
        self.seed = seed
        self.reply = reply
        self.closing = False
        self.lock: asyncio.Lock | None = None
        self._in_use = 0
        self._idle: asyncio.Event | None = None

    def __enter__(self) -> StateT:
        """Use the state for one request; an end waits for it."""
        if self.closing:
            raise SessionClosingError
        self._in_use += 1
        return self.state

    def __exit__(self, *exception: object) -> None:
        self._in_use -= 1
        if not self._in_use and self._idle is not None:
            self._idle.set()

    @property
    def in_use(self) -> int:
        """How many requests use the state now."""
        return self._in_use

    def alone(self) -> asyncio.Lock:
        """A lock for requests that must not overlap, such as the steps of an environment."""
        if self.lock is None:
            self.lock = asyncio.Lock()
        return self.lock

    async def unused(self) -> None:
        """Wait until no request uses the state."""
        while self._in_use:
            self._idle = asyncio.Event()
            await self._idle.wait()
        self._idle = None


@dataclass(frozen=True, slots=True)
class Fence:
    """A closed session: seeds of its ID are refused until then."""

    until: float
    episode: EpisodeId | None


class _Record(Generic[StateT]):
    """All that is known of one ID here; dropped when that is nothing.

    Attributes:
        session: While it is open.
        fence: What is left of its close.
        lock: Serialises its seeds and ends; made for the first.
        changing: How many of those hold the lock or wait for it.
    """

    __slots__ = ("changing", "fence", "lock", "session")

    def __init__(self) -> None:
        self.session: Session[StateT] | None = None
        self.fence: Fence | None = None
        self.lock: asyncio.Lock | None = None
        self.changing = 0


class SessionTable(Generic[StateT]):
    """A worker's sessions by ID. Owns their state from `open` until `release` has let go of it.

    Args:
        release: Lets go of a session's state. If it raises, the session is kept, and only an end can be tried again.
        window_seconds: How long a close is remembered.
        wait_seconds: How long a change waits for what else uses the session.
    """

    def __init__(
        self,
        release: Callable[[StateT], Awaitable[None]],
        *,
        window_seconds: float,
        clock: Clock = SYSTEM_CLOCK,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
    ) -> None:
        self._release = release
        self._window_seconds = window_seconds
        self._monotonic = clock.monotonic
        self._wait_seconds = wait_seconds
        self._records: dict[str, _Record[StateT]] = {}
        self._open = 0
        # One window for all, so they expire in the order they were put up.
        self._expiries: deque[tuple[str, Fence]] = deque()

    def __repr__(self) -> str:
        fenced = sum(record.fence is not None for record in self._records.values())
        return f"<SessionTable: {self._open} open, {fenced} fenced>"

    def __len__(self) -> int:
        return self._open

    def __iter__(self) -> Iterator[Session[StateT]]:
        return iter([record.session for record in self._records.values() if record.session is not None])

    def get(self, session_id: str | None) -> Session[StateT] | None:
        """The open session, to look at; None if there is none."""
        record = None if session_id is None else self._records.get(session_id)
        return None if record is None else record.session

    def remove(self, session_id: str) -> Session[StateT] | None:
        """Take the session out, with its state still to be released by the caller."""
        session = self.get(session_id)
        if session is not None:
            session.closing = True
            self._forget(session_id)
        return session

    def held(self, session_id: str | None) -> Session[StateT]:
        """The open session; enter it to use its state.

        Raises:
            SessionLostError: it is not here.
        """
        session = self.get(session_id)
        if session is None:
            raise SessionLostError
        return session

    def fence(self, session_id: str) -> Fence | None:
        """What is remembered of the ID's close, while it is."""
        record = self._records.get(session_id)
        fence = None if record is None else record.fence
        return fence if fence is not None and fence.until > self._monotonic() else None

    @asynccontextmanager
    async def changing(self, session_id: str) -> AsyncIterator[None]:
        """Seed or end a session inside this block: no other seed or end of the ID runs meanwhile.

        Raises:
            SessionBusyError: another one took too long; nothing ran.
        """
        record = self._record(session_id)
        lock = record.lock
        if lock is None:
            lock = record.lock = asyncio.Lock()
        record.changing += 1
        try:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await lock.acquire()
            except TimeoutError as error:
                raise SessionBusyError from error
            try:
                yield
            finally:
                lock.release()
        finally:
            record.changing -= 1
            self._prune(session_id, record)

    def seedable(self, session_id: str, episode: EpisodeId, seed: Any) -> Session[StateT] | None:
        """Whether an episode's seed may go on, inside `changing`: None, or the session that it has seeded already.

        Raises:
            SessionClosedError: the ID was closed, and is fenced.
            SessionClosingError: it is being closed.
            ConflictError: it is open for another episode, or another task.
        """
        if self.fence(session_id) is not None:
            raise SessionClosedError
        session = self.get(session_id)
        if session is None:
            return None
        if session.closing:
            raise SessionClosingError
        if session.episode != episode:
            raise ConflictError("resources_session_id: the session is open for another episode")
        if session.seed != seed:
            raise ConflictError("task_data: the session is open for another task of this episode")
        return session

    def open(
        self, session_id: str, state: StateT, *, episode: EpisodeId | None = None, seed: Any = None, reply: Any = None
    ) -> Session[StateT]:
        """Keep what a seed has made, inside `changing`."""
        record = self._record(session_id)
        self._open += record.session is None
        record.fence = None
        record.session = session = Session(session_id, state, episode, seed, reply)
        return session

    async def end(self, session_id: str) -> None:
        """Let go of the session's state, inside `changing`; nothing happens if it is not open.

        Raises:
            SessionBusyError: a request went on using it; it stays open.
            ReleaseFailedError: it could not be released: it stays, and only an end can be tried again.
        """
        session = self.get(session_id)
        if session is None:
            return
        closing_before = session.closing
        session.closing = True
        try:
            async with asyncio.timeout(self._wait_seconds):
                await session.unused()
        except BaseException as error:
            session.closing = closing_before
            if isinstance(error, TimeoutError):
                raise SessionBusyError from error
            raise
        try:
            await self._release(session.state)
        except Exception as error:
            raise ReleaseFailedError from error
        if self.get(session_id) is session:
            self._forget(session_id)

    async def close(self, session_id: str, episode: EpisodeId) -> None:
        """End an episode's session, open or never seeded, and fence its ID, inside `changing`.

        Raises:
            ConflictError: it is, or was, another episode's.
            SessionBusyError, ReleaseFailedError: as for `end`; it is not fenced, so the close can be sent again.
        """
        session, fence = self.get(session_id), self.fence(session_id)
        bound_to = session.episode if session is not None else fence.episode if fence is not None else None
        if bound_to is not None and bound_to != episode:
            raise ConflictError("episode_id: the session is another episode's")
        await self.end(session_id)
        record = self._record(session_id)
        record.fence = Fence(self._monotonic() + self._window_seconds, episode)
        self._expiries.append((session_id, record.fence))
        self.expire_fences()

    def expire_fences(self) -> None:
        """Forget the closes whose window has passed."""
        now = self._monotonic()
        while self._expiries and self._expiries[0][1].until <= now:
            session_id, fence = self._expiries.popleft()
            record = self._records.get(session_id)
            # Closed again, or seeded anew, since: then another fence counts, or none.
            if record is not None and record.fence is fence:
                record.fence = None
                self._prune(session_id, record)

    def _record(self, session_id: str) -> _Record[StateT]:
        record = self._records.get(session_id)
        if record is None:
            record = self._records[session_id] = _Record()
        return record

    def _forget(self, session_id: str) -> None:
        record = self._records[session_id]
        record.session = None
        self._open -= 1
        self._prune(session_id, record)

    def _prune(self, session_id: str, record: _Record[StateT]) -> None:
        if record.session is None and record.fence is None and not record.changing:
            del self._records[session_id]
