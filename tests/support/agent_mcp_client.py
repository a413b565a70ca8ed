"""Use a session's tools over MCP as an agent does, and say what it saw; runs under the SDK 2.x and under 1.x."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from homing.rl.agents.mcp_client import McpClient, open_mcp
from homing.rl.calls import Caller


async def story(url: str) -> dict[str, Any]:
    caller = Caller(url)
    names = {"resources_session_id": secrets.token_hex(16), "episode_id": {"rollout_id": "r"}}
    task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_data": {"start": 10}}
    access = (await asyncio.to_thread(caller.post, "/seed_session", names | task)).content["resources_tools"]
    client = McpClient()
    async with open_mcp(client, url + access["url_path"], access["headers"], connect_seconds=30):
        listed = {tool.name: tool for tool in await client.tools()}
        counted = await client.call("increment", {"by": 2}, timeout_seconds=60)
        refused = await client.call("divide", {"by": 0}, timeout_seconds=60)
        await asyncio.to_thread(caller.post, "/close_session", names)
        lost_before = client.lost
        try:
            await client.call("increment", {"by": 2}, timeout_seconds=60)
        except Exception:
            raised = True
        else:
            raised = False
    return {
        "parameters": listed["increment"].parameters["properties"]["by"]["type"],
        "described": bool(listed["increment"].description),
        "counted": (counted.structured["count"], json.loads(counted.texts[0])["count"], counted.is_error),
        "refused": (refused.texts, refused.is_error),
        "lost": (lost_before, raised, client.lost),
    }
