"""Seed sessions of a resources server, call their tools with the official MCP client and with an agent's, and print what came.

    python -m tests.support.rl_mcp_client http://127.0.0.1:8000 --sessions 64 --calls 2

Runs under the SDK 2.x and under 1.x.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import secrets
import ssl
from collections import Counter
from typing import Any

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from tests.support import agent_mcp_client

from homing.rl.calls import Caller

# SDK 2.x has an HTTP client library of its own name.
try:
    httpx: Any = importlib.import_module("httpx2")
except ImportError:
    httpx = importlib.import_module("httpx")
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def story(url: str, number: int, calls: int, tally: Counter[str], pids: set[int], ready: asyncio.Barrier) -> None:
    caller = Caller(url)
    names = {"resources_session_id": secrets.token_hex(16), "episode_id": {"rollout_id": f"r{number}"}}
    task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_data": {"start": 1000 * number}}
    seeded = await asyncio.to_thread(caller.post, "/seed_session", names | task)
    access = seeded.content["resources_tools"]
    limits = httpx.Limits(max_keepalive_connections=0)  # so that each call may arrive at another worker
    http = httpx.AsyncClient(headers=access["headers"], verify=TLS, timeout=60, limits=limits)
    async with (
        http,
        streamable_http_client(url + access["url_path"], http_client=http) as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        await session.initialize()
        await ready.wait()
        for call in range(1, calls + 1):
            result = await session.call_tool("increment", {"by": 1})
            found = content(result)
            tally["right" if found.get("count") == 1000 * number + call else "wrong"] += 1
            pids.add(found["pid"])
        if number % 8 == 0:
            await ask_aside(session, tally)
    closed = await asyncio.to_thread(caller.post, "/close_session", names)
    tally["closed"] += closed.status == 200
    late = await asyncio.to_thread(
        lambda: caller.post("/mcp", ping(), headers={**access["headers"], **ACCEPT}, cookies=False)
    )
    tally[f"after the close: {late.status} {late.code}"] += 1


async def ask_aside(session: ClientSession, tally: Counter[str]) -> None:
    """What is not a right call: the list of tools, and calls that are refused."""
    listed = await session.list_tools()
    tally["listed"] += "increment" in {tool.name for tool in listed.tools}
    failed = await session.call_tool("increment", {"by": "many"})
    tally["refused arguments"] += "by" in text(failed) and is_error(failed)
    divided = await session.call_tool("divide", {"by": 0})
    tally["told"] += text(divided) == "nothing can be divided by 0" and is_error(divided)


ACCEPT = {"accept": "application/json, text/event-stream"}


def ping() -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


def content(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = result.model_dump(by_alias=True)["structuredContent"]
    return found


def is_error(result: Any) -> bool:
    return bool(result.model_dump(by_alias=True)["isError"])


def text(result: Any) -> str:
    return str(result.content[0].text)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--calls", type=int, default=2)
    given = parser.parse_args()
    tally: Counter[str] = Counter()
    pids: set[int] = set()
    ready = asyncio.Barrier(given.sessions)
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        for number in range(given.sessions):
            group.create_task(story(given.url, number, given.calls, tally, pids, ready))
    agent = await asyncio.wait_for(agent_mcp_client.story(given.url), 240)
    print(json.dumps({"tally": tally, "pids": sorted(pids), "agent": agent}))


if __name__ == "__main__":
    asyncio.run(main())
