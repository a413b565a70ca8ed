"""What dead workers and servers have left in run directories, and when it goes.

Not here: owner records of dead workers, which keep answering *gone* while their server lives (`homing.directory`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from typing import Final

from homing.errors import RunDirectoryError
from homing.rundir.checks import DIRECTORY_FLAGS, check_run_directory
from homing.rundir.names import (
    BOARD_NAME,
    CONTROL_SOCKET,
    EPISODES_DIR,
    LINK_PREFIX,
    NEW_DESCRIPTION,
    PAGE_NAME,
    PERMITS_NAME,
    SERVER_DESCRIPTION,
    SESSION_OWNERS_DIR,
    SESSION_SOCKET_DIR_ENV,
    SITES_DIR,
    is_worker_id,
)
from homing.rundir.processes import exists, has_ended

logger = logging.getLogger(__name__)

BEGUN_BY: Final = "begun-by"
"""The link that says which launcher's server a run directory belongs to, where no supervisor of homing's has it."""

FIRST_APP: Final = "first-app"
"""The link that says which app's records go by the plain kind of key (`RunDirectory.tell_apart`)."""

SERVER_LOCK: Final = "server.lock"
"""Locked exclusively by the supervisor of `homing run` while its server runs; never removed while it may be."""

_EMPTIED: Final = ".emptied-"

_JUST_MADE_SECONDS: Final = 300.0
"""How long a directory with nothing in it may be one that its server has just made."""

_RUN_DIRECTORY_NAME = re.compile(r"homing-([0-9]+)-[0-9a-z_]+")


def run_directory_pid(path: str) -> int | None:
    """The process that a run directory made by homing is named after; None if it has a name of the user's."""
    named = _RUN_DIRECTORY_NAME.fullmatch(os.path.basename(path))
    return None if named is None else int(named[1])


def begin_in(path: str, launcher: str) -> None:
    """Empty an explicit run directory of what an earlier server left, if this worker is the first of a new one.

    It is the first if nobody is in the directory, and what lies there is of another launcher's server. As long as the
    launcher is the same, what its dead workers owned stays *gone*. A supervisor of homing's empties its directory itself.

    Args:
        launcher: Names the process that began this worker's server.

    Raises:
        RunDirectoryError: as `check_may_be_emptied`.
    """
    try:
        fd = os.open(path, DIRECTORY_FLAGS)
    except OSError:
        return  # whoever opens it next says why
    emptied = f"{_EMPTIED}{secrets.token_hex(8)}"
    try:
        # Whoever is in the directory holds it with a shared lock (`RunDirectory`).
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_supervised(fd) and _begun_by(fd) != launcher:
            check_may_be_emptied(path)
            # Records may be a million: out of the way at once, and removed when nobody waits for the lock.
            with contextlib.suppress(FileNotFoundError):
                os.rename(SESSION_OWNERS_DIR, emptied, src_dir_fd=fd, dst_dir_fd=fd)
            empty(fd, spare=emptied)
            os.symlink(launcher, BEGUN_BY, dir_fd=fd)
    except BlockingIOError:
        return
    except OSError as error:
        logger.warning("the run directory %s keeps what an earlier server left: %s", path, error.strerror)
    finally:
        os.close(fd)
    shutil.rmtree(os.path.join(path, emptied), ignore_errors=True)


