"""Each way in which a hop breaks has one meaning, and a request that may have been delivered is never sent again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.integration.forwarding.hop import (
    ASKER,
    OWNER,
    Event,
    Peer,
    Run,
    Server,
    forward,
    hop,
    http_scope,
    post_scope,
    raw_owner,
    request_event,
    socket_directory,
    websocket_scope,
)

from homing.errors import (
    HomingError,
    OwnerBusyError,
    OwnerRefusedError,
    OwnerTimeoutError,
    OwnerUnreachableError,
    RemoteAppError,
    ReplyCutError,
)
from homing.forwarding.base import Answer
from homing.forwarding.forwarder import Forwarder, replayable
from homing.forwarding.frames import (
    BODY,
    BUSY,
    END,
    EVENT,
    LAST,
    MINE,
    MINE_FIRST,
    NOT_MINE,
    RAISED,
    START,
    WHOLE,
    frame,
)
from homing.types import Reason

HEAD = msgspec.msgpack.encode((200, [(b"a", b"b")]))
STARTED = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
REPLY = frame(WHOLE | MINE_FIRST, HEAD, b"hello")
BODY_EVENT = {"type": "http.response.body", "body": b"hello", "more_body": False}


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send(STARTED)
    await send(BODY_EVENT)


# --- connecting ---


def test_no_socket_and_nobody_listening_are_refusals(run: Run) -> None:
    async def test() -> None:
        with socket_directory() as directory:
            async with Forwarder(directory) as forwarder:
                with pytest.raises(OwnerRefusedError):
                    await forward(forwarder, Server())
                left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                left.bind(f"{directory}/{OWNER}.sock")
                with pytest.raises(OwnerRefusedError):
                    await forward(forwarder, Server())
                left.close()
                with pytest.raises(OwnerRefusedError):
                    await forwarder.ask(OWNER, "session", "s", ASKER)
                assert forwarder.counters.refused == 2

    run(test())


def test_a_full_backlog_is_busy(run: Run) -> None:
    async def test() -> None:
        async with raw_owner(backlog=0) as (forwarder, owner):
            waiting = []
            while True:
                connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                waiting.append(connecting)
                connecting.setblocking(False)
                if connecting.connect_ex(owner.listener.getsockname()) == errno.EAGAIN:
                    break
            with pytest.raises(OwnerBusyError):
                await forward(forwarder, Server())
            assert forwarder.counters.busy == 1
            for connecting in waiting:
                connecting.close()

    run(test())


def test_a_worker_without_descriptors_is_busy_and_recovers(run: Run) -> None:
    async def test() -> None:
        async with hop(ok) as (forwarder, _):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            spare = socket.socket()
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare.fileno(), hard))
            try:
                with pytest.raises(OwnerBusyError):
                    await forward(forwarder, Server())
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                spare.close()
            assert await forward(forwarder, Server())

    run(test())


def test_an_owner_without_descriptors_is_busy_and_the_request_is_given_again(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def turn_away() -> None:
                for _ in range(2):
                    peer = await owner.accept()
                    # Once something has arrived, as the receiver does it.
                    await asyncio.get_running_loop().sock_recv(peer.socket, 1)
                    await peer.write(frame(BUSY))
                    peer.close()

            tasks.create_task(turn_away())
            server = Server(request_event(b"body"))
            receive = replayable(server.receive)
            with pytest.raises(OwnerBusyError):
                await forwarder.forward(OWNER, Reason.OWNED, (), post_scope(4), receive, server.send)
            assert await receive() == request_event(b"body")
            with pytest.raises(OwnerBusyError):
                await forwarder.ask(OWNER, "session", "key", ASKER)
            assert not server.sent

    run(test())


# --- before mine ---


def test_a_first_frame_that_was_not_read_counts_as_refused(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                (await owner.accept()).close()

            tasks.create_task(serve())
            server = Server(request_event(b"body"))
            receive = replayable(server.receive)
            with pytest.raises(OwnerRefusedError):
                await forwarder.forward(OWNER, Reason.OWNED, (), post_scope(4), receive, server.send)
            assert await receive() == request_event(b"body"), "the request can go elsewhere, whole"

    run(test())


def test_a_first_frame_that_was_read_in_part_only_counts_as_refused(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await asyncio.get_running_loop().sock_recv(peer.socket, 10)
                peer.close()

            tasks.create_task(serve())
            with pytest.raises(OwnerRefusedError):
                await forward(forwarder, Server())

    run(test())


def test_an_end_after_the_first_frame_was_read_is_unknown(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                peer.close()

            tasks.create_task(serve())
            server = Server()
            with pytest.raises(OwnerUnreachableError):
                await forward(forwarder, server)
            assert server.sent == []
            assert len(owner.peers) == 1, "never sent again"

    run(test())


def test_no_answer_in_time_drops_the_connection(run: Run) -> None:
    async def test() -> None:
        async with raw_owner(owner_timeout_seconds=0.1) as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                assert await peer.ended()

            tasks.create_task(serve())
            with pytest.raises(OwnerTimeoutError):
                await forward(forwarder, Server())
            assert forwarder.counters.timed_out == 1

    run(test())


def test_after_mine_there_is_no_limit(run: Run) -> None:
    async def test() -> None:
        async with raw_owner(owner_timeout_seconds=0.05) as (forwarder, owner), asyncio.TaskGroup() as tasks:
            said = asyncio.Event()

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write_frame(MINE)
                said.set()
                ticked = await owner.accept()  # the second request's timeout shows that the first one's has passed
                await ticked.read_request()
                assert await ticked.ended()
                await peer.write_frame(WHOLE, HEAD, b"hello")

            tasks.create_task(serve())
            slow = tasks.create_task(forward(forwarder, Server()))
            await said.wait()
            with pytest.raises(OwnerTimeoutError):
                await forward(forwarder, Server())
            assert await slow

    run(test())


# --- after mine ---


@pytest.mark.parametrize(
    ("frames", "error", "sent"),
    [
        ([frame(MINE)], OwnerUnreachableError, []),
        ([frame(START | MINE_FIRST, HEAD)], ReplyCutError, [STARTED]),
        (
            [frame(START | MINE_FIRST, HEAD), frame(BODY, b"", b"he")],
            ReplyCutError,
            [STARTED, {"type": "http.response.body", "body": b"he", "more_body": True}],
        ),
        ([frame(START | MINE_FIRST, HEAD), frame(LAST, b"", b"x" * 100)[:-1]], ReplyCutError, [STARTED]),
        ([REPLY[:-1]], OwnerUnreachableError, []),
        ([frame(99)], OwnerUnreachableError, []),
        ([frame(MINE), frame(START, b"\xc1")], OwnerUnreachableError, []),
        ([frame(MINE), b"\xff" * 8], OwnerUnreachableError, []),
        ([frame(START | MINE_FIRST, HEAD), frame(NOT_MINE)], ReplyCutError, [STARTED]),
    ],
)
def test_an_owner_lost_after_mine(run: Run, frames: list[bytes], error: type[Exception], sent: list[Event]) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write(*frames)
                peer.close()

            tasks.create_task(serve())
            server = Server()
            with pytest.raises(error):
                await forward(forwarder, server)
            assert server.sent == sent
            assert len(owner.peers) == 1, "never sent again"
            assert " 0 idle" in repr(forwarder)

    run(test())


@pytest.mark.parametrize("accepted", [False, True])
def test_a_websockets_owner_lost(run: Run, accepted: bool) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write_frame(MINE)
                if accepted:
                    await peer.write_frame(3, msgspec.msgpack.encode({"type": "websocket.accept"}))
                peer.close()

            tasks.create_task(serve())
            server = Server({"type": "websocket.connect"})
            with pytest.raises(ReplyCutError if accepted else OwnerUnreachableError):
                await forward(forwarder, server, websocket_scope())
            closed = {"type": "websocket.close", "code": 1011, "reason": ""}
            assert server.sent == ([{"type": "websocket.accept"}, closed] if accepted else [])

    run(test())


@pytest.mark.parametrize(
    ("frames", "error"),
    [([frame(END)], None), ([frame(RAISED)], RemoteAppError), ([], ReplyCutError), ([frame(99)], ReplyCutError)],
)
def test_the_start_of_a_denial_is_sent_however_its_exchange_ends(
    run: Run, frames: list[bytes], error: type[Exception] | None
) -> None:
    denial = {"type": "websocket.http.response.start", "status": 401, "headers": []}

    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write(frame(EVENT | MINE_FIRST, msgspec.msgpack.encode(denial)), *frames)
                peer.close()

            tasks.create_task(serve())
            server = Server({"type": "websocket.connect"})
            with contextlib.nullcontext() if error is None else pytest.raises(error):
                await forward(forwarder, server, websocket_scope())
            assert server.sent == [denial]

    run(test())


# --- not mine ---


def test_not_mine_gives_everything_back(run: Run) -> None:
    async def test() -> None:
        events = [request_event(b"a" * 10, True), request_event(b"b" * 20, True), request_event(b"c")]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["homing.hop"].not_mine()

        async with hop(app, decide=False) as (forwarder, receiver):
            server = Server(*events)
            receive = replayable(server.receive)
            for _ in range(3):
                assert not await forwarder.forward(OWNER, Reason.OWNED, (), post_scope(31), receive, server.send)
            assert [await receive() for _ in events] == events
            assert server.sent == []
            assert (forwarder.counters.not_mine, receiver.counters.not_mine, forwarder.counters.opened) == (3, 3, 1)

    run(test())


def test_a_body_beyond_64_kib_waits_for_mine(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:
            parts = [request_event(b"x" * 30_000, True) for _ in range(20)]
            server = Server(*parts, request_event(b"end"))

            async def serve() -> None:
                peer = await owner.accept()
                request, early = await peer.read_request()
                assert 0 < len(early) <= 64 * 1024
                assert sum(request.early) == len(early)
                await until_still(server)
                assert server.received * 30_000 <= 64 * 1024 + 30_000
                await peer.write_frame(MINE)
                body = early
                while (read := await peer.read_frame()) is not None:
                    body += read[2]
                    if read[0] == LAST:
                        break
                assert body == b"x" * 600_000 + b"end"
                await peer.write(frame(WHOLE, HEAD, b"hello"))

            tasks.create_task(serve())
            assert await forward(forwarder, server, post_scope(600_003))

    run(test())


async def until_still(server: Server) -> None:
    same, last = 0, -1
    while same < 50:
        await asyncio.sleep(0)
        same = same + 1 if server.received == last else 0
        last = server.received


# --- pooled connections ---


def test_a_pooled_connection_that_is_closed_is_replaced_unnoticed(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write(REPLY)
                await asyncio.sleep(0)
                peer.close()
                peer = await owner.accept()
                await peer.read_request()
                await peer.write(REPLY)

            tasks.create_task(serve())
            for _ in range(2):
                server = Server(request_event(b"body"))
                assert await forward(forwarder, server, post_scope(4))
                assert server.sent == [STARTED, BODY_EVENT]
            assert forwarder.counters.opened == 2

    run(test())


def test_a_pooled_connection_closed_at_the_moment_of_use_is_tried_again(run: Run) -> None:
    """The owner lets go of an idle connection just as a request takes it: the request was not read."""

    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:
            first = asyncio.Event()

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write(REPLY)
                await first.wait()
                peer = await owner.accept()
                _, early = await peer.read_request()
                assert early == b"body"
                await peer.write(REPLY)

            tasks.create_task(serve())
            assert await forward(forwarder, Server())
            owner.peers[0].close()  # no turn of the loop from here to the write below
            first.set()
            assert await forward(forwarder, Server(request_event(b"body")), post_scope(4))
            assert (forwarder.counters.retried, forwarder.counters.opened) == (1, 2)

    run(test())


def test_a_pooled_connection_that_read_the_request_is_not_tried_again(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write(REPLY)
                await peer.read_request()
                peer.close()

            tasks.create_task(serve())
            assert await forward(forwarder, Server())
            with pytest.raises(OwnerUnreachableError):
                await forward(forwarder, Server())
            assert len(owner.peers) == 1

    run(test())


@pytest.mark.usefixtures("shared")
def test_requests_after_a_cancelled_one_are_not_mixed_up(run: Run) -> None:
    async def test() -> None:
        reached, disconnected = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/slow":
                await send(STARTED)
                await send({"type": "http.response.body", "body": b"slow", "more_body": True})
                await receive()
                reached.set()
                assert (await receive())["type"] == "http.disconnect"
                disconnected.set()
                return
            await send(STARTED)
            await send({"type": "http.response.body", "body": scope["path"].encode()})

        async with hop(app) as (forwarder, receiver):
            await forward(forwarder, Server())
            task = asyncio.create_task(forward(forwarder, Server(), http_scope(path="/slow")))
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for path in ("/one", "/two"):
                server = Server()
                assert await forward(forwarder, server, http_scope(path=path))
                assert server.body == path.encode()
            await disconnected.wait()
            assert await receiver.drain(5)

    run(test())


@pytest.mark.parametrize("scope", [http_scope(), post_scope(4), websocket_scope()])
@pytest.mark.usefixtures("shared")
def test_cancelled_at_any_moment_nothing_is_left_and_nothing_is_mixed_up(run: Run, scope: Event) -> None:
    """Cancel after 0, 1, 2, … turns of the loop, until the request is done before it can be cancelled."""

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            event = await receive()
            if scope["type"] == "websocket":
                await send({"type": "websocket.accept"})
                await send({"type": "websocket.send", "text": (await receive())["text"]})
                await send({"type": "websocket.close", "code": 1000})
                return
            await send(STARTED)
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": event["body"], "more_body": True})
            await send({"type": "http.response.body", "body": scope["path"].encode()})

        def served() -> Server:
            if scope["type"] == "websocket":
                return Server({"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hi"})
            return Server(request_event(b"body" if scope["method"] == "POST" else b""))

        async with hop(app) as (forwarder, receiver):
            turns = 0
            done = False
            while not done:
                task = asyncio.create_task(forward(forwarder, served(), dict(scope)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                done = task.done()
                task.cancel()
                await asyncio.wait({task})
                server = served()
                assert await forward(forwarder, server, dict(scope))
                expected = "hi" if scope["type"] == "websocket" else server.body
                if scope["type"] == "websocket":
                    assert server.sent[1]["text"] == expected
                else:
                    assert server.body == (b"body" if scope["method"] == "POST" else b"") + b"/step"
                turns += 1
            assert turns > 3
            assert await receiver.drain(5)
            await forwarder.aclose()
            assert repr(forwarder) == "<Forwarder: 0 owners, 0 live, 0 idle, closed>"

    run(test())


def test_idle_connections_are_let_go(run: Run) -> None:
    async def test() -> None:
        with socket_directory() as directory:
            owner_side = asyncio.Event()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.setblocking(False)
            listener.bind(f"{directory}/{OWNER}.sock")
            listener.listen()

            async def serve() -> None:
                connected, _ = await asyncio.get_running_loop().sock_accept(listener)
                connected.setblocking(False)
                peer = Peer(connected)
                await peer.read_request()
                await peer.write(REPLY)
                assert await peer.ended()
                owner_side.set()
                peer.close()

            async with Forwarder(directory, idle_seconds=0.05) as forwarder, asyncio.TaskGroup() as tasks:
                tasks.create_task(serve())
                assert await forward(forwarder, Server())
                await owner_side.wait()
            listener.close()

    run(test())


@pytest.mark.usefixtures("shared")
def test_a_closed_forwarder_sends_nothing_more(run: Run) -> None:
    async def test() -> None:
        async with hop(ok) as (forwarder, receiver):
            assert await forward(forwarder, Server())
            await forwarder.aclose()
            await forwarder.aclose()
            with pytest.raises(OwnerBusyError):
                await forward(forwarder, Server())
            assert receiver.counters.received == 1

    run(test())


@pytest.mark.usefixtures("shared")
def test_closing_the_forwarder_ends_what_is_under_way(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STARTED)
            await receive()
            await receive()
            left.set()

        async with hop(app) as (forwarder, _):
            server = Server()
            task = asyncio.create_task(forward(forwarder, server))
            await server.until(lambda: bool(server.sent))
            await forwarder.aclose()
            with pytest.raises(ReplyCutError):
                await task
            await left.wait()

    run(test())


@pytest.mark.usefixtures("shared")
def test_an_early_reply_leaves_the_connection_usable(run: Run) -> None:
    """The app answers without reading an upload: what still arrives of it belongs to no later request."""

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(STARTED)
            await send({"type": "http.response.body", "body": scope["path"].encode()})

        async with hop(app) as (forwarder, _):
            for n in range(20):
                upload = Server(*[request_event(b"x" * 20_000, True) for _ in range(60)])
                assert await forward(forwarder, upload, post_scope(path="/upload"))
                server = Server()
                assert await forward(forwarder, server, http_scope(path=f"/{n}"))
                assert server.body == f"/{n}".encode()

    run(test())


# --- questions ---


def test_a_question_gets_its_answer(run: Run) -> None:
    async def test() -> None:
        asked = []

        async def on_ask(kind: str, key: str, asker: str, hung_up: asyncio.Event) -> Answer:
            asked.append((kind, key, asker))
            return Answer.GIVEN

        async with hop(ok, on_ask=on_ask) as (forwarder, receiver):
            assert await forwarder.ask(OWNER, "session", "s\udce9", ASKER) is Answer.GIVEN
            assert await forward(forwarder, Server())
            assert asked == [("session", "s\udce9", ASKER)]
            assert (forwarder.counters.opened, receiver.counters.asked) == (1, 1)
        async with hop(ok) as (forwarder, _):
            assert await forwarder.ask(OWNER, "session", "s", ASKER) is Answer.NOT_MINE

    run(test())


def test_an_owner_is_told_that_the_asker_hung_up(run: Run) -> None:
    async def test() -> None:
        entered, told = asyncio.Event(), asyncio.Event()

        async def on_ask(kind: str, key: str, asker: str, hung_up: asyncio.Event) -> Answer:
            entered.set()
            await hung_up.wait()
            told.set()
            return Answer.BUSY

        async with hop(ok, on_ask=on_ask) as (forwarder, receiver):
            task = asyncio.create_task(forwarder.ask(OWNER, "session", "s", ASKER))
            await entered.wait()
            task.cancel()
            await asyncio.wait({task})
            await told.wait()
            assert await receiver.drain(5)

    run(test())


def test_a_question_that_broke_is_unknown(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def on_ask(kind: str, key: str, asker: str, hung_up: asyncio.Event) -> Answer:
            raise ValueError("no answer")

        async with hop(ok, on_ask=on_ask) as (forwarder, _):
            with pytest.raises(OwnerUnreachableError):
                await forwarder.ask(OWNER, "session", "s", ASKER)

    run(test())
    assert "no answer" in caplog.text


def test_frames_of_a_reply_that_nobody_asked_for_close_the_connection(run: Run) -> None:
    async def test() -> None:
        async with raw_owner() as (forwarder, owner), asyncio.TaskGroup() as tasks:

            async def serve() -> None:
                peer = await owner.accept()
                await peer.read_request()
                await peer.write(REPLY + REPLY)
                assert await peer.ended()
                peer = await owner.accept()
                await peer.read_request()
                await peer.write_frame(RAISED)
                await peer.read_request()
                await peer.write_frame(END)

            tasks.create_task(serve())
            assert await forward(forwarder, Server())
            with pytest.raises(Exception, match="the app raised"):
                await forward(forwarder, Server())
            assert await forward(forwarder, Server())

    run(test())


async def fail() -> None:
    raise KeyError


async def fails_inside_a_task_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
        await asyncio.Event().wait()


async def fails_at_the_end_of_a_task_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())


async def fails_after_a_task_group() -> None:
    with contextlib.suppress(BaseExceptionGroup):
        await fails_at_the_end_of_a_task_group()
    raise ValueError


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "fails",
    [fails_inside_a_task_group, fails_at_the_end_of_a_task_group, fails_after_a_task_group, cancels_itself],
)
def test_an_app_whose_task_is_marked_as_cancelled_by_the_app_has_failed_as_any_other(
    run: Run, shared: bool, fails: Callable[[], Awaitable[None]]
) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/fails":
                await fails()
            await ok(scope, receive, send)

        async with hop(app) as (forwarder, receiver):
            failures = []
            for _ in range(2):
                try:
                    await forward(forwarder, Server(), http_scope(path="/fails"))
                except HomingError as error:
                    failures.append(type(error))
                assert await forward(forwarder, Server())
            gc.collect()  # were a task's exception not retrieved, it would be told now, and not within pytest's report
            assert failures == [RemoteAppError, RemoteAppError]
            assert len(receiver.connections) == (0 if shared else 1)  # nothing else has used up a connection
            assert len(receiver.shared) == (1 if shared else 0)
            assert await receiver.drain(5)

    run(test())


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.usefixtures("shared")
def test_whatever_the_app_raises_is_told_and_the_worker_goes_on(run: Run, error: type[BaseException]) -> None:
    """As under uvicorn, where a handler that calls `sys.exit` ends its request and not the process."""

    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/raises":
                raise error
            await ok(scope, receive, send)

        async with hop(app) as (forwarder, receiver):
            for _ in range(2):
                with pytest.raises(RemoteAppError):
                    await forward(forwarder, Server(), http_scope(path="/raises"))
                server = Server()
                assert await forward(forwarder, server)
                assert server.body == b"hello"
            assert await receiver.drain(5)

    run(test())
