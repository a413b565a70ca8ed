"""What does a protocol say about sessions? Presets: sources, ends and the *gone* answer of one protocol, by name.

`mcp` is the Model Context Protocol over HTTP. Session era: the header `mcp-session-id`, first named by the reply to
`initialize`, ended by a `DELETE` that carries it, on whatever path the server is mounted; gone is 404 with the body
that the official SDK answers an unknown session with. The older SSE transport: the `session_id` of `POST /messages/`,
first named by the event `endpoint` of the stream. Sessionless era (2026-07-28): nothing to route but handles, which are
sources of their own (`mcp_handle`).

`engineio` is Engine.IO, which Socket.IO runs on (`engineio.py`); `gradio` is a Gradio app (`gradio.py`). In both the
server, or the client, knows at once if a session is none, so one that nobody owns is served where it arrives, as one
worker would serve it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from homing.clock import Clock
from homing.errors import ConfigurationError
from homing.identity.engineio import EngineioSource, engineio_gone
from homing.identity.events import Event
from homing.identity.gradio import GRADIO_EVENT, GRADIO_LEARN, GRADIO_SESSIONS, GRADIO_UPLOAD, gradio_gone
from homing.identity.sources import Headers, HeaderSource, HeadReader, Source, query_values
from homing.types import Scope

GoneReply: TypeAlias = Callable[[Scope], tuple[int, list[tuple[bytes, bytes]], bytes] | None]
"""Makes the *gone* answer to one request: status, headers and body; None where the request is not of the protocol."""

MCP_SESSION_HEADER: Final = "mcp-session-id"


@dataclass(frozen=True, slots=True)
class MethodEnd:
    """A request with this method, whose session this source names, ends it, on whatever path it is."""

    method: str
    source: Source


@dataclass(frozen=True, slots=True)
class Preset:
    """What one protocol says about sessions; picklable.

    Attributes:
        name: What `--preset` calls it.
        sessions: Where requests name their session, asked after those that the user declared.
        first: They are asked before the user's. For a protocol whose requests name their session whatever else they
            carry: a cookie that changes while a connection lives must not move it.
        learn: Places that occur only in replies.
        starts: Routes that start a session, as the command line writes them.
        ends: Routes that end the session they name.
        method_ends: Requests that end a session by their method alone.
        gone_status: What *gone* is answered with unless the user set it.
        gone_reply: Makes the protocol's own *gone* answer; None: homing's.
        unowned: What becomes of a request for a session that nobody owns, unless the user says where sessions begin.
        idle_seconds: How long a session without a request lives in the protocol, whatever the user set; None: no limit.
            Only where nothing else names sessions: all of a server's are kept alike.
        hint: Says what is missing where a request that names no session shows that it takes a source which the protocol
            does not know; None: nothing is.
    """

    name: str
    sessions: tuple[Source, ...] = ()
    first: bool = False
    learn: tuple[Source, ...] = ()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    method_ends: tuple[MethodEnd, ...] = ()
    gone_status: int = 410
    gone_reply: GoneReply | None = None
    unowned: Literal["refuse", "adopt"] = "refuse"
    idle_seconds: float | None = None
    hint: Callable[[Scope], str | None] | None = None


@dataclass(frozen=True, slots=True)
class McpMessagesSource(Source):
    """The session of MCP's older SSE transport: `session_id` in the query of a POST, a UUID.

    Only of a POST, and only if it is a UUID: other requests of an app that also serves MCP may use a parameter of that
    name for themselves. The server reads it as a UUID, so every spelling of one names one session; of two parameters it
    takes the later.
    """

    name: str = "session_id"

    @property
    def spec(self) -> str:
        return f"mcp-messages:{self.name}"

    def head_reader(self, clock: Clock) -> HeadReader:
        name, name_bytes = self.name, self.name.encode("utf-8")

        def read(scope: Scope, headers: Headers) -> str | None:
            query: bytes = scope.get("query_string", b"")
            if name_bytes not in query or scope.get("method") != "POST":
                return None
            return _last_uuid(name, query)

        return read

    def event_reader(self) -> Callable[[Event], Iterator[str]]:
        def read(event: Event) -> Iterator[str]:
            if event.kind != "endpoint":
                return
            try:
                query = urlsplit(event.data).query
            except ValueError:
                return
            if (found := _last_uuid(self.name, query)) is not None:
                yield found

        return read


def mcp_gone(scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """The answer of the official MCP SDK to a request for a session it does not know: 404.

    A JSON-RPC error without the request's ID; of the older SSE transport, a line of text.
    """
    if any(name == b"mcp-session-id" for name, _ in scope["headers"]) or b"session_id=" not in scope.get(
        "query_string", b""
    ):
        kind = b"application/json"
        body = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Session not found"}}'
    else:
        kind, body = b"text/plain; charset=utf-8", b"Could not find session"
    return 404, [(b"content-type", kind), (b"content-length", str(len(body)).encode())], body


def mcp_hint(scope: Scope) -> str | None:
    """What is missing where a tool is called in the sessionless era: the handle that its state hangs on.

    Only there has a request the header `Mcp-Method`, which is required. Source: MCP specification 2026-07-28, transports.
    """
    if not any(name == b"mcp-method" and value == b"tools/call" for name, value in scope["headers"]):
        return None
    return (
        "a tool was called without a session (MCP 2026-07-28), so it runs at any worker: if its state hangs on a handle, an "
        "argument that another tool's result carries first, add --session mcp-handle:NAME with the name of that argument "
        "(in code: homing.mcp_handle(NAME)); if the tools keep nothing in memory, all is well"
    )


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigurationError: there is none; the line lists those there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        known = ", ".join(sorted(PRESETS))
        raise ConfigurationError(f"preset {name!r}: no such preset: write one of: {known}") from None


def _last_uuid(name: str, query: bytes) -> str | None:
    values = query_values(name, query)
    try:
        return uuid.UUID(hex=values[-1]).hex if values else None
    except ValueError:
        return None


_MCP_HEADER: Final = HeaderSource(MCP_SESSION_HEADER)

PRESETS: Final[dict[str, Preset]] = {
    "mcp": Preset(
        "mcp",
        sessions=(_MCP_HEADER, McpMessagesSource()),
        method_ends=(MethodEnd("DELETE", _MCP_HEADER),),
        gone_status=404,
        gone_reply=mcp_gone,
        hint=mcp_hint,
    ),
    "engineio": Preset(
        "engineio",
        sessions=(EngineioSource(),),
        first=True,
        gone_status=400,
        gone_reply=engineio_gone,
        unowned="adopt",
        # One that lives always has a request in flight, a poll or its WebSocket, but for moments.
        idle_seconds=300.0,
    ),
    "gradio": Preset(
        "gradio",
        sessions=GRADIO_SESSIONS,
        learn=GRADIO_LEARN,
        method_ends=(MethodEnd("GET", GRADIO_EVENT), MethodEnd("POST", GRADIO_UPLOAD)),
        gone_status=404,
        gone_reply=gradio_gone,
        unowned="adopt",
    ),
}
"""The presets there are, by name."""
