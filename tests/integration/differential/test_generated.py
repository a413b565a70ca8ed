"""The differential over cases from a seed: nobody can tell from outside or inside whether a request was forwarded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.differential.columns import Column, Seen, before_refusal, differ, of_reply, of_websocket
from tests.integration.differential.exchanges import play_exchange
from tests.integration.differential.generator import (
    AT_LEAST,
    EXCHANGES,
    FRAMINGS,
    HEADERS,
    METHODS,
    REPLIES,
    TARGETS,
    HttpCase,
    WebSocketCase,
    http_cases,
    seed,
    websocket_cases,
)
from tests.support.pair import Pair
from tests.support.raw import WebSocketWire, Wire, chunked
from tests.support.recorder import Script, read_body, receive, respond

SEED = seed()
HTTP = http_cases(SEED)
WEBSOCKET = websocket_cases(SEED)


def test_each_class_of_generated_case_occurs_at_least_five_times() -> None:
    print(f"HOMING_SEED={SEED}")
    dimensions: list[tuple[str, tuple[str, ...]]] = [
        ("method", METHODS),
        ("target", tuple(TARGETS)),
        ("headers", tuple(HEADERS)),
        ("framing", FRAMINGS),
        ("reply", tuple(REPLIES)),
    ]
    for name, values in dimensions:
        counts = Counter(getattr(case, name) for case in HTTP)
        assert min(counts[value] for value in values) >= AT_LEAST, (name, counts)
    exchanges = Counter(case.exchange for case in WEBSOCKET)
    assert min(exchanges[value] for value in EXCHANGES) >= AT_LEAST, exchanges
    assert len(HTTP) + len(WEBSOCKET) >= 100


@pytest.mark.parametrize("case", HTTP, ids=str)
def test_generated_request(case: HttpCase, pair: Pair, run: Callable[[Any], Any]) -> None:
    run(differ(pair, lambda column: play_request(column, case)))


@pytest.mark.parametrize("case", WEBSOCKET, ids=str)
def test_generated_websocket(case: WebSocketCase, pair: Pair, run: Callable[[Any], Any]) -> None:
    async def play(column: Column) -> Seen:
        async with column.connect() as wire:
            client = WebSocketWire(wire)
            seen = await play_exchange(
                column, client, case.exchange, TARGETS[case.target], HEADERS[case.headers], case.random
            )
            return seen | of_websocket(client)

    run(differ(pair, play))


async def play_request(column: Column, case: HttpCase) -> Seen:
    """Send the request as its framing says, with the app's script as its reply says; everything there is to see."""
    method, target, headers = case.method, TARGETS[case.target], list(HEADERS[case.headers])
    source = case.random
    parts = [source.randbytes(source.randrange(1, 400)) for _ in range(source.randrange(2, 6))]
    reply_steps = list(REPLIES[case.reply])
    read: list[Any] = [read_body()]
    pieces: list[bytes] = []
    interim = b""
    more: list[tuple[bytes, bytes]] = []
    body: bytes | None = None
    version = "1.1"
    exact = False
    match case.framing:
        case "none":
            read = read if source.random() < 0.5 else []
        case "length" | "unread" | "pipelined":
            body = b"".join(parts)
            read = [] if case.framing == "unread" else read
        case "length-large":
            body = source.randbytes(300_000)
        case "length-pieces":
            more = [(b"Content-Length", b"%d" % sum(map(len, parts)))]
            pieces, read, exact = parts, [receive(len(parts))], True
        case "chunked":
            more, pieces = [(b"Transfer-Encoding", b"chunked")], [b"".join(chunked(*parts))]
        case "trailers":
            more = [(b"Trailer", b"X-T"), (b"Transfer-Encoding", b"chunked")]
            pieces = [b"".join(chunked(*parts, trailers=[("X-T", "1"), (SESSION, "another")]))]
        case "chunked-pieces":
            framed = chunked(*parts)
            more = [(b"Transfer-Encoding", b"chunked")]
            pieces, read, exact = framed, [receive(len(framed))], True
        case "expect" | "expect-refused":
            more = [(b"Expect", b"100-continue"), (b"Content-Length", b"%d" % sum(map(len, parts)))]
            read = read if case.framing == "expect" else []
        case "http10":
            version = "1.0"
            body = b"".join(parts)
    script: Script = [*read, *reply_steps, receive()] if source.random() < 0.5 else [*read, *reply_steps]
    if case.reply.startswith("stops-") or case.refused:
        script = [*read, *reply_steps]  # the reply never ends, or not as the app has it: nothing more to receive
    column.script(script)
    head = column.request(method, target, [*headers, *more], body, version=version)
    async with column.connect() as wire:
        if case.framing == "pipelined":
            return await pipelined(column, wire, head, case)
        if exact:
            await wire.send(head)
            performance = await column.performance()
            for count, piece in enumerate(pieces, 1):
                await wire.send(piece)
                await performance.received(count)
        elif case.framing == "expect":
            await wire.send(head)
            interim = await wire.head()
            await wire.send(*parts)
        else:
            await wire.send(head + b"".join(pieces))
        reply = await wire.reply(method)
        seen = {"100": interim, "reply": of_reply(reply)}
        if case.framing == "expect-refused":
            # The body never comes; the connection is of no more use, and only ends once the client goes.
            wire.finish_sending()
        app = seen["app"] = await column.app(wire, exact=exact, reply=reply)
        if case.refused:
            app = seen["app"] = before_refusal(app)
        if case.framing == "expect-refused":
            seen["after"] = await wire.to_end()
        elif case.reply.startswith("stops-"):
            # Complete to a client that sent HEAD, and cut all the same: a probe would race with the server's close.
            seen["after"] = (await wire.to_end(), wire.end)
        elif not case.fails_after_end:
            seen["after"] = await column.after(wire, reply, app)
        return seen


async def pipelined(column: Column, wire: Wire, head: bytes, case: HttpCase) -> Seen:
    """The case's request and two more in one write; three replies, in order, unless one of them ends the connection."""
    column.script([read_body(), *REPLIES[case.reply]])
    column.script([read_body(), *respond(data=b"second")], 1)
    column.script([read_body(), *respond(data=b"third")], 2)
    second = column.request("POST", "/second", body=b"2" * 100, n=1)
    third = column.request("GET", "/third?x=1", n=2)
    await wire.send(head + second + third)
    replies = [await wire.reply(case.method)]
    first = await column.app(wire, reply=replies[0])
    if case.refused:
        first = before_refusal(first)
    if case.fails_after_end:
        return {"replies": of_reply(replies[0]), "first": first}
    for one in ("POST", "GET"):
        if replies[-1].complete and replies[-1].keeps_alive and replies[-1].end == "open":
            replies.append(await wire.reply(one))
    seen = {"replies": [of_reply(reply) for reply in replies], "first": first}
    if len(replies) == 3 and replies[2].complete:
        seen |= {"second": await column.app(wire, 1), "third": await column.app(wire, 2)}
        seen["after"] = await column.after(wire, replies[2], seen["third"])
    else:
        seen["rest"] = (await wire.to_end(), wire.end)
    return seen


SESSION = "X-Session"
