"""The clock a room is given; tests give it another.

Durations are measured on the monotonic clock. The wall clock serves one purpose, the age of a signed cookie.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since this machine started: for what one process says and another reads. The same for both, and never jumps."""
    return time.clock_gettime(_BOOT_CLOCK)


class Clock(Protocol):
    """Where a room reads the time."""

    def monotonic(self) -> float:
        """Seconds since some instant; never goes back. Every deadline and window is measured on it."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; may jump. Only cookie ages are measured on it."""
        ...


class SystemClock:
    """The machine's own clocks."""

    # The functions themselves: each is read with every request.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


SYSTEM_CLOCK = SystemClock()
