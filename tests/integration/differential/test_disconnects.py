"""Who leaves, and who learns of it: clients in each phase of a request, and owners inside a reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.integration.differential.columns import FORWARDED, Column, Seen, differ
from tests.integration.differential.exchanges import accept, text
from tests.integration.differential.test_requests import needs_homing
from tests.support.pair import HOMING, Pair, open_pair
from tests.support.raw import CLOSE, CutError, WebSocketWire, Wire
from tests.support.recorder import (
    Performance,
    Script,
    body,
    die,
    note,
    read_body,
    read_until,
    receive,
    start,
    wait,
    watch,
)

from homing.forwarding.frames import EARLY_BODY_BYTES

Run = Callable[[Coroutine[Any, Any, Any]], Any]

LEFT = read_until("http.disconnect")
STREAM = start(headers=[(b"content-type", b"text/event-stream")])

PHASES: dict[str, Script] = {
    # Half of the body has come, and the app waits for the rest.
    "body": [receive(), note("here"), LEFT],
    # The body is whole, and the app waits for nothing else than that the client leaves.
    "waiting": [read_body(), note("here"), LEFT],
    # A framework's second task listens while the handler works.
    "handler": [read_body(), watch(), note("here"), wait("gone")],
    # The reply has begun; a second task listens.
    "stream": [read_body(), watch(), STREAM, body(b"data: 1\n\n", more=True), note("here"), wait("gone")],
    # The reply has begun; the app listens itself.
    "stream-listening": [read_body(), STREAM, body(b"data: 1\n\n", more=True), note("here"), LEFT],
    # Nobody listens until after the client has left.
    "deaf": [read_body(), note("here"), wait("gone"), LEFT],
}


@pytest.mark.parametrize("how", ["close", "abort", "finish_sending"])
@pytest.mark.parametrize("phase", list(PHASES))
def test_a_client_that_leaves_is_known_at_the_owner_within_a_second(pair: Pair, run: Run, phase: str, how: str) -> None:
    async def play(column: Column) -> Seen:
        # What an app sends after that goes nowhere, and is no error (HTTP's spec_version here is 2.3).
        sends = [] if "stream" in phase else [STREAM]
        column.script([*PHASES[phase], *sends, body(b"to nobody", more=True), body()])
        async with column.connect() as wire:
            data = b"0123456789"
            await wire.send(
                column.request("POST", "/", [("Content-Length", "10")]) + (data[:5] if phase == "body" else data)
            )
            performance = await column.performance()
            await performance.noted("here")
            if "stream" in phase:
                await wire.until(b"data: 1\n\n")
            left_at = time.monotonic()
            getattr(wire, how)()
            if phase == "deaf":
                performance.open("gone")
            record = await performance.disconnected()
            assert record.at - left_at <= 1.0, f"{column.name}: {record.at - left_at} s"
            performance.open("gone")
            records = await performance.done()
            return {"records": [(one.kind, one.value) for one in records]}

    run(differ(pair, play))


@pytest.mark.parametrize("size", [EARLY_BODY_BYTES - 1, EARLY_BODY_BYTES, EARLY_BODY_BYTES + 1])
def test_a_client_that_leaves_is_known_after_a_body_as_long_as_what_goes_with_the_head(
    pair: Pair, run: Run, size: int
) -> None:
    """The app asks for more in the same frame that says *mine*, before the last of the body counts as taken."""

    async def play(column: Column) -> Seen:
        column.script([read_body(), note("here"), LEFT])
        async with column.connect() as wire:
            await wire.send(column.request("POST", "/", body=b"x" * size))
            performance = await column.performance()
            await performance.noted("here")
            left_at = time.monotonic()
            wire.abort()
            record = await performance.disconnected()
            assert record.at - left_at <= 1.0, f"{column.name}: {record.at - left_at} s"
            await performance.done()
        return {}

    run(differ(pair, play))


def test_a_client_that_leaves_an_app_that_only_sends_stops_nothing_and_breaks_nothing(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script(
            [STREAM, body(b"1", more=True), wait("gone"), *(body(b"x" * 9999, more=True) for _ in range(50)), body()]
        )
        async with column.connect() as wire:
            await wire.send(column.request())
            performance = await column.performance()
            await wire.until(b"1\r\n1\r\n")
            wire.abort()
            await wire.wait_lost()
            performance.open("gone")
            return {"records": [(one.kind, one.value) for one in await performance.done()]}

    run(differ(pair, play))


@needs_homing
def test_a_cut_reply_never_looks_complete(run: Run) -> None:
    """The owner is killed inside replies of every framing; no client may take what it got for the whole."""

    replies: dict[str, tuple[str, Script]] = {
        "chunked": ("1.1", [start(), body(b"some", more=True)]),
        "length": ("1.1", [start(headers=[(b"content-length", b"100")]), body(b"some", more=True)]),
        "http10": ("1.0", [start(), body(b"some", more=True)]),
        "http10-length": ("1.0", [start(headers=[(b"content-length", b"100")]), body(b"some", more=True)]),
        "started": ("1.1", [start(), body(b"", more=True)]),
    }

    async def play() -> None:
        async with open_pair() as pair, AsyncExitStack() as stack:
            opened: dict[str, tuple[Wire, Performance]] = {}
            for name, (version, steps) in replies.items():
                column = Column(FORWARDED, pair, pair.front, "owner", await pair.start_session(), pair.number())
                column.script([*steps, note("here"), wait("never")])
                wire = await stack.enter_async_context(pair.connect(pair.front))
                await wire.send(column.request(version=version))
                opened[name] = (wire, await column.performance())
            socket_column = Column(FORWARDED, pair, pair.front, "owner", await pair.start_session(), pair.number())
            socket_column.script([receive(), accept(), text("x"), wait("never")])
            socket_wire = await stack.enter_async_context(pair.connect(pair.front))
            client = WebSocketWire(socket_wire)
            await client.open("/", socket_column.headers())
            await client.frame()
            waiting = Column(FORWARDED, pair, pair.front, "owner", await pair.start_session(), pair.number())
            waiting.script([read_body(), note("here"), wait("never")])
            waiting_wire = await stack.enter_async_context(pair.connect(pair.front))
            await waiting_wire.send(waiting.request("POST", "/", body=b"x"))
            await (await waiting.performance()).noted("here")
            for wire, performance in opened.values():
                await performance.noted("here")
                await wire.until(b"\r\n\r\n")

            pair.owner.process.signal(9)
            await pair.owner.process.wait()

            for name, (wire, _) in opened.items():
                rest = await wire.to_end(timeout_seconds=5)
                assert not rest.endswith(b"0\r\n\r\n"), (name, rest)
                assert wire.end in ("eof", "reset")
            last = await client.frame(timeout_seconds=5)
            assert (last.opcode, last.close_code) == (CLOSE, 1011)
            reply = await waiting_wire.reply(timeout_seconds=5)
            assert (reply.status, reply.all(b"homing-error")) == (502, [b"owner_unreachable"])
            # And the worker that forwarded them serves on.
            async with pair.connect(pair.front) as wire:
                await wire.send(Column(FORWARDED, pair, pair.front, "front", "new", pair.number()).request())
                assert (await wire.reply()).status == 200

    run(play())


@needs_homing
def test_an_owner_that_dies_by_itself_inside_a_reply_cuts_it(run: Run) -> None:
    async def play() -> None:
        async with open_pair() as pair:
            column = Column(FORWARDED, pair, pair.front, "owner", await pair.start_session(), pair.number())
            column.script([start(), body(b"x" * 100_000, more=True), wait("read"), die()])
            async with pair.connect(pair.front) as wire:
                await wire.send(column.request())
                performance = await column.performance()
                await wire.until(b"x" * 1000)
                performance.open("read")
                reply = await wire.to_end(timeout_seconds=5)
                assert not reply.endswith(b"0\r\n\r\n")

    run(play())


def test_many_clients_that_leave_at_once_leave_nothing_behind(pair: Pair, run: Run) -> None:
    """Each app has learned of its client, and another wave of as many takes no more descriptors."""

    async def play() -> None:
        session = await pair.start_session()
        serves = "front" if HOMING == "plain" else "owner"
        column = Column(FORWARDED, pair, pair.front, serves, session, pair.number())

        async def one() -> None:
            mine = Column(FORWARDED, pair, pair.front, column.serves, session, pair.number())
            mine.script([read_body(), watch(), STREAM, body(b"x", more=True), wait("gone")])
            async with pair.connect(pair.front) as wire:
                await wire.send(mine.request())
                await wire.until(b"1\r\nx\r\n")
                wire.abort()
            performance = await pair.stage.performance(mine.case())
            await performance.disconnected()
            performance.open("gone")
            await performance.done()

        counts = []
        for _ in range(3):
            await asyncio.gather(*(one() for _ in range(40)))
            async with pair.connect(pair.front) as wire:
                await column.probe(wire)
            counts.append([worker.descriptors() for worker in pair.workers])
        # The first wave leaves idle connections between the workers, which are kept for a while and used by the next.
        assert all(last - first <= 4 for first, last in zip(counts[0], counts[2], strict=True)), counts

    run(play())


def test_an_owner_learns_of_a_client_that_left_inside_its_upload(pair: Pair, run: Run) -> None:
    """A large body in full flow, not at a boundary between events."""

    async def play(column: Column) -> Seen:
        column.script([LEFT])
        async with column.connect() as wire:
            head = column.request("POST", "/", [("Content-Length", "100000000")])
            await wire.send(head, *([b"u" * 65536] * 40))
            performance = await column.performance()
            left_at = time.monotonic()
            wire.abort()
            record = await performance.disconnected()
            assert record.at - left_at <= 1.0
            await performance.done()
            return {"last": record.value}

    run(differ(pair, play))


def test_a_websocket_whose_app_raises_is_closed_as_with_one_worker(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script([receive(), accept(), wait("go"), ("fail", "the script raises")])
        async with column.connect() as wire:
            client = WebSocketWire(wire)
            await client.open("/", column.headers())
            (await column.performance()).open("go")
            ended = False
            try:
                await client.frame()
            except CutError:
                ended = True
            return {"ended": ended, "end": wire.end, "bytes": bytes(client.seen), "app": await column.app(wire)}

    run(differ(pair, play))
