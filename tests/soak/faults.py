"""What is done to the workers: kills, stops, restarts and orderly ends, in an order that the seed fixes.

Each fault is aimed at a worker that has requests under way, and says how many it hit. The invariant: what was stopped
goes on again, whatever happens here, and no process is touched but the workers of this soak's own server.

Not here: clients that go away in the middle of a call: those are the load's own (`load`), and are counted in `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from tests.soak.load import Load
from tests.soak.oracle import Fate
from tests.support.servers import ServerProcess

WATCH_SECONDS: Final = 0.1
_TWO_WORKERS_SECONDS: Final = 60.0
_RESTART_OVER: Final = r"workers were restarted|the restart stops"
KINDS: Final = {"kill": 5, "stop": 9, "term": 2, "restart": 1}
"""How often each comes, relative to the others."""


@dataclass(slots=True)
class Fault:
    """One that was injected.

    Attributes:
        hit: How many requests were under way for sessions of the worker, or of any worker for a restart.
    """

    kind: str
    time: float
    pid: int
    hit: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A fault to come: how long after the one before it, and which kind; `choice` picks among workers."""

    after_seconds: float
    kind: str
    choice: float
    stop_seconds: float


def plan(random: Random, seconds: float, *, every_seconds: float) -> list[Plan]:
    """Faults for a soak of so many seconds; the first ones are one of each kind, in some order."""
    kinds = list(KINDS)
    random.shuffle(kinds)
    plans: list[Plan] = []
    at = 0.0
    while True:
        kind = kinds.pop() if kinds else random.choices(list(KINDS), list(KINDS.values()))[0]
        planned = Plan(random.uniform(0.4, 1.6) * every_seconds, kind, random.random(), random.uniform(0.2, 3.0))
        at += planned.after_seconds
        if at >= seconds:
            return plans
        plans.append(planned)


class Workers:
    """The server's workers as they come and go. Made by `watched`, which keeps looking."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.fates: dict[int, Fate] = {}
        self._restarts: list[list[float]] = []
        """When each was asked for, and when it was over."""
        self._restarts_over = 0
        self._pidfds: dict[int, int] = {}

    def alive(self) -> list[int]:
        """The workers that have not exited, by when they started."""
        return [pid for pid, fate in self.fates.items() if fate.exited == float("inf")]

    def settled(self, count: int) -> bool:
        """So many workers, and none of them about to end."""
        self.look()
        alive = self.alive()
        doomed = any(self.fates[pid].doomed < float("inf") for pid in alive)
        return len(alive) == count and not doomed and not any(over == float("inf") for _, over in self._restarts)

    def look(self) -> None:
        """Take note of new workers, and of restarts that are over."""
        over, before = len(self._server.log.find(_RESTART_OVER)), self._restarts_over
        self._restarts_over = over  # fewer, once the log has dropped its oldest lines
        if over > before:
            for restart in self._restarts:
                restart[1] = min(restart[1], time.monotonic())
        for pid in self._server.worker_pids():
            if pid in self.fates:
                continue
            with contextlib.suppress(OSError):
                # Python's resource tracker is a child of the supervisor too.
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    self._watch(pid)

    def _watch(self, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        fate = self.fates[pid] = Fate(pid, born=time.monotonic())
        self._pidfds[pid] = pidfd
        loop = asyncio.get_running_loop()

        def exited() -> None:
            fate.exited = time.monotonic()
            # A worker that nobody signalled was replaced by a restart that was under way in its life.
            asked = [max(at, fate.born) for at, over in self._restarts if at <= fate.exited and fate.born <= over]
            fate.doomed = min([fate.doomed, *asked])
            self._forget(pid)

        loop.add_reader(pidfd, exited)

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to one worker, unless it is gone."""
        fate = self.fates[pid]
        if number in (signal.SIGKILL, signal.SIGTERM):
            fate.doomed = min(fate.doomed, time.monotonic())
        if number == signal.SIGKILL:
            fate.killed = min(fate.killed, time.monotonic())
        if pid in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[pid], number)

    def restart(self) -> None:
        """SIGHUP to the supervisor: each worker is replaced in turn."""
        self._restarts.append([time.monotonic(), float("inf")])
        self._server.signal(signal.SIGHUP)

    def close(self) -> None:
        for pid in list(self._pidfds):
            self._forget(pid)


@asynccontextmanager
async def watched(server: ServerProcess) -> AsyncIterator[Workers]:
    """The workers of this server, looked for often enough that none comes and goes unseen."""
    workers = Workers(server)

    async def watch() -> None:
        while True:
            workers.look()
            await asyncio.sleep(WATCH_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        workers.look()
        yield workers
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        workers.close()


class Injector:
    """Carries out a plan, and keeps what it did."""

    def __init__(self, load: Load, workers: Workers, ready: Callable[[], list[int]]) -> None:
        self._load = load
        self._workers = workers
        self._ready = ready
        self._stopped: set[int] = set()
        self.faults: list[Fault] = []

    async def run(self, plans: list[Plan]) -> None:
        """Every fault of the plan, each when its time has come, and two workers are there."""
        async with asyncio.TaskGroup() as stops:
            try:
                for planned in plans:
                    await asyncio.sleep(planned.after_seconds)
                    async with asyncio.timeout(_TWO_WORKERS_SECONDS):
                        while len(able := self._able()) < 2:
                            await asyncio.sleep(WATCH_SECONDS)
                    self._inject(planned, able, stops)
            finally:
                for pid in list(self._stopped):
                    self._go_on(pid)

    def _able(self) -> list[int]:
        """The workers that serve, and that no fault of ours has ended or stopped."""
        self._workers.look()
        return [
            pid for pid in self._ready() if pid not in self._stopped and self._workers.fates[pid].doomed == float("inf")
        ]

    def _inject(self, planned: Plan, able: list[int], stops: asyncio.TaskGroup) -> None:
        workers, load = self._workers, self._load
        now = time.monotonic()
        if planned.kind == "restart":
            self.faults.append(Fault("restart", now, 0, sum(load.hit(pid) for pid in able)))
            workers.restart()
            return
        # Whoever is busy is worth hitting; one worker at least goes on undisturbed.
        busy = [pid for pid in load.busiest(able) if load.hit(pid)] or able
        pid = busy[int(planned.choice * len(busy))]
        hit = load.hit(pid)
        match planned.kind:
            case "kill":
                workers.signal(pid, signal.SIGKILL)
            case "term":
                workers.signal(pid, signal.SIGTERM)
            case "stop":
                workers.signal(pid, signal.SIGSTOP)
                self._stopped.add(pid)
                stops.create_task(self._resume(pid, planned.stop_seconds))
        self.faults.append(Fault(planned.kind, now, pid, hit, planned.stop_seconds if planned.kind == "stop" else 0.0))

    async def _resume(self, pid: int, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            self._go_on(pid)

    def _go_on(self, pid: int) -> None:
        self._stopped.discard(pid)
        self._workers.signal(pid, signal.SIGCONT)
