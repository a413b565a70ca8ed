"""Four servers that roll out web tasks: a scripted model, web tasks as a resources server, an agent, an environment.

The browsers are the fakes of `web_app.py`: a session counts its steps, and its verdict is that count.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.support.web_app import assemble_fakes

from homing.apps.web_resources import WebResources
from homing.rl.agents.tool_calling import ToolCallingAgent
from homing.rl.episodes.server import EnvironmentServer
from homing.web.settings import WebSettings

STEP = {
    "type": "function",
    "name": "step",
    "description": "Do one action.",
    "parameters": {"type": "object", "properties": {"action": {"type": "object"}}, "required": ["action"]},
}


def resources() -> WebResources:
    settings = WebSettings(
        max_sessions=32, operation_seconds=5.0, acquire_seconds=5.0, stop_seconds=5.0, retry_seconds=0.1
    )
    return WebResources(assemble_fakes, settings, name="web")


def agent() -> ToolCallingAgent:
    return ToolCallingAgent(
        name="web",
        model_url=os.environ["TEST_MODEL_URL"] + "/v1",
        model="script",
        model_api="responses",
        resources_url=os.environ["TEST_RESOURCES_URL"],
    )


def environment() -> EnvironmentServer:
    return EnvironmentServer(
        name="web", resources_url=os.environ["TEST_RESOURCES_URL"], agent_url=os.environ["TEST_AGENT_URL"]
    )


def model() -> Starlette:
    """Steps as often as it is asked to, then says so."""
    app = Starlette()

    async def responses(request: Request) -> Response:
        body = await request.json()
        done = [item for item in body["input"] if item.get("type") == "function_call_output"]
        wanted = int(next(item["content"] for item in body["input"] if item.get("role") == "user"))
        output: dict[str, Any]
        if len(done) < wanted:
            output = {
                "type": "function_call",
                "call_id": f"call_{secrets.token_hex(8)}",
                "name": "step",
                "arguments": json.dumps({"action": {"action": "noop"}}),
                "status": "completed",
            }
        else:
            content = [{"type": "output_text", "text": f"done {wanted}", "annotations": []}]
            output = {"type": "message", "role": "assistant", "status": "completed", "content": content}
        return JSONResponse(
            {
                "id": f"resp_{secrets.token_hex(8)}",
                "object": "response",
                "created_at": int(time.time()),
                "model": "script",
                "status": "completed",
                "output": [{"id": f"item_{secrets.token_hex(8)}", **output}],
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": body.get("tools", []),
            }
        )

    app.add_route("/v1/responses", responses, methods=["POST"])
    return app


def task_line(number: int, steps: int, **more: Any) -> str:
    asked = {"input": [{"role": "user", "content": str(steps)}], "tools": [STEP]}
    task = {"benchmark": "fake", "task_id": "count", "seed": number, "responses_create_params": asked, **more}
    return json.dumps({"task_id": {"taskset": "fake", "task_id": f"count-{number}"}, "task_input": task}) + "\n"
