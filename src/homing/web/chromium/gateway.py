"""The one way out of a worker's browsers: a proxy on loopback that connects only where the rules let it.

Every connection of the browser comes through here (pages, frames, workers, sockets, downloads, whatever follows a
redirect). A name is resolved once, judged by every address it has, and connected to at one of those: so it cannot lead
elsewhere between the judgement and the connection. TLS passes through as it is.

A plain `http` request has a connection of its own; requests of one browser connection may be for different hosts.

Not here: which addresses may be reached (`rules.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from typing import Final
from urllib.parse import urlsplit

from homing.web.chromium.rules import NavigationRules
from homing.web.loopback import Loopback

logger = logging.getLogger(__name__)

_HEAD_BYTES: Final = 65_536
_HEAD_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 15.0
_IDLE_SECONDS: Final = 300.0
_CHUNK_BYTES: Final = 65_536


class _RefusedError(Exception):
    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


class Gateway:
    """Carries connections that the rules allow. Owns its listener and every connection."""

    def __init__(self, rules: NavigationRules) -> None:
        self.rules = rules
        self.carried = 0
        self.refused = 0
        self.last_refusal: str | None = None
        self._listener = Loopback(self._serve, "gateway connection", _HEAD_BYTES)

    @property
    def address(self) -> str:
        """`http://127.0.0.1:port`."""
        return self._listener.origin

    async def start(self) -> None:
        """Listen on loopback, on a free port."""
        await self._listener.start()

    async def aclose(self) -> None:
        """End every connection. Safe to call twice."""
        await self._listener.aclose()

    def __repr__(self) -> str:
        return f"<Gateway: {self.carried} carried, {self.refused} refused>"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            try:
                there, first = await self._open(head)
            except _RefusedError as refusal:
                writer.write(
                    f"HTTP/1.1 {refusal.status}\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
                    f"homing: {refusal}\n".encode()
                )
                await writer.drain()
                return
            self.carried += 1
            try:
                await self._carry(reader, writer, *there, first)
            finally:
                there[1].close()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the browser or the site went away, or was too slow: the browser shows that itself
        finally:
            writer.close()

    async def _open(self, head: bytes) -> tuple[tuple[asyncio.StreamReader, asyncio.StreamWriter], bytes | None]:
        line, _, rest = head.partition(b"\r\n")
        parts = line.decode("latin-1").split(" ")
        if len(parts) != 3:
            raise _RefusedError("400 Bad Request", "no request line")
        method, target, _version = parts
        if method == "CONNECT":
            host, port = _authority(target, 443)
            return await self._connect(host, port), None
        try:
            url = urlsplit(target)
            host, port = url.hostname or "", url.port or 80
        except ValueError as error:
            raise _RefusedError("400 Bad Request", "no URL") from error
        if url.scheme != "http" or not host:
            raise _RefusedError("400 Bad Request", "only http URLs are carried")
        there = await self._connect(host, port)
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        kept = [
            header
            for header in rest.split(b"\r\n")
            if header
            and header.partition(b":")[0].strip().lower() not in (b"proxy-connection", b"connection", b"keep-alive")
        ]
        first = b"\r\n".join([f"{method} {path} HTTP/1.1".encode("latin-1"), *kept, b"connection: close", b"", b""])
        return there, first

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        why = self.rules.refused_host(host, port)
        if why is not None:
            raise self._refusal(why)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise _RefusedError("502 Bad Gateway", "the host's name leads nowhere") from error
        addresses = [str(sockaddr[0]).partition("%")[0] for *_, sockaddr in found]
        for address in addresses:
            why = self.rules.refused_address(ipaddress.ip_address(address), host, port)
            if why is not None:
                raise self._refusal(why)
        for address in addresses[:3]:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_SECONDS):
                    return await asyncio.open_connection(address, port)
        raise _RefusedError("502 Bad Gateway", "the host does not answer")

    def _refusal(self, why: str) -> _RefusedError:
        self.refused += 1
        self.last_refusal = why
        logger.info("a browser's connection was refused: %s", why)
        return _RefusedError("403 Forbidden", why)

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there_reader: asyncio.StreamReader,
        there_writer: asyncio.StreamWriter,
        first: bytes | None,
    ) -> None:
        if first is None:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            there_writer.write(first)
        async with asyncio.TaskGroup() as both:
            up = both.create_task(_pump(reader, there_writer))
            await _pump(there_reader, writer)
            # The site has said all it has to say: what the browser would still send has no reader.
            up.cancel()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(_IDLE_SECONDS):
                chunk = await source.read(_CHUNK_BYTES)
            if not chunk:
                return
            sink.write(chunk)
            await sink.drain()


def _authority(text: str, port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, named = parts.hostname, parts.port
    except ValueError as error:
        raise _RefusedError("400 Bad Request", "no host") from error
    if not host:
        raise _RefusedError("400 Bad Request", "no host")
    return host, named or port
