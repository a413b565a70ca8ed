"""Which bodies cross with their heads over a shared connection: those that the server has, whole, and that nobody has changed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from tests.integration.forwarding.hop import OWNER, Run, hop, shared_with

from homing.forwarding.forwarder import Counters, replayable
from homing.runtime.protocol import HomingHttpToolsProtocol
from homing.types import ASGIApp, Message, Reason, Receive, Scope

Around = Callable[[Receive], Awaitable[Receive]]
"""What stands between the server and the router: given the server's `receive`, it gives the router's."""


async def nothing(receive: Receive) -> Receive:
    return receive


async def shouts(receive: Receive) -> Receive:
    async def changed() -> Message:
        event = await receive()
        return {**event, "body": event["body"].upper()} if event["type"] == "http.request" else event

    return changed


async def has_read_it(receive: Receive) -> Receive:
    taken = [await receive()]

    async def again() -> Message:
        return taken.pop() if taken else await receive()

    return again


async def echo(scope: Any, receive: Any, send: Any) -> None:
    event = await receive()
    body = event["body"]
    while event["more_body"]:
        event = await receive()
        body += event["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def forwarding(around: Around = nothing, app: ASGIApp = echo) -> AsyncIterator[tuple[int, Counters]]:
    """A server with homing's protocol that forwards every request, small ones over a shared connection."""
    async with hop(app, shared_from=0) as (forwarder, _):
        await shared_with(forwarder)

        async def front(scope: Scope, receive: Any, send: Any) -> None:
            forwards = replayable(await around(receive))
            await forwarder.forward(OWNER, Reason.OWNED, (), scope, forwards, send)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(front, http=HomingHttpToolsProtocol, log_config=None, lifespan="off")
            server = uvicorn.Server(config)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.serve(sockets=[listener]))
                try:
                    yield listener.getsockname()[1], forwarder.counters
                finally:
                    server.should_exit = True


def post(body: bytes, *more: bytes) -> bytes:
    head = [b"POST /echo HTTP/1.1", b"host: a", b"content-length: %d" % len(body), *more, b"", b""]
    return b"\r\n".join(head) + body


async def answers(port: int, *requests: bytes) -> list[bytes]:
    """The bodies of the replies to these, which are sent one after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bodies = []
    for request in requests:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
    writer.close()
    await writer.wait_closed()
    return bodies


def test_small_ones_that_are_here_cross_with_their_heads(run: Run) -> None:
    async def test() -> None:
        async with forwarding() as (port, counters):
            bodies = [b"one", b"x" * 16_384, b"three"]
            assert await answers(port, *(post(body) for body in bodies)) == bodies
            assert counters.shared == 3

    run(test())


@pytest.mark.parametrize(
    ("around", "seen"), [(shouts, b"BODY"), (has_read_it, b"body")], ids=["changed on its way", "read before"]
)
def test_what_the_router_would_read_counts_and_not_what_the_server_has(around: Around, seen: bytes, run: Run) -> None:
    async def test() -> None:
        async with forwarding(around) as (port, counters):
            assert await answers(port, post(b"body"), post(b"body")) == [seen] * 2
            assert counters.shared == 0

    run(test())


def test_larger_ones_and_those_still_to_come_have_a_connection_of_their_own(run: Run) -> None:
    async def test() -> None:
        begun = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await echo(scope, receive, send)

        async with forwarding(app=app) as (port, counters):
            assert await answers(port, post(b"x" * 16_385)) == [b"x" * 16_385]
            begun.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            whole = post(b"in two parts")
            writer.write(whole[:-5])
            await begun.wait()
            writer.write(whole[-5:])
            assert (await reader.readuntil(b"parts")).endswith(b"in two parts")
            writer.close()
            assert counters.shared == 0

    run(test())


def test_the_first_of_two_that_came_at_once_gets_its_own_body(run: Run) -> None:
    async def test() -> None:
        async with forwarding() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(b"first") + post(b"second"))
            assert (await reader.readuntil(b"first")).endswith(b"\r\n\r\nfirst")
            assert (await reader.readuntil(b"second")).endswith(b"\r\n\r\nsecond")
            writer.close()

    run(test())


def test_an_app_that_waits_after_its_body_hears_that_its_client_has_left(run: Run) -> None:
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == {"type": "http.request", "body": b"body", "more_body": False}
        assert await receive() == {"type": "http.disconnect"}
        left.set()

    async def test() -> None:
        async with forwarding(app=app) as (port, counters):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(b"body"))
            while not counters.opened:  # called to a connection of its own
                await asyncio.sleep(0.01)
            writer.close()
            await left.wait()

    run(test())
