"""How a shared connection ends, and that it ends: what one turn of the event loop holds is in the test's hands."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.integration.forwarding.hop import OWNER, Run, connect, hop, raw_owner
from tests.integration.forwarding.sharing import HEAD, REQUEST_HEAD, batch, echo, numbered, sharing_owner

from homing.errors import OwnerUnreachableError
from homing.forwarding.frames import MINE, REQUEST, SHARE, WHOLE, frame
from homing.forwarding.shared import SharedConnection, SmallExchange
from homing.forwarding.stream import UndeliveredError

pytestmark = pytest.mark.usefixtures("patient")


def sent(shared: SharedConnection, on_mine: Any = lambda: None) -> SmallExchange:
    now = shared.loop.time()
    return shared.request(REQUEST_HEAD, b"", now, now + 60, on_mine)


def test_a_reply_that_has_arrived_is_read_though_the_next_write_fails(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (_, shared, _, peer):
            answered, unanswered = sent(shared), sent(shared)
            await peer.read_numbered(2)
            # From here to the flush the loop does not look whether something has arrived.
            peer.socket.send(batch(numbered(WHOLE, answered.number, HEAD, b"reply")))
            peer.close()
            unread = sent(shared)
            shared.flush()
            assert (await answered.answer)[2] == b"reply"
            with pytest.raises(OwnerUnreachableError):
                await unanswered.answer
            with pytest.raises(UndeliveredError):
                await unread.answer

    run(test())


def test_one_of_two_that_were_opened_at_once_is_closed(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner):
            pool = forwarder._pool(OWNER)
            await asyncio.gather(pool.open_shared(), pool.open_shared())
            peers = [await owner.accept() for _ in range(2)]
            assert sorted([await peer.read_frame() or () for peer in peers]) == [(), (SHARE, b"", b"")]

    run(test())


def test_mine_is_told_before_the_reply(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (_, shared, _, peer):
            told = asyncio.Event()
            exchange = sent(shared, told.set)
            await peer.write(batch(numbered(MINE, exchange.number)))
            await told.wait()
            assert not exchange.answer.done()
            assert not exchange.answer_by
            peer.close()
            with pytest.raises(OwnerUnreachableError):
                await exchange.answer

    run(test())


def test_a_receiver_that_closes_shares_nothing_any_more(run: Run) -> None:
    """It has said on each shared connection which request it takes last, and would say so on no other."""

    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await echo(scope, receive, send)

        async with hop(app) as (_, receiver):
            peer, busy = [await connect(receiver.listener.getsockname()) for _ in range(2)]
            await peer.write(frame(SHARE)[:3])  # inside a frame, so it is read to its end
            await busy.write_frame(REQUEST, REQUEST_HEAD)
            while not (receiver.in_flight and len(receiver.connections) == 2):
                await asyncio.sleep(0)
            while not all(each.inside_a_frame or each.busy for each in receiver.connections):
                await asyncio.sleep(0)
            closing = asyncio.create_task(receiver.aclose())
            while not receiver.closed:
                await asyncio.sleep(0)
            await peer.write(frame(SHARE)[3:])
            assert await peer.read(1) == b""
            go.set()
            await closing
            peer.close()
            busy.close()

    run(test())
