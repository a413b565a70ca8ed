"""The planted bugs fit the source as it is, their tests exist, and (in the long run) each is caught."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from model import check
from tests.planted.bugs import Bug, Change
from tests.planted.model_bugs import (
    ALL_BUGS,
    RULES_WITHOUT_CODE,
    SAME_RULES,
    SERVER_HISTORY_BUGS,
    history_bugs,
    rules_planted,
)
from tests.planted.run import ROOT, TABLE, check_without_bugs, copy_of_tree, is_caught, promises, rows, run_tests

names = pytest.mark.parametrize("bug", [*ALL_BUGS, *SERVER_HISTORY_BUGS], ids=lambda bug: bug.name)


@pytest.fixture(scope="module")
def copies() -> dict[str, str]:
    """The text of each file that a bug changes."""
    return {
        change.path: (ROOT / change.path).read_text()
        for bug in (*ALL_BUGS, *SERVER_HISTORY_BUGS)
        for change in bug.changes
    }


@names
def test_it_can_be_planted_and_is_still_python(bug: Bug, copies: dict[str, str], tmp_path: Path) -> None:
    for path in {change.path for change in bug.changes}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(copies[path])
    for change in bug.changes:
        change.apply(tmp_path)
    for path in {change.path for change in bug.changes}:
        ast.parse((tmp_path / path).read_text())


@names
def test_its_tests_exist(bug: Bug) -> None:
    assert bug.tests
    for test in bug.tests:
        path, _, name = test.partition("[")[0].partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


def test_a_text_that_is_not_there_once_fails_loudly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one two two")
    for old in ("two", "three"):
        with pytest.raises(LookupError, match="file has"):
            Change("file", old, "new").apply(tmp_path)
    Change("file", "one", "new").apply(tmp_path)
    assert (tmp_path / "file").read_text() == "new two two"


def test_the_table_has_a_row_for_each_bug_as_it_is() -> None:
    text = TABLE.read_text()
    for row in rows(ALL_BUGS, "")[2:]:
        assert row.rpartition("|")[0].rpartition("|")[0] in text, f"run `python -m tests.planted.run --write`: {row}"
    for line in promises(ALL_BUGS):
        assert line in text, f"run `python -m tests.planted.run --write`: {line}"
    assert text.count("\n| ") == len(ALL_BUGS) + 2 + len([line for line in promises(ALL_BUGS) if line])


def test_each_promise_has_a_bug() -> None:
    broken = {promise for bug in ALL_BUGS for promise in re.findall(r"P\d|answers", bug.promise)}
    assert broken == {"P1", "P2", "P3", "P4", "P5", "P6", "answers"}


def test_each_rule_that_the_models_need_is_planted_in_the_code_where_the_code_has_it() -> None:
    needed = {f"{run.model}.{run.without}" for run in check.RUNS if run.without and run.expected != check.HOLDS}
    assert rules_planted() | set(RULES_WITHOUT_CODE) == needed
    assert not rules_planted() & set(RULES_WITHOUT_CODE)
    names = [bug.name for bug in ALL_BUGS]
    assert set(SAME_RULES.values()) <= set(names)
    assert len(set(names)) == len(names)


def test_a_copy_holds_what_the_tests_need() -> None:
    tests = sorted({test for bug in ALL_BUGS for test in bug.tests})
    with copy_of_tree() as root:
        # No assertion of theirs is run: rewriting them all would take as long as the rest.
        code, output = run_tests(root, ["--collect-only", "--assert=plain", *tests])
    assert code == 0, output


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_planted_bug_is_caught() -> None:
    check_without_bugs(ALL_BUGS)
    assert [bug.name for bug in ALL_BUGS if not is_caught(bug)] == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_histories_find_bugs_by_themselves() -> None:
    assert [bug.name for bug in history_bugs() if not is_caught(bug)] == []
