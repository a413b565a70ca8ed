"""Compiles `loader.c` at its first use, and runs it.

Not here: servers, rounds and ratios (`benchmarks.forwarding`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SOURCE: Final = Path(__file__).with_name("loader.c")
SOURCES: Final = (SOURCE, SOURCE.with_name("wire.h"))
SET_UP_SECONDS: Final = 90.0
SESSION_SECONDS: Final = 0.03
"""What it may take to set a load up, and each of its sessions, which are made one after another. Guards against hanging only: on a
quiet machine a session takes about a millisecond."""
BUILD_DIRECTORY: Final = SOURCE.with_name("build")


class LoaderError(Exception):
    """The load could not be made: no compiler, or a server that does not behave as the loader expects."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one measurement asks of a server.

    Attributes:
        mode: Whose session each request names: `local` one of the worker its connection reaches, `remote` one of
            another worker, `inter` half of them each, in turn, in a shuffled order.
        kind: What is exchanged, one of `step`, `fresh`, `echo`, `events`, `websocket`, as `loader.c` says at its top.
        requests_per_second: Over all connections; 0 is a closed loop.
        sessions_per_connection: 1, or how many sessions each connection asks for in turn.
        behind_proxy: The workers stand behind a proxy, so no connection reaches one of them in particular.
        body_bytes: Of each `echo` or `websocket` message, both ways.
        every_seconds: Between two events of a stream; 0 is as fast as they go.
        gymnasium: The server is a Gymnasium server, whose environment counts its steps.
    """

    mode: str
    connections: int
    seconds: float
    workers: int
    kind: str = "step"
    body_bytes: int = 0
    every_seconds: float = 0
    requests_per_second: float = 0
    sessions_per_connection: int = 1
    warm_seconds: float = 0.3
    behind_proxy: bool = False
    gymnasium: bool = False

    def arguments(self) -> list[str]:
        options = {
            "mode": self.mode,
            "kind": self.kind,
            "body": self.body_bytes,
            "every": self.every_seconds,
            "connections": self.connections,
            "seconds": self.seconds,
            "warm": self.warm_seconds,
            "rate": self.requests_per_second,
            "workers": self.workers,
            "sessions-per-connection": self.sessions_per_connection,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        flags = {"--behind-proxy": self.behind_proxy, "--gymnasium": self.gymnasium}
        return [*words, *(flag for flag, given in flags.items() if given)]


@dataclass(frozen=True, slots=True)
class Loader:
    """The compiled load generator."""

    program: Path

    def run(self, port: int, load: Load, pids: list[int]) -> dict[str, Any]:
        """Load the server at 127.0.0.1:`port`; `pids` are all its processes, whose CPU time is read.

        Returns:
            `replies` (of events: how many came), `errors` (no reply, or not 200), `wrong` (another session's data, count or owner), `seconds`,
            `requests_per_second`, `p50_us`, `p99_us`, `cpu_us` (per reply, of all `pids`),
            `server_cpu_seconds`, `loader_cpu_seconds`, `crossed` (replies whose session lives at another worker than
            the one its connection reaches), `dials`, `workers` (their names).

        Raises:
            LoaderError: The load could not be set up, or did not end in time.
        """
        command = [str(self.program), "--port", str(port), *load.arguments()]
        for pid in pids:
            command += ["--pid", str(pid)]
        sessions = load.connections * load.sessions_per_connection
        limit = SET_UP_SECONDS + SESSION_SECONDS * sessions + load.warm_seconds + load.seconds
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired as error:
            raise LoaderError(f"the loader did not end within {error.timeout:.0f} s") from error
        if done.returncode != 0:
            raise LoaderError(done.stderr.strip() or f"the loader ended with status {done.returncode}")
        result: dict[str, Any] = json.loads(done.stdout)
        return result


def build_loader() -> Loader:
    """The load generator, compiled anew only when its source has changed.

    Raises:
        LoaderError: There is no C compiler, or it failed.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    program = BUILD_DIRECTORY / f"loader-{digest}"
    if program.exists():
        return Loader(program)
    compiler = next(
        (found for name in (os.environ.get("CC", "cc"), "gcc", "clang") if (found := shutil.which(name))), None
    )
    if compiler is None:
        raise LoaderError("the load generator needs a C compiler: install one (Debian: apt-get install gcc libc6-dev)")
    BUILD_DIRECTORY.mkdir(exist_ok=True)
    # Compiled beside its place and renamed into it: two first uses at once must not run a half-written program.
    with tempfile.TemporaryDirectory(dir=BUILD_DIRECTORY) as scratch:
        compiled = Path(scratch) / "loader"
        done = subprocess.run(
            [compiler, "-O2", "-Wall", "-Wextra", "-o", str(compiled), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LoaderError(f"{compiler} could not compile {SOURCE}:\n{done.stderr.strip()}")
        compiled.rename(program)
    return Loader(program)
