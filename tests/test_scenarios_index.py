"""`tests/scenarios.md` names, for each scenario of parts A to C, tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "tests" / "scenarios.md"

# The numbers of the source, which has gaps: what is missing there is played by no public report.
SCENARIOS = {
    "A": (1, 2, 3, 5, 6, 7, 8, 10),
    "B": (11, 14, 15, 17, 18),
    "C": (19, 20, 22, 25, 27, 28, 29, 32, 33, 34, 35, 36, 38, 39, 40),
}
TO_COME = "(to come)"


def rows() -> dict[int, str]:
    found = re.findall(r"^\| (\d+)\. [^|]+ \| ([^|]+) \|$", INDEX.read_text(), re.MULTILINE)
    assert len(found) == len({number for number, _ in found}), "a scenario has two rows"
    return {int(number): shown for number, shown in found}


def named_tests(shown: str) -> list[tuple[Path, str]]:
    return [(ROOT / path, name) for path, name in re.findall(r"`([\w/.]+\.py)::(\w+)`", shown)]


def names_in(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)}


def test_every_scenario_has_a_row() -> None:
    expected = {number for numbers in SCENARIOS.values() for number in numbers}
    assert set(rows()) == expected


@pytest.mark.parametrize("number", sorted(number for numbers in SCENARIOS.values() for number in numbers))
def test_the_tests_named_for_a_scenario_exist(number: int) -> None:
    shown = rows().get(number, TO_COME)
    if shown == TO_COME:
        pytest.fail(f"scenario {number} is shown by no test yet: name one in {INDEX.relative_to(ROOT)}")
    named = named_tests(shown)
    assert named, f"row {number} names no test as `path.py::name`"
    for path, name in named:
        assert path.is_file(), f"{path} does not exist"
        assert name in names_in(path), f"there is no {name} in {path}"
