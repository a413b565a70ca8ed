"""Counts how new sessions spread over workers for each `--place`, and writes `rounds.json` and `results.md` beside this file.

`question.md` says what is counted and why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.placement.drive import ARRIVALS, serving, spread
from benchmarks.spread import table

from homing.placement import POLICIES

WORKERS: Final = (2, 4, 8)
SESSIONS: Final = (5, 100)
"""Per worker: few, and what the goal is about."""

MANY_GOAL: Final = 1.1
FEW_GOAL: Final = 2.0


def measure(rounds: int, workers: tuple[int, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for count in workers:
        for place in POLICIES:
            with serving(place, count) as port:
                for arrival in ARRIVALS:
                    for each in SESSIONS:
                        for _ in range(rounds):
                            counts = asyncio.run(spread(port, arrival, each * count))
                            had = sorted(counts.values(), reverse=True)
                            had += [0] * (count - len(had))
                            row = {"workers": count, "place": place, "arrival": arrival, "sessions": each, "had": had}
                            print(json.dumps(row), file=sys.stderr, flush=True)
                            found.append(row)
    return found


def _worst(rows: list[dict[str, Any]]) -> list[int]:
    return max((row["had"] for row in rows), key=max) if rows else []


def page(result: dict[str, Any]) -> str:
    rows: list[dict[str, Any]] = result["rows"]
    parts = [
        "# Do new sessions spread over the workers?",
        "Made by `benchmarks/placement/run.py`, from `rounds.json`; `question.md` says how. Do not edit.",
        machine.text(result),
    ]
    workers = sorted({row["workers"] for row in rows})
    for sessions in sorted({row["sessions"] for row in rows}):
        cells = []
        for arrival in ARRIVALS:
            for count in workers:
                mean, line = sessions, [f"{arrival}, {count} workers"]
                for place in POLICIES:
                    chosen = [
                        row
                        for row in rows
                        if (row["arrival"], row["workers"], row["place"], row["sessions"])
                        == (arrival, count, place, sessions)
                    ]
                    worst = _worst(chosen)
                    line.append(f"{worst[0] / mean:.2f} ({worst[0]}, {worst[-1]})" if worst else "–")
                cells.append(tuple(line))
        balanced = [row["had"] for row in rows if row["place"] == "balanced" and row["sessions"] == sessions]
        busiest = max((max(had) for had in balanced), default=0)
        reached = busiest <= (MANY_GOAL * sessions if sessions >= 100 else sessions + FEW_GOAL)
        goal = f"≤ {MANY_GOAL} times the mean" if sessions >= 100 else f"≤ {FEW_GOAL:.0f} sessions above the mean"
        parts += [
            f"## {sessions} sessions per worker",
            "The busiest worker ÷ the mean, of the worst round; in brackets what the busiest and the idlest had. "
            f"Goal for `balanced`: {goal}: **{'reached' if reached else 'missed'}**.",
            table(("arrivals", *POLICIES), cells),
        ]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=list(WORKERS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where rounds.json and results.md go")
    parser.add_argument("--json", action="store_true", help="also print the rounds as JSON on stdout")
    options = parser.parse_args()
    result = {**machine.described(), "rows": measure(options.rounds, tuple(options.workers))}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rounds.json").write_text(json.dumps(result) + "\n")
    (options.out / "results.md").write_text(page(result) + "\n")
    if options.json:
        print(json.dumps(result))
    print(page(result), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
