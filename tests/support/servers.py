"""Real servers for tests: `homing run`, `uvicorn --workers` and scripts as processes; one uvicorn in this process.

A server started here is ready when its log says so: the log is read as it is written, so nothing polls and nothing sleeps.
It is ended by its pid, its exit is waited for, its workers are seen to be gone, and its log is shown when a test fails.

Not here: two workers whose arriving worker a test chooses (`pair`), and choosing among workers behind one port (`workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvicorn
from tests.support.raw import Address

from homing.types import ASGIApp

ROOT: Final = Path(__file__).parents[2]
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
LOG_LINES: Final = 2000

STARTED: Final = r"Application startup complete"
ADDRESS: Final = re.compile(r"Uvicorn running on https?://(?:\[)?([^\s\]]+?)(?:\])?:(\d+)\b")

# Python says these of objects that nobody closed or awaited; a server that stops in an orderly way says none.
LEFT_BEHIND: Final = re.compile(
    r"ResourceWarning|was never awaited|was never retrieved|Task was destroyed|leaked \w+ objects|Exception ignored"
)


class ServerError(AssertionError):
    """The server did not start, stop or behave as this test needs; the message ends with its log."""


@dataclass
class Log:
    """What the server wrote, kept line by line; waits are for lines to come or already there."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    times: deque[float] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    """When each line came, on the monotonic clock."""
    ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line over the reader's limit: dropped, the next one counts
                continue
            if not line:
                break
            self.lines.append(line.decode(errors="replace").rstrip("\n"))
            self.times.append(time.monotonic())
            self._changed.set()
        self.ended = True
        self._changed.set()

    def find(self, pattern: str | re.Pattern[str]) -> list[re.Match[str]]:
        return [match for line in self.lines if (match := re.search(pattern, line))]

    async def until(
        self, pattern: str | re.Pattern[str], count: int = 1, *, timeout_seconds: float = START_SECONDS
    ) -> list[re.Match[str]]:
        """The matches, once `count` lines match.

        Raises:
            ServerError: the server ended, or the time did, before.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while len(found := self.find(pattern)) < count:
                    if self.ended:
                        raise ServerError(f"the server ended before {pattern!r} came {count} times{self}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ServerError(f"{pattern!r} came less than {count} times in {timeout_seconds} s{self}") from None
        return found

    def timed(self, beside: Iterable[tuple[float, str]] = ()) -> list[str]:
        """The lines with the seconds since the first, and what else happened at times on the monotonic clock."""
        happened = sorted([*zip(self.times, self.lines, strict=True), *beside], key=lambda each: each[0])
        return [f"{at - happened[0][0]:9.3f} {line}" for at, line in happened]

    def __str__(self) -> str:
        return "; its log:\n" + "\n".join(f"    | {line}" for line in self.timed())


class ServerProcess:
    """A server as a process of its own. Made by `run_process` and `serve_workers`, which end it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Log, pidfd: int) -> None:
        self._process = process
        self._pidfd = pidfd
        self.log = log
        self.address: Address = ("127.0.0.1", 0)

    def __repr__(self) -> str:
        return f"<ServerProcess {self.pid} at {self.address}: {self._process.returncode}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def worker_pids(self) -> list[int]:
        """The live child processes: the workers, and Python's resource tracker where there is one."""
        return children(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        # Not `Process.send_signal`: that polls, which can take the exit code away from asyncio (it then says 255).
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self, *, timeout_seconds: float = STOP_SECONDS) -> int:
        """The exit code, once the process has ended."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._process.wait()
        except TimeoutError:
            raise ServerError(f"{self!r} did not end within {timeout_seconds} s{self.log}") from None

    async def stop(self, *, timeout_seconds: float = STOP_SECONDS) -> int:
        """SIGTERM, and the exit code; the workers are gone when this returns.

        Raises:
            ServerError: it did not end in time (it is killed then), or a worker outlived it.
        """
        if self.returncode is not None:
            return self.returncode
        family = descendants(self.pid)
        with contextlib.ExitStack() as watched:
            descriptors = [fd for pid in family if (fd := watched.enter_context(_pidfd(pid))) is not None]
            self.signal(signal.SIGTERM)
            try:
                code = await self.wait(timeout_seconds=timeout_seconds)
                for fd in descriptors:
                    await _ended(fd, timeout_seconds=5.0)
            except (ServerError, TimeoutError):
                for pid in [self.pid, *family]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await self._process.wait()
                raise ServerError(f"{self!r} or a worker of it did not stop; killed{self.log}") from None
        return code


def children(pid: int) -> list[int]:
    """The live child processes of `pid`, from `/proc` (Linux)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for child in list(found):
        found += descendants(child)
    return found


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    """A descriptor of this process, which tells of its end even if its pid is used again; None if it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


async def _ended(fd: int, *, timeout_seconds: float) -> None:
    """Wait until the process of this pidfd has ended: the descriptor becomes readable."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        loop.remove_reader(fd)
        ended.set_result(None)

    loop.add_reader(fd, readable)
    try:
        async with asyncio.timeout(timeout_seconds):
            await ended
    finally:
        loop.remove_reader(fd)


@asynccontextmanager
async def run_process(
    argv: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path = ROOT,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[ServerProcess]:
    """A process whose log is read; stopped at the end if it still runs. Its exit code is the caller's to judge.

    Args:
        env: Added to this process's environment; None removes a variable.
    """
    merged = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **{key: text for key, text in (env or {}).items() if text is not None},
    }
    for key, text in (env or {}).items():
        if text is None:
            merged.pop(key, None)
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=merged,
        cwd=cwd,
        pass_fds=pass_fds,
        limit=1 << 20,
    )
    assert process.stdout is not None
    log = Log()
    pidfd = os.pidfd_open(process.pid)  # not reaped yet, since that takes a turn of the loop
    reading = asyncio.create_task(log.read(process.stdout), name=f"log of {process.pid}")
    server = ServerProcess(process, log, pidfd)
    try:
        yield server
    except BaseException as error:
        error.add_note(f"{server!r}{log}")
        raise
    finally:
        try:
            await server.stop()
        finally:
            # The workers held the pipe's other end too; they are gone, so this ends.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await reading
            reading.cancel()
            os.close(pidfd)


