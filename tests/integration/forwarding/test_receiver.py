"""The private socket: who may connect, what is refused, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import os
import resource
import socket
import stat
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import pytest
from tests.integration.forwarding.hop import (
    OWNER,
    Peer,
    Run,
    Server,
    connect,
    forward,
    hop,
    http_scope,
    post_scope,
    raw_forwarder,
    socket_directory,
    websocket_scope,
)

from homing.errors import OwnerUnreachableError
from homing.forwarding.acceptor import peer_uid
from homing.forwarding.frames import (
    ANSWER,
    ASK,
    BUSY,
    END,
    GONE,
    LAST,
    MINE,
    MINE_FIRST,
    REQUEST,
    SHOW,
    SHOWN,
    WHOLE,
    frame,
)
from homing.forwarding.heads import BODY_NONE, BODY_WHOLE, request_head
from homing.forwarding.private_socket import serve_private_socket
from homing.forwarding.receiver import Receiver

STARTED = {"type": "http.response.start", "status": 200, "headers": []}
GET = frame(REQUEST, request_head(0, (), http_scope(), BODY_NONE, ()))


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send(STARTED)
    await send({"type": "http.response.body", "body": b"ok"})


def test_the_socket_is_ours_alone_and_its_file_goes_last(run: Run) -> None:
    async def test() -> None:
        with socket_directory() as directory:
            path = f"{directory}/{OWNER}.sock"
            async with serve_private_socket(ok, path) as receiver:
                found = os.lstat(path)
                assert stat.S_ISSOCK(found.st_mode)
                assert stat.S_IMODE(found.st_mode) == 0o600
                assert receiver.listener.get_inheritable() is False
                peer = await connect(path)
                assert peer_uid(peer.socket) == os.getuid()
                with pytest.raises(OSError, match="in use"):
                    async with serve_private_socket(ok, path):
                        raise AssertionError
                await receiver.aclose()
                assert os.path.exists(path)
                assert await peer.ended()
                peer.close()
            assert not os.path.exists(path)

    run(test())


def test_another_socket_at_the_path_is_not_removed(run: Run) -> None:
    async def test() -> None:
        with socket_directory() as directory:
            path = f"{directory}/{OWNER}.sock"
            async with serve_private_socket(ok, path):
                os.unlink(path)
                with open(path, "w"):
                    pass
            assert os.path.exists(path)

    run(test())


def test_a_peer_of_another_user_is_not_heard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with hop(ok) as (forwarder, receiver):
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            with pytest.raises(Exception, match=r"closed|lost"):
                await forward(forwarder, Server())
            assert (receiver.counters.strangers, receiver.counters.received) == (1, 0)
            monkeypatch.undo()
            assert await forward(forwarder, Server())

    run(test())


@pytest.mark.parametrize(
    "data",
    [
        frame(99),
        frame(WHOLE),
        frame(REQUEST),
        frame(REQUEST, b"\xc1"),
        frame(REQUEST, msgspec.msgpack.encode({"a": 1})),
        frame(REQUEST, request_head(9, (), http_scope(), BODY_NONE, ())),
        frame(REQUEST, request_head(0, (), http_scope(asgi={}), BODY_NONE, ())),
        frame(REQUEST, request_head(0, (), http_scope(asgi={"spec_version": "x"}), BODY_NONE, ())),
        frame(REQUEST, request_head(0, (), http_scope(type="lifespan"), BODY_NONE, ())),
        frame(REQUEST, request_head(0, (), post_scope(2), BODY_WHOLE, (1, 2)), b"ab"),
        frame(REQUEST, request_head(0, (), post_scope(2), BODY_WHOLE, ()), b""),
        frame(ASK),
        frame(ASK, msgspec.msgpack.encode(["a", "b"])),
        frame(SHOW),
        frame(SHOW, msgspec.msgpack.encode(-1)),
        frame(SHOW, msgspec.msgpack.encode("all")),
        (REQUEST | (2**30 + 1) << 32).to_bytes(8, "little"),
        b"\xff" * 100,
    ],
)
def test_what_is_no_request_is_never_run_and_ends_the_connection(
    run: Run, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

        async with raw_forwarder(app) as (receiver, peer):
            await peer.write(data)
            assert await peer.ended()
            assert (receiver.counters.received, receiver.counters.malformed, receiver.in_flight) == (0, 1, 0)

    run(test())
    assert "closed a connection between workers" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        GET,
        frame(ASK, msgspec.msgpack.encode(["k", "s", "w"])),
        frame(SHOW, msgspec.msgpack.encode(1)),
        frame(50),
        frame(3, b"\xc1"),
    ],
)
def test_a_frame_out_of_turn_ends_the_connection_and_the_client(
    run: Run, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            assert (await receive())["type"] == "http.disconnect"
            left.set()

        async with raw_forwarder(app) as (receiver, peer):
            await peer.write(GET, data)
            assert await peer.ended()
            await left.wait()
            assert receiver.counters.malformed == 1

    run(test())


def test_frames_may_arrive_in_any_pieces(run: Run) -> None:
    async def test() -> None:
        bodies = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            event = await receive()
            bodies.append(event["body"])
            while event["more_body"]:
                event = await receive()
                bodies.append(event["body"])
            await ok(scope, receive, send)

        request = frame(REQUEST, request_head(0, (), post_scope(100), 2, (3,)), b"abc")
        data = request + frame(1, b"", b"x" * 90) + frame(LAST, b"", b"end")
        for size in (1, 7, 8, 9, len(request), len(data) - 1):
            bodies.clear()
            async with raw_forwarder(app) as (_, peer):
                for start in range(0, len(data), size):
                    await peer.write(data[start : start + size])
                    await asyncio.sleep(0)
                kind, _, payload = await peer.read_frame() or (0, b"", b"")
                if kind == MINE:
                    kind, _, payload = await peer.read_frame() or (0, b"", b"")
                assert (kind & ~MINE_FIRST, payload) == (WHOLE, b"ok")
            assert bodies == [b"abc", b"x" * 90, b"end"]

    run(test())


def test_mine_and_a_ready_reply_share_one_frame(run: Run) -> None:
    async def test() -> None:
        async with raw_forwarder(ok) as (_, peer):
            await peer.write(GET)
            read = await peer.read_frame()
            assert read is not None
            assert read[0] == WHOLE | MINE_FIRST
            assert read[2] == b"ok"

    run(test())


@pytest.mark.parametrize("early", [BODY_NONE, 2])
def test_mine_is_not_held_back_for_a_reply_that_takes_time(run: Run, early: int) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await ok(scope, receive, send)

        async with raw_forwarder(app) as (_, peer):
            await peer.write(frame(REQUEST, request_head(0, (), post_scope(3), early, ())))
            read = await peer.read_frame()
            assert read is not None
            assert read[0] == MINE
            go.set()
            read = await peer.read_frame()
            assert read is not None
            assert read[0] == WHOLE

    run(test())


@pytest.mark.parametrize("scope", [http_scope(), websocket_scope()])
def test_a_lost_forwarder_is_a_lost_client(run: Run, scope: dict[str, Any]) -> None:
    async def test() -> None:
        started, left = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            started.set()
            assert (await receive())["type"].endswith("disconnect")
            if scope["type"] == "http":
                await ok(scope, receive, send)
            else:
                with pytest.raises(OSError, match="left"):
                    await send({"type": "websocket.accept"})
            left.set()

        async with raw_forwarder(app) as (receiver, peer):
            await peer.write(frame(REQUEST, request_head(0, (), scope, BODY_NONE, ())))
            await started.wait()
            peer.close()
            await left.wait()
            assert await receiver.drain(5)

    run(test())


def test_a_client_that_left_is_told_to_an_app_that_only_sends(run: Run) -> None:
    async def test() -> None:
        raised = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await send(STARTED)
                while True:
                    await send({"type": "http.response.body", "body": b"x", "more_body": True})
                    await asyncio.sleep(0)
            except OSError:
                raised.set()
                raise

        async with raw_forwarder(app) as (receiver, peer):
            scope = http_scope(asgi={"version": "3.0", "spec_version": "2.5"})
            await peer.write(frame(REQUEST, request_head(0, (), scope, BODY_NONE, ())), frame(GONE))
            await raised.wait()
            kinds = []
            while (kinds or [0])[-1] != END:
                read = await peer.read_frame()
                assert read is not None
                kinds.append(read[0] & ~MINE_FIRST)
            assert await receiver.drain(5)

    run(test())


@pytest.mark.usefixtures("shared")
def test_drain_waits_for_what_is_in_flight_and_takes_what_is_new(run: Run) -> None:
    async def test() -> None:
        started, go = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/slow":
                started.set()
                await go.wait()
            await ok(scope, receive, send)

        async with hop(app) as (forwarder, receiver), asyncio.TaskGroup() as tasks:
            assert await receiver.drain(0.01)
            tasks.create_task(forward(forwarder, Server(), http_scope(path="/slow")))
            await started.wait()
            assert await forward(forwarder, Server())
            assert receiver.in_flight == 1
            assert not await receiver.drain(0.01)
            draining = tasks.create_task(receiver.drain(10))
            assert await forward(forwarder, Server())
            assert not draining.done()
            go.set()
            assert await draining

    run(test())


def test_closing_ends_apps_that_still_run(run: Run) -> None:
    async def test() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with hop(app) as (forwarder, receiver):
            task = asyncio.create_task(forward(forwarder, Server()))
            await started.wait()
            await receiver.aclose()
            assert cancelled.is_set()
            assert receiver.in_flight == 0
            with pytest.raises(OwnerUnreachableError):
                await task

    run(test())


def test_idle_connections_are_let_go_and_busy_ones_kept(run: Run) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await go.wait()
            await ok(scope, receive, send)

        with socket_directory() as directory:
            path = f"{directory}/{OWNER}.sock"

            async def decided(scope: Any, receive: Any, send: Any) -> None:
                scope["homing.hop"].mine()
                await app(scope, receive, send)

            async with serve_private_socket(decided, path, idle_seconds=0.02) as receiver:
                idle, busy = await connect(path), await connect(path)
                await busy.write(GET)
                assert await idle.ended()
                assert len(receiver.connections) == 1
                go.set()
                assert await busy.ended()
                idle.close()
                busy.close()

    run(test())


class SlowReader(Server):
    """A client that takes nothing until `open` is set, and the app that answers it."""

    receiver: Receiver

    def __init__(self) -> None:
        super().__init__()
        self.open.clear()
        self.complete = asyncio.Event()
        """Set once the app has sent its whole reply, of which the owner has a part still to send."""
        self.size = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until some of it stays with the owner, and complete the reply with that."""
        await send(STARTED)
        while not self.unsent:
            self.size += 40_000
            await send({"type": "http.response.body", "body": b"x" * 40_000, "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b""})
        self.complete.set()

    @property
    def unsent(self) -> bool:
        return any(each.transport.get_write_buffer_size() for each in self.receiver.connections)

    def assert_whole(self) -> None:
        assert self.sent_bytes == self.size
        assert self.sent[-1]["more_body"] is False


@pytest.mark.usefixtures("shared")
def test_a_complete_reply_is_not_cut_however_long_its_client_takes_to_read_it(run: Run) -> None:
    """The connection carries nothing new meanwhile, and is not idle."""

    async def test() -> None:
        client = SlowReader()
        async with hop(client.app, idle_seconds=0.04) as (forwarder, receiver):
            client.receiver = receiver
            asked = asyncio.create_task(forward(forwarder, client))
            await client.complete.wait()
            await asyncio.sleep(0.2)
            assert client.unsent
            client.open.set()
            assert await asked
            client.assert_whole()
            while receiver.connections:  # now it is
                await asyncio.sleep(0.01)

    run(test())


@pytest.mark.usefixtures("shared")
def test_a_drain_waits_until_complete_replies_are_sent(run: Run) -> None:
    async def test() -> None:
        client = SlowReader()
        async with hop(client.app) as (forwarder, receiver):
            client.receiver = receiver
            asked = asyncio.create_task(forward(forwarder, client))
            await client.complete.wait()
            while receiver.in_flight:
                await asyncio.sleep(0)
            assert not await receiver.drain(0.1)
            draining = asyncio.create_task(receiver.drain(10))
            await asyncio.sleep(0.1)
            assert not draining.done()
            client.open.set()
            assert await draining
            await receiver.aclose()
            assert await asked
            client.assert_whole()

    run(test())


@pytest.mark.usefixtures("shared")
def test_a_request_is_decided_once_and_before_it_is_answered(run: Run) -> None:
    async def test() -> None:
        errors = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for call in (send(STARTED), send({"type": "http.response.early_hint", "links": []})):
                with pytest.raises(RuntimeError, match="mine") as raised:
                    await call
                errors.append(raised.value)
            scope["homing.hop"].mine()
            for again in (scope["homing.hop"].mine, scope["homing.hop"].not_mine):
                with pytest.raises(RuntimeError, match="once"):
                    again()
            await ok(scope, receive, send)

        async with hop(app, decide=False) as (forwarder, _):
            assert await forward(forwarder, Server())
        assert len(errors) == 2

        async def refuses(scope: Any, receive: Any, send: Any) -> None:
            scope["homing.hop"].not_mine()
            with pytest.raises(RuntimeError, match="not this worker's"):
                await send(STARTED)

        async with hop(refuses, decide=False) as (forwarder, receiver):
            assert not await forward(forwarder, Server())
            assert await receiver.drain(5)

    run(test())


@pytest.mark.usefixtures("shared")
def test_the_note_and_the_reason_arrive(run: Run) -> None:
    async def test() -> None:
        hops = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            hops.append((scope["homing.hop"].reason.name, scope["homing.hop"].note))
            await ok(scope, receive, send)

        async with hop(app) as (forwarder, _):
            notes = ((), ("session", 1, None, b"x"), ("s\udce9", ("a", 1), [2]))
            for note in notes:
                assert await forward(forwarder, Server(), note=note)
        assert hops == [("OWNED", note) for note in notes]

    run(test())


def test_an_answer_follows_a_question(run: Run) -> None:
    async def test() -> None:
        async with raw_forwarder(ok) as (_, peer):
            await peer.write(frame(ASK, msgspec.msgpack.encode(["session", "s", "w"])), GET)
            read = await peer.read_frame()
            assert read is None or read[0] == ANSWER

    run(test())


def test_a_worker_that_has_no_descriptor_left_takes_the_request_once_it_has(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Its listener must not accept and drop: the sender would take that for death."""

    async def test() -> None:
        async with raw_forwarder(ok) as (receiver, idle):
            await idle.write(GET)
            assert await idle.read_frame()
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (connecting.fileno() + 1, hard))
            try:
                connecting.connect(receiver.listener.getsockname())
                connecting.setblocking(False)
                # The connection that is idle is let go to make room for the one that waits.
                assert await idle.ended()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            peer = Peer(connecting)
            await peer.write(GET)
            assert await peer.read_frame()
            peer.close()

    run(test())
    assert "cannot take a connection" in caplog.text


def test_an_error_that_nobody_expects_does_not_make_a_worker_silent(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as alive, and every request for its sessions would wait for its owner timeout."""

    async def test() -> None:
        async with raw_forwarder(ok) as (receiver, first):
            await first.write(GET)
            assert await first.read_frame()
            loop, errors = asyncio.get_running_loop(), [errno.EPERM, errno.EIO]
            accept = loop.sock_accept

            async def failing(sock: socket.socket) -> Any:
                if errors:
                    raise OSError(errors.pop(), "as the kernel might say")
                return await accept(sock)

            monkeypatch.setattr(loop, "sock_accept", failing)
            # The accept under way is the last good one.
            for _ in range(2):
                peer = await connect(receiver.listener.getsockname())
                await peer.write(GET)
                assert await peer.read_frame()
                peer.close()
            assert errors == []
            monkeypatch.undo()

    run(test())
    assert caplog.text.count("cannot take connections from other workers; next try in") == 2


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_those_for_whom_there_is_no_descriptor_are_told_that_the_worker_is_busy(run: Run) -> None:
    ran: list[object] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(scope["path"])
        await ok(scope, receive, send)

    async def test() -> None:
        async with raw_forwarder(app) as (receiver, idle):
            idle.close()
            for _ in range(2):  # twice: the descriptor that is kept for this is there again
                turned = [socket.socket(socket.AF_UNIX) for _ in range(3)]
                with no_descriptors():
                    peers = []
                    for connecting in turned:
                        connecting.connect(receiver.listener.getsockname())
                        connecting.setblocking(False)
                        peers.append(Peer(connecting))
                        await peers[-1].write(GET)
                    for peer in peers:
                        kind, _, _ = await peer.read_frame()
                        assert kind == BUSY
                        assert await peer.ended()
                        peer.close()
                assert not ran
            assert receiver.counters.turned_away == 6
            peer = await connect(receiver.listener.getsockname())
            await peer.write(GET)
            assert await peer.read_frame()
            assert len(ran) == 1
            peer.close()

    run(test())


class Watched(set[Any]):
    """Says when something is added."""

    def __init__(self, added: asyncio.Event) -> None:
        super().__init__()
        self._added = added

    def add(self, item: Any) -> None:
        super().add(item)
        self._added.set()


def test_one_that_is_turned_away_and_has_sent_nothing_is_served_later(run: Run) -> None:
    """Its write must not fail: it would take that for death."""

    async def test() -> None:
        async with raw_forwarder(ok) as (receiver, idle):
            idle.close()
            late, quick = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
            with no_descriptors():
                late.connect(receiver.listener.getsockname())
                late.setblocking(False)
                quick.connect(receiver.listener.getsockname())
                quick.setblocking(False)
                taken = asyncio.Event()
                receiver.connections = Watched(taken)
                await taken.wait()
            one, other = Peer(late), Peer(quick)
            for peer in (one, other):
                await peer.write(GET)
                assert (await peer.read_frame())[0] != BUSY
                peer.close()

    run(test())


@pytest.mark.usefixtures("shared")
def test_each_request_runs_in_a_copy_of_the_given_context(run: Run) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def test() -> None:
        values = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            values.append(variable.get())
            variable.set("left over")
            await ok(scope, receive, send)

        context = contextvars.copy_context()
        context.run(variable.set, "the server's")
        variable.set("the lifespan's")
        for options in ({}, {"context": context}):
            async with hop(app, **options) as (forwarder, _):
                await forward(forwarder, Server())
                await forward(forwarder, Server())
        assert values == ["the lifespan's"] * 2 + ["the server's"] * 2

    run(test())


def test_whoever_asks_what_is_here_is_shown_it_in_parts_and_may_ask_again(run: Run) -> None:
    async def test() -> None:
        asked: list[int] = []

        async def show(limit: int) -> AsyncGenerator[bytes, None]:
            asked.append(limit)
            for part in (b"one", b"two"):
                yield part

        async with raw_forwarder(ok, on_show=show) as (receiver, peer):
            for _ in range(2):
                await peer.write(frame(SHOW, msgspec.msgpack.encode(7)))
                shown = [await peer.read_frame() for _ in range(3)]
                assert shown == [(SHOWN, b"", b"one"), (SHOWN, b"", b"two"), (SHOWN, b"", b"")]
            await peer.write(GET)
            assert await peer.read_frame() is not None
            assert asked == [7, 7]
            assert receiver.counters.malformed == 0

    run(test())


def test_whoever_hangs_up_while_it_is_shown_something_leaves_nothing_in_flight(run: Run) -> None:
    async def test() -> None:
        ended = asyncio.Event()

        async def show(limit: int) -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield b"x" * 100_000
            finally:
                ended.set()

        async with raw_forwarder(ok, on_show=show) as (receiver, peer):
            await peer.write(frame(SHOW, msgspec.msgpack.encode(1)))
            assert await peer.read_frame() is not None
            peer.close()
            await receiver.drain(60.0)
            assert receiver.in_flight == 0
            await ended.wait()

    run(test())
