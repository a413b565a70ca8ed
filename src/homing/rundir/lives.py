"""A run directory held open, and the proof that its workers are alive."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable
from typing import Final

from homing.errors import DirectoryError, RunDirectoryError
from homing.rundir.checks import DIRECTORY_FLAGS, check_run_directory, check_status
from homing.rundir.forks import run_in_forked_child
from homing.rundir.leftovers import FIRST_APP, SERVER_LOCK, remove_entry
from homing.rundir.names import is_worker_id
from homing.types import WorkerId

_LIFE_NAME = re.compile(r"([0-9a-f]{32})\.life")
_FILE_NAME = re.compile(r"([0-9a-f]{32})\.(?:life|sock|conn|draining|stopping|drained)")

_MAX_APP_BYTES: Final = 256

SHARE_SECONDS: Final = 0.5
_SHARE_POLL_SECONDS: Final = 0.005

DEAD_LIVES_KEPT: Final = 256
"""How many dead workers' life files stay: they tell which died first. The ones that go count as dead all the same."""


class Life:
    """The proof that a worker lives: an exclusive lock on its life file. Its maker closes it, last of all."""

    def __init__(self, worker_id: WorkerId, fd: int, closed: Callable[[Life], None]) -> None:
        self.worker_id = worker_id
        self._fd = fd
        self._closed = closed
        self._undo = run_in_forked_child(self._close_fd)

    def close(self) -> None:
        """From now on this worker counts as dead, for good. Twice is fine."""
        self._undo()
        self._close_fd()
        self._closed(self)

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def held(self) -> bool:
        return self._fd >= 0


