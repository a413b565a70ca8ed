"""Starts sessions at a real server in one of several ways, and says how many each worker got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BURST: Final = 64
CLIENTS: Final = 8
START_SECONDS: Final = 120.0

ARRIVALS: Final = ("slow", "burst", "keep-alive")

_ADDRESS: Final = re.compile(r"running on http://[^:]+:(\d+)")


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Client:
        self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._streams is not None
        self._streams[1].close()
        with contextlib.suppress(OSError):
            await self._streams[1].wait_closed()

    async def ask(self, method: str, path: str) -> dict[str, Any]:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        found = re.search(r"content-length: (\d+)", head)
        assert found is not None, head
        body = await reader.readexactly(int(found[1]))
        assert head.split()[1] == "200", (head, body)
        return dict(json.loads(body))


async def _alone(port: int, method: str, path: str) -> dict[str, Any]:
    async with Client(port) as client:
        return await client.ask(method, path)


async def _starts(port: int, arrival: str, count: int) -> list[dict[str, Any]]:
    started: list[dict[str, Any]] = []
    if arrival == "slow":
        started += [await _alone(port, "POST", "/sessions") for _ in range(count)]
    elif arrival == "burst":
        while len(started) < count:
            many = min(BURST, count - len(started))
            started += await asyncio.gather(*(_alone(port, "POST", "/sessions") for _ in range(many)))
    else:
        left = iter(range(count))

        async def client() -> None:
            async with Client(port) as kept:
                for _ in left:
                    started.append(await kept.ask("POST", "/sessions"))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return started


async def spread(port: int, arrival: str, count: int) -> Counter[int]:
    """Start so many sessions, and end them again; how many each worker had, by its process ID."""
    started = await _starts(port, arrival, count)
    counts = Counter(int(each["pid"]) for each in started)
    async with Client(port) as client:
        for each in started:
            for method in ("GET", "DELETE"):
                reply = await client.ask(method, f"/sessions/{each['session']}")
                assert reply["pid"] == each["pid"], (each, reply)
    return counts


@contextlib.contextmanager
def serving(place: str, workers: int) -> Iterator[int]:
    """A server's port, once all its workers serve."""
    command = (
        *(sys.executable, "-m", "homing", "run", "benchmarks.placement.app:app", "--port", "0"),
        *("--workers", str(workers), "--place", place, "--no-access-log", "--session", "path:/sessions/{session}"),
        *("--learn", "body:session@/sessions", "--start", "POST /sessions", "--end", "DELETE /sessions/{session}"),
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port, ready = 0, 0
        lines = []
        while ready < workers or not port:
            line = process.stderr.readline()
            lines.append(line)
            if not line:
                raise RuntimeError("the server did not start:\n" + "".join(lines))
            ready += "Application startup complete" in line
            if found := _ADDRESS.search(line):
                port = int(found[1])
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=START_SECONDS)
