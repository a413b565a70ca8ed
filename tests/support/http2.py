"""An HTTP/2 client for tests: several requests at once on one connection, and every event of each as it came.

The framing is hyper-h2's. Not here: anything that a browser does on top (redirects, cookies, pools).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from tests.support.raw import WAIT_SECONDS, Address

Headers = Sequence[tuple[str, str]]


@dataclass
class Exchange:
    """One request's reply, so far.

    Attributes:
        end: How the reply ended; `reset` if the server broke it off.
    """

    stream: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    data: bytes = b""
    trailers: list[tuple[bytes, bytes]] = field(default_factory=list)
    end: Literal["open", "complete", "reset"] = "open"

    @property
    def status(self) -> int:
        return int(dict(self.headers)[b":status"])


class Http2(asyncio.Protocol):
    """One connection. Made by `connect_http2`, which closes it."""

    def __init__(self, scheme: str) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.lost = False
        self._scheme = scheme
        self._exchanges: dict[int, Exchange] = {}
        self._changed = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2.initiate_connection()
        self._flush()

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, ConnectionTerminated):
                self._break_off()
                continue
            exchange = self._exchanges.get(getattr(event, "stream_id", 0) or 0)
            if exchange is None:
                continue
            if isinstance(event, ResponseReceived):
                exchange.headers = [(bytes(name), bytes(value)) for name, value in event.headers]
            elif isinstance(event, DataReceived):
                exchange.data += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, TrailersReceived):
                exchange.trailers = [(bytes(name), bytes(value)) for name, value in event.headers]
            elif isinstance(event, StreamEnded):
                exchange.end = "complete"
            elif isinstance(event, StreamReset):
                exchange.end = "reset"
        self._flush()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._break_off()
        self._changed.set()

    def _break_off(self) -> None:
        for exchange in self._exchanges.values():
            if exchange.end == "open":
                exchange.end = "reset"

    def _flush(self) -> None:
        assert self.transport is not None
        self.transport.write(self.h2.data_to_send())

    @property
    def local(self) -> Address:
        assert self.transport is not None
        host, port = self.transport.get_extra_info("sockname")[:2]
        return host, port

    @property
    def remote(self) -> Address:
        assert self.transport is not None
        host, port = self.transport.get_extra_info("peername")[:2]
        return host, port

    def begin(self, method: str, path: str, headers: Headers = (), *, ends: bool = True) -> Exchange:
        """Send a request's head; without `ends`, its body follows (`send`)."""
        stream = self.h2.get_next_available_stream_id()
        exchange = self._exchanges[stream] = Exchange(stream)
        head = [
            (":method", method),
            (":scheme", self._scheme),
            (":authority", "homing.test"),
            (":path", path),
            *headers,
        ]
        self.h2.send_headers(stream, head, end_stream=ends)
        self._flush()
        return exchange

    def send(self, exchange: Exchange, data: bytes, *, ends: bool = False) -> None:
        """Send a piece of a body: at most 16 KiB."""
        self.h2.send_data(exchange.stream, data, end_stream=ends)
        self._flush()

    def reset(self, exchange: Exchange) -> None:
        """Break a request off, as a client that loses interest does."""
        self.h2.reset_stream(exchange.stream)
        self._flush()

    async def until(self, exchange: Exchange, data: bytes) -> None:
        """Wait until the reply's body holds this."""
        async with asyncio.timeout(WAIT_SECONDS):
            while data not in exchange.data:
                assert exchange.end == "open", exchange
                self._changed.clear()
                await self._changed.wait()

    async def reply(self, exchange: Exchange) -> Exchange:
        """The exchange, once it has ended in whatever way."""
        async with asyncio.timeout(WAIT_SECONDS):
            while exchange.end == "open":
                self._changed.clear()
                await self._changed.wait()
        return exchange


@asynccontextmanager
async def connect_http2(address: Address, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Http2]:
    """A connection of its own: by ALPN over TLS, by prior knowledge without."""
    loop = asyncio.get_running_loop()
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    async with asyncio.timeout(WAIT_SECONDS):
        transport, protocol = await loop.create_connection(
            lambda: Http2("http" if tls is None else "https"),
            *address,
            ssl=tls,
            server_hostname=None if tls is None else "localhost",
        )
    try:
        yield protocol
    finally:
        transport.abort()
