"""A WebSocket through the hop: messages whole and exact, codes and reasons as they were, slow ends slow."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from tests.integration.forwarding.hop import Event, Run, Server, forward, hop, websocket_scope
from tests.integration.forwarding.test_http import stands_still

from homing.types import Message

CONNECT = {"type": "websocket.connect"}
DENIAL = {"type": "websocket.http.response.start", "status": 401, "headers": [(b"a", b"b")]}
ACCEPT = {"type": "websocket.accept", "subprotocol": "two", "headers": [(b"x", b"\xe9"), (b"x", b"2")]}


async def talks(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    seen.append(await receive())
    await send(ACCEPT)
    while True:
        event = await receive()
        seen.append(event)
        if event["type"] == "websocket.disconnect":
            return
        await send({**event, "type": "websocket.send"})


async def refuses(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    seen.append(await receive())
    await send({"type": "websocket.close", "code": 4403, "reason": "no"})


async def denies(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    seen.append(await receive())
    await send({"type": "websocket.http.response.start", "status": 401, "headers": [(b"a", b"b"), (b"a", b"c")]})
    await send({"type": "websocket.http.response.body", "body": b"no", "more_body": True})
    await send({"type": "websocket.http.response.body", "body": b"", "more_body": False})


async def closes(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    seen.append(await receive())
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": 4404, "reason": "göne"})
    seen.append(await receive())


async def returns(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    seen.append(await receive())
    await send({"type": "websocket.accept"})


LARGE = bytes(range(256)) * (20 * 2**20 // 256)
LEAVES = {"type": "websocket.disconnect", "code": 4001, "reason": "bye"}


@pytest.mark.parametrize(
    ("app", "events"),
    [
        (
            talks,
            [
                {"type": "websocket.receive", "text": "é\0"},
                {"type": "websocket.receive", "bytes": b""},
                {"type": "websocket.receive", "text": ""},
                {"type": "websocket.receive", "bytes": None, "text": "both"},
                {"type": "websocket.receive", "bytes": b"both", "text": None},
                {"type": "websocket.receive", "bytes": b"x", "compressed": True},
                LEAVES,
            ],
        ),
        (
            talks,
            [{"type": "websocket.receive", "bytes": LARGE}, {"type": "websocket.receive", "text": "x" * 10**6}, LEAVES],
        ),
        (refuses, []),
        (denies, []),
        (closes, [{"type": "websocket.disconnect", "code": 4404, "reason": "göne"}]),
        (returns, []),
        (talks, [{"type": "websocket.disconnect", "code": 1005}]),
    ],
)
def test_app_and_client_see_what_they_see_without_the_hop(run: Run, app: Any, events: list[Event]) -> None:
    async def served(forwarded: bool) -> tuple[list[Event], list[Event]]:
        seen: list[Event] = []

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send, seen)

        server = Server(CONNECT, *events)
        if forwarded:
            async with hop(noted) as (forwarder, _):
                assert await forward(forwarder, server, websocket_scope())
        else:
            await noted(websocket_scope(), server.receive, server.send)
        return seen, server.sent

    async def test() -> None:
        direct, through = await served(False), await served(True)
        assert through == direct

    run(test())


class TurnsOfSends(Server):
    """Notes in which turn of the event loop each event was sent."""

    def __init__(self, *events: Event) -> None:
        super().__init__(*events)
        self.turn = 0
        self.turns: list[int] = []

    async def send(self, event: Event) -> None:
        asyncio.get_running_loop().call_soon(self._turned)
        self.turns.append(self.turn)
        await super().send(event)

    def _turned(self) -> None:
        self.turn += 1


def test_the_start_of_a_denial_waits_for_its_body_so_that_both_are_sent_in_one_turn(run: Run) -> None:
    """uvicorn's legacy WebSockets send what they have in the turn after the start."""

    async def test() -> None:
        going_on = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send(DENIAL)
            await going_on.wait()
            await send({"type": "websocket.http.response.body", "body": b"no"})

        server = TurnsOfSends(CONNECT)
        async with hop(app) as (forwarder, _):
            forwarded = asyncio.create_task(forward(forwarder, server, websocket_scope()))
            await stands_still(lambda: server.received)
            early = list(server.sent)
            going_on.set()
            assert await forwarded
        assert early == []
        assert [event["type"] for event in server.sent] == [DENIAL["type"], "websocket.http.response.body"]
        assert server.turns == [0, 0]

    run(test())


def test_the_scope_is_the_one_that_the_server_made(run: Run) -> None:
    async def test() -> None:
        scopes = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)
            await send({"type": "websocket.close"})

        async with hop(app, state=dict) as (forwarder, _):
            await forward(forwarder, Server(CONNECT), websocket_scope())
        del scopes[0]["homing.hop"]
        assert scopes[0] == websocket_scope()

    run(test())


def test_nothing_is_taken_from_the_client_before_mine(run: Run) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["homing.hop"].not_mine()

        async with hop(app, decide=False) as (forwarder, _):
            server = Server(CONNECT, {"type": "websocket.receive", "text": "x"})
            assert not await forward(forwarder, server, websocket_scope())
            assert (server.received, server.sent) == (0, [])

    run(test())


