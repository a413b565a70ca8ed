"""The model of `homing rl demo`: a script behind OpenAI's routes, so that the demo needs no network and no GPU.

It reads the numbers of the task in the conversation, calls the tool `add` with each, one call a turn, then `total`, and
says what that returned. Where the task says so, it says one too much. It keeps nothing between requests.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

MODEL_NAME: Final = "script"
OFF_BY_ONE: Final = "Then say one more than the total."
"""What a task asks for whose answer is to be wrong."""

_NUMBERS: Final = re.compile(r"\bnumbers ((?:\d+(?:, )?)+)")

Turn = dict[str, Any]


def turn_after(asked: str, results: list[str]) -> tuple[str, dict[str, int]] | str:
    """What the script does next.

    Args:
        asked: The task's text.
        results: What its tool calls have returned so far.

    Returns:
        A tool and its arguments, or what it says at the end.
    """
    found = _NUMBERS.search(asked)
    numbers = [int(each) for each in found[1].split(", ")] if found else []
    if len(results) < len(numbers):
        return "add", {"number": numbers[len(results)]}
    if len(results) == len(numbers):
        return "total", {}
    try:
        total = int(json.loads(results[-1])["total"])
    except (ValueError, KeyError, TypeError):
        return "I could not add them up."
    return f"The total is {total + 1 if OFF_BY_ONE in asked else total}."


def make_app() -> Starlette:
    """The model's server; any number of workers, since it keeps nothing."""
    app = Starlette()
    numbers = itertools.count(1)

    async def alive(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "owned_by": "homing"}]})

    async def chat(request: Request) -> Response:
        body = await request.json()
        messages = body["messages"]
        asked = next((each["content"] for each in messages if each["role"] == "user"), "")
        results = [each["content"] for each in messages if each["role"] == "tool"]
        turn = turn_after(asked, results)
        message: dict[str, Any] = {"role": "assistant", "content": turn if isinstance(turn, str) else None}
        if not isinstance(turn, str):
            function = {"name": turn[0], "arguments": json.dumps(turn[1])}
            message["tool_calls"] = [{"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop" if isinstance(turn, str) else "tool_calls",
            "logprobs": None,
        }
        usage = {"prompt_tokens": len(messages), "completion_tokens": 1, "total_tokens": len(messages) + 1}
        return JSONResponse(
            {
                "id": f"chatcmpl-{next(numbers)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model", MODEL_NAME),
                "choices": [choice],
                "usage": usage,
            }
        )

    async def responses(request: Request) -> Response:
        body = await request.json()
        asked, results = "", []
        given = body["input"]
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            if item.get("type") == "function_call_output":
                results.append(item["output"])
            elif item.get("role") == "user" and not asked:
                asked = item["content"]
        turn = turn_after(asked, results)
        if isinstance(turn, str):
            content = [{"type": "output_text", "text": turn, "annotations": []}]
            output = {"type": "message", "role": "assistant", "status": "completed", "content": content}
        else:
            output = {
                "type": "function_call",
                "call_id": f"call_{secrets.token_hex(8)}",
                "name": turn[0],
                "arguments": json.dumps(turn[1]),
                "status": "completed",
            }
        return JSONResponse(
            {
                "id": f"resp_{next(numbers)}",
                "object": "response",
                "created_at": int(time.time()),
                "model": body.get("model", MODEL_NAME),
                "status": "completed",
                "output": [{"id": f"item_{secrets.token_hex(8)}", **output}],
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": body.get("tools", []),
            }
        )

    for method, path, handler in (
        ("GET", "/", alive),
        ("GET", "/v1/models", models),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/responses", responses),
    ):
        app.add_route(path, handler, methods=[method])
    return app
