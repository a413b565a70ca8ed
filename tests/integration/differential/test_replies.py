"""tests/scenarios.md part C, replies: frames, headers, bodies that are absent, compressed or long."""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.integration.differential.columns import FORWARDED, PLAIN, Column, Seen, before_refusal, differ, of_reply
from tests.integration.differential.conftest import Pairs
from tests.support.pair import HOMING, Pair, PairOptions
from tests.support.raw import Reply, connect
from tests.support.recorder import Script, body, fail, note, pause, read_body, receive, respond, start, wait, watch

Run = Callable[[Coroutine[Any, Any, Any]], Any]

EVENTS = start(headers=[(b"content-type", b"text/event-stream")])


async def one_request(
    column: Column,
    script: Script,
    method: str = "GET",
    target: str = "/",
    headers: Any = (),
    data: bytes | None = None,
    *,
    refused: bool = False,
) -> Seen:
    """One request, its reply, what the app saw, and a probe of the connection."""
    column.script(script)
    async with column.connect() as wire:
        await wire.send(column.request(method, target, headers, data))
        reply = await wire.reply(method)
        app = await column.app(wire, reply=reply)
        app = before_refusal(app) if refused else app
        return {"reply": of_reply(reply), "app": app, "after": await column.after(wire, reply, app)}


def same(pair: Pair, run: Run, script: Script, *request: Any) -> Seen:
    """Play it in all columns; what the plain one saw."""
    seen = run(differ(pair, lambda column: one_request(column, script, *request)))
    return next(iter(seen.values()))


async def event_stream(column: Column, frames: list[bytes]) -> tuple[Seen, list[float]]:
    """Each frame is sent only once the one before has arrived: none waits for a second, or for a size."""
    steps = [EVENTS]
    for n, data in enumerate(frames):
        steps += [wait(f"{n}"), note(f"{n}"), body(data, more=True)]
    column.script([*steps, body()])
    delays = []
    async with column.connect() as wire:
        await wire.send(column.request("GET", "/events", [("Accept", "text/event-stream")]))
        performance = await column.performance()
        reply = Reply(head=await wire.head())
        for n, data in enumerate(frames):
            performance.open(f"{n}")
            got = await wire.until(data + b"\r\n")
            delays.append(time.monotonic() - (await performance.noted(f"{n}")).at)
            reply.framed += got
        reply.framed += await wire.until(b"0\r\n\r\n")
        reply.complete = True
        app = await column.app(wire)
        return {"reply": of_reply(reply), "app": app, "after": await column.after(wire, reply, app)}, delays


def test_scenario_19_small_event_frames(pair: Pair, run: Run) -> None:
    """100 frames of 20 bytes, each within 50 ms. The source's 200 ms between them are cut: here the next is sent as soon as
    the last has arrived, which a forwarder that gathers would never let happen. `…_paced` has the 200 ms (long)."""
    frames = [b"data: frame %06d\n\n" % n for n in range(100)]
    assert {len(frame) for frame in frames} == {20}
    delays: dict[str, list[float]] = {}

    async def play(column: Column) -> Seen:
        seen, delays[column.name] = await event_stream(column, frames)
        assert b"content-length" not in seen["reply"]["head"].lower()
        return seen

    run(differ(pair, play, one_by_one=True))
    for name, measured in delays.items():
        assert statistics.median(measured) <= 0.05, (name, sorted(measured)[-5:])
        assert max(measured) <= 0.5, (name, sorted(measured)[-5:])  # a busy test machine, still far from a gathered one


@pytest.mark.long
def test_scenario_19_small_event_frames_paced(pair: Pair, run: Run) -> None:
    frames = [b"data: frame %06d\n\n" % n for n in range(100)]
    steps = [EVENTS]
    for n, data in enumerate(frames):
        steps += [pause(0.2), note(f"{n}"), body(data, more=True)]

    async def play(column: Column) -> Seen:
        column.script([*steps, body()])
        async with column.connect() as wire:
            await wire.send(column.request("GET", "/events"))
            performance = await column.performance()
            reply = Reply(head=await wire.head())
            delays = []
            for n, data in enumerate(frames):
                reply.framed += await wire.until(data + b"\r\n")
                delays.append(time.monotonic() - (await performance.noted(f"{n}")).at)
            reply.framed += await wire.until(b"0\r\n\r\n")
            assert sorted(delays)[94] <= 0.05, delays
            return {"reply": of_reply(reply), "app": await column.app(wire)}

    run(differ(pair, play))


