"""`homing run` with each way to be reached: TLS, HTTP/2, a Unix socket, a root path, proxy headers.

One request of a session, sent to the worker that owns it and to another one, and the same bytes to plain uvicorn with the
same options: all three apps see the same, and all three clients get the same.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.differential.columns import before_refusal, difference, of_reply, of_websocket, told
from tests.support.http2 import Exchange, Http2, connect_http2
from tests.support.pair import certificate
from tests.support.raw import TEXT, WebSocketWire, Wire, close_frame, connect, frame, request
from tests.support.recorder import (
    NAME_ENV,
    STAGE_ENV,
    Performance,
    Stage,
    body,
    die,
    open_stage,
    read_body,
    read_until,
    receive,
    respond,
    send,
    start,
    wait,
)
from tests.support.servers import ADDRESS, STARTED, ServerProcess, homing_run, run_process, uvicorn_run
from tests.support.workers import TRIES, answering

APP = "tests.support.recorder:app"
SESSION = "the-session"
PLAIN, LOCAL, FORWARDED = COLUMNS = ("plain", "local", "forwarded")


@dataclass
class Place:
    """Where a client connects for one column: a server, and of its workers the one to reach (None: any)."""

    server: ServerProcess
    address: Any
    pid: int | None = None


class Servers:
    """`homing run` with two workers, the first of which owns the session, and plain uvicorn. Made by `open_servers`."""

    def __init__(self, stage: Stage, places: dict[str, Place], tls: ssl.SSLContext | None) -> None:
        self.stage = stage
        self.places = places
        self.tls = tls
        self._numbers = itertools.count()

    def case(self, *steps: Any) -> str:
        name = f"case-{next(self._numbers)}"
        self.stage.script(name, [step for each in steps for step in (each if isinstance(each, list) else [each])])
        return name

    @asynccontextmanager
    async def wire(self, column: str) -> AsyncIterator[Wire]:
        place = self.places[column]
        for _ in range(TRIES):
            async with connect(place.address, tls=self.tls) as wire:
                if place.pid in (None, await answering(wire)):
                    yield wire
                    return
        raise AssertionError(f"worker {place.pid} accepted none of {TRIES} connections")

    @asynccontextmanager
    async def http2(self, column: str) -> AsyncIterator[Http2]:
        place = self.places[column]
        for _ in range(TRIES):
            async with connect_http2(place.address, tls=self.tls) as client:
                reply = await client.reply(client.begin("GET", "/"))
                if place.pid in (None, int(reply.data.split()[-1])):
                    yield client
                    return
        raise AssertionError(f"worker {place.pid} accepted none of {TRIES} connections")

    async def performance(self, case: str, column: str) -> Performance:
        performance = await self.stage.performance(case)
        owner = self.places[PLAIN].server.pid if column == PLAIN else self.places[LOCAL].pid
        assert performance.pid == owner, f"{column}: served by {performance.pid}, not by {owner}"
        return performance

    async def app(self, case: str, column: str, ends: Sequence[Any]) -> dict[str, Any]:
        """What the app saw; `ends` are the client's and the server's end of the connection."""
        performance = await self.performance(case, column)
        records = await performance.done()
        scope = dict(performance.scope)
        for key, end in zip(("client", "server"), ends, strict=True):
            if scope[key] == end:
                scope[key] = (type(scope[key]), "this end of the connection")
        scope["headers"] = [(name, b"case" if name == b"x-case" else value) for name, value in scope["headers"]]
        return {"scope": scope, "records": told(records, exact=False)}


@asynccontextmanager
async def open_servers(*options: str, tls: bool = False, unix: bool = False) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        # Short, since the path of a Unix socket is.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homing-reach-")))
        stage = await stack.enter_async_context(open_stage(f"{directory}/stage"))
        context = certificate(directory) if tls else None
        if tls:
            options += ("--ssl-certfile", f"{directory}/cert.pem", "--ssl-keyfile", f"{directory}/key.pem")
        env = {STAGE_ENV: stage.path, NAME_ENV: "worker", "HOMING_SESSION_SOCKET_DIR": None}

        async def started(name: str, argv: list[str], workers: int) -> Place:
            argv = [*argv, "--no-access-log", *options, *(("--uds", f"{directory}/{name}") if unix else ())]
            server = await stack.enter_async_context(run_process(argv, env=env))
            address: Any = f"{directory}/{name}"
            if not unix:
                (match, *_) = await server.log.until(ADDRESS)
                address = (match[1], int(match[2]))
            await server.log.until(STARTED, workers)
            await server.log.until("running on|all 2 workers are ready")
            return Place(server, address)

        plain, routed = await asyncio.gather(
            started("plain", uvicorn_run(APP), 1),
            started("routed", homing_run(APP, "--workers", "2", "--session", "header:x-session", "--no-handoff"), 2),
        )
        workers = [int(match[1]) for match in routed.server.log.find(r"Started server process \[(\d+)\]")]
        owner, front = workers
        places = {PLAIN: plain}
        places |= {LOCAL: Place(routed.server, routed.address, owner)}
        places |= {FORWARDED: Place(routed.server, routed.address, front)}
        yield Servers(stage, places, context)


def same(results: dict[str, Any]) -> Any:
    """What each column has seen; fails with a diff unless it is the same."""
    problems = [difference(PLAIN, results[PLAIN], name, results[name]) for name in (LOCAL, FORWARDED)]
    assert not any(problems), "\n".join(filter(None, problems))
    return results[PLAIN]


Play = Callable[[Servers, str], Awaitable[dict[str, Any]]]


async def in_each_column(servers: Servers, play: Play) -> Any:
    # The owner's is the first that names the session, so it has it.
    return same({column: await play(servers, column) for column in COLUMNS})


# --- HTTP/1.1 ---

HEADERS = [
    ("x-session", SESSION),
    ("X-Forwarded-For", "203.0.113.7"),
    ("X-Forwarded-Proto", "https"),
    ("X-Twice", "1"),
    ("x-twice", "2"),
]


def ends_of(wire: Wire, servers: Servers, column: str) -> tuple[Any, Any]:
    address = servers.places[column].address
    return (None, (address, None)) if isinstance(address, str) else (wire.local, wire.remote)


async def post(servers: Servers, column: str) -> dict[str, Any]:
    """A body in pieces, and a reply in pieces."""
    streamed = [
        start(201, [(b"x-app", b"1"), (b"X-App", b"2")]),
        body(b"one ", more=True),
        body(b"two", more=True),
        body(),
    ]
    case = servers.case(read_body(), streamed)
    async with servers.wire(column) as wire:
        headers = [*HEADERS, ("x-case", case), ("Transfer-Encoding", "chunked")]
        await wire.send(request("POST", "/a%2Fb/c?d=%20e", headers), b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
        reply = await wire.reply("POST")
        seen = {"reply": of_reply(reply), "app": await servers.app(case, column, ends_of(wire, servers, column))}
        again = servers.case(read_body(), respond(data=b"again"))
        await wire.send(request("GET", "/", [("x-session", SESSION), ("x-case", again)]))
        return undated(seen | {"again": of_reply(await wire.reply())})


async def talk(servers: Servers, column: str) -> dict[str, Any]:
    """A WebSocket: accepted with a subprotocol, a text each way, closed by the client."""
    case = servers.case(
        receive(),
        send({"type": "websocket.accept", "subprotocol": "chat", "headers": [(b"x-app", b"1")]}),
        receive(),
        send({"type": "websocket.send", "text": "and you"}),
        read_until("websocket.disconnect"),
    )
    async with servers.wire(column) as wire:
        client = WebSocketWire(wire)
        headers = [*HEADERS, ("x-case", case), ("Sec-WebSocket-Protocol", "chat, other")]
        await client.open("/a/talk?b", headers)
        await client.send(frame(TEXT, b"hello"))
        await client.frame()
        await client.send(close_frame(3001, "enough"))
        await client.to_end()
        app = await servers.app(case, column, ends_of(wire, servers, column))
        return undated(of_websocket(client) | {"app": app})


def undated(value: Any) -> Any:
    """The same, without the values of `Date` headers."""
    if isinstance(value, bytes):
        lines = value.split(b"\r\n")
        return b"\r\n".join(b"date: *" if line.lower().startswith(b"date: ") else line for line in lines)
    if isinstance(value, dict):
        return {key: undated(one) for key, one in value.items()}
    return [undated(one) for one in value] if isinstance(value, list) else value


def test_tls_and_a_root_path() -> None:
    async def test() -> None:
        async with open_servers("--root-path", "/api", tls=True) as servers:
            seen = (await in_each_column(servers, post))["app"]["scope"]
            assert (seen["scheme"], seen["root_path"]) == ("https", "/api")
            assert (seen["path"], seen["raw_path"]) == ("/api/a/b/c", b"/api/a%2Fb/c")
            seen = (await in_each_column(servers, talk))["app"]["scope"]
            assert (seen["scheme"], seen["root_path"]) == ("wss", "/api")

    asyncio.run(test())


def test_a_unix_socket_behind_a_proxy_that_is_trusted() -> None:
    async def test() -> None:
        async with open_servers("--proxy-headers", "--forwarded-allow-ips", "*", unix=True) as servers:
            seen = (await in_each_column(servers, post))["app"]["scope"]
            assert (seen["scheme"], seen["client"]) == ("https", ("203.0.113.7", 0))
            seen = (await in_each_column(servers, talk))["app"]["scope"]
            assert (seen["scheme"], seen["client"]) == ("wss", ("203.0.113.7", 0))

    asyncio.run(test())


@pytest.mark.long
def test_proxy_headers_are_left_alone_where_they_are_switched_off() -> None:
    async def test() -> None:
        async with open_servers("--no-proxy-headers") as servers:
            seen = (await in_each_column(servers, post))["app"]["scope"]
            assert (seen["scheme"], seen["client"]) == ("http", (tuple, "this end of the connection"))

    asyncio.run(test())


# --- HTTP/2 ---


def of_exchange(exchange: Exchange) -> dict[str, Any]:
    head = [(name, b"*" if name == b"date" else value) for name, value in exchange.headers]
    return {"head": head, "data": exchange.data, "trailers": exchange.trailers, "end": exchange.end}


def begin(client: Http2, path: str, case: str) -> Exchange:
    # With a body that is empty: uvicorn 0.54 does not tell an app that a request without one has none, and the app waits.
    exchange = client.begin("POST", path, [("x-session", SESSION), ("x-case", case)], ends=False)
    client.send(exchange, b"", ends=True)
    return exchange


async def two_at_once(servers: Servers, column: str) -> dict[str, Any]:
    """Two streams of one connection, the first of which is answered last, in pieces and with a body of its own."""
    slow = servers.case(
        read_body(),
        start(201, [(b"x-app", b"1")]),
        body(b"one ", more=True),
        wait("go"),
        body(b"two", more=True),
        body(),
    )
    quick = servers.case(read_body(), respond(data=b"quick"))
    async with servers.http2(column) as client:
        ends = (client.local, client.remote)
        named = [("x-session", SESSION), ("x-twice", "1"), ("x-twice", "2"), ("cookie", "a=1"), ("cookie", "b=2")]
        first = client.begin("POST", "/a%2Fb?c", [*named, ("x-case", slow)], ends=False)
        client.send(first, b"abc")
        client.send(first, b"de", ends=True)
        await client.until(first, b"one ")
        second = begin(client, "/quick", quick)
        seen = {"second": of_exchange(await client.reply(second))}
        (await servers.performance(slow, column)).open("go")
        seen["first"] = of_exchange(await client.reply(first))
        return seen | {"slow": await servers.app(slow, column, ends), "quick": await servers.app(quick, column, ends)}


async def broken_off(servers: Servers, column: str) -> dict[str, Any]:
    """The client resets one stream: its app hears of it, and the connection goes on."""
    case = servers.case(read_body(), start(200), body(b"one", more=True), read_until("http.disconnect"))
    after = servers.case(read_body(), respond(data=b"after"))
    async with servers.http2(column) as client:
        exchange = begin(client, "/", case)
        await client.until(exchange, b"one")
        client.reset(exchange)
        app = before_refusal(await servers.app(case, column, (client.local, client.remote)))
        last = await client.reply(begin(client, "/", after))
        return {"app": app, "after": of_exchange(last)}


HTTP2 = importlib.util.find_spec("uvicorn.protocols.http.zttp_h2_impl") and importlib.util.find_spec("zttp")


@pytest.mark.skipif(not HTTP2, reason="the installed uvicorn has no HTTP/2, or the package zttp is missing")
@pytest.mark.parametrize("tls", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tls", "clear"])
def test_http2(tls: bool) -> None:
    async def test() -> None:
        async with open_servers("--http", "zttp", "--http2", tls=tls) as servers:
            seen = await in_each_column(servers, two_at_once)
            assert seen["slow"]["scope"]["http_version"] == "2"
            assert seen["slow"]["scope"]["scheme"] == ("https" if tls else "http")
            assert (seen["first"]["data"], seen["first"]["end"]) == (b"one two", "complete")
            seen = await in_each_column(servers, broken_off)
            assert seen["after"]["data"] == b"after"
            # A worker lost inside its reply: the stream is broken off, and never looks complete.
            case = servers.case(read_body(), start(200), body(b"one", more=True), wait("go"), die())
            async with servers.http2(FORWARDED) as client:
                exchange = begin(client, "/", case)
                await client.until(exchange, b"one")
                (await servers.performance(case, FORWARDED)).open("go")
                assert (await client.reply(exchange)).end == "reset"

    asyncio.run(test())
