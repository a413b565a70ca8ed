"""`python -m tests.planted.run`: plant each bug in a copy of the tree, run its tests there, and say which were caught.

First the tests run in a copy without any bug: they have to pass, or a failure would prove nothing. Exit code 1 if a bug
survives. With `--write`, `docs/design/planted-bugs.md` gets the table, with the commit that it was proved on.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.planted.bugs import Bug
from tests.planted.model_bugs import ALL_BUGS, CLASSICS, SAME_RULES, history_bugs

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = ROOT / "docs" / "design" / "planted-bugs.md"
COPIED: Final = ("src", "tests", "benchmarks", "examples", "model", "docs", "pyproject.toml")
TESTS_FAILED: Final = 1
"""pytest's exit code when tests ran and failed; any other says that they did not run."""
TEST_SECONDS: Final = 30
RUN_SECONDS: Final = 900.0
BUG_SECONDS: Final = 150.0

_BEGIN, _END = "<!-- table -->", "<!-- end of table -->"


class PlantingError(Exception):
    """The tests of a bug could not be run, so nothing is known of it."""


@contextmanager
def copy_of_tree() -> Iterator[Path]:
    """The source and the tests, in a directory of their own."""
    with tempfile.TemporaryDirectory(prefix="homing-planted-") as directory:
        for name in COPIED:
            source, copy = ROOT / name, Path(directory) / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        yield Path(directory)


def run_tests(
    root: Path, tests: Sequence[str], *, seconds: float = RUN_SECONDS, test_seconds: float = TEST_SECONDS
) -> tuple[int, str]:
    """pytest over these tests (or with these options), in that tree and of its source: its exit code, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import homing; print(homing.__file__)"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if not found.startswith(str(root)):
        raise PlantingError(f"the tests would run with {found}")
    # The first failure is enough. A bug may also make a test, or what comes after it, wait for ever: "thread" then ends the
    # process, with the exit code of a failure.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        f"--timeout={test_seconds:g}",
        "--timeout-method=thread",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # With a bug, even what follows a failed test may wait for ever.
            os.killpg(process.pid, signal.SIGKILL)
            return TESTS_FAILED, f"the tests did not end in {seconds} s"
    return process.returncode, output


def is_caught(bug: Bug, test_seconds: float = TEST_SECONDS) -> bool:
    """Whether a test of the bug fails once it is planted.

    Raises:
        PlantingError: the tests did not run.
        LookupError: the source has changed, and the bug cannot be planted.
    """
    with copy_of_tree() as root:
        for change in bug.changes:
            change.apply(root)
        code, output = run_tests(
            root,
            bug.tests,
            seconds=RUN_SECONDS if bug in history_bugs() else max(BUG_SECONDS, 2 * test_seconds),
            test_seconds=test_seconds,
        )
    if code not in (0, TESTS_FAILED):
        raise PlantingError(f"{bug.name}: pytest's exit code is {code}\n{output}")
    return code == TESTS_FAILED


def check_without_bugs(bugs: Sequence[Bug], test_seconds: float = TEST_SECONDS) -> None:
    """All their tests pass where nothing is planted.

    Raises:
        PlantingError: they do not.
    """
    with copy_of_tree() as root:
        code, output = run_tests(root, sorted({test for bug in bugs for test in bug.tests}), test_seconds=test_seconds)
    if code:
        raise PlantingError(f"the tests fail without any bug:\n{output}")


def rows(bugs: Sequence[Bug], proved: str, before: Mapping[str, str] | None = None) -> list[str]:
    """The table in Markdown: one row for each bug, with the commit that it was proved on.

    Args:
        before: By name, the commit of those that were proved earlier.
    """
    earlier = before or {}
    lines = [
        "| planted bug | breaks | leaves out, of the models | caught by | last proved |",
        "| --- | --- | --- | --- | --- |",
    ]
    for bug in bugs:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in bug.tests)
        rules = [bug.rule] if bug.rule else [rule for rule, name in SAME_RULES.items() if name == bug.name]
        left_out = ", ".join(f"`{rule}`" for rule in rules)
        lines.append(f"| {bug.name} | {bug.promise} | {left_out} | {tests} | {earlier.get(bug.name, proved)} |")
    return lines


def promises(bugs: Sequence[Bug]) -> list[str]:
    """A table of how many bugs break each promise, and which; and one of the mistakes that many have made."""
    broken: dict[str, list[int]] = {}
    for number, bug in enumerate(bugs, 1):
        for promise in bug.promise.split(", "):
            broken.setdefault(promise, []).append(number)
    lines = ["| promise | planted | rows below |", "| --- | --- | --- |"]
    lines += [f"| {each} | {len(of)} | {', '.join(map(str, of))} |" for each, of in sorted(broken.items())]
    numbers = {bug.name: number for number, bug in enumerate(bugs, 1)}
    lines += ["", "| found by histories alone | breaks |", "| --- | --- |"]
    lines += [f"| {bug.name} | {bug.promise} |" for bug in history_bugs()]
    lines += ["", "| a known mistake | row below |", "| --- | --- |"]
    lines += [f"| {mistake} | {numbers[name]}: {name} |" for mistake, name in CLASSICS.items()]
    return lines


def write_table(proved: str, bugs: Sequence[Bug]) -> None:
    """Renew the table: these bugs were proved now, the others when it says, or never."""
    text = TABLE.read_text(encoding="utf-8")
    before = {found[1]: found[2] for found in re.finditer(r"^\| ([^|]+) \|.*\| ([0-9a-f]{7,}) \|$", text, re.MULTILINE)}
    proved_now = {bug.name for bug in bugs}
    before = {bug.name: before.get(bug.name, "never") for bug in ALL_BUGS if bug.name not in proved_now}
    table = "\n".join([_BEGIN, "", *promises(ALL_BUGS), "", *rows(ALL_BUGS, proved, before), "", _END])
    TABLE.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted.run", description=__doc__)
    parser.add_argument("--only", default="", help="only bugs whose name, or a file that they change, has this text")
    parser.add_argument("--write", action="store_true", help="write the table, if every bug was caught")
    parser.add_argument(
        "--histories", action="store_true", help="the bugs that the state machines have to find by themselves"
    )
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=TEST_SECONDS,
        help="a test that takes longer has failed: more on a busy machine",
    )
    options = parser.parse_args()
    bugs = [
        bug
        for bug in (history_bugs() if options.histories else ALL_BUGS)
        if options.only in bug.name or any(options.only in change.path for change in bug.changes)
    ]
    check_without_bugs(bugs, options.test_seconds)
    survivors = 0
    for number, bug in enumerate(bugs, 1):
        caught = is_caught(bug, options.test_seconds)
        survivors += not caught
        print(f"{number:2} {'caught  ' if caught else 'SURVIVES'} {bug.promise:8} {bug.name}", flush=True)
        for test in bug.tests:
            print(f"            {test}", flush=True)
    print(f"{len(bugs) - survivors} of {len(bugs)} planted bugs were caught")
    if options.write and not survivors and not options.histories:
        write_table(commit(), bugs)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