@asynccontextmanager
async def serve_workers(
    argv: Sequence[str],
    *,
    workers: int,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path = ROOT,
    clean: bool = True,
) -> AsyncIterator[ServerProcess]:
    """A server of several workers on a port of its own, every one of them started; checked for a clean exit.

    Args:
        argv: Such as `homing_run("package.module:app", "--workers", "4", …)`.
        workers: How many workers say that they have started before this is ready.
        clean: Fail if the exit code is not 0 (or the signal's own), or if the log tells of anything left behind. Give False
            where the test kills things.
    """
    async with run_process(argv, env=env, cwd=cwd) as server:
        (match, *_) = await server.log.until(ADDRESS)
        server.address = (match[1], int(match[2]))
        await server.log.until(STARTED, workers)
        yield server
        code = await server.stop()
        if clean and code not in (0, -signal.SIGTERM):
            raise ServerError(f"exit code {code}{server.log}")
    if clean and server.log.find(LEFT_BEHIND):
        raise ServerError(f"the server left something behind{server.log}")


def homing_run(app: str, *options: str, port: int = 0) -> list[str]:
    """The command line of `homing run APP --port … OPTIONS`, with this interpreter."""
    return [sys.executable, "-m", "homing", "run", app, "--port", str(port), *options]


def uvicorn_run(app: str, *options: str, port: int = 0) -> list[str]:
    """The command line of `uvicorn APP --port … OPTIONS`, with this interpreter."""
    return [sys.executable, "-m", "uvicorn", app, "--port", str(port), *options]


@asynccontextmanager
async def serving(app: ASGIApp, **options: object) -> AsyncIterator[Address]:
    """Serve app in this process, on an ephemeral port; it listens before the server starts, so no client polls."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            # Not `serve()`: that takes over the signal handlers of this process, pytest's own among them.
            tasks.create_task(server._serve(sockets=[listener]))
            try:
                yield listener.getsockname()[:2]
            finally:
                server.should_exit = True
