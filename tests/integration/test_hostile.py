"""Hostile requests on a whole server: cookies, IDs, headers and bodies made to mislead.

Everything goes to both workers of `homing run`, so each input is also seen through a forward. Rows that other tests show:

- T1, T2, T9: the router's verdict on a cookie is Starlette's (`tests/contract/test_cookie.py`).
- T10-T14, T16, T17, T34: tokens, path keys and `x-ng-session-owner` (`tests/integration/seeds`).
- T19-T22: the run directory, its sockets and records (`tests/unit/test_rundir.py`, `tests/contract/test_owners.py`,
  `test_owners_deaths.py`, and planted records in `test_answers.py`).
- T25-T29: `tests/integration/differential`. T35, T38: `test_answers.py`. T36: `tests/unit/routing/test_decision.py`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import os
import random
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from itsdangerous import TimestampSigner
from tests.support.raw import Reply, WebSocketWire, Wire, WireError, connect, request
from tests.support.recorder import read_body, respond
from tests.support.staged import Shared, Staged, call, open_staged

MAX_BODY = 65_536
SECRET = "a secret of these tests, and of nobody else"
OPTIONS = (
    *("--session", "header:x-session", "--session", "cookie:visit", "--session", "query:session"),
    "--no-handoff",  # each connection is to stay at the worker that a test has it at
    *("--session", "signed-cookie:session:sid", "--session", "body:session@/named", "--secret-env", "TEST_SECRET"),
    *("--max-body", str(MAX_BODY), "--no-access-log", "--log-level", "debug"),
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        shared = Shared(runner)
        yield shared
        shared.close()


@pytest.fixture
def server(shared: Shared) -> Iterator[Staged]:
    staged = shared.get("hostile", lambda: open_staged(*OPTIONS, workers=2, env={"TEST_SECRET": SECRET}, clean=True))
    workers = staged.server.worker_pids()
    yield staged
    # Whatever came: the same processes serve, nothing raised, and nothing is where it should not be.
    assert staged.server.worker_pids() == workers
    assert not staged.server.log.find("Traceback"), staged.server.log
    names = {re.sub("[0-9a-f]{32}", "<worker>", entry.name) for entry in staged.run_directory.iterdir()}
    of_workers = {"<worker>.sock", "<worker>.conn", "<worker>.life"}
    of_server = {"server.lock", "server.json", "control.sock", "page", "board", "permits", "first-app"}
    assert names <= of_workers | of_server | {"session-owners", "owners.lock"}, names
    for record in (staged.run_directory / "session-owners").iterdir():
        assert re.fullmatch("[0-9a-f]{64}", record.name)
        assert re.fullmatch("[0-9a-f]{32}[.][0-9a-f]{32}", os.readlink(record))


async def owner_of(wires: dict[int, Wire], **named: Any) -> set[bytes]:
    """Who serves this, asked through every worker: one and the same, or the status of a refusal."""
    replies = [await call(wire, **named) for wire in wires.values()]
    return {reply.body.split()[-1] if reply.status == 200 else b"%d" % reply.status for reply in replies}


# --- IDs ---

TEXTS = [
    *(
        "a",
        "x" * 255,
        "x" * 256,
        "x" * 1024,
        "../../x",
        "../session-owners/x",
        "a/b",
        "%00",
        "%2e%2e%2f",
        ".",
        "..",
        "~",
    ),
    *("a b", "a  b", "CaSe", "case", "CASE", "0", "null", "None", "-1", "'; --", '"quoted"', "a,b", "a;b", "a=b", "{}"),
    *("\t tab", "a\tb", "é", "e\u0301", "🦊", "\u202e", "日本語" * 100, "\x7f", "x" * 64 + ".sock", "0" * 64),
]
"""Distinct once a header's surrounding blanks are off, so no two are one session."""


def in_header(text: str) -> dict[str, Any]:
    return {"headers": [("x-session", text.encode().decode("latin-1"))]}


def in_body(text: str) -> dict[str, Any]:
    return {"method": "POST", "path": "/named", "body": json.dumps({"session": text}).encode()}


