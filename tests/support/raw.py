"""What exactly does a server send for exactly these bytes? HTTP/1.1 and WebSocket over a socket, with nothing normalised.

A `Wire` is one connection: it sends the pieces it is told to, keeps every byte that arrives, and knows how the connection
ended (`eof`: an orderly end; `reset`: aborted). `Wire.reply` reads one reply by the framing rules of RFC 9112, 6.3 and
keeps its bytes as they were. `WebSocketWire` speaks frames on such a connection, with a fixed masking key, so that the
same exchange is the same bytes each time.

Every wait is bounded (`WAIT_SECONDS`, or the `timeout_seconds` given), and a wait that runs out says what had arrived.
Not here: what the app saw (`recorder`), and comparing (`tests/integration/differential`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeAlias

Address: TypeAlias = tuple[str, int]
End: TypeAlias = Literal["open", "eof", "reset"]

WAIT_SECONDS: Final = 10.0
MAX_BUFFER_BYTES: Final = 1 << 20

WEBSOCKET_KEY: Final = base64.b64encode(b"a fixed test key").decode()
WEBSOCKET_ACCEPT: Final = base64.b64encode(
    hashlib.sha1(WEBSOCKET_KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
).decode()


class WireError(AssertionError):
    """The other side did not do what this step of the test waited for; the message shows what arrived instead."""


class CutError(WireError):
    """The connection ended inside a reply or a frame."""

    def __init__(self, message: str, received: bytes, end: End) -> None:
        super().__init__(f"{message}; the connection ended with {end!r} after {received[-400:]!r}")
        self.received = received
        self.end = end


class _Bytes(asyncio.Protocol):
    """Keeps what arrives, and stops reading above `limit`, so a test that does not read makes the server wait."""

    def __init__(self, limit: int, *, half_open: bool) -> None:
        self.half_open = half_open
        self.buffer = bytearray()
        self.total = 0
        self.end: End = "open"
        self.limit = limit
        self.transport: asyncio.Transport | None = None
        self.changed = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.lost = asyncio.Event()
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.total += len(data)
        self.changed.set()
        if len(self.buffer) > self.limit and not self.paused and self.transport is not None:
            self.paused = True
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self.end = "eof"
        self.changed.set()
        return self.half_open  # what the test still sends is its own affair (TLS knows no half-open connection)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.end == "open":
            self.end = "reset" if exc is not None else "eof"
        elif isinstance(exc, ConnectionResetError):
            self.end = "reset"
        self.changed.set()
        self.writable.set()
        self.lost.set()

    def take(self, count: int) -> bytes:
        taken = bytes(self.buffer[:count])
        del self.buffer[:count]
        if self.paused and len(self.buffer) <= self.limit // 2 and self.transport is not None:
            self.paused = False
            self.transport.resume_reading()
        return taken


@dataclass(slots=True)
class Reply:
    """One reply, its bytes as they came.

    Attributes:
        interim: The 1xx replies before it, each as its exact bytes.
        head: Status line and header lines, with the blank line that ends them.
        framed: The body as it was framed: with chunk sizes and trailers where it was chunked.
        body: The body itself.
        chunks: The chunks of a chunked body, the last (empty) one left out.
        complete: False if the connection ended before the framing said so. A reply without a length that ends with an
            orderly end is complete, as any client would take it.
        end: How the connection stood once the reply was read.
    """

    interim: list[bytes] = field(default_factory=list)
    head: bytes = b""
    framed: bytes = b""
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False
    end: End = "open"

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Name and value of each header line, in order; nothing folded, merged or lower-cased."""
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    def one(self, name: bytes) -> bytes:
        (value,) = self.all(name)
        return value

    @property
    def keeps_alive(self) -> bool:
        return not any(b"close" in value.lower() for value in self.all(b"connection"))


