"""How many instructions does a whole request cost: under uvicorn alone, served where it arrives, forwarded, and over an HTTP hop?
And does it cost a connection that asks for many sessions in turn, that connections may move?

    python -m benchmarks.instructions.ways [--write]

One process per way, under callgrind: uvicorn's protocol with httptools and uvloop, real TCP connections, the app of
`benchmarks.forwarding.app`, and for the forwarded ways two workers on one event loop, with a real private socket between them. In each
round every connection asks once, and the workers' turns until all have their reply are what is counted: neither the client nor what a
worker does by itself ten times a second. So a count is good to 0.3 % however busy the machine is.

*Interleaved*: each connection asks for eight sessions in turn, half of them the other worker's, in an order of its own. Counted once its
moves are over, and from its first request on.

Not here: what is switched on (`run.py`), system calls and waiting (`make bench`).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent

WAYS: Final = {
    "plain": "uvicorn, no routing",
    "local": "homing, served where it arrives",
    "forwarded": "homing, forwarded (the hop and the owner)",
    "aiohttp": "the seeds' way: forwarded by aiohttp",
    "settled": "homing, interleaved, once connections have moved",
    "settled-kept": "the same with `--no-handoff`",
    "new": "homing, interleaved, from a connection's first request on",
    "new-kept": "the same with `--no-handoff`",
}
INTERLEAVED: Final = ("settled", "settled-kept", "new", "new-kept")
SESSIONS_OF_INTERLEAVED: Final = 8
CONNECTIONS: Final = 16
WARM_ROUNDS: Final = 20
ROUNDS: Final = 40
RUNS: Final = 3
SECRET: Final = "benchmark"


class Server:
    """One worker's HTTP server without uvicorn's main loop: what it does by itself is not of the question."""

    def __init__(self, config: Any) -> None:
        from uvicorn.lifespan.on import LifespanOn
        from uvicorn.server import ServerState

        config.load()
        self.config = config
        self.lifespan = LifespanOn(config)
        self.state = ServerState()
        self.state.default_headers = [(b"date", b"Mon, 30 Nov 2026 18:00:00 GMT"), (b"server", b"uvicorn")]

    async def connect(self) -> socket.socket:
        """The client's end of a new connection."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setblocking(False)
        await self.adopt(accepted)
        return client

    async def adopt(self, connection: socket.socket, moves: int = 0) -> None:
        def make_protocol() -> Any:
            made = self.config.http_protocol_class(
                config=self.config, server_state=self.state, app_state=self.lifespan.state
            )
            if moves:
                made.has_moved(moves)
            return made

        await asyncio.get_running_loop().connect_accepted_socket(make_protocol, connection)


async def until_answered(servers: list[Server], requests: int) -> None:
    while sum(each.state.total_requests for each in servers) < requests:
        await asyncio.sleep(0)


def servers_for(way: str, directory: str) -> tuple[list[Server], list[Any]]:
    """The one that connections reach and, if that is another, the one that owns their sessions; and their routers."""
    from benchmarks.forwarding.app import app
    from uvicorn.config import Config

    from homing.routing import RoutingOptions, build
    from homing.runtime.config import RunConfig
    from homing.runtime.protocol import HomingHttpToolsProtocol

    quiet: dict[str, Any] = {"access_log": False, "log_level": "warning", "timeout_keep_alive": 600}
    if way == "plain":
        return [Server(Config(app, http="httptools", **quiet))], []
    if way == "aiohttp":
        from benchmarks.forwarding.aiohttp_hop import AiohttpRouter

        return [Server(Config(AiohttpRouter(app, directory, each), http="httptools", **quiet)) for each in "ab"], []
    options = RoutingOptions(
        sessions=("signed-cookie:session:sid",), secret=SECRET, socket_dir=directory, workers=2, place="accepting"
    )
    routers = [build(app, options) for _ in range(1 if way == "local" else 2)]
    return [Server(RunConfig(each, routing=None, http=HomingHttpToolsProtocol, **quiet)) for each in routers], routers


@dataclass(slots=True)
class Client:
    """One connection, and the requests that it makes in turn."""

    connection: socket.socket
    requests: list[bytes]
    asked: int = 0

    def ask(self) -> None:
        self.connection.sendall(self.requests[self.asked % len(self.requests)])

    def check(self) -> None:
        """Its reply is the session's next step."""
        count = self.asked // len(self.requests) + 1
        self.asked += 1
        reply = self.connection.recv(65536)
        assert f'"count":{count},'.encode() in reply, reply


