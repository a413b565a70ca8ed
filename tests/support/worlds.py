"""Several workers of one server, over the file system or in memory: what the directory's contract suite runs in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from homing.directory import Ask, Given, MemoryOwners, MemoryTable, SessionOwners
from homing.directory.records import LOCK_NAME
from homing.directory.restores import Restores
from homing.rundir import SESSION_OWNERS_DIR, boot_id, new_worker_id, remove_run_directory
from homing.types import SESSION, WorkerId, key_digest


def make_run_directory() -> str:
    """A run directory with a path short enough for sockets, on the memory file system where there is one."""
    return tempfile.mkdtemp(prefix="homing-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


class Worker:
    """One worker: its owners, what it holds, and what it was told to drop."""

    def __init__(self, make: Callable[[Worker], Restores]) -> None:
        self.held: set[str] = set()
        self.dropped: list[str] = []
        self.opened: list[str] = []
        self.owners = make(self)

    @property
    def id(self) -> WorkerId:
        return self.owners.worker_id

    def holds(self, session_id: str) -> bool:
        return session_id in self.held

    def drop(self, session_id: str) -> None:
        self.held.discard(session_id)
        self.dropped.append(session_id)

    def open(self, session_id: str) -> None:
        self.held.add(session_id)
        self.opened.append(session_id)


class World(Protocol):
    """Workers that share records, and what may happen to those from outside."""

    boot: str

    def worker(self, kind: str = SESSION) -> Worker: ...

    async def kill(self, worker: Worker) -> None:
        """The worker exits; its records stay."""
        ...

    def plant(self, session_id: str, text: str) -> None:
        """Write a record as nothing of ours would."""
        ...

    def unplant(self, session_id: str) -> None:
        """Remove a record behind its owner's back."""
        ...

    def record(self, session_id: str) -> str | None: ...

    def remove(self) -> None:
        """Remove the directory with all its records."""
        ...

    def lock(self) -> AbstractContextManager[None]:
        """Hold the lock on dead workers' records, as another worker would."""
        ...

    async def aclose(self) -> None: ...


class _Workers:
    def __init__(self) -> None:
        self.workers: list[Worker] = []

    async def kill(self, worker: Worker) -> None:
        await worker.owners.aclose()

    def asking(self, asker: Worker, *, timeout_seconds: float = 5.0) -> Ask:
        """Ask as the hop does: the owner gives, at its own private socket."""

        async def ask(owner: WorkerId, session_id: str) -> Given:
            for worker in self.workers:
                if worker.id == owner:
                    return await worker.owners.give(session_id, asker.id, timeout_seconds=timeout_seconds)
            raise ConnectionRefusedError(owner)

        return ask

    async def aclose(self) -> None:
        for worker in self.workers:
            await worker.owners.aclose()


class FileWorld(_Workers):
    def __init__(self) -> None:
        super().__init__()
        self.boot = boot_id()
        self.path = make_run_directory()

    def worker(self, kind: str = SESSION) -> Worker:
        worker = Worker(
            lambda new: SessionOwners(self.path, new_worker_id(), new.holds, kind=kind, drop=new.drop),
        )
        self.workers.append(worker)
        # Two made within one tick of the file system's clock would be of one age.
        os.utime(os.path.join(self.path, f"{worker.id}.life"), times=(len(self.workers),) * 2)
        return worker

    def record_path(self, session_id: str) -> str:
        return os.path.join(self.path, SESSION_OWNERS_DIR, key_digest(SESSION, session_id))

    def plant(self, session_id: str, text: str) -> None:
        os.symlink(text, self.record_path(session_id))

    def unplant(self, session_id: str) -> None:
        os.unlink(self.record_path(session_id))

    def record(self, session_id: str) -> str | None:
        try:
            return os.readlink(self.record_path(session_id))
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        shutil.rmtree(self.path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        with open(os.path.join(self.path, LOCK_NAME), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    async def aclose(self) -> None:
        await super().aclose()
        remove_run_directory(self.path)


class MemoryWorld(_Workers):
    def __init__(self) -> None:
        super().__init__()
        self.table = MemoryTable()
        self.boot = self.table.boot

    def worker(self, kind: str = SESSION) -> Worker:
        worker = Worker(lambda new: MemoryOwners(self.table, new_worker_id(), new.holds, kind=kind, drop=new.drop))
        self.workers.append(worker)
        return worker

    def plant(self, session_id: str, text: str) -> None:
        self.table.records[key_digest(SESSION, session_id)] = text

    def unplant(self, session_id: str) -> None:
        del self.table.records[key_digest(SESSION, session_id)]

    def record(self, session_id: str) -> str | None:
        return self.table.records.get(key_digest(SESSION, session_id))

    def remove(self) -> None:
        self.table.removed = True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        with self.table.lock:
            yield
