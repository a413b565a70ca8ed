"""What the hop's tests share: a server's side of a request, an owner that is a raw socket, and loops to run them on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from homing.forwarding.forwarder import Forwarder, replayable
from homing.forwarding.frames import REQUEST, frame
from homing.forwarding.heads import Request, read_request
from homing.forwarding.private_socket import serve_private_socket
from homing.forwarding.receiver import Receiver
from homing.forwarding.shared import SHARED_FROM, SharedConnection
from homing.types import ASGIApp, Message, Reason, Scope, WorkerId

every_small_one_shares: ContextVar[bool] = ContextVar("every_small_one_shares", default=False)
"""Whether `hop` has small exchanges share a connection from the first on."""

OWNER = WorkerId("a" * 32)
ASKER = WorkerId("b" * 32)

Event = dict[str, Any]


def http_scope(**changes: Any) -> Event:
    """A scope as uvicorn gives it for a GET."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "scheme": "http",
        "root_path": "",
        "headers": [(b"host", b"example"), (b"cookie", b"a=1")],
        "state": {"from": "the accepting worker"},
        "method": "GET",
        "path": "/step",
        "raw_path": b"/step",
        "query_string": b"",
    } | changes


def post_scope(size: int | None = None, *headers: tuple[bytes, bytes], **changes: Any) -> Event:
    """A scope of a POST with a body of `size` bytes; None: chunked."""
    length = (b"transfer-encoding", b"chunked") if size is None else (b"content-length", str(size).encode())
    return http_scope(method="POST", headers=[(b"host", b"example"), length, *headers], **changes)


def websocket_scope(**changes: Any) -> Event:
    """A scope as uvicorn gives it for a WebSocket."""
    return {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "ws",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "root_path": "",
        "path": "/ws",
        "raw_path": b"/ws",
        "query_string": b"",
        "headers": [(b"host", b"example"), (b"sec-websocket-protocol", b"one, two")],
        "subprotocols": ["one", "two"],
        "state": {},
        "extensions": {"websocket.http.response": {}},
    } | changes


def request_event(body: bytes = b"", more: bool = False) -> Event:
    return {"type": "http.request", "body": body, "more_body": more}


class Server:
    """The server's side of one request: what the client does, what it gets, and how slow it is.

    `receive` gives the events in turn; past them it waits, as a server does, until `put` or the end. After the complete
    reply it says that the client left, as uvicorn's does.
    """

    def __init__(self, *events: Event, raises: Exception | None = None) -> None:
        self.sent: list[Event] = []
        self.sent_bytes = 0
        self.received = 0
        self.waits = asyncio.Event()
        """Set while `receive` is called and has nothing to give."""
        self.open = asyncio.Event()
        """While it is not set, `send` waits: a slow client."""
        self.open.set()
        self.blocked = asyncio.Event()
        self.raises = raises
        self.keep = True
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        for event in events:
            self._events.put_nowait(event)
        self._news = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def receive(self) -> Message:
        if self._events.empty():
            self.waits.set()
        event = await self._events.get()
        self.received += 1
        return event

    async def send(self, event: Message) -> None:
        if not self.open.is_set():
            self.blocked.set()
            await self.open.wait()
        if self.raises is not None:
            raise self.raises
        self.sent_bytes += len(event.get("body", b""))
        if self.keep:
            self.sent.append(dict(event))
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something that was sent makes `holds` true."""
        while not holds():
            self._news.clear()
            await self._news.wait()

    @property
    def body(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.sent)


async def forward(
    forwarder: Forwarder,
    server: Server,
    scope: Scope | None = None,
    owner: WorkerId = OWNER,
    note: tuple[Any, ...] = (),
) -> bool:
    scope = http_scope() if scope is None else scope
    return await forwarder.forward(owner, Reason.OWNED, note, scope, replayable(server.receive), server.send)


def mine(app: ASGIApp) -> ASGIApp:
    """The least router: every request is this worker's."""

    async def decided(scope: Any, receive: Any, send: Any) -> None:
        scope["homing.hop"].mine()
        await app(scope, receive, send)

    return decided


@contextlib.contextmanager
def socket_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hop-") as path:
        yield path


@contextlib.asynccontextmanager
async def hop(app: ASGIApp, *, decide: bool = True, **options: Any) -> AsyncIterator[tuple[Forwarder, Receiver]]:
    """A forwarder and the receiver it reaches as OWNER."""
    names = ("owner_timeout_seconds", "shared_from")
    forwarder_options = {key: options.pop(key) for key in names if key in options}
    forwarder_options.setdefault("shared_from", 0 if every_small_one_shares.get() else SHARED_FROM)
    with socket_directory() as directory:
        async with (
            serve_private_socket(mine(app) if decide else app, f"{directory}/{OWNER}.sock", **options) as receiver,
            Forwarder(directory, **forwarder_options) as forwarder,
        ):
            if every_small_one_shares.get():
                await shared_with(forwarder)
            yield forwarder, receiver


