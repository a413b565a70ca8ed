"""How a session comes here from wherever it is: a restore asks its owner, and opens once the record names this worker.

Rule 6 at the asker, and the seeds' `rewrite` and `rewrite_all`, which ask too. The invariant: whatever was waited for,
a session is opened only in the block of a look that found its record naming this worker.
Nobody opens because time ran out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from homing.directory import failpoints
from homing.directory.base import Ask, Given, OwnerAliveError
from homing.directory.gives import Gives
from homing.directory.ownership import MAX_LOOKS, Entry
from homing.directory.waiting import in_thread, lock_busy, locked, locked_in_thread
from homing.errors import DirectoryError, ForeignRecordError, HomingError, SessionMovingError
from homing.types import WorkerId

logger = logging.getLogger(__name__)

MAX_ASKS: Final = 3
BETWEEN_ASKS_SECONDS: Final = 0.05
MAX_TURNS: Final = 16  # of a restore, with those that found the record changed under it
REWRITE_BATCH: Final = 256
MAX_ASKS_AT_ONCE: Final = 16


class _Restore:
    """One restore under way, of one session or of a batch.

    Attributes:
        own_requests: For each session, how many of the requests served here belong to the restore itself.
        abandoned: Set once its caller no longer waits: then nothing is opened any more.
    """

    __slots__ = ("abandoned", "ask", "opened", "own_requests")

    def __init__(self, ask: Ask, opened: Callable[[str], None] | None, own_requests: Mapping[str, int]) -> None:
        self.ask = ask
        self.opened = opened
        self.own_requests = own_requests
        self.abandoned = asyncio.Event()


class Restores(Gives):
    """An `Ownership` that can also bring a session here: `restore`, `rewrite` and `rewrite_all`."""

    async def restore(
        self,
        session_id: str,
        ask: Ask,
        *,
        deadline_seconds: float,
        opened: Callable[[str], None] | None = None,
        own_requests: int = 0,
    ) -> None:
        """Make this worker the session's owner, whoever owns it now, and open it here.

        The caller has made the session's state ready; `opened(session_id)` puts it in place (synchronous, does not
        raise), in the block that saw the record name this worker. A live owner is asked, at most three times. A session
        that is owned here already is fenced and drained first.

        The deadline and a cancellation end the caller's wait, never the ask: the restore goes on until it has looked
        once more, and what it then finds given to this worker, it releases. Once this has raised, `opened` is never
        called, so the caller may discard the state.

        Args:
            ask: Asks the owner; however it ends, the record says what came of it.
            own_requests: How many of the requests that are served here belong to the restore itself: its own request
                does not count as being served, or it would wait for itself.

        Raises:
            SessionMovingError: the deadline passed, or the owner was asked three times and gave nothing.
            DirectoryBusyError: the lock was not free. MalformedRecordError, DirectoryError: as `owner`.
        """
        restore = _Restore(ask, opened, {session_id: own_requests})
        task = self._start(self._restored(session_id, restore))
        try:
            await asyncio.wait({task}, timeout=deadline_seconds)
        finally:
            if not task.done():
                restore.abandoned.set()
        if not task.done():
            raise SessionMovingError
        task.result()

    async def _restored(self, session_id: str, restore: _Restore) -> None:
        entry = self._entry(session_id, self._name(session_id))
        entry.taking += 1
        succeeded = False
        try:
            succeeded = await self._take(entry, restore)
        finally:
            self._settle(entry, succeeded)
        if not succeeded:
            raise SessionMovingError

    def _settle(self, entry: Entry, succeeded: bool) -> None:
        """A restore or rewrite ended: the last one to end leaves nothing that names this worker and is not open."""
        entry.taking -= 1
        entry.tell()
        if not entry.taking:
            if not entry.owned and self._records.names_us(entry.name):
                self._remove(entry)  # given to a restore that was abandoned meanwhile
            elif not succeeded:
                self.release(
                    entry.key, why=None
                )  # its last request may have left meanwhile, when a release left it alone
        self._prune(entry)

    async def _take(self, entry: Entry, restore: _Restore) -> bool:
        asks = 0
        for _ in range(MAX_TURNS):
            # Whatever came before, each turn begins with a look, and opens only in the block of that look.
            text = self._records.read(entry.name)
            owner = self._owner_of(text, entry.name)
            if owner == self.worker_id and not entry.owned:
                return self._open(entry, restore)
            if restore.abandoned.is_set():
                return False
            if text is None:
                if entry.owned:
                    raise self._vanished(entry)
                if self._records.create(entry.name):
                    return self._open(entry, restore)
            elif owner == self.worker_id:
                if await self._drained(entry, restore) and self._records.names_us(entry.name):
                    return self._open(entry, restore)
            elif owner is None or self._records.is_dead(owner):
                # The lock is awaited; the rename and the open that follow it are one block.
                if await locked(self._records, self.counters, partial(self._replace_dead, entry, text, restore)):
                    self.counters.taken += 1
                    return self._open(entry, restore)
            else:
                if asks == MAX_ASKS:
                    return False
                asks += 1
                answer = await self._ask(owner, entry, restore)
                if failpoints.on is not None:
                    failpoints.hit("restore.asked")
                if answer not in (Given.GIVEN, Given.NOT_MINE) and asks < MAX_ASKS:
                    # A dying worker's connections break a moment before its life file is let go.
                    await asyncio.sleep(asks * BETWEEN_ASKS_SECONDS)
        return False

    @staticmethod
    async def _ask(owner: WorkerId, entry: Entry, restore: _Restore) -> Given | None:
        try:
            return await restore.ask(owner, entry.key)
        except Exception as error:  # whatever it was, the record says what came of the ask
            logger.info("asking worker %s for session %s failed: %r", owner, entry.name[:12], error)
            return None

    async def _drained(self, entry: Entry, restore: _Restore) -> bool:
        """Fence a session of ours and wait until nothing of it is served but the restore's own requests."""
        own_requests = restore.own_requests.get(entry.key, 0)
        entry.fenced += 1
        try:
            quiet = await self._until(entry, lambda: entry.serving <= own_requests, stop=restore.abandoned)
            return quiet and entry.owned
        finally:
            entry.fenced -= 1

    def _replace_dead(self, entry: Entry, text: str, restore: _Restore | None = None) -> bool:
        """Under the lock: put our name in a record that still says what it said when its worker was found dead."""
        if restore is not None and restore.abandoned.is_set():
            return False
        prepared = self._records.prepare(self.worker_id)
        try:
            if self._records.read(entry.name) != text:
                self._records.discard(prepared)
                return False
            if failpoints.on is not None:
                failpoints.hit("take.before_rename")
            self._records.replace(prepared, entry.name)
        except DirectoryError:
            self._records.discard(prepared)
            raise
        if failpoints.on is not None:
            failpoints.hit("take.after_rename")
        return True

    def _open(self, entry: Entry, restore: _Restore) -> bool:
        """The record names us, in this very block: open the session, unless nobody waits for it any more."""
        if restore.abandoned.is_set():
            return False
        self._opened(entry, restore)
        return True

    def _opened(self, entry: Entry, restore: _Restore) -> None:
        self._own(entry)
        self.counters.restored += 1
        if restore.opened is not None:
            restore.opened(entry.key)

    # --- rewriting: the seeds' restore of many ---

    def rewrite(self, session_id: str) -> None:
        """Make this worker the session's owner if nobody owns it, this worker does, or a dead one does. Never waits.

        Raises:
            OwnerAliveError: another live worker owns it, and has to be asked.
            SessionMovingError: it is being served here, or moving. DirectoryBusyError: the lock is not free.
            MalformedRecordError, DirectoryError: as `owner`.
        """
        entry = self._entry(session_id, self._name(session_id))
        try:
            if entry.taking or entry.fenced or entry.serving:
                raise SessionMovingError
            if entry.owned and self._records.names_us(entry.name):
                return
            self._take_in_block(entry)
            self._own(entry)
            self.counters.restored += 1
        finally:
            self._prune(entry)

    def _take_in_block(self, entry: Entry) -> None:
        for _ in range(MAX_LOOKS):
            text = self._records.read(entry.name)
            if text is None:
                if entry.owned:
                    raise self._vanished(entry)
                if self._records.create(entry.name):
                    return
                continue
            owner = self._owner_of(text, entry.name)
            if owner == self.worker_id:
                return
            if owner is not None and not self._records.is_dead(owner):
                raise OwnerAliveError(entry.key, owner)
            with self._records.try_lock() as held:
                if not held:
                    raise lock_busy(self.counters)
                if self._replace_dead(entry, text):
                    self.counters.taken += 1
                    return
        raise DirectoryError(f"owner record {entry.name[:12]} changed {MAX_LOOKS} times while it was rewritten")

    async def rewrite_all(
        self,
        session_ids: Iterable[str],
        ask: Ask,
        *,
        deadline_seconds: float = 30.0,
        opened: Callable[[str], None] | None = None,
        own_requests_of: str | None = None,
    ) -> None:
        """Make this worker the owner of every session, in batches: `restore` of many.

        Records that nobody or a dead worker owns are changed in a thread; live owners are asked, a few at a time. The
        caller holds the sessions (`holds`) from before this call, so no release removes what was taken, and either has
        their state in place or puts it there in `opened`: requests enter from when a session is `mine`.

        `mine` changes on the event loop only, once a batch has ended, and only for what was taken; until then a release
        here leaves those records alone. A cancellation, however often repeated, waits for the batch under way, starts
        no other, and then ends this; so after any failure what is `mine` is exactly what was taken, and the caller can
        release it.

        Args:
            deadline_seconds: For each batch: no ask begins and no draining goes on after it; asks under way end by
                themselves.
            opened: As for `restore`, for each session.
            own_requests_of: The session that the restore's own request belongs to, if it does to one.

        Raises:
            SessionMovingError: sessions whose owner gave nothing in time. DirectoryError: as `restore`. The first of
                them, after the batch; batches after it are not begun.
        """
        ids = list(dict.fromkeys(session_ids))
        own_requests = {} if own_requests_of is None else {own_requests_of: 1}
        for start in range(0, len(ids), REWRITE_BATCH):
            batch = ids[start : start + REWRITE_BATCH]
            restore = _Restore(ask, opened, own_requests)
            task = self._start(self._rewritten(batch, restore, deadline_seconds))
            cancelled: asyncio.CancelledError | None = None
            while not task.done():
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError as error:
                    restore.abandoned.set()
                    cancelled = error
            if cancelled is not None:
                task.exception()  # seen: the cancellation is what the caller hears of
                raise cancelled
            task.result()

    async def _rewritten(self, batch: list[str], restore: _Restore, deadline_seconds: float) -> None:
        entries = [self._entry(session_id, self._name(session_id)) for session_id in batch]
        for entry in entries:
            entry.taking += 1
        taken: dict[Entry, bool] = {}
        errors: list[Exception] = []
        try:
            await in_thread(lambda: self._take_in_thread(entries, taken, errors))
            # What a restore of its own opened meanwhile may be served by now: like all that is ours, it is drained first.
            ready = [entry for entry in taken if not entry.owned]
            self.counters.taken += sum(taken.values())
            for entry in ready:
                self._opened(entry, restore)
            if not errors and not restore.abandoned.is_set():
                rest = [entry for entry in entries if entry not in ready]
                errors += await self._take_each(rest, restore, deadline_seconds)
        finally:
            for entry in entries:
                self._settle(entry, succeeded=True)
        if errors:
            raise errors[0]
        if restore.abandoned.is_set() and any(not entry.owned for entry in entries):
            raise SessionMovingError

    def _take_in_thread(self, entries: list[Entry], taken: dict[Entry, bool], errors: list[Exception]) -> None:
        """Take what nobody or a dead worker owns. In a thread: changes records, `taken` and `errors`, nothing else.

        Args:
            taken: Receives each session whose record names us now, and whether a dead worker owned it.
        """
        dead: list[tuple[Entry, str]] = []
        try:
            for entry in entries:
                text = self._records.read(entry.name)
                owner = self._owner_of(text, entry.name)
                if text is None:
                    if not entry.owned and self._records.create(entry.name):
                        self._taken_in_thread(entry, taken, was_dead=False)
                elif owner is None or (owner != self.worker_id and self._records.is_dead(owner)):
                    dead.append((entry, text))
            if dead:
                locked_in_thread(self._records, self.counters, lambda: self._replace_all_dead(dead, taken))
        except Exception as error:  # what was taken before it has to be made known all the same
            errors.append(error)

    def _replace_all_dead(self, dead: list[tuple[Entry, str]], taken: dict[Entry, bool]) -> None:
        for entry, text in dead:
            if self._replace_dead(entry, text):
                self._taken_in_thread(entry, taken, was_dead=True)

    @staticmethod
    def _taken_in_thread(entry: Entry, taken: dict[Entry, bool], *, was_dead: bool) -> None:
        taken[entry] = was_dead
        if failpoints.on is not None:
            failpoints.hit("rewrite.taken")

    async def _take_each(self, entries: list[Entry], restore: _Restore, deadline_seconds: float) -> list[Exception]:
        """Take what live workers or this one own, a few at a time; the errors of those that failed."""
        errors: list[Exception] = []
        slots = asyncio.Semaphore(MAX_ASKS_AT_ONCE)

        async def one(entry: Entry) -> None:
            async with slots:
                try:
                    if not await self._take(entry, restore):
                        errors.append(SessionMovingError())
                except HomingError as error:
                    errors.append(error)

        timer = asyncio.get_running_loop().call_later(deadline_seconds, restore.abandoned.set)
        try:
            async with asyncio.TaskGroup() as group:
                for entry in entries:
                    group.create_task(one(entry))
        finally:
            timer.cancel()
        return errors

    def _owner_of(self, text: str | None, name: str) -> WorkerId | None:
        """The worker that a record names; None if there is none, or it is of another boot, so its worker is dead."""
        try:
            return None if text is None else self._records.owner_in(text, name)
        except ForeignRecordError:
            return None
