"""How late was the machine itself?

A call's deadline is kept by timers of its worker, and seen by a client: each of them can be late for no other reason than that it
could run and was not let, since other processes had the cores. The kernel counts that time for each thread (the second
field of `/proc/<pid>/schedstat`, nanoseconds). And a worker that this run itself has stopped keeps no deadline meanwhile.

So a call that is back late is held against the sum of both, over the time of the call: what is left is the server's own. The
sum is generous, since waiting for a core does not always put off a deadline; therefore both figures are told, and the
correction is made only for calls that were late without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

Read = dict[int, float]


@dataclass(frozen=True, slots=True)
class Moment:
    """What had been waited for a core until then, seconds by process; 0 is this one."""

    at: float
    waited: Read


class Control:
    """Measures the machine for the length of a run.

    Args:
        workers: The server's workers now.
    """

    def __init__(self, workers: Callable[[], Iterable[int]]) -> None:
        self._workers = workers
        self._stops: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def stopped(self, began: float, ended: float) -> None:
        """A worker was held by this run from one instant to another, on the monotonic clock."""
        with self._lock:
            self._stops.append((began, ended))

    def now(self) -> Moment:
        found = {0: _waited_here()}
        for pid in self._workers():
            waited = _waited(f"/proc/{pid}/schedstat")
            if waited is not None:
                found[pid] = waited
        return Moment(time.monotonic(), found)

    def late_since(self, then: Moment) -> float:
        """Seconds by which machine and run may have put off what began then."""
        now = self.now()
        waited = sum(now.waited[pid] - then.waited.get(pid, 0.0) for pid in now.waited)
        with self._lock:
            held = sum(max(0.0, min(now.at, ended) - max(then.at, began)) for began, ended in self._stops)
        return waited + held


def _waited_here() -> float:
    return _waited("/proc/thread-self/schedstat") or 0.0


def _waited(path: str) -> float | None:
    try:
        return int(Path(path).read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
