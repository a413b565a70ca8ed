"""A server that holds sessions in memory: it lets go of what they leave behind, and of all of them when it stops.

The invariant: every session's state is released once: by its end, by the sweep that finds it without an owner, or as the
server stops. A release that fails is tried again until it succeeds, or is reported as the server stops.

Not here: how sessions begin and end on the wire (`resources.py`, `gymnasium.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

from homing.identity import RESOURCES
from homing.rl.disconnect import end_tasks
from homing.rl.errors import RlError
from homing.rl.server import RlServer
from homing.rl.sessions import Session, SessionTable
from homing.types import session_tag

logger = logging.getLogger(__name__)

StateT = TypeVar("StateT")

SWEEP_SECONDS: Final = 30.0
RELEASE_SECONDS: Final = 30.0
"""How long the release of one left session may take, before it is given up for this time."""
RELEASES_AT_ONCE: Final = 16
STOP_SECONDS: Final = 120.0
"""How long all of them may take as the server stops."""


class SessionServer(RlServer, Generic[StateT]):
    """An RL server whose sessions are named by a resources server's cookie. Owns their state.

    Attributes:
        sessions: Those that this worker holds.
    """

    kind = RESOURCES

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sessions: SessionTable[StateT] = SessionTable(
            self.release, window_seconds=self.close_retry_window_seconds, clock=self.clock
        )
        self._left: list[Session[StateT]] = []

    @abstractmethod
    async def release(self, state: StateT) -> None:
        """Let go of a session's state. If it raises, the session stays, and its close can be sent again."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep_forever(), name="homing rl sweeper")
        try:
            yield
        finally:
            await end_tasks([sweeper])
            await self._release_all()

    def drop_session(self, session_id: str) -> None:
        """Take the session out; its state is released by the next sweep. Synchronous, and does not raise."""
        session = self.sessions.remove(session_id)
        if session is not None:
            self._left.append(session)

    async def end_session(self, session: Session[StateT]) -> None:
        """End a session as its last request leaves. Its reply stands: a state that cannot be released is left to the sweep."""
        try:
            async with self.sessions.changing(session.id):
                if self.sessions.get(session.id) is session:
                    await self.sessions.end(session.id)
        except RlError:
            logger.warning("session %s stays until it can be released", session_tag(session.id), exc_info=True)
            if self.sessions.get(session.id) is session:
                self.drop_session(session.id)

    async def sweep(self) -> None:
        """Release what was left behind: by sessions that this worker no longer owns, and by failed releases."""
        self.sessions.expire_fences()
        for session in self.sessions:
            if not session.in_use and not self.still_owns(session.id):
                self.drop_session(session.id)
        await self._release_left()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception:
                logger.exception("a sweep failed; the next one is in %d s", SWEEP_SECONDS)

    async def _release_left(self) -> None:
        async def release_one_by_one() -> None:
            while taken:
                session = taken.pop()
                try:
                    async with asyncio.timeout(RELEASE_SECONDS):
                        await session.unused()
                        await self.release(session.state)
                except Exception:
                    logger.warning(
                        "session %s could not be released, and will be tried again",
                        session_tag(session.id),
                        exc_info=True,
                    )
                    self._left.append(session)
                except BaseException:
                    self._left.append(session)
                    raise

        taken, self._left = self._left, []
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(RELEASES_AT_ONCE, len(taken))):
                    tasks.create_task(release_one_by_one(), name="homing rl release")
        finally:
            self._left += taken

    async def _release_all(self) -> None:
        for session in self.sessions:
            self.drop_session(session.id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._release_left()
        for session in self._left:
            logger.error("session %s was not released", session_tag(session.id))
