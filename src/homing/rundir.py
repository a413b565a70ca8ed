"""Where do one server's private sockets and owner records live, and which of its workers are alive?

A *run directory* is 0700, ours, and not a link. It holds, flat and small:

    <worker ID>.sock       the private socket of a worker
    <worker ID>.life       locked exclusively by that worker while it lives
    <worker ID>.stopping   marks that workers set for each other; also `.drained`
    owners.lock            held while a dead worker's owner record is changed
    .<worker ID>.<n>       a link that is about to be renamed over an owner record
    session-owners/        the owner records, up to a million: never list it on the event loop

Invariant: *dead* is proved, not guessed. A worker locks `<worker ID>.life` before that name exists, and keeps the lock
until it exits, so a shared lock on it succeeds, or the file is missing, if and only if the worker is dead.

Everything that proves a worker alive is closed in a forked child, which would otherwise keep a dead parent alive.

Not here: what an owner record says (`homing.directory`), what a private socket carries (`homing.forwarding`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import multiprocessing
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from homing.errors import DirectoryError, RunDirectoryError
from homing.types import WorkerId

SESSION_SOCKET_DIR_ENV: Final = "HOMING_SESSION_SOCKET_DIR"
"""Names the run directory to use, in place of a new one."""

SESSION_OWNERS_DIR: Final = "session-owners"
"""The directory of the owner records, in the run directory."""

MAX_SOCKET_PATH_BYTES: Final = 107
"""What `sun_path` holds on Linux (108) less its NUL; Python refuses more when it binds."""

_WORKER_ID = re.compile("[0-9a-f]{32}")
_RUN_DIRECTORY_NAME = re.compile(r"homing-([0-9]+)-[0-9a-z_]+")
_LIFE_NAME = re.compile(r"([0-9a-f]{32})\.life")
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# --- after a fork ---

_in_child: dict[object, Callable[[], None]] = {}


def _forked() -> None:
    hooks = list(_in_child.values())
    _in_child.clear()
    for hook in hooks:
        hook()


os.register_at_fork(after_in_child=_forked)


def run_in_forked_child(hook: Callable[[], None]) -> Callable[[], None]:
    """Call `hook` in every child that this process forks from now on; returns what undoes this.

    The hook runs before any other code of the child; it must not raise, wait, or take a lock.
    """
    token = object()
    _in_child[token] = hook
    return lambda: _in_child.pop(token, None) and None


class _Detachable(Protocol):
    def detach(self) -> int: ...


def close_after_fork(thing: int | _Detachable) -> Callable[[], None]:
    """Close a descriptor or a socket in every child forked from now on; returns what undoes this.

    Call what it returns before you close a plain descriptor, whose number may then name something else. A socket that
    was closed meanwhile is left alone.
    """

    def close() -> None:
        fd = thing if isinstance(thing, int) else thing.detach()
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    return run_in_forked_child(close)


# --- IDs and paths ---


def new_worker_id() -> WorkerId:
    """An ID for this start of this process: 128 random bits. Make another after a fork."""
    return WorkerId(secrets.token_hex(16))


def is_worker_id(text: object) -> bool:
    """Whether `text` is a worker ID: 32 lowercase hexadecimal digits and nothing else."""
    return isinstance(text, str) and _WORKER_ID.fullmatch(text) is not None


def worker_socket_path(socket_dir: str, routing_id: str) -> str:
    """The path of a worker's private socket.

    Raises:
        RunDirectoryError: the path has more than 107 bytes, which no Unix socket can be bound to.
    """
    path = os.path.join(socket_dir, f"{routing_id}.sock")
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise RunDirectoryError(
            f"the private socket {path} would have a path of {size} bytes, and the limit is {MAX_SOCKET_PATH_BYTES}; "
            f"use a shorter run directory (--run-dir, or {SESSION_SOCKET_DIR_ENV})"
        )
    return path


@functools.cache
def boot_id() -> str:
    """This boot of this machine, as 32 lowercase hexadecimal digits.

    Source: `/proc/sys/kernel/random/boot_id` on Linux, `kern.bootsessionuuid` on macOS.
    """
    if sys.platform == "darwin":
        text = _sysctl("kern.bootsessionuuid")
    else:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            text = file.read()
    found = text.strip().replace("-", "").lower()
    if not is_worker_id(found):  # the same shape: 128 bits in hexadecimal
        raise RunDirectoryError(f"the system's boot ID cannot be read: {text!r}")
    return found


def _sysctl(name: str) -> str:
    size = ctypes.c_size_t(128)
    buffer = ctypes.create_string_buffer(size.value)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise RunDirectoryError(f"the system does not say {name}")
    return buffer.value.decode("ascii", "replace")


# --- making, checking and removing directories ---


def check_run_directory(path: str) -> None:
    """See that `path` can be a run directory: a directory of this user, 0700, no link, and short enough for sockets.

    Raises:
        RunDirectoryError: it is not; the message says which.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise RunDirectoryError(f"the run directory {path} cannot be used: {error.strerror}") from error
    _check_status(path, status)
    worker_socket_path(path, "0" * 32)


