"""How long something took, counted in fixed steps: cheap enough for every forwarded request, and small enough for a row.

Not here: who shows them (`homing.watch`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

BOUNDS_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The upper ends of the steps, each belonging to its step; a last one has no end."""


class Histogram:
    """How often something took so long. `counts` has one entry more than there are bounds; each only grows."""

    __slots__ = ("counts", "total_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds

    def __repr__(self) -> str:
        return f"<Histogram: {sum(self.counts)} in {self.total_seconds:.3f} s>"


def summed(histograms: Iterable[Histogram]) -> Histogram:
    """All of them as one."""
    result = Histogram()
    for each in histograms:
        result.counts = [one + another for one, another in zip(result.counts, each.counts, strict=True)]
        result.total_seconds += each.total_seconds
    return result
