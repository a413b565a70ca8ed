"""The ownership protocol of one worker: acquire, serve, release, over whatever keeps the records.

The rules are those of `docs/design/protocol.md`. What they come to here:

- Only its owner changes a record while the owner lives. A dead worker's record is changed by whoever first found that
  worker dead, then took the lock, and then found the same text in the record.
- A request is served if, in one block without an await, the record names us, memory agrees, and no fence is up.
- `mine` grows only in a block that has just seen or made a record that names this worker, and shrinks in the block that
  removes or gives it. A record that names this worker without `mine` means *moving*: nobody serves, nobody adopts.

Everything runs on one event loop, and a block without an await is atomic for this worker. Records are changed on the
loop (microseconds each); what touches many of them runs in a thread.

Not here: how a session leaves for another worker (`gives`) or comes from one (`restores`), how long ownership lasts
(`homing.lifetime`), how a request or an ask gets there (`homing.forwarding`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Final

from homing.directory import failpoints
from homing.directory.base import ENDINGS_KEPT, Counters, Ending, Records, StillOwnedError, Why
from homing.directory.compaction import compact_records
from homing.directory.waiting import first_of, in_thread
from homing.errors import (
    DirectoryError,
    ForeignRecordError,
    HomingError,
    MalformedRecordError,
    NotHereError,
    SessionMovingError,
)
from homing.rundir import run_in_forked_child
from homing.types import SESSION, WorkerId, key_digest

logger = logging.getLogger(__name__)

MAX_LOOKS: Final = 3
MAX_DEAD_RECORDS: Final = 1_000_000

_REMEMBERED_NAMES: Final = 2048
_REMEMBERED_KEY_LENGTH: Final = 128


class Entry:
    """What this worker knows of one session: there is one while any of it is true, never two.

    Attributes:
        owned: The record names this worker and the session is open here.
        since: When it came to be owned here, on the monotonic clock.
        serving: Requests being served here.
        fenced: Gives and restores that wait until nothing is served; while there is one, no request enters.
        taking: Restores and rewrites under way; while there is one, a release leaves the record alone.
        drop: The session was lost while it was being served: its state goes when the last request leaves.
        changed: Set when a count falls, for those who wait; None while nobody does.
    """

    __slots__ = ("changed", "drop", "fenced", "key", "name", "owned", "serving", "since", "taking")

    def __init__(self, key: str, name: str) -> None:
        self.key = key
        self.name = name
        self.owned = False
        self.since = 0.0
        self.serving = 0
        self.fenced = 0
        self.taking = 0
        self.drop = False
        self.changed: asyncio.Event | None = None

    def tell(self) -> None:
        if self.changed is not None:
            self.changed.set()
            self.changed = None


class Serving:
    """One request of a session, being served here: `with owners.serving(session_id): …`. Entered once."""

    __slots__ = ("_entry", "_key", "_owners")

    def __init__(self, owners: Ownership, key: str) -> None:
        self._owners = owners
        self._key = key
        self._entry: Entry | None = None

    def __enter__(self) -> None:
        self._entry = self._owners.enter(self._key)

    def __exit__(self, *_: object) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._owners.leave(entry)


class Ownership:
    """Which worker currently owns each session, as one worker sees it and shares it with the others.

    Owns its restores: `aclose` awaits them. The records of sessions still owned stay, so that they keep naming this
    worker once it has exited. In a forked child it owns nothing, releases nothing, and answers every look with
    DirectoryError.

    Attributes:
        count_changed: Called when a session was acquired or let go, so that `len` may be another; must not raise.
    """

    def __init__(
        self,
        records: Records,
        routing_id: WorkerId,
        holds: Callable[[str], bool],
        *,
        kind: str = SESSION,
        drop: Callable[[str], None] | None = None,
    ) -> None:
        self.worker_id = routing_id
        self.kind = kind
        self.counters = Counters()
        self.endings: deque[Ending] = deque(maxlen=ENDINGS_KEPT)
        self._records = records
        self._holds = holds
        self._drop = drop
        self._entries: dict[str, Entry] = {}
        self._names: dict[
            str, str
        ] = {}  # of records of other workers' sessions: a hash costs more than the look itself
        self._pending: set[Entry] = set()
        self._owned = 0
        self.count_changed: Callable[[], object] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._undo = run_in_forked_child(self._in_child)

    # --- looking ---

    def owner(self, session_id: str) -> WorkerId | None:
        """The worker that owns the session; None only if nobody does. About 3 µs.

        Raises:
            ForeignRecordError: its record is of another boot: the session is gone.
            MalformedRecordError: its record names no worker. DirectoryError: it cannot be read, or the directory is
            gone.
        """
        return self._look(self._name(session_id))

    def mine(self, session_id: str) -> bool:
        """Whether this worker counts the session among its own; from memory, so look before you trust it."""
        entry = self._entries.get(session_id)
        return entry is not None and entry.owned

    def try_enter(self, session_id: str) -> Entry | None:
        """Count one more request of the session as served here, which `leave` ends; None if it may not be served here.

        Raises:
            SessionMovingError: it is fenced.
        """
        # One block without an await: look, see that it is ours and not fenced, count. Nothing may come between.
        entry = self._entries.get(session_id)
        if entry is None or not entry.owned or not self._records.names_us(entry.name):
            return None
        if entry.fenced:
            raise SessionMovingError
        entry.serving += 1
        return entry

    def enter(self, session_id: str) -> Entry:
        """As `try_enter`, and says why a request may not be served here; raises as `serving` does on entering."""
        entry = self.try_enter(session_id)
        if entry is None:
            raise self._refusal(session_id)
        return entry

    def leave(self, entry: Entry) -> None:
        """End what `enter` began, once; release the session if nothing of it is left."""
        entry.serving -= 1
        # Of most requests nobody waits for the end, and the session is held: nothing else is to be done.
        if entry.changed is None and (entry.serving or (entry.owned and self._holds(entry.key))):
            return
        self._left(entry)

    def serving(self, session_id: str) -> Serving:
        """A block in which a request of the session is served here, and counted.

        Entering looks at the record. Leaving uncounts, and releases the session if nothing of it is left.

        Raises (on entering):
            NotHereError: someone else owns it, or nobody does.
            SessionMovingError: it is fenced, or its record names this worker while it is not open here.
            ForeignRecordError, MalformedRecordError, DirectoryError: as `owner`; also if the record vanished.
        """
        return Serving(self, session_id)

    def served_now(self, session_id: str) -> int:
        """How many requests of the session are being served here."""
        entry = self._entries.get(session_id)
        return entry.serving if entry is not None else 0

    def owned_ids(self) -> list[str]:
        """The sessions this worker counts among its own, in no order."""
        return [entry.key for entry in self._entries.values() if entry.owned]

    def owned(self) -> Iterable[Entry]:
        """The sessions this worker owns now, to read, in the order they came. What comes or goes meanwhile is no matter."""
        return (entry for entry in list(self._entries.values()) if entry.owned)

    def __len__(self) -> int:
        return self._owned

    def __bool__(self) -> bool:
        return True  # an owner of nothing is no missing owner: `owners or default` would be a bug

    def __repr__(self) -> str:
        serving = sum(entry.serving for entry in self._entries.values())
        return f"<{type(self).__name__} {self.worker_id[:8]}: {self._owned} owned, {serving} serving>"

    # --- acquiring and releasing ---

    def acquire(self, session_id: str) -> WorkerId:
        """Make this worker the session's owner unless it has one; return the owner.

        The owner is this worker, and the session not `mine`, while the session is moving here or away: `serving` says
        so.

        Raises:
            ForeignRecordError, MalformedRecordError: as `owner`.
            DirectoryError: no record could be made or read; nothing has changed, and the caller may retry.
        """
        entry = self._entries.get(session_id)
        if entry is not None and entry.owned:
            owner = self._look(entry.name)
            if owner == self.worker_id:
                return owner
            if owner is None:
                raise self._vanished(entry)
            self._lose(entry, owner)
            return owner
        name = entry.name if entry is not None else key_digest(self.kind, session_id)
        if entry is not None and entry in self._pending and self._records.names_us(name):
            self._own(entry)  # released already but for its record
            self.counters.acquired += 1
            return self.worker_id
        for _ in range(MAX_LOOKS):
            if self._records.create(name):
                if failpoints.on is not None:
                    failpoints.hit("acquire.after_symlink")
                self._own(entry or self._entry(session_id, name))
                self.counters.acquired += 1
                return self.worker_id
            if (owner := self._look(name)) is not None:
                return owner
            # Released between the two: try again, within bounds, since each try may meet another such owner.
        raise DirectoryError(f"owner record {name[:12]} came and went {MAX_LOOKS} times while it was acquired")

    def release(self, session_id: str, *, why: Why | None = Why.CLOSED) -> None:
        """Stop owning the session, unless it is being served, held, moving, or not owned here. Does not raise.

        A record that cannot be removed now is kept as pending, and `release_pending` tries again.

        Args:
            why: Why the session ended; None: it never was one.
        """
        # One block without an await: check, look, unlink, forget.
        entry = self._entries.get(session_id)
        if entry is None or not entry.owned or entry.serving or entry.taking or self._holds(session_id):
            return
        if why is not None:
            self._end(entry, why)
        self._remove(entry)

    def release_pending(self) -> int:
        """Try again what a release could not remove; return how many remain. The sweeper calls it."""
        for entry in list(self._pending):
            if not entry.taking:
                self._remove(entry)
        return len(self._pending)

    def disown(self, session_id: str) -> None:
        """Forget a session whose record no longer names this worker.

        Raises:
            StillOwnedError: the record names this worker. DirectoryError: the record cannot be read.
        """
        entry = self._entries.get(session_id)
        if entry is None or not entry.owned:
            return
        with contextlib.suppress(ForeignRecordError, MalformedRecordError):  # neither names this worker
            if self._look(entry.name) == self.worker_id:
                raise StillOwnedError(session_id)
        self._end(entry, Why.MOVED)
        self._forget(entry)

    # --- compaction ---

    async def compact(self, limit: int = MAX_DEAD_RECORDS) -> int:
        """Remove the records of the oldest dead workers beyond `limit` records of dead workers; return how many went.

        Their sessions are then unowned, no longer gone. Reads every record, in a thread; cancelled, the thread goes on
        and `aclose` awaits it.

        Raises:
            DirectoryBusyError: the lock was not free. DirectoryError: the records cannot be read.
        """
        removed = 0

        async def run() -> None:
            nonlocal removed
            removed = await in_thread(lambda: compact_records(self._records, self.counters, limit))

        await asyncio.shield(self._start(run()))
        if removed:
            self.counters.compacted += removed
            logger.warning(
                "more than %d owner records of exited workers: the oldest %d went, and their sessions are unowned now",
                limit,
                removed,
            )
        return removed

    # --- closing ---

    async def aclose(self) -> None:
        """Wait for every restore, rewrite and compaction under way, then let go of the directory. Twice is fine.

        The records of sessions still owned stay. Each ask ends by itself, so this does; cancelled, call it again.
        """
        self._closed = True
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._undo()
        self._records.close()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        if self._closed:
            work.close()
            raise DirectoryError("this worker is stopping: it takes no more sessions")
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, HomingError):
            logger.error("a restore failed", exc_info=error)

    def _in_child(self) -> None:
        """After a fork: what the parent owns is not ours; requests that this copy thinks it serves have no effect."""
        for entry in self._entries.values():
            entry.owned = entry.drop = False
        self._entries.clear()
        self._pending.clear()
        self.endings.clear()
        self._owned = 0
        self._tasks.clear()

    # --- one block each: no await below, except where a method says async ---

    def _name(self, session_id: str) -> str:
        entry = self._entries.get(session_id)
        if entry is not None:
            return entry.name
        name = self._names.get(session_id)
        if name is None:
            name = key_digest(self.kind, session_id)
            if len(session_id) <= _REMEMBERED_KEY_LENGTH:
                if len(self._names) >= _REMEMBERED_NAMES:
                    self._names.clear()
                self._names[session_id] = name
        return name

    def _look(self, name: str) -> WorkerId | None:
        text = self._records.read(name)
        return None if text is None else self._records.owner_in(text, name)

    def _entry(self, key: str, name: str) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, name)
        return entry

    def _prune(self, entry: Entry) -> None:
        """Drop an entry of which nothing is true any more."""
        used = entry.owned or entry.serving or entry.fenced or entry.taking or entry in self._pending
        if not used and self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def _own(self, entry: Entry) -> None:
        if not entry.owned:
            self._owned += 1
            entry.since = time.monotonic()
        entry.owned = True
        entry.drop = False
        self._pending.discard(entry)
        if self.count_changed is not None:
            self.count_changed()

    def _forget(self, entry: Entry) -> None:
        self._owned -= entry.owned
        entry.owned = False
        self._prune(entry)
        if self.count_changed is not None:
            self.count_changed()

    def _end(self, entry: Entry, why: Why) -> None:
        """Remember that a session was here, and why it is no more."""
        self.endings.append(Ending(entry.key, why, entry.since, time.monotonic()))
        ended = self.counters.ended
        ended[why.value] = ended.get(why.value, 0) + 1

    def _remove(self, entry: Entry) -> None:
        """Unlink the record if it names us, and forget; a record that cannot be unlinked stays pending."""
        try:
            text = self._records.read(entry.name)
            if text is not None and self._records.names_us(entry.name):
                self._records.remove(entry.name)
                if failpoints.on is not None:
                    failpoints.hit("release.after_unlink")
                self.counters.released += 1
            self._pending.discard(entry)
        except MalformedRecordError:
            self._pending.discard(entry)  # not ours any more, whoever wrote it
        except DirectoryError as error:
            # Its state is gone, so it is not ours to serve; its record is, until the unlink succeeds.
            if entry not in self._pending:
                logger.warning("session %s is released later: %s", entry.name[:12], error)
            self._pending.add(entry)
            self.counters.release_failures += 1
        self._forget(entry)

    def _left(self, entry: Entry) -> None:
        """A request left: tell those who wait, and release the session if it was the last and nothing is held."""
        entry.tell()
        if entry.serving:
            return
        if entry.owned:
            self.release(entry.key, why=None)  # which also drops the entry, where nothing is left of it
            return
        if entry.drop:
            entry.drop = False
            self._drop_state(entry)
        self._prune(entry)

    def _lose(self, entry: Entry, owner: WorkerId) -> None:
        """Memory says ours, the record another's: someone took this worker for dead, and the state here is stale."""
        self.counters.lost += 1
        logger.error("session %s was taken from this live worker by worker %s", entry.name[:12], owner)
        if entry.serving:
            entry.drop = True
        self._end(entry, Why.MOVED)
        self._forget(entry)
        if not entry.serving:
            self._drop_state(entry)

    def _drop_state(self, entry: Entry) -> None:
        if self._drop is None:
            return
        try:
            self._drop(entry.key)
        except Exception:  # what it holds is the app's, and half of a give is no place to stop
            logger.exception("dropping the state of session %s failed", entry.name[:12])

    def _refusal(self, session_id: str) -> HomingError:
        """Why a request cannot enter."""
        entry = self._entries.get(session_id)
        try:
            owner = self._look(self._name(session_id))
        except HomingError as error:
            return error
        if owner == self.worker_id:
            return SessionMovingError()
        if entry is not None and entry.owned:
            if owner is None:
                return self._vanished(entry)
            self._lose(entry, owner)
        return NotHereError()

    def _vanished(self, entry: Entry) -> DirectoryError:
        return DirectoryError(
            f"owner record {entry.name[:12]} of a session that is open here is gone: someone removed it"
        )

    # --- waiting ---

    async def _until(
        self,
        entry: Entry,
        condition: Callable[[], bool],
        *,
        timeout_seconds: float | None = None,
        stop: asyncio.Event | None = None,
    ) -> bool:
        """Wait until the condition holds; False if `stop` is set, or the time has passed, before that."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_seconds is None else loop.time() + timeout_seconds
        while stop is None or not stop.is_set():
            if condition():
                return True
            if deadline is not None and loop.time() >= deadline:
                return False
            if entry.changed is None:
                entry.changed = asyncio.Event()
            events = [entry.changed] if stop is None else [entry.changed, stop]
            await first_of(events, None if deadline is None else deadline - loop.time())
        return False
