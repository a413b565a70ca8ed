"""The page made from raw rounds: ratios formed inside each round, their medians and intervals, and the goals.

Run as a program it makes `results.md` anew from a `rounds.json`:
`python -m benchmarks.forwarding.report benchmarks/forwarding/rounds.json`.

Not here: measuring (`run.py`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.forwarding.loads import LOADS
from benchmarks.spread import Spread, spread, table, verdict

Result = dict[str, Any]
Key = tuple[str, str, str]
"""A cell: setup, mode, load."""

TITLES: Final = {
    "A": "one plain uvicorn process",
    "A2": "two uvicorn workers, no routing, each request at the right one",
    "B": "HAProxy, cookie stickiness, two one-worker uvicorns",
    "B1": "the same, HAProxy tuned: one thread, `http-reuse always`",
    "C": "nginx, cookie stickiness, two one-worker uvicorns",
    "D": "two uvicorn workers, aiohttp hop",
    "H": "homing",
    "H0": "homing, `--no-handoff`",
    "P": "homing, which places new sessions",
}
MODES: Final = {
    "local": "served where it arrives",
    "remote": "each connection at the wrong worker",
    "inter": "64 sessions interleaved",
    "any": "half of the sessions at either worker, connections as they fall",
    "placed": "sessions and connections as the server puts them",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the ratio of two cells, from the project's performance goals.

    Attributes:
        less: The ratio is of what both have beyond this third cell.
        alike: The two ought to cost the same, so that the median is above 1 in every other run however alike they are: an interval
            that holds 1 says that no difference is shown.
    """

    text: str
    top: Key
    bottom: Key
    bound: float | None
    figure: str = "cpu_us"
    at_least: bool = False
    less: Key | None = None
    alike: bool = False


SERVED: Final = "served where it arrives ÷ two unrouted workers"
FORWARDED: Final = "every request forwarded ÷ HAProxy's setup"
INTERLEAVED: Final = "interleaved sessions, half at the wrong worker ÷ HAProxy's setup"
AIOHTTP: Final = "every request forwarded ÷ the aiohttp hop"
MOVED: Final = "connections at the wrong worker, handed off ÷ HAProxy's setup"
KEPT: Final = "interleaved sessions ÷ the same with `--no-handoff`"
TWO: Final = "requests per second, two workers, sessions as they are placed ÷ one plain worker"
ONE: Final = "p50 on one connection, forwarded ÷ HAProxy's"

GOALS: Final = (
    Goal(f"{SERVED}, sat", ("H", "local", "sat"), ("A2", "local", "sat"), 1.05),
    Goal(f"{SERVED}, paced", ("H", "local", "paced"), ("A2", "local", "paced"), 1.10),
    Goal(f"{FORWARDED}, sat", ("H0", "remote", "sat"), ("B", "local", "sat"), 1.05),
    Goal(f"{FORWARDED}, paced", ("H0", "remote", "paced"), ("B", "local", "paced"), 1.05),
    Goal(f"{INTERLEAVED}, sat", ("H0", "inter", "sat"), ("B", "inter", "sat"), 0.90),
    Goal(f"{INTERLEAVED}, paced", ("H0", "inter", "paced"), ("B", "inter", "paced"), 1.00),
    Goal(f"{AIOHTTP}, sat", ("H0", "remote", "sat"), ("D", "remote", "sat"), 0.45),
    Goal(
        "the hop alone: what it adds to a request ÷ what the aiohttp hop adds, sat",
        ("H0", "remote", "sat"),
        ("D", "remote", "sat"),
        0.45,
        less=("A2", "local", "sat"),
    ),
    Goal(ONE, ("H0", "remote", "c1"), ("B", "local", "c1"), 1.10, "p50_us"),
    Goal(f"{MOVED}, sat", ("H", "remote", "sat"), ("B", "local", "sat"), 0.80),
    Goal(f"{MOVED}, paced", ("H", "remote", "paced"), ("B", "local", "paced"), 0.80),
    Goal("p50 on one connection, handed off ÷ HAProxy's", ("H", "remote", "c1"), ("B", "local", "c1"), 0.85, "p50_us"),
    Goal(f"{KEPT}, sat", ("H", "inter", "sat"), ("H0", "inter", "sat"), 1.0, alike=True),
    Goal(f"{KEPT}, paced", ("H", "inter", "paced"), ("H0", "inter", "paced"), 1.0, alike=True),
    Goal(TWO, ("P", "placed", "sat"), ("A", "local", "sat"), 1.8, "requests_per_second", at_least=True),
)

