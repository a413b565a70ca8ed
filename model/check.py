"""Run the models of the ownership protocol, and compare each result with what is expected of it.

    python model/check.py            every run: minutes, up to 4 GB
    python model/check.py --small    the runs that take a moment
    python model/check.py NAME...    the runs whose names have one of these texts
    python model/check.py --story NAME    the steps that lead to the failure, as line numbers of the model

The models are `*.pml` beside this file. A rule that a model can leave out is a `#define` of it, and the environment says
which one is left out and how much happens. A run without any left out has to hold; one with a rule left out has to fail,
and by the check that is named here: a model that cannot fail proves nothing. Exit code 1: a result was another one.

Needs spin (Debian: spin) and gcc; without them it says so, with exit code 3.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
MEMORY_MB = 4000
SECONDS = 3600
DEPTH = 400_000
SMALL_TABLE, LARGE_TABLE = 18, 24  # of states, as powers of two: a large one takes a while to make
HOLDS = "holds"
MISSING = 3

RULE = re.compile(r"^#define ([A-Z_]+) +\(without==(\d+)\)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One search.

    Attributes:
        name: Unique within its model.
        without: The rule that is left out; empty: none.
        much: How much happens: variables of the model, in its `init`.
        expected: `HOLDS`, or the check that has to fail.
        small: It takes a moment.
    """

    model: str
    name: str
    expected: str = HOLDS
    without: str = ""
    much: dict[str, int] = field(default_factory=dict)
    small: bool = True


@dataclass(frozen=True)
class Result:
    found: str
    states: int
    seconds: float
    megabytes: float


def _all(model: str, runs: Iterable[tuple[str, str, str]], *, small: bool = True) -> list[Run]:
    """Runs as rows: what is expected, what happens, and the rule that is left out (or what the run is about)."""
    found = []
    rules = dict(RULE.findall((HERE / f"{model}.pml").read_text(encoding="utf-8")))
    for expected, much, name in runs:
        settings = {key: int(value) for key, value in (each.split("=") for each in much.split())}
        found.append(Run(model, name, expected, name if name in rules else "", settings, small))
    return found


