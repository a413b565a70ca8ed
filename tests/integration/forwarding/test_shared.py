"""Small exchanges that share a connection: when they do, each gets its own answer, and each ends as over one of its own."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from tests.integration.forwarding.hop import (
    Run,
    Server,
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

from homing.errors import OwnerRefusedError, OwnerTimeoutError, OwnerUnreachableError, RemoteAppError, ReplyCutError
from homing.forwarding.frames import (
    CALL,
    DROPPED,
    END,
    GONE,
    LAST_READ,
    MINE,
    NOT_MINE,
    RAISED,
    REQUEST,
    WHOLE,
)

pytestmark = pytest.mark.usefixtures("patient")

# --- when it is used ---


def test_it_is_used_where_four_are_under_way_and_not_before(run: Run) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/slow":
                await go.wait()
            await echo(scope, receive, send)

        async with hop(app) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            for count in range(1, 5):
                assert not receiver.shared
                tasks.create_task(forward(forwarder, Server(), http_scope(path="/slow")))
                await until(lambda count=count: receiver.in_flight == count)
            await until(lambda: receiver.shared)
            assert forwarder.counters.opened == 4
            await shared_with(forwarder)
            server = Server()
            assert await forward(forwarder, server)
            assert server.body == b"/step"
            assert (forwarder.counters.shared, forwarder.counters.forwarded) == (1, 1)
            # What has a body, and a WebSocket, goes over a connection of its own.
            assert await forward(forwarder, Server(request_event(b"body")), post_scope(4))
            assert await forward(forwarder, Server(), http_scope(headers=[(b"x", b"y" * 20_000)]))
            assert await forward(forwarder, Server(request_event()), http_scope(http_version="2"))
            assert forwarder.counters.shared == 1
            go.set()

    run(test())


def test_few_have_connections_of_their_own_again_a_moment_after_many(run: Run) -> None:
    async def test() -> None:
        async with hop(echo, shared_from=4) as (forwarder, _):
            shared = await shared_with(forwarder)
            await asyncio.gather(*(forward(forwarder, Server()) for _ in range(10)))
            assert forwarder.counters.shared == 7, "from the fourth on"
            shared.pool.expire(0.0)  # as the ticker does once a second
            assert await forward(forwarder, Server())
            assert forwarder.counters.shared == 8
            shared.pool.expire(0.0)
            assert await forward(forwarder, Server())
            assert forwarder.counters.shared == 8

    run(test())


def test_where_most_is_called_elsewhere_it_begins_there_for_a_while(run: Run) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/stream":
                await send(STARTED)
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
                await send({"type": "http.response.body", "body": b"b"})
            else:
                await echo(scope, receive, send)

        async with hop(app, shared_from=0) as (forwarder, _):
            shared = await shared_with(forwarder)
            for number in range(40):  # one in twenty does not matter
                server = Server()
                assert await forward(forwarder, server, http_scope(path="/small" if number % 20 else "/stream"))
            assert forwarder.counters.shared == 40
            for _ in range(10):
                server = Server()
                assert await forward(forwarder, server, http_scope(path="/stream"))
                assert server.body == b"ab"
            assert 42 <= forwarder.counters.shared < 48
            before = forwarder.counters.shared
            shared._paused_until = 0.0  # as some seconds later
            assert await forward(forwarder, Server())
            assert forwarder.counters.shared == before + 1

    run(test())


def test_it_is_closed_once_it_is_idle_for_long(run: Run) -> None:
    async def test() -> None:
        async with hop(echo, owner_timeout_seconds=0.2) as (forwarder, receiver):
            await shared_with(forwarder)
            assert receiver.shared
            forwarder._idle_seconds = 0.05
            await until(lambda: not receiver.shared)

    run(test())


def test_one_whose_numbers_are_used_up_is_replaced(run: Run) -> None:
    async def test() -> None:
        async with hop(echo, shared_from=0) as (forwarder, _):
            first = await shared_with(forwarder)
            first._number = 2**32 - 2  # as after some days
            for _ in range(3):
                assert await forward(forwarder, Server())
            assert (forwarder.counters.shared, forwarder.counters.opened) == (1, 1)
            first.pool.drop_idle(used_before=float("inf"))
            assert first.lost
            first.pool.shares_again_at = 0.0
            assert await shared_with(forwarder) is not first
            assert await forward(forwarder, Server())
            assert forwarder.counters.shared == 2

    run(test())


# --- many at once ---


def test_each_of_many_gets_its_own_reply(run: Run) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            name = dict(scope["headers"])[b"name"]
            for _ in range(order[name]):
                await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"name", name)]})
            await send({"type": "http.response.body", "body": name * 50, "more_body": False})

        names = [str(n).encode() for n in range(200)]
        order = {name: random.Random(name).randrange(60) for name in names}

        async def one(name: bytes) -> None:
            server = Server()
            assert await forward(forwarder, server, http_scope(headers=[(b"name", name)]))
            assert server.sent[0]["headers"] == [(b"name", name)]
            assert server.body == name * 50

        async with hop(app, shared_from=0) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            await asyncio.gather(*map(one, names))
            assert (forwarder.counters.shared, forwarder.counters.opened) == (200, 0)
            assert sum(forwarder.counters.hops.counts) == 200
            assert receiver.counters.received == 200
            assert nothing_left(receiver, shared)

    run(test())


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (200, [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"Set-Cookie", b"c=3")], b"hello"),
        (204, [], b""),
        (200, [(b"content-length", b"1234")], b""),
        (200, [], b"x" * (64 * 1024)),
    ],
)
def test_a_whole_reply_is_the_apps(run: Run, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    async def test() -> None:
        events = [
            {"type": "http.response.start", "status": status, "headers": headers},
            {"type": "http.response.body", "body": body, "more_body": False},
        ]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for event in events:
                await send(event)

        async with hop(app, shared_from=0) as (forwarder, _):
            await shared_with(forwarder)
            server = Server()
            assert await forward(forwarder, server, http_scope(method="HEAD"))
            assert server.sent == events
            assert forwarder.counters.shared == 1

    run(test())


def test_what_the_owner_says_without_a_reply_ends_its_own_exchange(run: Run) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            match scope["path"]:
                case "/not-mine":
                    scope["homing.hop"].not_mine()
                    return
                case "/raises":
                    scope["homing.hop"].mine()
                    raise ValueError("the app's own")
                case "/returns":
                    scope["homing.hop"].mine()
                    return
            scope["homing.hop"].mine()
            await echo(scope, receive, send)

        async with hop(app, decide=False, shared_from=0) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            servers = {path: Server() for path in ("/not-mine", "/raises", "/returns", "/replies")}
            found = await asyncio.gather(
                *(forward(forwarder, server, http_scope(path=path)) for path, server in servers.items()),
                return_exceptions=True,
            )
            assert [found[0], type(found[1]), found[2], found[3]] == [False, RemoteAppError, True, True]
            assert [server.body for server in servers.values()] == [b"", b"", b"", b"/replies"]
            assert forwarder.counters.opened == 0
            counters = forwarder.counters
            assert (counters.not_mine, counters.raised, counters.forwarded, counters.shared) == (1, 1, 2, 3)
            assert nothing_left(receiver, shared)

    run(test())


def test_a_worker_without_descriptors_still_sends_over_it(run: Run) -> None:
    async def test() -> None:
        async with hop(echo, shared_from=0) as (forwarder, _):
            await shared_with(forwarder)
            with no_descriptors():
                server = Server()
                assert await forward(forwarder, server)
            assert server.body == b"/step"

    run(test())


# --- silence and time ---


def test_an_owner_that_says_nothing_for_a_while_is_sent_no_more_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.forwarding.shared._SILENT_SECONDS", 0.05)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with sharing_owner() as (forwarder, shared, owner, peer), asyncio.TaskGroup() as tasks:
            server = Server()
            first = tasks.create_task(forward(forwarder, server))
            await peer.read_numbered(1)
            sent_at = loop.time()
            await until(lambda: not shared.takes(loop.time()))
            assert loop.time() - sent_at < 5
            second = tasks.create_task(forward(forwarder, Server()))
            await answer_own(owner)
            assert await second
            await peer.write(batch(numbered(MINE, 1)))
            await until(lambda: shared.takes(loop.time()))
            third = tasks.create_task(forward(forwarder, Server()))
            assert [number for _, number, _, _ in await peer.read_numbered(1)] == [2]
            await peer.write(batch(numbered(WHOLE, 1, HEAD, b"one"), numbered(WHOLE, 2, HEAD, b"two")))
            assert await first
            assert await third
            assert server.body == b"one"

    run(test())


def test_an_owner_that_does_not_decide_in_time_sees_its_client_leave(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/undecided":
                assert (await receive())["type"] == "http.request"
                with pytest.raises(RuntimeError, match="mine"):
                    await receive()
                await until(lambda: scope["homing.hop"]._gone is not None)
                assert (await receive())["type"] == "http.disconnect"
                left.set()
                return
            scope["homing.hop"].mine()
            await echo(scope, receive, send)

        async with hop(app, decide=False, shared_from=0, owner_timeout_seconds=0.1) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            task = asyncio.create_task(forward(forwarder, Server(), http_scope(path="/undecided")))
            assert type(await failure(task)) is OwnerTimeoutError
            await left.wait()
            await until(lambda: nothing_left(receiver, shared))
            assert (forwarder.counters.timed_out, forwarder.counters.shared) == (1, 0)
            assert forwarder.counters.opened == 0

    run(test())


def test_a_late_answer_hits_no_other_exchange(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner(owner_timeout_seconds=0.3) as (forwarder, shared, _, peer):
            task = asyncio.create_task(forward(forwarder, Server()))
            await peer.read_numbered(1)
            assert type(await failure(task)) is OwnerTimeoutError
            assert await peer.read_numbered(1) == [(GONE, 1, b"", b"")]
            await peer.write(batch(numbered(MINE, 1)))
            await until(lambda: shared.takes(asyncio.get_running_loop().time()))
            server = Server()
            second = asyncio.create_task(forward(forwarder, server))
            assert [number for _, number, _, _ in await peer.read_numbered(1)] == [2]
            late = [numbered(kind, 1, HEAD, b"late") for kind in (WHOLE, END, RAISED, NOT_MINE, DROPPED)]
            await peer.write(batch(*late, numbered(CALL, 1, msgspec.msgpack.encode(7))))
            await peer.write(batch(numbered(WHOLE, 2, HEAD, b"its own")))
            assert await second
            assert server.body == b"its own"

    run(test())


def test_after_mine_there_is_no_limit(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner(owner_timeout_seconds=0.3) as (forwarder, shared, _, peer):
            server = Server()
            slow = asyncio.create_task(forward(forwarder, server))
            other = asyncio.create_task(forward(forwarder, Server()))
            await peer.read_numbered(2)
            await peer.write(batch(numbered(MINE, 1)))
            assert type(await failure(other)) is OwnerTimeoutError
            assert list(shared.exchanges) == [1]
            await peer.write(batch(numbered(WHOLE, 1, HEAD, b"at last")))
            assert await slow
            assert server.body == b"at last"

    run(test())


# --- cancellation ---


def test_cancelled_while_it_waits_the_app_sees_its_client_leave(run: Run) -> None:
    async def test() -> None:
        started, left = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            started.set()
            await until(lambda: scope["homing.hop"]._gone is not None)
            left.set()

        async with hop(app, shared_from=0) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            task = asyncio.create_task(forward(forwarder, Server()))
            await started.wait()
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            await left.wait()
            await until(lambda: nothing_left(receiver, shared))
            assert forwarder.counters.opened == 0

    run(test())


async def streams(scope: Any, receive: Any, send: Any, left: asyncio.Event) -> None:
    await receive()
    await send(STARTED)
    await send({"type": "http.response.body", "body": b"first", "more_body": True})
    assert (await receive())["type"] == "http.disconnect"
    left.set()


def test_cancelled_while_it_is_called_and_has_not_joined_the_app_sees_its_client_leave(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await streams(scope, receive, send, left)

        async with hop(app, shared_from=0) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            with no_descriptors():
                task = asyncio.create_task(forward(forwarder, Server()))
                await until(lambda: receiver.called and not shared.exchanges)
                task.cancel()
                await asyncio.wait({task})
            assert task.cancelled()
            await left.wait()
            await until(lambda: nothing_left(receiver, shared))

    run(test())


def test_cancelled_after_it_has_joined_the_app_sees_its_client_leave(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await streams(scope, receive, send, left)

        async with hop(app, shared_from=0) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            server = Server()
            task = asyncio.create_task(forward(forwarder, server))
            await server.until(lambda: server.body == b"first")
            task.cancel()
            await asyncio.wait({task})
            await left.wait()
            await until(lambda: nothing_left(receiver, shared))
            assert len(receiver.shared) == 1

    run(test())


def test_cancelled_at_any_moment_it_is_no_malformed_peer(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A *gone* over the shared connection and a JOIN over another have no order."""

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STARTED)
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await receive()
            await receive()

        async with hop(app, shared_from=0) as (forwarder, receiver):
            shared = await shared_with(forwarder)
            for turns in range(30):
                task = asyncio.create_task(forward(forwarder, Server()))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                await until(lambda: nothing_left(receiver, shared))
            assert receiver.counters.malformed == 0
            assert not shared.lost

    run(test())
    assert "closed a connection" not in caplog.text


