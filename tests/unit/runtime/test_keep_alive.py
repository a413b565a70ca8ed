"""How long a connection may be idle: as under uvicorn alone, though one timer serves all its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from homing.runtime.protocol import HomingHttpToolsProtocol
from homing.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG_SECONDS = 3600


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Served:
    """One connection, its client's end, and an app that answers once it may."""

    def __init__(self, protocol: HomingHttpToolsProtocol, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.protocol = protocol
        self.reader = reader
        self.writer = writer
        self.called = asyncio.Semaphore(0)
        self.may_answer = asyncio.Semaphore(0)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.called.release()
        await self.may_answer.acquire()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def answer(self) -> None:
        self.may_answer.release()
        async with asyncio.timeout(30):
            assert (await self.reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 ")

    async def closes(self) -> None:
        async with asyncio.timeout(30):
            assert await self.reader.read() == b""

    def timer_fires(self) -> None:
        self.protocol.timeout_keep_alive_handler()


@asynccontextmanager
async def served(timeout_keep_alive: float) -> AsyncIterator[Served]:
    made: list[Served] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await made[0].app(scope, receive, send)

    config = Config(app, access_log=False, log_config=None, proxy_headers=False)
    config.load()
    config.timeout_keep_alive = cast("int", timeout_keep_alive)
    protocols: list[HomingHttpToolsProtocol] = []

    def protocol() -> HomingHttpToolsProtocol:
        protocols.append(HomingHttpToolsProtocol(config=config, server_state=ServerState(), app_state={}))
        return protocols[0]

    async with await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            writer.write(REQUEST)
            while not protocols:
                await asyncio.sleep(0)
            made.append(Served(protocols[0], reader, writer))
            await made[0].called.acquire()
            yield made[0]
        finally:
            writer.close()
            await writer.wait_closed()


async def test_a_connection_without_a_request_is_closed_in_time() -> None:
    async with served(0.05) as connection:
        await connection.answer()
        await connection.closes()


async def test_a_request_that_takes_longer_than_a_connection_may_be_idle_is_answered() -> None:
    async with served(0.0) as connection:
        connection.timer_fires()
        await connection.answer()
        await connection.closes()


async def test_a_later_request_is_answered_though_the_timer_is_of_an_earlier_one() -> None:
    async with served(LONG_SECONDS) as connection:
        await connection.answer()
        connection.writer.write(REQUEST)
        await connection.called.acquire()
        connection.protocol.timeout_keep_alive = 0
        connection.timer_fires()
        await connection.answer()
        await connection.closes()


async def test_a_request_that_came_before_the_reply_to_the_one_before_it_is_answered() -> None:
    async with served(LONG_SECONDS) as connection:
        await connection.answer()
        connection.writer.write(REQUEST + REQUEST)
        await connection.called.acquire()
        await connection.answer()
        await connection.called.acquire()
        connection.protocol.timeout_keep_alive = 0
        connection.timer_fires()
        await connection.answer()
        await connection.closes()


async def test_a_connection_that_was_idle_for_less_stays() -> None:
    async with served(LONG_SECONDS) as connection:
        await connection.answer()
        connection.timer_fires()
        connection.writer.write(REQUEST)
        await connection.called.acquire()
        await connection.answer()
