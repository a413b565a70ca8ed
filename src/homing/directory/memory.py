"""Owner records in memory: the twin of the file system's, for tests and for servers that live in one process.

Several workers in one process share a `MemoryTable` as several processes share a directory.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from homing.directory import failpoints
from homing.directory.restores import Restores
from homing.errors import DirectoryError, ForeignRecordError, MalformedRecordError
from homing.rundir import is_worker_id, new_worker_id
from homing.types import SESSION, WorkerId


class MemoryTable:
    """What the workers share.

    Attributes:
        boot: The boot ID that its records carry.
        records: Name to text, as the names and targets of the file system's links.
        workers: Those that ever lived, in order, and whether each is alive.
        removed: Whether the directory is gone: then nothing can be looked up or made.
    """

    def __init__(self) -> None:
        self.boot = new_worker_id()
        self.records: dict[str, str] = {}
        self.workers: dict[WorkerId, bool] = {}
        self.removed = False
        self.lock = threading.Lock()

    def kill(self, worker_id: WorkerId) -> None:
        """From now on that worker counts as dead; the caller no longer uses its owners."""
        self.workers[worker_id] = False


class MemoryRecords:
    """The records of a table, as worker `worker_id` sees them."""

    def __init__(self, table: MemoryTable, worker_id: WorkerId) -> None:
        self._table = table
        self._ours = f"{table.boot}.{worker_id}"
        self._prepared: dict[str, str] = {}
        self._numbers = itertools.count()

    def names_us(self, name: str) -> bool:
        return not self._table.removed and self._table.records.get(name) == self._ours

    def read(self, name: str) -> str | None:
        return self._intact().records.get(name)

    def owner_in(self, text: str, name: str) -> WorkerId:
        boot, _, worker = text.partition(".")
        if not is_worker_id(boot) or not is_worker_id(worker):
            raise MalformedRecordError(f"owner record {name[:12]} names no worker: {text[:80]!r}")
        if boot != self._table.boot:
            raise ForeignRecordError(f"owner record {name[:12]} is of another boot: {text}")
        return WorkerId(worker)

    def create(self, name: str) -> bool:
        return self._intact().records.setdefault(name, self._ours) is self._ours

    def remove(self, name: str) -> None:
        self._intact().records.pop(name, None)

    def prepare(self, worker_id: WorkerId) -> str:
        prepared = str(next(self._numbers))
        self._prepared[prepared] = f"{self._intact().boot}.{worker_id}"
        return prepared

    def discard(self, prepared: str) -> None:
        self._prepared.pop(prepared, None)

    def replace(self, prepared: str, name: str) -> None:
        self._intact().records[name] = self._prepared.pop(prepared)

    def is_dead(self, worker_id: WorkerId) -> bool:
        return not self._intact().workers.get(worker_id, False)

    def started_at(self, worker_id: WorkerId) -> float:
        workers = list(self._table.workers)
        return float(workers.index(worker_id)) if worker_id in self._table.workers else 0.0

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        held = self._table.lock.acquire(blocking=False)
        try:
            if held and failpoints.on is not None:
                failpoints.hit("lock.held")
            yield held
        finally:
            if held:
                self._table.lock.release()

    def survey(self, limit: int) -> dict[str, int] | None:
        texts = list(self._intact().records.values())
        return Counter(texts) if len(texts) > limit else None

    def names_of(self, text: str) -> list[str]:
        return [name for name, said in list(self._intact().records.items()) if said == text]

    def close(self) -> None:
        self._prepared.clear()

    def _intact(self) -> MemoryTable:
        if self._table.removed:
            raise DirectoryError("the table of owner records was removed")
        return self._table


class MemoryOwners(Restores):
    """Which worker owns each session, among workers of one process; as `SessionOwners` in every answer and error."""

    def __init__(
        self,
        table: MemoryTable,
        routing_id: str,
        holds: Callable[[str], bool],
        *,
        kind: str = SESSION,
        drop: Callable[[str], None] | None = None,
    ) -> None:
        if not is_worker_id(routing_id):
            raise ValueError(f"not a worker ID: {routing_id!r}")
        self._table = table
        worker_id = WorkerId(routing_id)
        table.workers[worker_id] = True
        super().__init__(MemoryRecords(table, worker_id), worker_id, holds, kind=kind, drop=drop)

    async def aclose(self) -> None:
        """As `SessionOwners`: from now on this worker counts as dead, and its records stay."""
        await super().aclose()
        self._table.kill(self.worker_id)
