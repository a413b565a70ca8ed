"""The servers that are compared, and the loads that each of them gets.

Each setup starts real processes on loopback ports of its own, says all their PIDs, and stops exactly those.

Not here: measuring (`run.py`), ratios and pages (`report.py`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 60.0

UVICORN_OPTIONS: Final = (
    "--host=127.0.0.1",
    "--http=httptools",
    "--loop=uvloop",
    "--no-access-log",
    "--log-level=warning",
    # On a busy machine the supervisor's default of 5 s can take a worker that waits for the CPU for a hung one.
    "--timeout-worker-healthcheck=60",
    # A connection that waits while the others are made must not be closed for it; 5 s is the default.
    "--timeout-keep-alive=60",
)

HAPROXY_CONFIG: Final = """\
global
    maxconn 4000
    {threads}
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout http-keep-alive 60s
    {reuse}
frontend front
    bind 127.0.0.1:{port}
    default_backend workers
backend workers
    balance roundrobin
    cookie SRV insert indirect nocache
{servers}
"""


NGINX_CONFIG: Final = """\
daemon off;
worker_processes 1;
pid {scratch}/nginx.pid;
error_log {scratch}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    # Bodies stay in memory, and as large as the loads' may be.
    client_max_body_size 0;
    client_body_buffer_size 2m;
    proxy_buffers 64 32k;
    proxy_max_temp_file_size 0;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    upstream any {{ {any} keepalive 64; }}
    upstream s0 {{ {s0} keepalive 64; }}
    upstream s1 {{ {s1} keepalive 64; }}
    map $cookie_srv $target {{ default any; s0 s0; s1 s1; }}
    map $upstream_addr $chosen {{ {chosen} }}
    map $http_upgrade $connection_for_upstream {{ default upgrade; '' ''; }}
    server {{
        listen 127.0.0.1:{port};
        keepalive_timeout 60s;
        keepalive_requests 100000000;
        location / {{
            proxy_pass http://$target;
            proxy_http_version 1.1;
            proxy_set_header Connection $connection_for_upstream;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Host $host;
            add_header Set-Cookie "SRV=$chosen; Path=/";
        }}
    }}
}}
"""
"""Stickiness by a cookie, as HAProxy's: nginx without its commercial part has no directive for it, and two maps do it."""


class SetupError(Exception):
    """A server of a setup did not start, or did not stop."""


@dataclass(frozen=True, slots=True)
class Command:
    """One program of a setup, with what it needs in its environment."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to serve the app.

    Attributes:
        key: Short name in the rounds' JSON.
        workers: How many processes serve the app.
        behind_proxy: Connections reach a proxy, not a worker.
        modes: Whose sessions the requests name, each with the loads that are measured: `local`, `remote` and `inter` as in
            `benchmarks.load.Load`; `any`, half of each worker's, wherever the connections arrive; `placed`, each
            connection's own, which the server has put where it wants.
        commands: Given the public port and a scratch directory, the programs to start.
        missing: A line that says what is absent on this machine, or None.
    """

    key: str
    title: str
    workers: int
    modes: dict[str, tuple[str, ...]]
    commands: Callable[[int, Path], list[Command]]
    missing: Callable[[], str | None] = lambda: None
    behind_proxy: bool = False


_PORTS: Final = range(20_000, 30_000)
"""Below those that the kernel gives to whoever asks for any: until a server has it, one of them goes to nobody else."""

_given_ports: Final[set[int]] = set()


def free_port() -> int:
    """A port that nobody listens at, and that was not given before: setups start at the same time."""
    while True:
        port = random.choice(_PORTS)
        if port in _given_ports:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given_ports.add(port)
            return port


def uvicorn_command(app: str, port: int, workers: int, **environment: str) -> Command:
    words = (sys.executable, "-m", "uvicorn", app, f"--port={port}", f"--workers={workers}", *UVICORN_OPTIONS)
    return Command(words, environment)


def plain(workers: int) -> Callable[[int, Path], list[Command]]:
    return lambda port, scratch: [uvicorn_command("benchmarks.forwarding.app:app", port, workers)]


def memory_twin(port: int, scratch: Path) -> list[Command]:
    imports = str(scratch.parent / "imports.txt")
    return [uvicorn_command("benchmarks.forwarding.app:app", port, 2, BENCH_IMPORTS=imports)]


