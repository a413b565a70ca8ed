from __future__ import annotations

import os
import time

import pytest
from tests.soak_web.control import Control
from tests.soak_web.oracle import Oracle
from tests.soak_web.run import CHROMIUM, fault_run
from tests.support.chromium import require_chromium


@pytest.mark.timeout(240)
def test_150_seeded_faults_leave_nothing_and_no_fault_is_a_reward() -> None:
    # The limits are held to the letter on virtual time; here the machine may be busy with other tests.
    report = fault_run(seed=5, faults=150, players=6, slack_seconds=10.0, max_seconds=120)
    text = "\n".join(report.lines())
    assert report.violations == [], text
    assert report.left == [], text
    assert report.fault_count >= 150, text
    assert report.sessions >= 20, text
    assert report.outcomes["ok"] > 100, text


def test_the_oracle_sees_each_kind_of_violation() -> None:
    oracle = Oracle()
    oracle.stepped("s", 2, {"reward": 1.0})
    oracle.judged("s", 2, {"reward": 0.0})
    oracle.judged_again("s", {"evidence": ["a"]}, {"evidence": ["b"]})
    oracle.verified("s", 2, {"mask_sample": False, "reward": 0.0})
    oracle.verified("s", 2, {"mask_sample": True, "reward": 0.0, "failure_kind": None})
    oracle.returned("step", 3.0, 2.0, "ok")
    oracle.returned("step", 1.0, 2.0, "no answer")
    assert len(oracle.violations) == 7
    oracle.verified("s", 2, {"mask_sample": True, "reward": 0.0, "failure_kind": "session_lost"})
    oracle.returned("step", 2.2, 2.0, "session_lost")
    assert (len(oracle.violations), len(oracle.late)) == (7, 1)
    # What the machine accounts for is late as measured, and no violation; what it does not is one.
    oracle.returned("step", 5.0, 2.0, "ok", machine_seconds=2.8)
    assert (len(oracle.violations), len(oracle.late)) == (7, 2)
    oracle.returned("step", 5.0, 2.0, "ok", machine_seconds=2.7)
    assert (len(oracle.violations), len(oracle.late)) == (8, 3)


def test_the_control_counts_what_the_run_itself_has_held_within_a_call_and_no_more() -> None:
    control = Control(lambda: [os.getpid()])
    then = control.now()
    before = control.late_since(then)
    control.stopped(then.at - 10.0, then.at)
    control.stopped(then.at - 1.0, then.at + 0.0)
    assert control.late_since(then) - before < 5.0  # none of it was within the call
    control.stopped(then.at - 5.0, then.at + 1000.0)
    late = control.late_since(then)
    assert late >= time.monotonic() - then.at - 0.1  # held since the call began


@pytest.mark.timeout(400)
@pytest.mark.parametrize("faults", [20, pytest.param(150, marks=pytest.mark.long)])
def test_faults_in_real_browsers_leave_nothing_and_none_is_a_reward(faults: int) -> None:
    require_chromium()
    report = fault_run(seed=3, faults=faults, subject=CHROMIUM, players=4, slack_seconds=20.0, max_seconds=240)
    text = "\n".join(report.lines())
    assert report.violations == [], text
    assert report.left == [], text
    assert report.fault_count >= faults, text
