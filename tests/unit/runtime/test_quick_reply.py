"""Replies that are put together here against uvicorn's own: the same bytes, errors and state, whatever an app sends."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from homing.runtime import replies
from homing.runtime.protocol import HomingHttpToolsProtocol

DATE: Final = (b"date", b"Mon, 30 Nov 2026 18:00:00 GMT")
STATE: Final = (
    "response_started",
    "response_complete",
    "chunked_encoding",
    "expected_content_length",
    "keep_alive",
    "waiting_for_100_continue",
)


def seen(
    protocol: type[HttpToolsProtocol],
    request: bytes,
    of_the_server: list[tuple[bytes, bytes]],
    messages: list[dict[str, Any]],
    *,
    access_log: bool = False,
) -> dict[str, Any]:
    """What a client and the app see of the app's messages, and what the server then knows, under a protocol class."""
    raised: list[str | None] = []
    done = asyncio.Event()
    cycles: list[Any] = []
    connection: Any = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        cycles.append(connection.cycle)
        try:
            for message in copy.deepcopy(messages):
                if isinstance(message.get("headers"), set):
                    message["headers"] = iter([*message["headers"]])  # whoever takes an iterator's headers has them all
                try:
                    await send(message)
                except TypeError:
                    raised.append("TypeError")  # of a body that is none: the transport has other words than the writer
                except Exception as error:
                    raised.append(repr(error))
                else:
                    raised.append(None)
        finally:
            done.set()

    async def main() -> tuple[bytes, int]:
        nonlocal connection
        config = Config(app, http=protocol, access_log=access_log, log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        state.default_headers = of_the_server
        client, accepted = socket.socketpair()
        client.setblocking(False)
        connection = config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: connection, accepted)
        async with asyncio.timeout(30):
            await loop.sock_sendall(client, request)
            await done.wait()
            client.shutdown(socket.SHUT_WR)
            received = b""
            while part := await loop.sock_recv(client, 65536):
                received += part
            client.close()
        return received, state.total_requests

    received, total = asyncio.run(main())
    return {
        "received": received,
        "raised": raised,
        "total": total,
        "state": [{name: getattr(cycle, name) for name in STATE} for cycle in cycles],
    }


def same(*arguments: Any, **options: Any) -> dict[str, Any]:
    ours, theirs = (seen(each, *arguments, **options) for each in (HomingHttpToolsProtocol, HttpToolsProtocol))
    assert ours == theirs
    return ours


GET: Final = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

requests = st.sampled_from(
    [
        GET,
        GET,
        b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nab",
    ]
)
of_servers = st.sampled_from(
    [
        [DATE],
        [DATE, (b"server", b"uvicorn")],
        [],
        [DATE, (b"Content-Length", b"5")],
        [(b"connection", b"close")],
        [(b"x", b"a\nb")],
    ]
)
odd_names: list[Any] = ["text", bytearray(b"x-array"), memoryview(b"content-type"), None]
names = st.sampled_from(
    [
        b"content-type",
        b"X-Kind",
        b"set-cookie",
        b"connection",
        b"Transfer-Encoding",
        b"bad name",
        b"a:b",
        b"",
        *odd_names,
    ]
)
values = st.one_of(
    st.sampled_from(
        [b"5", b"0", b"05", b"+5", b" 5", b"5 ", b"a\tb", b"\xff\xe9", b"close", b"chunked", b"", "text", 5]
    ),
    st.sampled_from([b"a\r\nevil: 1", b"a\nb", b"\r", b"\x00", b"\x7f", bytearray(b"v"), memoryview(b"v"), None]),
    st.binary(max_size=6),
)
pairs = st.one_of(st.tuples(names, values), st.tuples(st.just(b"content-type"), st.binary(max_size=3)))
odd_headers = st.one_of(
    st.lists(pairs, max_size=4),
    st.lists(pairs, max_size=3).map(tuple),
    st.lists(st.sampled_from([[b"x", b"y"], (b"x",), b"xy", (b"content-length", b"5")]), max_size=3),
    st.sampled_from([{(b"content-length", b"5")}, {(b"x", b"y")}]),
    st.none(),
)
usual_headers = st.lists(pairs, max_size=2).map(lambda more: [(b"content-length", b"5"), *more])
starts = st.builds(
    lambda status, headers: (
        {"type": "http.response.start", "status": status} | ({} if headers is None else {"headers": headers})
    ),
    st.sampled_from([200, 200, 200, 204, 304, 404, 500, 599, 99, "200", None]),
    st.one_of(usual_headers, odd_headers),
)
odd_bodies: list[Any] = [bytearray(b"hello"), memoryview(b"hello"), "hello", None]
bodies = st.builds(
    lambda body, more: {"type": "http.response.body", **body, **more},
    st.sampled_from(
        [{}, *({"body": body} for body in (b"hello", b"hello", b"", b"he", b"llo", b"hello!", *odd_bodies))]
    ),
    st.sampled_from([{}, {"more_body": False}, {"more_body": True}, {"more_body": 0}, {"more_body": None}]),
)
others = st.sampled_from([{"type": "http.response.trailers"}, {"type": "websocket.send"}])
replies_of_apps = st.one_of(
    st.tuples(starts, bodies).map(list),
    st.tuples(starts, bodies, bodies).map(list),
    st.lists(st.one_of(starts, bodies, others), max_size=4),
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests, of_servers, replies_of_apps)
@example(GET, [DATE], [{"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}])
def test_whatever_an_app_sends_leaves_as_uvicorn_would_send_it(
    request: bytes, of_the_server: list[tuple[bytes, bytes]], messages: list[dict[str, Any]]
) -> None:
    same(request, of_the_server, messages)


START: Final = {"type": "http.response.start", "status": 200, "headers": [(b"Content-Length", b"5"), (b"x-a", b"b")]}
BODY: Final = {"type": "http.response.body", "body": b"hello"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[tuple[str, bool]]:
    """How often a reply's parts were put together here, or were left to uvicorn."""
    counted: collections.Counter[tuple[str, bool]] = collections.Counter()

    def counting(name: str, method: Callable[..., bool]) -> Callable[..., bool]:
        def counted_method(self: replies.QuickReply, message: Any) -> bool:
            done = method(self, message)
            counted[name, done] += 1
            return done

        return counted_method

    for name in ("_begin", "_end"):
        monkeypatch.setattr(replies.QuickReply, name, counting(name, getattr(replies.QuickReply, name)))
    return counted


def test_a_usual_reply_is_put_together_here(quick: collections.Counter[tuple[str, bool]]) -> None:
    found = same(GET, [DATE], [START, BODY])
    assert quick == {("_begin", True): 1, ("_end", True): 1}
    assert found["received"].endswith(b"\r\ncontent-length: 5\r\nx-a: b\r\n\r\nhello")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"5"), (b"x", b"a\r\nset-cookie: evil=1")],
        [(b"content-length", b"5"), (b"x", b"\r\n")],
        [(b"content-length", b"5"), (b"x\r\ny", b"z")],
        [(b"content-length", b"5"), (b"content-length", b"6")],
    ],
)
def test_no_header_says_more_than_one_thing(
    headers: list[tuple[bytes, bytes]], quick: collections.Counter[tuple[str, bool]]
) -> None:
    same(GET, [DATE], [START | {"headers": headers}, BODY])
    assert quick["_begin", False] == 1


