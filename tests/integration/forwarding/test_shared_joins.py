"""What turns out not to be small leaves the shared connection, and holds up nothing there."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from tests.integration.forwarding.hop import (
    Run,
    Server,
    connect,
    forward,
    hop,
    http_scope,
    post_scope,
    request_event,
    shared_with,
)
from tests.integration.forwarding.sharing import (
    HEAD,
    REQUEST_HEAD,
    STARTED,
    answer_own,
    batch,
    echo,
    failure,
    no_descriptors,
    nothing_left,
    numbered,
    reply,
    sharing_forwarder,
    sharing_owner,
    until,
)

from homing.errors import OwnerUnreachableError, RemoteAppError
from homing.forwarding.frames import (
    BUSY,
    CALL,
    GONE,
    JOIN,
    MINE,
    REQUEST,
    WHOLE,
    frame,
)

pytestmark = pytest.mark.usefixtures("patient")

# --- what goes on over a connection of its own ---


@pytest.mark.parametrize("size", [64 * 1024 + 1, 512 * 1024, 512 * 1024 + 1, 2_000_000])
@pytest.mark.parametrize("more", [False, True])
def test_a_large_body_goes_on_over_a_connection_of_its_own(run: Run, size: int, more: bool) -> None:
    async def test() -> None:
        body = random.Random(size).randbytes(size)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STARTED)
            await send({"type": "http.response.body", "body": body, "more_body": more})
            if more:
                await send({"type": "http.response.body", "body": b"end", "more_body": False})

        async with hop(app, shared_from=0) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            for _ in range(2):
                server = Server()
                assert await forward(forwarder, server)
                assert server.sent[0] == STARTED
                assert server.body == body + (b"end" if more else b"")
                assert server.sent[-1]["more_body"] is False
                await until(lambda: nothing_left(receiver, shared))
            assert (forwarder.counters.opened, forwarder.counters.shared) == (1, 2)

    run(test())


def test_a_start_without_a_body_does_not_wait_for_it(run: Run) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STARTED)
            await go.wait()
            await send({"type": "http.response.body", "body": b"at last"})

        async with hop(app, shared_from=0) as (forwarder, _), asyncio.TaskGroup() as tasks:
            await shared_with(forwarder)
            server = Server()
            task = tasks.create_task(forward(forwarder, server))
            await server.until(lambda: server.sent == [STARTED])
            go.set()
            assert await task
            assert server.body == b"at last"

    run(test())


def test_an_app_that_waits_for_its_client_is_told_when_it_leaves(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["type"] == "http.request"
            assert (await receive())["type"] == "http.disconnect"
            left.set()

        async with hop(app, shared_from=0) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            shared = await shared_with(forwarder)
            server = Server(request_event())
            task = tasks.create_task(forward(forwarder, server))
            await server.waits.wait()
            server.put({"type": "http.disconnect"})
            await left.wait()
            assert await task
            assert server.sent == []
            assert nothing_left(receiver, shared)

    run(test())


def test_an_app_that_returns_before_the_join_has_said_all(run: Run) -> None:
    async def test() -> None:
        returned = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await reply(send, b"x" * 100_000)
            returned.set()

        async with hop(app, shared_from=0) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            shared = await shared_with(forwarder)
            server = Server()
            with no_descriptors():
                task = tasks.create_task(forward(forwarder, server))
                await returned.wait()
                await until(lambda: not receiver.requests)
                assert len(receiver.called) == 1
                assert not await receiver.drain(0.01), "its reply is still to be sent"
            assert await receiver.drain(5)
            assert await task
            assert server.body == b"x" * 100_000
            assert nothing_left(receiver, shared)

    run(test())


def test_an_app_that_raises_or_returns_after_the_call_ends_as_over_any_connection(run: Run) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STARTED)
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            if scope["path"] == "/raises":
                raise ValueError("the app's own")

        async with hop(app, shared_from=0) as (forwarder, _):
            await shared_with(forwarder)
            server = Server()
            assert await forward(forwarder, server)
            assert server.body == b"half"
            server = Server()
            with pytest.raises(RemoteAppError):
                await forward(forwarder, server, http_scope(path="/raises"))
            assert server.body == b"half"

    run(test())


def test_a_shared_connection_is_not_idle_while_what_was_called_from_it_waits_to_join(run: Run) -> None:
    """Closed then, it would take the exchange with it."""

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STARTED)
            for part in (b"a", b"b"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"c"})

        async with hop(app, shared_from=0) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            shared = await shared_with(forwarder)
            server = Server()
            with no_descriptors():
                task = tasks.create_task(forward(forwarder, server))
                await until(lambda: receiver.called and not shared.exchanges)
                shared.pool.drop_idle(used_before=float("inf"))
                await asyncio.sleep(0.06)
            assert await task
            assert server.body == b"abc"
            shared.pool.drop_idle(used_before=float("inf"))
            assert shared.lost

    run(test())


def test_a_join_goes_over_a_new_connection_if_the_pooled_one_was_closed_meanwhile(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer), asyncio.TaskGroup() as tasks:
            first = tasks.create_task(forward(forwarder, Server(request_event(b"body")), post_scope(4)))
            pooled = await answer_own(owner)
            assert await first
            server = Server()
            task = tasks.create_task(forward(forwarder, server))
            await peer.read_numbered(1)
            await peer.write(batch(numbered(CALL, 1, msgspec.msgpack.encode(7))))
            while shared.exchanges:
                await asyncio.sleep(0)
            pooled.close()  # just as it is taken for the join
            joined = await owner.accept()
            assert await joined.read_frame() == (JOIN, msgspec.msgpack.encode(7), b"")
            await joined.write_frame(WHOLE, HEAD, b"joined")
            assert await task
            assert server.body == b"joined"

    run(test())


def test_a_join_that_an_owner_without_descriptors_turns_away_is_tried_again(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, _, owner, peer), asyncio.TaskGroup() as tasks:
            server = Server()
            task = tasks.create_task(forward(forwarder, server))
            await peer.read_numbered(1)
            await peer.write(batch(numbered(CALL, 1, msgspec.msgpack.encode(7))))
            turned_away = await owner.accept()
            await turned_away.read(1)
            await turned_away.write_frame(BUSY)
            turned_away.close()
            joined = await owner.accept()
            assert await joined.read_frame() == (JOIN, msgspec.msgpack.encode(7), b"")
            await joined.write_frame(WHOLE, HEAD, b"joined")
            assert await task
            assert server.body == b"joined"
            assert forwarder.counters.busy == 0

    run(test())


@pytest.mark.parametrize("frames", [[], [frame(MINE)]])
def test_an_owner_that_is_lost_at_a_join_is_unreachable(run: Run, frames: list[bytes]) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, _, owner, peer):
            task = asyncio.create_task(forward(forwarder, Server()))
            await peer.read_numbered(1)
            await peer.write(batch(numbered(CALL, 1, msgspec.msgpack.encode(7))))
            joined = await owner.accept()
            await joined.read_frame()
            await joined.write(*frames)
            joined.close()
            assert type(await failure(task)) is OwnerUnreachableError
            # Its last word on the shared connection, whatever became of the join.
            assert await peer.read_numbered(1) == [(GONE, 1, b"", b"")]
            assert len(owner.peers) == 2

    run(test())


def test_an_owner_that_is_gone_before_a_join_is_unreachable_and_not_refused(run: Run) -> None:
    """Refused would say that nothing ran, and the request has begun."""

    async def test() -> None:
        async with sharing_owner() as (forwarder, _, owner, peer):
            task = asyncio.create_task(forward(forwarder, Server()))
            await peer.read_numbered(1)
            owner.listener.close()
            await peer.write(batch(numbered(CALL, 1, msgspec.msgpack.encode(7))))
            assert type(await failure(task)) is OwnerUnreachableError

    run(test())


def test_a_join_of_what_was_not_called_ends_that_connection_alone(run: Run) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await reply(send)

        async with sharing_forwarder(app) as (receiver, peer):
            await peer.write(batch(numbered(REQUEST, 1, REQUEST_HEAD)))
            for call in (1, "1", None, -1):
                other = await connect(peer.socket.getpeername())
                await other.write_frame(JOIN, msgspec.msgpack.encode(call))
                assert await other.ended()
                other.close()
            assert receiver.counters.malformed == 4
            go.set()
            answers = await peer.read_numbered(1)
            while answers[-1][0] == MINE:
                answers = await peer.read_numbered(1)
            assert answers == [(WHOLE, 1, HEAD, b"hello")]

    run(test())


def test_slow_streams_hold_up_no_small_exchange(run: Run) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/small":
                await echo(scope, receive, send)
                return
            await send(STARTED)
            for _ in range(100):
                await send({"type": "http.response.body", "body": b"x" * 20_000, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        async with hop(app, shared_from=0) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            shared = await shared_with(forwarder)
            slow = [Server() for _ in range(50)]
            for server in slow:
                server.open.clear()
                tasks.create_task(forward(forwarder, server, http_scope(path="/stream")))
            for server in slow:
                await server.blocked.wait()
            before = forwarder.counters.opened
            shared._paused_until = 0.0  # as some seconds later: of what came last, most was called
            for _ in range(20):
                small = [Server() for _ in range(10)]
                await asyncio.gather(*(forward(forwarder, server, http_scope(path="/small")) for server in small))
                assert [server.body for server in small] == [b"/small"] * 10
            assert receiver.in_flight == 50
            assert (forwarder.counters.opened, forwarder.counters.shared) == (before, 200)
            for server in slow:
                server.open.set()
            await asyncio.gather(
                *(server.until(lambda server=server: server.sent_bytes == 2_000_000) for server in slow)
            )
            await until(lambda: nothing_left(receiver, shared))

    run(test())


def test_what_many_reply_in_one_turn_waits_for_a_forwarder_that_does_not_read(run: Run) -> None:
    async def test() -> None:
        sent = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            await reply(send, b"x" * 30_000)
            sent += 30_000

        async with sharing_forwarder(app) as (receiver, peer):
            await peer.write(batch(*(numbered(REQUEST, number, REQUEST_HEAD) for number in range(1, 301))))
            await until(lambda: receiver.counters.received == 300)
            for _ in range(20):
                await asyncio.sleep(0)
            assert 0 < sent < 2_000_000
            numbers: list[int] = []
            while len(numbers) < 300:
                numbers += [each for kind, each, _, _ in await peer.read_batch() if kind == WHOLE]
            assert sorted(numbers) == list(range(1, 301))
            assert await receiver.drain(5)

    run(test())


def test_a_forwarder_that_stops_reading_stops_the_apps(run: Run) -> None:
    async def test() -> None:
        sent = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            await reply(send, b"x" * 30_000)
            sent += 30_000

        async with sharing_forwarder(app) as (receiver, peer):
            (shared,) = receiver.shared
            number = 0
            while not shared.write_paused:
                number += 1
                await peer.write(batch(numbered(REQUEST, number, REQUEST_HEAD)))
                while receiver.counters.received < number or (receiver.requests and not shared.write_paused):
                    await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            stopped_at = sent
            for _ in range(100):
                number += 1
                await peer.write(batch(numbered(REQUEST, number, REQUEST_HEAD)))
            await until(lambda: receiver.counters.received == number)
            for _ in range(20):
                await asyncio.sleep(0)
            assert sent == stopped_at
            assert len(receiver.requests) == number - sent // 30_000
            numbers = []
            while len(numbers) < number:
                numbers += [each for kind, each, _, _ in await peer.read_batch() if kind == WHOLE]
            assert sorted(numbers) == list(range(1, number + 1))
            assert await receiver.drain(5)

    run(test())
