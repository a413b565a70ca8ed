"""What the episodes of each worker have open at other servers, written down, so that another worker closes it if theirs dies.

A lease is a file in a directory that the workers share, there before the episode's first seed and locked by the worker that runs it:
the kernel releases the lock of a worker that dies. The invariants: a lease is only ever closed by one worker, and never while its
episode runs; it is removed once everything in it is closed, or is beyond closing.

A close needs no cookie: the session IDs, which are secrets, are enough. So the files are in a directory that only their user can
read, and in memory where there is a file system for that.

Not here: what an episode opens and closes itself (`episode.py`). Of the death of a whole server nothing survives.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

import msgspec

from homing.rundir import close_after_fork

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 5.0
MAX_TRIES: Final = 60
"""How often a lease is tried that cannot be closed now, five minutes in all: as long as servers remember a close."""

_SUFFIX: Final = ".lease"
_MAX_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Close:
    """One thing to close: a POST."""

    what: str
    url: str
    body: dict[str, object]


class Leases:
    """One worker's part in them.

    Args:
        directory: Shared by the workers of the server; made if it is missing.
        close: Closes one thing, and says whether that is done with, for better or worse; False: it may work later.
    """

    def __init__(self, directory: str, close: Callable[[Close], Awaitable[bool]]) -> None:
        self._directory = directory
        self._close = close
        self._held: set[str] = set()
        self._tries: dict[str, int] = {}
        os.makedirs(directory, mode=0o700, exist_ok=True)

    def __repr__(self) -> str:
        return f"<Leases: {len(self._held)} held>"

    @contextmanager
    def held(self, closes: list[Close]) -> Iterator[None]:
        """Hold a lease for what an episode may open; the last to be opened comes first. Gone at the end of the block."""
        name = f"{secrets.token_hex(16)}{_SUFFIX}"
        # Locked under a name that nobody looks for: a lease of a live worker is never seen unlocked.
        prepared, final = self._path(f".{name}"), self._path(name)
        self._held.add(name)
        with contextlib.ExitStack() as stack:
            stack.callback(self._held.discard, name)
            fd = os.open(prepared, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, fd)
            stack.callback(close_after_fork(fd))  # else a child that the app forks would keep the lock
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(fd, msgspec.json.encode([asdict(each) for each in closes]))
                os.rename(prepared, final)
            except BaseException:
                os.unlink(prepared)
                raise
            stack.callback(_unlink, final)
            yield

    async def sweep_forever(self) -> None:
        """Close what dead workers have left, until this is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except OSError as error:
                logger.warning("the leases of episodes cannot be looked at: %s", error.strerror)

    async def sweep(self) -> None:
        """Close what dead workers have left, once."""
        for name in os.listdir(self._directory):
            if name.endswith(_SUFFIX) and not name.startswith(".") and name not in self._held:
                await self._close_left(name)

    async def _close_left(self, name: str) -> None:
        try:
            fd = os.open(self._path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd)
            stack.callback(close_after_fork(fd))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # its worker lives, or another one is closing it
            closes = msgspec.json.decode(os.read(fd, _MAX_BYTES), type=list[Close])
            done = [await self._close(each) for each in closes]
            tries = self._tries[name] = self._tries.pop(name, 0) + 1
            if all(done) or tries >= MAX_TRIES:
                left = [each.what for each, closed in zip(closes, done, strict=True) if not closed]
                logger.warning(
                    "a worker died in an episode: what it had open is closed now%s",
                    f", except {', '.join(left)}, which cannot be" if left else "",
                )
                del self._tries[name]
                _unlink(self._path(name))

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