def test_scenario_20_a_silent_stream_outlives_the_owner_timeout(pairs: Pairs, run: Run) -> None:
    """Minutes cut to seconds by cutting the limit: with an owner timeout of 1.5 s the app is silent for longer, before its
    reply and inside it. The long tests keep the minutes of the source."""
    pair = pairs.get("impatient", PairOptions(sticky={"owner_timeout_seconds": 1.5}))
    script = [pause(1.7), EVENTS, body(b": ping\n\n", more=True), pause(1.7), body()]
    same(pair, run, script)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_scenario_20_stream_longer_than_five_minutes(pair: Pair, run: Run) -> None:
    steps = [EVENTS]
    for n in range(24):
        steps += [pause(15), body(b": ping %d\n\n" % n, more=True)]
    long_read(pair, run, [*steps, body()], 30)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_scenario_20_stream_silent_for_ten_minutes(pair: Pair, run: Run) -> None:
    long_read(
        pair, run, [EVENTS, body(b": first\n\n", more=True), pause(600), body(b": last\n\n", more=True), body()], 630
    )


def long_read(pair: Pair, run: Run, script: Script, gap_seconds: float) -> None:
    async def play(column: Column) -> Seen:
        column.script(script)
        async with column.connect() as wire:
            await wire.send(column.request("GET", "/events"))
            reply = await wire.reply(timeout_seconds=gap_seconds)
            return {"reply": of_reply(reply), "app": await column.app(wire)}

    run(differ(pair, play))