OTHER_RATIOS: Final = (
    Goal(
        "requests per second, two unrouted workers ÷ one plain worker: what this machine has for a second worker",
        ("A2", "local", "sat"),
        ("A", "local", "sat"),
        None,
        "requests_per_second",
    ),
    Goal(f"{AIOHTTP}, paced", ("H0", "remote", "paced"), ("D", "remote", "paced"), None),
    Goal("every request forwarded ÷ two unrouted workers, sat", ("H0", "remote", "sat"), ("A2", "local", "sat"), None),
    Goal("every request forwarded ÷ HAProxy's setup, c1", ("H0", "remote", "c1"), ("B", "local", "c1"), None),
    Goal("every request forwarded ÷ HAProxy tuned, sat", ("H0", "remote", "sat"), ("B1", "local", "sat"), None),
    Goal("every request forwarded ÷ nginx's setup, sat", ("H0", "remote", "sat"), ("C", "local", "sat"), None),
    Goal("connections handed off ÷ nginx's setup, sat", ("H", "remote", "sat"), ("C", "local", "sat"), None),
    Goal("connections handed off ÷ served where they arrive, sat", ("H", "remote", "sat"), ("H", "local", "sat"), None),
    Goal("served where it arrives ÷ HAProxy's setup, sat", ("H", "local", "sat"), ("B", "local", "sat"), None),
    Goal("the aiohttp hop ÷ HAProxy's setup, sat", ("D", "remote", "sat"), ("B", "local", "sat"), None),
    Goal("two unrouted workers ÷ HAProxy's setup, sat", ("A2", "local", "sat"), ("B", "local", "sat"), None),
)

MEMORY_GOAL_KIB: Final = 2048


def figures(result: Result, key: Key, figure: str) -> list[float | None]:
    """One value per round; None where the round lacks that cell, or got no reply there."""
    found: list[float | None] = []
    for a_round in result["rounds"]:
        cells = [c for c in a_round["cells"] if (c["setup"], c["mode"], c["load"]) == key]
        found.append(cells[0][figure] if cells and cells[0]["replies"] else None)
    return found


def ratio(result: Result, goal: Goal) -> Spread | None:
    """The ratio formed inside each round; None if no round has both cells."""
    tops, bottoms = figures(result, goal.top, goal.figure), figures(result, goal.bottom, goal.figure)
    less = figures(result, goal.less, goal.figure) if goal.less else [0.0] * len(tops)
    ratios = [
        (top - shared) / (bottom - shared)
        for top, bottom, shared in zip(tops, bottoms, less, strict=True)
        if top and bottom and shared is not None
    ]
    return spread(ratios) if ratios else None


def memory(result: Result, setup: str, figure: str) -> list[float]:
    """KiB per worker of a setup, one value per round."""
    found: list[float] = []
    for a_round in result["rounds"]:
        workers = a_round["memory_kib"].get(setup)
        if workers:
            found.append(statistics.mean(worker[figure] for worker in workers))
    return found


def extra_memory(result: Result) -> Spread | None:
    """KiB of private memory per worker that homing's have beyond the twin that imports the same."""
    pairs = list(zip(memory(result, "H", "private"), memory(result, "M", "private"), strict=True))
    return spread([ours - twin for ours, twin in pairs]) if pairs else None


def ratio_row(result: Result, goal: Goal) -> tuple[str, ...]:
    found = ratio(result, goal)
    bound = "–" if goal.bound is None else f"{'≥' if goal.at_least else '≤'} {goal.bound:.2f}"
    if found is None:
        return goal.text, bound, "not measured", "–"
    said = verdict(found.median, goal.bound, at_least=goal.at_least)
    if goal.alike and found.low <= 1 < found.median:
        said = "no difference shown"
    return goal.text, bound, found.text(2), said


def goal_rows(result: Result) -> list[tuple[str, ...]]:
    """Goal, bound, what was measured, and whether that reaches it."""
    rows = [ratio_row(result, goal) for goal in GOALS]
    extra = extra_memory(result)
    text = "extra private memory per worker, beyond its imports"
    if extra is None:
        rows.append((text, "≤ 2.0 MiB", "not measured", "–"))
    else:
        mib = Spread(extra.median / 1024, extra.low / 1024, extra.high / 1024, extra.coverage)
        rows.append((text, "≤ 2.0 MiB", f"{mib.text(1)} MiB", verdict(extra.median, MEMORY_GOAL_KIB)))
    return rows


def goals_table(result: Result) -> str:
    return table(("goal", "bound", "median (interval)", ""), goal_rows(result))


def cells_of(result: Result) -> list[Key]:
    seen: dict[Key, None] = {}
    for a_round in result["rounds"]:
        for cell in a_round["cells"]:
            seen[(cell["setup"], cell["mode"], cell["load"])] = None
    loads, setups = list(LOADS), list(TITLES)
    return sorted(seen, key=lambda key: (loads.index(key[2]), setups.index(key[0]), list(MODES).index(key[1])))