# --- the end of a worker ---


def test_a_receiver_that_closes_answers_what_ends_in_time_and_drops_the_rest(run: Run) -> None:
    async def test() -> None:
        go, cancelled = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/never":
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
            await go.wait()
            await echo(scope, receive, send)

        async with hop(app, shared_from=0) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            shared = await shared_with(forwarder)
            server = Server()
            ends = tasks.create_task(forward(forwarder, server, http_scope(path="/ends")))
            never = asyncio.create_task(forward(forwarder, Server(), http_scope(path="/never")))
            await until(lambda: receiver.in_flight == 2)
            closing = tasks.create_task(receiver.aclose())
            await until(lambda: not shared.takes(asyncio.get_running_loop().time()))
            # It reads no more: whoever comes now goes elsewhere, and finds nobody there.
            with pytest.raises(OwnerRefusedError):
                await forward(forwarder, Server())
            go.set()
            assert await ends
            assert server.body == b"/ends"
            assert type(await failure(never)) is OwnerUnreachableError
            assert cancelled.is_set()
            await closing
            assert nothing_left(receiver, shared)
            assert not receiver.shared

    run(test())


def test_a_large_reply_of_a_receiver_that_closes_comes_over_the_shared_connection(run: Run) -> None:
    """Nobody could join another connection any more."""

    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await reply(send, b"x" * 100_000)

        async with hop(app, shared_from=0) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            shared = await shared_with(forwarder)
            server = Server()
            task = tasks.create_task(forward(forwarder, server))
            await until(lambda: receiver.in_flight == 1)
            closing = tasks.create_task(receiver.aclose())
            await until(lambda: not shared.takes(asyncio.get_running_loop().time()))
            go.set()
            assert await task
            assert server.body == b"x" * 100_000
            await closing

    run(test())


