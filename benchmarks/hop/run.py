"""CPU µs per request, local and forwarded; `question.md` says what is measured."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

WORKERS = ("a" * 32, "b" * 32)
CONNECTIONS = 16


def worker(socket_dir: str, worker_id: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.sessions import SessionMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from homing.forwarding.forwarder import Forwarder, replayable
    from homing.forwarding.private_socket import serve_private_socket
    from homing.types import Reason, WorkerId

    counts: dict[str, int] = {}

    async def step(request: Request) -> JSONResponse:
        body = await request.body() if request.method == "POST" else b""
        key = request.session.get("id", "none")
        counts[key] = counts.get(key, 0) + 1
        return JSONResponse({"worker": worker_id, "count": counts[key], "size": len(body)})

    inner = Starlette(
        routes=[Route("/step", step, methods=["GET", "POST"])],
        middleware=[Middleware(SessionMiddleware, secret_key="x" * 32)],
    )
    forwarder: Any = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal forwarder
        if scope["type"] == "lifespan":
            await receive()
            async with (
                serve_private_socket(inner_app, f"{socket_dir}/{worker_id}.sock", state=dict),
                Forwarder(socket_dir) as forwarder,
            ):
                print(sock.getsockname()[1], flush=True)  # both sockets listen now
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        for name, value in scope["headers"]:
            if name == b"x-owner":
                owner = value.decode()
                break
        if owner == worker_id:
            await inner(scope, receive, send)
        else:
            await forwarder.forward(WorkerId(owner), Reason.OWNED, ("session",), scope, replayable(receive), send)

    async def inner_app(scope: Any, receive: Any, send: Any) -> None:
        scope["homing.hop"].mine()
        await inner(scope, receive, send)

    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, http="httptools", loop="uvloop")
    sock = config.bind_socket()
    sock.listen(2048)
    uvicorn.Server(config).run(sockets=[sock])


def cpu_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


async def client(port: int, request: bytes, count: int, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        started = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        latencies.append(time.perf_counter() - started)
    writer.close()


async def load(port: int, owner: str, method: str, requests: int) -> list[float]:
    body = json.dumps({"action": "x" * 1000}).encode() if method == "POST" else b""
    lines = [
        f"{method} /step HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        "user-agent: benchmark",
        "accept: */*",
        f"x-owner: {owner}",
        "accept-encoding: gzip, deflate",
        "connection: keep-alive",
    ]
    if body:
        lines += [f"content-length: {len(body)}", "content-type: application/json"]
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    latencies: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(client(port, request, requests // CONNECTIONS, latencies))
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="homing-hop-") as socket_dir:
        started = [
            subprocess.Popen([sys.executable, __file__, "worker", socket_dir, each], stdout=subprocess.PIPE, text=True)
            for each in WORKERS
        ]
        try:
            ports = [int(process.stdout.readline()) for process in started if process.stdout]
            measure(ports, [process.pid for process in started], options.rounds, options.requests)
        finally:
            for process in started:
                process.terminate()
                process.wait()


def measure(ports: list[int], pids: list[int], rounds: int, requests: int) -> None:
    import uvloop

    settings = [(method, owner) for method in ("GET", "POST") for owner in (WORKERS[0], WORKERS[1])]
    costs: dict[tuple[str, str], list[float]] = {setting: [] for setting in settings}
    waits: dict[tuple[str, str], list[float]] = {setting: [] for setting in settings}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for number in range(rounds + 1):
            for method, owner in settings:
                before = cpu_seconds(pids)
                latencies = runner.run(load(ports[0], owner, method, requests))
                if number:  # the first round warms up
                    costs[method, owner].append((cpu_seconds(pids) - before) / len(latencies) * 1e6)
                    waits[method, owner] += latencies
    print(f"{'':16}{'CPU µs':>10}{'lowest':>10}{'÷ local':>10}{'p50 ms':>10}{'p99 ms':>10}")
    for method, owner in settings:
        ratios = [here / local for here, local in zip(costs[method, owner], costs[method, WORKERS[0]], strict=True)]
        cost = costs[method, owner]
        quantiles = statistics.quantiles(waits[method, owner], n=100)
        print(
            f"{method:5}{'local' if owner == WORKERS[0] else 'forwarded':11}"
            f"{statistics.median(cost):10.1f}{min(cost):10.1f}{statistics.median(ratios):10.2f}"
            f"{quantiles[49] * 1e3:10.2f}{quantiles[98] * 1e3:10.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        main()
