"""What the tests of shared connections share: their frames, both ends as raw sockets, and apps."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from tests.integration.forwarding.hop import (
    Peer,
    RawOwner,
    http_scope,
    raw_forwarder,
    raw_owner,
    shared_with,
)

from homing.forwarding.forwarder import Forwarder
from homing.forwarding.frames import (
    MINE_FIRST,
    SHARE,
    SHARED,
    WHOLE,
)
from homing.forwarding.heads import BODY_NONE, request_head
from homing.forwarding.receiver import Receiver
from homing.forwarding.shared import SharedConnection
from homing.types import ASGIApp

HEAD = msgspec.msgpack.encode((200, [(b"a", b"b")]))
STARTED = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
REQUEST_HEAD = request_head(0, (), http_scope(), BODY_NONE, ())


async def reply(send: Any, body: bytes = b"hello") -> None:
    await send(STARTED)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await reply(send, scope["path"].encode())


async def until(holds: Any) -> None:
    """Let the event loop turn until `holds` is true."""
    while not holds():
        await asyncio.sleep(0.001)


async def written(shared: SharedConnection, count: int) -> None:
    """Wait until so many exchanges are under way, and all that was put is with the kernel."""
    await until(lambda: len(shared.exchanges) == count and not shared.unsent)


async def answer_own(owner: RawOwner, body: bytes = b"hello") -> Peer:
    """Take a request over a connection of its own, and answer it."""
    peer = await owner.accept()
    await peer.read_request()
    await peer.write_frame(WHOLE | MINE_FIRST, HEAD, body)
    return peer


async def failure(task: asyncio.Task[bool]) -> BaseException | None:
    await asyncio.wait({task})
    return task.exception()


def nothing_left(receiver: Receiver, shared: SharedConnection) -> bool:
    places = [place for peer in receiver.shared for place in peer.places]
    return not (receiver.requests or receiver.called or places or shared.exchanges)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No descriptor can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def numbered(kind: int, number: int, head: bytes = b"", payload: bytes = b"") -> bytes:
    """A frame of a shared connection."""
    return struct.pack("<III", kind | len(head) << 8, len(payload), number) + head + payload


def batch(*frames: bytes) -> bytes:
    """Frames of a shared connection that are sent, and read, as one."""
    data = b"".join(frames)
    return struct.pack("<I", len(data)) + data


@contextlib.asynccontextmanager
async def sharing_owner(**options: Any) -> AsyncIterator[tuple[Forwarder, SharedConnection, RawOwner, Peer]]:
    """A forwarder, and an owner that a test scripts, which has taken a connection that small exchanges share."""
    async with raw_owner(shared_from=0, **options) as (forwarder, owner):
        sharing = asyncio.create_task(shared_with(forwarder))
        peer = await owner.accept()
        assert await peer.read_frame() == (SHARE, b"", b"")
        await peer.write(batch(numbered(SHARED, 0)))
        yield forwarder, await sharing, owner, peer


@contextlib.asynccontextmanager
async def sharing_forwarder(
    app: ASGIApp, *, decide: bool = True, **options: Any
) -> AsyncIterator[tuple[Receiver, Peer]]:
    """A receiver, and a connection to it that small exchanges share and a test scripts."""
    async with raw_forwarder(app, decide=decide, **options) as (receiver, peer):
        await peer.write_frame(SHARE)
        assert await peer.read_batch() == [(SHARED, 0, b"", b"")]
        yield receiver, peer
