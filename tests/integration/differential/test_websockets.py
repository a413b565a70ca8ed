"""tests/scenarios.md part C, WebSockets: subprotocols, codes, reasons, refusals and messages, as with one worker, both ways."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.integration.differential.columns import FORWARDED, PLAIN, Column, Seen, differ, of_websocket
from tests.integration.differential.exchanges import EXCHANGE_NAMES, GONE, accept, binary, close, play_exchange, text
from tests.support.pair import Pair
from tests.support.raw import BINARY, CLOSE, TEXT, WEBSOCKET_ACCEPT, Reply, WebSocketWire, close_frame, frame
from tests.support.recorder import digest_messages, receive, wait

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def exchanged(pair: Pair, run: Run, name: str) -> dict[str, Any]:
    async def play(column: Column) -> Seen:
        async with column.connect() as wire:
            client = WebSocketWire(wire)
            seen = await play_exchange(column, client, name, b"/socket?x=1", [], random.Random(name))
            return seen | of_websocket(client)

    seen: dict[str, Any] = run(differ(pair, play))[PLAIN]
    return seen


@pytest.mark.parametrize("name", EXCHANGE_NAMES)
def test_scenario_36_websocket_details(pair: Pair, run: Run, name: str) -> None:
    exchanged(pair, run, name)


def test_scenario_36_the_second_subprotocol_is_agreed(pair: Pair, run: Run) -> None:
    seen = exchanged(pair, run, "subprotocol")
    head = Reply(head=seen["bytes"].split(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert head.one(b"sec-websocket-protocol") if head.all(b"sec-websocket-protocol") else True
    assert b"Sec-WebSocket-Protocol: two" in seen["bytes"]
    assert WEBSOCKET_ACCEPT.encode() in seen["bytes"]
    assert seen["app"]["scope"]["subprotocols"] == ["one", "two"]


def test_scenario_36_the_apps_close_code_and_reason_reach_the_client(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script([receive(), accept(), close(code=4404, reason="gone"), GONE])
        async with column.connect() as wire:
            client = WebSocketWire(wire)
            await client.open("/socket", column.headers())
            last = await client.frame()
            assert (last.opcode, last.close_code, last.close_reason) == (CLOSE, 4404, "gone")
            await client.send(close_frame(4404))
            await client.to_end()
            return {"app": await column.app(wire)} | of_websocket(client)

    run(differ(pair, play))


def test_scenario_36_the_clients_close_code_and_reason_reach_the_app(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script([receive(), accept(), GONE])
        async with column.connect() as wire:
            client = WebSocketWire(wire)
            await client.open("/socket", column.headers())
            await client.send(close_frame(4001, "bye"))
            await client.to_end()
            app = await column.app(wire)
            assert ("receive", {"type": "websocket.disconnect", "code": 4001, "reason": "bye"}) in app["records"]
            return {"app": app} | of_websocket(client)

    run(differ(pair, play))


def test_a_message_of_many_megabytes_passes_whole_both_ways(pair: Pair, run: Run) -> None:
    data = random.Random(5).randbytes(9_000_000)

    async def play(column: Column) -> Seen:
        column.script([receive(), accept(), digest_messages(1), binary(data), GONE])
        async with column.connect(limit_bytes=1 << 25) as wire:
            client = WebSocketWire(wire)
            await client.open("/socket", column.headers())
            await client.send(frame(BINARY, data))
            assert (await client.frame()).data == data
            await client.send(close_frame(1000))
            await client.to_end()
            return {"app": await column.app(wire), "end": wire.end}

    run(differ(pair, play, one_by_one=True))


def test_a_websocket_client_that_does_not_read_makes_the_app_wait(pair: Pair, run: Run) -> None:
    """The app sends far more than every buffer on the way holds: `send` must not return for all of it."""
    part, count = b"x" * 1_000_000, 60

    async def play(column: Column) -> Seen:
        column.script([receive(), accept(), *(step for n in range(count) for step in (binary(part), _sent(n))), GONE])
        async with column.connect(receive_buffer_bytes=65_536, limit_bytes=65_536) as wire:
            client = WebSocketWire(wire)
            await client.open("/socket", column.headers())
            performance = await column.performance()
            first = await client.frame(timeout_seconds=5)
            assert len(first.data) == len(part)
            stuck = sum(record.kind == "note" for record in performance.records)
            assert stuck < count, "everything was sent to a client that has read one message"
            for _ in range(count - 1):
                await client.frame()
            await client.send(close_frame(1000))
            await client.to_end()
            records = (await column.app(wire))["records"]
            return {"notes": [value for kind, value in records if kind == "note"], "end": wire.end}

    run(differ(pair, play, one_by_one=True))


def _sent(n: int) -> Any:
    return ("note", f"sent {n}")


def test_messages_cross_while_both_sides_send(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        steps = [step for n in range(50) for step in (receive(), text(f"answer {n}"))]
        column.script([receive(), accept(), text("first"), wait("go"), *steps, GONE])
        async with column.connect() as wire:
            client = WebSocketWire(wire)
            await client.open("/socket", column.headers())
            await client.send(*(frame(TEXT, b"question %d" % n) for n in range(50)))
            (await column.performance()).open("go")
            got = [(await client.frame()).data for _ in range(51)]
            assert got == [b"first", *(b"answer %d" % n for n in range(50))]
            await client.send(frame(CLOSE, struct.pack("!H", 1000)))
            await client.to_end()
            return {"app": await column.app(wire)} | of_websocket(client)

    run(differ(pair, play))


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_websocket_client_that_leaves_is_known_at_the_owner_within_a_second(pair: Pair, run: Run, how: str) -> None:
    async def play(column: Column) -> Seen:
        column.script([receive(), accept(), text("x"), GONE])
        async with column.connect() as wire:
            client = WebSocketWire(wire)
            await client.open("/socket", column.headers())
            await client.frame()
            left_at = time.monotonic()
            getattr(wire, how)()
            performance = await column.performance()
            record = await performance.disconnected()
            assert record.at - left_at <= 1.0, f"{column.name}: {record.at - left_at} s"
            await performance.done()
            return {"event": record.value}

    seen = run(differ(pair, play))
    assert seen[FORWARDED]["event"]["type"] == "websocket.disconnect"