def in_query(text: str) -> dict[str, Any]:
    quoted = "".join(f"%{byte:02x}" for byte in text.encode())
    return {"path": f"/?session={quoted}"}


@pytest.mark.parametrize("place", [in_header, in_body, in_query], ids=lambda place: place.__name__)
def test_scenario_10_distinct_ids_never_share_an_owner_whatever_they_are(
    shared: Shared, server: Staged, place: Any
) -> None:
    async def test() -> None:
        before = set(os.listdir(server.run_directory / "session-owners"))
        async with server.wires() as wires:
            first, second = wires
            texts = [text for text in TEXTS if place is not in_header or "\x7f" not in text]  # no header may hold that
            for number, text in enumerate(texts):
                named = place(f"{place.__name__} {text}" if place is not in_header else f"{place.__name__}.{text}")
                arrives = (first, second)[number % 2]
                reply = await call(wires[arrives], **named)
                if len(text) >= 1024:
                    assert reply.status == 400
                    assert reply.one(b"homing-error") == b"session_id_too_long"
                    continue
                assert reply.status == 200, (text, reply)
                assert await owner_of(wires, **named) == {b"%d" % arrives}, text
        new = set(os.listdir(server.run_directory / "session-owners")) - before
        assert len(new) == len([text for text in texts if len(text) < 1024])

    shared.run(test())


def test_a_text_is_one_session_from_json_and_from_a_header_or_cookie_in_utf8_or_latin1(
    shared: Shared, server: Staged
) -> None:
    async def test() -> None:
        async with server.wires() as wires:
            for arrives, wire in wires.items():
                text = f"zoë {arrives}"
                assert (await call(wire, **in_body(text))).status == 200
                # As they stand here they go out as Latin-1.
                for sent in (text, text.encode().decode("latin-1")):
                    for pair in (("x-session", sent), ("cookie", f"visit={sent}")):
                        assert await owner_of(wires, headers=[pair]) == {b"%d" % arrives}, pair

    shared.run(test())


@pytest.mark.parametrize("length", [1, 1024, 1025, 4000, 64_000])
def test_scenario_10_the_longest_id_is_1024_bytes_wherever_it_stands(
    shared: Shared, server: Staged, length: int
) -> None:
    async def test() -> None:
        text = "z" * length
        allowed = length <= 1024
        cookie = {"headers": [("cookie", f"a=b; visit={text}")]}
        async with server.wires() as wires:
            for named in (in_header(text), in_body(text), {"path": f"/?session={text}"}, cookie):
                for wire in wires.values():
                    reply = await call(wire, **named)
                    assert reply.status == (200 if allowed else 400), (named, reply)
                    assert reply.all(b"homing-error") == ([] if allowed else [b"session_id_too_long"])

    shared.run(test())


def test_an_empty_text_names_no_session(shared: Shared, server: Staged) -> None:
    async def test() -> None:
        before = os.listdir(server.run_directory / "session-owners")
        async with server.wires() as wires:
            for pid, wire in wires.items():
                for named in (in_header(""), in_body(""), in_query(""), {"headers": [("cookie", "visit=")]}):
                    reply = await call(wire, **named)
                    assert (reply.status, reply.body.split()[-1]) == (200, b"%d" % pid)
        assert os.listdir(server.run_directory / "session-owners") == before

    shared.run(test())


# --- cookies ---


def signed(value: bytes, secret: str = SECRET) -> str:
    return TimestampSigner(secret).sign(base64.b64encode(value)).decode()


