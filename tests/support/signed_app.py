"""An app with a session in Starlette's signed cookie, which tells which session it sees.

POST /login    a new session: {"sid", "pid"}
GET /whose     {"sid": the session that this app sees, or null, "pid"}
GET /          the worker's process ID as the last word of a text
"""

from __future__ import annotations

import os
import secrets

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route


async def who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"worker {os.getpid()}")


async def login(request: Request) -> JSONResponse:
    request.session["sid"] = secrets.token_hex(16)
    return await whose(request)


async def whose(request: Request) -> JSONResponse:
    return JSONResponse({"sid": request.session.get("sid"), "pid": os.getpid()})


app = Starlette(
    routes=[Route("/", who), Route("/login", login, methods=["POST"]), Route("/whose", whose)],
    middleware=[Middleware(SessionMiddleware, secret_key=os.environ["SESSION_SECRET"])],
)
