"""The plain dict app: sessions in a module's dict, as most stateful servers begin.

    homing run examples.dict_app:app --workers 4 --session "path:/sessions/{session}" --learn body:session@/sessions

Under `uvicorn --workers 4` about three of four calls reach a process that never heard of their
session. Nothing fails: a `defaultdict` makes an empty session and the count is just wrong.
"""

import os
import secrets
from collections import defaultdict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

counts: defaultdict[str, int] = defaultdict(int)


async def start(request: Request) -> JSONResponse:
    """Start a session: its ID is in the reply's body."""
    session = secrets.token_urlsafe(12)
    counts[session] = 0
    return JSONResponse({"session": session, "pid": os.getpid()}, status_code=201)


async def call(request: Request) -> JSONResponse:
    """One more call of a session: how many it has had."""
    session = request.path_params["session"]
    counts[session] += 1
    return JSONResponse({"count": counts[session], "pid": os.getpid()})


app = Starlette(
    routes=[
        Route("/sessions", start, methods=["POST"]),
        Route("/sessions/{session}/calls", call, methods=["POST"]),
    ]
)
