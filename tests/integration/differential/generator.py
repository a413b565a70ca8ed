"""Cases for the differential from a seed: method × target × headers × framing × reply shape, and WebSocket exchanges.

Every value of every dimension occurs at least `AT_LEAST` times: each dimension is dealt out like a shuffled pack of cards.
The seed is part of each test's ID, so a failure names it; `HOMING_SEED=N` plays the same cases again.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tests.support.recorder import Script, body, fail, respond, send, start

AT_LEAST: Final = 5
HTTP_CASES: Final = 96
T = TypeVar("T")


def seed() -> int:
    """`HOMING_SEED`, or one of the test run (the same in every process of it)."""
    if text := os.environ.get("HOMING_SEED"):
        return int(text)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{random.SystemRandom().random()}"
    return zlib.crc32(run.encode()) % 1_000_000


METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "PROPFIND", "REPORT", "M-SEARCH")

TARGETS: Final[dict[str, bytes]] = {
    "root": b"/",
    "plain": b"/a/b/c",
    "query": b"/q?a=1&a=2&b=%20x&empty=&flag",
    "encoded": b"/caf%C3%A9/%2F/%25/%20?x=%2F",
    "encoded-odd": b"/%e9%00%ff/%zz",
    "slashes": b"//a//b/../c/./d/",
    "semicolon": b"/a;v=1/b;c?d;e",
    "absolute": b"http://homing.test/absolute?x=1",
    "long": b"/long/" + b"x" * 2000 + b"?y=" + b"z" * 2000,
    "question": b"/p??a=?&b=?",
    "colon": b"/a:b@c!$&'()*+,=~-._",
}

HEADERS: Final[dict[str, tuple[tuple[bytes, bytes], ...]]] = {
    "none": (),
    "usual": ((b"User-Agent", b"test/1"), (b"Accept", b"*/*"), (b"Accept-Encoding", b"gzip, br")),
    "doubled": ((b"X-D", b"1"), (b"Cookie", b"a=1"), (b"x-d", b"2"), (b"Cookie", b"b=2; c=3"), (b"X-D", b"1")),
    "bytes": ((b"X-Latin", b"caf\xe9"), (b"X-Utf8", "é✓".encode()), (b"X-Empty", b""), (b"X-Tab", b"a\tb")),
    "hundred": tuple((b"X-H%d" % n, b"v%d" % n) for n in range(100)),
    "long": ((b"X-Long", b"l" * 9000), (b"Cookie", b"c=" + b"k" * 4000)),
    "hop": (
        (b"TE", b"trailers"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"1"),
    ),
    "forwarded": ((b"X-Forwarded-For", b"203.0.113.9"), (b"X-Forwarded-Proto", b"https"), (b"Forwarded", b"for=x")),
    "close": ((b"Connection", b"close"),),
    "odd-names": (
        (b"X_Under", b"1"),
        (b"!#$%&'*+-.^_`|~", b"2"),
        (b"homing-error", b"3"),
        (b"x-ng-session-owner", b"4"),
    ),
}

FRAMINGS: Final = (
    "none",
    "length",
    "length-pieces",
    "length-large",
    "chunked",
    "chunked-pieces",
    "trailers",
    "expect",
    "expect-refused",
    "pipelined",
    "http10",
    "unread",
)

COOKIES: Final = [(b"set-cookie", b"%d=%d; Path=/" % (n, n)) for n in range(5)]
REPLIES: Final[dict[str, Script]] = {
    "empty": respond(data=b""),
    "small": respond(201, [(b"content-type", b"text/plain"), (b"X-Case", b"MiXeD"), (b"x-empty", b"")]),
    "no-length": [start(), body(b"one part")],
    "large": respond(data=b"0123456789abcdef" * 20000),
    "chunked": [start(), *(body(b"part %d" % n, more=True) for n in range(5)), body(b"last")],
    "empty-parts": [start(), body(b"", more=True), body(b"a", more=True), body(b"", more=True), body(b"")],
    "own-chunked": [start(headers=[(b"Transfer-Encoding", b"chunked")]), body(b"x", more=True), body()],
    "events": [
        start(headers=[(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]),
        *(body(b"data: %d\n\n" % n, more=True) for n in range(6)),
        body(),
    ],
    "head": [start(headers=[(b"content-length", b"5")]), body(b"")],
    "no-content": [start(204, [(b"x-a", b"1")]), body()],
    "not-modified": [
        start(304, [(b"etag", b'"1"'), (b"content-length", b"1234")]),
        send({"type": "http.response.body"}),
    ],
    "redirect": [start(302, [(b"location", b"/elsewhere"), *COOKIES, (b"x-d", b"1"), (b"x-d", b"2")]), body()],
    "unauthorized": respond(401, [(b"www-authenticate", b"Basic"), (b"x", b"y"), (b"www-authenticate", b"Bearer")]),
    "bytes": respond(
        200, [(b"x-latin", b"caf\xe9"), (b"x-utf8", "é".encode()), (b"x-tab", b"a\tb"), (b"date", b"now")]
    ),
    "closes": respond(200, [(b"connection", b"close")]),
    "status-599": respond(599),
    "fails-before": [fail()],
    "fails-after-start": [start(), fail()],
    "fails-inside": [start(), body(b"some", more=True), fail()],
    "fails-after-end": [*respond(), fail()],
    "stops-inside": [start(headers=[(b"content-length", b"10")]), body(b"1234", more=True)],
    "stops-before": [],
    "too-long": [start(headers=[(b"content-length", b"2")]), body(b"12345")],
    "too-short": [start(headers=[(b"content-length", b"9")]), body(b"123")],
    "no-start": [body(b"x")],
    "two-starts": [start(), start()],
    "after-end": [*respond(), body(b"more")],
    "bad-header": [start(headers=[(b"x-a", b"a\r\nb: c")]), body()],
    "trailers": [
        start(headers=[(b"trailer", b"x-t")], trailers=True),
        body(b"x", more=True),
        send({"type": "http.response.trailers", "headers": [(b"x-t", b"1")], "more_trailers": False}),
    ],
}

REFUSED: Final = frozenset(["too-long", "too-short", "no-start", "two-starts", "after-end", "bad-header", "trailers"])
"""Replies with an event that uvicorn refuses, so that the app's `send` raises."""