class Wire:
    """One connection to a server, byte for byte. Made by `connect`, which closes it."""

    def __init__(self, protocol: _Bytes, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport
        self.sent = 0

    def __repr__(self) -> str:
        return f"<Wire {self.local} -> {self.remote}: {self.sent} sent, {self._protocol.total} received, {self.end}>"

    @property
    def local(self) -> Address:
        host, port = self._transport.get_extra_info("sockname")[:2]
        return host, port

    @property
    def remote(self) -> Address:
        host, port = self._transport.get_extra_info("peername")[:2]
        return host, port

    @property
    def end(self) -> End:
        return self._protocol.end

    @property
    def received(self) -> int:
        """How many bytes have arrived in all."""
        return self._protocol.total

    async def send(self, *pieces: bytes, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Send each piece in a write of its own, and wait while the server does not read."""
        for piece in pieces:
            if not self._transport.is_closing():
                self._transport.write(piece)
                self.sent += len(piece)
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._protocol.writable.wait()
            except TimeoutError:
                raise WireError(f"{self!r} could not send {len(piece)} bytes in {timeout_seconds} s") from None

    def finish_sending(self) -> None:
        """Send the end of the stream and go on reading (a half-close)."""
        self._transport.write_eof()

    def abort(self) -> None:
        """End the connection with a reset, as a client that crashed would."""
        sock = self._transport.get_extra_info("socket")
        # Linger of 0 s: the kernel drops what was not sent and resets, however orderly the transport would have been.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def close(self) -> None:
        """End the connection in an orderly way, as a client that leaves would."""
        self._transport.close()

    async def wait_lost(self) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await self._protocol.lost.wait()

    async def _until(self, enough: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                while not enough():
                    if self._protocol.end != "open":
                        raise CutError(f"waited for {what}", bytes(self._protocol.buffer), self._protocol.end)
                    self._protocol.changed.clear()
                    await self._protocol.changed.wait()
        except TimeoutError:
            raise WireError(
                f"waited {timeout_seconds} s for {what} on {self!r}; unread: {bytes(self._protocol.buffer[-400:])!r}"
            ) from None

    async def until(self, mark: bytes, *, timeout_seconds: float = WAIT_SECONDS) -> bytes:
        """The bytes up to the end of `mark`."""
        await self._until(lambda: mark in self._protocol.buffer, f"{mark!r}", timeout_seconds)
        return self._protocol.take(self._protocol.buffer.index(mark) + len(mark))

    def _has(self, count: int) -> bool:
        return len(self._protocol.buffer) >= count

    async def exactly(self, count: int, *, timeout_seconds: float = WAIT_SECONDS) -> bytes:
        limit = self._protocol.limit
        parts: list[bytes] = []
        while count > 0:
            # At most half the buffer's limit at a time: above it, reading pauses and would never go on.
            part = min(count, limit // 2)
            try:
                await self._until(partial(self._has, part), f"{count} bytes", timeout_seconds)
            except CutError as error:
                raise CutError("waited for more bytes", b"".join(parts) + error.received, error.end) from None
            parts.append(self._protocol.take(part))
            count -= part
        return b"".join(parts)

    async def some(self, *, timeout_seconds: float = WAIT_SECONDS) -> bytes:
        """The bytes that have arrived, at least one; empty once the connection has ended."""
        with contextlib.suppress(CutError):
            await self._until(lambda: bool(self._protocol.buffer), "anything", timeout_seconds)
        return self._protocol.take(len(self._protocol.buffer))

    async def to_end(self, *, timeout_seconds: float = WAIT_SECONDS) -> bytes:
        """Everything until the connection ends; `end` then says how."""
        parts = []
        while part := await self.some(timeout_seconds=timeout_seconds):
            parts.append(part)
        return b"".join(parts)

    async def head(self, *, timeout_seconds: float = WAIT_SECONDS) -> bytes:
        """One status line with its header lines, 1xx or final."""
        return await self.until(b"\r\n\r\n", timeout_seconds=timeout_seconds)

    async def reply(self, method: str = "GET", *, timeout_seconds: float = WAIT_SECONDS) -> Reply:
        """The next reply to a request of this method. One that is cut is returned too, with `complete` False."""
        reply = Reply()
        try:
            while True:
                reply.head = await self.head(timeout_seconds=timeout_seconds)
                if not 100 <= reply.status < 200 or reply.status == 101:
                    break
                reply.interim.append(reply.head)
                reply.head = b""
            await self.body_of(reply, method, timeout_seconds=timeout_seconds)
            reply.complete = True
        except CutError as error:
            if reply.head:
                reply.framed += error.received
            else:
                reply.head = error.received
            self._protocol.take(len(self._protocol.buffer))
        reply.end = self.end
        return reply

    async def body_of(self, reply: Reply, method: str, *, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Read the body that `reply.head` announces into `reply`, part by part."""
        if method == "HEAD" or reply.status in (101, 204, 304):
            return
        if any(value.lower() == b"chunked" for value in reply.all(b"transfer-encoding")):
            while True:
                line = await self.until(b"\r\n", timeout_seconds=timeout_seconds)
                reply.framed += line
                size = int(line.split(b";")[0], 16)
                if not size:
                    break
                chunk = await self.exactly(size + 2, timeout_seconds=timeout_seconds)
                reply.framed += chunk
                reply.body += chunk[:-2]
                reply.chunks.append(chunk[:-2])
            while (line := await self.until(b"\r\n", timeout_seconds=timeout_seconds)) != b"\r\n":
                reply.framed += line
            reply.framed += line
        elif lengths := reply.all(b"content-length"):
            reply.framed = reply.body = await self.exactly(int(lengths[0]), timeout_seconds=timeout_seconds)
        else:
            reply.framed = reply.body = await self.to_end(timeout_seconds=timeout_seconds)
            if self.end == "reset":
                raise CutError("a reply up to the end of the connection", b"", self.end)


@asynccontextmanager
async def connect(
    address: Address | str,
    *,
    tls: ssl.SSLContext | None = None,
    receive_buffer_bytes: int | None = None,
    limit_bytes: int = MAX_BUFFER_BYTES,
) -> AsyncIterator[Wire]:
    """A connection of its own, closed at the end.

    Args:
        address: A text is the path of a Unix socket.
        tls: Speak TLS, with this context.
        receive_buffer_bytes: The kernel's receive buffer; a small one makes a client that does not read felt at once.
        limit_bytes: Above this many unread bytes the client stops reading.
    """
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    try:
        sock.setblocking(False)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_SECONDS):
            await loop.sock_connect(sock, address)
            transport, protocol = await loop.create_connection(
                lambda: _Bytes(limit_bytes, half_open=tls is None),
                sock=sock,
                ssl=tls,
                server_hostname="localhost" if tls else None,
            )
    except BaseException:
        sock.close()
        raise
    wire = Wire(protocol, transport)
    try:
        yield wire
    finally:
        if not transport.is_closing():
            transport.abort()
        with contextlib.suppress(TimeoutError):
            await wire.wait_lost()


def request(
    method: str = "GET",
    target: str | bytes = "/",
    headers: Sequence[tuple[str | bytes, str | bytes]] = (),
    body: bytes | None = None,
    *,
    host: str | None = "homing.test",
    version: str = "1.1",
) -> bytes:
    """A request as bytes: `Host`, then `headers` as given, then `Content-Length` if there is a body. Nothing else."""
    lines = [_bytes(method) + b" " + _bytes(target) + b" HTTP/" + version.encode()]
    if host is not None:
        lines.append(b"Host: " + host.encode())
    lines += [_bytes(name) + b": " + _bytes(value) for name, value in headers]
    if body is not None:
        lines.append(b"Content-Length: " + str(len(body)).encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


def chunked(*chunks: bytes, trailers: Sequence[tuple[str, str]] = ()) -> list[bytes]:
    """Each chunk in its framing, and the end: last chunk, trailers, blank line."""
    end = b"0\r\n" + b"".join(f"{name}: {value}\r\n".encode() for name, value in trailers) + b"\r\n"
    return [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks] + [end]


def _bytes(text: str | bytes) -> bytes:
    return text.encode("latin-1") if isinstance(text, str) else text


# --- WebSocket (RFC 6455) ---

CONTINUATION: Final = 0
TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10

_MASK: Final = b"\x11\x22\x33\x44"


@dataclass(frozen=True, slots=True)
class Frame:
    """One WebSocket frame as it came. `data` is unmasked; `rsv1` marks a compressed message."""

    opcode: int
    data: bytes
    fin: bool = True
    rsv1: bool = False

    @property
    def close_code(self) -> int | None:
        return struct.unpack("!H", self.data[:2])[0] if self.opcode == CLOSE and self.data else None

    @property
    def close_reason(self) -> str:
        return self.data[2:].decode() if self.opcode == CLOSE else ""


def frame(opcode: int, data: bytes = b"", *, fin: bool = True, rsv1: bool = False) -> bytes:
    """A client's frame as bytes: masked, with the mask that every frame here has."""
    head = bytes([(0x80 if fin else 0) | (0x40 if rsv1 else 0) | opcode])
    if len(data) < 126:
        head += bytes([0x80 | len(data)])
    elif len(data) < 1 << 16:
        head += bytes([0x80 | 126]) + struct.pack("!H", len(data))
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", len(data))
    return head + _MASK + mask(data)


def mask(data: bytes) -> bytes:
    repeated = (_MASK * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big") if data else b""


def close_frame(code: int | None = None, reason: str = "") -> bytes:
    return frame(CLOSE, b"" if code is None else struct.pack("!H", code) + reason.encode())


def handshake(
    target: str | bytes = "/",
    headers: Sequence[tuple[str | bytes, str | bytes]] = (),
    *,
    key: str | None = WEBSOCKET_KEY,
) -> bytes:
    """The opening request, with a fixed key, so that the accepting reply is the same bytes each time."""
    opening: list[tuple[str | bytes, str | bytes]] = [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    opening += [("Sec-WebSocket-Version", "13")] + ([("Sec-WebSocket-Key", key)] if key is not None else [])
    return request("GET", target, [*opening, *headers])


class WebSocketWire:
    """Frames on a `Wire`. Keeps every byte of the server's in `seen`, for comparing."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.seen = bytearray()

    async def open(self, target: str | bytes = "/", headers: Sequence[tuple[str | bytes, str | bytes]] = ()) -> Reply:
        """Send the handshake and read the reply to it, be it 101 or a refusal with a body."""
        await self.wire.send(handshake(target, headers))
        reply = await self.wire.reply("GET")
        self.seen += reply.head + reply.framed
        return reply

    async def _exactly(self, count: int, timeout_seconds: float) -> bytes:
        try:
            data = await self.wire.exactly(count, timeout_seconds=timeout_seconds)
        except CutError as error:
            self.seen += error.received
            raise
        self.seen += data
        return data

    async def frame(self, *, timeout_seconds: float = WAIT_SECONDS) -> Frame:
        """The server's next frame.

        Raises:
            CutError: the connection ended instead.
        """
        first, second = await self._exactly(2, timeout_seconds)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", await self._exactly(2, timeout_seconds))
        elif length == 127:
            (length,) = struct.unpack("!Q", await self._exactly(8, timeout_seconds))
        data = await self._exactly(length, timeout_seconds)
        return Frame(first & 0x0F, data, fin=bool(first & 0x80), rsv1=bool(first & 0x40))

    async def send(self, *frames: bytes) -> None:
        await self.wire.send(*frames)

    async def send_text(self, text: str) -> None:
        await self.send(frame(TEXT, text.encode()))

    async def to_end(self) -> End:
        """Read what is left, and say how the connection ended."""
        self.seen += await self.wire.to_end()
        return self.wire.end
