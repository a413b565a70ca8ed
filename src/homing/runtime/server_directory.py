"""The run directory of one server, from before its workers start until after they have gone.

The invariant: one server, one directory. Two servers in one would hand each other their sessions, so a directory that
another server uses, or whose workers still live, is refused. And a directory that has taken this one's place at its path
is another server's: what is removed is what is held.

Not here: what is in it (`homing.rundir`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from homing.errors import RunDirectoryError
from homing.rundir import (
    SERVER_LOCK,
    SESSION_SOCKET_DIR_ENV,
    RunDirectory,
    cannot_be_made,
    check_may_be_emptied,
    create_session_socket_dir,
    empty,
)


@contextlib.contextmanager
def open_server_directory(explicit: str | None) -> Iterator[str]:
    """The run directory of a new server: removed on exit, or emptied if the user had made it.

    Args:
        explicit: The directory to use (`--run-dir`), else what `HOMING_SESSION_SOCKET_DIR` names, else a new one.

    Raises:
        RunDirectoryError: it is not ours, too open, too long, in use, full, read-only, or has what may be the user's
            in it; the message says which.
    """
    explicit = explicit or os.environ.get(SESSION_SOCKET_DIR_ENV)
    users_own = explicit is not None and os.path.lexists(explicit)
    path = os.path.abspath(create_session_socket_dir(explicit))
    with RunDirectory.open(path) as directory, contextlib.ExitStack() as stack:
        if users_own:
            check_may_be_emptied(path)  # before anything of this server's is in it
        else:
            stack.callback(_remove_if_empty, path)  # if it cannot be locked
        stack.callback(os.close, _lock(directory))
        # Only what no other server uses is emptied or removed, so not before here.
        if users_own:
            _refuse_live_workers(directory)
            _empty(directory)
            stack.callback(empty, directory.fd)
        else:
            stack.callback(directory.remove)
        yield path


def _lock(directory: RunDirectory) -> int:
    try:
        lock = os.open(SERVER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory.fd)
    except OSError as error:
        raise cannot_be_made(os.path.join(directory.path, SERVER_LOCK), error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RunDirectoryError(
            f"the run directory {directory.path} is in use by another server; name another with --run-dir, or leave it out"
        ) from error
    return lock


def _refuse_live_workers(directory: RunDirectory) -> None:
    alive = len(directory.live_workers())
    if alive:
        raise RunDirectoryError(
            f"the run directory {directory.path} is in use by {alive} running workers; stop them, or name another with "
            "--run-dir"
        )


def _empty(directory: RunDirectory) -> None:
    try:
        empty(directory.fd)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {directory.path} keeps what an earlier server left: {error.strerror}; empty it, or name "
            "another with --run-dir"
        ) from error


def _remove_if_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)
