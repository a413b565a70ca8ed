"""How many instructions does a request cost? Counted by Valgrind's callgrind in live workers, both together.

A count hardly depends on what else the machine does: it tells a gain of a few percent from none, which CPU time does not.
What a worker does ten times a second by itself is counted apart, and taken off: on an overloaded machine that is much of
the whole, and the figure good to a fifth only (`instructions_of_an_idle_second` and `seconds` in the JSON tell). It knows no
system calls, caches or waiting; those are what `make bench` times.

    .venv/bin/python -m benchmarks.forwarding.instructions [--rows A2,local,…] [--requests N] [--json FILE] [--keep DIR]

Each row serves the app of `benchmarks.forwarding.app` by real workers, each under callgrind; counting begins once all
sessions are made and warm, and ends with the last reply. Every reply is compared with what its session's owner must say.

Not here: CPU time, latency, proxies (`run.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.forwarding.setups import Command, Setup, SetupError, aiohttp_hop, homing_run, plain, serving

WARM_ROUNDS: Final = 20
REPLY_SECONDS: Final = 120.0
MAX_DIALS: Final = 2000
IDLE_SECONDS: Final = 10.0
START_SECONDS: Final = 900.0
PROGRAMS: Final = ("valgrind", "vgdb")


@dataclass(frozen=True, slots=True)
class Row:
    """One way of a request.

    Attributes:
        crossing: Connections reach the worker that does not own their session; else they reach the one that does.
        moves: The connection may move to the owner while the requests are counted, so they are counted from its first.
    """

    key: str
    title: str
    setup: Callable[[int, Path], list[Command]]
    crossing: bool = False
    moves: bool = False


ROWS: Final = (
    Row("A2", "two uvicorn workers, no routing, each request at the right one", plain(2)),
    Row("local", "homing, served where it arrives", homing_run()),
    Row("forwarded", "homing, every request forwarded (`--no-handoff`)", homing_run("--no-handoff"), crossing=True),
    Row(
        "adopted",
        "homing, forwarded until the connection has moved to the owner",
        homing_run(),
        crossing=True,
        moves=True,
    ),
    Row("aiohttp", "an HTTP hop by aiohttp, every request at the wrong worker", aiohttp_hop, crossing=True),
)


def under_callgrind(
    commands: Callable[[int, Path], list[Command]], output: Path
) -> Callable[[int, Path], list[Command]]:
    """The same programs, each worker of which runs under callgrind. Their supervisor does not, or it would be slow."""
    python = output / "python"
    python.write_text(
        "#!/bin/sh\n"
        "exec valgrind --tool=callgrind --instr-atstart=no -q "
        f'--callgrind-out-file={shlex.quote(str(output))}/callgrind.%p {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o700)
    run = "import multiprocessing, runpy, sys; multiprocessing.set_executable(sys.argv.pop(1)); del sys.argv[0]; "

    def wrapped(port: int, scratch: Path) -> list[Command]:
        made: list[Command] = []
        for each in commands(port, scratch):
            if each.words[:2] == (sys.executable, "-m"):
                words = (
                    sys.executable,
                    "-c",
                    f"{run}runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)",
                )
                made.append(replace(each, words=(*words, str(python), *each.words[2:])))
            else:
                words = (sys.executable, "-c", f"{run}runpy.run_path(sys.argv[0], run_name='__main__')")
                made.append(replace(each, words=(*words, str(python), *each.words)))
        return made

    return wrapped


class Client:
    """One keep-alive connection and the session it asks for."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self.cookies = ""
        self.session = self.owner = ""
        self.count = 0

    def send(self, path: str, cookies: str = "") -> None:
        # As the loader of `benchmarks.load` asks.
        lines = [f"GET {path} HTTP/1.1", "Host: localhost"]
        if cookies:
            lines += ["User-Agent: loader", "Accept: */*", f"Cookie: {cookies}"]
        self.socket.sendall("\r\n".join([*lines, "\r\n"]).encode())

    def take(self) -> tuple[bytes, Any]:
        """The reply's head and its JSON."""
        self.socket.settimeout(REPLY_SECONDS)
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            self._read()
        head = self._rest[: end + 4]
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            raise SetupError(f"a reply was not as expected: {head!r}")
        size = end + 4 + int(length[1])
        while len(self._rest) < size:
            self._read()
        body, self._rest = self._rest[end + 4 : size], self._rest[size:]
        return head, json.loads(body)

    def _read(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise SetupError("the server closed a connection")
        self._rest += data

    def ask(self, path: str) -> tuple[bytes, Any]:
        self.send(path)
        return self.take()

    def take_step(self) -> None:
        self.count += 1
        _, reply = self.take()
        expected = {"session": self.session, "count": self.count, "worker": self.owner}
        if reply != expected:
            raise SetupError(f"a wrong reply: {reply}, not {expected}")


def clients_of(port: int, connections: int, crossing: bool) -> Iterator[Client]:
    """Connections that reach both workers alike, each with a session of the worker it reaches, or of the other."""
    reached: dict[str, list[Client]] = {}
    spare: list[Client] = []
    for _ in range(MAX_DIALS):
        # In bursts: workers that share one listening socket race for a connection, and the same one nearly always wins.
        burst = [Client(port) for _ in range(8)]
        for each in burst:
            each.send("/whoami")
        for each in burst:
            worker = each.take()[1]["worker"]
            some = reached.setdefault(worker, [])
            (some if len(some) < connections // 2 + 1 else spare).append(each)
        if len(reached) == 2 and all(len(some) > connections // 2 for some in reached.values()):
            break
    else:
        raise SetupError("the connections did not reach both workers")
    for each in spare:
        each.socket.close()
    workers = list(reached)
    makers = {worker: reached[worker].pop() for worker in workers}
    for i in range(connections):
        home = workers[i % 2]
        client = reached[home].pop()
        client.owner = workers[(i + crossing) % 2]
        head, made = makers[client.owner].ask("/start")
        if made["worker"] != client.owner:
            raise SetupError("a new session began at another worker than the one its connection reaches")
        client.session = made["session"]
        client.cookies = "; ".join(re.findall(r"(?i)set-cookie: ([^;\r]+)", head.decode()))
        yield client
    for maker in makers.values():
        maker.socket.close()


def rounds(clients: list[Client], number: int) -> None:
    """Each round asks once on every connection, and ends when all have their reply."""
    for _ in range(number):
        for client in clients:
            client.send("/step", client.cookies)
        waiting = {client.socket.fileno(): client for client in clients}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], REPLY_SECONDS)
            if not ready:
                raise SetupError("no reply in time")
            for fd in ready:
                waiting.pop(fd).take_step()


def command(pid: int, *words: str) -> None:
    done = subprocess.run(["vgdb", f"--pid={pid}", *words], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise SetupError(f"callgrind of process {pid} did not take {' '.join(words)!r}: {done.stderr.strip()}")


def totals(output: Path, pid: int) -> int:
    """What all dumps of a process say so far."""
    found = 0
    for dump in output.glob(f"callgrind.{pid}.*"):
        for line in dump.read_text().splitlines():
            if line.startswith("totals:"):
                found += int(line.split()[1])
    return found


def measure(row: Row, requests: int, connections: int, scratch: Path) -> dict[str, Any]:
    output = scratch / f"callgrind-{row.key}"
    output.mkdir()
    setup = Setup(row.key, row.title, 2, {}, under_callgrind(row.setup, output))
    with serving(setup, scratch, start_seconds=START_SECONDS) as server, contextlib.ExitStack() as stack:
        clients = []
        for client in clients_of(server.port, connections, row.crossing):
            stack.callback(client.socket.close)
            clients.append(client)
        if row.moves:
            # What is warm is the servers' code, not these connections: they move while they are counted.
            warm = list(clients_of(server.port, connections, row.crossing))
            rounds(warm, WARM_ROUNDS)
            for each in warm:
                each.socket.close()
        else:
            rounds(clients, WARM_ROUNDS)
        pids = sorted(int(client.owner) for client in {client.owner: client for client in clients}.values())
        for pid in pids:
            command(pid, "zero")
            command(pid, "instrumentation", "on")
        number = max(1, requests // connections)
        begun = time.monotonic()
        rounds(clients, number)
        seconds = time.monotonic() - begun
        for pid in pids:
            command(pid, "dump")  # and count on from zero
        busy = sum(totals(output, pid) for pid in pids)
        # What a worker does whether or not it is asked anything, ten times a second: more of it, the slower the machine.
        begun = time.monotonic()
        time.sleep(min(seconds, IDLE_SECONDS))
        idle_seconds = time.monotonic() - begun
        for pid in pids:
            command(pid, "dump")
            command(pid, "instrumentation", "off")
        idle = sum(totals(output, pid) for pid in pids) - busy
        served = number * connections
        instructions = busy - round(idle * seconds / idle_seconds)
    return {
        "row": row.key,
        "title": row.title,
        "connections": connections,
        "requests": served,
        "seconds": round(seconds, 1),
        "instructions": instructions,
        "instructions_of_an_idle_second": round(idle / idle_seconds),
        "instructions_per_request": round(instructions / served),
    }


def table(results: list[dict[str, Any]]) -> str:
    per = {each["row"]: each["instructions_per_request"] for each in results}
    lines = [
        "| row | instructions per request | ÷ A2 | ÷ the aiohttp hop |",
        "| --- | ---: | ---: | ---: |",
    ]
    for each in results:
        own = each["instructions_per_request"]
        ratios = [f"{own / per[base]:.2f}" if base in per else "–" for base in ("A2", "aiohttp")]
        lines.append(f"| {each['title']} | {own:,} | {ratios[0]} | {ratios[1]} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(row.key for row in ROWS), help="which rows, by comma")
    parser.add_argument("--requests", type=int, default=640, help="requests that are counted, per row")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--json", type=Path, help="where the raw figures go")
    parser.add_argument("--keep", type=Path, help="where callgrind's own output goes, for callgrind_annotate")
    options = parser.parse_args()
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        print(f"skipped: {', '.join(absent)} is not installed (Debian: apt-get install valgrind)", file=sys.stderr)
        return 0
    chosen = options.rows.split(",")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="homing-instructions-") as name:
        scratch = Path(name)
        if options.keep is not None:
            options.keep.mkdir(parents=True)
            scratch = options.keep.resolve()
        for row in ROWS:
            if row.key in chosen:
                begun = time.monotonic()
                results.append(measure(row, options.requests, options.connections, scratch))
                print(f"{row.key}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
