"""A server's limit of sessions: so many permits, of which each worker holds one for every live session it has.

A permit is a locked byte of a file, so the kernel sees to it that no two workers hold the same one, and takes back what a dead
worker held, at once. No worker ever waits for another one here, running, stopped or dead, and nothing is listed.

Permits are alike: a worker gives back any of its own. Each worker begins at a place of its own and goes on from what it took
last, so that what it holds is one run of bytes, or a few, whatever the number.
"""

from __future__ import annotations

import os

from homing.errors import RunDirectoryError
from homing.placement.locks import held_by_another, try_lock, unlock
from homing.rundir import close_after_fork


class Permits:
    """This worker's permits, of `count` that the server has. `close` gives all of them back, and is safe to call twice.

    Args:
        path: The file, made if it is missing.
        begin: Where this worker begins to look for free ones.

    Raises:
        RunDirectoryError: the file cannot be opened.
    """

    def __init__(self, path: str, count: int, *, begin: int = 0) -> None:
        self.count = count
        self._begin = begin % count
        self._order: list[int] = []
        self._held: set[int] = set()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RunDirectoryError(
                f"the limit of sessions cannot be kept: {path} cannot be opened: {error.strerror}"
            ) from error
        self._undo = close_after_fork(self._fd)

    def __repr__(self) -> str:
        return f"<Permits: {len(self)} of {self.count} held here>"

    def __len__(self) -> int:
        return len(self._held)

    def __bool__(self) -> bool:
        return True  # a worker that holds none has a limit all the same

    def take(self) -> bool:
        """Hold one more; False if others hold all the rest. A few µs.

        Raises:
            DirectoryError: the kernel has no more locks to give.
        """
        found = self._find(take=True)
        if found is None:
            return False
        self._order.append(found)
        self._held.add(found)
        return True

    def any_free(self) -> bool:
        """Whether one could be taken at this moment."""
        return self._find(take=False) is not None

    def keep(self, count: int) -> None:
        """Give back all but `count` of those held."""
        while len(self._order) > max(count, 0):
            number = self._order.pop()
            self._held.discard(number)
            unlock(self._fd, number)

    def close(self) -> None:
        if self._fd < 0:
            return
        self._undo()
        fd, self._fd = self._fd, -1
        self._order.clear()
        self._held.clear()
        os.close(fd)

    def _find(self, *, take: bool) -> int | None:
        if self._fd < 0 or len(self._held) >= self.count:
            return None
        begin = (self._order[-1] + 1) % self.count if self._order else self._begin
        for start, end in ((begin, self.count), (0, begin)):
            at = start
            while at < end:
                if at in self._held:
                    at += 1
                    continue
                if take and try_lock(self._fd, at):
                    return at
                after = held_by_another(self._fd, at)
                # Given back between the two: tried once more, and then it is someone else's to have.
                if after is None and (not take or try_lock(self._fd, at)):
                    return at
                at = at + 1 if after is None else after
        return None
