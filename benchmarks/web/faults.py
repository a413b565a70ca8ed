"""`python -m benchmarks.web.faults`: makes `faults.md` of the fault runs' reports in `faults/`, one JSON file per slice."""

from __future__ import annotations

import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import processor
from benchmarks.spread import table

HERE: Final = Path(__file__).parent
REPORTS: Final = HERE / "faults"

SUBJECTS: Final = {
    "chromium": "MiniWoB's `click-test` in real Chromium",
    "fakes": "fakes that are processes",
}
_CALLS: Final = ("seed", "step", "evaluate", "verify", "close")

INTRODUCTION: Final = """# Browser sessions under faults

Made by `python -m benchmarks.web.faults` from the reports in `faults/`, which `make soak-web` writes (`tests/soak_web`; `SEED=` repeats
what clients and faults do). Two workers of a real server; clients that repeat, double, hang up and give up; renderers, browsers, zygotes,
GPU and network processes, drivers and workers killed (60 %) or stopped (40 %, browsers' for good); providers and backends that fail, hang
and come late when a session asks for it. At the end of each slice every session is closed, and nothing may be left: no entry
in a ledger, no process of a browser beyond those kept ready (none at all after the server's end, by mark and by the session of
processes that each browser led), no context, folder, lease, lock, ticket or thread.

A violation is: something left; a step lost or done twice; an unmasked verdict that is not what the page showed; two verdicts; a failure
without a kind of the closed set; a reply that is none; a call back more than 250 ms after its limit. A limit is the sum of the waits that
the call can have by the server's settings. Calls that are late as measured are held against how long the workers' and the client's threads
could run and were not let (the kernel counts it: `tests/soak_web/control.py`) and were stopped by the run itself; both figures are below.
What is *asked of the server* is counted when a client asks for it: a session that ends before does not meet all of it.
"""


def _reports(subject: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(REPORTS.glob(f"{subject}-*.json"))]


def bounds() -> list[str]:
    """A line for each subject: how many faults, what they led to, and what that says of the next one."""
    lines = []
    for subject, name in SUBJECTS.items():
        reports = _reports(subject)
        count = sum(sum(report["faults"].values()) for report in reports)
        bad = sum(len(report["violations"]) + len(report["left"]) for report in reports)
        if reports:
            lines.append(
                f"- {name}: {count:,} faults in {sum(report['sessions'] for report in reports):,} sessions, {bad} violations"
                + (f"; below {300 / count:.2f} % per fault with 95 % confidence (3/n)." if not bad else ".")
            )
    return lines


def main() -> None:
    parts = [INTRODUCTION]
    for subject, name in SUBJECTS.items():
        reports = _reports(subject)
        if reports:
            parts.append(_part(name, reports))
    parts.append(f"{processor()}, Linux {platform.release()}, Python {platform.python_version()}.\n")
    (HERE / "faults.md").write_text("\n".join(parts), "utf-8")


def _part(name: str, reports: list[dict[str, Any]]) -> str:
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    for report in reports:
        faults.update(report["faults"])
        outcomes.update(report["outcomes"])
        calls.update(report["calls"])
        for call, over in report["slowest"].items():
            slowest[call] = max(over, slowest.get(call, over))
    count = faults.total()
    violations = [each for report in reports for each in report["violations"]]
    left = [each for report in reports for each in report["left"]]
    late = [each for report in reports for each in report["late"]]
    bad = len(violations) + len(left)
    seeds = [report["seed"] for report in reports]
    shown_seeds = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    loads = [report["load"] for report in reports if "load" in report]
    lines = [
        f"## {count:,} faults in {sum(report['sessions'] for report in reports):,} sessions: {name}",
        "",
        f"{len(reports)} slices (seeds {shown_seeds}), {sum(report['seconds'] for report in reports) / 60:.0f} minutes"
        + (f", load average {min(loads):.0f} to {max(loads):.0f} on {reports[0]['cores']} cores." if loads else "."),
        "",
        f"**{len(violations)} violations, {len(left)} left, {len(late)} of {calls.total():,} calls late as measured.**"
        + (f" Violations per fault: below {300 / count:.2f} % with 95 % confidence (3/n)." if not bad else ""),
        "",
        table(("fault", "times"), [(kind, str(times)) for kind, times in faults.most_common()]),
        "",
        table(
            ("call", "times", "the slowest, seconds over its limit"),
            [(call, str(calls[call]), f"{slowest[call]:+.2f}") for call in _CALLS if call in calls],
        ),
        "",
        table(("outcome", "times"), [(outcome, str(times)) for outcome, times in outcomes.most_common()]),
        "",
    ]
    lines += [f"- {each}" for each in (*violations, *left, *late)[:40]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