RUNS: tuple[Run, ...] = (
    *_all(
        "ownership",
        [
            # No rule is left out.
            (HOLDS, "RESTORES=0 REQUESTS=2 CRASHES=0", "requests and a sweep"),
            (HOLDS, "CRASHES=0", "a request, a sweep and a restore"),
            (HOLDS, "CRASHES=0 REFUSE=1", "only starts acquire"),
            (HOLDS, "CRASHES=0 FAILS=1", "a system call fails"),
            (HOLDS, "CRASHES=0 SWEEPS=0 STOP=1", "a worker stops"),
            (HOLDS, "CRASHES=0 SWEEPS=0 START=1 FIRST=9", "a worker starts"),
            (HOLDS, "RESTORES=0 MINT=1 FIRST=9", "a named request makes a session"),
            (HOLDS, "RESTORES=0 SWEEPS=0 REQUESTS=2 CRASHES=0 PLACE=1 FIRST=9", "two starts are placed"),
            (HOLDS, "RESTORES=0 PLACE=1 FIRST=9", "a start is placed, and a worker crashes"),
            (HOLDS, "RESTORES=0 SWEEPS=0 CRASHES=0 PLACE=1 STOP=1 FIRST=9", "a start is placed, and a worker stops"),
            # A rule is left out.
            ("v_hollow", "FIRST=9 REQUESTS=2 RESTORES=0 CRASHES=0", "ACQUIRED_AFTER_THE_HANDLER"),
            ("v_split", "REQUESTS=3 RESTORES=0 CRASHES=0 ONLY=1", "HANDLED_WHERE_IT_ARRIVES"),
            ("v_hollow", "", "AWAIT_BETWEEN_LOOK_AND_COUNT"),
            ("v_bare", "", "AWAIT_INSIDE_RELEASE"),
            ("v_split", "CRASHES=0 SWEEPS=0", "GIVEN_WHILE_SERVED"),
            ("v_split", "CRASHES=0 SWEEPS=0 ONLY=1", "OPENED_AT_THE_DEADLINE"),
            ("v_stuck", "", "NO_LAST_LOOK"),
            ("v_stuck", "", "STATE_KEPT_BY_THE_GIVER"),
            ("v_two", "RESTORES=2", "TAKEN_WITHOUT_THE_LOCK"),
            ("v_lock", "CRASHES=2 REQUESTS=0 SWEEPS=0", "LOCK_SURVIVES_ITS_HOLDER"),
            ("v_gone", "", "REFUSED_IS_GONE"),
            ("v_hollow", "MINT=1 FIRST=9 RESTORES=0", "ID_LEAVES_BEFORE_ITS_RECORD"),
            ("v_two", "RESTORES=2", "TAKEN_WITHOUT_A_SECOND_LOOK"),
            ("v_bare", "COMPACTIONS=1 SWEEPS=0 REQUESTS=0", "COMPACTED_WITHOUT_THE_LOCK"),
            ("v_bare", "COMPACTIONS=1 SWEEPS=0 REQUESTS=0", "FOUND_DEAD_AFTER_THE_LOOK"),
            ("v_split", "CRASHES=0 REQUESTS=2 SWEEPS=0 ONLY=1", "DEAD_IS_GUESSED"),
            ("v_two", "START=1 FIRST=9 CRASHES=0 SWEEPS=0 ONLY=3", "LIFE_LOCKED_AFTER_START"),
            ("v_two", "STOP=1 CRASHES=0 SWEEPS=0", "LIFE_LET_GO_BEFORE_THE_LAST"),
            ("v_gone", "STOP=1 RESTORES=0 CRASHES=0 REQUESTS=2 SWEEPS=0", "SOCKET_CLOSED_BEFORE_THE_LAST"),
            ("v_lock", "", "LIFE_KEPT_BY_A_CHILD"),
            ("v_split", "CRASHES=0 REQUESTS=2 ONLY=1", "RELEASED_WHILE_SERVED"),
            ("v_stuck", "CRASHES=0 SWEEPS=0", "ABANDONED_KEEPS_THE_RECORD"),
            ("v_hollow", "", "ASK_CUT_BEFORE_ITS_ANSWER"),
            ("v_hollow", "", "SERVED_BEFORE_IT_IS_OPEN"),
            ("v_bare", "RESTORES=2 REQUESTS=0 SWEEPS=0 CRASHES=0", "GIVEN_WITHOUT_A_LOOK"),
            ("v_bare", "", "FORGOTTEN_AFTER_THE_GIVE"),
            ("v_replaced", "CRASHES=0 REQUESTS=2 SWEEPS=0 FIRST=1 ASKS=1", "NOT_COUNTED"),
            ("v_stuck", "", "FENCE_STAYS_AFTER_BUSY"),
            ("v_stuck", "FAILS=1", "FAILED_UNLINK_IS_FORGOTTEN"),
            ("v_stuck", "FAILS=1 CRASHES=0", "FAILED_GIVE_KEEPS_THE_RECORD"),
            ("v_replaced", "FIRST=1", "RESTORED_WITHOUT_DRAINING"),
        ],
    ),
    *_all(
        "rewrite",
        [
            (HOLDS, "", "two batches, cancelled"),
            ("v_replaced", "RESTORES=1 SESSIONS=1", "OPENED_THOUGH_OPEN_ALREADY"),
            ("v_replaced", "", "MEMORY_CHANGED_IN_THE_THREAD"),
            ("v_stuck", "", "CANCELLED_LEAVES_ITS_BATCH"),
            ("v_stuck", "", "FORGETS_WHAT_IT_TOOK_ON_ERROR"),
            ("v_stuck", "REWRITES=2 REQUESTS=0 SESSIONS=1", "TAKEN_WITHOUT_THE_LOCK"),
            ("v_stuck", "RESTORES=1 REQUESTS=0", "SETTLED_BY_THE_FIRST_TO_END"),
            ("v_stuck", "REQUESTS=0", "BUSY_AFTER_A_CHANGE"),
            ("v_after", "REQUESTS=0", "BATCH_AFTER_A_CANCELLATION"),
            ("v_two", "RESTORES=2 REQUESTS=0 SESSIONS=1 CANCELS=0 ONLY=3", "GIVEN_BEFORE_IT_IS_OPEN"),
        ],
    ),
    *_all(
        "path_keys",
        [
            (HOLDS, "RESTORES=1 STOPS=0 CRASHES=0", "two starts and a restore"),
            (HOLDS, "RESTORES=1 SEEDS=1 CRASHES=0", "a start, a stop and a restore"),
            (HOLDS, "THIRD=1 STOPS=0 CRASHES=0", "two starts take a dead worker's key"),
            (HOLDS, "THIRD=1 SEEDS=1 CRASHES=0 RESTORES=1 STOPS=0", "a start and a restore take a dead worker's key"),
            (HOLDS, "THIRD=2 SEEDS=1", "a start, a stop, and the death of the worker that has the key"),
            ("v_path", "THIRD=1 STOPS=0 CRASHES=0", "TAKEN_WITHOUT_A_SECOND_LOOK"),
            ("v_path", "THIRD=1 STOPS=0 CRASHES=0", "TAKEN_WITHOUT_THE_LOCK"),
            ("v_path", "THIRD=2 STOPS=0", "TAKEN_FROM_THE_LIVING"),
            ("v_path", "", "KEY_FREED_BY_THE_FIRST_CLOSE"),
            ("v_path", "", "KEPT_THOUGH_THE_KEY_IS_OTHERS"),
            ("v_path", "", "KEY_ACQUIRED_AFTER_THE_START"),
            ("v_left", "", "SESSION_KEY_NOT_UNDONE"),
            ("v_path", "RESTORES=1", "RESTORED_WITHOUT_ITS_KEY"),
            ("v_left", "RESTORES=1 CRASHES=0 STOPS=0", "GIVER_KEEPS_THE_KEY"),
            ("v_path", "RESTORES=1 CRASHES=0 STOPS=0", "RUNS_BEFORE_ALL_HAVE_COME"),
            ("v_missed", "RESTORES=1 SEEDS=1 CRASHES=0", "STOP_HANDLED_WHERE_IT_LANDS"),
        ],
    ),
    *_all(
        "ownership",
        [
            (HOLDS, "", "with a death"),
            (HOLDS, "CRASHES=0 SWEEPS=0 REQUESTS=2", "two requests and a restore"),
            (HOLDS, "REQUESTS=3 CRASHES=0 RESTORES=0", "three requests"),
            (HOLDS, "RESTORES=2 CRASHES=0 SWEEPS=0", "two restores"),
            (HOLDS, "RESTORES=2 REQUESTS=0 SWEEPS=0", "two restores and a death"),
            (HOLDS, "COMPACTIONS=1 SWEEPS=0", "a compaction"),
            (HOLDS, "MINT=1 FIRST=9", "a named request, another and a restore"),
            # Second lines: nothing fails without them.
            (HOLDS, "REQUESTS=2 CRASHES=0 SWEEPS=0", "NO_FENCE"),
            (HOLDS, "REQUESTS=2 CRASHES=0 SWEEPS=0", "MEMORY_ALONE"),
            (HOLDS, "RESTORES=2 CRASHES=0 SWEEPS=0", "GIVEN_BEFORE_IT_IS_OPEN"),
        ],
        small=False,
    ),
    *_all(
        "rewrite",
        [
            (HOLDS, "CRASHES=1 RESTORES=1 REQUESTS=0 SESSIONS=1", "a rewrite, a restore and a death"),
            (HOLDS, "RESTORES=1 SWEEPS=1 SESSIONS=1", "a rewrite, a restore, a request and a sweep"),
            (HOLDS, "REWRITES=2 SESSIONS=1", "two rewrites and a request"),
            (HOLDS, "REWRITES=2 REQUESTS=0", "two rewrites of two sessions"),
            (HOLDS, "RESTORES=1 SWEEPS=1 SESSIONS=1", "RELEASED_WHILE_TAKEN"),
        ],
        small=False,
    ),
    *_all(
        "path_keys",
        [
            (HOLDS, "", "two starts, a stop and a death"),
            (HOLDS, "THIRD=1", "two starts take a dead worker's key, a stop and a death"),
            (HOLDS, "THIRD=2", "two starts, a stop, and the death of any worker, one of which has the key"),
            (HOLDS, "THIRD=1 RESTORES=1 STOPS=0", "two starts and a restore take a dead worker's key, and a death"),
            (HOLDS, "RESTORES=1 STOPS=0", "two starts, a restore and a death"),
            (HOLDS, "RESTORES=1 CRASHES=0", "two starts, a stop and a restore"),
        ],
        small=False,
    ),
)