def _is_supervised(fd: int) -> bool | None:
    """Whether a supervisor of homing's has the directory; None if none has ever had it."""
    try:
        lock = os.open(SERVER_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def note_begun_by(path: str, launcher: str) -> None:
    """Say whose server a new run directory belongs to, so that it goes when that process has ended, whoever has its number."""
    # A sibling has said so, or there is no room: then the number in the name decides.
    with contextlib.suppress(OSError):
        os.symlink(launcher, os.path.join(path, BEGUN_BY))


def _begun_by(fd: int) -> str | None:
    try:
        return os.readlink(BEGUN_BY, dir_fd=fd)
    except OSError:
        return None


def check_may_be_emptied(path: str) -> None:
    """See that no file of the user's has a name of homing's here: what a server left is removed by its name.

    Some of the names are everyone's (`sites`, `page`). Whatever has one is a server's only where a server that was killed
    has left its owner records or its workers' lives too; one that has stopped leaves nothing but its lock.

    Raises:
        RunDirectoryError: it may be the user's.
    """
    names = os.listdir(path)
    everyday = sorted(name for name in names if name in _EVERYDAY or name.partition("-")[0] == PERMITS_NAME)
    of_a_server = any(name == SESSION_OWNERS_DIR or name.endswith(".life") for name in names if _is_ours(name))
    if everyday and not of_a_server:
        raise RunDirectoryError(
            f"the run directory {path} has {everyday[0]!r} in it, which may be yours and would be removed; name an empty "
            f"directory, with --run-dir or {SESSION_SOCKET_DIR_ENV}, or leave it out"
        )


def empty(fd: int, *, spare: str = SERVER_LOCK) -> None:
    """Remove what a server left in a run directory, the supervisor's lock excepted; what is not ours stays."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(fd):
            if name not in (spare, SERVER_LOCK) and _is_ours(name):
                remove_entry(fd, name)


def remove_entry(fd: int, name: str) -> None:
    """Remove a file, a link or a whole directory of a directory that is held. Nothing happens if it is gone already."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=fd)
        else:
            os.unlink(name, dir_fd=fd)


_EVERYDAY: Final = frozenset({SITES_DIR, EPISODES_DIR, PAGE_NAME, BOARD_NAME})

_OURS: Final = frozenset(
    {
        SESSION_OWNERS_DIR,
        SITES_DIR,
        EPISODES_DIR,
        CONTROL_SOCKET,
        "owners.lock",
        BEGUN_BY,
        FIRST_APP,
        PAGE_NAME,
        BOARD_NAME,
        SERVER_DESCRIPTION,
        NEW_DESCRIPTION,
    }
)


def _is_ours(name: str) -> bool:
    if name in _OURS or name.startswith(_EMPTIED) or name.partition("-")[0] == PERMITS_NAME:
        return True
    return is_worker_id(name.removeprefix(".").partition(".")[0])


def remove_stale(base: str) -> None:
    """Remove the run directories of dead servers here, and the links to those elsewhere."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            with contextlib.suppress(OSError, RunDirectoryError):
                if entry.name.startswith(LINK_PREFIX):
                    _remove_stale_link(entry)
                elif run_directory_pid(entry.name) is not None:
                    _remove_stale_directory(entry.path)


def _remove_stale_link(entry: os.DirEntry[str]) -> None:
    if not entry.is_symlink() or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    try:
        fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        os.unlink(entry.path)
        return
    try:
        # A server has its lock before it has its link.
        if not _is_supervised(fd):
            os.unlink(entry.path)
    finally:
        os.close(fd)


def _remove_stale_directory(path: str) -> None:
    check_run_directory(path)
    fd = os.open(path, DIRECTORY_FLAGS)
    try:
        # Whoever is in it holds it, a server in another PID namespace too.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_dead(fd, path) and not _any_socket_accepts(path):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


def _is_dead(fd: int, path: str) -> bool:
    """Whether the server that a directory belongs to, which nobody is in, has ended."""
    supervised = _is_supervised(fd)
    if supervised is not None:
        return not supervised
    # The workers' lives prove nothing here: a launcher whose workers have all died may start others.
    begun_by = _begun_by(fd)
    ended = None if begun_by is None else has_ended(begun_by)
    if ended is not None:
        return ended
    pid = run_directory_pid(path)
    return pid is not None and not exists(pid) and not _is_just_made(fd)


def _is_just_made(fd: int) -> bool:
    """Whether a server, perhaps of another PID namespace, may be about to hold the directory that it has made."""
    return not os.listdir(fd) and time.time() - os.fstat(fd).st_mtime < _JUST_MADE_SECONDS


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