class RunDirectory:
    """A run directory, held open: all in it is reached through one descriptor, so no other at its path can pose as it.

    Holds a shared lock on the directory, which cleaners of temp directories respect. In a forked child it is closed.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._identity = _identity(os.fstat(fd))
        self._lives: dict[WorkerId, Life] = {}
        self._undo = run_in_forked_child(self._in_child)

    @classmethod
    def open(cls, path: str) -> RunDirectory:
        """Open and hold the run directory at `path`; the caller closes it.

        Raises:
            RunDirectoryError: it cannot be a run directory, or is being removed.
        """
        path = os.path.abspath(path)
        check_run_directory(path)
        try:
            fd = os.open(path, DIRECTORY_FLAGS)
        except OSError as error:
            raise RunDirectoryError(f"the run directory {path} cannot be opened: {error.strerror}") from error
        try:
            check_status(path, os.fstat(fd))
            _share(fd)
            _check_same(path, fd)
        except OSError as error:
            os.close(fd)
            raise RunDirectoryError(f"the run directory {path} is being removed") from error
        except RunDirectoryError:
            os.close(fd)
            raise
        return cls(path, fd)

    def close(self) -> None:
        """Let go of the directory and of every life still held here. Twice is fine."""
        self._undo()
        for life in list(self._lives.values()):
            life.close()
        self._close_fd()

    def intact(self) -> bool:
        """Whether the path still leads to this very directory; about 2 µs."""
        try:
            return _identity(os.lstat(self.path)) == self._identity
        except OSError:
            return False

    def remove(self) -> None:
        """Remove this directory and all in it. Another one that has taken its place at the path stays as it is."""
        # Whoever holds the lock of its server keeps others out until the lock's name is gone, so that goes last.
        for name in sorted(self.names(), key=lambda name: name == SERVER_LOCK):
            with contextlib.suppress(OSError):
                remove_entry(self.fd, name)
        if self.intact():
            with contextlib.suppress(OSError):
                os.rmdir(self.path)

    def hold_life(self, worker_id: WorkerId, app: str = "") -> Life:
        """Become alive as `worker_id`, a worker of `app` (`tell_apart`); do this before the private socket opens.

        Raises:
            RunDirectoryError: the file cannot be made, or a worker of this ID lives or has lived.
        """
        if not is_worker_id(worker_id):
            raise ValueError(f"not a worker ID: {worker_id!r}")
        name, prepared = f"{worker_id}.life", f".{worker_id}.life"
        fd = -1
        try:
            fd = os.open(
                prepared, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self.fd
            )
            # Locked under a name that nobody tests, then linked: the life file of a live worker never exists unlocked.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(fd, app.encode())
                os.link(prepared, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
            finally:
                os.unlink(prepared, dir_fd=self.fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise RunDirectoryError(
                f"worker {worker_id} cannot hold its life file in {self.path}: {error.strerror}"
            ) from error
        life = self._lives[worker_id] = Life(worker_id, fd, self._life_closed)
        return life

    def holds_life(self, worker_id: WorkerId) -> bool:
        """Whether this process keeps `worker_id` alive, through this object."""
        return worker_id in self._lives

    def is_dead(self, worker_id: WorkerId) -> bool:
        """Whether a worker is proved dead; it then stays so, as IDs are never used again. About 6 µs.

        Raises:
            DirectoryError: it cannot be told, since the directory was removed or there are no descriptors.
        """
        if not is_worker_id(worker_id):
            raise ValueError(f"not a worker ID: {worker_id!r}")
        try:
            # O_NONBLOCK: a fifo under this name must not hang the event loop.
            fd = os.open(
                f"{worker_id}.life", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd
            )
        except FileNotFoundError as error:
            if not self.intact():
                raise DirectoryError(
                    f"the run directory {self.path} was removed or replaced; restart the server"
                ) from error
            return True
        except OSError as error:
            raise DirectoryError(f"the life file of worker {worker_id} cannot be opened: {error.strerror}") from error
        try:
            # Shared: two workers that test a third at once must not see each other's locks.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DirectoryError(f"the life file of worker {worker_id} cannot be tested: {error.strerror}") from error
        finally:
            os.close(fd)
        return True

    def app_of(self, worker_id: WorkerId) -> str | None:
        """The app that a worker serves, as it gave it to `hold_life`; None if it cannot be told, as of one long dead."""
        try:
            fd = os.open(
                f"{worker_id}.life", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd
            )
        except OSError:
            return None
        try:
            return os.read(fd, _MAX_APP_BYTES).decode(errors="replace")
        except OSError:
            return None
        finally:
            os.close(fd)

    def live_workers(self) -> list[WorkerId]:
        """Every worker of this directory that is alive now, this one included, whatever app it serves."""
        found = [WorkerId(match[1]) for match in map(_LIFE_NAME.fullmatch, self.names()) if match]
        return [worker_id for worker_id in found if not self.is_dead(worker_id)]

    def tidy(self) -> None:
        """Remove the files of dead workers, their newest life files excepted: a missing one says *dead* as well.

        Raises:
            DirectoryError: the directory cannot be read, or a worker's life not be told.
        """
        files: dict[WorkerId, list[str]] = {}
        for name in self.names():
            if (match := _FILE_NAME.fullmatch(name)) is not None:
                files.setdefault(WorkerId(match[1]), []).append(name)
        # A worker's first file is its life file, which is locked before it has this name; so none of these is starting.
        dead = sorted((each for each in files if self.is_dead(each)), key=self.lived_since, reverse=True)
        for place, worker_id in enumerate(dead):
            for name in files[worker_id]:
                if place >= DEAD_LIVES_KEPT or not name.endswith(".life"):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self.fd)

    def tell_apart(self, app: str) -> str:
        """What to add to the kinds of an app's keys, so that several apps in one directory never share a session.

        Empty for the app that was here first, and for all workers of that app; else a short text that is `app`'s alone.

        Raises:
            DirectoryError: it cannot be told.
        """
        try:
            name = hashlib.sha256(app.encode()).hexdigest()[:24]
            with contextlib.suppress(FileExistsError):
                os.symlink(name, FIRST_APP, dir_fd=self.fd)
            return "" if os.readlink(FIRST_APP, dir_fd=self.fd) == name else f" {name}"
        except OSError as error:
            raise DirectoryError(f"the apps in {self.path} cannot be told apart: {error.strerror}") from error

    def lived_since(self, worker_id: WorkerId) -> float:
        """When a worker started, by the file system's clock, to compare workers with; 0 if its life file is missing."""
        try:
            return os.stat(f"{worker_id}.life", dir_fd=self.fd, follow_symlinks=False).st_mtime
        except OSError:
            return 0.0

    def mark(self, worker_id: WorkerId, state: str) -> None:
        """Say for all to see that a worker is "draining", "stopping" or "drained". Twice is fine.

        Raises:
            DirectoryError: the mark cannot be made.
        """
        try:
            os.close(
                os.open(
                    f"{worker_id}.{_state(state)}",
                    os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                    0o600,
                    dir_fd=self.fd,
                )
            )
        except OSError as error:
            raise DirectoryError(
                f"worker {worker_id} cannot be marked {state} in {self.path}: {error.strerror}"
            ) from error

    def marks(self, state: str) -> set[WorkerId]:
        """The workers that are marked so, dead ones too."""
        suffix = f".{_state(state)}"
        names = (name.removesuffix(suffix) for name in self.names() if name.endswith(suffix))
        return {WorkerId(name) for name in names if is_worker_id(name)}

    def names(self) -> list[str]:
        """What lies in the directory itself: a few names per worker. DirectoryError: it cannot be read."""
        if self.fd < 0:  # which listdir would take for the current directory
            raise DirectoryError(f"the run directory {self.path} is closed")
        try:
            return os.listdir(self.fd)
        except OSError as error:
            raise DirectoryError(f"the run directory {self.path} cannot be read: {error.strerror}") from error

    def _life_closed(self, life: Life) -> None:
        if self._lives.get(life.worker_id) is life:
            del self._lives[life.worker_id]

    def _in_child(self) -> None:
        self._lives.clear()
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RunDirectory {self.path}: {'closed' if self.fd < 0 else f'{len(self._lives)} lives held'}>"


def _state(state: str) -> str:
    if state not in {"draining", "stopping", "drained"}:
        raise ValueError(f'a mark is "draining", "stopping" or "drained", not {state!r}')
    return state


def _share(fd: int) -> None:
    """Lock the directory, waiting for one that just sees whether it is in use, or empties it of what is left there."""
    deadline = time.monotonic() + SHARE_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_SHARE_POLL_SECONDS)  # as a worker starts, before it serves anything
        else:
            return


def _check_same(path: str, fd: int) -> None:
    # A cleaner may have locked, removed and unlocked the directory between the open and our lock.
    if _identity(os.lstat(path)) != _identity(os.fstat(fd)):
        raise RunDirectoryError(f"the run directory {path} was replaced while it was opened")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
