"""A FastAPI app with Socket.IO in it: pages and baskets beside live connections, all in this process's memory.

    homing run examples.socketio_chat:app --workers 4 --preset engineio --session cookie:visitor

A connection that begins with polling sends its events in requests of their own, and then becomes a WebSocket: each must
reach the process where the connection is. The page's cookie brings a visitor's basket and a new connection together.
"""

import logging
import os
import secrets
from typing import Annotated, Any

import socketio
from fastapi import Body, Cookie, FastAPI, Response

logger = logging.getLogger("uvicorn.error")

sio = socketio.AsyncServer(async_mode="asgi")
pages = FastAPI()
app = socketio.ASGIApp(sio, pages)

baskets: dict[str, list[str]] = {}
said: dict[str, list[str]] = {}


@pages.get("/")
async def page(response: Response, visitor: Annotated[str | None, Cookie()] = None) -> dict[str, object]:
    """Begin a basket, or find the one that the cookie names."""
    if visitor not in baskets:
        visitor = secrets.token_hex(8)
        baskets[visitor] = []
        response.set_cookie("visitor", visitor)
    return {"pid": os.getpid(), "items": baskets[visitor]}


@pages.post("/basket")
async def add(visitor: Annotated[str, Cookie()], item: Annotated[str, Body(embed=True)]) -> dict[str, object]:
    baskets[visitor].append(item)
    return {"pid": os.getpid(), "items": baskets[visitor]}


@sio.event
async def connect(sid: str, environ: dict[str, Any]) -> None:
    said[sid] = []


@sio.event
async def say(sid: str, text: str) -> dict[str, object]:
    """Answer with what this connection has said so far, and say the same in an event of its own."""
    said[sid].append(text)
    await sio.emit("heard", {"text": text, "number": len(said[sid])}, to=sid)
    return {"pid": os.getpid(), "said": said[sid]}


@sio.event
async def disconnect(sid: str, reason: str) -> None:
    logger.info("connection %s left after %d events", sid, len(said.pop(sid)))
