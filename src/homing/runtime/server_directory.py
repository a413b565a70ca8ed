"""The run directory of one server, from before its workers start until after they have gone.

The invariant: one server, one directory. Two servers in one would hand each other their sessions, so a directory that
another server uses, or whose workers still live, is refused.

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
    check_may_be_emptied,
    create_session_socket_dir,
    empty,
    new_worker_id,
    remove_run_directory,
    worker_socket_path,
)


@contextlib.contextmanager
def open_server_directory(explicit: str | None) -> Iterator[str]:
    """The run directory of a new server: removed on exit, or emptied if the user had made it.

    Args:
        explicit: The directory to use (`--run-dir`), else what `HOMING_SESSION_SOCKET_DIR` names, else a new one.

    Raises:
        RunDirectoryError: it is not ours, too open, too long, in use, or has what may be the user's in it; the message
            says which.
    """
    explicit = explicit or os.environ.get(SESSION_SOCKET_DIR_ENV)
    users_own = explicit is not None and os.path.lexists(explicit)
    path = os.path.abspath(create_session_socket_dir(explicit))
    with contextlib.ExitStack() as stack:
        if not users_own:
            stack.callback(remove_run_directory, path)
        worker_socket_path(path, new_worker_id())
        if users_own:
            check_may_be_emptied(path)  # before anything of this server's is in it
        lock = _lock(path)
        stack.callback(os.close, lock)
        if users_own:
            _refuse_live_workers(path)
            empty(path)
            # Only what no other server uses is emptied, so not before here.
            stack.callback(empty, path)
        yield path


def _lock(path: str) -> int:
    lock = os.open(os.path.join(path, SERVER_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RunDirectoryError(
            f"the run directory {path} is in use by another server; name another with --run-dir, or leave it out"
        ) from error
    return lock


def _refuse_live_workers(path: str) -> None:
    with RunDirectory.open(path) as directory:
        alive = len(directory.live_workers())
    if alive:
        raise RunDirectoryError(
            f"the run directory {path} is in use by {alive} running workers; stop them, or name another with --run-dir"
        )
