"""Who waits for room, and in which order: several workers' queues over one board, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from homing.errors import SessionLimitError
from homing.placement import queue as queue_module
from homing.placement.board import BEAT, TICKET, WAITING, Board
from homing.placement.queue import Queue, Start
from homing.rundir import RunDirectory, new_worker_id


class Room:
    """So many sessions may begin."""

    def __init__(self) -> None:
        self.free = 0
        self.order: list[str] = []

    def has(self) -> bool:
        return self.free > 0

    def attempt(self, name: str, start: Start) -> Callable[[], Awaitable[None]]:
        async def attempt() -> None:
            if not start.allowed or not self.free:
                raise SessionLimitError
            self.free -= 1
            self.order.append(name)

        return attempt


async def stays() -> None:
    await asyncio.Event().wait()


class World:
    def __init__(self, boards: list[Board], seconds: float) -> None:
        self.room = Room()
        self.boards = boards
        self.queues = [Queue(board, seconds, self.room.has) for board in boards]
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(self, name: str, at: int, gone: Callable[[], Awaitable[None]] = stays) -> None:
        """A start that waits once this returns, or is over."""
        queue = self.queues[at]
        start, before = Start(queue), len(queue)
        self.tasks[name] = asyncio.create_task(queue.run(start, self.room.attempt(name, start), gone))
        while len(queue) == before and not self.tasks[name].done():
            await asyncio.sleep(0)

    async def end(self, *names: str) -> list[BaseException | None]:
        found = await asyncio.gather(*(self.tasks[name] for name in names), return_exceptions=True)
        return [each if isinstance(each, BaseException) else None for each in found]


@asynccontextmanager
async def world(path: Path, workers: int = 3, seconds: float = 60.0) -> AsyncIterator[World]:
    path.chmod(0o700)
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory.open(str(path)))
        boards = []
        for _ in range(workers):
            identifier = new_worker_id()
            stack.callback(directory.hold_life(identifier).close)
            boards.append(Board(directory, identifier, ""))
            stack.callback(boards[-1].close)
        for board in boards:
            board.refresh()
        made = World(boards, seconds)
        beat = asyncio.create_task(_beat(boards))
        try:
            yield made
        finally:
            for task in [*made.tasks.values(), beat]:
                task.cancel()
            await asyncio.gather(*made.tasks.values(), beat, return_exceptions=True)


async def _beat(boards: list[Board]) -> None:
    while True:
        for board in boards:
            if board[BEAT]:
                board.beat(0.0)
        await asyncio.sleep(0.05)


def test_first_come_first_served_over_all_workers(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as found:
            names = [f"{number}" for number in range(9)]
            for number, name in enumerate(names):
                await found.arrive(name, (number * 2) % 3)
            for _ in names:
                found.room.free += 1
                while found.room.free:
                    await asyncio.sleep(0)
            assert await found.end(*names) == [None] * 9
            assert found.room.order == names
            assert [board[TICKET] for board in found.boards] == [board[WAITING] for board in found.boards] == [0, 0, 0]

    asyncio.run(test())


def test_a_newcomer_does_not_overtake_who_waits_at_another_worker(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, workers=2) as found:
            await found.arrive("first", 0)
            found.room.free = 2
            # In the same turn of the loop, before the one that waits has looked.
            await found.arrive("late", 1)
            assert await found.end("first", "late") == [None, None]
            assert found.room.order == ["first", "late"]

    asyncio.run(test())


def test_who_waits_too_long_is_refused_and_the_next_one_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, workers=2, seconds=0.05) as found:
            await found.arrive("first", 0)
            (error,) = await found.end("first")
            assert isinstance(error, SessionLimitError)
            assert found.boards[0][TICKET] == 0
            found.room.free = 1
            await found.arrive("second", 1)
            assert await found.end("second") == [None]

    asyncio.run(test())


def test_a_client_that_leaves_gives_up_its_place(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, workers=2) as found:
            left = asyncio.Event()

            async def gone() -> None:
                await left.wait()

            await found.arrive("leaves", 0, gone)
            await found.arrive("stays", 1)
            left.set()
            (error,) = await found.end("leaves")
            assert isinstance(error, SessionLimitError)
            found.room.free = 1
            assert await found.end("stays") == [None]
            assert (found.room.order, found.room.free) == (["stays"], 0)

    asyncio.run(test())


def test_a_start_that_is_cancelled_leaves_no_ticket(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, workers=1) as found:
            await found.arrive("first", 0)
            found.tasks["first"].cancel()
            await found.end("first")
            assert (len(found.queues[0]), found.boards[0][TICKET]) == (0, 0)

    asyncio.run(test())


def test_a_worker_without_a_beat_holds_up_nobody_and_counts_again_when_it_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, workers=2) as found:
            # A process that was stopped long ago, with the oldest of all tickets; the test's beat leaves it alone.
            stopped = found.boards[0]
            stopped[TICKET], stopped[BEAT] = 1, 0
            found.room.free = 2
            await found.arrive("first", 1)
            assert await found.end("first") == [None]
            # It goes on.
            stopped.beat(0.0)
            await found.arrive("second", 1)
            assert not found.tasks["second"].done()
            assert found.room.order == ["first"]
            stopped[TICKET] = 0
            assert await found.end("second") == [None]

    asyncio.run(test())


def test_a_stopping_worker_refuses_who_waits_and_who_comes(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, workers=1) as found:
            await found.arrive("first", 0)
            await found.arrive("second", 0)
            found.queues[0].close()
            await found.arrive("third", 0)
            assert all(isinstance(each, SessionLimitError) for each in await found.end("first", "second", "third"))

    asyncio.run(test())


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_WAITING", 2)

    async def test() -> None:
        async with world(tmp_path, workers=2) as found:
            await found.arrive("first", 0)
            await found.arrive("second", 1)
            await found.arrive("third", 0)
            (error,) = await found.end("third")
            assert isinstance(error, SessionLimitError)
            found.room.free = 2
            assert await found.end("first", "second") == [None, None]

    asyncio.run(test())
