"""When does a file come, or go? The kernel says so (inotify(7)), so a test neither polls nor sleeps."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Final

_IN_CREATE: Final = 0x100
_IN_DELETE: Final = 0x200
_IN_NONBLOCK: Final = 0x800
_IN_CLOEXEC: Final = 0x80000

_libc = ctypes.CDLL(None, use_errno=True)


async def until_gone(path: Path, *, timeout_seconds: float = 10.0) -> None:
    """Wait until there is nothing at this path; a link counts, whatever it leads to."""
    await _until(path, False, timeout_seconds)


async def until_there(path: Path, *, timeout_seconds: float = 10.0) -> None:
    """Wait until there is something at this path; a link counts, whatever it leads to."""
    await _until(path, True, timeout_seconds)


async def _until(path: Path, there: bool, timeout_seconds: float) -> None:
    watch = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
    if watch < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        os.read(watch, 65536)
        changed.set()

    try:
        if _libc.inotify_add_watch(watch, os.fsencode(path.parent), _IN_CREATE | _IN_DELETE) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(path.parent))
        loop.add_reader(watch, read)
        async with asyncio.timeout(timeout_seconds):
            while os.path.lexists(path) != there:
                await changed.wait()
                changed.clear()
    except TimeoutError:
        raise AssertionError(f"{path} is {'not' if there else 'still'} there after {timeout_seconds} s") from None
    finally:
        loop.remove_reader(watch)
        os.close(watch)
