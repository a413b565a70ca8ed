"""An MCP server as an agent sees it: what tools it lists, and what they answer. On the official SDK, 1.x or 2.x.

The invariant: what a caller gets is the same under both.

Not here: which tools the model is told of, and what their failures mean (`tool_access.py`).
"""

from __future__ import annotations

import datetime
import importlib
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import mcp
from mcp.client.streamable_http import streamable_http_client

_SDK2 = hasattr(mcp, "Client")
# SDK 2.x has an HTTP client library of its own name.
_http: Any = importlib.import_module("httpx2" if _SDK2 else "httpx")


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool that a server lists. `parameters` is its arguments' JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool answered: the text of its parts, or, in place of parts that are no text, what they are."""

    texts: list[str]
    structured: Any
    is_error: bool


class McpClient:
    """An open connection to an MCP server. `open_mcp` opens and closes it.

    Attributes:
        lost: A reply said that the session that the token names is gone: the SDK does not hand on an HTTP reply's own error.
    """

    def __init__(self) -> None:
        self.lost = False
        self._sdk: Any = None

    async def tools(self) -> list[ListedTool]:
        """Raises what the SDK raises, of many kinds."""
        found: list[ListedTool] = []
        for tool in (await self._sdk.list_tools()).tools:
            told = tool.model_dump(by_alias=True)
            found.append(ListedTool(tool.name, tool.description or "", told["inputSchema"]))
        return found

    async def call(self, name: str, arguments: dict[str, Any], *, timeout_seconds: float) -> ToolAnswer:
        """Raises what the SDK raises, of many kinds."""
        timeout = timeout_seconds if _SDK2 else datetime.timedelta(seconds=timeout_seconds)
        result = await self._sdk.call_tool(name, arguments, read_timeout_seconds=timeout)
        told = result.model_dump(by_alias=True)
        texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return ToolAnswer(texts, told.get("structuredContent"), bool(told.get("isError")))

    async def _see(self, response: Any) -> None:
        code = response.headers.get("homing-error")
        if response.status_code == 410 or code in ("session_gone", "session_lost"):
            self.lost = True


@asynccontextmanager
async def open_mcp(
    client: McpClient, url: str, headers: Mapping[str, str], *, connect_seconds: float
) -> AsyncIterator[None]:
    """Connect a client, and close what that opened. Raises what the SDK raises, of many kinds."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            _http.AsyncClient(
                headers=dict(headers),
                verify=_certificates(),
                timeout=_http.Timeout(connect_seconds, read=None),
                event_hooks={"response": [client._see]},
            )
        )
        transport: Any = streamable_http_client(url, http_client=http)
        if _SDK2:
            client._sdk = await stack.enter_async_context(mcp.Client(transport))
        else:
            streams = await stack.enter_async_context(transport)
            client._sdk = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
            await client._sdk.initialize()
        yield


@cache
def _certificates() -> ssl.SSLContext:
    """One for all clients: loading the machine's certificates costs more than many calls."""
    return ssl.create_default_context()
