"""A FastAPI app in which a Socket.IO server is mounted, below a path of its own."""

import os

import socketio
from fastapi import FastAPI

sio = socketio.AsyncServer(async_mode="asgi")
app = FastAPI()
said: dict[str, int] = {}


@app.get("/")
async def page() -> dict[str, int]:
    return {"pid": os.getpid()}


@sio.event  # type: ignore[untyped-decorator]
async def say(sid: str) -> dict[str, int]:
    said[sid] = said.get(sid, 0) + 1
    return {"pid": os.getpid(), "said": said[sid]}


# It looks at the whole path, as Starlette leaves it in the scope.
app.mount("/live", socketio.ASGIApp(sio, socketio_path="live/socket.io"))
