"""The rival in the seeds' way: owner files, and an HTTP hop by aiohttp to the owner's private Unix socket.

Written for this benchmark as the seed describes it, and no slower than it must be: owner files are read with plain
`os` calls, the owner's own sessions are found in memory, bodies are streamed, `Content-Length` is kept.

Not here: lifetimes, errors, WebSockets, anything a product would need; none of it would make this faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from base64 import b64decode
from collections.abc import AsyncIterator

import aiohttp
import itsdangerous
import uvicorn
from benchmarks.forwarding import app as counter
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

DIRECTORY = os.environ.get("BENCH_SOCKET_DIR", "")
FORWARDED = "benchmark.forwarded"
MAX_AGE_SECONDS = 14 * 24 * 60 * 60
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"})


class Owners:
    """One file per session, named by its hash, holding its owner's name; linked into place, so never half written."""

    def __init__(self, directory: str, worker: str) -> None:
        self.directory = directory
        self.worker = worker
        self.mine: set[str] = set()

    def path(self, session: str) -> str:
        return os.path.join(self.directory, hashlib.sha256(session.encode()).hexdigest())

    def owner(self, session: str) -> str | None:
        if session in self.mine:
            return self.worker
        try:
            fd = os.open(self.path(session), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.read(fd, 64).decode()
        finally:
            os.close(fd)

    def acquire(self, session: str) -> None:
        if session in self.mine:
            return
        complete = os.path.join(self.directory, f".{self.worker}.{secrets.token_hex(4)}")
        with open(complete, "w") as file:
            file.write(self.worker)
        try:
            os.link(complete, self.path(session))
            self.mine.add(session)
        finally:
            os.unlink(complete)


class AiohttpRouter:
    """Forwards a request to its session's owner, once; outside the session middleware, whose cookie it decodes."""

    def __init__(self, app: ASGIApp, directory: str = DIRECTORY, worker: str = counter.WORKER) -> None:
        self.app = app
        self.directory = directory
        self.worker = worker
        self.owners = Owners(directory, worker)
        self.signer = itsdangerous.TimestampSigner(counter.SECRET)
        self.clients: dict[str, aiohttp.ClientSession] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with self.private_socket():
                await self.app(scope, receive, send)
            return
        session = self.session_id(scope)
        owner = None if session is None else self.owners.owner(session)
        if owner is not None and owner != self.worker and FORWARDED not in scope:
            await self.forward(owner, scope, receive, send)
            return
        if session is None and scope["path"] == "/start":
            session = scope[counter.MINTED_SCOPE_KEY] = secrets.token_hex(16)
        if session is not None:
            self.owners.acquire(session)
        await self.app(scope, receive, send)

    def session_id(self, scope: Scope) -> str | None:
        cookie = HTTPConnection(scope).cookies.get("session")
        if cookie is None:
            return None
        try:
            session = json.loads(b64decode(self.signer.unsign(cookie, max_age=MAX_AGE_SECONDS)))
        except (itsdangerous.BadSignature, ValueError):
            return None
        found: str | None = session.get("sid")
        return found

    def client(self, owner: str) -> aiohttp.ClientSession:
        client = self.clients.get(owner)
        if client is None:
            path = os.path.join(self.directory, f"{owner}.sock")
            client = self.clients[owner] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, limit=0, keepalive_timeout=15.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return client

    async def forward(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in HOP_BY_HOP]
        has_body = any(k in (b"content-length", b"transfer-encoding") for k, _ in scope["headers"])
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        async with self.client(owner).request(
            scope["method"],
            f"http://owner{target.decode('latin-1')}",
            headers=headers,
            data=body_of(receive) if has_body else None,
            allow_redirects=False,
        ) as reply:
            kept = [(k.lower(), v) for k, v in reply.raw_headers if k.lower() not in HOP_BY_HOP]
            await send({"type": "http.response.start", "status": reply.status, "headers": kept})
            # Only a reply of no known length may go on for ever, so only there it matters that the client has gone.
            gone = None if "content-length" in reply.headers else asyncio.create_task(until_gone(receive))
            async for chunk in reply.content.iter_any():
                if gone is not None and gone.done():
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            if gone is not None:
                gone.cancel()

    @contextlib.asynccontextmanager
    async def private_socket(self) -> AsyncIterator[None]:
        """This worker's sessions, for the other workers; uvicorn's own protocol on a Unix socket."""
        # The worker that accepted the request adds date and server; here they would be doubled.
        config = uvicorn.Config(
            self.forwarded,
            http="httptools",
            interface="asgi3",
            lifespan="off",
            access_log=False,
            log_config=None,
            date_header=False,
            server_header=False,
        )
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: HttpToolsProtocol(config=config, server_state=state, app_state={}),
            os.path.join(self.directory, f"{self.worker}.sock"),
            backlog=2048,
        )
        try:
            yield
        finally:
            server.close()
            for connection in list(state.connections):
                connection.shutdown()
            for client in self.clients.values():
                await client.close()

    async def forwarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FORWARDED] = True
        await self(scope, receive, send)


async def body_of(receive: Receive) -> AsyncIterator[bytes]:
    message: Message = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client has gone")
        yield message.get("body", b"")


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


app = AiohttpRouter(counter.app)
