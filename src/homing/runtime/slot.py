"""One of a server's N places for a worker: which worker serves there, and when a new one is tried after one that could not start.

Not here: starting workers, and what makes a place empty (`supervisor.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from homing.runtime.listeners import Listener
from homing.runtime.process import Worker

_FIRST_RETRY_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 30.0


@dataclass(eq=False)
class Slot:
    """A place for a worker; empty while a replacement that failed waits for its next try."""

    listener: Listener
    worker: Worker | None = None
    replacement: Worker | None = None
    failures: int = 0
    retry_at: float = 0.0

    def try_later(self, now: float) -> float:
        """Its worker could not start: how many seconds to wait before the next try, twice as many each time."""
        self.failures += 1
        wait_seconds = min(_FIRST_RETRY_SECONDS * 2.0 ** (self.failures - 1), _LONGEST_RETRY_SECONDS)
        self.retry_at = now + wait_seconds
        return wait_seconds
