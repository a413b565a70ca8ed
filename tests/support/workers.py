"""Which of several workers behind one port answers? And a connection that a chosen one of them has accepted.

The workers of one server accept from one socket, so a client cannot choose; but a connection stays with the worker that
accepted it. `connections` opens new ones until every worker has accepted one, and keeps those.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.support.raw import Address, Wire, connect, request

TRIES = 400
REFUSED_SECONDS = 0.02


async def answering(wire: Wire, target: str = "/", headers: tuple[tuple[str, str], ...] = ()) -> int:
    """The process ID of the worker whose app answers: the last word of the reply's body, as `Recorder` gives it."""
    await wire.send(request("GET", target, headers))
    reply = await wire.reply()
    assert reply.status == 200, reply
    return int(reply.body.split()[-1])


@asynccontextmanager
async def connections(address: Address, workers: int, *, target: str = "/") -> AsyncIterator[dict[int, Wire]]:
    """One open keep-alive connection to each worker, by process ID.

    Raises:
        AssertionError: fewer than `workers` answered in many tries.
    """
    async with AsyncExitStack() as opened:
        found: dict[int, Wire] = {}
        for _ in range(TRIES):
            async with AsyncExitStack() as trying:
                try:
                    wire = await trying.enter_async_context(connect(address))
                except ConnectionRefusedError:
                    # A worker of plain uvicorn says that it has started a moment before it listens, and nothing after.
                    await asyncio.sleep(REFUSED_SECONDS)
                    continue
                pid = await answering(wire, target)
                if pid not in found:
                    found[pid] = wire
                    opened.push_async_exit(trying.pop_all().__aexit__)
            if len(found) == workers:
                break
        assert len(found) == workers, (
            f"{len(found)} of {workers} workers answered in {TRIES} connections: {list(found)}"
        )
        yield found
