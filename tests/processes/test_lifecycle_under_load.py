"""Workers killed, paused, restarted and stopped while clients work: the table of answers holds, new sessions always work.

Shown elsewhere: that a dead or hanging worker is replaced, rolling restarts and their failures, Ctrl-C twice, streams at the
graceful limit, workers that do not outlive a killed supervisor (F32), and one start and stop of the app per worker
(SCENARIOS 18): `test_run_lifecycle.py`. Forked children that own and release nothing (F19): `test_owners_deaths.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.raw import TEXT, Address, CutError, Reply, WebSocketWire, Wire, WireError, connect, request
from tests.support.recorder import body, note, read_body, receive, respond, start, wait
from tests.support.servers import STARTED
from tests.support.staged import SESSION, Shared, Staged, asked, call, open_staged
from tests.support.workers import connections

COUNTERS = "tests.support.counter_app:app"
COUNTING = ("--session", "path:/sessions/{session}", "--learn", "body:session@/sessions", "--start", "POST /sessions")


async def made(wire: Wire) -> dict[str, Any]:
    reply = await posted(wire, "/sessions")
    assert reply.status == 200, reply
    value: dict[str, Any] = json.loads(reply.body)
    return value


async def posted(wire: Wire, path: str) -> Reply:
    await wire.send(request("POST", path, body=b""))
    return await wire.reply("POST")


@contextlib.asynccontextmanager
async def counting(server: Staged) -> AsyncIterator[dict[int, Wire]]:
    """A connection to each worker of a server of the counter app."""
    async with contextlib.AsyncExitStack() as opened:
        found: dict[int, Wire] = {}
        for _ in range(400):
            wire = await opened.enter_async_context(connect(server.server.address))
            pid = json.loads((await posted(wire, "/")).body)["pid"]
            found.setdefault(pid, wire)
            if len(found) == server.workers:
                break
        assert len(found) == server.workers
        yield found


# --- a child that a worker forked ---


def test_a_forked_child_keeps_no_dead_worker_alive_and_no_request_waiting() -> None:
    async def test() -> None:
        async with open_staged(*COUNTING, app=COUNTERS, workers=2) as server, counting(server) as wires:
            owner, front = wires
            session = (await made(wires[owner]))["session"]
            steps = f"/sessions/{session}/step"
            # The hop's connections exist when the child is made, in the pool and in use, and so does the listener.
            assert (await posted(wires[front], steps)).status == 200
            async with connection_to(server, front) as stream:
                await stream.send(request("GET", f"/sessions/{session}/events"))
                await stream.until(b"data: 1\n\n")
                child = json.loads((await posted(wires[front], f"/sessions/{session}/fork")).body)["child"]
                try:
                    await server.kill(owner)
                    began = time.monotonic()
                    await stream.to_end(timeout_seconds=5)
                    assert stream.end == "reset"
                    assert (await posted(wires[front], steps)).status == 410
                    assert time.monotonic() - began < 0.9
                    # The port is free as soon as the server has stopped: the child let go of that too.
                    held = {os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir()}
                    assert held, "the child lives"
                    assert held.isdisjoint(listening(server.server.address[1]))
                finally:
                    os.kill(child, signal.SIGKILL)

    asyncio.run(test())


def listening(port: int) -> set[str]:
    """The sockets that listen on a port, as `/proc/PID/fd` names them. Source: proc(5), `/proc/net/tcp`."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    assert found
    return found


@contextlib.asynccontextmanager
async def connection_to(server: Staged, pid: int) -> AsyncIterator[Wire]:
    """One more connection to this worker."""
    for _ in range(400):
        async with contextlib.AsyncExitStack() as opened:
            wire = await opened.enter_async_context(connect(server.server.address))
            reply = await posted(wire, "/")
            if reply.body.split()[-1].rstrip(b"}") == str(pid).encode():
                yield wire
                return
    raise AssertionError(f"worker {pid} accepted none of 400 connections")
