"""Locks on single bytes of a file, which the kernel takes back when their holder's process ends, however it ends.

On Linux they belong to the open file (`fcntl(2)`, open file description locks); elsewhere to the process, which must then
open the file once only. Nothing here waits: a byte is locked at once, or is another's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from typing import Final

from homing.errors import DirectoryError

_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)


def try_lock(fd: int, start: int) -> bool:
    """Lock one byte, which may lie beyond the end of the file; False if another has it. One that is held here stays so.

    Raises:
        DirectoryError: the kernel has no more locks to give.
    """
    try:
        if sys.platform == "linux":
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise DirectoryError(f"a place cannot be locked: {error.strerror}") from error
    return True


def unlock(fd: int, start: int) -> None:
    """Let go of one byte; nothing happens if it is not held."""
    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, 1, 0))
    else:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, start)


def held_by_another(fd: int, start: int) -> int | None:
    """Where the run of locked bytes ends that another holds around `start`; None if nobody else holds that byte."""
    if sys.platform != "linux":
        # Nothing tells without taking it; one byte at a time then.
        if try_lock(fd, start):
            unlock(fd, start)
            return None
        return start + 1
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    kind, _, first, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(first + length, start + 1)
