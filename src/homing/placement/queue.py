"""Starts that wait until there is room for another session: first come, first served, over all workers of a server.

A start that has to wait takes a ticket: the time on the clock that all processes share. Each worker shows the oldest of its
tickets on the board, and a worker lets its oldest one try only while no other worker shows an older one. So there is no lock
that somebody could hold, and no list that somebody could damage: a dead worker's ticket is passed over once its life lock is
free, a stopped one's once its row has had no beat for a while, and counts again when it goes on.

The order is all that rests on the tickets. That there is room is for the permits to say (`permits.py`), and for whoever tries.

Not here: what a start does when it is its turn (`homing.routing`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from homing.errors import SessionLimitError, StartAbandonedError, WorkerFullError
from homing.histogram import Histogram
from homing.placement.board import STUCK_SECONDS, TICKET, WAITING, Board, Other

POLL_SECONDS: Final = 0.005
"""How often a worker looks whether its oldest waiting start may go: rows are memory, of which no event tells."""

MAX_WAITING: Final = 1000
"""Starts that wait at once, over all workers; more are refused at once."""

_T = TypeVar("_T")


class Start:
    """A declared start of a client's own on its way to where it runs.

    Attributes:
        allowed: It may begin a session now, if there is room.
        placed: It was sent to a worker already, which did not take it: it runs where it arrived.
    """

    __slots__ = ("_came", "_first", "_queue", "allowed", "placed")

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._came = 0
        self._first: asyncio.Event | None = None
        self.allowed = True
        self.placed = False

    def __repr__(self) -> str:
        return f"<Start{' waiting' if self._came else ''}>"

    def settled(self) -> None:
        """A worker has taken it: it waits no longer, and others may go on. Safe to call twice."""
        if self._came:
            self._queue.leave(self)

    @property
    def came(self) -> int:
        """Its ticket; 0 unless it waits."""
        return self._came

    def wait_since(self, came: int) -> None:
        self._came = came
        self._first = asyncio.Event() if came else None

    @property
    def first(self) -> asyncio.Event:
        """Set once it is the oldest of those that wait at this worker."""
        assert self._first is not None
        return self._first


class Queue:
    """The starts that wait at one worker.

    Args:
        board: Where its oldest ticket is shown. Borrowed.
        wait_seconds: How long a start waits at most; 0: none waits.
        has_room: Whether there is room for one more session at the moment, as far as can be told without trying.

    Attributes:
        waits: How long starts waited here, with or without success.
    """

    def __init__(self, board: Board, wait_seconds: float, has_room: Callable[[], bool]) -> None:
        self._board = board
        self._wait_seconds = wait_seconds
        self._has_room = has_room
        self._waiting: deque[Start] = deque()
        self.waits = Histogram()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Queue: {len(self._waiting)} wait>"

    def __len__(self) -> int:
        return len(self._waiting)

    async def run(self, start: Start, attempt: Callable[[], Awaitable[_T]], gone: Callable[[], Awaitable[None]]) -> _T:
        """Have `attempt` done, in turn; it is called again, later, for as long as it raises SessionLimitError.

        Args:
            attempt: Begins the session if `start.allowed`, else raises SessionLimitError where it would have to; what
                needs no new session it does at once. Not cancelled when the time is over.
            gone: Returns once the client has left; cancelled before each attempt.

        Raises:
            SessionLimitError: there was no room in time; or the queue is full, or this worker stops.
            StartAbandonedError: the client has left.
            WorkerFullError: as `attempt` raises it, at once: who waits for one worker would hold up those behind it.
        """
        start.allowed = not self._somebody_waits()
        try:
            return await attempt()
        except WorkerFullError:
            raise
        except SessionLimitError:
            if not self._wait_seconds or self._closed:
                raise
            if self._count_waiting() >= MAX_WAITING:
                raise SessionLimitError(f"{MAX_WAITING} starts wait already, the most that may") from None
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_seconds
        self._join(start)
        try:
            while True:
                await self._turn(start, until, gone)
                start.allowed, start.placed = True, False
                try:
                    return await attempt()
                except WorkerFullError:
                    raise
                except SessionLimitError:
                    if not start.came:
                        raise
                # Another was quicker, by a start that found nobody waiting: this one keeps its turn.
                await asyncio.sleep(POLL_SECONDS)
        finally:
            start.settled()

    async def _turn(self, start: Start, until: float, gone: Callable[[], Awaitable[None]]) -> None:
        """Wait until it is the start's turn and there is room."""
        loop = asyncio.get_running_loop()
        watcher = asyncio.ensure_future(gone())
        first = loop.create_task(start.first.wait())
        try:
            while True:
                left = until - loop.time()
                if left <= 0:
                    raise SessionLimitError(f"no room for another session within {self._wait_seconds:g} s")
                if self._closed:
                    raise SessionLimitError("this worker stops, and its queue with it")
                if watcher.done():
                    raise StartAbandonedError("the client has left the queue")
                if not start.first.is_set():
                    await asyncio.wait({watcher, first}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                elif self._is_oldest(start) and self._has_room():
                    return
                else:
                    await asyncio.wait({watcher}, timeout=min(left, POLL_SECONDS))
        finally:
            for task in (watcher, first):
                task.cancel()
            await asyncio.wait({watcher, first})
            if not watcher.cancelled():
                watcher.exception()  # whatever it was, the client is not there

    # --- tickets ---

    def _join(self, start: Start) -> None:
        start.wait_since(time.monotonic_ns())
        self._waiting.append(start)
        self._show()

    def leave(self, start: Start) -> None:
        """It waits no longer."""
        self.waits.observe((time.monotonic_ns() - start.came) / 1e9)
        start.wait_since(0)
        self._waiting.remove(start)
        self._show()

    def close(self) -> None:
        """This worker stops: who waits here is refused, and tries again elsewhere."""
        self._closed = True
        for each in self._waiting:
            each.first.set()

    def _show(self) -> None:
        oldest = self._waiting[0] if self._waiting else None
        self._board[TICKET] = 0 if oldest is None else oldest.came
        self._board[WAITING] = len(self._waiting)
        if oldest is not None:
            oldest.first.set()

    def _is_oldest(self, start: Start) -> bool:
        own = (start.came, self._board.slot)
        return all((ticket, each.slot) > own for each, ticket in self._tickets())

    def _somebody_waits(self) -> bool:
        return bool(self._waiting) or any(True for _ in self._tickets())

    def _count_waiting(self) -> int:
        return len(self._waiting) + sum(each[WAITING] for each, _ in self._tickets())

    def _tickets(self) -> list[tuple[Other, int]]:
        """The other workers' oldest tickets, of those that are alive and move."""
        shown = ((each, each[TICKET]) for each in self._board.others())
        return [(each, ticket) for each, ticket in shown if ticket and each.silent_seconds() <= STUCK_SECONDS]