def test_a_cookie_that_is_not_the_apps_names_no_session(shared: Shared, server: Staged) -> None:
    good = signed(b'{"sid": "signed-1"}')
    flips = random.Random(7).sample(range(len(good)), 40)
    bad = [good[:at] + chr(ord(good[at]) ^ 1) + good[at + 1 :] for at in flips]
    bad += [
        signed(b'{"sid": "signed-1"}', "another secret"), signed(b"[]"), signed(b"not json"), signed(b'{"sid": 1}'),
        signed(b'{"sid": null}'), signed(b"\xff\xfe"), "", ".", "..", good[:-1], good + "x", "x" * 8000, "é" * 100,
    ]  # fmt: skip

    async def test() -> None:
        async with server.wires() as wires:
            owner, other = wires
            assert await owner_of({owner: wires[owner]}, headers=[("cookie", f"session={good}")]) == {b"%d" % owner}
            assert (await call(wires[other], headers=[("cookie", f"session={good}")])).body.split()[-1] == b"%d" % owner
            before = os.listdir(server.run_directory / "session-owners")
            for value in bad:
                if any(character in value for character in ';,"\\ '):
                    continue  # the flip made two cookies of it
                for pid, wire in wires.items():
                    headers = [("cookie", f"session={value}".encode().decode("latin-1"))]
                    reply = await call(wire, headers=headers)
                    assert (reply.status, reply.body.split()[-1]) == (200, b"%d" % pid), value
            assert os.listdir(server.run_directory / "session-owners") == before

    shared.run(test())


def test_only_the_exact_cookie_counts_among_however_many(shared: Shared, server: Staged) -> None:
    many = "; ".join(f"c{number}={'v' * 50}" for number in range(200))

    async def test() -> None:
        async with server.wires() as wires:
            owner, other = wires
            assert (await call(wires[owner], headers=[("cookie", "visit=exact")])).status == 200
            same = [
                f"{many}; visit=exact",
                f"visit=exact; {many}",
                "thisisnotavisit=x; visit=exact",
                " visit=exact ;;;",
            ]
            for cookie in same:
                reply = await call(wires[other], headers=[("cookie", cookie)])
                assert (reply.status, reply.body.split()[-1]) == (200, b"%d" % owner), cookie[:80]
            for cookie in (
                many,
                "thisisnotavisit=exact",
                "visitor=exact",
                "Visit=exact",
                "xvisit=exact",
                "=visit",
                "visit",
            ):
                reply = await call(wires[other], headers=[("cookie", cookie)])
                assert (reply.status, reply.body.split()[-1]) == (200, b"%d" % other), cookie[:80]

    shared.run(test())


# --- what only looks like the inside of the server ---

MARKERS = [
    *("homing-hop", "homing.hop", "x-homing-hop", "x-homing-forwarded", "x-homing-reason", "x-homing-session-id"),
    *("homing-session-id", "homing-acquire-session", "x-homing-owner", "homing-scattered", "x-forwarded-worker"),
    *("x-ng-session-owner", "homing-error", "homing.request", "homing.abort", "homing.head-length", "via", "x-hop"),
]


def test_no_header_makes_a_request_a_forwarded_one(shared: Shared, server: Staged) -> None:
    async def test() -> None:
        async with server.wires() as wires:
            owner, front = wires
            identifiers = [entry.stem for entry in server.run_directory.glob("*.life")]
            session = await server.start_session(wires[owner])
            values = [
                "1",
                "owned",
                "OWNED",
                *identifiers,
                "0" * 32,
                "../../../etc/passwd",
                "0" * 32 + "/../x",
                "\xe9" * 32,
            ]
            for name in MARKERS:
                for value in values:
                    case = server.script(read_body(), *respond())
                    reply = await call(wires[front], session, case, headers=[(name, value)])
                    assert reply.status == 200, (name, value, reply)
                    (performance,) = server.stage.performances(case)
                    assert performance.pid == owner, (name, value)
                    # An ordinary header to the app, as it came.
                    sent = (name.encode(), value.encode("latin-1"))
                    assert sent in performance.scope["headers"]
                    assert performance.scope["path"] == "/"
            # Nor does one make a session of another's be served here, or name a worker for a request without one.
            for name in MARKERS:
                reply = await call(wires[front], None, headers=[(name, identifiers[0]), ("x-nothing", "1")])
                assert reply.body.split()[-1] == b"%d" % front
            # A WebSocket neither.
            opened = await WebSocketWire(wires[front]).open("/", [("x-session", session), ("homing-hop", "1")])
            assert opened.status == 101
            frame = await WebSocketWire(wires[front]).frame()
            assert frame.data.split()[-1] == b"%d" % owner

    shared.run(test())


