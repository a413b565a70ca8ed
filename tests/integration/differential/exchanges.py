"""WebSocket exchanges by name: what the client does, and the script that the app follows meanwhile."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Sequence

from tests.integration.differential.columns import Column, Seen
from tests.integration.differential.generator import EXCHANGES as EXCHANGE_NAMES
from tests.support.raw import (
    BINARY,
    CONTINUATION,
    PING,
    TEXT,
    CutError,
    WebSocketWire,
    close_frame,
    frame,
    handshake,
)
from tests.support.recorder import Step, fail, read_until, receive, send

__all__ = ["EXCHANGE_NAMES", "GONE", "accept", "binary", "close", "play_exchange", "text"]

Headers = Sequence[tuple[bytes, bytes]]


def accept(**more: object) -> Step:
    return send({"type": "websocket.accept", **more})


def text(data: str) -> Step:
    return send({"type": "websocket.send", "text": data})


def binary(data: bytes) -> Step:
    return send({"type": "websocket.send", "bytes": data})


def close(**more: object) -> Step:
    return send({"type": "websocket.close", **more})


GONE = read_until("websocket.disconnect")


async def play_exchange(
    column: Column, client: WebSocketWire, exchange: str, target: bytes, headers: Headers, source: random.Random
) -> Seen:
    """Play one exchange by name; the frames are in `client.seen` afterwards."""
    wire = client.wire
    own = [*column.headers(), *headers]
    steps: list[Step]

    async def opened(*script: Step, more: Headers = ()) -> None:
        column.script([receive(), *script])
        reply = await client.open(target, [*own, *more])
        assert reply.status == 101, reply

    async def frames(count: int) -> None:
        for _ in range(count):
            await client.frame()

    async def left() -> None:
        """Answer the app's close as a client does, and read to the end."""
        with contextlib.suppress(CutError):
            while (await client.frame()).opcode != 8:
                pass
        await client.send(close_frame(1000))
        await client.to_end()

    match exchange:
        case "text":
            await opened(accept(), receive(), text("héllo ✓"), receive(), text(""), GONE)
            await client.send_text("wörld")
            await frames(1)
            await client.send_text("")
            await frames(1)
            await client.send(close_frame(1000))
            await client.to_end()
        case "binary":
            data = source.randbytes(source.randrange(0, 1000))
            await opened(accept(), receive(), binary(data), binary(b""), GONE)
            await client.send(frame(BINARY, source.randbytes(500)))
            await frames(2)
            await client.send(close_frame(1001, "leaving"))
            await client.to_end()
        case "subprotocol":
            await opened(accept(subprotocol="two"), close(), GONE, more=[(b"Sec-WebSocket-Protocol", b"one, two")])
            await left()
        case "accept-headers":
            extra = [(b"Set-Cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"X-Latin", b"caf\xe9"), (b"x-d", b"1")]
            await opened(accept(headers=extra), text("hi"), close(code=1000), GONE)
            await left()
        case "app-closes":
            await opened(accept(), close(code=source.choice([1000, 1001, 3000, 4404]), reason="gone é"), GONE)
            await left()
        case "client-closes":
            await opened(accept(), GONE)
            await client.send(close_frame(source.choice([1000, 1001, 3999, 4001]), "bye ü"))
            await client.to_end()
        case "client-closes-bare":
            await opened(accept(), GONE)
            await client.send(close_frame())
            await client.to_end()
        case "client-gone":
            await opened(accept(), text("x"), GONE)
            await frames(1)
            wire.finish_sending()
            await client.to_end()
        case "client-aborts":
            await opened(accept(), text("x"), GONE)
            await frames(1)
            wire.abort()
            await wire.wait_lost()
            performance = await column.performance()
            records = await performance.done()
            return {"events": performance.events, "records": len(records)}
        case "refused":
            column.script([receive(), close(code=4000, reason="no"), GONE])
            await client.open(target, own)
            await client.to_end()
        case "denied" | "denied-streamed":
            parts = [b"some ", b"more ", b"reasons"] if exchange == "denied-streamed" else [b"reasons"]
            kind = "websocket.http.response"
            head = [(b"x-reason", b"1"), (b"Set-Cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-type", b"a/b")]
            steps = [send({"type": f"{kind}.start", "status": source.choice([401, 404, 429]), "headers": head})]
            for n, part in enumerate(parts, 1):
                steps.append(send({"type": f"{kind}.body", "body": part, "more_body": n < len(parts)}))
            column.script([receive(), *steps, GONE])
            await client.open(target, own)
            await client.to_end()
        case "fragmented":
            await opened(accept(), receive(2), text("done"), GONE)
            await client.send(
                frame(TEXT, b"one ", fin=False),
                frame(CONTINUATION, b"two ", fin=False),
                frame(PING, b"between"),
                frame(CONTINUATION, b"three"),
                frame(BINARY, b"", fin=False),
                frame(CONTINUATION, b"end"),
            )
            await frames(2)
            await client.send(close_frame(1000))
            await client.to_end()
        case "big":
            size = source.randrange(200_000, 1_000_000)
            await opened(accept(), receive(), binary(source.randbytes(size)), text("t" * 70_000), GONE)
            await client.send(frame(BINARY, source.randbytes(size)))
            await frames(2)
            await client.send(close_frame(1000))
            await client.to_end()
        case "ping":
            await opened(accept(), receive(), text("after"), GONE)
            await client.send(frame(PING, b"p1"), frame(PING))
            await frames(2)
            await client.send_text("x")
            await frames(1)
            await client.send(close_frame(1000))
            await client.to_end()
        case "many":
            await opened(accept(), receive(30), *(text(f"m{n}") for n in range(30)), GONE)
            await client.send(b"".join(frame(TEXT, b"%d" % n) for n in range(30)))
            await frames(30)
            await client.send(close_frame(1000))
            await client.to_end()
        case "fails-before":
            column.script([receive(), fail()])
            await client.open(target, own)
            await client.to_end()
        case "fails-after":
            await opened(accept(), text("x"), fail())
            await client.to_end()
        case "returns":
            await opened(accept(), text("x"))
            await client.to_end()
        case "compressed":
            deflate = zlib.compressobj(wbits=-12)
            data = deflate.compress(b"squeeze " * 50) + deflate.flush(zlib.Z_SYNC_FLUSH)
            offer = [(b"Sec-WebSocket-Extensions", b"permessage-deflate; client_max_window_bits=12")]
            await opened(accept(), receive(), text("answer " * 50), GONE, more=offer)
            await client.send(frame(TEXT, data[:-4], rsv1=True))
            await frames(1)
            await client.send(close_frame(1000))
            await client.to_end()
        case "bad-utf8":
            await opened(accept(), GONE)
            await client.send(frame(TEXT, b"\xff\xfe"))
            await client.to_end()
        case "no-key":
            await wire.send(handshake(target, own, key=None))
            client.seen += (await wire.reply()).head
            await client.to_end()
            assert not column.pair.stage.performances(column.case())
            return {}
        case "sends-after-close":
            await opened(accept(), receive(), text("late"))
            await client.send(close_frame(4001, "bye"))
            await client.to_end()
        case _:
            raise ValueError(exchange)
    return {"app": await column.app(wire)}
