"""A clock that a test moves by hand."""

from __future__ import annotations


class HandClock:
    """A `homing.clock.Clock` whose two clocks move together, and only when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1_700_000_000.0

    def move(self, seconds: float) -> None:
        self.now += seconds