class MissingError(Exception):
    """What the models need is not installed."""


def check_tools() -> None:
    """Raises MissingError if spin or gcc is not there."""
    for tool, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(tool) is None:
            raise MissingError(f"{tool} is not installed (Debian: apt-get install {package}): the models are not run")


def rules_left_out(runs: Iterable[Run]) -> set[tuple[str, str]]:
    """The rules that some run leaves out, as (model, rule)."""
    return {(run.model, run.without) for run in runs if run.without}


def rules_of_models() -> set[tuple[str, str]]:
    """The rules that the models can leave out, as (model, rule)."""
    return {(path.stem, rule) for path in HERE.glob("*.pml") for rule, _ in RULE.findall(path.read_text("utf-8"))}


def build(model: str, directory: Path, *, optimized: bool = True) -> Path:
    """The verifier of a model, made in `directory`. Not optimized, it is made much sooner, and searches half as fast.

    Raises:
        subprocess.CalledProcessError: spin or gcc refuse the model; its text is on stderr.
    """
    place = directory / model
    place.mkdir()
    shutil.copy(HERE / f"{model}.pml", place)
    subprocess.run(["spin", "-a", f"{model}.pml"], cwd=place, check=True, capture_output=True, text=True)
    options = [
        "-O2" if optimized else "-O0",
        "-w",
        "-DSAFETY",
        "-DCOLLAPSE",
        "-DVECTORSZ=2048",
        f"-DMEMLIM={MEMORY_MB}",
    ]
    subprocess.run(["gcc", *options, "-o", "pan", "pan.c"], cwd=place, check=True, capture_output=True, text=True)
    return place / "pan"


