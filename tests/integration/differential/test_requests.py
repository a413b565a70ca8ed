"""tests/scenarios.md part C, requests: hop-by-hop headers, Expect, addresses, pipelining, and bodies read for routing."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.integration.differential.columns import FORWARDED, LOCAL, PLAIN, Column, Seen, differ, of_reply
from tests.integration.differential.conftest import Pairs
from tests.integration.differential.test_replies import one_request, same
from tests.support import raw
from tests.support.pair import COOKIE_SECRET, HOMING, SESSION_HEADER, Pair, PairOptions
from tests.support.raw import Reply, chunked
from tests.support.recorder import read_body, read_until, receive, respond, see_scope, wait

Run = Callable[[Coroutine[Any, Any, Any]], Any]

needs_homing = pytest.mark.skipif(HOMING == "plain", reason="the harness without homing has nobody to route")


@pytest.mark.parametrize(
    "headers",
    [
        [("Connection", "close, X-Hop"), ("X-Hop", "1")],
        [("TE", "trailers"), ("Connection", "TE")],
        [("Keep-Alive", "timeout=5, max=100"), ("Connection", "keep-alive")],
        [("Connection", "keep-alive"), ("X-Hop", "1"), ("Connection", "X-Hop")],
        [("Proxy-Connection", "keep-alive"), ("Proxy-Authorization", "Basic x"), ("Trailer", "X-T")],
        [("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAoAAAAAIAAAAA")],
        [("Connection", "cookie, x-session, x-case"), ("Cookie", "a=1")],
        [],
    ],
    ids=["close", "te", "keep-alive", "two-connections", "proxy", "h2c", "names-ours", "bare"],
)
def test_scenario_29_hop_by_hop_headers(pair: Pair, run: Run, headers: list[tuple[str, str]]) -> None:
    seen = same(pair, run, respond(), "GET", "/", headers)
    sent = [(b"host", b"homing.test"), (b"x-session", seen["app"]["scope"]["headers"][1][1]), (b"x-case", b"case-0")]
    sent += [(name.lower().encode(), value.encode()) for name, value in headers]
    assert seen["app"]["scope"]["headers"] == sent


def test_scenario_32_expect_100_continue_is_answered_when_the_app_reads(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script([wait("read"), read_body(), *respond()])
        async with column.connect() as wire:
            received = wire.received
            await wire.send(column.request("POST", "/", [("Expect", "100-continue"), ("Content-Length", "10")]))
            performance = await column.performance()
            assert wire.received == received, "100 before the app has read"
            performance.open("read")
            interim = await wire.head()
            await wire.send(b"01234", b"56789")
            reply = await wire.reply()
            app = await column.app(wire)
            return {"100": interim, "reply": of_reply(reply), "app": app, "after": await column.after(wire, reply, app)}

    seen = run(differ(pair, play))[PLAIN]
    assert seen["100"] == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_scenario_32_expect_100_continue_refused_early(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script(respond(413, data=b"too large"))
        async with column.connect() as wire:
            await wire.send(column.request("POST", "/", [("Expect", "100-continue"), ("Content-Length", "1000000")]))
            reply = await wire.reply()
            wire.finish_sending()
            return {
                "reply": of_reply(reply),
                "app": await column.app(wire),
                "rest": await wire.to_end(),
                "end": wire.end,
            }

    seen = run(differ(pair, play))[PLAIN]
    assert seen["reply"]["interim"] == []
    assert seen["reply"]["framed"] == b"too large"


FORWARDED_HEADERS = [("X-Forwarded-For", "203.0.113.7"), ("X-Forwarded-Proto", "https"), ("X-Forwarded-Host", "x.test")]


@pytest.mark.parametrize("headers", [[], FORWARDED_HEADERS], ids=["bare", "forwarded-headers"])
@pytest.mark.parametrize(
    ("name", "options", "target"),
    [
        ("usual", PairOptions(), "/a/b"),
        ("untrusting", PairOptions(server={"forwarded_allow_ips": "10.9.8.7", "root_path": "/api"}), "/a/b%2Fc"),
        ("tls", PairOptions(tls=True), "/a?b"),
        ("mounted", PairOptions(wrap="mounted", server={"root_path": "/api"}), "/a/b"),
    ],
    ids=["trusting", "untrusting-root-path", "tls", "mounted-root-path"],
)
def test_scenario_35_address_scheme_root_path(
    pairs: Pairs, run: Run, name: str, options: PairOptions, target: str, headers: list[tuple[str, str]]
) -> None:
    pair = pairs.get(name, options)
    scope = same(pair, run, [read_body(), *respond()], "POST", target, headers, b"x")["app"]["scope"]
    trusted = bool(headers) and name != "untrusting"
    assert scope["scheme"] == ("https" if trusted or options.tls else "http")
    assert scope["client"] == (("203.0.113.7", 0) if trusted else (tuple, "this end of the connection"))
    assert scope["server"] == (tuple, "this end of the connection")
    root = str(options.server.get("root_path", "")) + ("/mounted" if options.wrap else "")
    assert scope["root_path"] == root
    assert scope["path"].startswith(root + "/a")
    assert scope["state"] == {"made_by": "lifespan"} or options.wrap == "mounted"


def test_scenario_38_pipelined_requests(pair: Pair, run: Run) -> None:
    """A slow request of a remote session, a fast one of a local session, then one of another remote session."""

    async def play() -> None:
        sessions = [await pair.start_session(at) for at in (pair.owner, pair.front, pair.owner)]
        served = [pair.front.name] * 3 if HOMING == "plain" else ["owner", "front", "owner"]
        columns = [
            Column("pipelined", pair, pair.front, serves, session, pair.number())
            for serves, session in zip(served, sessions, strict=True)
        ]
        for n, column in enumerate(columns):
            slow = [wait("go")] if n == 0 else []
            column.script([read_body(), *slow, *respond(data=b"reply %d" % n)])
        async with pair.connect(pair.front) as wire:
            await wire.send(b"".join(column.request("POST", f"/{n}", body=b"x") for n, column in enumerate(columns)))
            slow_one = await columns[0].performance()
            await slow_one.received(1)
            slow_one.open("go")
            replies = [await wire.reply() for _ in columns]
            assert [reply.body for reply in replies] == [b"reply 0", b"reply 1", b"reply 2"]
            for column in columns:
                assert (await column.app(wire))["records"][-1] == ("end", "returned")
            assert wire.end == "open"

    run(play())


BODY = PairOptions(
    sticky={
        "sessions": [("body", "session", "/start"), ("header", SESSION_HEADER)],
        "starts": ["POST /start"],
        "unowned": "adopt",
    }
)


def start_request(column: Column, data: bytes, *more: tuple[str, str]) -> bytes:
    headers = [("x-case", column.case()), ("Content-Type", "application/json"), *more]
    return raw.request("POST", "/start", headers) if not data else raw.request("POST", "/start", headers, data)


def test_scenario_39_body_read_for_routing_then_given_to_the_app(pairs: Pairs, run: Run) -> None:
    """In 10 pieces; the app gets the same bytes once, then the real disconnect."""
    pair = pairs.get("body", BODY)

    async def play(column: Column) -> Seen:
        data = json.dumps({"session": column.session, "text": "é" * 200, "more": list(range(50))}).encode()
        column.script([read_body(), receive(), *respond()])
        async with column.connect() as wire:
            head = start_request(column, b"", ("Content-Length", str(len(data))))
            size = len(data) // 10 + 1
            await wire.send(head, *(data[at : at + size] for at in range(0, len(data), size)))
            performance = await column.performance()
            await performance.received(1)
            wire.close()
            await performance.disconnected(timeout_seconds=2)
            records = (await column.app(wire))["records"]
            assert records[0][1] == {"type": "http.request", "body": data, "more_body": False}
            return {"records": records}

    run(differ(pair, play))


@pytest.mark.parametrize("data", [b"", b"not json", b"[1]", b'{"session": 5}', b'{"other": "x"}'], ids=repr)
def test_scenario_39_a_body_that_names_no_session_reaches_the_app_untouched(
    pairs: Pairs, run: Run, data: bytes
) -> None:
    pair = pairs.get("body", BODY)

    async def play(column: Column) -> Seen:
        column.script([read_body(), *respond(), receive()])
        async with column.connect() as wire:
            await wire.send(start_request(column, data))
            reply = await wire.reply()
            # Nobody owns it, so it is served where it arrives, in each column.
            column.serves = column.arrives.name
            app = await column.app(wire)
            return {"reply": of_reply(reply), "app": app, "after": await column.after(wire, reply, app)}

    # A connection that asks for nobody's session does not move.
    run(differ(pair, play, columns=(PLAIN, LOCAL, FORWARDED)))


@needs_homing
def test_scenario_39_half_a_body_creates_no_session(pairs: Pairs, run: Run) -> None:
    pair = pairs.get("body", BODY)

    async def play() -> None:
        session = f"half-{pair.number()}"
        column = Column("front", pair, pair.front, "front", session, pair.number())
        data = json.dumps({"session": session}).encode()
        column.script([read_body()])
        async with pair.connect(pair.front) as wire:
            await wire.send(start_request(column, b"", ("Content-Length", str(len(data)))), data[:-1])
            wire.abort()
            await wire.wait_lost()
        # The next one who names it, at another worker, is its first: served there, and not sent to the front.
        async with pair.connect(pair.owner) as wire:
            await wire.send(raw.request("GET", "/", [(SESSION_HEADER, session)]))
            assert (await wire.reply()).body.split()[0] == b"owner"
        # As with one worker the app may see the half, and then the disconnect; never a whole body.
        for performance in pair.stage.performances(column.case()):
            await performance.disconnected()

    run(play())


COOKIES = PairOptions(
    wrap="cookies",
    sticky={
        "sessions": [("signed_cookie", "session", "sid", {"secret": COOKIE_SECRET}), ("header", SESSION_HEADER)],
    },
)


def test_scenario_40_a_slow_reply_overwrites_newer_session_data(pairs: Pairs, run: Run) -> None:
    """A slow read and a quick write overlap on one session, through two workers. Which cookie wins is the framework's own
    race, so it has to be the same as with one worker, with one `Set-Cookie` at most for each reply, and none of homing's."""
    pair = pairs.get("cookies", COOKIES)

    async def play(column: Column) -> Seen:
        async def ask(wire: raw.Wire, target: str, cookie: bytes, n: int) -> None:
            headers = [("x-case", column.case(n)), *([("Cookie", cookie)] if cookie else [])]
            await wire.send(raw.request("GET", target, headers if n else [*headers, (SESSION_HEADER, column.session)]))

        other = pair.owner if column.name != PLAIN else pair.plain
        async with column.connect() as one, pair.connect(other) as two:
            # The session is started by its header, at its owner; from here on the cookie names it.
            column.script(respond())
            await ask(two, f"/login?write=sid&value={column.session}", b"", 0)
            made = await two.reply()
            (cookie,) = made.all(b"set-cookie")
            cookie = cookie.split(b";")[0]
            column.script([wait("slow"), *respond()], 1)
            await ask(one, "/slow?read=count", cookie, 1)
            slow = await column.performance(1)
            column.script(respond(), 2)
            await ask(two, "/quick?write=count&value=7", cookie, 2)
            quick = await two.reply()
            (newer,) = quick.all(b"set-cookie")
            slow.open("slow")
            late = await one.reply()
            column.script(respond(), 3)
            await ask(one, "/check?read=count", newer.split(b";")[0], 3)
            check = await one.reply()
            assert check.one(b"x-read") == b"7"
            names = [[name for name, _ in reply.headers] for reply in (made, quick, late, check)]
            assert all(each.count(b"set-cookie") <= 1 for each in names)
            return {"headers": names, "read": [late.one(b"x-read"), check.one(b"x-read")], "status": late.status}

    run(differ(pair, play))


