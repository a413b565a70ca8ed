"""Sessions in a dict; each reply says which process has it."""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

sessions: dict[str, int] = {}


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    match scope["path"].split("/")[1:]:
        case ["sessions"]:
            session = secrets.token_urlsafe(16)
            sessions[session] = 0
            reply: dict[str, Any] = {"session": session}
        case ["sessions", session] if session in sessions:
            sessions[session] += 1
            reply = {"count": sessions[session]}
            if scope["method"] == "DELETE":
                del sessions[session]
        case _:
            reply = {"lost": True}
    body = json.dumps({**reply, "pid": os.getpid()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
