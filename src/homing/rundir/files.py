"""Room for what is mapped into memory."""

from __future__ import annotations

import os


def allocate(fd: int, size: int) -> None:
    """Make a file at least so long, with room for all of it.

    To write to a mapped page for which a full file system has no room is SIGBUS, which ends the process; so the room is
    taken now, where that is an error.

    Raises:
        OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    # macOS: there are no holes in what is written.
    have = os.fstat(fd).st_size
    if have < size:
        os.pwrite(fd, bytes(size - have), have)