def aiohttp_hop(port: int, scratch: Path) -> list[Command]:
    return [uvicorn_command("benchmarks.forwarding.aiohttp_hop:app", port, 2, BENCH_SOCKET_DIR=str(scratch))]


def haproxy_program() -> str | None:
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def haproxy(threads: str, reuse: str) -> Callable[[int, Path], list[Command]]:
    def commands(port: int, scratch: Path) -> list[Command]:
        ports = [free_port(), free_port()]
        servers = "\n".join(f"    server s{i} 127.0.0.1:{p} cookie s{i}" for i, p in enumerate(ports))
        config = scratch / "haproxy.cfg"
        config.write_text(HAPROXY_CONFIG.format(port=port, servers=servers, threads=threads, reuse=reuse))
        program = haproxy_program()
        if program is None:
            raise SetupError("haproxy went away")
        workers = [uvicorn_command("benchmarks.forwarding.app:app", p, 1) for p in ports]
        return [*workers, Command((program, "-db", "-q", "-f", str(config)))]

    return commands


def nginx_program() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def nginx(port: int, scratch: Path) -> list[Command]:
    ports = [free_port(), free_port()]
    servers = [f"server 127.0.0.1:{each};" for each in ports]
    config = scratch / "nginx.conf"
    chosen = " ".join(f"127.0.0.1:{each} s{i};" for i, each in enumerate(ports))
    config.write_text(
        NGINX_CONFIG.format(
            port=port, scratch=scratch, any=" ".join(servers), s0=servers[0], s1=servers[1], chosen=chosen
        )
    )
    program = nginx_program()
    if program is None:
        raise SetupError("nginx went away")
    workers = [uvicorn_command("benchmarks.forwarding.app:app", each, 1) for each in ports]
    return [*workers, Command((program, "-p", str(scratch), "-c", str(config)))]


def homing_program() -> Path:
    return Path(sys.executable).with_name("homing")


def homing_run(*options: str) -> Callable[[int, Path], list[Command]]:
    return lambda port, scratch: [homing_command(port, *options)]


def homing_command(port: int, *options: str) -> Command:
    words = (
        str(homing_program()),
        "run",
        "benchmarks.forwarding.app:app",
        f"--port={port}",
        "--workers=2",
        *UVICORN_OPTIONS,
        "--session=signed-cookie:session:sid",
        "--secret-env=BENCH_SECRET",
        *options,
    )
    return Command(words, {"BENCH_SECRET": "benchmark"})


def homing_missing() -> str | None:
    if not homing_program().exists():
        return f"{homing_program()} is not there: run `make setup`"
    return None


def nginx_missing() -> str | None:
    return None if nginx_program() else "nginx is not installed (Debian: apt-get install nginx-light)"


def haproxy_missing() -> str | None:
    return None if haproxy_program() else "haproxy is not installed (Debian: apt-get install haproxy)"


STEPS: Final = ("sat", "paced", "c1")
BODIES_AND_STREAMS: Final = ("1KiB", "1MiB", "sse", "sse-paced")
KEPT: Final = (*STEPS, *BODIES_AND_STREAMS, "ws")
"""Every load over connections that are kept."""

SETUPS: Final = (
    Setup("A", "one plain uvicorn process", 1, {"local": ("sat", "fresh")}, plain(1)),
    Setup("A2", "two uvicorn workers, no routing, all requests at the right one", 2, {"local": KEPT}, plain(2)),
    Setup(
        "B",
        "HAProxy, cookie stickiness, before two one-worker uvicorns",
        2,
        {"local": (*KEPT, "fresh"), "inter": ("sat", "paced")},
        haproxy("", ""),
        haproxy_missing,
        behind_proxy=True,
    ),
    Setup(
        "B1",
        "the same, HAProxy tuned for this load: one thread, `http-reuse always`",
        2,
        {"local": ("sat",)},
        haproxy("nbthread 1", "http-reuse always"),
        haproxy_missing,
        behind_proxy=True,
    ),
    Setup(
        "C",
        "nginx, cookie stickiness, before two one-worker uvicorns",
        2,
        {"local": ("sat", "fresh", *BODIES_AND_STREAMS, "ws")},
        nginx,
        nginx_missing,
        behind_proxy=True,
    ),
    Setup(
        "D",
        "two uvicorn workers, aiohttp hop",
        2,
        {"remote": ("sat", "paced", *BODIES_AND_STREAMS), "any": ("fresh",)},
        aiohttp_hop,
    ),
    Setup(
        "H",
        "homing run --workers 2",
        2,
        {"local": KEPT, "remote": STEPS, "inter": ("sat", "paced"), "any": ("fresh",)},
        homing_run(),
        homing_missing,
    ),
    Setup(
        "H0",
        "homing run --workers 2 --no-handoff",
        2,
        {"remote": KEPT, "inter": ("sat", "paced")},
        homing_run("--no-handoff"),
        homing_missing,
    ),
    Setup(
        "P",
        "homing run --workers 2 --start 'GET /start', which places new sessions",
        2,
        {"placed": ("sat",)},
        homing_run("--start=GET /start"),
        homing_missing,
    ),
)
"""Not measured because the peer cannot do it: WebSockets through the aiohttp hop, which carries HTTP requests only, and a
new connection per request at a *chosen* worker, which the kernel chooses: there the sessions are half of each worker, and
about half of the requests cross."""

