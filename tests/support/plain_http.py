"""A small HTTP client for tests: each request on a connection of its own, its reply as it came."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from json import loads
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Reply:
    """One reply: header names in lower case, in order, with repeats; the body with any chunking undone."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        return loads(self.body)

    @property
    def cookie(self) -> str:
        """The first `Set-Cookie` as a `Cookie` header's value."""
        cookie = self.header("set-cookie")
        assert cookie is not None, self
        return cookie.partition(";")[0]


async def request(
    url: str, method: str = "GET", *, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Reply:
    """Open a connection, send one request, read its reply to the end, close.

    Raises:
        ConnectionError, asyncio.IncompleteReadError: The server cut the reply.
    """
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {target} HTTP/1.1", f"host: {parts.netloc}", "connection: close"]
    if body or method not in {"GET", "DELETE"}:
        lines.append(f"content-length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            return await _reply(reader)
        finally:
            writer.close()
            await writer.wait_closed()


async def _reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in head[1:-2])]
    fields = dict(headers)
    if fields.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    elif "content-length" in fields:
        body = await reader.readexactly(int(fields["content-length"]))
    else:
        body = await reader.read()
    return Reply(int(head[0].split()[1]), headers, body)