def test_a_body_in_parts_is_uvicorns_to_send(quick: collections.Counter[tuple[str, bool]]) -> None:
    same(GET, [DATE], [START, BODY | {"body": b"he", "more_body": True}, BODY | {"body": b"llo"}])
    assert quick == {("_begin", True): 1, ("_end", False): 1, ("_end", True): 1}


@pytest.mark.parametrize("body", [b"hello", b""])
def test_what_is_sent_after_a_whole_reply_is_an_error(body: bytes) -> None:
    found = same(GET, [DATE], [START, BODY, BODY | {"body": body}])
    assert found["raised"][:2] == [None, None]
    assert "after response already completed" in found["raised"][2]


def test_an_access_log_has_every_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="uvicorn.access")
    same(GET, [DATE], [START, BODY], access_log=True)
    ours, theirs = (record.getMessage() for record in caplog.records if record.name == "uvicorn.access")
    assert ours == theirs
    assert '"GET / HTTP/1.1" 200' in ours


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[socket.socket]:
    """The client's end of a connection to the app."""
    config = Config(app, http=HomingHttpToolsProtocol, access_log=False, log_config=None, lifespan="off")
    config.load()
    loop = asyncio.get_running_loop()
    client, accepted = socket.socketpair()
    client.setblocking(False)
    with client:
        transport, _ = await loop.connect_accepted_socket(
            lambda: config.http_protocol_class(config=config, server_state=ServerState(), app_state={}),  # type: ignore[call-arg]
            accepted,
        )
        async with asyncio.timeout(30):
            yield client
        transport.abort()


@pytest.mark.parametrize(
    "messages",
    [[START, BODY], [START | {"headers": []}, BODY], [START, BODY | {"more_body": True}, BODY | {"body": b""}]],
)
def test_a_reply_leaves_nothing_for_the_collector(messages: list[dict[str, Any]]) -> None:
    cycles: list[weakref.ref[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        cycles.append(weakref.ref(receive.__self__))
        for message in messages:
            await send(message)

    async def main() -> None:
        async with served(app) as client:
            loop = asyncio.get_running_loop()
            for _ in range(2):
                await loop.sock_sendall(client, GET)
                await loop.sock_recv(client, 65536)
            for _ in range(3):
                await asyncio.sleep(0)  # a reply is on its way before its task ends
            first, second = cycles
            assert (first(), second() is None) == (None, False)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_the_next_reply_waits_for_a_client_that_does_not_read() -> None:
    body = b"x" * 8_000_000
    begun: list[str] = []
    second = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/second":
            second.set()
        await send(START | {"headers": [(b"content-length", b"%d" % len(body))]})
        begun.append(scope["path"])
        await send(BODY | {"body": body})

    async def main() -> None:
        async with served(app) as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, GET + GET.replace(b"/ ", b"/second "))
            await second.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert begun == ["/"]
            received = 0
            while received < 2 * len(body):
                received += len(await loop.sock_recv(client, 1 << 20))
            assert begun == ["/", "/second"]

    asyncio.run(main())
