"""One case in five columns: a plain server, served where it arrives, through a forced forward, through one over a connection that
small exchanges share, and through a connection that has moved to the owner; then compared.

A case is a coroutine function that plays it at one `Column`: it sends bytes, waits for what the app does, and returns what
was seen, as plain values. `differ` plays it at each column and fails, with a diff, unless all have seen the same.

What is normalised, and nothing else:

* the value of a reply's `Date`;
* the case's own label (`x-case`), whose last letter names the column so that records are kept apart;
* `client` and `server` of a scope, where they are exactly the two ends of the client's connection;
* consecutive `http.request` events are joined, except where the case says `exact`: how TCP's pieces fall is not the
  server's doing. Cases that send each piece once the app has seen the one before (lock-step) are exact.
* where the server refused an event of the app (`refused`: the app broke the protocol), what the app saw from there on:
  with one worker its `send` raises at once; forwarded it may learn so later, or only be cut off. The client's bytes count;
* whether the server ends the connection of an app that raised after its reply was complete: uvicorn does with one worker;
  forwarded, a reply is over with its last event, and the connection goes on;
* an int stays an int: uvicorn gives some close codes as an `IntEnum`, which do not cross;
* of an exception that `send` raised only its class, and of an OSError only that it is one: servers have classes of
  their own, and the ASGI specification names OSError.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import pprint
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.support import raw
from tests.support.pair import HOMING, SESSION_HEADER, Pair, Worker
from tests.support.raw import Reply, WebSocketWire, Wire
from tests.support.recorder import Performance, Record, Script, respond

Seen: TypeAlias = dict[str, Any]
PROBE = 9
LARGE_BYTES = 64 * 1024
"""Longer bytes are compared by their length and SHA-256: a diff of them helps nobody."""
REJECTED = b"Invalid HTTP request received."
"""The body of uvicorn's own 400: no app has seen such a request."""
PLAIN, LOCAL, FORWARDED, SHARED, ADOPTED = "plain", "local", "forwarded", "shared", "adopted"
ALL = (PLAIN, LOCAL, FORWARDED, SHARED, ADOPTED)
_MOST_TRIES = 40

_DATE = re.compile(rb"(?im)^date: [^\r\n]+")


@dataclass
class Column:
    """One of the ways to serve a case.

    Attributes:
        arrives: The worker whose port the client connects to.
        serves: The name of the worker whose app must see the request.
        session: A session of `owner`; the same bytes in every column.
    """

    name: str
    pair: Pair
    arrives: Worker
    serves: str
    session: str
    number: int

    def case(self, n: int = 0) -> str:
        """The label of the case's nth request."""
        return f"{self.number:06}-{n}{self.name[0]}"

    def headers(self, n: int = 0) -> list[tuple[str | bytes, str | bytes]]:
        return [(SESSION_HEADER, self.session), ("x-case", self.case(n))]

    def request(
        self,
        method: str = "GET",
        target: str | bytes = "/",
        headers: Sequence[tuple[str | bytes, str | bytes]] = (),
        body: bytes | None = None,
        *,
        n: int = 0,
        **more: Any,
    ) -> bytes:
        if isinstance(target, str):
            target = self.pair.path(target)
        return raw.request(method, target, [*self.headers(n), *headers], body, **more)

    def script(self, steps: Script, n: int = 0) -> None:
        self.pair.stage.script(self.case(n), steps)

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncIterator[Wire]:
        async with self.pair.connect(self.arrives, **options) as wire:
            if self.name == ADOPTED:
                await self._move(wire)
            yield wire

    async def _move(self, wire: Wire) -> None:
        """Ask for the session until the connection has moved to its owner: a request without a session shows where it is."""
        for _ in range(_MOST_TRIES):
            for headers in ([(SESSION_HEADER, self.session)], [(SESSION_HEADER, self.session)], []):
                await wire.send(raw.request("GET", self.pair.path("/"), headers))
                reply = await wire.reply()
                assert reply.status == 200, f"{reply!r}"
            if reply.body.split()[0] == self.serves.encode():
                return
        raise AssertionError(f"the connection has not moved: {reply!r}")

    async def performance(self, n: int = 0, **options: Any) -> Performance:
        """The nth request at the app; checks that the right worker has it."""
        performance = await self.pair.stage.performance(self.case(n), **options)
        assert performance.worker == self.serves, f"{self.name}: served by {performance.worker}, not by {self.serves}"
        return performance

    async def app(
        self, wire: Wire, n: int = 0, *, exact: bool = False, reply: Reply | None = None, **options: Any
    ) -> Seen:
        """What the app saw of the nth request, once it has ended."""
        if reply is not None and reply.body == REJECTED:
            assert not self.pair.stage.performances(self.case(n)), f"{self.name}: the app saw a rejected request"
            return {"rejected": True}
        performance = await self.performance(n)
        records = await performance.done(**options)
        assert len(self.pair.stage.performances(self.case(n))) == 1, f"{self.name}: the app ran more than once"
        return {"scope": self.scope(performance, wire), "records": told(records, exact=exact)}

    def scope(self, performance: Performance, wire: Wire) -> Seen:
        scope = dict(performance.scope)
        for key, end in (("client", wire.local), ("server", wire.remote)):
            # Anything else stays as it is, and differs from the other columns unless it does not come from the connection.
            if scope[key] == end:
                scope[key] = (type(scope[key]), "this end of the connection")
        return scope

    async def probe(self, wire: Wire) -> Seen:
        """A second request on the connection: is it usable, and in step? Shows its reply, or how the connection ended."""
        self.script(respond(data=b"probe"), PROBE)
        await wire.send(self.request("GET", "/probe", n=PROBE))
        reply = await wire.reply()
        return {"head": reply.head, "framed": reply.framed, "end": reply.end}

    async def after(self, wire: Wire, reply: Reply, app: Seen) -> Seen:
        """What the connection is good for after this reply. `app` is what `app()` said: a server ends the connection of an
        app that raised after its reply, and a probe would race with that."""
        returned = "records" in app and app["records"][-1:] == [("end", "returned")]
        if reply.complete and reply.end == "open" and reply.keeps_alive and returned:
            return {"probe": await self.probe(wire)}
        return {"rest": await wire.to_end(), "end": wire.end}


