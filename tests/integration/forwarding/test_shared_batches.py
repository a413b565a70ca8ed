"""A batch on a shared connection is used once all of it was read, and none is sent again that may have been."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.integration.forwarding.hop import (
    Run,
    Server,
    forward,
    post_scope,
    raw_forwarder,
)
from tests.integration.forwarding.sharing import (
    HEAD,
    REQUEST_HEAD,
    answer_own,
    batch,
    echo,
    failure,
    numbered,
    reply,
    sharing_forwarder,
    sharing_owner,
    until,
    written,
)

from homing.errors import OwnerUnreachableError
from homing.forwarding.frames import (
    CALL,
    LAST_READ,
    MINE,
    MINE_FIRST,
    REQUEST,
    SHARE,
    SHARED,
    WHOLE,
    frame,
)
from homing.forwarding.heads import BODY_OPEN, request_head

pytestmark = pytest.mark.usefixtures("patient")

# --- batches ---


@pytest.mark.parametrize("cut", [1, 4, 5, 40, -1])
def test_a_batch_whose_end_was_not_read_has_run_nothing(run: Run, cut: int) -> None:
    async def test() -> None:
        ran: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            ran.append(scope["path"])
            await reply(send)

        requests = batch(numbered(REQUEST, 1, REQUEST_HEAD), numbered(REQUEST, 2, REQUEST_HEAD))
        async with sharing_forwarder(app) as (receiver, peer):
            await peer.write(requests[:cut])
            peer.close()
            await until(lambda: not receiver.shared)
            assert not ran
            assert (receiver.counters.received, receiver.counters.malformed) == (0, 0)
        async with sharing_forwarder(app) as (receiver, peer):
            await peer.write(requests[:cut])
            await asyncio.sleep(0)
            await peer.write(requests[cut:])
            answers = await peer.read_numbered(2)
            assert answers == [(WHOLE, 1, HEAD, b"hello"), (WHOLE, 2, HEAD, b"hello")]
            assert ran == ["/step", "/step"]

    run(test())


MALFORMED_BATCHES = [
    batch(numbered(REQUEST, 2, REQUEST_HEAD)[:-1]),
    batch(b"\x10"),
    batch(numbered(99, 1)),
    batch(numbered(WHOLE, 1)),
    batch(numbered(REQUEST, 2, b"nonsense")),
    (2**30 + 1).to_bytes(4, "little"),
]


@pytest.mark.parametrize("malformed", MALFORMED_BATCHES, ids=range(len(MALFORMED_BATCHES)))
def test_a_malformed_batch_ends_the_owners_end_and_its_requests(
    run: Run, malformed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            assert (await receive())["type"] == "http.disconnect"
            left.set()

        async with sharing_forwarder(app) as (receiver, peer):
            await peer.write(batch(numbered(REQUEST, 1, REQUEST_HEAD)))
            assert [kind for kind, *_ in await peer.read_batch()] == [CALL]
            await peer.write(malformed)
            assert await peer.ended()
            await left.wait()
            assert receiver.counters.malformed == 1
            assert not receiver.shared
            assert not receiver.called
            assert await receiver.drain(5)

    run(test())
    assert "closed a connection between workers" in caplog.text


def test_what_comes_in_one_read_with_share_has_no_effect(run: Run) -> None:
    """A forwarder sends nothing more before it has heard that its exchanges are taken."""

    async def test() -> None:
        ran = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            ran.append(scope)
            await receive()

        async with raw_forwarder(app) as (receiver, peer):
            head = request_head(0, (), post_scope(5), BODY_OPEN, ())
            await peer.write(frame(SHARE) + frame(REQUEST, head))
            assert [kind for kind, *_ in await peer.read_batch()] == [SHARED]
            peer.close()
            await until(lambda: not receiver.shared)
            assert await receiver.drain(5)
            assert not ran

    run(test())


def test_numbers_of_requests_rise(run: Run) -> None:
    async def test() -> None:
        for second in (3, 2):
            async with sharing_forwarder(echo) as (receiver, peer):
                await peer.write(batch(numbered(REQUEST, 3, REQUEST_HEAD)))
                assert (await peer.read_batch())[0][:2] == (WHOLE, 3)
                await peer.write(batch(numbered(REQUEST, second, REQUEST_HEAD)))
                assert await peer.ended()
                assert (receiver.counters.malformed, receiver.counters.received) == (1, 1)

    run(test())


@pytest.mark.parametrize(
    "malformed",
    [
        batch(numbered(WHOLE, 1, HEAD, b"hello")[:-1]),
        batch(b"\x10"),
        batch(numbered(99, 1)),
        batch(numbered(REQUEST, 1)),
        batch(numbered(WHOLE, 1, b"\xc1")),
        batch(numbered(CALL, 1, b"\xc1")),
        batch(numbered(CALL, 1, msgspec.msgpack.encode(None))),
        (2**30 + 1).to_bytes(4, "little"),
    ],
    ids=range(8),
)
def test_a_malformed_batch_of_the_owner_fails_what_is_under_way(
    run: Run, malformed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer):
            tasks = [asyncio.create_task(forward(forwarder, Server())) for _ in range(2)]
            assert len(await peer.read_numbered(2)) == 2
            await peer.write(malformed)
            for task in tasks:
                assert type(await failure(task)) is OwnerUnreachableError
            assert await peer.ended()
            assert shared.lost
            assert forwarder.counters.unreachable == 2
            assert len(owner.peers) == 1, "never sent again"

    run(test())
    assert "closed a connection between workers" in caplog.text


# --- what was not read ---


def test_the_last_batch_of_an_owner_that_left_it_unread_is_sent_again_and_no_other(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer), asyncio.TaskGroup() as tasks:
            first = asyncio.create_task(forward(forwarder, Server()))
            assert [number for _, number, _, _ in await peer.read_numbered(1)] == [1]
            servers = [Server(), Server()]
            again = [tasks.create_task(forward(forwarder, server)) for server in servers]
            await written(shared, 3)
            peer.close()
            for _ in servers:
                await answer_own(owner)
            assert all([await each for each in again])
            assert [server.body for server in servers] == [b"hello"] * 2
            assert type(await failure(first)) is OwnerUnreachableError
            assert (forwarder.counters.retried, forwarder.counters.unreachable) == (2, 1)
            assert forwarder.counters.opened == 2, "the first one was never sent again"

    run(test())


def test_a_batch_that_cannot_be_written_is_sent_again(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer), asyncio.TaskGroup() as tasks:
            first = asyncio.create_task(forward(forwarder, Server()))
            await peer.read_numbered(1)
            server = Server()
            again = tasks.create_task(forward(forwarder, server))
            while len(shared.exchanges) < 2:
                await asyncio.sleep(0)
            # It was put, and the loop's next turn writes it.
            peer.close()
            tasks.create_task(answer_own(owner))
            assert await again
            assert server.body == b"hello"
            assert type(await failure(first)) is OwnerUnreachableError

    run(test())


def test_a_batch_that_was_read_is_never_sent_again_when_its_owner_is_lost(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, _, owner, peer):
            tasks = [asyncio.create_task(forward(forwarder, Server())) for _ in range(3)]
            await peer.read_numbered(3)
            peer.close()
            for task in tasks:
                assert type(await failure(task)) is OwnerUnreachableError
            assert (forwarder.counters.retried, len(owner.peers)) == (0, 1)

    run(test())


def test_a_batch_of_nothing_but_farewells_says_nothing_of_the_one_before(run: Run) -> None:
    """The owner has read the request, and closes with the *gone* of another unread."""

    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer):
            first, other = (asyncio.create_task(forward(forwarder, Server())) for _ in range(2))
            await peer.read_numbered(2)
            other.cancel()
            await asyncio.wait({other})
            await written(shared, 1)
            peer.close()
            assert type(await failure(first)) is OwnerUnreachableError
            assert len(owner.peers) == 1

    run(test())


def test_those_past_the_last_one_read_are_sent_again_and_the_others_wait(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer), asyncio.TaskGroup() as tasks:
            servers = [Server() for _ in range(3)]
            three = [tasks.create_task(forward(forwarder, server)) for server in servers]
            await peer.read_numbered(3)
            await peer.write(batch(numbered(LAST_READ, 2)))
            await answer_own(owner, b"again")
            assert await three[2]
            assert servers[2].body == b"again"
            assert sorted(shared.exchanges) == [1, 2]
            # Nothing more is sent on it.
            late = Server()
            later = tasks.create_task(forward(forwarder, late))
            await owner.peers[1].read_request()
            await owner.peers[1].write_frame(WHOLE | MINE_FIRST, HEAD, b"late")
            assert await later
            assert late.body == b"late"
            await peer.write(batch(numbered(WHOLE, 2, HEAD, b"two"), numbered(WHOLE, 1, HEAD, b"one")))
            assert await three[0]
            assert await three[1]
            assert [server.body for server in servers] == [b"one", b"two", b"again"]
            assert forwarder.counters.retried == 1

    run(test())


def test_those_that_were_read_are_unreachable_even_if_the_owner_leaves_bytes_unread(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer), asyncio.TaskGroup() as tasks:
            first = asyncio.create_task(forward(forwarder, Server()))
            await written(shared, 1)
            second = tasks.create_task(forward(forwarder, Server()))
            await peer.read_batch()
            await written(shared, 2)
            await peer.write(batch(numbered(LAST_READ, 1)))
            await answer_own(owner)
            assert await second
            peer.close()
            assert type(await failure(first)) is OwnerUnreachableError
            assert (forwarder.counters.retried, forwarder.counters.opened) == (1, 1)

    run(test())


def test_one_that_is_the_owners_own_is_never_sent_again(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer), asyncio.TaskGroup() as tasks:
            first = asyncio.create_task(forward(forwarder, Server()))
            server = Server()
            second = tasks.create_task(forward(forwarder, server))
            await written(shared, 2)
            await peer.write(batch(numbered(MINE, 1)))
            await until(lambda: not shared.exchanges[1].answer_by)
            peer.close()  # with the only batch unread
            await answer_own(owner)
            assert await second
            assert type(await failure(first)) is OwnerUnreachableError
            assert (forwarder.counters.retried, forwarder.counters.opened) == (1, 1)

    run(test())