async def clients_of(reached: Server, owners: list[Server]) -> list[Client]:
    """Clients that reach one worker, and ask in turn for a new session of each of these, in an order of their own."""
    clients = []
    order = random.Random(1)
    for _ in range(CONNECTIONS):
        requests = []
        for owner in owners:
            with await owner.connect() as maker:
                before = owner.state.total_requests
                maker.sendall(b"GET /start HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await until_answered([owner], before + 1)
                head = maker.recv(65536).decode()
            cookies = "; ".join(re.findall(r"(?i)set-cookie: ([^;\r]+)", head))
            requests.append(
                f"GET /step HTTP/1.1\r\nHost: localhost\r\nUser-Agent: loader\r\nAccept: */*\r\nCookie: {cookies}\r\n\r\n".encode()
            )
        order.shuffle(requests)
        clients.append(Client(await reached.connect(), requests))
    return clients


async def served(way: str, callgrind: ctypes.CDLL | None) -> None:
    from homing.runtime.handoff import Handoffs

    with tempfile.TemporaryDirectory(prefix="homing-bench-", dir="/dev/shm") as directory:
        servers, routers = servers_for(way, directory)
        for each in servers:
            await each.lifespan.startup()
            assert not each.lifespan.should_exit
        handoffs: list[Handoffs] = []
        if way in ("settled", "new"):
            for each, router in zip(servers, routers, strict=True):
                each.config.handoffs = Handoffs(directory, router.worker.id, each.adopt)
                handoffs.append(each.config.handoffs)
        owners = servers * (SESSIONS_OF_INTERLEAVED // 2) if way in INTERLEAVED else [servers[-1]]
        clients = await clients_of(servers[0], owners)
        counted_from_the_first = await clients_of(servers[0], owners) if way in ("new", "new-kept") else None
        for number in range(WARM_ROUNDS + ROUNDS):
            if number == WARM_ROUNDS:
                if counted_from_the_first is not None:
                    for client in clients:
                        client.connection.close()
                    clients = counted_from_the_first
                gc.collect()
                if callgrind is not None:
                    callgrind.begin()
            counts = None if callgrind is None or number < WARM_ROUNDS else callgrind.toggle
            before = sum(each.state.total_requests for each in servers)
            for client in clients:
                client.ask()
            if counts is not None:
                counts()
            await until_answered(servers, before + CONNECTIONS)
            for _ in range(3):
                await asyncio.sleep(0)  # what is left to do after a reply
            if counts is not None:
                counts()
            for client in clients:
                client.check()
        for client in clients:
            client.connection.close()
        if way == "forwarded":
            assert routers[0].worker.forwarder.counters.forwarded == (WARM_ROUNDS + ROUNDS) * CONNECTIONS
        for moved in handoffs:
            assert moved.counters.given > CONNECTIONS // 2
            await moved.aclose()
        for each in reversed(servers):
            await each.lifespan.shutdown()


def per_request(way: str, library: Path) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "PYTHONHASHSEED": "0",
            "BENCH_SECRET": SECRET,
            "COUNT_LIBRARY": str(library),
        }
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
        command += [f"--callgrind-out-file={scratch}/out", sys.executable, "-m", "benchmarks.instructions.ways"]
        done = subprocess.run(
            [*command, "--serve", way], cwd=scratch, env=environment, capture_output=True, text=True, check=False
        )
        collected = re.search(r"Collected : (\d+)", done.stderr)
        if done.returncode or collected is None:
            raise SystemExit(f"the {way} way failed under valgrind:\n{done.stderr[-3000:]}")
        return int(collected[1]) / ROUNDS / CONNECTIONS


def text(result: dict[str, Any]) -> str:
    counted = result["instructions"]
    middle = {way: sorted(runs)[len(runs) // 2] for way, runs in counted.items()}
    lines = [
        "# Instructions of a whole request",
        "",
        "Made by `python -m benchmarks.instructions.ways --write`, whose head says what is counted; the counts are in `ways.json`.",
        "",
        machine.text(result),
        "",
        f"| a request of {CONNECTIONS} connections' | instructions | spread of {RUNS} runs | ÷ uvicorn |",
        "| --- | ---: | ---: | ---: |",
    ]
    for way, runs in counted.items():
        spread = 100 * (max(runs) - min(runs)) / middle[way]
        lines.append(f"| {WAYS[way]} | {middle[way]:,.0f} | {spread:.2f} % | {middle[way] / middle['plain']:.3f} |")
    hop = middle["forwarded"] / middle["aiohttp"]
    lines += [
        "",
        f"Forwarded by homing ÷ by aiohttp: {hop:.3f}; without what the app and uvicorn cost: {of_the_hop(middle):.3f}.",
        "",
        f"Interleaved ÷ the same with `--no-handoff`: {middle['settled'] / middle['settled-kept']:.3f} once connections have moved, "
        f"{middle['new'] / middle['new-kept']:.3f} in a connection's first {ROUNDS} requests.",
    ]
    return "\n".join([*lines, ""])


def of_the_hop(counts: dict[str, int]) -> float:
    """What forwarding adds to a request, by homing ÷ by aiohttp."""
    return (counts["forwarded"] - counts["plain"]) / (counts["aiohttp"] - counts["plain"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions.ways", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write `ways.json` and `ways.md`")
    parser.add_argument("--serve", choices=tuple(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        import uvloop

        library = os.environ.get("COUNT_LIBRARY")
        uvloop.run(served(options.serve, None if library is None else ctypes.CDLL(library)))
        return 0
    from benchmarks.instructions.run import compiled

    if missing := [each for each in ("valgrind", "cc") if shutil.which(each) is None]:
        print(
            f"instructions: skipped, since there is no {' and no '.join(missing)} (Debian: apt-get install valgrind gcc)"
        )
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library_path = compiled(Path(folder))
        counted = {way: [round(per_request(way, library_path)) for _ in range(RUNS)] for way in WAYS}
    result = {**machine.described(), "requests": ROUNDS * CONNECTIONS, "instructions": counted}
    page = text(result)
    if options.write:
        (HERE / "ways.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (HERE / "ways.md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
