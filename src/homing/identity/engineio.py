"""Which Engine.IO session does a request name, and which one does a handshake's reply make known?

Engine.IO is what Socket.IO runs on. Its requests carry `EIO`, the version, in their query, on whatever path the server
is mounted. A client begins with a GET that has no `sid`; the reply is one open packet, `0{"sid":…}`, and every later
request, polls and the upgrade to a WebSocket alike, names that `sid` in its query. A client that begins with a WebSocket
names nothing later: its session lives as long as that connection, at the worker that accepted it.

The reply is read to the end of the open packet and no further. Protocol 4 frames packets with a record separator;
protocol 3 puts the packet's length before it, as text or in binary; either may be wrapped for JSONP, or compressed.

Source: the Engine.IO protocol's document, revisions 3 and 4; and what python-engineio 4.15 and engine.io 6 (Node.js) send.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from homing.clock import Clock
from homing.identity.sources import Headers, HeadReader, ReplyOpening, Source, query_value, query_values
from homing.types import Scope

MAX_OPENING_BYTES: Final = 2**14
"""The longest open packet that is waited for; one is about a hundred bytes long."""

_FRAMING: Final = re.compile(rb'___eio\[\d+\]\("|\x00[\x00-\x09]+\xff|\d+:(?=0)')
"""What may stand before the first packet: JSONP; protocol 3 in binary; protocol 3 as text."""

_MAY_FRAME: Final = re.compile(rb"_{1,3}|___(?:e|ei|eio|eio\[\d*|eio\[\d+\]\(?)|\x00[\x00-\x09]*|\d+:?")
"""The beginning of such a frame, or of a packet, that is not complete."""

_ESCAPED: Final = re.compile(r'\\(["\\/])')


@dataclass(frozen=True, slots=True)
class EngineioSource(Source):
    """The session of an Engine.IO connection: `sid` in the query of a request that has `EIO` there too.

    Only beside `EIO`: other requests of the same app may use a parameter `sid` for themselves.
    """

    @property
    def spec(self) -> str:
        return "engineio:sid"

    def head_reader(self, clock: Clock) -> HeadReader:
        def read(scope: Scope, headers: Headers) -> str | None:
            query: bytes = scope.get("query_string", b"")
            if b"sid=" not in query or not speaks_engineio(query):
                return None
            return query_value("sid", query)

        return read

    def reply_opening(self) -> ReplyOpening:
        return _Handshake()


class _Handshake:
    """The reply to a request that begins a session by polling."""

    max_bytes: Final = MAX_OPENING_BYTES

    def expected(self, scope: Scope) -> bool:
        query: bytes = scope.get("query_string", b"")
        return scope["method"] == "GET" and speaks_engineio(query) and not query_values("sid", query)

    def read(self, data: bytes, encoding: bytes, complete: bool) -> Sequence[str] | None:
        plain = _decoded(data, encoding)
        return () if plain is None else _opened(plain, complete)


def speaks_engineio(query: bytes) -> bool:
    """Whether a request with this query is one of Engine.IO's."""
    return b"EIO=" in query and bool(query_values("EIO", query))


def engineio_gone(scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
    """The answer of the reference server to a session that it does not know; None for requests that are not Engine.IO's.

    A client then closes its connection and, if it may, begins a new one.
    """
    if not speaks_engineio(scope.get("query_string", b"")):
        return None
    body = b'{"code":1,"message":"Session ID unknown"}'
    return 400, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())], body


def _opened(data: bytes, complete: bool) -> Sequence[str] | None:
    """The `sid` of the open packet that `data` begins with; nothing if it begins otherwise; None if it is cut short."""
    if not data:
        return () if complete else None
    framing = _FRAMING.match(data)
    packet = data[framing.end() :] if framing is not None else data
    if framing is None and packet[:2] != b"0{":
        return None if not complete and _MAY_FRAME.fullmatch(data) else ()
    if packet[:1] not in (b"", b"0"):
        return ()
    text = packet[1:].decode("utf-8", "replace")
    if framing is not None and framing[0].startswith(b"_"):
        text = _ESCAPED.sub(r"\1", text)
    try:
        document, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        # Not all of it, or no JSON at all: the latter is found out once there is more than an open packet may have.
        return () if complete else None
    sid = document.get("sid") if isinstance(document, dict) else None
    return (sid,) if isinstance(sid, str) else ()


def _decoded(data: bytes, encoding: bytes) -> bytes | None:
    """As much of a body as can be decoded, up to the longest opening; None in an encoding that is not known here."""
    if encoding in (b"", b"identity"):
        return data
    if encoding not in (b"gzip", b"deflate"):
        return None
    try:
        # 32: gzip or zlib, whichever the first bytes say.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, MAX_OPENING_BYTES)
    except zlib.error:
        return None
