"""A `homing run` server of several workers whose app is the recorder: the stage sees what runs, and a test chooses where.

Joins `servers` (the process), `recorder` (the app and its stage) and `workers` (a connection to each worker): nothing here is
a harness of its own. A session is named by the header `x-session`, and belongs to the worker whose connection first carries
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.support.raw import Reply, Wire, connect, request
from tests.support.recorder import NAME_ENV, STAGE_ENV, Performance, Stage, open_stage
from tests.support.servers import STARTED, ServerProcess, _ended, _pidfd, homing_run, serve_workers
from tests.support.workers import TRIES, answering, connections

T = TypeVar("T")

CANARY: Final = "canary"
"""Every session ID of these tests begins so: no log and no reply of homing's may hold one."""

RECORDER: Final = "tests.support.recorder:app"
SESSION: Final = ("--session", "header:x-session")


class Staged:
    """The server, its stage, and names that no other test of it uses. Made by `open_staged`."""

    def __init__(self, server: ServerProcess, stage: Stage, workers: int) -> None:
        self.server = server
        self.stage = stage
        self.workers = workers
        self.killed = 0
        self._numbers = itertools.count()

    @property
    def run_directory(self) -> Path:
        return Path(self.server.log.find(r"run directory (\S+)$")[0][1])

    def new_session(self) -> str:
        return f"{CANARY}-{next(self._numbers):04}-0123456789"

    def script(self, *steps: Any) -> str:
        """A new case whose script is these steps (lists of steps are joined in)."""
        script: list[Any] = []
        for step in steps:
            script += step if isinstance(step, list) else [step]
        case = f"case-{next(self._numbers)}"
        self.stage.script(case, script)
        return case

    def wires(self) -> AbstractAsyncContextManager[dict[int, Wire]]:
        """A connection to each worker, by process ID."""
        return connections(self.server.address, self.workers)

    @asynccontextmanager
    async def connection(self, pid: int) -> AsyncIterator[Wire]:
        """One more connection to this worker."""
        for _ in range(TRIES):
            async with connect(self.server.address) as wire:
                if await answering(wire) == pid:
                    yield wire
                    return
        raise AssertionError(f"worker {pid} accepted none of {TRIES} connections")

    async def start_session(self, at: Wire) -> str:
        """A session of the worker at the other end of this connection."""
        session = self.new_session()
        reply = await call(at, session)
        assert reply.status == 200, f"{reply!r}{self.server.log}"
        return session

    async def performance(self, case: str) -> Performance:
        return await self.stage.performance(case)

    async def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal that ends this worker, and wait until it is gone."""
        with _pidfd(pid) as fd:
            os.kill(pid, number)
            self.killed += 1
            if fd is not None:
                await _ended(fd, timeout_seconds=10)

    async def replaced(self) -> None:
        """Wait until a worker has started for each that a test killed."""
        await self.server.log.until(STARTED, self.workers + self.killed)

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Any:
        """The worker stands still (SIGSTOP) inside the block."""
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def call(
    wire: Wire,
    session: str | None = None,
    case: str | None = None,
    *,
    method: str = "GET",
    path: str = "/",
    headers: Sequence[tuple[str, str]] = (),
    body: bytes | None = None,
    timeout_seconds: float = 10.0,
) -> Reply:
    """One request, and its reply."""
    await wire.send(asked(session, case, method=method, path=path, headers=headers, body=body))
    return await wire.reply(method, timeout_seconds=timeout_seconds)


def asked(
    session: str | None = None,
    case: str | None = None,
    *,
    method: str = "GET",
    path: str = "/",
    headers: Sequence[tuple[str, str]] = (),
    body: bytes | None = None,
    version: str = "1.1",
) -> bytes:
    named = [] if session is None else [("x-session", session)]
    named += [] if case is None else [("x-case", case)]
    return request(method, path, [*named, *headers], body, version=version)


@asynccontextmanager
async def open_staged(
    *options: str,
    workers: int,
    env: Mapping[str, str | None] | None = None,
    wrap: Sequence[str] = (),
    clean: bool = False,
    app: str = RECORDER,
) -> AsyncIterator[Staged]:
    """Start it; it is ready when every worker has started. `wrap` stands before the command.

    A session begins where its connection is, unless `options` say `--place`.
    """
    if "--place" not in options:
        options = ("--place", "accepting", *options)
    with tempfile.TemporaryDirectory(prefix="homing-stage-") as directory:
        async with open_stage(f"{directory}/stage") as stage:
            environment = {STAGE_ENV: stage.path, NAME_ENV: "worker", "HOMING_SESSION_SOCKET_DIR": None, **(env or {})}
            argv = [*wrap, *homing_run(app, "--workers", str(workers), *options)]
            async with serve_workers(argv, workers=workers, env=environment, clean=clean) as server:
                yield Staged(server, stage, workers)


class Shared:
    """Servers that several tests of a module use; opened on first use, all closed with the module's event loop."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._opened: dict[str, tuple[AbstractAsyncContextManager[Any], Any]] = {}

    def get(self, name: str, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        if name not in self._opened:
            context = make()
            self._opened[name] = context, self._runner.run(context.__aenter__())
        found: T = self._opened[name][1]
        return found

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(test)

    def close(self) -> None:
        errors = []
        for context, _ in reversed(self._opened.values()):
            try:
                self._runner.run(context.__aexit__(None, None, None))
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("servers did not end in an orderly way", errors)