EXCHANGES: Final = (
    "text",
    "binary",
    "subprotocol",
    "accept-headers",
    "app-closes",
    "client-closes",
    "client-closes-bare",
    "client-gone",
    "client-aborts",
    "refused",
    "denied",
    "denied-streamed",
    "fragmented",
    "big",
    "ping",
    "many",
    "fails-before",
    "fails-after",
    "returns",
    "compressed",
    "bad-utf8",
    "no-key",
    "sends-after-close",
)


@dataclass(frozen=True)
class HttpCase:
    index: int
    seed: int
    method: str
    target: str
    headers: str
    framing: str
    reply: str

    def __str__(self) -> str:
        parts = (self.method, self.target, self.headers, self.framing, self.reply)
        return f"seed{self.seed}-{self.index:03}-" + "-".join(parts).lower()

    @property
    def random(self) -> random.Random:
        return random.Random(f"{self.seed}/{self.index}")

    @property
    def refused(self) -> bool:
        """The server refuses an event of this reply. To uvicorn a length without a body is one too, except after HEAD."""
        length_alone = self.reply in ("head", "not-modified") or (self.reply == "too-short" and self.method != "HEAD")
        if self.method == "HEAD" and self.reply in ("head", "not-modified", "too-long", "too-short"):
            return False
        return self.reply in REFUSED or length_alone

    @property
    def fails_after_end(self) -> bool:
        """The app raises once its reply is complete: what that does to the connection is not compared."""
        return self.reply in ("after-end", "fails-after-end")


@dataclass(frozen=True)
class WebSocketCase:
    index: int
    seed: int
    target: str
    headers: str
    exchange: str

    def __str__(self) -> str:
        return f"seed{self.seed}-ws{self.index:03}-{self.target}-{self.headers}-{self.exchange}"

    @property
    def random(self) -> random.Random:
        return random.Random(f"{self.seed}/ws/{self.index}")


def dealt(values: Sequence[T], count: int, source: random.Random) -> list[T]:
    """`count` values in random order, each as often as any other (give or take one)."""
    cards = list(values) * (count // len(values) + 1)
    tail = cards[count - count % len(values) :]
    source.shuffle(tail)
    cards = [*cards[: count - count % len(values)], *tail][:count]
    source.shuffle(cards)
    return cards


def http_cases(seed: int) -> list[HttpCase]:
    source = random.Random(seed)
    count = max(HTTP_CASES, AT_LEAST * len(REPLIES))
    dimensions = (METHODS, tuple(TARGETS), tuple(HEADERS), FRAMINGS, tuple(REPLIES))
    packs = [dealt(values, count, source) for values in dimensions]
    return [HttpCase(index, seed, *values) for index, values in enumerate(zip(*packs, strict=True))]


def websocket_cases(seed: int) -> list[WebSocketCase]:
    source = random.Random(seed + 1)
    targets = [name for name in TARGETS if name != "absolute"]
    headers = [name for name in HEADERS if name not in ("close", "hop", "bytes", "long", "hundred")]
    count = AT_LEAST * len(EXCHANGES)
    packs = [dealt(values, count, source) for values in (targets, headers, EXCHANGES)]
    return [WebSocketCase(index, seed, *values) for index, values in enumerate(zip(*packs, strict=True))]