# --- bodies of declared routes ---


async def post_named(wire: Wire, *pieces: bytes, headers: list[tuple[str, str]]) -> Reply:
    """A request with these raw pieces as its body. What the server no longer reads is not waited for."""
    head = request("POST", "/named", [("x-case", "none"), ("content-type", "application/json"), *headers])
    await wire.send(head)
    for piece in pieces:
        if wire.end != "open" or wire.received:
            break
        await wire.send(piece)
    return await wire.reply("POST")


@pytest.mark.parametrize(
    ("headers", "pieces", "status", "code"),
    [
        ([("content-length", "10000000000")], [b'{"session": "'], 413, b"body_too_large"),
        ([("content-length", str(MAX_BODY + 1))], [b'{"session": "', b"x" * 1000], 413, b"body_too_large"),
        ([("transfer-encoding", "chunked")], [b'd\r\n{"session": "\r\n'] + [b"1000\r\n" + b"x" * 4096 + b"\r\n"] * 64, 413, b"body_too_large"),
        ([("content-encoding", "gzip"), ("content-length", "20")], [b"x" * 20], 415, b"encoded_body"),
        ([("content-encoding", "br"), ("content-length", "2")], [b"{}"], 415, b"encoded_body"),
        ([("content-length", "10000")], [b"[" * 10_000], 400, b"bad_request"),
        ([("content-length", "31")], [b'{"session": "a", "session":"b"}'], 400, b"duplicate_field"),
    ],
    ids=["length", "one-over", "endless", "gzip", "br", "nesting", "twice"],
)  # fmt: skip
def test_a_body_that_cannot_be_looked_into_is_refused_before_the_app(
    shared: Shared, server: Staged, headers: list[tuple[str, str]], pieces: list[bytes], status: int, code: bytes
) -> None:
    async def test() -> None:
        server.stage.script("none", [read_body(), *respond()])
        for _ in range(4):
            async with connect(server.server.address) as wire:
                reply = await post_named(wire, *pieces, headers=headers)
                assert (reply.status, reply.one(b"homing-error")) == (status, code)
        assert server.stage.performances("none") == []

    shared.run(test())


JSON_TRICKS = [
    b"", b"{", b"nul", b"[]", b"null", b'"session"', b"{}", b'{"session": 1}', b'{"session": null}', b'{"session": []}',
    b'{"session": {"session": "x"}}', b'{"SESSION": "x"}', b'{"session": NaN}', b'\xef\xbb\xbf{"session": ""}', b"\xff\xfe\x00",
    b'{"a": 1e999999, "b": -0, "c": 1}', b"plain text", b"\x00" * 100, b'{"session": ""}', b"session=x",
]  # fmt: skip


@pytest.mark.parametrize("body", JSON_TRICKS, ids=[str(number) for number in range(len(JSON_TRICKS))])
def test_a_body_that_names_no_session_reaches_the_app_as_it_came(shared: Shared, server: Staged, body: bytes) -> None:
    async def test() -> None:
        case = server.script(read_body(), *respond())
        async with server.wires() as wires:
            for wire in wires.values():
                reply = await call(wire, None, case, method="POST", path="/named", body=body)
                assert reply.status == 200, reply
            seen = server.stage.performances(case)
            assert [performance.pid for performance in seen] == list(wires)
        for performance in seen:
            assert b"".join(event.get("body", b"") for event in performance.events) == body

    shared.run(test())


def test_a_decompression_bomb_costs_nothing(shared: Shared, server: Staged) -> None:
    bomb = gzip.compress(bytes(50_000_000))

    async def test() -> None:
        before = memory(server)
        for _ in range(5):
            async with connect(server.server.address) as wire:
                headers = [("content-encoding", "gzip"), ("content-length", str(len(bomb)))]
                assert (await post_named(wire, bomb, headers=headers)).status == 415
        assert memory(server) - before < 20_000_000

    shared.run(test())


