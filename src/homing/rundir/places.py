"""Where run directories are made, by whom they are shared, and when they are removed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import Final

from homing.errors import RunDirectoryError
from homing.rundir.names import SESSION_SOCKET_DIR_ENV, boot_id, worker_socket_path

DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_ANOTHER: Final = f"name another directory of yours with --run-dir or {SESSION_SOCKET_DIR_ENV}, or leave it out"

_RUN_DIRECTORY_NAME = re.compile(r"homing-([0-9]+)-[0-9a-z_]+")


def check_run_directory(path: str) -> None:
    """See that `path` can be a run directory: a directory of this user, 0700, no link, and short enough for sockets.

    Raises:
        RunDirectoryError: it is not; the message says which.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise RunDirectoryError(f"the run directory {path} cannot be used: {error.strerror}; {_ANOTHER}") from error
    check_status(path, status)
    worker_socket_path(path, "0" * 32)


def check_status(path: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise RunDirectoryError(f"the run directory {path} is a symbolic link; name the directory itself")
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"the run directory {path} is not a directory; {_ANOTHER}")
    if status.st_uid != os.geteuid():
        raise RunDirectoryError(
            f"the run directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}; {_ANOTHER}"
        )
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
    if os.environ.get(SESSION_SOCKET_DIR_ENV) or not made_by_launcher():
        return create_session_socket_dir()
    parent = os.getppid()
    facts = (os.getuid(), boot_id(), _pid_namespace(), parent, _stat_fields(parent)[19:20], sys.argv, settings)
    name = f"homing-{parent}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"
    for base in _bases():
        _remove_stale(base)
        with contextlib.suppress(OSError):
            return _made(os.path.join(base, name))
    raise _no_base()


def leave_run_directory(path: str) -> None:
    """Remove the run directory that `siblings_directory` gave, if this process has it to itself.

    One that siblings share stays until a server of this user starts after their launcher has gone: as long as the
    launcher lives, it may start workers that have to know whose sessions are gone.
    """
    named = _RUN_DIRECTORY_NAME.fullmatch(os.path.basename(path))
    if named is not None and int(named[1]) == os.getpid() and not os.environ.get(SESSION_SOCKET_DIR_ENV):
        remove_run_directory(path)


def remove_run_directory(path: str) -> None:
    """Remove a run directory and all in it, if it is one and ours. Nothing happens if it is gone already."""
    with contextlib.suppress(RunDirectoryError):
        check_run_directory(path)
        shutil.rmtree(path, ignore_errors=True)


def _made(path: str) -> str:
    worker_socket_path(path, "0" * 32)  # one that is too long is refused before it is made
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            raise
        except OSError as error:
            raise RunDirectoryError(f"the run directory {path} cannot be made: {error.strerror}; {_ANOTHER}") from error
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
                fd = os.open(entry.path, DIRECTORY_FLAGS)
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


def made_by_launcher() -> bool:
    """Whether a launcher of workers made this process, so that it may have siblings that serve the same app."""
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