def before_refusal(app: Seen) -> Seen:
    """What the app saw until the server refused an event of it: the scope and what it received of the request."""
    if "records" not in app:
        return app
    kinds = ("http.request", "websocket.connect", "websocket.receive")
    return {**app, "records": [one for one in app["records"] if one[0] == "receive" and one[1]["type"] in kinds]}


def told(records: Sequence[Record], *, exact: bool) -> list[tuple[str, Any]]:
    """Records without their times, and consecutive request bodies joined unless `exact`."""
    shown: list[tuple[str, Any]] = []
    for record in records:
        kind, value = record.kind, record.value
        if kind == "scope":
            value = {key: one for key, one in value.items() if key not in ("client", "server")}
        if not exact and kind == "receive" and value["type"] == "http.request" and shown:
            last_kind, last = shown[-1]
            if last_kind == "receive" and last["type"] == "http.request" and last.get("more_body"):
                shown[-1] = (kind, {**value, "body": last["body"] + value["body"]})
                continue
        shown.append((kind, value))
    return shown


def of_reply(reply: Reply) -> Seen:
    """All bytes of a reply, and whether it was whole."""
    return {"interim": reply.interim, "head": reply.head, "framed": reply.framed, "complete": reply.complete}


def of_websocket(client: WebSocketWire) -> Seen:
    return {"bytes": bytes(client.seen), "end": client.wire.end}


Play: TypeAlias = Callable[[Column], Awaitable[Seen]]


async def differ(
    pair: Pair, play: Play, *, columns: Sequence[str] = ALL, one_by_one: bool = False, serves: str | None = None
) -> dict[str, Seen]:
    """Play a case at each column, and compare.

    Args:
        columns: The first is what the others must equal.
        one_by_one: Do not play the columns at once, where they would disturb one another.

    Returns:
        What was seen, by column, normalised.

    Raises:
        AssertionError: with a diff, unless every column saw the same.
    """
    session = await pair.start_session()
    number = pair.number()
    ways = {PLAIN: (pair.plain, "plain"), LOCAL: (pair.owner, "owner"), FORWARDED: (pair.front, "owner")}
    ways[ADOPTED] = ways[FORWARDED]
    if pair.sharing is None:
        columns = [name for name in columns if name != SHARED]
    else:
        ways[SHARED] = (pair.sharing, "owner" if HOMING == "homing" else "sharing")
    if HOMING == "plain":
        ways[FORWARDED] = ways[ADOPTED] = (pair.front, "front")
    if pair.tls is not None:
        columns = [name for name in columns if name != ADOPTED]  # such a connection does not move
    made = [Column(name, pair, *ways[name], session, number) for name in columns]
    if one_by_one:
        results = [await play(column) for column in made]
    else:
        results = await asyncio.gather(*(play(column) for column in made))
    seen = {column.name: normal(result, column) for column, result in zip(made, results, strict=True)}
    first = columns[0]
    problems = [difference(first, seen[first], name, seen[name]) for name in columns[1:]]
    # Local against forwarded as well: where homing changes both alike, the second diff shows that and nothing else.
    assert not any(problems), "\n".join(filter(None, problems))
    return seen


def difference(one: str, left: Seen, other: str, right: Seen) -> str:
    """A diff of the two, or nothing. Types count: a list is not a tuple, bytes are not a bytearray."""
    if repr(left) == repr(right):
        return ""
    lines = [pprint.pformat(value, width=150, sort_dicts=True).splitlines() for value in (left, right)]
    if lines[0] == lines[1]:
        return ""  # only the order of a dict's keys differs, which nobody can rely on
    return "\n".join(line[:600] for line in difflib.unified_diff(*lines, one, other, lineterm="", n=1))


def normal(value: Any, column: Column) -> Any:
    stem = f"{column.number:06}-"
    label = re.compile(f"{stem}(\\d){column.name[0]}")
    label_bytes = re.compile(label.pattern.encode())

    def walk(value: Any) -> Any:
        match value:
            case bytes():
                data = _DATE.sub(b"date: *", label_bytes.sub(rb"case-\1", value))
                large = len(data) > LARGE_BYTES
                return f"{len(data)} bytes, {hashlib.sha256(data).hexdigest()}" if large else data
            case str():
                return label.sub(r"case-\1", value)
            case dict():
                return {walk(key): walk(one) for key, one in value.items()}
            case list():
                return [walk(one) for one in value]
            case tuple():
                return tuple(walk(one) for one in value)
            case int() if not isinstance(value, bool):
                return int(value)
        return value

    return walk(value)
