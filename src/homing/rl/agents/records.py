"""An agent worker's record of each of its sessions: being seeded, open, failed, closing, or closed.

One object holds all records of a worker. The invariants: seeds and closes of one ID never interleave, and have the
outcome they would have one after the other, in the order they came; what a seed opened is cleaned up exactly once, by
its own failure or by a close, and a clean-up that failed stays to be tried again; a closed or failed session is
remembered for the close retry window, so that a late seed is refused and a repeated close gets the same receipt.

| event | absent | open | set-up failed, clean-up unfinished | closing | closed | failed seed |
| --- | --- | --- | --- | --- | --- | --- |
| seed, same body | create | the same session | 409 | 409 | 409 | create again |
| seed, other body | create | 409 | 409 | 409 | 409 | 409 |
| seed or close, cookie names the ID | 409, expired | as without | as without | as without | as without | as without |
| close, right episode | a receipt | clean up, receipt | clean up, receipt | clean up, receipt | the same receipt | a receipt |
| close, other episode | a receipt | 409 | 409 | 409 | 409 | 409 |
| activation | 409 | run | 409 | 409 | 409 | 409 |

Not here: what a session is and does (`server.py`), and which worker owns it (`homing.directory`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from homing.clock import SYSTEM_CLOCK, Clock
from homing.rl.disconnect import end_tasks
from homing.rl.errors import ConflictError
from homing.types import session_tag

logger = logging.getLogger(__name__)


class Seed(Protocol):
    """What a session is bound to: equal seeds are the same seed."""

    @property
    def agent_session_id(self) -> str: ...

    @property
    def episode_id(self) -> Any: ...


SeedT = TypeVar("SeedT", bound=Seed)
SessionT = TypeVar("SessionT")
ReceiptT = TypeVar("ReceiptT")
T = TypeVar("T")

CLOSE_SECONDS: Final = 60.0
"""How long seeds and closes under way may take once the server stops, and then as long all clean-ups together."""


class RecordState(enum.Enum):
    """What has become of a session."""

    ABSENT = "absent"
    SEEDING = "being seeded"
    OPEN = "open"
    SETUP_FAILED = "set-up failed, clean-up unfinished"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED_SEED = "failed seed"


@dataclass(eq=False, slots=True)
class _Record(Generic[SeedT, SessionT, ReceiptT]):
    state: RecordState = RecordState.ABSENT
    seed: SeedT | None = None
    episode: Any = None
    session: SessionT | None = None
    receipt: ReceiptT | None = None
    expires_at: float | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AgentRecords(Generic[SeedT, SessionT, ReceiptT]):
    """Every session that this worker keeps a record of.

    A seed or close that has begun is finished even if its caller is cancelled: it runs in a task of this object's, which
    `aclose` waits for.

    Args:
        make: The session object of a seed, before anything is opened for it. Does not raise.
        set_up: Opens what the session needs. What it raises is the seed's outcome, after `clean_up` has run.
        clean_up: Releases all that `set_up` opened, or part of it; may be called again if it raised. Its result is the
            close's receipt.
        bare_receipt: The receipt of a close of an ID that has nothing to clean up.
        close_retry_window_seconds: How long a closed session or failed seed is remembered.
        dropped: Told the ID whose last record was dropped.
    """

    def __init__(
        self,
        *,
        make: Callable[[SeedT], SessionT],
        set_up: Callable[[SessionT], Awaitable[None]],
        clean_up: Callable[[SessionT], Awaitable[ReceiptT]],
        bare_receipt: Callable[[str], ReceiptT],
        close_retry_window_seconds: float,
        dropped: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._make = make
        self._set_up = set_up
        self._clean_up = clean_up
        self._bare_receipt = bare_receipt
        self._window_seconds = close_retry_window_seconds
        self._dropped = dropped
        self._clock = clock
        self._records: dict[str, _Record[SeedT, SessionT, ReceiptT]] = {}
        # One window for all, so they expire in the order they were written.
        self._expiries: deque[tuple[float, str, _Record[SeedT, SessionT, ReceiptT]]] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ended: set[str] = set()
        """Sessions that are remembered and hold nothing: closed ones, and those whose seed failed. To read."""

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        states = [record.state for record in self._records.values()]
        return f"<AgentRecords: {len(states)} sessions, {states.count(RecordState.OPEN)} open>"

    def state(self, session_id: str) -> RecordState:
        record = self._records.get(session_id)
        return RecordState.ABSENT if record is None else record.state

    def holds(self, session_id: str) -> bool:
        """Whether any record of the session is kept: of a seed under way, open, failed or closed."""
        return session_id in self._records

    def open_session(self, session_id: str) -> SessionT:
        """The open session, for an activation.

        Raises:
            ConflictError: it is not known here, not open yet, or no longer.
        """
        record = self._records.get(session_id)
        if record is None or record.state is not RecordState.OPEN:
            state = RecordState.ABSENT if record is None else record.state
            raise ConflictError(f"agent session {session_tag(session_id)} is {state.value}, not open")
        assert record.session is not None
        return record.session

    def open_sessions(self) -> list[SessionT]:
        return [each.session for each in self._records.values() if each.state is RecordState.OPEN and each.session]

    async def seed(self, seed: SeedT, *, marked: bool = False) -> SessionT:
        """Open the session, or give the open one of the same seed.

        Args:
            marked: The request's cookie names the session, so it was open once.

        Raises:
            ConflictError: 409, as the table says.
            Exception: what `set_up` raised. The seed may be tried again if the clean-up after it succeeded.
        """
        return await self._owned(self._seed(seed, marked))

    async def close(self, session_id: str, episode: Any, *, marked: bool = False) -> ReceiptT:
        """Clean up, once, and give the receipt; at every later call within the window, the same one.

        Raises:
            ConflictError: 409, as the table says.
            Exception: what `clean_up` raised; the session stays as it is, closing, and the close may be tried again.
        """
        return await self._owned(self._close(session_id, episode, marked))

    def expire(self) -> None:
        """Drop the receipts and failed seeds whose window has passed."""
        now = self._clock.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, session_id, record = self._expiries.popleft()
            # A failed seed may have been tried again since, and so have another time, or none.
            if self._records.get(session_id) is record and record.expires_at == expires_at:
                self._drop(session_id)

    def forget(self, session_id: str) -> None:
        """The session was given to another worker: its record goes without clean-up."""
        self._records.pop(session_id, None)
        self.ended.discard(session_id)

    async def aclose(self) -> None:
        """Finish what is under way, and clean up every session that is still open, many at once. Safe twice.

        What fails is logged, and what takes longer than `CLOSE_SECONDS` is cancelled, and logged too.
        """
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_SECONDS)
        closes = [
            self._own(self._close_at_last(session_id, record.episode))
            for session_id, record in self._records.items()
            if record.session is not None
        ]
        if closes:
            await asyncio.wait(closes, timeout=CLOSE_SECONDS)
        await end_tasks(list(self._tasks))

    async def _close_at_last(self, session_id: str, episode: Any) -> None:
        try:
            await self._close(session_id, episode, marked=False)
        except asyncio.CancelledError:
            logger.error("agent session %s was not cleaned up in time", session_tag(session_id))  # noqa: TRY400 - no bug
            raise
        except Exception:
            logger.exception("agent session %s could not be cleaned up", session_tag(session_id))

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="homing agent record")
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._own(work))

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, if whoever asked is gone

    @asynccontextmanager
    async def _locked(self, session_id: str) -> AsyncIterator[_Record[SeedT, SessionT, ReceiptT]]:
        """The current record of the ID, locked; one that stays absent is dropped again."""
        while True:
            record = self._records.get(session_id)
            if record is None:
                record = self._records[session_id] = _Record()
            async with record.lock:
                # Dropped while this waited for it: whoever comes next is bound to another.
                if self._records.get(session_id) is not record:
                    continue
                try:
                    yield record
                finally:
                    if record.state is RecordState.ABSENT:
                        self._drop(session_id)
                return

    async def _seed(self, seed: SeedT, marked: bool) -> SessionT:
        async with self._locked(seed.agent_session_id) as record:
            tag = session_tag(seed.agent_session_id)
            match record.state:
                case RecordState.ABSENT:
                    if marked:
                        raise ConflictError(f"agent session {tag} has ended, and its cookie has expired")
                case RecordState.OPEN:
                    if record.seed != seed:
                        raise ConflictError(f"agent session {tag} is bound to another seed")
                    assert record.session is not None
                    return record.session
                case RecordState.FAILED_SEED:
                    if record.seed != seed:
                        raise ConflictError(f"agent session {tag} is bound to another seed, which failed")
                case RecordState.CLOSED:
                    raise ConflictError(f"agent session {tag} is already closed")
                case RecordState.SETUP_FAILED | RecordState.CLOSING:
                    raise ConflictError(f"agent session {tag} is closing")
                case RecordState.SEEDING:
                    raise AssertionError("whoever seeds holds the lock")
            return await self._create(record, seed)

    async def _create(self, record: _Record[SeedT, SessionT, ReceiptT], seed: SeedT) -> SessionT:
        record.state, record.expires_at = RecordState.SEEDING, None
        self.ended.discard(seed.agent_session_id)
        record.seed, record.episode = seed, seed.episode_id
        record.session = session = self._make(seed)
        try:
            await self._set_up(session)
        except BaseException:
            try:
                await self._clean_up(session)
            except BaseException:
                # What was opened and could not be released is kept for a close, and serves nothing else.
                record.state = RecordState.SETUP_FAILED
                logger.exception(
                    "agent session %s: what its failed set-up had opened stays, until it is closed",
                    session_tag(seed.agent_session_id),
                )
            else:
                record.session = None
                self._remember(seed.agent_session_id, record, RecordState.FAILED_SEED)
            raise
        record.state = RecordState.OPEN
        return session

    async def _close(self, session_id: str, episode: Any, marked: bool) -> ReceiptT:
        async with self._locked(session_id) as record:
            tag = session_tag(session_id)
            if record.state is RecordState.ABSENT:
                if marked:
                    raise ConflictError(f"agent session {tag} has ended, and its receipt has expired")
                record.episode = episode
            elif record.episode != episode:
                raise ConflictError(f"agent session {tag} is bound to another episode")
            if record.state is RecordState.CLOSED:
                assert record.receipt is not None
                return record.receipt
            if record.session is None:
                record.receipt = self._bare_receipt(session_id)
            else:
                record.state = RecordState.CLOSING
                record.receipt = await self._clean_up(record.session)
                record.session = None
            self._remember(session_id, record, RecordState.CLOSED)
            return record.receipt

    def _remember(self, session_id: str, record: _Record[SeedT, SessionT, ReceiptT], state: RecordState) -> None:
        record.state = state
        record.seed = record.seed if state is RecordState.FAILED_SEED else None
        record.expires_at = self._clock.monotonic() + self._window_seconds
        self._expiries.append((record.expires_at, session_id, record))
        self.ended.add(session_id)

    def _drop(self, session_id: str) -> None:
        self.ended.discard(session_id)
        if self._records.pop(session_id, None) is not None:
            self._dropped(session_id)
