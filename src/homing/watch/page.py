"""One page of memory that a server's workers share: each writes its own row, anyone reads all of them without a lock.

A file in the run directory, which is on a memory file system, mapped row by row. A row belongs to one start of one worker for
good, so what a dead worker counted stays.

The invariant: a reader never takes a half-written row for a whole one. Each carries the length and a checksum of what it holds,
and one that does not fit is read again, or left out.

Not here: what a row says (`figures.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Final, Self

from homing.errors import RunDirectoryError
from homing.rundir import PAGE_NAME, allocate, close_after_fork

ROW_BYTES: Final = 4096
"""A multiple of the memory page of every system that homing runs on, or mapped from the start of one."""

MAX_ROWS: Final = 10_000
"""Starts of workers in one server's life that get a row."""

_HEAD: Final = struct.Struct("<II")  # how many bytes follow, and their CRC-32
_READS: Final = 5
_LOCK_TRIES: Final = 200


class Row:
    """One worker's row. `write` replaces what it says. Owns its mapping; `close` is safe to call twice."""

    def __init__(self, path: str, number: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        start = number * ROW_BYTES
        whole = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            self._map = mmap.mmap(fd, start - whole + ROW_BYTES, offset=whole)
        finally:
            os.close(fd)
        self._start = start - whole
        self.number = number

    def __repr__(self) -> str:
        return f"<Row {self.number}>"

    def write(self, content: bytes) -> bool:
        """Replace the row; False, and nothing changed, if it is closed or the content is too long for it."""
        size = len(content)
        if self._map.closed or size > ROW_BYTES - _HEAD.size:
            return False
        start = self._start
        # Whoever reads between the two finds a checksum that does not fit.
        self._map[start + _HEAD.size : start + _HEAD.size + size] = content
        self._map[start : start + _HEAD.size] = _HEAD.pack(size, zlib.crc32(content))
        return True

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_row(socket_dir: str) -> Row:
    """A new row, for this start of this worker. Waits for other workers that take theirs, at most 0.2 s.

    Raises:
        RunDirectoryError: the page cannot be used, or is full; the worker serves without.
    """
    path = os.path.join(socket_dir, PAGE_NAME)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with _closed_at_last(fd):
            _lock(fd)
            number = os.fstat(fd).st_size // ROW_BYTES
            if number >= MAX_ROWS:
                raise RunDirectoryError(f"{path} has {number} rows, and no more are added")
            allocate(fd, (number + 1) * ROW_BYTES)
        return Row(path, number)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be used: {error.strerror}") from error


def read_rows(socket_dir: str) -> list[bytes]:
    """What the rows say, in the order their workers started; those that say nothing yet are left out.

    Raises:
        RunDirectoryError: the page cannot be read. No page: no rows.
    """
    path = os.path.join(socket_dir, PAGE_NAME)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    with _closed_at_last(fd):
        count = os.fstat(fd).st_size // ROW_BYTES
        rows = (_read(fd, number) for number in range(count))
        return [row for row in rows if row]


def _read(fd: int, number: int) -> bytes:
    for _ in range(_READS):
        data = os.pread(fd, ROW_BYTES, number * ROW_BYTES)
        if len(data) < _HEAD.size:
            return b""
        size, checksum = _HEAD.unpack_from(data)
        content = data[_HEAD.size : _HEAD.size + size]
        if len(content) == size and zlib.crc32(content) == checksum:
            return content
    return b""


def _lock(fd: int) -> None:
    # Held for two system calls; a worker that was stopped inside them must not hold up the others' start.
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.001)
    raise BlockingIOError(errno.EAGAIN, "another worker holds it")


@contextlib.contextmanager
def _closed_at_last(fd: int) -> Iterator[None]:
    undo = close_after_fork(fd)
    try:
        yield
    finally:
        undo()
        os.close(fd)
