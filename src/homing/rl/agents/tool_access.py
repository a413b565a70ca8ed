"""The tools of an activation: plain routes of a resources server, and tools that an MCP server lists.

The invariant: what the model did wrong (an unknown tool, arguments that do not fit) is an answer to the model; what went
wrong elsewhere (a session that is lost, a server that does not answer) ends the run, and is no measurement of it.

Not here: the loop (`tool_calling.py`), and the MCP client (`mcp_client.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from homing.rl.agents.errors import AgentRunError
from homing.rl.episode_protocol import ToolAccess
from homing.rl.outgoing import CONNECT_SECONDS, SESSION_LOST, CallError, Cookies, OutgoingCalls

if TYPE_CHECKING:
    from homing.rl.agents.mcp_client import McpClient

_MODELS_FAULT: Final = frozenset({400, 404, 405, 413, 422})


class Tools:
    """The tools of one activation, by name. `open_tools` opens and closes it.

    Attributes:
        definitions: What the model is told of them, as `function` tools of the OpenAI Responses API.
    """

    def __init__(self, calls: OutgoingCalls, timeout_seconds: float) -> None:
        self.definitions: list[dict[str, Any]] = []
        self._calls = calls
        self._timeout_seconds = timeout_seconds
        self._direct: dict[str, tuple[ToolAccess, Cookies]] = {}
        self._listed: dict[str, McpClient] = {}

    def add_direct(self, access: ToolAccess, cookies: Cookies, definitions: Sequence[Mapping[str, Any]]) -> None:
        for tool in definitions:
            if tool.get("type") == "function" and isinstance(tool.get("name"), str):
                self._direct.setdefault(str(tool["name"]), (access, cookies))

    async def add_listed(self, client: McpClient) -> None:
        """Add what an MCP server lists; a name that is taken already stays whose it is."""
        for tool in await client.tools():
            if tool.name in self._direct or tool.name in self._listed:
                continue
            self._listed[tool.name] = client
            self.definitions.append(
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": False,
                }
            )

    async def call(self, name: str, arguments: str) -> str:
        """What the model is told of its call.

        Raises:
            AgentRunError: the call failed, and that is not the model's doing.
        """
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            return _problem("the arguments are no JSON")
        if not isinstance(given, dict):
            return _problem("the arguments are no JSON object")
        if name in self._listed:
            return await self._call_listed(name, given)
        if name in self._direct:
            return await self._call_direct(name, given)
        return _problem(f"there is no tool {name}")

    async def _call_direct(self, name: str, arguments: dict[str, Any]) -> str:
        access, cookies = self._direct[name]
        if "/" in name:
            return _problem(f"there is no tool {name}")
        try:
            reply = await self._calls.post(
                f"{access.url.rstrip('/')}/{name}",
                arguments,
                cookies=cookies,
                headers=access.headers,
                timeout_seconds=self._timeout_seconds,
            )
        except CallError as error:
            if error.kind != SESSION_LOST and error.status in _MODELS_FAULT:
                return _problem(error.said or f"the tool answered {error.status}")
            raise AgentRunError(error.kind, error.detail, retryable=error.retryable) from error
        return reply if isinstance(reply, str) else json.dumps(reply)

    async def _call_listed(self, name: str, arguments: dict[str, Any]) -> str:
        client = self._listed[name]
        with _mcp_faults(f"the tool {name}", client):
            answer = await client.call(name, arguments, timeout_seconds=self._timeout_seconds)
        text = "\n".join(answer.texts)
        if answer.is_error:
            return _problem(text)
        if not answer.texts and answer.structured is not None:
            return json.dumps(answer.structured)
        return text


@asynccontextmanager
async def open_tools(
    accesses: Sequence[ToolAccess],
    cookies: Mapping[str, Cookies],
    definitions: Sequence[dict[str, Any]],
    calls: OutgoingCalls,
    *,
    timeout_seconds: float,
) -> AsyncIterator[Tools]:
    """Open the tools of an activation; connections to MCP servers are closed again.

    Args:
        cookies: For direct accesses, by name.
        definitions: The tools that the request itself defines.

    Raises:
        AgentRunError: an MCP server cannot be reached.
    """
    tools = Tools(calls, timeout_seconds)
    tools.definitions = list(definitions)
    async with AsyncExitStack() as stack:
        for access in accesses:
            if access.transport == "direct_http":
                tools.add_direct(access, cookies[access.name], definitions)
        for access in accesses:
            if access.transport == "mcp":
                # Not before it is needed: an agent whose tools are plain routes needs no MCP. In a thread: it takes a while.
                await asyncio.to_thread(import_module, "homing.rl.agents.mcp_client")
                from homing.rl.agents.mcp_client import McpClient, open_mcp

                headers = {**access.headers, **Cookies(dict(access.cookies)).header()}
                client = McpClient()
                with _mcp_faults(f"the MCP server {access.name}", client):
                    await stack.enter_async_context(
                        open_mcp(client, access.url, headers, connect_seconds=CONNECT_SECONDS)
                    )
                    await tools.add_listed(client)
        yield tools


@contextmanager
def _mcp_faults(what: str, client: McpClient) -> Iterator[None]:
    """What an MCP client raises, as the end of the run. It fails in many ways, and none of them is the model's doing."""
    try:
        yield
    except (AgentRunError, asyncio.CancelledError):
        raise
    except Exception as error:
        kind = SESSION_LOST if client.lost else "tool_server_failed"
        raise AgentRunError(kind, f"{what}: {type(error).__name__}: {error}"[:500], retryable=True) from error


def _problem(text: str) -> str:
    return json.dumps({"error": text})
