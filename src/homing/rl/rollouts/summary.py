"""What a collection of rollouts comes to, as figures and as a table.

The invariant: the mean reward is over valid samples only; a masked one has no reward, and is counted by its reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from homing.rl.rollouts.results import ResultLine


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a collection.

    Attributes:
        rollouts: All that were asked for.
        done: Those that have come to an end, in this run or before.
        valid: Those that came to a measurement; `mean_reward` is theirs, None if there is none.
        masked: Those that did not, and `masked_by_reason` why.
        episodes, retried: Episodes of this run, and those of them that were no first attempt.
        p50_seconds, p99_seconds: Of the episodes that are valid samples; None if there is none.
        episodes_per_second: Of this run.
        seconds: How long it took.
    """

    rollouts: int
    done: int
    valid: int
    masked: int
    mean_reward: float | None
    masked_by_reason: dict[str, int]
    episodes: int
    retried: int
    p50_seconds: float | None
    p99_seconds: float | None
    episodes_per_second: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(finals: Iterable[ResultLine], *, rollouts: int, episodes: int, retried: int, seconds: float) -> Summary:
    """The figures of the final lines of some rollouts."""
    lines = list(finals)
    valid = [line for line in lines if not line.mask_sample and line.reward is not None]
    rewards = [line.reward for line in valid if line.reward is not None]
    masked = Counter(line.mask_reason or "unknown" for line in lines if line.mask_sample)
    durations = sorted(line.duration_seconds for line in valid)
    return Summary(
        rollouts=rollouts,
        done=len(lines),
        valid=len(valid),
        masked=masked.total(),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        masked_by_reason=dict(masked.most_common()),
        episodes=episodes,
        retried=retried,
        p50_seconds=percentile(durations, 50),
        p99_seconds=percentile(durations, 99),
        episodes_per_second=round(episodes / seconds, 2) if seconds > 0 else 0.0,
        seconds=round(seconds, 3),
    )


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least so many percent of the ordered ones do not exceed; None of none."""
    if not ordered:
        return None
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)]


def table_of(summary: Summary, title: str) -> Table:
    """The figures for people."""
    table = Table(title=title, show_header=False)
    table.add_column("", min_width=22)
    table.add_column("", justify="right", min_width=18)
    table.add_row("rollouts done", f"{summary.done:,} of {summary.rollouts:,}")
    table.add_row("valid samples", f"{summary.valid:,}")
    table.add_row("mean reward of these", "–" if summary.mean_reward is None else f"{summary.mean_reward:.4f}")
    table.add_row("masked", f"{summary.masked:,}")
    for reason, count in summary.masked_by_reason.items():
        table.add_row(f"  {reason}", f"{count:,}")
    table.add_row("episodes run", f"{summary.episodes:,}")
    table.add_row("  of these retries", f"{summary.retried:,}")
    table.add_row("duration p50", _seconds(summary.p50_seconds))
    table.add_row("duration p99", _seconds(summary.p99_seconds))
    table.add_row("throughput", f"{summary.episodes_per_second:,.1f} episodes/s")
    return table


def _seconds(duration: float | None) -> str:
    return "–" if duration is None else f"{duration:.2f} s"
