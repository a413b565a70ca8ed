"""One soak, and what it came to: `report.json`, and the page made of it.

    .venv/bin/python -m benchmarks.soak.run --seconds 60 --seed 7 [--write]

Exit code 1 if a promise was broken. Not here: the soak (`tests/soak`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from tests.soak.faults import KINDS, ROWS
from tests.soak.run import PLAYERS, soak

HERE: Final = Path(__file__).parent
MIB: Final = 1 << 20


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numbers = "| --- |" + " ---: |" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", numbers, *(f"| {' | '.join(row)} |" for row in rows)])


def figures(name: str, values: Sequence[float], unit: str) -> tuple[str, ...]:
    if not values:
        return name, "–", "–", "–", "0"
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return (
        name,
        *(f"{value:.4g} {unit}" for value in (statistics.median(ordered), p99, ordered[-1])),
        f"{len(ordered):,}",
    )


def counts(of: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, f"{count:,}") for name, count in of.items()]


def held(vitals: dict[str, int], name: str) -> str:
    if name not in vitals:
        return "–"
    return f"{vitals[name] / MIB:.1f} MiB" if name == "resident_bytes" else f"{vitals[name]:,}"


def page(result: dict[str, Any]) -> str:
    """`results.md`, from what `report.json` holds."""
    report = result["report"]
    injected = {kind: count for kind, count in sorted(report["faults"].items()) if kind in KINDS}
    clients = {kind: count for kind, count in sorted(report["faults"].items()) if kind not in KINDS}
    broken = report["broken"]
    load = " at the start, ".join(map(str, report["load_average"]))
    return "\n\n".join(
        (
            "# Does a server keep its promises under load and faults, and how quickly is it whole again?",
            "Made by `benchmarks/soak/run.py`, from `report.json`; `question.md` says how. Do not edit.",
            f"{machine.text(result)} {report['players']} clients with a session each. Load average of the machine {load} at the end.",
            f"**{len(broken)} violations** in {report['calls']:,} requests of {report['sessions']:,} sessions, in "
            f"{report['lasted_seconds']:.0f} s, with seed {report['seed']}: {report['calls'] / report['lasted_seconds']:.0f} requests and "
            f"{report['sessions'] / report['lasted_seconds']:.1f} sessions a second. {report['injected']:,} faults of the server's, "
            f"{report['in_flight']:,} of them with requests under way, and {sum(clients.values()):,} of the clients. "
            + (
                f"With 95 % confidence fewer than {report['at_most_broken']:.2%} of such faults break something (3/n)."
                if not broken
                else "What is broken: " + "; ".join(broken[:20])
            ),
            table(
                ("", "median", "p99", "max", "of"),
                [
                    (
                        "an answered request",
                        *(f"{report[name]:,} ms" for name in ("p50_ms", "p99_ms", "max_ms")),
                        f"{report['outcomes'].get('answered', 0):,}",
                    ),
                    figures(
                        "from a kill to the first *gone* for a session of that worker", report["first_gone_ms"], "ms"
                    ),
                    figures("from the end of a worker to the next that serves", report["replaced_seconds"], "s"),
                ],
            )
            + "\n\nThe greatest times are of requests whose worker was stopped, or stood still, on purpose.",
            f"From the last fault to new sessions on all workers: {report['full_service_seconds']:.1f} s. From the end of the "
            f"load until everything was back: {report['at_rest_seconds']:.1f} s, of which connections between workers take "
            "15 s, since they are kept so long.",
            table(
                ("the most that a worker had", "start", "peak", "end"),
                [
                    (title, *(held(report[when], name) for when in ("start", "peak", "end")))
                    for name, title in {
                        "fds": "descriptors",
                        "tasks": "tasks",
                        "resident_bytes": "memory",
                        "records": "owner records, in all",
                        "records of dead workers": "of dead workers, which stay",
                    }.items()
                ],
            ),
            table(
                ("fault of the server's", "row", "times"),
                [(kind, ROWS[kind], f"{count:,}") for kind, count in injected.items()],
            ),
            table(
                ("what clients did", "row", "times"),
                [(kind, ROWS[kind], f"{count:,}") for kind, count in clients.items()],
            ),
            table(("row of `docs/design/faults.md`", "met"), counts(report["rows"])),
            table(("answer", "times"), counts(report["statuses"]))
            + "\n\n`none`: the client had left, or the connection ended.",
            table(("what a call came to", "times"), counts(report["outcomes"])),
            "Not raised on this machine: " + (", ".join(report["not_raised"]) or "none") + ".",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long load and faults last")
    parser.add_argument("--seed", type=int, default=None, help="what the clients do, and which faults come when")
    parser.add_argument("--players", type=int, default=PLAYERS, help="how many clients have a session each")
    parser.add_argument("--write", action="store_true", help="write report.json and results.md")
    parser.add_argument("--out", type=Path, default=HERE, help="where they go")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"soak: seed {seed}", file=sys.stderr, flush=True)
    report = asyncio.run(soak(options.seconds, seed, options.players))
    print(report)
    print("\n".join(report.log), file=sys.stderr)
    if options.write:
        result = {**machine.described(), "report": {**asdict(report), "log": []}}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "results.md").write_text(page(result) + "\n")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
