"""An HTTP request through the hop is, for the app and for the client, what it is without."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
from tests.integration.forwarding.hop import (
    Event,
    Run,
    Server,
    forward,
    hop,
    http_scope,
    post_scope,
    request_event,
    websocket_scope,
)

from homing.errors import RemoteAppError
from homing.forwarding.values import NotCarriedError

pytestmark = pytest.mark.usefixtures("shared")

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"x", b"1"), (b"x", b"2"), (b"X-Mixed", b"3"), (b"y", b"\xe9")],
}
BODY = {"type": "http.response.body", "body": b"hello", "more_body": False}


async def reply(send: Any) -> None:
    await send(START)
    await send(BODY)


async def whole_body(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    more = True
    while more:
        event = await receive()
        seen.append(event)
        more = event.get("more_body", False)
    await reply(send)


async def no_reading(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    await reply(send)


async def streamed(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    await send(START)
    for part in (b"a", b"", b"bb"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def empty_reply(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    await send({"type": "http.response.start", "status": 304, "headers": [(b"content-length", b"1234")]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def waits_for_the_client(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    while True:
        event = await receive()
        seen.append(event)
        if event["type"] == "http.disconnect":
            seen.append(await receive())
            return


async def reads_after_the_reply(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    seen.append(await receive())
    await reply(send)
    seen.append(await receive())


async def unusual_events(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    await send({"type": "http.response.early_hint", "links": [b"</a>; rel=preload", b"</b>"]})
    await send(START | {"trailers": True})
    await send(BODY)
    await send({"type": "http.response.trailers", "headers": [(b"a", b"b")], "more_trailers": False})


async def stops_half_way(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    await send(START)
    await send(BODY | {"more_body": True})


async def no_reply(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    seen.append(await receive())


async def echo(scope: Any, receive: Any, send: Any, seen: list[Event]) -> None:
    await send(START)
    more = True
    while more:
        event = await receive()
        seen.append(event)
        more = event["more_body"]
        await send({"type": "http.response.body", "body": event["body"], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


BODIES = [
    request_event(b"a" * 10, True),
    request_event(b"", True),
    request_event(b"c" * 70_000, True),
    request_event(b"d"),
]
GONE = {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("app", "scope", "events"),
    [
        (whole_body, http_scope(), [request_event()]),
        (no_reading, http_scope(), [request_event()]),
        (streamed, http_scope(), [request_event()]),
        (empty_reply, http_scope(method="HEAD"), [request_event()]),
        (waits_for_the_client, http_scope(), [request_event(), GONE, GONE]),
        (waits_for_the_client, post_scope(100), [request_event(b"a", True), GONE, GONE]),
        (waits_for_the_client, post_scope(1), [request_event(b"a"), GONE, GONE]),
        (reads_after_the_reply, http_scope(), [request_event(), GONE]),
        (reads_after_the_reply, post_scope(5), [request_event(b"12345"), GONE]),
        (unusual_events, http_scope(), [request_event()]),
        (stops_half_way, http_scope(), [request_event()]),
        (no_reply, http_scope(), [request_event()]),
        (whole_body, post_scope(70_011), BODIES),
        (whole_body, post_scope(), BODIES),
        (whole_body, post_scope(None, (b"expect", b"100-continue")), BODIES),
        (whole_body, http_scope(http_version="2"), BODIES),
        (whole_body, post_scope(0), [request_event()]),
        (echo, post_scope(), BODIES),
        (no_reading, post_scope(), BODIES),
    ],
)
def test_app_and_client_see_what_they_see_without_the_hop(
    run: Run, app: Any, scope: Event, events: list[Event]
) -> None:
    async def served(forwarded: bool) -> tuple[list[Event], list[Event]]:
        seen: list[Event] = []

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send, seen)

        server = Server(*events)
        if forwarded:
            async with hop(noted) as (forwarder, _):
                assert await forward(forwarder, server, scope)
        else:
            await noted(scope, server.receive, server.send)
        return seen, server.sent

    async def test() -> None:
        direct, through = await served(False), await served(True)
        assert through == direct

    run(test())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"client": None, "server": ("/run/socket", None)},
        {
            "http_version": "1.0",
            "root_path": "/api",
            "path": "/api/ü",
            "raw_path": b"/api/%C3%BC",
            "query_string": b"a=%",
        },
        {"path": "/\udce9", "raw_path": b"/\xe9"},
        {"headers": [(b"a", b"\xe9"), (b"a", b""), (b"b", b"x" * 60_000)] + [(b"n%d" % n, b"v") for n in range(100)]},
        {"extensions": {"http.response.trailers": {}, "tls": {"tls_version": 0x304, "client_cert_chain": ["x"]}}},
        {"path_params": {"id": 1}, "pair": (1, ("a", b"b")), "user": "é"},
        {"homing.head_length": 2},
    ],
)
def test_the_scope_is_the_one_that_the_server_made(run: Run, changes: Event) -> None:
    async def test() -> None:
        scopes = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)
            await reply(send)

        async with hop(app, state=lambda: {"from": "the owner"}) as (forwarder, _):
            sent = http_scope(**changes)
            await forward(forwarder, Server(), sent)
            del scopes[0]["homing.hop"]
            assert scopes[0] == http_scope(**changes) | {"state": {"from": "the owner"}}
            assert [type(value) for value in scopes[0].values()] == [type(scopes[0][key]) for key in scopes[0]]
            assert sent == http_scope(**changes), "the caller's scope stays as it was"

    run(test())


def test_what_cannot_cross_is_left_out_of_the_scope(run: Run) -> None:
    async def test() -> None:
        scopes = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)
            await reply(send)

        async with hop(app) as (forwarder, _):
            changes = {
                "app": object(),
                "endpoint": object(),
                "homing.abort": lambda: None,
                "extensions": {"http.response.zerocopysend": {}, "http.response.pathsend": {}, "x": object()},
            }
            await forward(forwarder, Server(), http_scope(**changes))
            assert scopes[0].keys() == http_scope(extensions={}).keys() - {"state"} | {"homing.hop"}
            assert scopes[0]["extensions"] == {"http.response.pathsend": {}}

    run(test())


def test_each_request_gets_its_own_copy_of_the_owners_state(run: Run) -> None:
    async def test() -> None:
        shared: dict[str, Any] = {"pool": object()}
        states = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["mine"] = True
            states.append(scope["state"])
            await reply(send)

        async with hop(app, state=lambda: shared) as (forwarder, _):
            await forward(forwarder, Server())
            await forward(forwarder, Server())
        assert states[0] is not states[1]
        assert states[0]["pool"] is shared["pool"]
        assert "mine" not in shared

    run(test())


def test_the_head_does_not_wait_for_the_body(run: Run) -> None:
    async def test() -> None:
        async with hop(lambda scope, receive, send: reply(send)) as (forwarder, _):
            server = Server()  # no byte of the body ever comes
            assert await forward(forwarder, server, post_scope(10))
            assert server.sent == [START, BODY]

    run(test())


def test_the_server_is_asked_for_a_body_only_when_the_app_reads(run: Run) -> None:
    """A server sends `100 Continue` when its `receive` is called."""

    async def test() -> None:
        reads, continues = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            continues.set()
            await reads.wait()
            assert (await receive())["body"] == b"body"
            await reply(send)

        async with hop(app) as (forwarder, _), asyncio.TaskGroup() as tasks:
            server = Server(request_event(b"body"))
            tasks.create_task(forward(forwarder, server, post_scope(4, (b"expect", b"100-Continue"))))
            await continues.wait()
            assert server.received == 0
            reads.set()

        assert server.received == 1

        async with hop(lambda scope, receive, send: reply(send)) as (forwarder, _):
            server = Server(request_event(b"body"))
            await forward(forwarder, server, post_scope(4, (b"expect", b"100-continue")))
            assert (server.received, server.sent) == (0, [START, BODY])

    run(test())


def test_a_start_does_not_wait_for_the_body_that_follows(run: Run) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await go.wait()
            await send(BODY)

        async with hop(app) as (forwarder, _), asyncio.TaskGroup() as tasks:
            server = Server()
            tasks.create_task(forward(forwarder, server))
            await server.until(lambda: server.sent == [START])
            go.set()

    run(test())


def test_a_client_that_leaves_is_noticed_while_the_app_waits(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            assert (await receive())["type"] == "http.disconnect"
            left.set()
            await reply(send)  # silent, as uvicorn's send is

        async with hop(app) as (forwarder, _), asyncio.TaskGroup() as tasks:
            server = Server()
            task = tasks.create_task(forward(forwarder, server))
            await server.waits.wait()
            server.put({"type": "http.disconnect"})
            await left.wait()
            assert await task

    run(test())


@pytest.mark.parametrize("scope", [http_scope(asgi={"version": "3.0", "spec_version": "2.4"}), websocket_scope()])
def test_sending_to_a_client_that_left_raises_where_the_servers_send_would(run: Run, scope: Event) -> None:
    async def test() -> None:
        raised = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await send(START)
                events = {"type": "http.response.body", "body": b"x", "more_body": True}
            else:
                await send({"type": "websocket.accept"})
                events = {"type": "websocket.send", "text": "x"}
            try:
                while True:
                    await send(events)
                    await asyncio.sleep(0)
            except OSError:
                raised.set()
                raise

        async with hop(app) as (forwarder, _):
            assert await forward(forwarder, Server(raises=OSError("the client has left")), scope)
            await raised.wait()

    run(test())


def test_an_error_of_the_servers_send_ends_the_request_at_the_owner(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send(START)
            await receive()
            left.set()

        async with hop(app) as (forwarder, _):
            with pytest.raises(RuntimeError, match="Invalid HTTP header"):
                await forward(forwarder, Server(raises=RuntimeError("Invalid HTTP header value.")))
            await left.wait()

    run(test())


@pytest.mark.parametrize("started", [False, True])
def test_an_apps_exception_is_logged_once_at_the_owner(
    run: Run, started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if started:
                await send(START)
            raise ValueError("the app's own")

        async with hop(app) as (forwarder, _):
            server = Server()
            with pytest.raises(RemoteAppError):
                await forward(forwarder, server)
            assert server.sent == ([START] if started else [])

    run(test())
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.name == "homing.forwarding.receiver"
    assert "the app's own" in str(record.exc_info[1])


def test_an_app_may_go_on_after_its_reply(run: Run, shared: bool) -> None:
    """Background tasks run after the reply; the connection serves another request meanwhile."""

    async def test() -> None:
        go, done = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await reply(send)
            if scope["path"] == "/background":
                await go.wait()
                assert (await receive())["type"] == "http.disconnect"
                with pytest.raises(RuntimeError, match="already completed"):
                    await send(BODY)
                done.set()

        async with hop(app) as (forwarder, receiver):
            assert await forward(forwarder, Server(), http_scope(path="/background"))
            assert receiver.in_flight == 1
            assert await forward(forwarder, Server())
            go.set()
            await done.wait()
            assert await receiver.drain(5)
            assert forwarder.counters.opened == (0 if shared else 1)

    run(test())


@pytest.mark.parametrize(
    "events",
    [
        [BODY],
        [START, START],
        [{"type": "http.response.debug", "info": object()}],
        [{"type": "http.response.zerocopysend", "file": 1}],
        [{"type": "custom", "number": 2**70}],
        [{"type": "custom", "keys": {1: 2}}],
        [{"type": "http.response.start", "status": object(), "more": object()}],
    ],
)
def test_an_event_that_cannot_be_sent_raises_where_it_is_sent(run: Run, events: list[Event]) -> None:
    async def test() -> None:
        raised = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for event in events[:-1]:
                await send(event)
            try:
                await send(events[-1])
            except (RuntimeError, NotCarriedError) as error:
                raised.append(error)

        async with hop(app) as (forwarder, _):
            assert await forward(forwarder, Server())
        assert len(raised) == 1

    run(test())


def test_headers_in_any_form_reach_the_server(run: Run) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            headers = [[b"a", bytearray(b"b")], (b"c", memoryview(b"d"))]
            await send({"type": "http.response.start", "status": 200, "headers": iter(headers)})
            await send({"type": "http.response.body", "body": memoryview(b"hello")})

        async with hop(app) as (forwarder, _):
            server = Server()
            assert await forward(forwarder, server)
            assert [list(pair) for pair in server.sent[0]["headers"]] == [[b"a", b"b"], [b"c", b"d"]]
            assert server.sent[1:] == [BODY]

    run(test())


# --- back-pressure and memory ---

MIB = 2**20


def test_a_slow_client_stops_the_app_within_a_bounded_number_of_bytes(run: Run) -> None:
    async def test() -> None:
        written = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal written
            await send(START)
            for _ in range(64 * 16):
                await send({"type": "http.response.body", "body": bytes(MIB // 16), "more_body": True})
                written += MIB // 16
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with hop(app) as (forwarder, _), asyncio.TaskGroup() as tasks:
            server = Server()
            server.keep = False
            server.open.clear()
            tasks.create_task(forward(forwarder, server))
            await server.blocked.wait()
            await stands_still(lambda: written)
            assert written <= 2 * MIB
            tracemalloc.start()
            server.open.set()
            await server.until(lambda: server.sent_bytes == 64 * MIB)
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
            tracemalloc.stop()

    run(test())


def test_an_app_that_reads_slowly_stops_the_client_within_a_bounded_number_of_bytes(run: Run) -> None:
    async def test() -> None:
        reads = asyncio.Event()
        total = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal total
            await reads.wait()
            more = True
            while more:
                event = await receive()
                more = event["more_body"]
                total += len(event["body"])
            await reply(send)

        class Uploading(Server):
            async def receive(self) -> Event:
                self.received += 1
                return request_event(bytes(MIB // 16), self.received < 64 * 16)

        async with hop(app) as (forwarder, _), asyncio.TaskGroup() as tasks:
            server = Uploading()
            tasks.create_task(forward(forwarder, server, post_scope(64 * MIB)))
            await stands_still(lambda: server.received)
            assert 0 < server.received <= 2 * 16
            tracemalloc.start()
            reads.set()
            await server.until(lambda: BODY in server.sent)
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
            tracemalloc.stop()
            assert total == 64 * MIB

    run(test())


def test_a_large_body_event_crosses_in_pieces(run: Run) -> None:
    async def test() -> None:
        large = bytes(range(256)) * (4 * MIB // 256) + b"the end"
        bodies = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            more = True
            while more:
                event = await receive()
                more = event["more_body"]
                bodies.append(event["body"])
            await send(START)
            await send({"type": "http.response.body", "body": large})

        async with hop(app) as (forwarder, _):
            server = Server(request_event(large))
            assert await forward(forwarder, server, post_scope(len(large)))
            assert server.body == large == b"".join(bodies)
            assert max(len(event.get("body", b"")) for event in server.sent) <= MIB // 2
            assert max(map(len, bodies)) <= MIB // 2

    run(test())


async def stands_still(value: Any) -> None:
    """Wait until many turns of the loop change nothing: everybody waits for somebody else."""
    same = 0
    last = value()
    while same < 200:
        await asyncio.sleep(0)
        same = same + 1 if value() == last else 0
        last = value()


def part(data: bytes, more: bool) -> Event:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_a_large_event_is_sent_as_one_whatever_other_tasks_send(run: Run) -> None:
    """It crosses in pieces, each when the one before it was taken: other tasks are ready to send at any turn of the loop."""
    large = b"a" * 3_000_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def beat(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await send(part(b".", True))

        await send(START)
        beats = [asyncio.create_task(beat(turns)) for turns in range(1, 300)]
        for _ in range(10):
            await send(part(large, True))
        await asyncio.gather(*beats)
        await send(part(b"", False))

    async def play() -> None:
        server = Server()
        async with hop(app) as (forwarder, _):
            await forward(forwarder, server)
        assert server.body.count(large) == 10
        assert server.body.replace(large, b"") == b"." * 299

    run(play())


@pytest.mark.parametrize("last", [False, True])
def test_a_large_event_whose_send_is_cancelled_while_the_client_is_slow_leaves_as_one(run: Run, last: bool) -> None:
    """As from a server, whose `send` has written it by then: what the app sends next follows a whole event."""
    large = b"a" * 3_000_000

    async def play() -> None:
        server = Server()
        server.open.clear()
        cancelled = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            sending = asyncio.create_task(send(part(large, not last)))
            await server.blocked.wait()
            await asyncio.sleep(0.05)
            assert not sending.done()
            sending.cancel()
            await asyncio.wait({sending})
            cancelled.set()
            if not last:
                await send(part(b"end", False))

        async with hop(app) as (forwarder, _):
            forwarding = asyncio.create_task(forward(forwarder, server))
            await cancelled.wait()
            server.open.set()
            assert await forwarding
        assert server.body == large + (b"" if last else b"end")
        assert server.sent[-1]["more_body"] is False

    run(play())