def test_both_directions_flow_while_the_other_stands_still(run: Run) -> None:
    """A client that does not read its messages can still send its own."""

    async def test() -> None:
        sent, got = 0, asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})

            async def stream() -> None:
                nonlocal sent
                while True:
                    await send({"type": "websocket.send", "bytes": bytes(60_000)})
                    sent += 60_000

            streaming = asyncio.create_task(stream())
            for n in range(50):
                assert (await receive())["text"] == str(n)
            got.set()
            streaming.cancel()
            await asyncio.wait({streaming})

        async with hop(app) as (forwarder, _), asyncio.TaskGroup() as tasks:
            server = Server(CONNECT)
            server.keep = False
            server.open.clear()
            tasks.create_task(forward(forwarder, server, websocket_scope()))
            await server.blocked.wait()
            await stands_still(lambda: sent)
            assert sent < 2 * 2**20
            for n in range(50):
                server.put({"type": "websocket.receive", "text": str(n)})
            await got.wait()
            server.open.set()

    run(test())


def test_an_app_that_does_not_read_bounds_what_is_taken_from_the_client(run: Run) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            await go.wait()
            for n in range(5000):
                assert (await receive())["text"] == str(n) * 200
            await send({"type": "websocket.close"})

        async with hop(app) as (forwarder, _), asyncio.TaskGroup() as tasks:
            server = Server(CONNECT, *[{"type": "websocket.receive", "text": str(n) * 200} for n in range(5000)])
            tasks.create_task(forward(forwarder, server, websocket_scope()))
            await server.until(lambda: bool(server.sent))
            await stands_still(lambda: server.received)
            assert server.received * 800 < 2 * 2**20
            go.set()

    run(test())


def test_a_disconnect_is_given_again_to_an_app_that_asks_again(run: Run) -> None:
    async def test() -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            seen.extend([await receive(), await receive()])
            with pytest.raises(OSError, match="left"):
                await send({"type": "websocket.send", "text": "late"})

        async with hop(app) as (forwarder, _):
            assert await forward(forwarder, Server(CONNECT, LEAVES), websocket_scope())
        assert seen == [LEAVES, LEAVES]

    run(test())


class ClosedServer(Server):
    """A server whose client has closed its WebSocket: it tells whoever sends at once, and whoever receives why."""

    def leave(self, error: type[Exception]) -> None:
        self.raises = error("the client has left")
        if not isinstance(self.raises, OSError):
            self.put(LEAVES)  # uvicorn's with `websockets`: a mistake, since the disconnect has been taken before

    async def send(self, event: Message) -> None:
        if isinstance(self.raises, OSError):
            self.put(LEAVES)  # a moment later
        elif self.raises is not None:
            while self.received < 2:
                await asyncio.sleep(0)
        await super().send(event)


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_the_code_with_which_a_client_left_reaches_an_app_that_was_sending(run: Run, error: type[Exception]) -> None:
    async def test() -> None:
        seen: list[Event] = []
        server = ClosedServer(CONNECT)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            await server.until(lambda: bool(server.sent))
            server.leave(error)
            with contextlib.suppress(OSError):
                while True:
                    await send({"type": "websocket.send", "text": "more"})
                    await asyncio.sleep(0)
            seen.extend([await receive(), await receive()])

        async with hop(app) as (forwarder, _):
            assert await forward(forwarder, server, websocket_scope())
        assert seen == [LEAVES, LEAVES]

    run(test())


def test_a_worker_that_stops_closes_the_websockets_of_others_as_a_server_does_its_own(run: Run) -> None:
    """1012, and the app is told so; one that is accepted after that is closed as it opens, and one that is refused is not."""

    async def test() -> None:
        seen: list[Event] = []
        accepts = asyncio.Event()
        refused: list[Exception] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(await receive())
            if scope["path"] == "/late":
                await accepts.wait()
            if scope["path"] == "/refused":
                await accepts.wait()
                await send({"type": "websocket.close", "code": 4403, "reason": "no"})
                return
            await send({"type": "websocket.accept"})
            seen.append(await receive())
            try:
                await send({"type": "websocket.send", "text": "too late"})
            except OSError as error:
                refused.append(error)

        clients = {path: Server(CONNECT) for path in ("/open", "/late", "/refused")}
        async with hop(app) as (forwarder, receiver):
            asked = [
                asyncio.create_task(forward(forwarder, client, websocket_scope(path=path)))
                for path, client in clients.items()
            ]
            await clients["/open"].until(lambda: bool(clients["/open"].sent))
            while len(seen) < len(clients):
                await asyncio.sleep(0)
            receiver.end_websockets()
            accepts.set()
            assert await receiver.drain(10)
            assert all(await asyncio.gather(*asked))
        closed = {"type": "websocket.close", "code": 1012, "reason": ""}
        for path in ("/open", "/late"):
            assert [event["type"] for event in clients[path].sent] == ["websocket.accept", "websocket.close"]
            assert clients[path].sent[-1] == closed
        assert [event["code"] for event in clients["/refused"].sent] == [4403]
        assert seen.count({"type": "websocket.disconnect", "code": 1012}) == len(refused) == 2

    run(test())