def _check_status(path: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise RunDirectoryError(f"the run directory {path} is a symbolic link; name the directory itself")
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"the run directory {path} is not a directory")
    if status.st_uid != os.geteuid():
        raise RunDirectoryError(f"the run directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o777 != 0o700:
        raise RunDirectoryError(
            f"the run directory {path} has mode {status.st_mode & 0o777:04o}; it must be 0700 (chmod 700 {path})"
        )


def create_session_socket_dir(explicit: str | None = None) -> str:
    """The run directory for one server, ready to use. Its maker removes it (`remove_run_directory`).

    With `explicit`, or `HOMING_SESSION_SOCKET_DIR` in the environment: that directory, made if it is missing. Otherwise
    a new `homing-<pid>-<random>` on the first usable of XDG_RUNTIME_DIR, /dev/shm and the temp directory, once the
    directories that dead servers of this user left there are removed.

    Raises:
        RunDirectoryError: the explicit one, or every candidate, is missing, not ours, too open, or too long.
    """
    explicit = explicit or os.environ.get(SESSION_SOCKET_DIR_ENV)
    if explicit:
        return _made(os.path.abspath(explicit))
    for base in _bases():
        _remove_stale(base)
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix=f"homing-{os.getpid()}-", dir=base)
    raise _no_base()


def siblings_directory(settings: str) -> str:
    """The run directory that this process shares with the sibling workers of its launcher, ready to use.

    Siblings are the processes that one launcher (uvicorn, gunicorn, hypercorn, granian) made to serve one app: same
    user, boot, PID namespace, parent process, command line, and `settings`, which says how the app is routed. A process
    that no launcher made (not a `multiprocessing` child, and not a fork of its parent) gets a directory of its own, so
    two servers that one shell started never meet. `HOMING_SESSION_SOCKET_DIR` overrides.

    Raises:
        RunDirectoryError: as `create_session_socket_dir`.
    """
    if os.environ.get(SESSION_SOCKET_DIR_ENV) or not _made_by_launcher():
        return create_session_socket_dir()
    parent = os.getppid()
    facts = (os.getuid(), boot_id(), _pid_namespace(), parent, _stat_fields(parent)[19:20], sys.argv, settings)
    name = f"homing-{parent}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"
    for base in _bases():
        _remove_stale(base)
        with contextlib.suppress(OSError):
            return _made(os.path.join(base, name))
    raise _no_base()


def remove_run_directory(path: str) -> None:
    """Remove a run directory and all in it, if it is one and ours. Nothing happens if it is gone already."""
    with contextlib.suppress(RunDirectoryError):
        check_run_directory(path)
        shutil.rmtree(path, ignore_errors=True)


def _made(path: str) -> str:
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            raise
        except OSError as error:
            raise RunDirectoryError(f"the run directory {path} cannot be made: {error.strerror}") from error
    check_run_directory(path)
    return path