def memory(server: Staged) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.server.worker_pids()]
    return sum(pages) * resource.getpagesize()


def test_many_large_bodies_at_once_are_bounded_and_leave_room_for_others(shared: Shared, server: Staged) -> None:
    async def test() -> None:
        before = memory(server)
        head = request("POST", "/named", [("content-length", "10000000")])
        async with asyncio.TaskGroup() as group:

            async def hostile() -> None:
                async with connect(server.server.address) as wire:
                    await wire.send(head, b'{"session": "' + b"x" * 30_000)
                    await released.wait()

            released = asyncio.Event()
            for _ in range(100):
                group.create_task(hostile())
            async with server.wires() as wires:
                for wire in wires.values():
                    assert (await call(wire)).status == 200
            assert memory(server) - before < 60_000_000
            released.set()

    shared.run(test())


@pytest.mark.long
@pytest.mark.timeout(150)
def test_a_body_that_comes_too_slowly_is_408(shared: Shared, server: Staged) -> None:
    """No further byte for 10 s; and a byte every 5 s, which is not all of it within 60 s."""

    async def silent() -> None:
        async with connect(server.server.address) as wire:
            await wire.send(request("POST", "/named", [("content-length", "100")]), b'{"session": ')
            reply = await wire.reply("POST", timeout_seconds=20)
            assert (reply.status, reply.one(b"homing-error")) == (408, b"body_timeout")

    async def dripping() -> None:
        async with connect(server.server.address) as wire:
            await wire.send(request("POST", "/named", [("content-length", "100")]), b'{"session": ')
            reading = asyncio.create_task(wire.reply("POST", timeout_seconds=90))
            # Not to wait for something: the slow client is the case.
            while not (await asyncio.wait({reading}, timeout=5))[0]:
                await wire.send(b"x")
            assert (await reading).status == 408

    async def test() -> None:
        await asyncio.gather(silent(), dripping())

    shared.run(test())


# --- framing ---

FORWARDED = b"POST / HTTP/1.1\r\nHost: a\r\nx-session: %s\r\nx-case: %s\r\n"
INNER = b"GET /smuggled HTTP/1.1\r\nHost: a\r\nx-session: %s\r\nx-case: smuggled\r\n\r\n"

LAST = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

