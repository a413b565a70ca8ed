"""Where run directories are made, what one has to be, and how one is removed.

Not here: which processes share one (`siblings.py`), and what others left behind (`leftovers.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import Final

from homing.errors import RunDirectoryError
from homing.rundir.checks import ANOTHER, check_run_directory
from homing.rundir.files import allocate
from homing.rundir.forks import run_in_forked_child
from homing.rundir.leftovers import remove_stale
from homing.rundir.names import SESSION_SOCKET_DIR_ENV, worker_socket_path

_ROOM_BYTES: Final = 1 << 16
"""What has to be free where a new directory is made: what a server and a few workers say of themselves, and some records."""

_of_this_worker: Final[list[str]] = []
"""The directory of the server that this process is a worker of, if it was told; a fork of it is none."""


def use_run_directory(path: str) -> None:
    """Have this process, a worker of a server, be in that directory. What it starts or forks is none of the server's workers."""
    _of_this_worker[:] = [path]
    run_in_forked_child(_of_this_worker.clear)
    # Set for this server: with it, a server that the app starts would be told that it belongs to this one.
    os.environ.pop(SESSION_SOCKET_DIR_ENV, None)


def named_run_directory() -> str | None:
    """The directory that this process was told to use: by `use_run_directory`, else by `HOMING_SESSION_SOCKET_DIR`."""
    return _of_this_worker[0] if _of_this_worker else os.environ.get(SESSION_SOCKET_DIR_ENV) or None


def create_session_socket_dir(explicit: str | None = None) -> str:
    """The run directory for one server, ready to use. Its maker removes it (`remove_run_directory`).

    With `explicit`, in a worker of `homing run`, or with `HOMING_SESSION_SOCKET_DIR` in the environment: that directory, made
    if it is missing. Otherwise a new `homing-<pid>-<random>` on the first usable of XDG_RUNTIME_DIR, /dev/shm and the temp
    directory, once the directories that dead servers of this user left there are removed.

    Raises:
        RunDirectoryError: the explicit one, or every candidate, is missing, not ours, too open, too long, or full.
    """
    explicit = explicit or named_run_directory()
    if explicit:
        return made(os.path.abspath(explicit))
    for base in run_directory_bases():
        remove_stale(base)
        with contextlib.suppress(OSError):
            path = tempfile.mkdtemp(prefix=f"homing-{os.getpid()}-", dir=base)
            os.chmod(path, 0o700)  # whatever the umask is
            if _has_room(path):
                return path
            remove_run_directory(path)
    raise no_base()


def remove_run_directory(path: str) -> None:
    """Remove a run directory and all in it, if it is one and ours. Nothing happens if it is gone already."""
    with contextlib.suppress(RunDirectoryError):
        check_run_directory(path)
        shutil.rmtree(path, ignore_errors=True)


def made(path: str) -> str:
    worker_socket_path(path, "0" * 32)  # one that is too long is refused before it is made
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # whatever the umask is
        except FileExistsError:
            raise
        except OSError as error:
            raise RunDirectoryError(f"the run directory {path} cannot be made: {error.strerror}; {ANOTHER}") from error
    check_run_directory(path)
    return path


def run_directory_bases() -> Iterator[str]:
    """The usable places for run directories, best first: memory file systems, then the disk."""
    for base in _candidates():
        if os.path.isabs(base) and _usable(base):
            yield base


def _candidates() -> Iterator[str]:
    yield os.environ.get("XDG_RUNTIME_DIR", "")
    yield "/dev/shm"  # noqa: S108 - checked by `_usable`
    # Asked for last, as that writes a file: where no temp directory is writable there is none, and it is not missed.
    try:
        temp = tempfile.gettempdir()
    except FileNotFoundError:
        return
    yield temp


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


def _has_room(path: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            allocate(file.fileno(), _ROOM_BYTES)
    except OSError:
        return False
    return True


def no_base() -> RunDirectoryError:
    return RunDirectoryError(
        "no place for the run directory: XDG_RUNTIME_DIR, /dev/shm and the temp directory are missing, not ours, too "
        f"open, too long, or full; name a directory with --run-dir or {SESSION_SOCKET_DIR_ENV}"
    )