async def shared_with(forwarder: Forwarder, owner: WorkerId = OWNER) -> SharedConnection:
    """The connection that small exchanges with this owner share, once it takes them; `shared_from` is 0."""
    pool = forwarder._pool(owner)
    forwarder._share(pool, pool.loop.time())
    while pool.shared is None or not pool.shared.takes(pool.loop.time()):
        await asyncio.sleep(0)
    return pool.shared


class Peer:
    """One end of a hop connection, as a raw socket that a test scripts."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.rest = b""
        self._loop = asyncio.get_running_loop()

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes; fewer if the connection ends."""
        while len(self.rest) < size:
            data = await self._loop.sock_recv(self.socket, 65536)
            if not data:
                break
            self.rest += data
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    async def read_frame(self) -> tuple[int, bytes, bytes] | None:
        """The next frame; None at the end of the connection."""
        prefix = int.from_bytes(await self.read(8), "little")
        if prefix == 0:
            return None
        head = await self.read(prefix >> 8 & 0xFFFFFF)
        return prefix & 0xFF, head, await self.read(prefix >> 32)

    async def read_batch(self) -> list[tuple[int, int, bytes, bytes]]:
        """Kind, number, head and payload of each frame of the next batch on a shared connection; none at its end."""
        size = int.from_bytes(await self.read(4), "little")
        data = await self.read(size)
        frames, position = [], 0
        while position < len(data):
            prefix, payload_size, number = struct.unpack_from("<III", data, position)
            start = position + 12
            middle = start + (prefix >> 8)
            position = middle + payload_size
            frames.append((prefix & 0xFF, number, data[start:middle], data[middle:position]))
        return frames

    async def read_numbered(self, count: int) -> list[tuple[int, int, bytes, bytes]]:
        """The next `count` frames on a shared connection, in however many batches."""
        frames: list[tuple[int, int, bytes, bytes]] = []
        while len(frames) < count:
            batch = await self.read_batch()
            assert batch, "the connection has ended"
            frames += batch
        assert len(frames) == count
        return frames

    async def read_request(self) -> tuple[Request, bytes]:
        read = await self.read_frame()
        assert read is not None
        kind, head, payload = read
        assert kind == REQUEST
        return read_request(head), payload

    async def ended(self) -> bool:
        """Wait for the other end to close; what still arrives is thrown away."""
        with contextlib.suppress(ConnectionResetError):
            while await self._loop.sock_recv(self.socket, 65536):
                pass
        return True

    async def write(self, *frames: bytes) -> None:
        await self._loop.sock_sendall(self.socket, b"".join(frames))

    async def write_frame(self, kind: int, head: bytes = b"", payload: bytes = b"") -> None:
        await self.write(frame(kind, head, payload))

    def close(self) -> None:
        self.socket.close()


class RawOwner:
    """A worker that is nothing but a listening socket."""

    def __init__(self, directory: str, backlog: int = 16) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.setblocking(False)
        self.listener.bind(f"{directory}/{OWNER}.sock")
        self.listener.listen(backlog)
        self.peers: list[Peer] = []

    async def accept(self) -> Peer:
        connected, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        connected.setblocking(False)
        peer = Peer(connected)
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        self.listener.close()
        for peer in self.peers:
            peer.close()


@contextlib.asynccontextmanager
async def raw_owner(backlog: int = 16, **options: Any) -> AsyncIterator[tuple[Forwarder, RawOwner]]:
    """A forwarder, and an owner that a test scripts."""
    with socket_directory() as directory:
        owner = RawOwner(directory, backlog)
        try:
            async with Forwarder(directory, **options) as forwarder:
                yield forwarder, owner
        finally:
            owner.close()


@contextlib.asynccontextmanager
async def raw_forwarder(app: ASGIApp, *, decide: bool = True, **options: Any) -> AsyncIterator[tuple[Receiver, Peer]]:
    """A receiver, and a connection to it that a test scripts."""
    with socket_directory() as directory:
        path = f"{directory}/{OWNER}.sock"
        async with serve_private_socket(mine(app) if decide else app, path, **options) as receiver:
            peer = await connect(path)
            try:
                yield receiver, peer
            finally:
                peer.close()


async def connect(path: str) -> Peer:
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connecting.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connecting, path)
    return Peer(connecting)


Run = Callable[[Awaitable[None]], None]
