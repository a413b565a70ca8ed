"""What is done for sessions that nobody asks about: idle and aged ones end, leases are renewed, releases tried again.

The invariant: a request in flight is never cut for being idle, and nothing that looks at a session keeps it alive.
"""

from __future__ import annotations

import asyncio
import logging

from homing.clock import Clock
from homing.web.base import BrowserProvider
from homing.web.session import Reason, Session
from homing.web.settings import WebSettings
from homing.web.table import SessionTable
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)


class Care:
    """Looks after the sessions of one table. Owns its two loops; borrows the rest.

    Attributes:
        heartbeat_failures: How many there have been.
        last_error: Of the last one, for `health`.
    """

    def __init__(
        self, settings: WebSettings, clock: Clock, sessions: SessionTable, provider: BrowserProvider, tasks: Tasks
    ) -> None:
        self.heartbeat_failures = 0
        self.last_error = ""
        self._settings = settings
        self._clock = clock
        self._sessions = sessions
        self._provider = provider
        self._tasks = tasks
        self._loops = Tasks()

    def start(self) -> None:
        """Safe to call twice."""
        if self._loops:
            return
        self._loops.spawn(self._sweep_loop(), "sweep")
        if self._provider.renewable:
            self._loops.spawn(self._heartbeat_loop(), "heartbeats")

    async def aclose(self) -> None:
        await self._loops.aclose(1.0)

    async def _sweep_loop(self) -> None:
        while True:
            self._sessions.note_seen()
            try:
                self._sweep()
            except Exception:
                logger.exception("a sweep failed")
            now = self._clock.monotonic()
            due = [each.retry_at - now for each in self._sessions if each.retry_at is not None]
            await self._sessions.wait_for_change(max(0.01, min([self._settings.sweep_seconds, *due])))

    def _sweep(self) -> None:
        now = self._clock.monotonic()
        for session in self._sessions:
            if session.fenced:
                session.retry()
            elif session.age() >= self._settings.max_age_seconds:
                self._sessions.end(session, Reason("session_lost", "it was as old as a session may be"))
            elif session.is_idle and now - session.used_at >= self._settings.idle_seconds:
                self._sessions.end(session, Reason("session_lost", "it was idle for as long as a session may be"))

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_every_seconds)
            sessions = [each for each in self._sessions if not each.fenced and each.browser is not None]
            await asyncio.gather(*(self._heartbeat(each) for each in sessions))

    async def _heartbeat(self, session: Session) -> None:
        assert session.browser is not None
        try:
            await self._tasks.bounded(
                self._provider.heartbeat(session.browser), self._settings.heartbeat_seconds, f"heartbeat {session.tag}"
            )
        except Exception as error:
            self.heartbeat_failures += 1
            session.heartbeat_failures += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if session.heartbeat_failures >= self._settings.heartbeat_limit:
                self._sessions.end(session, Reason("browser_lost", "its browser lease could not be renewed"))
        else:
            session.heartbeat_failures = 0
