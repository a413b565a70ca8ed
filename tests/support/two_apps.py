"""Two apps behind one, each routed by itself and with the same settings: /one and /two; / answers with the process ID."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from tests.support.lifespans import lifespan_of

import homing


def _routed(name: str) -> Any:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{name} {os.getpid()}")

    return homing.sticky(Starlette(routes=[Route("/", answer)]), sessions=[homing.header("x-session")])


APPS = {name: _routed(name) for name in ("one", "two")}


@asynccontextmanager
async def lifespan(app: Any) -> Any:
    async with AsyncExitStack() as stack:
        for each in APPS.values():
            await stack.enter_async_context(lifespan_of(each))
        yield


async def who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"worker {os.getpid()}")


app = Starlette(
    routes=[Route("/", who), *(Mount(f"/{name}", each) for name, each in APPS.items())],
    lifespan=lifespan,
)
