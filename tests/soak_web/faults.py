"""What is done to a server's processes: killed and stopped, at random, in an order that a seed decides."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.soak_web.control import Control
from tests.support.running import Running, children

from homing.web.base import ProcessMark
from homing.web.chromium.browser import kind_of
from homing.web.processes import OWNER_ENV, command_line, mark

_WEIGHTS: Final = {"renderer": 10.0, "browser": 1.0, "driver": 0.6, "zygote": 0.5, "utility": 0.6, "gpu-process": 0.4}


class Chaos:
    """Does one fault after another in a thread of its own. `done`: how many of each; `leaders`: the browsers that were seen.

    Args:
        spares_older_seconds: A process that is older is left alone: it may be one that was forgotten, and has to be found.
    """

    def __init__(
        self,
        server: Running,
        seed: int,
        every_seconds: float,
        worker_share: float,
        control: Control,
        *,
        spares_older_seconds: float,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.workers_seen: set[int] = set(server.workers())
        self.leaders: set[ProcessMark] = set()
        self._server = server
        self._control = control
        self._random = random.Random(seed)
        self._every = every_seconds
        self._worker_share = worker_share
        self._spares_older_seconds = spares_older_seconds
        self._end = threading.Event()
        self._stopped: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="chaos")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more faults; whoever was stopped goes on."""
        self._end.set()
        self._thread.join()
        for pid in self._stopped:
            _signal(pid, signal.SIGCONT)

    def _run(self) -> None:
        while not self._end.wait(self._random.uniform(0.2, 1.8) * self._every):
            workers = self._server.workers()
            self.workers_seen.update(workers)
            if self._random.random() < self._worker_share:
                self._to_worker(workers)
            else:
                self._to_browser(workers)

    def _to_worker(self, workers: list[int]) -> None:
        started = len(self._server.find("Application startup complete")) - self.done["worker killed"]
        if len(workers) < 2 or started < 2:
            return  # one is being replaced: somebody has to be there for the calls that come now
        pid = self._random.choice(workers)
        if self._random.random() < 0.5:
            if _signal(pid, signal.SIGKILL):
                self.done["worker killed"] += 1
            return
        if _signal(pid, signal.SIGSTOP):
            self.done["worker stopped"] += 1
            self._stopped.add(pid)
            began = time.monotonic()
            self._end.wait(self._random.uniform(0.05, 0.4))
            _signal(pid, signal.SIGCONT)
            self._stopped.discard(pid)
            self._control.stopped(began, time.monotonic())

    def _to_browser(self, workers: list[int]) -> None:
        pids = [pid for worker in workers for pid in of_browsers(worker)]
        pids = [pid for pid in pids if _age_seconds(pid) < self._spares_older_seconds]
        if not pids:
            return
        kinds: dict[str, list[int]] = {}
        for pid in pids:
            kinds.setdefault(kind_of_process(pid), []).append(pid)
        # Most faults meet one session, some a browser, a few all of a worker's: else no session would live to see another.
        kind = self._random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0] if "driver" in kinds else "browser"
        if kind not in kinds:
            return
        pid = self._random.choice(kinds[kind])
        self.leaders.update(found for each in kinds.get("browser", []) if (found := mark(each)) is not None)
        if self._random.random() < 0.6:
            if _signal(pid, signal.SIGKILL):
                self.done[f"{kind} killed"] += 1
        elif _signal(pid, signal.SIGSTOP):
            # For good: whoever closes the session has to end it all the same.
            self.done[f"{kind} stopped"] += 1


def kind_of_process(pid: int) -> str:
    """`driver`, or what it is of a browser."""
    found = mark(pid)
    line = [] if found is None else command_line(found)
    return "driver" if "run-driver" in line else "browser" if found is None else kind_of(found)


def of_browsers(worker: int) -> Iterator[int]:
    """What a worker started with its mark, and all below it: a browser's own children may show none. A child without the
    mark is no browser yet, but the worker's own copy on its way to being one. What is dead and not yet buried is none."""
    for child in children(worker):
        if owner_of(child) is not None and mark(child) is not None:
            yield child
            yield from descendants(child)
        else:
            yield from of_browsers(child)


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        if mark(child) is not None:
            yield child
            yield from descendants(child)


def marked(workers: set[int]) -> list[ProcessMark]:
    """The processes that any of these workers started, dead or alive, by their mark."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [mark(pid) for pid in pids if owner_of(pid) in workers]
    return [process for process in found if process is not None]


def owner_of(pid: int) -> int | None:
    """The worker that started a process, by its mark; None: it has none."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(OWNER_ENV.encode() + b"="):
                return int(variable.decode().split(".")[1])
    return None


def _age_seconds(pid: int) -> float:
    found = mark(pid)
    if found is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - found.started / os.sysconf("SC_CLK_TCK")


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