MEMORY_TWIN: Final = Setup("M", "two uvicorn workers that import what homing's do", 2, {}, memory_twin)


@dataclass(slots=True)
class Server:
    """A running setup. Owns its processes."""

    setup: Setup
    port: int
    processes: list[subprocess.Popen[bytes]]
    told_to_stop: bool = False

    def tell_to_stop(self) -> None:
        if not self.told_to_stop:
            self.told_to_stop = True
            for process in self.processes:
                if process.poll() is None:
                    process.terminate()

    def pids(self) -> list[int]:
        """All processes of this server, now: those started here and their descendants."""
        children: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    stat = Path(f"/proc/{entry}/stat").read_text()
                    children.setdefault(int(stat[stat.rindex(")") + 2 :].split()[1]), []).append(int(entry))
        found: list[int] = []
        frontier = [process.pid for process in self.processes]
        while frontier:
            found += frontier
            frontier = [child for pid in frontier for child in children.get(pid, [])]
        return sorted(found)

    def ask(self, path: str) -> Any:
        """The JSON that a GET of `path` gives, over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def wait_until_serving(server: Server, log: Path, start_seconds: float) -> None:
    """Returns once every worker has answered; a worker that starts late would get no connection."""
    deadline = time.monotonic() + start_seconds
    seen: set[str] = set()
    while len(seen) < server.setup.workers:
        if time.monotonic() > deadline or any(process.poll() is not None for process in server.processes):
            raise SetupError(f"setup {server.setup.key} did not start:\n{log.read_text()[-2000:]}")
        try:
            seen.add(server.ask("/whoami")["worker"])
        except (OSError, http.client.HTTPException, ValueError):
            seen.clear()
            time.sleep(0.05)


@contextlib.contextmanager
def serving(setup: Setup, scratch: Path, *, start_seconds: float = START_SECONDS) -> Iterator[Server]:
    """The setup's processes, from before all its workers answer until they have exited.

    Raises:
        SetupError: It did not start in time, or a process of it had to be killed at the end.
    """
    directory = scratch / setup.key
    directory.mkdir(mode=0o700)
    log = directory / "log.txt"
    port = free_port()
    with contextlib.ExitStack() as stack, log.open("wb") as output:
        server = Server(setup, port, [])
        stack.callback(stop, server, log)
        for command in setup.commands(port, directory):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **command.environment}
            server.processes.append(
                subprocess.Popen(command.words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
        wait_until_serving(server, log, start_seconds)
        yield server


@contextlib.contextmanager
def all_serving(setups: list[Setup], scratch: Path) -> Iterator[dict[str, Server]]:
    """All these setups at once, by key; they start together and stop together, which saves waiting.

    Raises:
        SetupError: As `serving`; what had started is stopped.
    """
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(setups)) as threads:
            starting = [threads.submit(stack.enter_context, serving(setup, scratch)) for setup in setups]
        servers = [start.result() for start in starting]
        try:
            yield {server.setup.key: server for server in servers}
        finally:
            for server in servers:
                server.tell_to_stop()


def stop(server: Server, log: Path) -> None:
    """Ends the setup's processes; what has not ended in time is killed, and said."""
    pids = server.pids()
    server.tell_to_stop()
    deadline = time.monotonic() + STOP_SECONDS
    late = False
    for process in server.processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            process.wait()
    if late:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise SetupError(f"setup {server.setup.key} did not stop in {STOP_SECONDS:.0f} s:\n{log.read_text()[-2000:]}")
