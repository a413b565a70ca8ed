"""`homing run` and other commands as real processes, for tests that are not async.

A server is ready when its log says so: the log is read as it is written, so nothing polls and nothing sleeps. When
`running` ends, the server and all its workers are gone, whatever the test did.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
START_SECONDS: Final = 90.0
STOP_SECONDS: Final = 40.0
HOMING: Final = (sys.executable, "-m", "homing")

STARTED: Final = "Application startup complete"
LISTENS_WITHIN_SECONDS: Final = 5.0

_ADDRESS = re.compile(r"Uvicorn running on https?://\S+?:(\d+) ")


class Running:
    """A server process and what it has logged so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._listens = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, count: int = 1, *, timeout_seconds: float = START_SECONDS) -> list[re.Match[str]]:
        """The matches, once `count` lines of the log match."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self.find(pattern)) >= count, timeout_seconds)
            found = self.find(pattern)
        assert len(found) >= count, f"{pattern!r} is not in the log {count} times:\n{self.log}"
        if pattern == STARTED:
            self._wait_until_it_listens(time.monotonic() + LISTENS_WITHIN_SECONDS)
        return found

    def _wait_until_it_listens(self, deadline: float) -> None:
        """A server says that its app has started a moment before it listens."""
        address = self.find(_ADDRESS.pattern)
        while address and not self._listens and not self._ended and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(address[0][1])), timeout=5):
                self._listens = True
                return
            time.sleep(0.01)  # until another process listens: there is no event to wait for

    def find(self, pattern: str) -> list[re.Match[str]]:
        return [match for line in self.lines if (match := re.search(pattern, line))]

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def port(self) -> int:
        return int(self.wait_for(_ADDRESS.pattern)[0][1])

    @property
    def run_directory(self) -> str:
        return self.wait_for(r"run directory (\S+)$")[0][1]

    def workers(self) -> list[int]:
        """The pids of the live workers, in the order they were started."""
        found = []
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"spawn_main" in command:
                    found.append(pid)
        return found

    def wait(self, timeout_seconds: float = STOP_SECONDS) -> int:
        code = self.process.wait(timeout_seconds)
        self._reader.join(timeout_seconds)
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()


def until(true: Callable[[], object], server: Running, seconds: float = 60.0) -> None:
    """Wait for what no event tells: the kernel's tables, and what another process does in its own time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


def until_its_end(terminal: int) -> bytes:
    """All that is written to a terminal until its last user has gone; closes this end of it."""
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the last user has gone
        while part := os.read(terminal, 65536):
            seen += part
    os.close(terminal)
    return seen


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def wait_until_gone(pid: int, timeout_seconds: float) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([fd], [], [], timeout_seconds)
        assert ended, f"process {pid} is still there after {timeout_seconds} s"
    finally:
        os.close(fd)


def environment(changes: Mapping[str, str | None] | None = None, **more: str) -> dict[str, str]:
    """This process's environment with changes; None removes a variable."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", **more}
    for name in ("WEB_CONCURRENCY", "HOMING_SESSION_SOCKET_DIR"):
        merged.pop(name, None)
    for name, text in (changes or {}).items():
        if text is None:
            merged.pop(name, None)
        else:
            merged[name] = text
    return merged


@contextlib.contextmanager
def running(
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
    command: Sequence[str] = (*HOMING, "run"),
) -> Iterator[Running]:
    """`homing run` with these arguments on a free port."""
    process = subprocess.Popen(
        [*command, "--port", "0", *arguments],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    server = Running(process)
    try:
        yield server
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                server.stop()
        # The whole session at last, so that a test that failed leaves no worker either.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        server.wait()
        assert process.stderr is not None
        process.stderr.close()


def refused(*arguments: str, cwd: Path, env: Mapping[str, str | None] | None = None) -> tuple[int, list[str]]:
    """The exit code and the lines on stderr of a `homing` command that ends by itself."""
    done = subprocess.run(
        [*HOMING, *arguments],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        start_new_session=True,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()