MIXED = [
    (b"Set-Cookie", b"a=1; Path=/"),
    (b"X-D", b"1"),
    (b"set-cookie", b"b=2; HttpOnly"),
    (b"content-type", b"text/plain"),
    (b"X-d", b"2"),
    (b"SET-COOKIE", b"c=3; Expires=Wed, 09 Jun 2027 10:18:14 GMT"),
    (b"Set-Cookie", b"a=4"),
    (b"x-z", b"last but one"),
    (b"Set-Cookie", b"e="),
]


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, MIXED),
        (302, [(b"location", b"http://elsewhere.test/x?y=1"), *MIXED]),
        (307, [(b"location", b"/relative")]),
        (401, [(b"WWW-Authenticate", b'Basic realm="a, b"'), (b"x", b"y"), (b"WWW-Authenticate", b"Bearer")]),
    ],
    ids=["cookies", "found", "temporary", "unauthorized"],
)
def test_scenario_22_reply_headers_and_redirects_as_sent(
    pair: Pair, run: Run, status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    seen = same(pair, run, respond(status, headers))
    reply = Reply(head=seen["reply"]["head"])
    assert reply.status == status
    sent = [(name.lower(), value) for name, value in headers]
    assert [one for one in reply.headers if one[0] not in (b"date", b"server", b"content-length")] == sent
    assert len(reply.all(b"date")) == len(reply.all(b"server")) == 1


def test_scenario_25_header_bytes_outside_ascii(pair: Pair, run: Run) -> None:
    request = [
        (b"X-E9", b"caf\xe9"),
        (b"X-Utf8", "naïve ✓ 🦉".encode()),
        (b"X-All", bytes(range(0x80, 0x100))),
        (b"X-Empty", b""),
        *((b"X-%d" % n, b"%d" % n) for n in range(100)),
    ]
    seen = same(pair, run, respond(200, [*request, (b"x-e9", b"\xe9")]), "GET", "/", request)
    names = [(name.lower(), value) for name, value in request]
    headers = seen["app"]["scope"]["headers"]
    assert [one for one in headers if one in names] == names
    assert Reply(head=seen["reply"]["head"]).all(b"x-e9") == [b"caf\xe9", b"\xe9"]


@pytest.mark.parametrize(
    "header",
    [
        (b"x-split", b"a\r\nset-cookie: forged=1"),
        (b"x-split", b"a\nset-cookie: forged=1"),
        (b"x-nul", b"a\x00b"),
        (b"x\r\nset-cookie", b"forged=1"),
        (b"x y", b"a space in a name"),
    ],
    ids=["crlf", "lf", "nul", "name", "space"],
)
def test_a_header_that_no_server_sends_is_judged_alike(pair: Pair, run: Run, header: tuple[bytes, bytes]) -> None:
    """By the server that has accepted the request, which raises: the client gets the same bytes."""

    async def play(column: Column) -> Seen:
        column.script(respond(200, [(b"x-before", b"1"), header]))
        async with column.connect() as wire:
            await wire.send(column.request())
            reply = await wire.reply()
            assert b"forged" not in reply.head
            return {"reply": of_reply(reply)}

    run(differ(pair, play))


@pytest.mark.parametrize(
    ("method", "script"),
    [
        ("HEAD", [start(headers=[(b"content-length", b"5")]), body()]),
        ("HEAD", [start(), body(b"an app that sends a body to HEAD")]),
        ("GET", [start(204), body()]),
        ("DELETE", [start(204, [(b"content-length", b"0")]), body()]),
        ("GET", [start(304, [(b"content-length", b"1234"), (b"etag", b'"x"')]), body()]),
        ("GET", [start(304), body()]),
        ("GET", [start(200, [(b"content-length", b"0")]), body()]),
        ("POST", [start(200), body()]),
        ("GET", [start(205, [(b"content-length", b"0")]), body()]),
    ],
    ids=["head", "head-body", "204", "204-length", "304-length", "304", "empty", "empty-chunked", "205"],
)
def test_scenario_27_replies_without_a_body(pair: Pair, run: Run, method: str, script: Script) -> None:
    # uvicorn itself takes a 304 with the length of the other reply for a body cut short, and ends the connection.
    refused = (b"content-length", b"1234") in script[0][1]["headers"]

    async def play(column: Column) -> Seen:
        return await one_request(column, script, method, refused=refused)

    seen = run(differ(pair, play))[PLAIN]
    assert seen["reply"]["complete"]
    assert refused or seen["after"]["probe"]["framed"] == b"probe"


@pytest.mark.parametrize("size", [9_000, 60_000, 200_000])
def test_scenario_28_long_reply_headers(pair: Pair, run: Run, size: int) -> None:
    same(pair, run, respond(200, [(b"x-long", b"l" * size), (b"set-cookie", b"c=" + b"k" * size)]))


def test_scenario_28_compressed_replies_pass_untouched(pair: Pair, run: Run) -> None:
    packed = gzip.compress(b"some text, over and over; " * 400, mtime=0)
    encoded = [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    seen = same(pair, run, respond(200, encoded, packed), "GET", "/", [("Accept-Encoding", "gzip, br")])
    assert seen["reply"]["framed"] == packed
    # Bytes that only claim to be brotli: whoever decodes would fail.
    same(pair, run, [start(200, [(b"content-encoding", b"br")]), body(b"\x0b\x02 not brotli", more=True), body()])


def test_a_request_that_the_server_itself_rejects_reaches_no_app(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        async with column.connect() as wire:
            await wire.send(column.request("GET", "/é".encode()))
            reply = await wire.reply()
            app = await column.app(wire, reply=reply)
            return {"reply": of_reply(reply), "app": app, "after": await column.after(wire, reply, app)}

    run(differ(pair, play))


def test_an_app_that_works_on_after_its_reply_does_not_hold_up_the_connection(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script([*respond(), wait("probed"), receive()])
        async with column.connect() as wire:
            await wire.send(column.request())
            reply = await wire.reply()
            probe = await column.probe(wire)
            (await column.performance()).open("probed")
            return {"reply": of_reply(reply), "probe": probe, "app": await column.app(wire)}

    run(differ(pair, play))


def test_an_app_that_raises_after_its_reply_has_still_sent_it_whole(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script([*respond(), wait("read"), fail()])
        async with column.connect() as wire:
            await wire.send(column.request())
            reply = await wire.reply()
            (await column.performance()).open("read")
            return {"reply": of_reply(reply), "app": await column.app(wire)}

    run(differ(pair, play))


def test_an_app_that_streams_and_listens_at_once_sees_the_same(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script(
            [read_body(), watch(), EVENTS, *(body(b"data: x\n\n", more=True) for _ in range(5)), body(), wait("x")]
        )
        async with column.connect() as wire:
            await wire.send(column.request("POST", "/", body=b"asked"))
            reply = await wire.reply()
            performance = await column.performance()
            await performance.disconnected()
            performance.open("x")
            return {"reply": of_reply(reply), "app": await column.app(wire)}

    run(differ(pair, play))


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 3_000_000])
def test_a_body_of_any_size_is_echoed_byte_for_byte(pair: Pair, run: Run, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)

    async def play(column: Column) -> Seen:
        seen = await one_request(column, [read_body(), *respond(200, [], data)], "POST", "/", (), data)
        assert seen["reply"]["framed"] == data
        assert seen["app"]["records"][0][1]["body"] == data
        return seen

    run(differ(pair, play))


@pytest.mark.skipif(HOMING == "plain", reason="nobody forwards in this mode")
def test_the_forwarded_column_is_served_by_another_process_than_it_arrived_at(pair: Pair, run: Run) -> None:
    """What the whole suite rests on: in that column the front worker accepts and the owner's app answers."""

    async def play() -> None:
        session = await pair.start_session()
        for worker in (pair.owner, pair.front):
            async with connect(worker.address) as wire:
                await wire.send(Column(FORWARDED, pair, worker, "owner", session, pair.number()).request())
                assert (await wire.reply()).body.split() == [b"owner", str(pair.owner.pid).encode()]

    run(play())
