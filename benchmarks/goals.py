"""The page of all goals of the core: `benchmarks/goals.md`, made from the raw rounds beside each question's page.

    python -m benchmarks.goals      part of `make bench`

Not here: measuring, and each question's own figures and losing rows (`benchmarks/<question>`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.bodies import run as bodies
from benchmarks.forwarding import report as forwarding
from benchmarks.owners import run as owners
from benchmarks.spread import spread, table

HERE: Final = Path(__file__).parent
Rows = Callable[[dict[str, Any]], Sequence[tuple[str, ...]]]
ROUNDS: Final[dict[str, Rows]] = {
    "forwarding/rounds.json": forwarding.goal_rows,
    "owners/rounds.json": owners.goal_rows,
    "bodies/rounds.json": bodies.goal_rows,
    "bodies/rounds-each-gib.json": bodies.goal_rows,
}


def section(rounds: str, goal_rows: Rows, directory: Path) -> str:
    kept = directory / rounds
    if not kept.exists():
        return f"## `{rounds}`\n\nNot measured: there is no such file."
    result = json.loads(kept.read_text())
    count = len(result["rounds"])
    coverage = spread([float(number) for number in range(count)]).coverage
    return "\n\n".join(
        (
            f"## `{rounds}`",
            f"{count} rounds, intervals at {coverage:.0%}. {machine.text(result)}",
            table(("goal", "bound", "median (interval)", ""), goal_rows(result)),
        )
    )


def page(directory: Path = HERE) -> str:
    return "\n\n".join(
        (
            "# Which goals are reached?",
            "Made by `benchmarks/goals.py` from the raw rounds of each question; do not edit: run `make bench`. A goal is reached "
            "if the median is within its bound. The interval in brackets is the sign test's: of order statistics, which hold "
            "the true median with at least 95 % from six rounds on, whatever the figures' distribution is.",
            *(section(rounds, rows, directory) for rounds, rows in ROUNDS.items()),
        )
    )


def main() -> int:
    (HERE / "goals.md").write_text(page() + "\n")
    sys.stderr.write(page() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
