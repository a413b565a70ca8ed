"""Medians, their intervals, and tables: what the pages of all questions share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and an interval of order statistics that holds the true median.

    Attributes:
        coverage: The probability, for any distribution, that the interval holds it: at least 0.95 from six rounds on.
    """

    median: float
    low: float
    high: float
    coverage: float

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def coverage_of(count: int, cut: int) -> float:
    """P(the median lies between the `cut`-th smallest and largest of `count` values): binomial."""
    return 1 - 2 * sum(math.comb(count, i) for i in range(cut)) / float(2**count)


def spread(values: list[float]) -> Spread:
    """The narrowest symmetric interval that covers at least 95 %; the whole range where even that covers less."""
    ordered = sorted(values)
    cut = 1
    while 2 * (cut + 1) <= len(ordered) and coverage_of(len(ordered), cut + 1) >= 0.95:
        cut += 1
    return Spread(statistics.median(ordered), ordered[cut - 1], ordered[-cut], max(0.0, coverage_of(len(ordered), cut)))


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def verdict(value: float, bound: float | None, *, at_least: bool = False) -> str:
    """What a goals' table says of a median."""
    if bound is None:
        return "–"
    return "reached" if (value >= bound if at_least else value <= bound) else "**missed**"
