"""`THREAT_MODEL.md`, `docs/design/faults.md` and `docs/design/web-scenarios.md`: each row names tests that exist, or has a dated waiver with a reason."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THREATS = ROOT / "THREAT_MODEL.md"
FAULTS = ROOT / "docs" / "design" / "faults.md"
SCENARIOS = ROOT / "docs" / "design" / "web-scenarios.md"
WAIVER = re.compile(r"\*\*waiver \d{4}-\d\d-\d\d\*\*: .{40,}")
LONGEST_SHOWN = 120


def rows(page: Path) -> dict[str, str]:
    """The last column of each row, by the first."""
    found = re.findall(r"^\| ([TFW]\d*[a-z]?) \|.*\| ([^|]+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == len({number for number, _ in found}), f"{page.name} has a row twice"
    return dict(found)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def wrong_with(shown: str) -> list[str]:
    """What is wrong with the last column of a row; nothing if it shows what it should."""
    if WAIVER.search(shown):
        return []
    named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", shown)
    wrong = [] if named else [f"it names no test, and has no waiver: {shown[:LONGEST_SHOWN]}"]
    for name, test in named:
        path = ROOT / name
        if not path.is_file():
            wrong.append(f"{name} does not exist")
        elif not test.startswith("test_") or test not in names_in(path):
            wrong.append(f"there is no test {test} in {name}")
    return wrong


def test_every_threat_and_every_fault_has_a_row() -> None:
    assert {f"T{number}" for number in range(1, 45)} <= set(rows(THREATS))
    assert len(rows(SCENARIOS)) >= 26
    assert set(rows(FAULTS)) == {f"F{number}" for number in (*range(1, 34), 39, 40)}


@pytest.mark.parametrize("page", [THREATS, FAULTS, SCENARIOS], ids=["threats", "faults", "web-scenarios"])
def test_every_row_names_tests_that_exist_or_a_dated_waiver(page: Path) -> None:
    wrong = {number: found for number, shown in rows(page).items() if (found := wrong_with(shown))}
    assert not wrong, f"{page.name}: {wrong}"


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "soak",
        "`tests/no_such_file.py::test_x`",
        "`tests/test_threats_and_faults.py::test_that_is_not_there`",
        "`tests/test_threats_and_faults.py::rows`",
        "**waiver**: nobody has found the time to write this test so far, which is a pity",
        "**waiver 2026-11-30**: later",
    ],
)
def test_a_row_that_shows_nothing_is_seen(shown: str) -> None:
    assert wrong_with(shown)
