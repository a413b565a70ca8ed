"""Counts the instructions of a local hit with and without what watches it, under callgrind; writes `rounds.json` and `results.md`.

`question.md` says what is measured and why. Instructions do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.instructions.loop import PARTS

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent

HITS: Final = 4000
GOAL_PERCENT: Final = 2.0

SETUPS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("nothing", ()),
    *((part, (part,)) for part in PARTS),
    ("everything", PARTS),
)


def compiled(folder: Path) -> Path:
    """What tells callgrind when to count. Needs a C compiler, and valgrind's header (Debian: in the package valgrind)."""
    library = folder / "count.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "count.c")]
    subprocess.run(command, check=True)
    return library


def per_hit(parts: tuple[str, ...], source: Path, library: Path) -> float:
    """Instructions of one hit. Only the hits are counted: nothing of starting up and shutting down."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{source / 'src'}{os.pathsep}{ROOT}",
            "PYTHONHASHSEED": "0",
            "COUNT_LIBRARY": str(library),
        }
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={scratch}/out"]
        command += [sys.executable, "-m", "benchmarks.instructions.loop", str(HITS), *parts]
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, check=False, start_new_session=True
        )
        collected = re.search(r"Collected : (\d+)", done.stderr)
        if done.returncode or collected is None:
            raise SystemExit(f"the loop failed under valgrind:\n{done.stderr[-3000:]}")
        return int(collected[1]) / HITS


@contextlib.contextmanager
def checked_out(revision: str | None) -> Iterator[Path]:
    """The tree of a revision, to compare with; None: this one."""
    if revision is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), revision], check=True, capture_output=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


def measure(against: str | None, jobs: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        checked_out(against) as before,
        ThreadPoolExecutor(jobs) as threads,
    ):
        library = compiled(Path(folder))
        found = {name: threads.submit(per_hit, parts, ROOT, library) for name, parts in SETUPS}
        if against is not None:
            found["before"] = threads.submit(per_hit, (), before, library)
        counted = {name: round(future.result(), 1) for name, future in found.items()}
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {**machine.described(valgrind=valgrind), "hits": HITS, "against": against, "instructions": counted}


_SAYS: Final = {
    "nothing": "nothing switched on",
    "row": "the worker writes its figures (always, under `homing run`)",
    "route": "`--metrics-route`",
    "spans": "OpenTelemetry's API is installed",
    "look": "somebody looks at the dashboard",
    "place": "new sessions are placed (`--place balanced`, the default)",
    "everything": "all of these",
}


def text(result: dict[str, Any]) -> str:
    counted = result["instructions"]
    base = counted["nothing"]
    more = 100 * (counted["everything"] / base - 1)
    lines = [
        "# Instructions of a local hit",
        "",
        "Made by `make bench-instructions`; the question is in `question.md`, the counts are in `rounds.json`.",
        "",
        machine.text(result),
        "",
        "| switched on | instructions per hit | of nothing |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {_SAYS[name]} | {counted[name]:,.0f} | {counted[name] / base:.4f} |" for name, _ in SETUPS]
    if "before" in counted:
        ratio = base / counted["before"]
        lines.append(f"| nothing, at {result['against']} | {counted['before']:,.0f} | {1 / ratio:.4f} |")
    verdict = "holds" if more <= GOAL_PERCENT else "does not hold"
    lines += ["", f"Everything adds {more:.2f} %; the goal, at most {GOAL_PERCENT:g} %, {verdict}.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions.run", description=__doc__)
    parser.add_argument("--against", help="a revision whose hits, with nothing switched on, are counted too")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    options = parser.parse_args()
    if missing := [each for each in ("valgrind", "cc") if shutil.which(each) is None]:
        print(
            f"instructions: skipped, since there is no {' and no '.join(missing)} (Debian: apt-get install valgrind gcc)"
        )
        return 0
    result = measure(options.against, options.jobs)
    (HERE / "rounds.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = text(result)
    (HERE / "results.md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
