"""Seeds and closes that are sent again, late, or in the wrong order, by clients that name their session themselves.

Keyed by identity: a session ID and a secret close token, of which only a hash is kept. The invariants: seeds of one
identity share one task, which no caller's cancellation reaches; once a close has come, before, during or after the seed,
nothing of the session stays, and a late seed is refused for as long as the fence is kept.

Not here: the session itself (`manager.py`), and the way in (`server.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from dataclasses import dataclass, field
from typing import Final

from homing.clock import Clock
from homing.types import session_tag
from homing.web.errors import (
    AuthenticationError,
    CapacityError,
    ReleaseError,
    SessionConflictError,
    SessionLostError,
)
from homing.web.manager import WebSessionManager
from homing.web.models import SeedReply, Task
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

MAX_RECORDS: Final = 10_000
_MAX_EXPIRY_TRIES: Final = 3


@dataclass(slots=True, eq=False)
class _Record:
    """One identity.

    Attributes:
        token_digest: SHA-256 of the close token.
        payload: SHA-256 of the task that was seeded; None: only closes have come.
        closed_at: When the fence was set; None: open.
        seed: The task that all its seeds share.
    """

    token_digest: bytes
    created_at: float
    payload: bytes | None = None
    closed_at: float | None = None
    seed: asyncio.Task[SeedReply] | None = None
    expiry_tries: int = field(default=0)


class SessionControl:
    """The records of one worker. Owns its tasks and its sweep; borrows the manager.

    Args:
        lifetime_seconds: How long a fence is kept after the close.
    """

    def __init__(
        self, manager: WebSessionManager, clock: Clock, lifetime_seconds: float, *, max_records: int = MAX_RECORDS
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._lifetime_seconds = lifetime_seconds
        self._max_records = max_records
        self._records: dict[str, _Record] = {}
        self._tasks = Tasks()
        self._loops = Tasks()

    def start(self) -> None:
        if not self._loops:
            self._loops.spawn(self._sweep_loop(), "sweep records")

    async def aclose(self) -> None:
        """Seeds under way are told to stop; the manager releases what they have."""
        await self._loops.aclose(1.0)
        await self._tasks.aclose(1.0)

    async def seed(self, session_id: str, token: str, task: Task) -> SeedReply:
        """Seed the session, or share the seed that is under way, or say again what it gave.

        Raises:
            AuthenticationError: the identity has another token.
            SessionConflictError: it has another task, or has been closed.
            CapacityError: no room for the session, or for another record.
            SessionLostError: it was seeded, and has expired since.
            WebError: what became of the seed.
        """
        record = self._record(session_id, token)
        payload = _payload(task)
        if record.closed_at is not None:
            raise SessionConflictError("the session has been closed: seed another one")
        if record.payload is not None and record.payload != payload:
            raise SessionConflictError("the session was seeded with another payload: use another identity")
        record.payload = payload
        seed = record.seed
        if seed is None or (_failed_for_capacity(seed) and self._manager.may_be_seeded(session_id)):
            seed = record.seed = self._tasks.spawn(
                self._seed(record, session_id, task), f"seed record {session_tag(session_id)}"
            )
        await asyncio.wait((seed,))
        if record.closed_at is not None:
            raise SessionConflictError("the session was closed while it was being seeded")
        if seed.cancelled():
            raise CapacityError("the server stops")
        reply = seed.result()
        if not await self._manager.is_live_session(session_id):
            self._fence(record)
            raise SessionLostError("the session has ended since it was seeded: seed another one")
        return reply

    def refuse_fenced(self, session_id: str) -> None:
        """A seed that names its session by an old cookie is as late as one that names it by its identity.

        Raises:
            SessionConflictError: the session had an identity, and has been closed.
        """
        record = self._records.get(session_id)
        if record is not None and record.closed_at is not None:
            raise SessionConflictError("the session has been closed: seed another one")

    async def close(self, session_id: str, token: str) -> None:
        """Close the session, now and for as long as the fence is kept. Closed before: the same again, with nothing
        released twice.

        Raises:
            AuthenticationError: the identity has another token.
            ReleaseError: something is kept and tried again; send the close again.
            CapacityError: no room for another record.
        """
        record = self._record(session_id, token)
        await self._close(record, session_id)

    async def close_by_cookie(self, session_id: str) -> None:
        """Close a session whose cookie the caller has; its identity, if it has one, is fenced.

        Raises:
            ReleaseError: as `close`.
        """
        record = self._records.get(session_id)
        if record is not None:
            await self._close(record, session_id)
        elif not await self._manager.close_session(session_id):
            raise _not_released()

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<SessionControl: {len(self)} records>"

    # --- records ---

    def _record(self, session_id: str, token: str) -> _Record:
        digest = hashlib.sha256(token.encode()).digest()
        record = self._records.get(session_id)
        if record is None:
            if len(self._records) >= self._max_records:
                raise CapacityError("the server keeps as many sessions' records as it may; try again later")
            record = self._records[session_id] = _Record(digest, self._clock.monotonic())
        elif not hmac.compare_digest(record.token_digest, digest):
            raise AuthenticationError
        return record

    def _fence(self, record: _Record) -> None:
        if record.closed_at is None:
            record.closed_at = self._clock.monotonic()

    async def _seed(self, record: _Record, session_id: str, task: Task) -> SeedReply:
        reply = await self._manager.seed_session(session_id, task)
        if record.closed_at is not None:
            await self._manager.close_session(session_id)
            raise SessionConflictError("the session was closed while it was being seeded")
        return reply

    async def _close(self, record: _Record, session_id: str) -> None:
        self._fence(record)
        seed = record.seed
        released = await self._manager.close_session(session_id)
        if seed is not None and not seed.done():
            # Ended by the close above, or closed by itself as it sees the fence.
            await asyncio.wait((seed,))
            released = await self._manager.close_session(session_id)
        if not released:
            raise _not_released()

    # --- sweep ---

    async def _sweep_loop(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self._lifetime_seconds))
            try:
                await self._sweep()
            except Exception:
                logger.exception("a sweep of the session records failed")

    async def _sweep(self) -> None:
        """Drop old fences, and old records whose session has ended by itself. A session that lives is left alone."""
        now = self._clock.monotonic()
        over = []
        for session_id, record in list(self._records.items()):
            if record.closed_at is not None:
                if now - record.closed_at >= self._lifetime_seconds:
                    del self._records[session_id]
            elif now - record.created_at >= self._lifetime_seconds and self._is_over(session_id, record):
                over.append(self._expire(session_id, record))
        # At once: one whose release takes its time holds up no other.
        await asyncio.gather(*over)

    def _is_over(self, session_id: str, record: _Record) -> bool:
        return (record.seed is None or record.seed.done()) and not self._manager.is_live(session_id)

    async def _expire(self, session_id: str, record: _Record) -> None:
        record.expiry_tries += 1
        released = await self._manager.close_session(session_id)
        if released or record.expiry_tries >= _MAX_EXPIRY_TRIES:
            # What could not be released is the manager's to try again.
            self._records.pop(session_id, None)


def _payload(task: Task) -> bytes:
    return hashlib.sha256(json.dumps(task.model_dump(mode="json"), sort_keys=True).encode()).digest()


def _failed_for_capacity(seed: asyncio.Task[SeedReply] | None) -> bool:
    return seed is not None and seed.done() and not seed.cancelled() and isinstance(seed.exception(), CapacityError)


def _not_released() -> ReleaseError:
    return ReleaseError("the session is closed, and something of it could not be released yet: send the close again")
