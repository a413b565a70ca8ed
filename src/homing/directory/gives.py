"""How a session leaves for a worker that asked for it: only the owner gives, once it serves none of it.

Rule 6 at the owner. The invariant: until the block that renames the record nothing has changed, and in that block the
session is looked at, forgotten and dropped first, so no request here ever runs against a session that was given.
"""

from __future__ import annotations

import asyncio
import logging

from homing.directory import failpoints
from homing.directory.base import Given, Why
from homing.directory.ownership import Entry, Ownership
from homing.errors import DirectoryError, ForeignRecordError, MalformedRecordError
from homing.rundir import is_worker_id
from homing.types import WorkerId

logger = logging.getLogger(__name__)


class Gives(Ownership):
    """An `Ownership` that can also give a session to a worker that asked for it."""

    async def give(
        self, session_id: str, to: WorkerId, *, timeout_seconds: float, hung_up: asyncio.Event | None = None
    ) -> Given:
        """Give the session to a worker that asked for it: fence, wait until nothing of it is served here, rename.

        New requests get SessionMovingError meanwhile. The state goes with `drop(session_id)`. Cancelled, it changes
        nothing.

        Args:
            timeout_seconds: After that the fence is lifted and the answer is BUSY; nothing has changed.
            hung_up: Set when the asker is gone; the same.
        """
        if not is_worker_id(to) or to == self.worker_id:
            raise ValueError(f"a session is given to another worker, not to {to!r}")
        entry = self._entries.get(session_id)
        if entry is None or not (entry.owned or entry.taking):
            return self._answered(self._not_given(self._name(session_id)))
        entry.fenced += 1
        try:
            if failpoints.on is not None:
                failpoints.hit("give.fenced")
            # A session on its way here is given once it is open: asked for in turn, it would go to and fro.
            quiet = await self._until(
                entry,
                lambda: not entry.serving and not entry.taking,
                timeout_seconds=timeout_seconds,
                stop=hung_up,
            )
            return self._answered(self._give_now(entry, to) if quiet else Given.BUSY)
        finally:
            entry.fenced -= 1
            entry.tell()
            self._prune(entry)

    def _give_now(self, entry: Entry, to: WorkerId) -> Given:
        try:
            prepared = self._records.prepare(to)  # what can fail comes first, while nothing has changed
        except DirectoryError as error:
            logger.warning("session %s cannot be given now: %s", entry.name[:12], error)
            return Given.BUSY
        if not entry.owned or not self._records.names_us(entry.name):
            self._records.discard(prepared)
            return self._not_given(entry.name)
        self._end(entry, Why.MOVED)
        self._forget(entry)
        self._drop_state(entry)
        if failpoints.on is not None:
            failpoints.hit("give.before_rename")
        try:
            self._records.replace(prepared, entry.name)
        except DirectoryError:
            # The state is dropped, so the record must not name us: without one the asker's restore opens the session.
            logger.exception("session %s was dropped and could not be given", entry.name[:12])
            self._records.discard(prepared)
            self._remove(entry)
            return Given.BUSY
        if failpoints.on is not None:
            failpoints.hit("give.after_rename")
        self.counters.given += 1
        return Given.GIVEN

    def _not_given(self, name: str) -> Given:
        """What to answer for a session that is not open here."""
        try:
            return Given.BUSY if self._look(name) == self.worker_id else Given.NOT_MINE
        except (ForeignRecordError, MalformedRecordError):
            return Given.NOT_MINE  # the asker looks again, and finds the same
        except DirectoryError as error:
            logger.warning("session %s cannot be given now: %s", name[:12], error)
            return Given.BUSY

    def _answered(self, answer: Given) -> Given:
        self.counters.busy += answer is Given.BUSY
        return answer
