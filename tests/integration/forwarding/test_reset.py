"""A reply that was cut is reset; where the client has left already, there is nothing to reset, and nothing to say."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from tests.integration.forwarding.hop import Run
from uvicorn.server import ServerState

from homing.routing.middleware import ABORT_SCOPE_KEY
from homing.runtime.protocol import HomingHttpToolsProtocol


def test_a_connection_whose_client_has_left_may_be_reset(run: Run) -> None:
    async def test() -> None:
        left = asyncio.Event()
        failed: list[Exception] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            try:
                scope[ABORT_SCOPE_KEY]()
            except Exception as error:
                failed.append(error)
            left.set()

        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: HomingHttpToolsProtocol(config, state, {}), "127.0.0.1", 0
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: homing.test\r\n\r\n")
            await reader.readuntil(b"begun")
            writer.transport.abort()
            await left.wait()
            await asyncio.gather(*state.tasks)
        assert failed == []

    run(test())
