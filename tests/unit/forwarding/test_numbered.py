"""What one end of a shared connection writes, the other reads: whole batches, however their bytes arrive."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.forwarding.numbered import MAX_BATCH_BYTES, NumberedStream

Frame = tuple[int, int, bytes, bytes]

frames = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=30), st.binary(max_size=30)),
    min_size=1,
    max_size=5,
)


class End(NumberedStream):
    """Keeps what it reads."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.read: list[Frame] = []
        self.batches = 0
        self.refused = 0
        self.over = asyncio.Event()

    def frame_received(self, kind: int, number: int, head: bytes, payload: bytes) -> None:
        self.read.append((kind, number, head, payload))

    def flushed(self) -> None:
        self.batches += 1

    def malformed(self) -> None:
        self.refused += 1

    def ended(self) -> None:
        self.over.set()


@contextlib.asynccontextmanager
async def end() -> AsyncIterator[tuple[End, socket.socket]]:
    """One end, and the raw socket at the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.setblocking(False)
    with theirs:
        _, stream = await asyncio.get_running_loop().create_unix_connection(End, sock=ours)
        try:
            yield stream, theirs
        finally:
            stream.abort()
            await stream.over.wait()
            await asyncio.sleep(0)  # the transport closes the socket in its own turn


async def written(batches: list[list[Frame]]) -> bytes:
    """The bytes of these batches, as an end writes them: each of one turn of the event loop."""
    data = b""
    async with end() as (stream, theirs):
        for number, batch in enumerate(batches, 1):
            for frame in batch:
                stream.put(*frame)
            assert stream.unsent
            await asyncio.sleep(0)
            assert not stream.unsent
            assert stream.batches == number
            data += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
    return data


@settings(deadline=None, max_examples=50)
@given(st.lists(frames, min_size=1, max_size=3), st.lists(st.integers(1, 40), min_size=1))
def test_batches_are_read_as_they_were_put_however_their_bytes_arrive(
    batches: list[list[Frame]], sizes: list[int]
) -> None:
    async def test() -> None:
        data = await written(batches)
        ends = [0]
        for batch in batches:
            ends.append(ends[-1] + 4 + sum(12 + len(head) + len(payload) for _, _, head, payload in batch))
        assert len(data) == ends[-1]
        async with end() as (stream, _):
            position, turn = 0, 0
            while position < len(data):
                size = sizes[turn % len(sizes)]
                stream.data_received(data[position : position + size])
                position = min(position + size, len(data))
                turn += 1
                whole = sum(1 for each in ends[1:] if each <= position)
                # All of what was read whole, and nothing of a batch whose end is to come.
                assert stream.read == [frame for batch in batches[:whole] for frame in batch]
            assert not stream.lost

    asyncio.run(test())


@settings(deadline=None, max_examples=50)
@given(frames, st.data())
def test_a_frame_that_goes_over_the_end_of_its_batch_is_refused(batch: list[Frame], data: st.DataObject) -> None:
    async def test() -> None:
        whole = await written([batch])
        cut = data.draw(st.integers(1, len(whole) - 5), "cut")
        ends = {0}
        position = 0
        for _, _, head, payload in batch:
            position += 12 + len(head) + len(payload)
            ends.add(position)
        size = len(whole) - 4 - cut
        async with end() as (stream, _):
            stream.data_received(size.to_bytes(4, "little") + whole[4 : 4 + size])
            assert stream.lost == (size not in ends)
            assert stream.refused == int(stream.lost)
            assert stream.read == batch[: len(stream.read)]

    asyncio.run(test())


def test_what_is_put_in_one_turn_is_one_batch() -> None:
    async def test() -> None:
        async with end() as (stream, theirs):
            stream.put(1, 1, b"head")
            stream.put(2, 2, b"", b"payload")
            stream.flush()
            stream.flush()
            stream.put(3, 3)
            await asyncio.sleep(0)
            assert stream.batches == 2
            async with end() as (other, _):
                other.data_received(theirs.recv(1000))
                assert other.read == [(1, 1, b"head", b""), (2, 2, b"", b"payload"), (3, 3, b"", b"")]

    asyncio.run(test())


def test_a_batch_is_written_once_it_is_large_and_no_later() -> None:
    async def test() -> None:
        async with end() as (stream, theirs), end() as (other, _):
            sent: list[Frame] = [(1, number, b"", b"x" * 60_000) for number in range(1, 31)]
            for frame in sent:
                stream.put(*frame)
            while stream.unsent or len(other.read) < len(sent):
                other.data_received(await asyncio.get_running_loop().sock_recv(theirs, 1 << 18))
            assert other.read == sent
            assert stream.batches == 15, "of two each"

    asyncio.run(test())


@pytest.mark.parametrize("size", [MAX_BATCH_BYTES + 1, 2**32 - 1])
def test_a_batch_over_the_limit_is_refused_before_it_has_arrived(size: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with end() as (stream, _):
            stream.data_received(size.to_bytes(4, "little"))
            assert stream.lost
            assert stream.refused == 1
            stream.put(1, 1)
            stream.flush()
            assert stream.batches == 0
            assert not stream.unsent

    asyncio.run(test())
    assert "over the limit" in caplog.text


def test_nothing_is_read_past_a_frame_that_ended_the_connection() -> None:
    class Refuses(End):
        def frame_received(self, kind: int, number: int, head: bytes, payload: bytes) -> None:
            super().frame_received(kind, number, head, payload)
            self.abort()

    async def test() -> None:
        data = await written([[(1, 1, b"", b""), (2, 2, b"", b"")], [(3, 3, b"", b"")]])
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with theirs:
            _, stream = await asyncio.get_running_loop().create_unix_connection(Refuses, sock=ours)
            stream.data_received(data)
            assert stream.read == [(1, 1, b"", b"")]
            await asyncio.sleep(0)

    asyncio.run(test())
