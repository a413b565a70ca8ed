"""The same bytes to a uvicorn that runs the app, and to one that forwards: the same bytes come back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
import websockets
from tests.integration.forwarding.hop import OWNER, Run, hop
from websockets.asyncio.client import connect

from homing.forwarding.forwarder import replayable
from homing.types import ASGIApp, Reason


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, http: str) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=http, log_config=None, lifespan="off", ws="websockets-sansio")  # type: ignore[arg-type]
        server = uvicorn.Server(config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            try:
                yield listener.getsockname()[1]
            finally:
                server.should_exit = True


@contextlib.asynccontextmanager
async def serving_either(app: ASGIApp, forwarded: bool, http: str = "httptools") -> AsyncIterator[int]:
    """A server that runs the app, or forwards every request to a worker that does."""
    if not forwarded:
        async with serving(app, http) as port:
            yield port
        return
    async with hop(app) as (forwarder, _):

        async def front(scope: Any, receive: Any, send: Any) -> None:
            await forwarder.forward(OWNER, Reason.OWNED, (), scope, replayable(receive), send)

        async with serving(front, http) as port:
            yield port


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send each part once the server has answered the one before, with 1xx at least; then all that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    for part in parts[:-1]:
        writer.write(part)
        answer += await reader.readuntil(b"\r\n\r\n")
    writer.write(parts[-1])
    with contextlib.suppress(ConnectionResetError):
        answer += await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
    return re.sub(rb"\r\ndate: [^\r]*", b"", answer)


async def app(scope: Any, receive: Any, send: Any) -> None:
    path = scope["path"]

    async def reply(status: int, headers: list[tuple[bytes, bytes]], *parts: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": parts[-1]})

    async def body() -> bytes:
        whole, more = b"", True
        while more:
            event = await receive()
            whole += event["body"]
            more = event["more_body"]
        return whole

    match path:
        case "/echo":
            whole = await body()
            await reply(200, [(b"content-length", str(len(whole)).encode())], whole)
        case "/scope":
            shown = {key: value for key, value in scope.items() if key not in ("state", "homing.hop")}
            shown["client"] = shown["client"][0]
            shown["server"] = shown["server"][0]
            text = repr(sorted(shown.items())).encode()
            await reply(200, [(b"content-length", str(len(text)).encode())], text)
        case "/stream":
            await reply(
                200, [(b"x", b"1"), (b"X", b"2"), (b"set-cookie", b"a"), (b"set-cookie", b"b")], b"a", b"", b"bc", b""
            )
        case "/not-modified":
            await reply(304, [(b"content-length", b"1234")], b"")
        case "/empty":
            await reply(204, [], b"")
        case "/long":
            await reply(200, [(b"x", b"y" * 60_000), (b"z", b"\xe9"), (b"content-length", b"2")], b"ok")
        case "/raises":
            raise ValueError("the app's own")
        case "/cut":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})
            raise ValueError("the app's own")
        case "/half":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})
        case "/nothing":
            pass
        case "/refuses":
            await reply(413, [(b"content-length", b"2"), (b"connection", b"close")], b"no")
        case "/bad-header":
            await reply(200, [(b"a", b"b\r\nc: d")], b"")
        case "/too-long":
            await reply(200, [(b"content-length", b"2")], b"longer")


def request(path: bytes, *lines: bytes, method: bytes = b"GET", body: bytes = b"", last: bool = True) -> bytes:
    lines = (b"host: example", *((b"connection: close",) if last else ()), *lines)
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", *lines, b"", body])


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_the_client_gets_the_same_bytes(run: Run, http: str) -> None:
    cases = [
        (request(b"/scope?a=%20b&&c"),),
        (request(b"/scope", b"X-A:  b", b"x-a: \xe9", b"te: trailers", b"keep-alive: 5", b"x: "),),
        (b"GET /scope HTTP/1.0\r\n\r\n",),
        (request(b"/stream"),),
        (b"GET /stream HTTP/1.0\r\n\r\n",),
        (request(b"/stream", method=b"HEAD"),),
        (request(b"/not-modified"),),
        (request(b"/empty"),),
        (request(b"/long"),),
        (request(b"/raises"),),
        (request(b"/cut"),),
        (request(b"/half"),),
        (request(b"/nothing"),),
        (request(b"/bad-header"),),
        (request(b"/too-long"),),
        (request(b"/echo", b"content-length: 0", method=b"POST"),),
        (request(b"/echo", b"content-length: 5", method=b"POST", body=b"hello"),),
        (request(b"/echo", b"content-length: 300000", method=b"POST", body=b"x" * 300_000),),
        (request(b"/echo", b"transfer-encoding: chunked", method=b"POST", body=b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),),
        (request(b"/echo", b"content-length: 5", b"expect: 100-continue", method=b"POST"), b"hello"),
        (request(b"/refuses", b"content-length: 5", b"expect: 100-continue", method=b"POST"),),
        (request(b"/echo", last=False) + request(b"/empty", last=False) + request(b"/stream"),),
        (request(b"/echo", b"content-length: 3", method=b"POST", body=b"abc", last=False) + request(b"/scope"),),
    ]

    async def answers(forwarded: bool) -> list[bytes]:
        async with serving_either(app, forwarded, http) as port:
            return [await exchange(port, *parts) for parts in cases]

    async def test() -> None:
        direct, through = await answers(False), await answers(True)
        for parts, here, there in zip(cases, direct, through, strict=True):
            assert there == here, parts[0][:80]
        assert b"100 Continue" in through[-4]
        assert b"100 Continue" not in through[-3]

    run(test())


def test_websockets_are_the_same(run: Run) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        match scope["path"]:
            case "/refuses":
                await send({"type": "websocket.close"})
            case "/denies":
                await send({"type": "websocket.http.response.start", "status": 418, "headers": [(b"x-a", b"b")]})
                await send({"type": "websocket.http.response.body", "body": b"teapot"})
            case "/closes":
                await send({"type": "websocket.accept"})
                await send({"type": "websocket.close", "code": 4404, "reason": "gone"})
                closed.append(await receive())
            case "/returns":
                await send({"type": "websocket.accept"})
            case "/raises":
                await send({"type": "websocket.accept"})
                raise ValueError("the app's own")
            case "/echo":
                await send(
                    {"type": "websocket.accept", "subprotocol": scope["subprotocols"][1], "headers": [(b"x", b"y")]}
                )
                while (event := await receive())["type"] == "websocket.receive":
                    await send({**event, "type": "websocket.send"})
                closed.append(event)
                ended.set()

    closed: list[Any] = []
    ended = asyncio.Event()

    async def seen(forwarded: bool) -> list[Any]:
        closed.clear()
        ended.clear()
        found: list[Any] = []
        async with serving_either(app, forwarded) as port:
            for path in ("/refuses", "/denies"):
                with pytest.raises(websockets.InvalidStatus) as raised:
                    async with connect(f"ws://127.0.0.1:{port}{path}"):
                        pass
                response = raised.value.response
                found.append((response.status_code, response.body, response.headers.get("x-a")))
            for path in ("/closes", "/returns", "/raises"):
                async with connect(f"ws://127.0.0.1:{port}{path}") as socket:
                    with pytest.raises(websockets.ConnectionClosed) as lost:
                        await socket.recv()
                    found.append(lost.value.rcvd and (lost.value.rcvd.code, lost.value.rcvd.reason))
            uri = f"ws://127.0.0.1:{port}/echo"
            async with connect(uri, subprotocols=["one", "two"], compression=None, max_size=None) as socket:  # type: ignore[list-item]
                assert socket.response is not None
                found.append((socket.subprotocol, socket.response.headers["x"]))
                for message in ("é", "", b"", b"\0\xff", "x" * 2**20, b"y" * 16 * 2**20):
                    await socket.send(message)
                    assert await socket.recv() == message
                await socket.close(4001, "bye")
            await ended.wait()
        return [*found, *closed]

    async def test() -> None:
        direct = await seen(False)
        assert await seen(True) == direct

    run(test())


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("phase", ["body", "handler", "stream"])
def test_a_client_that_leaves_is_seen_at_the_owner(run: Run, phase: str) -> None:
    async def test() -> None:
        reached, left = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            event = await receive()
            if phase == "stream":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            reached.set()
            while event["type"] != "http.disconnect":
                event = await receive()
            left.set()

        async with serving_either(app, True) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                request(
                    b"/",
                    *([b"content-length: 10"] if phase == "body" else []),
                    body=b"12345" if phase == "body" else b"",
                )
            )
            await reached.wait()
            writer.transport.abort()
            await left.wait()

    run(test())
