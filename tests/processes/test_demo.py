"""`homing demo`: two real servers, side by side."""

from __future__ import annotations

import json
import subprocess

from tests.support.running import HOMING, ROOT, environment

SMALL = ("--workers", "2", "--sessions", "12", "--calls", "6")


PHASES = """\
uvicorn: starting 2 workers
homing: starting 2 workers
uvicorn: making 72 calls
homing: making 72 calls
"""


def demo(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOMING, "demo", *SMALL, *arguments],
        cwd=ROOT,
        env=environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding=encoding,
        timeout=110,
        check=False,
    )


def test_every_call_to_homing_is_right() -> None:
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == PHASES
    plain, routed = json.loads(done.stdout)
    assert (plain["server"], routed["server"]) == ("uvicorn", "homing")
    assert routed["calls"] == routed["right"] == 72
    assert routed["wrong"] == routed["lost"] == 0
    assert plain["calls"] == 72 == plain["right"] + plain["wrong"] + plain["lost"]
    # So few calls may all meet one of the plain workers; `test_packaging.py` runs the whole demo.
    assert min(plain["requests_per_second"], routed["requests_per_second"]) > 0


def test_without_a_terminal_the_table_is_plain_text() -> None:
    done = demo()
    assert done.returncode == 0, done.stderr
    assert done.stderr == PHASES
    assert "\x1b" not in done.stdout
    assert "12 sessions × 6 calls, 2 workers" in done.stdout
    for heading in ("calls", "right", "wrong data", "lost", "req/s"):
        assert heading in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_terminal_without_utf_8_gets_the_table_in_ascii() -> None:
    done = demo(encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stderr == PHASES
    assert "12 sessions x 6 calls, 2 workers" in done.stdout