def environment(run: Run) -> dict[str, str]:
    """What a verifier reads: the rule that is left out, and how much happens."""
    settings = {key: str(value) for key, value in run.much.items()}
    if run.without:
        numbers = dict(RULE.findall((HERE / f"{run.model}.pml").read_text(encoding="utf-8")))
        settings["WITHOUT"] = numbers[run.without]
    return {"PATH": os.environ["PATH"], **settings}


def search(run: Run, pan: Path, *, trail: Path | None = None) -> Result:
    """Search one run's states, in a directory of its own. `trail` is where the story of a failure goes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="homing-model-") as directory:
        try:
            done = subprocess.run(
                [str(pan), f"-m{DEPTH}", f"-w{SMALL_TABLE if run.small else LARGE_TABLE}"],
                cwd=directory,
                env=environment(run),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            output = ""
        story = Path(directory) / f"{run.model}.pml.trail"
        if trail is not None and story.exists():
            shutil.copy(story, trail)
    states = re.search(r"(\d+) states, stored", output)
    memory = re.search(r"([\d.]+)\s+total actual memory usage", output)
    return Result(
        found(output),
        int(states[1]) if states else 0,
        time.monotonic() - began,
        float(memory[1]) if memory else 0.0,
    )


def found(output: str) -> str:
    """What a search came to, from what it printed: `HOLDS`, the check that failed, or that it did not finish."""
    failed = re.search(r"^pan:1: .*?\b(v_[a-z]+)|^pan:1: (invalid end state)", output, re.MULTILINE)
    if failed:
        return failed[1] or failed[2]
    unfinished = re.search(r"max search depth too small|Search not completed|reached -DMEMLIM", output)
    if re.search(r"errors: 0$", output, re.MULTILINE) and not unfinished:
        return HOLDS
    return "unfinished"


def check(runs: Sequence[Run], *, jobs: int) -> list[tuple[Run, Result]]:
    """Search them all and print the table as they end; the results, in the order of `runs`."""
    print(f"{'model':10} {'run':44} {'expected':11} {'result':11} {'states':>11} {'seconds':>8} {'MB':>6}")
    with tempfile.TemporaryDirectory(prefix="homing-model-") as directory, ThreadPoolExecutor(jobs) as pool:
        models = list(dict.fromkeys(run.model for run in runs))
        optimized = any(not run.small for run in runs)
        built = pool.map(lambda model: build(model, Path(directory), optimized=optimized), models)
        pans = dict(zip(models, built, strict=True))

        def one(run: Run) -> tuple[Run, Result]:
            result = search(run, pans[run.model])
            mark = "" if result.found == run.expected else "  DIFFERENT"
            print(
                f"{run.model:10} {run.name:44} {run.expected:11} {result.found:11} {result.states:11,} "
                f"{result.seconds:8.1f} {result.megabytes:6.0f}{mark}",
                flush=True,
            )
            return run, result

        return list(pool.map(one, runs))


def tell(run: Run) -> None:
    """Print the steps that lead to a run's failure: the process, the line of the model, the statement."""
    with tempfile.TemporaryDirectory(prefix="homing-model-") as directory:
        pan = build(run.model, Path(directory))
        result = search(run, pan, trail=pan.parent / f"{run.model}.pml.trail")
        print(f"{run.model}: {run.name}: {result.found}")
        sys.stdout.flush()
        subprocess.run([str(pan), "-r"], cwd=pan.parent, env=environment(run), check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the models of the ownership protocol.")
    parser.add_argument("names", nargs="*", help="only runs whose names have one of these texts")
    parser.add_argument("--small", action="store_true", help="only runs that take a moment")
    parser.add_argument("--story", action="store_true", help="print the steps that lead to the failures")
    parser.add_argument("--jobs", type=int, default=2, help="searches at once (2), each of up to 4 GB")
    options = parser.parse_args(arguments)
    try:
        check_tools()
    except MissingError as error:
        print(error)
        return MISSING
    runs = [run for run in RUNS if run.small or not options.small]
    runs = [run for run in runs if not options.names or any(text in run.name for text in options.names)]
    if options.story:
        for run in runs:
            tell(run)
        return 0
    differing = [run for run, result in check(runs, jobs=options.jobs) if result.found != run.expected]
    print(f"{len(runs) - len(differing)} of {len(runs)} as expected")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
