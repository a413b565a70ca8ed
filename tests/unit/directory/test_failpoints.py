"""Failpoints: off unless a test sets them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from homing.directory import failpoints
from homing.directory.failpoints import FAILPOINTS_ENV, failpoint, from_environment, hit


def test_they_are_off() -> None:
    assert failpoints.on is None
    hit("lock.held")


def test_one_is_on_inside_its_block_and_leaves_others_alone() -> None:
    seen: list[str] = []
    with failpoint("lock.held", lambda: seen.append("outer")), failpoint("give.fenced", lambda: seen.append("inner")):
        hit("lock.held")
        hit("give.fenced")
        hit("acquire.after_symlink")
    assert seen == ["outer", "inner"]
    assert failpoints.on is None


@pytest.mark.parametrize("text", ["no.such.point=kill", "lock.held=explode", "lock.held", "lock.held=kill@x"])
def test_a_mistake_is_no_silent_nothing(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says another thing
        from_environment(text)


@pytest.mark.parametrize(
    ("text", "survives"), [("", 3), ("lock.held=kill", 0), ("give.fenced=kill,lock.held=kill@3", 2)]
)
def test_a_process_takes_them_from_its_environment(text: str, survives: int) -> None:
    code = (
        "from homing.directory import failpoints\n"
        "for _ in range(3):\n"
        "    if failpoints.on is not None: failpoints.hit('lock.held')\n"
        "    print('alive', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={FAILPOINTS_ENV: text}, check=False, capture_output=True)
    assert done.stdout.count(b"alive") == survives
    assert done.returncode == (0 if survives == 3 else -signal.SIGKILL)