def _bases() -> Iterator[str]:
    """The usable places for run directories, best first: memory file systems, then the disk."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm", tempfile.gettempdir()):  # noqa: S108 - checked below
        if base and os.path.isabs(base) and _usable(base):
            yield base


def _usable(base: str) -> bool:
    try:
        status = os.stat(base)
        worker_socket_path(os.path.join(base, f"homing-{'9' * 7}-{'x' * 24}"), "0" * 32)
    except (OSError, RunDirectoryError):
        return False
    ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    # Others may write to a sticky directory without being able to rename or remove what is ours.
    shared = status.st_uid == 0 and bool(status.st_mode & stat.S_ISVTX)
    return stat.S_ISDIR(status.st_mode) and (ours or shared) and os.access(base, os.W_OK | os.X_OK)


def _no_base() -> RunDirectoryError:
    return RunDirectoryError(
        "no place for the run directory: XDG_RUNTIME_DIR, /dev/shm and the temp directory are missing, not ours, too "
        f"open, or too long; name a directory with --run-dir or {SESSION_SOCKET_DIR_ENV}"
    )


def _remove_stale(base: str) -> None:
    """Remove the run directories of dead servers: process gone, no socket accepts, and nobody holds the directory."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            named = _RUN_DIRECTORY_NAME.fullmatch(entry.name)
            if named is None or _process_exists(int(named[1])):
                continue
            with contextlib.suppress(OSError, RunDirectoryError):
                check_run_directory(entry.path)
                fd = os.open(entry.path, _DIRECTORY_FLAGS)
                try:
                    # A server in another PID namespace looks gone from here, and holds its directory all the same.
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not _any_socket_accepts(entry.path):
                        shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(fd)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return pid > 0


def _any_socket_accepts(path: str) -> bool:
    for name in os.listdir(path):
        if not name.endswith(".sock"):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            try:
                client.connect(os.path.join(path, name))
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError:
                pass  # a full backlog, say: something listens
            return True
    return False


def _made_by_launcher() -> bool:
    if multiprocessing.parent_process() is not None:
        return True
    try:
        with open("/proc/self/cmdline", "rb") as own, open(f"/proc/{os.getppid()}/cmdline", "rb") as parents:
            if own.read() == parents.read():
                return True
    except OSError:
        return False
    # A launcher that renames its processes (gunicorn with setproctitle) has forked all the same: an exec would have
    # moved the stack (field 28 of proc(5)), which a fork shares with its parent.
    stacks = {tuple(_stat_fields(pid)[25:26]) for pid in (os.getpid(), os.getppid())}
    return len(stacks) == 1 and stacks.isdisjoint({(), ("0",), ("1",)})


def _stat_fields(pid: int) -> list[str]:
    """Fields 3 and later of `/proc/<pid>/stat`, so field n is at n - 3; none where there is no such file."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


# --- the directory, opened ---


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
            fd = os.open(path, _DIRECTORY_FLAGS)
        except OSError as error:
            raise RunDirectoryError(f"the run directory {path} cannot be opened: {error.strerror}") from error
        try:
            _check_status(path, os.fstat(fd))
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
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

    def hold_life(self, worker_id: WorkerId) -> Life:
        """Become alive as `worker_id`; do this before the private socket opens.

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

    def live_workers(self) -> list[WorkerId]:
        """Every worker of this directory that is alive now, this one included."""
        found = [WorkerId(match[1]) for match in map(_LIFE_NAME.fullmatch, self._names()) if match]
        return [worker_id for worker_id in found if not self.is_dead(worker_id)]

    def lived_since(self, worker_id: WorkerId) -> float:
        """When a worker started, by the file system's clock, to compare workers with; 0 if its life file is missing."""
        try:
            return os.stat(f"{worker_id}.life", dir_fd=self.fd, follow_symlinks=False).st_mtime
        except OSError:
            return 0.0

    def mark(self, worker_id: WorkerId, state: str) -> None:
        """Say for all to see that a worker is "stopping" or "drained". Twice is fine.

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
        """The workers that are marked "stopping" or "drained", dead ones too."""
        suffix = f".{_state(state)}"
        names = (name.removesuffix(suffix) for name in self._names() if name.endswith(suffix))
        return {WorkerId(name) for name in names if is_worker_id(name)}

    def _names(self) -> list[str]:
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
    if state not in {"stopping", "drained"}:
        raise ValueError(f'a mark is "stopping" or "drained", not {state!r}')
    return state


def _check_same(path: str, fd: int) -> None:
    # A cleaner may have locked, removed and unlocked the directory between the open and our lock.
    if _identity(os.lstat(path)) != _identity(os.fstat(fd)):
        raise RunDirectoryError(f"the run directory {path} was replaced while it was opened")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
