"""One port before several servers, each new connection to the next of them: how workers share a socket at their fairest.

Workers that accept from one socket take connections as the kernel wakes them, which may be nearly all by one; what a test
asserts about servers that keep no session together must not hang on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class _FairPort:
    """The relay: made in one thread, run in another, closed from the first."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._turns = itertools.cycle(ports)
        self._carrying: set[asyncio.Task[None]] = set()
        self._opened: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = queue.SimpleQueue()

    async def serve(self) -> None:
        closing = asyncio.Event()
        listening = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self._opened.put((asyncio.get_running_loop(), closing, listening.sockets[0].getsockname()[1]))
        await closing.wait()
        listening.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def opened(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Event, int]:
        return self._opened.get(timeout=30)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", next(self._turns))
        try:
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        except asyncio.CancelledError:
            pass  # the end of this relay, and of nothing else; asyncio's streams would log it as an error
        finally:
            for each in (writer, server_writer):
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()
            self._carrying.discard(task)


@contextlib.contextmanager
def fair_port(ports: Sequence[int]) -> Iterator[str]:
    """The URL of a port whose connections are carried to `ports` in turn, in a thread of its own until the block ends."""
    relay = _FairPort(ports)
    thread = threading.Thread(target=asyncio.run, args=(relay.serve(),))
    thread.start()
    loop, closing, port = relay.opened()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(closing.set)
        thread.join()
