"""Drive an MCP server with the client of the official SDK 1.x and print a tally; runs under .venv-mcp1.

.venv-mcp1/bin/python -m tests.support.mcp_client_v1 http://127.0.0.1:8000/mcp --clients 50 --calls 20
"""

import os
import signal
import ssl
import time
from typing import Any

import anyio
import httpx
from mcp import ClientSession, types
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.context import RequestContext
from tests.support.mcp_tally import Tally, arguments

HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
# One for all clients of the run: loading the system's certificates for each costs more than its calls.
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
LIST_TOOLS = {"jsonrpc": "2.0", "id": 1000, "method": "tools/list"}


class Story:
    """One client's life: initialize, calls, a notification, a question, DELETE, and requests after it."""

    def __init__(self, url: str, tally: Tally, *, calls: int, new_connections: bool, only_calls: bool) -> None:
        self.url = url
        self.tally = tally
        self.calls = calls
        self.only_calls = only_calls
        self.limits = httpx.Limits(max_keepalive_connections=0 if new_connections else None)
        self.listening = anyio.Event()
        self.noticed = anyio.Event()

    def http_client(self) -> httpx.AsyncClient:
        """A client whose replies are counted."""
        return httpx.AsyncClient(
            verify=TLS, timeout=httpx.Timeout(30), limits=self.limits, event_hooks={"response": [self.on_response]}
        )

    async def on_response(self, response: httpx.Response) -> None:
        self.tally.statuses[f"{response.request.method} {response.status_code}"] += 1
        if response.request.method == "GET" and response.status_code == 200:
            self.listening.set()

    async def on_message(self, message: Any) -> None:
        if isinstance(message, types.ServerNotification) and isinstance(
            message.root, types.ResourceListChangedNotification
        ):
            self.noticed.set()

    async def sample(
        self, context: RequestContext[ClientSession, Any], params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult:
        question = params.messages[0].content
        text = f"answer to {question.text if isinstance(question, types.TextContent) else '?'}"
        content = types.TextContent(type="text", text=text)
        return types.CreateMessageResult(role="assistant", content=content, model="none")

    async def fill_in(
        self, context: RequestContext[ClientSession, Any], params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"text": f"answer to {params.message}"})

    async def call(self, session: ClientSession, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A tool's structured result; empty if the call failed, which is counted."""
        self.tally.calls += 1
        try:
            with anyio.fail_after(20):
                result = await session.call_tool(tool, arguments)
        except Exception as error:
            self.tally.errors[f"{tool}: {error!r}"] += 1
            return {}
        if result.structuredContent is None:
            self.tally.errors[f"{tool}: {result.content}"] += 1
        return result.structuredContent or {}

    async def run(self, *, kill: bool = False) -> None:
        """The whole life. With `kill` the session's worker is killed after the first call."""
        session_id: str | None = None
        async with (
            self.http_client() as http,
            streamable_http_client(self.url, http_client=http) as (read, write, get_session_id),
            ClientSession(
                read,
                write,
                sampling_callback=self.sample,
                elicitation_callback=self.fill_in,
                message_handler=self.on_message,
            ) as session,
        ):
            await session.initialize()
            self.tally.clients += 1
            session_id = get_session_id()
            pid = None
            for number in range(1, self.calls + 1):
                page = await self.call(session, "write", {"line": f"line {number}"})
                pid = pid or page.get("pid")
                self.count(page, page.get("lines") == number, pid)
            if kill:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await self.wait_for_gone(session_id)
                await self.error_after_kill(session)
            elif not self.only_calls:
                await self.notification(session, pid)
                answer = await self.call(session, "ask", {"question": f"question of {session_id}"})
                self.count(answer, answer.get("text") == f"answer to question of {session_id}", pid)
                self.tally.answered += answer.get("text") == f"answer to question of {session_id}"
        if not kill and session_id is not None:
            for method in ("POST", "GET", "DELETE"):
                self.tally.after_delete[f"{method} {await self.ask_raw(method, session_id)}"] += 1

    async def run_sse(self) -> None:
        """A life over the older SSE transport: one GET stream for all that the server says; its end is the session's."""
        session_ids: list[str] = []
        async with (
            sse_client(self.url, timeout=30, on_session_created=session_ids.append) as (read, write),
            ClientSession(read, write, sampling_callback=self.sample, message_handler=self.on_message) as session,
        ):
            await session.initialize()
            self.tally.clients += 1
            self.listening.set()
            pid = None
            for number in range(1, self.calls + 1):
                page = await self.call(session, "write", {"line": f"line {number}"})
                pid = pid or page.get("pid")
                self.count(page, page.get("lines") == number, pid)
            await self.notification(session, pid)
            answer = await self.call(session, "ask", {"question": f"question of {session_ids[0]}"})
            self.count(answer, answer.get("text") == f"answer to question of {session_ids[0]}", pid)
            self.tally.answered += answer.get("text") == f"answer to question of {session_ids[0]}"

    def count(self, result: dict[str, Any], right: bool, pid: int | None) -> None:
        if right and result.get("pid") == pid:
            self.tally.right += 1
            self.tally.pids[result["pid"]] += 1

    async def notification(self, session: ClientSession, pid: int | None) -> None:
        with anyio.move_on_after(10):
            await self.listening.wait()
            page = await self.call(session, "announce", {})
            self.count(page, page.get("lines") == self.calls, pid)
            await self.noticed.wait()
            self.tally.noticed += 1

    async def ask_raw(self, method: str, session_id: str | None) -> int:
        """The status of one request of that session, on a connection of its own."""
        headers = HEADERS | {"mcp-session-id": session_id or ""}
        async with (
            httpx.AsyncClient(verify=TLS, timeout=30) as http,
            http.stream(method, self.url, headers=headers, json=LIST_TOOLS if method == "POST" else None) as response,
        ):
            return response.status_code

    async def wait_for_gone(self, session_id: str | None) -> None:
        killed_at = time.monotonic()
        while time.monotonic() < killed_at + 5:
            status = await self.ask_raw("POST", session_id)
            self.tally.after_kill.append(f"POST {status}")
            if status == 404:
                self.tally.seconds_to_gone = time.monotonic() - killed_at
                return

    async def error_after_kill(self, session: ClientSession) -> None:
        try:
            with anyio.fail_after(20):
                await session.call_tool("write", {"line": "one more"})
        except Exception as error:
            self.tally.error_after_kill = str(error)


async def main() -> None:
    options = arguments("--sse")
    tally = Tally()

    async def one(number: int, *, kill: bool = False) -> None:
        story = Story(
            options.url,
            tally,
            calls=options.calls,
            new_connections=options.new_connections and bool(number % 2),
            only_calls=options.only_calls or kill,
        )
        try:
            await (story.run_sse() if options.sse else story.run(kill=kill))
        except Exception as error:
            tally.errors[repr(error)] += 1

    if options.kill:
        await one(0, kill=True)
    async with anyio.create_task_group() as clients:
        for number in range(options.clients):
            clients.start_soon(one, number)
    tally.print()


if __name__ == "__main__":
    anyio.run(main)