def test_trailers_that_come_late_are_seen_alike(pair: Pair, run: Run) -> None:
    """uvicorn with httptools adds a request's trailers to the scope's headers, when they come, even after the app was called."""

    async def play(column: Column) -> Seen:
        column.script([receive(2), see_scope(), *respond()])
        async with column.connect() as wire:
            await wire.send(column.request("POST", "/", [("Transfer-Encoding", "chunked"), ("Trailer", "X-T")]))
            performance = await column.performance()
            part, end = chunked(b"some", trailers=[("X-T", "1"), ("x-session", "another")])
            await wire.send(part)
            await performance.received(1)
            await wire.send(end)
            reply = await wire.reply()
            return {"reply": of_reply(reply), "app": await column.app(wire, exact=True)}

    run(differ(pair, play))


def test_a_second_connection_close_in_the_request_ends_the_connection_after_the_reply(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        return await one_request(column, [read_body(), *respond()], "POST", "/", [("Connection", "close")], b"x")

    seen = run(differ(pair, play))[PLAIN]
    assert seen["after"] == {"rest": b"", "end": "eof"}


def test_reading_on_after_the_body_waits_for_the_end_of_the_exchange(pair: Pair, run: Run) -> None:
    async def play(column: Column) -> Seen:
        column.script([read_body(), read_until("http.disconnect")])
        async with column.connect() as wire:
            await wire.send(column.request("POST", "/", body=b"x"))
            performance = await column.performance()
            await performance.received(1)
            wire.close()
            return {"app": await column.app(wire)}

    run(differ(pair, play))


def test_replies_of_one_connection_alternate_between_workers(pair: Pair, run: Run) -> None:
    """Local and remote sessions in turn on one keep-alive connection: nothing of one reply is left for the next."""

    async def play() -> None:
        sessions = [await pair.start_session(at) for at in (pair.owner, pair.front)]
        async with pair.connect(pair.front) as wire:
            for n in range(40):
                column = Column(LOCAL, pair, pair.front, ("owner", "front")[n % 2], sessions[n % 2], pair.number())
                column.serves = "front" if HOMING == "plain" else column.serves
                column.script([read_body(), *respond(data=b"%d" % n * 100)])
                await wire.send(column.request("POST", "/", body=b"%d" % n * 1000))
                reply: Reply = await wire.reply()
                assert reply.body == b"%d" % n * 100
                await column.app(wire)

    run(play())
