"""The models of the ownership protocol: those that keep every rule hold, and each rule that is left out breaks one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from model import check

CHECK = Path(check.__file__)

needs_spin = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")),
    reason="spin or gcc is not installed (Debian: apt-get install spin gcc): the models are not run",
)


@needs_spin
@pytest.mark.timeout(300)
def test_the_small_runs_come_out_as_expected() -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK), "--small"], capture_output=True, text=True, timeout=280, check=False
    )
    small = sum(run.small for run in check.RUNS)
    assert done.stdout.splitlines()[-1:] == [f"{small} of {small} as expected"], done.stdout + done.stderr
    assert done.returncode == 0


def test_each_rule_of_the_models_is_left_out_by_a_run() -> None:
    assert check.rules_left_out(check.RUNS) == check.rules_of_models()
    assert len({(run.model, run.name, run.small) for run in check.RUNS}) == len(check.RUNS)


def test_each_check_of_the_models_is_seen_to_fail() -> None:
    failing = {(run.model, run.expected) for run in check.RUNS if run.expected != check.HOLDS}
    assert {expected for model, expected in failing if model == "ownership"} == {
        "v_split",
        "v_hollow",
        "v_two",
        "v_bare",
        "v_gone",
        "v_stuck",
        "v_lock",
        "v_replaced",
    }


@needs_spin
@pytest.mark.parametrize(
    ("without", "expected"), [("", "v_bare"), ("LIFE_KEPT_BY_A_CHILD", check.HOLDS)], ids=["holds", "fails"]
)
def test_a_result_that_was_not_expected_is_an_error(
    without: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    much = {"REQUESTS": 0, "SWEEPS": 0, "RESTORES": 0}
    monkeypatch.setattr(check, "RUNS", (check.Run("ownership", "a run", expected, without, much),))
    assert check.main(["--small"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("State-vector 100 byte, depth reached 281, errors: 0\n 7 states, stored", check.HOLDS),
        ("pan:1: assertion violated ( !(v_split)||((only!=0)&&(only!=1))) (at depth 9)\n errors: 1", "v_split"),
        ("pan:1: invalid end state (at depth 54)\n errors: 1", "invalid end state"),
        ("error: max search depth too small\n errors: 0", "unfinished"),
        ("pan: reached -DMEMLIM bound\n errors: 0", "unfinished"),
        ("", "unfinished"),
    ],
)
def test_what_a_search_printed_is_read_as_what_it_came_to(output: str, result: str) -> None:
    assert check.found(output) == result


def test_without_spin_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert check.main([]) == check.MISSING
    assert "spin is not installed" in capsys.readouterr().out