FRAMINGS: dict[str, bytes] = {
    "cl": b"Content-Length: 3\r\n\r\nabc",
    "cl zero": b"Content-Length: 0\r\n\r\n",
    "no body": b"\r\n",
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "cl inside": b"Content-Length: %(size)d\r\n\r\n%(inner)s",
    "chunked inside": b"Transfer-Encoding: chunked\r\n\r\n%(hex)x\r\n%(inner)s\r\n0\r\n\r\n",
    "cl then te": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%(inner)s",
    "te then cl": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n%(inner)s",
    "cl zero and te": b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "two cl": b"Content-Length: 3\r\nContent-Length: %(size)d\r\n\r\nabc%(inner)s",
    "two equal cl": b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "cl list": b"Content-Length: 3, 3\r\n\r\nabc",
    "cl list unequal": b"Content-Length: 3, %(size)d\r\n\r\nabc%(inner)s",
    "cl plus": b"Content-Length: +3\r\n\r\nabc%(inner)s",
    "cl minus": b"Content-Length: -3\r\n\r\nabc%(inner)s",
    "cl hex": b"Content-Length: 0x3\r\n\r\nabc%(inner)s",
    "cl blank": b"Content-Length: \r\n\r\n%(inner)s",
    "cl inner blank": b"Content-Length: 3 3\r\n\r\nabc%(inner)s",
    "cl huge": b"Content-Length: 18446744073709551619\r\n\r\nabc%(inner)s",
    "cl underscore": b"Content-Length: 1_0\r\n\r\n0123456789%(inner)s",
    "cl before colon": b"Content-Length : 3\r\n\r\nabc%(inner)s",
    "te identity": b"Transfer-Encoding: identity\r\n\r\n%(inner)s",
    "te list": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n%(inner)s",
    "te twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n%(inner)s",
    "te chunked twice": b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n%(inner)s",
    "te prefix": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n%(inner)s",
    "te quoted": b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n%(inner)s',
    "te vertical tab": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n%(inner)s",
    "te tab": b"Transfer-Encoding:\tchunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "te upper case": b"TRANSFER-ENCODING: CHUNKED\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "te folded": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n%(inner)s",
    "te before colon": b"Transfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n%(inner)s",
    "bare lf": b"Content-Length: 3\n\nabc%(inner)s",
    "bare cr": b"X: a\rContent-Length: %(size)d\r\n\r\n%(inner)s",
    "nul": b"X: a\x00b\r\nContent-Length: 3\r\n\r\nabc%(inner)s",
    "chunk extension": b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0;%(line)s\r\n\r\n",
    "chunk size overflow": b"Transfer-Encoding: chunked\r\n\r\n100000000000000003\r\nabc\r\n0\r\n\r\n%(inner)s",
    "chunk size sign": b"Transfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n%(inner)s",
    "chunk size 0x": b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n%(inner)s",
    "chunk too long": b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n%(inner)s",
    "chunk bare lf": b"Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n%(inner)s",
    "trailers": b"Transfer-Encoding: chunked\r\nTrailer: x-session\r\n\r\n3\r\nabc\r\n0\r\nx-session: other\r\n\r\n",
    "trailing te": b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: %(size)d\r\n\r\n%(inner)s",
    "upgrade h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n%(inner)s",
    "expect": b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc%(inner)s",
    "connection names": b"Connection: content-length, x-session\r\nContent-Length: 3\r\n\r\nabc%(inner)s",
}


@pytest.mark.parametrize("framing", list(FRAMINGS))
def test_each_request_that_is_answered_was_seen_once_by_the_owner_and_nothing_else_was(
    shared: Shared, server: Staged, framing: str
) -> None:
    """T24: the recorder at the owner counts. The same bytes have the same effect where they arrive at the owner itself."""

    async def play(at: int, session: str) -> tuple[list[int], list[bytes]]:
        case = server.script(read_body(), *respond())
        inner_case = server.script(read_body(), *respond())
        inner = (INNER % session.encode()).replace(b"smuggled\r\n\r\n", inner_case.encode() + b"\r\n\r\n")
        fill = {b"size": len(inner), b"hex": len(inner), b"inner": inner, b"line": b"x" * 100}
        sent = FORWARDED % (session.encode(), case.encode()) + FRAMINGS[framing] % fill
        statuses: list[int] = []
        async with server.connection(at) as wire:
            await wire.send(sent, LAST)
            with contextlib.suppress(WireError):  # some swallow the last request too, and wait for more
                while wire.end == "open":
                    reply = await wire.reply("POST", timeout_seconds=0.5)
                    if reply.head:
                        assert reply.complete
                        assert reply.status in (200, 400), reply
                        statuses.append(reply.status)
        seen = server.stage.performances(case) + server.stage.performances(inner_case)
        for performance in seen:
            await performance.done()
            assert performance.pid == int((await owner(session)).decode())
        assert len(seen) <= len(statuses)
        assert len(server.stage.performances(case)) <= 1
        assert len(server.stage.performances(inner_case)) <= 1
        # One that broke off inside its body may have reached an app already, or not yet.
        whole = [each for each in seen if each.events and not each.events[-1].get("more_body", True)]
        bodies = [b"".join(event.get("body", b"") for event in each.events) for each in whole]
        return statuses, [body.replace(inner, b"<inner>") for body in bodies]

    async def owner(session: str) -> bytes:
        return next(iter(await owner_of(wires, session=session)))

    wires: dict[int, Wire] = {}

    async def test() -> None:
        async with server.wires() as found:
            wires.update(found)
            here, there = wires
            session = await server.start_session(wires[here])
            assert await play(there, session) == await play(here, session)

    shared.run(test())
