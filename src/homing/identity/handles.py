"""Which session does an MCP tool call name, where a handle among its arguments does?

In the sessionless era (protocol 2026-07-28) a server that keeps state hands out handles: a tool's result carries one,
and later calls give it back as an argument. A client also mirrors an argument in the header `Mcp-Param-<token>` if the
tool's schema gives that argument a token (`x-mcp-header`), usually its own name: the value as it is if it is printable
ASCII, else `=?base64?<base64 of its UTF-8>?=`.

**The header is not trusted in place of the body.** A server must verify that the two agree, but only where the tool's
schema declares the token, which the router cannot see; the official SDK also skips the check when listing its tools
fails, and for sessions of the older era. Where nobody verifies, a client could name one session to the router and
another to the tool. So the body is read, its argument counts, and the header only where the call has no such argument:
then no other session is named, and a server that declares the token refuses the call by itself.

Source: MCP specification 2026-07-28, transports, "Custom headers"; `mcp` 2.3, `mcp/shared/inbound.py`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from homing.errors import SessionConflictError
from homing.identity.documents import Json, field, field_text
from homing.identity.ids import header_text
from homing.routes import Route

_SENTINEL: Final = re.compile(r"=\?base64\?(?P<payload>.*)\?=")


@dataclass(frozen=True)
class McpHandle:
    """The argument `name` of tool calls on `route`, and the key `name` of their results."""

    route: Route
    name: str

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset({"method", "params", "arguments", self.name})

    @property
    def reply_keys(self) -> frozenset[str]:
        # A handle in text content stands in a string, where its quotes are escaped.
        return frozenset({"result"})

    def in_request(self, document: Json, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The handle that a JSON-RPC request names, or a batch of them.

        Raises:
            DuplicateFieldError: the argument, or a field on the way to it, occurs twice.
            SessionConflictError: the calls of a batch name different handles.
        """
        found: set[str] = set()
        calls = [one for one in (document if isinstance(document, list) else [document]) if _is_call(one)]
        for call in calls:
            handle = field_text(call, ("params", "arguments", self.name))
            if handle is not None:
                found.add(handle)
        if len(found) > 1:
            raise SessionConflictError("the calls of a JSON-RPC batch name different sessions")
        if calls and not found:
            return self._mirrored(headers)
        return next(iter(found), None)

    def in_reply(self, document: Json) -> Iterator[str]:
        """The handles in the results of tool calls; an error, and a result that says `isError`, name none."""
        for reply in document if isinstance(document, list) else [document]:
            result = field(reply, ("result",))
            if not isinstance(result, dict) or result.get("isError") is True:
                continue
            handle = field_text(result, ("structuredContent", self.name))
            if handle is not None:
                yield handle
            content = result.get("content")
            for block in content if isinstance(content, list) else ():
                text = field_text(block, ("text",))
                if text is not None and (handle := self._in_text(text)) is not None:
                    yield handle

    def _in_text(self, text: str) -> str | None:
        if not text.lstrip().startswith("{") or (f'"{self.name}"' not in text and "\\u" not in text):
            return None
        try:
            return field_text(json.loads(text), (self.name,))
        except (ValueError, RecursionError):
            return None

    def _mirrored(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        name = b"mcp-param-" + self.name.lower().encode("utf-8")
        for key, value in headers:
            if key == name:
                return decode_param(header_text(value))
        return None


def decode_param(value: str) -> str | None:
    """The argument that an `Mcp-Param-...` header mirrors; None if its base64 form is malformed or not canonical."""
    sentinel = _SENTINEL.fullmatch(value)
    if sentinel is None:
        return value
    try:
        decoded = base64.b64decode(sentinel["payload"], validate=True)
        if base64.b64encode(decoded).decode("ascii") != sentinel["payload"]:
            return None
        return decoded.decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        return None


def _is_call(message: Json) -> bool:
    return bool(field(message, ("method",)) == "tools/call")
