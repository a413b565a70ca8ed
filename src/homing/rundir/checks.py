"""What a directory has to be before private sockets and owner records may lie in it.

Not here: where one is made (`places.py`).
"""

from __future__ import annotations

import os
import stat
from typing import Final

from homing.errors import RunDirectoryError
from homing.rundir.names import SESSION_SOCKET_DIR_ENV, worker_socket_path

DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

ANOTHER: Final = f"name another directory of yours with --run-dir or {SESSION_SOCKET_DIR_ENV}, or leave it out"


def cannot_be_made(path: str, error: OSError) -> RunDirectoryError:
    """What is said of one of homing's own files, which a run directory cannot hold."""
    return RunDirectoryError(f"{path} cannot be made: {error.strerror}; {ANOTHER}")


def check_run_directory(path: str) -> None:
    """See that `path` can be a run directory: a directory of this user, 0700, no link, and short enough for sockets.

    Raises:
        RunDirectoryError: it is not; the message says which.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise RunDirectoryError(f"the run directory {path} cannot be used: {error.strerror}; {ANOTHER}") from error
    check_status(path, status)
    worker_socket_path(path, "0" * 32)


def check_status(path: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise RunDirectoryError(f"the run directory {path} is a symbolic link; name the directory itself")
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirectoryError(f"the run directory {path} is not a directory; {ANOTHER}")
    if status.st_uid != os.geteuid():
        raise RunDirectoryError(
            f"the run directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}; {ANOTHER}"
        )
    if status.st_mode & 0o777 != 0o700:
        raise RunDirectoryError(
            f"the run directory {path} has mode {status.st_mode & 0o777:04o}; it must be 0700 (chmod 700 {path})"
        )