def test_a_receiver_that_closes_waits_until_the_forwarder_has_let_go(run: Run) -> None:
    """Closed before, the connection would fail at the forwarder's next write, and the replies that it has yet to read with it."""

    async def test() -> None:
        async with sharing_forwarder(echo) as (receiver, peer):
            await peer.write(batch(numbered(REQUEST, 1, REQUEST_HEAD)))
            assert (await peer.read_numbered(1))[0][:2] == (WHOLE, 1)
            closing = asyncio.create_task(receiver.aclose())
            assert await peer.read_numbered(1) == [(LAST_READ, 1, b"", b"")]
            for _ in range(20):
                await asyncio.sleep(0)
            await peer.write(batch(numbered(REQUEST, 2, REQUEST_HEAD)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not closing.done()
            peer.close()
            await closing
            assert receiver.counters.received == 1, "what came later has not run"

    run(test())


def test_a_forwarder_lets_go_once_an_owner_that_reads_no_more_has_answered(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, _, peer), asyncio.TaskGroup() as tasks:
            two = [tasks.create_task(forward(forwarder, Server())) for _ in range(2)]
            await peer.read_numbered(2)
            await peer.write(batch(numbered(LAST_READ, 2)))
            await peer.write(batch(numbered(WHOLE, 1, HEAD, b"one")))
            assert await two[0]
            assert not shared.lost
            await peer.write(batch(numbered(WHOLE, 2, HEAD, b"two")))
            assert await two[1]
            assert await peer.ended()
            assert shared.lost

    run(test())


def test_a_forwarder_that_closes_ends_what_is_under_way(run: Run) -> None:
    async def test() -> None:
        left: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/stream":
                await send(STARTED)
                await receive()
            else:
                await until(lambda: scope["homing.hop"]._gone is not None)
            await receive()
            if (await receive())["type"] == "http.disconnect":
                left.append(scope["path"])

        async with hop(app, shared_from=0) as (forwarder, receiver):
            await shared_with(forwarder)
            server = Server()
            stream = asyncio.create_task(forward(forwarder, server, http_scope(path="/stream")))
            small = asyncio.create_task(forward(forwarder, Server(), http_scope(path="/small")))
            await server.until(lambda: bool(server.sent))
            await until(lambda: receiver.in_flight == 2)
            await forwarder.aclose()
            assert type(await failure(stream)) is ReplyCutError
            assert type(await failure(small)) is OwnerUnreachableError
            await until(lambda: sorted(left) == ["/small", "/stream"])
            await until(lambda: not receiver.shared)
            assert await receiver.drain(5)

    run(test())


def test_an_owner_that_drops_an_exchange_says_so(run: Run) -> None:
    async def test() -> None:
        async with sharing_owner() as (forwarder, shared, owner, peer):
            task = asyncio.create_task(forward(forwarder, Server()))
            await peer.read_numbered(1)
            await peer.write(batch(numbered(DROPPED, 1)))
            assert type(await failure(task)) is OwnerUnreachableError
            assert not shared.lost
            assert len(owner.peers) == 1

    run(test())
