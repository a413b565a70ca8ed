"""A server as it is now and was in the last minutes, for a page that somebody looks at. Sessions are shown by tags only.

Figures are sampled once a second; the sessions themselves are asked for only while somebody looks.

Not here: the page, and who serves it (`homing.runtime.dashboard`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from homing.clock import boot_seconds
from homing.errors import ConfigurationError
from homing.watch.figures import STALE_SECONDS, Figures
from homing.watch.processes import resident_bytes
from homing.watch.servers import Server, look_at
from homing.watch.sessions import WorkerSessions, ask

SAMPLE_SECONDS: Final = 1.0
KEPT_SAMPLES: Final = 300
"""Five minutes."""

SHOWN_SESSIONS: Final = 400
"""Of each worker; the rest is a number."""

_FRESH_SECONDS: Final = 0.8
_ANSWER_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Sample:
    """Sums over the server's whole life, and how many sessions are open. `at`: as `homing.clock.boot_seconds` tells."""

    at: float
    requests: int
    forwarded: int
    gone: int
    sessions: int


class Live:
    """Watches one server. `sample` is called once a second; `document` by whoever looks, from any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._samples: deque[_Sample] = deque(maxlen=KEPT_SAMPLES + 1)
        self._asking = threading.Lock()
        self._made_at = 0.0
        self._document: dict[str, Any] = {}

    def sample(self) -> None:
        """Note the figures of now. A server that cannot be read leaves a gap."""
        server = look_at(self._path)
        if server is None:
            return
        self._samples.append(
            _Sample(
                at=boot_seconds(),
                requests=sum(each.served for each in server.all),
                forwarded=sum(each.forwarded for each in server.all),
                gone=sum(each.answers.get("session_gone", 0) for each in server.all),
                sessions=sum(each.open_sessions for each in server.alive),
            )
        )

    def document(self) -> dict[str, Any]:
        """The server as JSON: what `homing.runtime.dashboard.html` reads. Many who look at once get the same one.

        Raises:
            ConfigurationError: the server cannot be read.
        """
        with self._asking:
            if time.monotonic() - self._made_at > _FRESH_SECONDS:
                self._document = self._make()
                self._made_at = time.monotonic()
            return self._document

    def _make(self) -> dict[str, Any]:
        server = look_at(self._path)
        if server is None:
            raise ConfigurationError("the server's run directory cannot be read")
        now = boot_seconds()
        description = server.description
        return {
            "now": time.time(),
            "server": {
                "address": description.address,
                "app": description.app,
                "version": description.version,
                "uptime_seconds": round(now - description.began, 1),
                "workers_wanted": description.workers,
            },
            "workers": [self._worker(server, figures, now) for figures in server.alive],
            "exited": len(server.dead),
            "totals": {
                "requests": sum(each.served for each in server.all),
                "forwarded": sum(each.forwarded for each in server.all),
                "handoffs": sum(each.given for each in server.all),
                "gone": sum(each.answers.get("session_gone", 0) for each in server.all),
                "sessions": sum(each.open_sessions for each in server.alive),
                "serving": sum(each.serving for each in server.alive),
            },
            "history": self._history(),
        }

    def _worker(self, server: Server, figures: Figures, now: float) -> dict[str, Any]:
        stale = now - figures.written > STALE_SECONDS
        # One that says nothing of itself would only make everybody wait.
        shown = None if stale else ask(server.path, figures.worker, SHOWN_SESSIONS, seconds=_ANSWER_SECONDS)
        found = WorkerSessions(figures.worker, figures.pid, answered=False)
        if shown is not None:
            found = WorkerSessions(figures.worker, figures.pid, shown.sessions, shown.ended, shown.left_out)
        return {
            "worker": figures.worker[:8],
            "pid": figures.pid,
            "uptime_seconds": round(now - figures.began, 1),
            "silent": stale or not found.answered,
            "open": figures.open_sessions,
            "ended": figures.ended,
            "serving": figures.serving,
            "served": figures.served,
            "received": figures.received,
            "forwarded": figures.forwarded,
            "given": figures.given,
            "adopted": figures.adopted,
            "lag_seconds": round(figures.lag_seconds, 4),
            "memory_bytes": resident_bytes(figures.pid),
            "sessions": [
                [each.tag, round(each.age_seconds, 1), _rounded(each.unused_seconds), each.serving, int(each.ended)]
                # In the order they came, so that a session's cell stays where it is while others are used.
                for each in sorted(found.sessions, key=lambda each: each.age_seconds, reverse=True)
            ],
            "left_out": found.left_out,
        }

    def _history(self) -> list[list[float]]:
        """For each step between two samples: when it ended, requests, forwards and gone answers per second, sessions."""
        samples = list(self._samples)
        boot = time.time() - boot_seconds()
        steps = []
        for before, after in pairwise(samples):
            seconds = max(after.at - before.at, 1e-3)
            rates = (after.requests - before.requests, after.forwarded - before.forwarded, after.gone - before.gone)
            steps.append(
                [round(boot + after.at, 1), *(round(max(0, rate) / seconds, 2) for rate in rates), after.sessions]
            )
        return steps


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
