"""`homing rl demo`: four servers, and rollouts through them."""

from __future__ import annotations

import subprocess

from tests.support.running import HOMING, ROOT, environment

SMALL = ("--workers", "2", "--episodes", "12")


def demo() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOMING, "rl", "demo", *SMALL],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_every_verdict_is_right_and_the_table_says_so() -> None:
    done = demo()
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if "│" in line]
    table = {name.strip(): value.strip() for name, value in rows}
    assert (table["rollouts done"], table["valid samples"], table["verdicts right"]) == ("12 of 12", "12", "12")
    assert (table["mean reward of these"], table["masked"]) == ("0.8333", "0")
    assert done.stderr.splitlines()[-1].startswith("rollouts: 12 of 12 done")
