"""Replies whose heads are held back in the same turn of the event loop: one connection's trouble is no other's."""

from __future__ import annotations

import asyncio
from typing import Any

from homing.runtime.replies import ReplyWriter, turn_of


class BrokenTransport(asyncio.Transport):
    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise RuntimeError("it is broken")


def test_a_transport_that_raises_keeps_no_other_connections_reply_back() -> None:
    async def main() -> None:
        told: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        received = asyncio.Event()

        async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readexactly(4) == b"head"
            writer.close()
            received.set()

        async with asyncio.timeout(30), await asyncio.start_server(read, "127.0.0.1", 0) as server:
            _, stream = await asyncio.open_connection(*server.sockets[0].getsockname())
            for transport in (BrokenTransport(), stream.transport):
                reply = ReplyWriter(transport, turn_of(loop))
                reply.begins = True
                reply.write(b"head")
            await received.wait()
            stream.close()
        assert [str(each["exception"]) for each in told] == ["it is broken"]

    asyncio.run(main())
