"""Owner records in the file system: one symbolic link per owned session, whose target text names the owner.

`symlink(2)` is atomic, carries its content, and fails if the record exists, so two workers never both make one;
`readlink(2)` never sees half a record and never waits, whatever lies under the name; `rename(2)` replaces one whole.
The target is `<boot ID>.<worker ID>` and leads nowhere. Everything is done relative to a descriptor of the directory
that was opened once, so another directory at its path is never mistaken for it.

Not here: who may do which step when (`homing.directory.ownership`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from homing.directory import failpoints
from homing.errors import DirectoryError, ForeignRecordError, MalformedRecordError, RunDirectoryError
from homing.rundir import SESSION_OWNERS_DIR, RunDirectory, boot_id, close_after_fork, run_in_forked_child
from homing.types import WorkerId

LOCK_NAME: Final = "owners.lock"

_RECORD_NAME = re.compile("[0-9a-f]{64}")
_RECORD_TEXT = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})")
_PREPARED_NAME = re.compile(r"\.([0-9a-f]{32})\.[0-9]+")

_KNOWN_TEXTS: Final = 256

_prepared_numbers = itertools.count()  # of the process: two objects of one worker share one name space


class FileRecords:
    """The records of one run directory, as worker `worker_id` sees them. Borrows the run directory."""

    def __init__(self, run_directory: RunDirectory, worker_id: WorkerId) -> None:
        self._run = run_directory
        self._worker_id = worker_id
        self._boot = boot_id()
        self._ours = f"{self._boot}.{worker_id}"
        self._known: dict[str, WorkerId] = {}  # the texts of good records: as many as workers
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(SESSION_OWNERS_DIR, 0o700, dir_fd=run_directory.fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(SESSION_OWNERS_DIR, flags, dir_fd=run_directory.fd)
        except OSError as error:
            raise RunDirectoryError(
                f"the owner records in {run_directory.path} cannot be opened: {error.strerror}"
            ) from error
        status = os.fstat(self._fd)
        self._identity = status.st_dev, status.st_ino
        self._undo = run_in_forked_child(self._close_fd)

    def close(self) -> None:
        self._undo()
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # --- one record ---

    def names_us(self, name: str) -> bool:
        try:
            return os.readlink(name, dir_fd=self._fd) == self._ours
        except OSError:
            return False

    def read(self, name: str) -> str | None:
        try:
            return os.readlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            self._check_intact()
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise MalformedRecordError(f"owner record {name[:12]} is not a symbolic link") from error
            raise self._failed("read", name, error) from error

    def owner_in(self, text: str, name: str) -> WorkerId:
        known = self._known.get(text)
        if known is not None:
            return known
        match = _RECORD_TEXT.fullmatch(text)
        if match is None:
            raise MalformedRecordError(f"owner record {name[:12]} names no worker: {text[:80]!r}")
        if match[1] != self._boot:
            raise ForeignRecordError(f"owner record {name[:12]} is of another boot of this machine: {text}")
        if len(self._known) >= _KNOWN_TEXTS:
            self._known.clear()
        self._known[text] = owner = WorkerId(match[2])
        return owner

    def create(self, name: str) -> bool:
        try:
            os.symlink(self._ours, name, dir_fd=self._fd)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failed("made", name, error) from error
        try:
            # A directory that was moved away takes new records as before, and the next worker would not see them.
            self._check_intact()
        except DirectoryError:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
            raise
        return True

    def remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failed("removed", name, error) from error

    # --- replacing one ---

    def prepare(self, worker_id: WorkerId) -> str:
        # In the run directory, which is small: what a dead worker left is found without listing every record.
        prepared = f".{self._worker_id}.{next(_prepared_numbers)}"
        try:
            os.symlink(f"{self._boot}.{worker_id}", prepared, dir_fd=self._run.fd)
        except OSError as error:
            raise self._failed("prepared", prepared, error) from error
        return prepared

    def discard(self, prepared: str) -> None:
        with contextlib.suppress(OSError):  # whoever next holds the lock after our death removes it
            os.unlink(prepared, dir_fd=self._run.fd)

    def replace(self, prepared: str, name: str) -> None:
        try:
            os.rename(prepared, name, src_dir_fd=self._run.fd, dst_dir_fd=self._fd)
        except OSError as error:
            raise self._failed("replaced", name, error) from error

    # --- dead workers' records ---

    def is_dead(self, worker_id: WorkerId) -> bool:
        return self._run.is_dead(worker_id)

    def started_at(self, worker_id: WorkerId) -> float:
        return self._run.lived_since(worker_id)

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        # A descriptor of its own for each hold: flock is per open file, so a thread of ours and our loop exclude each
        # other.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=self._run.fd)
        except OSError as error:
            raise self._failed("locked", LOCK_NAME, error) from error
        undo = close_after_fork(fd)
        try:
            held = self._lock(fd)
            if held:
                self._remove_leftovers()
                if failpoints.on is not None:
                    failpoints.hit("lock.held")
            yield held
        finally:
            undo()
            # Not left to the close: a child that a thread forked just now has a copy, and would hold the lock until it
            # ran.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            at_path = os.stat(LOCK_NAME, dir_fd=self._run.fd, follow_symlinks=False)
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError as error:
            raise self._failed("locked", LOCK_NAME, error) from error
        opened = os.fstat(fd)
        # We never unlink it; were it replaced all the same, two workers would hold two locks.
        return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)

    def _remove_leftovers(self) -> None:
        for prepared in self._run.names():
            match = _PREPARED_NAME.fullmatch(prepared)
            if match and match[1] != self._worker_id and self._run.is_dead(WorkerId(match[1])):
                self.discard(prepared)

    # --- every record: in a thread ---

    def survey(self, limit: int) -> dict[str, int] | None:
        if sum(1 for _ in self._names()) <= limit:
            return None
        texts: Counter[str] = Counter()
        for name in self._names():
            with contextlib.suppress(OSError):
                texts[os.readlink(name, dir_fd=self._fd)] += 1
        return texts

    def names_of(self, text: str) -> Iterator[str]:
        for name in self._names():
            with contextlib.suppress(OSError):
                if os.readlink(name, dir_fd=self._fd) == text:
                    yield name

    def _names(self) -> Iterator[str]:
        if self._fd < 0:  # which scandir would take for the current directory
            raise DirectoryError(f"the owner records in {self._run.path} are closed")
        try:
            with os.scandir(self._fd) as entries:
                for entry in entries:
                    if _RECORD_NAME.fullmatch(entry.name):
                        yield entry.name
        except OSError as error:
            raise self._failed("listed", "of all sessions", error) from error

    def _check_intact(self) -> None:
        try:
            status = os.stat(SESSION_OWNERS_DIR, dir_fd=self._run.fd, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self._identity and self._run.intact():
                return
        except OSError:
            pass
        raise DirectoryError(
            f"the directory of owner records in {self._run.path} was removed or replaced; restart the server"
        )

    def _failed(self, what: str, name: str, error: OSError) -> DirectoryError:
        return DirectoryError(f"owner record {name[:12]} in {self._run.path} cannot be {what}: {error.strerror}")
