"""The launchers of ASGI workers that homing is at home under, as processes: uvicorn, gunicorn, hypercorn, granian.

Each is the launcher's own command, from the environment that the tests run in. A server is ready when every worker has
said so in the launcher's own words.

Not here: `homing run` (`servers.homing_run`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.servers import LEFT_BEHIND, ServerError, ServerProcess, run_process


@dataclass(frozen=True)
class Launcher:
    """How one launcher is called, and what it says.

    Attributes:
        command: Up to the app; `{workers}` and `{bind}` (`127.0.0.1:PORT`) and `{port}` are filled in.
        address: Matches the line with the port.
        started: Matches a line for each worker that serves.
        finds_a_port: Port 0 means any free port; else it has to be named.
        exit_codes: Of an orderly end by SIGTERM.
    """

    name: str
    command: tuple[str, ...]
    address: str
    started: str
    finds_a_port: bool = True
    exit_codes: tuple[int, ...] = (0,)


def _installed(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def gunicorn_with(
    name: str, worker: str, *, started: str = r"Application startup complete", finds_a_port: bool = True
) -> Launcher:
    return Launcher(
        name,
        (
            *(_installed("gunicorn"), "-k", worker, "-w", "{workers}", "-b", "{bind}"),
            *("--worker-tmp-dir", "/dev/shm"),
        ),
        r"Listening at: http://127\.0\.0\.1:(\d+)",
        started,
        finds_a_port,
    )


UVICORN: Final = Launcher(
    "uvicorn",
    (sys.executable, "-m", "uvicorn", "--workers", "{workers}", "--port", "{port}"),
    r"Uvicorn running on http://127\.0\.0\.1:(\d+)",
    r"Application startup complete",
    exit_codes=(0, -signal.SIGTERM),
)
GUNICORN: Final = gunicorn_with("gunicorn", "uvicorn_worker.UvicornWorker")
HYPERCORN: Final = Launcher(
    "hypercorn",
    (_installed("hypercorn"), "-w", "{workers}", "-b", "{bind}"),
    r"Running on http://127\.0\.0\.1:(\d+)",
    r"Running on http://",
    exit_codes=(0, -signal.SIGTERM),
)
GRANIAN: Final = Launcher(
    "granian",
    (_installed("granian"), "--interface", "asgi", "--workers", "{workers}", "--port", "{port}"),
    r"Listening at: http://127\.0\.0\.1:(\d+)",
    r"Started worker-\d",
    finds_a_port=False,
)
LAUNCHERS: Final = {each.name: each for each in (UVICORN, GUNICORN, HYPERCORN, GRANIAN)}


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port for servers that share it with others (SO_REUSEPORT); nobody else gets it meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))  # and never listens, so no connection comes here
        yield held.getsockname()[1]


@contextlib.contextmanager
def run_directory_base() -> Iterator[Path]:
    """The only place for run directories that a server finds there (`XDG_RUNTIME_DIR`)."""
    path = tempfile.mkdtemp(prefix="homing-base-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path)


@asynccontextmanager
async def launched(
    launcher: Launcher,
    app: str,
    *options: str,
    workers: int,
    env: Mapping[str, str | None] | None = None,
    wrap: Sequence[str] = (),
    clean: bool = True,
) -> AsyncIterator[ServerProcess]:
    """A server of this launcher on a port of its own, every worker of it started; checked for an orderly end.

    Args:
        options: Of the launcher, before the app's name.
        wrap: Stands before the command.
        clean: Fail if the exit code is not an orderly one, or if the log tells of anything left behind.
    """
    with contextlib.ExitStack() as stack:
        port = 0 if launcher.finds_a_port else stack.enter_context(free_port())
        values = {"workers": str(workers), "port": str(port), "bind": f"127.0.0.1:{port}"}
        argv = [*wrap, *(word.format_map(values) for word in launcher.command), *options, app]
        environment = {"HOMING_SESSION_SOCKET_DIR": None, **(env or {})}
        async with run_process(argv, env=environment) as server:
            if launcher.finds_a_port:
                port = int((await server.log.until(launcher.address))[0][1])
            server.address = ("127.0.0.1", port)
            await server.log.until(launcher.started, workers)
            yield server
            code = await server.stop()
            if clean and code not in launcher.exit_codes:
                raise ServerError(f"exit code {code}{server.log}")
    if clean and server.log.find(LEFT_BEHIND):
        raise ServerError(f"the server left something behind{server.log}")


def worker_ids(directory: Path) -> set[str]:
    """The workers that have a private socket in a run directory now."""
    return {match[1] for name in os.listdir(directory) if (match := re.fullmatch(r"([0-9a-f]{32})\.sock", name))}
