"""One worker's sessions, and what is remembered of those that have gone.

The invariant: a session is here until nothing of it is left to release, so what is here is what occupies capacity.

Not here: which calls a session takes (`manager.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from homing.web.errors import SessionLostError
from homing.web.models import ArtifactRef, SessionStatus, VerifierResult
from homing.web.session import Reason, Session

logger = logging.getLogger(__name__)

REMEMBERED_ENDS: Final = 10_000
"""How many ended sessions are remembered, so that a late call learns why its session ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of a session that has gone."""

    status: SessionStatus
    reason: Reason | None
    verdict: VerifierResult | None
    artifacts: tuple[ArtifactRef, ...]


class SessionTable:
    """Sessions by ID.

    Args:
        on_gone: Told each session of which nothing is left. Synchronous, and does not raise.
    """

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._changed = asyncio.Event()

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def ended(self, session_id: str) -> Ended | None:
        """What is remembered of it, if it is not here (any more, or again)."""
        return None if session_id in self._sessions else self._ended.get(session_id)

    def add(self, session: Session) -> None:
        self._sessions[session.id] = session
        self._ended.pop(session.id, None)

    def end(self, session: Session, reason: Reason) -> None:
        """End it, because something failed; `lost` says so from now on."""
        if not session.fenced:
            logger.warning("session %s ends: %s", session.tag, reason.line)
        session.end(SessionStatus.FAILED, reason)

    def lost(self, session_id: str) -> SessionLostError:
        """What a call is told that comes for a session which is not, or which is to end."""
        session, ended = self.get(session_id), self.ended(session_id)
        reason = session.reason if session is not None else None if ended is None else ended.reason
        if reason is not None:
            return SessionLostError(f"the session failed ({reason.error_kind}): {reason.line}; start a new one")
        if session is not None or ended is not None:
            return SessionLostError("the session has been closed; start a new one")
        return SessionLostError("the session is gone, or never was: start a new one")

    def forget_released(self) -> None:
        """A teardown has ended: let those go of which nothing is left, and wake who waits for that."""
        for session in [each for each in self._sessions.values() if each.is_released]:
            del self._sessions[session.id]
            self._ended[session.id] = Ended(session.status, session.reason, session.given_verdict(), session.artifacts)
            while len(self._ended) > REMEMBERED_ENDS:
                self._ended.popitem(last=False)
            self._on_gone(session.id)
        self._changed.set()

    async def wait_for_change(self, seconds: float) -> None:
        """Until a teardown ends, or so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def note_seen(self) -> None:
        """What comes from now on is a change."""
        self._changed.clear()

    def __iter__(self) -> Iterator[Session]:
        """A copy: sessions come and go while it is read."""
        return iter(list(self._sessions.values()))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)
