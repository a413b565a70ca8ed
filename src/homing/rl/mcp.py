"""A resources server's tools over MCP: the endpoint `/mcp`, on the official SDK, 1.x or 2.x.

Each request is complete in itself: its token names the session, in place of a cookie, and may limit which tools there are.
The invariant: without a good token, for a session that is open here, nothing of MCP runs.

Not here: which worker a token's request reaches (`homing.routing`), and what the tools do (`tools.py`).
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from itsdangerous import BadData, URLSafeSerializer
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic_core import to_json

import homing
from homing.errors import ReplyError
from homing.identity.ids import head_headers
from homing.rl.protocol import MCP_TOKEN_HEADER
from homing.rl.sessions import Session, SessionTable
from homing.rl.tools import Tool
from homing.routing.answers import ERROR_HEADER
from homing.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

_HEADER: Final = MCP_TOKEN_HEADER.lower().encode()
_INVALID_REQUEST: Final = -32600
"""JSON-RPC 2.0, 5.1."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Whose request is being served: its session, and the tools it may call (None: all)."""

    session: Session[Any]
    tools: frozenset[str] | None


_call: ContextVar[_Call] = ContextVar("homing.rl.mcp.call")


class McpEndpoint:
    """The endpoint, an ASGI app. `running` opens it, once.

    Args:
        name: The MCP server's.
        tools: By name.
        sessions: Where the token's session has to be. Borrowed.
        serializer: Signs the tokens.
        max_body_bytes: The largest request.
    """

    def __init__(
        self,
        name: str,
        tools: dict[str, Tool],
        sessions: SessionTable[Any],
        serializer: URLSafeSerializer,
        max_body_bytes: int,
    ) -> None:
        self._tools = tools
        self._sessions = sessions
        self._serializer = serializer
        self._described = [
            # By the names that they have on the wire, which are the same in both SDKs.
            types.Tool.model_validate(
                {"name": tool.name, "description": tool.description or None, "inputSchema": tool.schema()}
            )
            for tool in tools.values()
        ]
        self._server = self._make_server(name)
        self._max_body_bytes = max_body_bytes
        self._manager: StreamableHTTPSessionManager | None = None

    def __repr__(self) -> str:
        return f"<McpEndpoint: {len(self._tools)} tools>"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve, inside this block."""
        # The token is what admits a request, so there is no list of hosts; and each request stands alone, since the next
        # one finds its session by its token too.
        settings: dict[str, Any] = {"json_response": True, "stateless": True}
        if "max_request_body_size" in inspect.signature(StreamableHTTPSessionManager).parameters:
            settings["max_request_body_size"] = self._max_body_bytes
        manager = StreamableHTTPSessionManager(self._server, **settings)
        async with manager.run():
            self._manager = manager
            try:
                yield
            finally:
                self._manager = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._manager is not None, "the endpoint serves inside `running`"
        if scope["method"] != "POST":
            # Neither a stream of its own (GET) nor an end (DELETE): the session is the server's, and ends by its close.
            await _refuse(send, 405, "method_not_allowed", "Only POST: each request stands alone.", (b"allow", b"POST"))
            return
        payload = self._payload(scope)
        if payload is None:
            detail = f"{MCP_TOKEN_HEADER} is missing, or is no token of this server: use the one in the seed's reply."
            await _refuse(send, 401, "bad_session_token", detail)
            return
        session = self._sessions.get(payload["sid"])
        if session is None or session.closing:
            await _refuse(send, 404, "session_lost", "No such session is open here: seed one first.")
            return
        tools = payload.get("tools")
        token = _call.set(_Call(session, None if tools is None else frozenset(tools)))
        try:
            await self._manager.handle_request(scope, receive, send)
        finally:
            _call.reset(token)

    def granted(self, scope: Scope) -> list[str] | None:
        """The tools that a request's token is limited to; None if it is not, or is no token."""
        payload = self._payload(scope)
        return None if payload is None else payload.get("tools")

    def _payload(self, scope: Scope) -> dict[str, Any] | None:
        values = [value for name, value in head_headers(scope) if name == _HEADER]
        if len(values) != 1:
            return None
        try:
            payload = self._serializer.loads(values[0].decode("latin-1"))
        except (BadData, ValueError, RecursionError):
            return None
        if not isinstance(payload, dict) or not isinstance(payload.get("sid"), str):
            return None
        tools = payload.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(each, str) for each in tools)):
            return None
        return payload

    # --- what the SDK calls ---

    def _make_server(self, name: str) -> Server[Any]:
        make: Any = Server
        if hasattr(make, "list_tools"):
            return self._make_server_v1(make(name, version=homing.__version__))

        async def list_tools(context: Any, parameters: Any) -> Any:
            return types.ListToolsResult(tools=self._allowed())

        async def call_tool(context: Any, parameters: Any) -> Any:
            return await self._called(parameters.name, parameters.arguments or {})

        made: Server[Any] = make(name, version=homing.__version__, on_list_tools=list_tools, on_call_tool=call_tool)
        return made

    def _make_server_v1(self, server: Any) -> Server[Any]:
        async def list_tools() -> list[types.Tool]:
            return self._allowed()

        server.list_tools()(list_tools)
        # What the arguments have to be is the tools' own to say, in the same words as over HTTP.
        server.call_tool(validate_input=False)(self._called)
        made: Server[Any] = server
        return made

    def _allowed(self) -> list[types.Tool]:
        allowed = _call.get().tools
        return [tool for tool in self._described if allowed is None or tool.name in allowed]

    async def _called(self, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
        call = _call.get()
        tool = self._tools.get(name)
        if tool is None or (call.tools is not None and name not in call.tools):
            return _failed(f"unknown tool: {name!r}; there are {', '.join(each.name for each in self._allowed())}")
        try:
            given = tool.from_object(arguments)
            with call.session as state:
                result = await tool.method(state, **given)
        except ReplyError as error:
            return _failed(error.detail)
        except Exception:
            logger.exception("the tool %s failed", name)
            return _failed(f"{name} failed; the server's log says why.")
        text = to_json(result, inf_nan_mode="null").decode()
        value = json.loads(text)
        structured = value if isinstance(value, dict) else {"result": value}
        return _result(text, structuredContent=structured)


def _failed(text: str) -> types.CallToolResult:
    return _result(text, isError=True)


def _result(text: str, **more: Any) -> types.CallToolResult:
    return types.CallToolResult.model_validate({"content": [{"type": "text", "text": text}], **more})


async def _refuse(send: Send, status: int, code: str, detail: str, *headers: tuple[bytes, bytes]) -> None:
    """A JSON-RPC error without the request's ID, which has not been read (JSON-RPC 2.0, 5)."""
    error = {"code": _INVALID_REQUEST, "message": detail, "data": {"code": code}}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    fixed: Sequence[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (ERROR_HEADER, code.encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
