"""The app that every setup serves: a session in a signed cookie, and a counter in this worker's memory.

`BENCH_IMPORTS` names a file of module names to import first: the memory twin of homing's workers, so that what homing
needs beyond its imports can be told apart.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

SECRET = os.environ.get("BENCH_SECRET", "benchmark")
MINTED_SCOPE_KEY = "benchmark.minted"
"""The session ID that a router outside this app has chosen for a new session, as the seeds' router does."""

WORKER = str(os.getpid())
counts: dict[str, int] = {}

if imports := os.environ.get("BENCH_IMPORTS"):
    for name in Path(imports).read_text().split():
        # `__mp_main__` and the like cannot be imported by name, and need not be.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


async def whoami(request: Request) -> JSONResponse:
    return JSONResponse({"worker": WORKER})


async def modules(request: Request) -> JSONResponse:
    return JSONResponse(sorted(sys.modules))


async def start(request: Request) -> JSONResponse:
    session = request.scope.get(MINTED_SCOPE_KEY) or secrets.token_hex(16)
    request.session["sid"] = session
    counts[session] = 0
    return JSONResponse({"session": session, "count": 0, "worker": WORKER})


async def step(request: Request) -> JSONResponse:
    """Wrong data, not an error, for a session it never heard of, as apps with a dict of sessions do."""
    session = request.session.get("sid", "")
    counts[session] = count = counts.get(session, 0) + 1
    return JSONResponse({"session": session, "count": count, "worker": WORKER})


app = Starlette(
    routes=[Route("/whoami", whoami), Route("/modules", modules), Route("/start", start), Route("/step", step)],
    middleware=[Middleware(SessionMiddleware, secret_key=SECRET)],
)