def against_haproxy(result: Result, key: Key) -> str:
    """CPU beside HAProxy's setup under the same load; of interleaved sessions, beside the same there."""
    setup, mode, load = key
    if setup == "B":
        return "1"
    found = ratio(result, Goal("", key, ("B", "inter" if mode == "inter" else "local", load), None))
    return found.text(2) if found else "–"


def cell_row(result: Result, key: Key) -> tuple[str, ...]:
    setup, mode, load = key

    def column(figure: str, digits: int = 0, unit: float = 1) -> str:
        found = [value / unit for value in figures(result, key, figure) if value is not None]
        return spread(found).text(digits)

    def total(figure: str) -> str:
        return f"{sum(value or 0 for value in figures(result, key, figure)):.0f}"

    # Behind a proxy, and with one worker, there is no right or wrong worker.
    way = "" if setup in ("A", "A2") or (setup in ("B", "B1", "C") and mode == "local") else f", {MODES[mode]}"
    return (
        f"{setup}: {TITLES[setup]}{way}",
        column("cpu_us", 1 if LOADS[load].unit == "event" else 0),
        against_haproxy(result, key),
        column("requests_per_second"),
        column("p50_us"),
        column("p99_us"),
        column("memory_kib", 0, 1024),
        f"{total('errors')} / {total('wrong')}",
    )


def load_section(result: Result, name: str) -> str:
    load = LOADS[name]
    head = (
        "setup",
        f"CPU µs per {load.unit}",
        "÷ HAProxy's",
        f"{load.unit}s per second",
        "p50 µs",
        "p99 µs",
        "MiB, all processes",
        "errors / wrong",
    )
    rows = [cell_row(result, key) for key in cells_of(result) if key[2] == name]
    return f"### {name}: {load.title}\n\n{table(head, rows)}" if rows else ""


def memory_section(result: Result) -> str:
    titles = {**TITLES, "M": "two unrouted workers that import all that homing's workers do"}
    rows = [
        (
            f"{setup}: {titles[setup]}",
            *(
                spread([kib / 1024 for kib in memory(result, setup, figure)]).text(1)
                for figure in ("rss", "pss", "private")
            ),
        )
        for setup in titles
        if memory(result, setup, "rss")
    ]
    if not rows:
        return ""
    head = ("setup", "RSS MiB", "PSS MiB", "private MiB")
    return f"## Memory per worker, after a second of `sat`\n\n{table(head, rows)}"


def measured_section(result: Result) -> str:
    loads = [a_round["load_average_before"] for a_round in result["rounds"]]
    count = len(result["rounds"])
    interval = spread([float(i) for i in range(count)]).coverage
    return (
        f"{machine.text(result)}\n\n"
        f"{count} rounds of {result['seconds_per_cell']:g} s per cell. Medians, in brackets an interval of order "
        f"statistics that holds the true median with probability {interval:.0%}. Load average before each round: "
        f"{min(loads):.1f} to {max(loads):.1f} (a round itself leaves about 2 behind): more means that others used the "
        "machine, and that absolute times mean little."
    )


def page(result: Result) -> str:
    """`results.md`; the losing rows are in it like the others."""
    ratios = [ratio_row(result, goal) for goal in OTHER_RATIOS if ratio(result, goal)]
    parts = [
        "# What does routing cost, served where it arrives and forwarded?",
        "Made by `benchmarks/forwarding/report.py` from `rounds.json`; `question.md` says how it is measured. "
        "Do not edit: run `make bench`.",
        measured_section(result),
        *(f"Skipped: {line}." for line in result["skipped"]),
        *(f"A round that failed, and is not in the figures: {line}." for line in result.get("failed_rounds", ())),
        "## Goals",
        "CPU per request of all server processes unless a row says otherwise; ratios are formed inside each round.",
        goals_table(result),
        "## Other ratios",
        table(("ratio", "bound", "median (interval)", ""), ratios),
        "## Figures",
        "The proxies' setups have one worker each behind them, which serves what it gets. Not there because the peer cannot do "
        "it: WebSockets through the aiohttp hop, which carries HTTP requests only, and unrouted workers with a new connection "
        "per request, which the kernel gives to either. Of events, latency is from the app's making one to its arrival.",
        *(section for load in LOADS if (section := load_section(result, load))),
        memory_section(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: list[str], write: Callable[[str], object] = sys.stdout.write) -> int:
    if len(arguments) != 1:
        write("usage: python -m benchmarks.forwarding.report ROUNDS.json\n")
        return 2
    rounds = Path(arguments[0])
    rounds.with_name("results.md").write_text(page(json.loads(rounds.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
