"""Times owner records with few and with many live sessions, and writes `rounds.json` and `results.md` beside this file.

`question.md` says what is measured and why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.spread import Spread, spread, table, verdict

from homing.directory.owners import SessionOwners
from homing.rundir import new_worker_id

FEW: Final = 100
MANY: Final = 100_000
OPERATIONS: Final = 1000
TMPFS: Final = "/dev/shm"

ACQUIRE_RELEASE_GOAL_US: Final = 35.0
GROWTH_GOAL: Final = 1.5

Timed = dict[str, float]


def per_operation_us(operation: Callable[[str], object], sessions: list[str]) -> float:
    began = time.process_time_ns()
    for session in sessions:
        operation(session)
    return (time.process_time_ns() - began) / len(sessions) / 1000


class Directory:
    """The records of one server with two workers. Owned by `opened`."""

    def __init__(self, here: SessionOwners, other: SessionOwners, live: list[str]) -> None:
        self.here = here
        self.other = other
        self.live = live

    def measure(self, number: int, chosen: random.Random) -> Timed:
        """CPU µs per operation."""
        new = [f"new-{number}-{i}" for i in range(OPERATIONS)]
        # Texts of their own, as each request brings its own: one that has lain in memory since the start costs a
        # cache miss that is not the record's.
        known = [chosen.choice(self.live).encode().decode() for _ in range(OPERATIONS)]

        def serve(session: str) -> None:
            with self.here.serving(session):
                pass

        return {
            "acquire": per_operation_us(self.here.acquire, new),
            "release": per_operation_us(self.here.release, new),
            "look_up": per_operation_us(self.other.owner, known),
            "serve": per_operation_us(serve, known),
        }


@contextlib.asynccontextmanager
async def opened(live: int) -> AsyncIterator[Directory]:
    """A run directory on tmpfs with `live` sessions of one worker."""
    with tempfile.TemporaryDirectory(prefix="homing-bench-", dir=TMPFS) as path:
        sessions = [f"session-{i}" for i in range(live)]
        held = set(sessions)
        here = SessionOwners(path, new_worker_id(), held.__contains__)
        try:
            other = SessionOwners(path, new_worker_id(), held.__contains__)
            try:
                for session in sessions:
                    here.acquire(session)
                yield Directory(here, other, sessions)
            finally:
                await other.aclose()
        finally:
            await here.aclose()


async def measure(rounds: int) -> list[dict[str, Timed]]:
    chosen = random.Random(1)
    results: list[dict[str, Timed]] = []
    async with opened(FEW) as few, opened(MANY) as many:
        directories = [("few", few), ("many", many)]
        for number in range(rounds):
            first = number % 2
            order = directories[first:] + directories[:first]
            results.append({name: directory.measure(number, chosen) for name, directory in order})
    return results


TITLES: Final = {
    "acquire": "acquire a new session",
    "release": "release it",
    "look_up": "look up the owner of another worker's session",
    "serve": "enter and leave a served request",
}


def cost(result: dict[str, Any], size: str, name: str) -> Spread:
    return spread([one[size][name] for one in result["rounds"]])


def growth(result: dict[str, Any], name: str) -> Spread:
    return spread([one["many"][name] / one["few"][name] for one in result["rounds"]])


def goal_rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    both = spread([one["few"]["acquire"] + one["few"]["release"] for one in result["rounds"]])
    reached = verdict(both.median, ACQUIRE_RELEASE_GOAL_US)
    rows = [("acquire + release of a session, tmpfs", "≤ 35 µs", f"{both.text(1)} µs", reached)]
    for name in ("look_up", "acquire"):
        found = growth(result, name)
        text = f"{TITLES[name]}: {MANY:,} live sessions ÷ {FEW}"
        rows.append((text, "≤ 1.50", found.text(2), verdict(found.median, GROWTH_GOAL)))
    return rows


def page(result: dict[str, Any]) -> str:
    costs = [
        (title, cost(result, "few", name).text(1), cost(result, "many", name).text(1), growth(result, name).text(2))
        for name, title in TITLES.items()
    ]
    count = len(result["rounds"])
    return "\n\n".join(
        (
            "# What does an owner record cost, and does it stay so with 100,000 sessions?",
            "Made by `benchmarks/owners/run.py`, from `rounds.json`; `question.md` says how. Do not edit.",
            f"{machine.text(result)} {count} rounds of {OPERATIONS} operations; medians, in brackets an "
            "interval of order statistics that holds the true median with probability "
            f"{cost(result, 'few', 'acquire').coverage:.0%}.",
            table(("goal", "bound", "median (interval)", ""), goal_rows(result)),
            table(("CPU µs per operation", f"{FEW} sessions", f"{MANY:,} sessions", "ratio"), costs),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where rounds.json and results.md go")
    parser.add_argument("--json", action="store_true", help="also print the rounds as JSON on stdout")
    options = parser.parse_args()
    if not Path(TMPFS).is_dir():
        print(f"skipped owners: {TMPFS} is not there", file=sys.stderr)
        return 0
    print(f"owners: {options.rounds} rounds with {FEW} and {MANY:,} live sessions", file=sys.stderr, flush=True)
    result = {**machine.described(), "rounds": asyncio.run(measure(options.rounds))}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rounds.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "results.md").write_text(page(result) + "\n")
    if options.json:
        print(json.dumps(result))
    print(page(result).split("\n\n")[3], file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
