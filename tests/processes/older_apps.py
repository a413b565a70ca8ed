"""Apps of older interfaces, as the process tests serve them. No future annotations: WSGI servers look at signatures."""

import json
import os
from typing import Any


def wsgi(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"pid": os.getpid()}).encode()]


class asgi2:
    def __init__(self, scope: Any) -> None:
        self.scope = scope

    async def __call__(self, receive: Any, send: Any) -> None:
        if self.scope["type"] != "http":
            raise RuntimeError("HTTP only")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"pid": os.getpid()}).encode()})
