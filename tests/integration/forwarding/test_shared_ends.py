"""A shared connection's ends, against an owner that is a plain socket: what one turn of the loop holds is in the test's hands."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from homing.errors import OwnerUnreachableError
from homing.forwarding.frames import MINE, SHARE, SHARED, WHOLE, frame
from homing.forwarding.pool import OwnerPool
from homing.forwarding.shared import SharedConnection
from homing.forwarding.stream import UndeliveredError
from homing.histogram import Histogram
from homing.types import WorkerId

Run = Callable[[Awaitable[Any]], Any]


def batch(kind: int, number: int, payload: bytes = b"") -> bytes:
    one = struct.pack("<III", kind, len(payload), number) + payload
    return struct.pack("<I", len(one)) + one


class PlainOwner:
    """The other end: a listener, and the one connection that was made to it."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "owner.sock")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.ends: list[socket.socket] = []

    def accept(self) -> socket.socket:
        end, _ = self.listener.accept()
        self.ends.append(end)
        return end

    def close(self) -> None:
        for end in (self.listener, *self.ends):
            end.close()

    def pool(self) -> OwnerPool:
        return OwnerPool(WorkerId("owner"), self.path, asyncio.get_running_loop(), Histogram(), 4)

    async def shares(self, pool: OwnerPool) -> tuple[SharedConnection, socket.socket]:
        await pool.open_shared()
        end = self.accept()
        assert end.recv(100) == frame(SHARE)
        end.sendall(batch(SHARED, 0))
        shared = pool.shared
        assert shared is not None
        while not shared.takes(asyncio.get_running_loop().time()):
            await asyncio.sleep(0.01)
        return shared, end


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[PlainOwner]:
    plain = PlainOwner(tmp_path)
    yield plain
    plain.close()


def test_a_reply_that_has_arrived_is_read_though_the_next_write_fails(run: Run, owner: PlainOwner) -> None:
    async def test() -> None:
        shared, end = await owner.shares(owner.pool())
        answered, unanswered = (shared.request(b"head", b"", 1.0, 1e9, lambda: None) for _ in range(2))
        await asyncio.sleep(0.05)
        end.recv(1000)
        end.sendall(batch(WHOLE, answered.number, b"reply"))
        end.close()
        unread = shared.request(b"head", b"", 1.0, 1e9, lambda: None)
        shared.flush()  # before the loop has looked whether something has arrived
        assert (await answered.answer)[2] == b"reply"
        with pytest.raises(OwnerUnreachableError):
            await unanswered.answer
        with pytest.raises(UndeliveredError):
            await unread.answer

    run(test())


def test_one_of_two_that_were_opened_at_once_is_closed(run: Run, owner: PlainOwner) -> None:
    async def test() -> None:
        pool = owner.pool()
        await asyncio.gather(pool.open_shared(), pool.open_shared())
        ends = [owner.accept() for _ in range(2)]
        await asyncio.sleep(0.05)
        assert sorted(end.recv(100) for end in ends) == [b"", frame(SHARE)]
        pool.drop()
        await asyncio.sleep(0.05)

    run(test())


def test_mine_is_told_before_the_reply(run: Run, owner: PlainOwner) -> None:
    async def test() -> None:
        shared, end = await owner.shares(owner.pool())
        told = asyncio.Event()
        exchange = shared.request(b"head", b"", 1.0, 1e9, told.set)
        await asyncio.sleep(0.05)
        end.sendall(batch(MINE, exchange.number))
        await told.wait()
        assert not exchange.answer.done()
        assert not exchange.answer_by
        shared.abort()
        with pytest.raises(OwnerUnreachableError):
            await exchange.answer

    run(test())
