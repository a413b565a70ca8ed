from __future__ import annotations

import asyncio
from typing import cast

import pytest

from homing.runtime.replies import ReplyWriter, turn_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Transport:
    """What reaches the socket, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def writer() -> tuple[ReplyWriter, Transport]:
    transport = Transport()
    return ReplyWriter(cast("asyncio.Transport", transport), turn_of(asyncio.get_running_loop())), transport


async def turns() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_head_and_the_body_that_follows_it_at_once_are_one_write() -> None:
    replies, transport = writer()
    for _ in range(2):
        replies.begins = True
        replies.write(b"head ")
        replies.write(b"body")
        replies.write(b" more")
        await turns()
    assert transport.writes == [b"head body", b" more"] * 2


async def test_a_head_whose_body_is_still_to_come_leaves_in_the_next_turn_of_the_loop() -> None:
    replies, transport = writer()
    replies.begins = True
    replies.write(b"head")
    assert transport.writes == []
    await turns()
    assert transport.writes == [b"head"]
    replies.write(b"body")
    assert transport.writes == [b"head", b"body"]


async def test_what_several_connections_hold_back_in_one_turn_all_leaves() -> None:
    connections = [writer() for _ in range(3)]
    for replies, _ in connections:
        replies.begins = True
        replies.write(b"head")
    await turns()
    assert [transport.writes for _, transport in connections] == [[b"head"]] * 3


@pytest.mark.parametrize("body", [b"", b"x" * 64 * 1024, b"x" * 300_000])
async def test_whatever_the_body_s_size_the_bytes_and_their_order_stay(body: bytes) -> None:
    replies, transport = writer()
    replies.begins = True
    replies.write(b"head")
    replies.write(body)
    await turns()
    assert b"".join(transport.writes) == b"head" + body


async def test_closing_writes_what_was_held_back() -> None:
    replies, transport = writer()
    replies.begins = True
    replies.write(b"head")
    replies.close()
    await turns()
    assert (transport.writes, replies.is_closing()) == ([b"head"], True)


async def test_nothing_is_written_to_a_connection_that_was_lost_meanwhile() -> None:
    replies, transport = writer()
    replies.begins = True
    replies.write(b"head")
    transport.closed = True
    await turns()
    assert transport.writes == []


async def test_a_head_leaves_although_its_body_is_no_bytes() -> None:
    replies, transport = writer()
    replies.begins = True
    replies.write(b"head")
    with pytest.raises(TypeError):
        replies.write(cast("bytes", "text"))
    replies.close()
    assert transport.writes == [b"head"]
