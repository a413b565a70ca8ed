"""`make bench` works: one very short round of the real harness, real servers and the compiled load generator.

Nothing here asserts on time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks import goals
from benchmarks.forwarding import report
from benchmarks.forwarding.loads import LOADS
from benchmarks.forwarding.setups import SETUPS, Setup, serving
from benchmarks.instructions import ways
from benchmarks.load import Load, build_loader
from benchmarks.spread import spread

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler (cc)")


def setup(key: str) -> Setup:
    return next(setup for setup in SETUPS if setup.key == key)


def test_one_short_round_measures_homing_and_makes_the_page(tmp_path: Path) -> None:
    options = ["--rounds=1", "--seconds=0.1", "--setups=A,H,P", "--json", f"--out={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.forwarding.run", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "rounds.json").read_text())
    cells = {(c["setup"], c["mode"], c["load"]): c for c in result["rounds"][0]["cells"]}
    modes = {("H", mode) for mode in ("local", "remote", "inter", "any")} | {("P", "placed")}
    assert {key[:2] for key in cells} == {("A", "local"), *modes}
    assert {key[2] for key in cells} == set(LOADS)
    for cell in cells.values():
        assert (cell["errors"], cell["wrong"]) == (0, 0)
        assert cell["replies"] > 0
    assert cells["H", "local", "sat"]["crossed"] == 0
    assert cells["H", "remote", "sat"]["crossed"] == cells["H", "remote", "sat"]["replies"]
    assert "served where it arrives" in (tmp_path / "results.md").read_text()


def test_the_loader_sees_every_reply_of_a_worker_that_does_not_hold_the_session() -> None:
    with tempfile.TemporaryDirectory(prefix="homing-bench-") as scratch, serving(setup("A2"), Path(scratch)) as server:
        for kind, body_bytes in (("step", 0), ("echo", 100), ("events", 0), ("websocket", 100)):
            load = Load("remote", connections=4, seconds=0.2, workers=2, kind=kind, body_bytes=body_bytes)
            result = build_loader().run(server.port, load, server.pids())
            assert result["replies"] > 0, kind
            assert result["wrong"] == result["replies"], (kind, result)


def test_bodies_pass_a_forwarder_and_every_goal_that_was_measured_is_on_its_page(tmp_path: Path) -> None:
    options = ["--rounds=1", "--mib=0.5", f"--out={tmp_path / 'bodies'}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bodies.run", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [measured] = json.loads((tmp_path / "bodies" / "rounds.json").read_text())["rounds"]
    assert all(measured[way]["mib_per_second"] > 0 for way in ("upload", "download"))
    shutil.copytree(ROOT / "benchmarks" / "owners", tmp_path / "owners")
    page = goals.page(tmp_path)
    for way in ("upload", "download"):
        assert f"0.5 MiB on each of 20 streams, {way}: extra memory in the forwarder per stream" in page
    assert "acquire + release of a session, tmpfs" in page
    assert "## `forwarding/rounds.json`\n\nNot measured" in page


def test_an_interval_of_a_median_covers_95_percent_where_enough_rounds_allow_it() -> None:
    fifteen = spread([float(i) for i in range(15)])
    assert (fifteen.median, fifteen.low, fifteen.high) == (7, 3, 11)
    assert fifteen.coverage >= 0.95
    five = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (five.low, five.high) == (1, 5)
    assert five.coverage < 0.95


def test_a_ratio_is_formed_inside_each_round() -> None:
    def cell(name: str, mode: str, cpu: float) -> dict[str, object]:
        return {"setup": name, "mode": mode, "load": "sat", "replies": 1, "cpu_us": cpu}

    rounds = [{"cells": [cell("H", "local", 100 * i), cell("A2", "local", 50 * i)]} for i in (1, 9, 2)]
    goal = report.Goal("", ("H", "local", "sat"), ("A2", "local", "sat"), None)
    found = report.ratio({"rounds": rounds}, goal)
    assert found is not None
    assert (found.median, found.low, found.high) == (2, 2, 2)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([0.97] * 9, "reached"),
        ([0.9] * 4 + [1.01] + [1.1] * 4, "no difference shown"),
        ([0.9] + [1.01] * 8, "**missed**"),
    ],
)
def test_what_ought_to_cost_the_same_is_missed_only_if_the_interval_shows_it(ratios: list[float], said: str) -> None:
    def cell(name: str, cpu: float) -> dict[str, object]:
        return {"setup": name, "mode": "inter", "load": "sat", "replies": 1, "cpu_us": cpu}

    rounds = [{"cells": [cell("H", 100 * ratio), cell("H0", 100)]} for ratio in ratios]
    goal = next(each for each in report.GOALS if each.alike)
    assert report.ratio_row({"rounds": rounds}, goal)[-1] == said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_short_round_measures_steps_of_environments_and_makes_the_page(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rl.run", "--rounds=1", "--seconds=0.3", f"--out={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "results.md").read_text()
    assert "KiB per idle session beside the environment" in page
    (cells,) = json.loads((tmp_path / "rounds.json").read_text())["rounds"]
    assert all(cell["steps_per_second"] > 0 for cell in cells.values())


@pytest.mark.parametrize("parts", [(), ("row", "route", "spans", "look")], ids=["nothing", "everything"])
def test_the_loop_whose_instructions_are_counted_serves_every_hit(parts: tuple[str, ...]) -> None:
    """Without callgrind: the loop itself asserts that each hit was served here, and by the app."""
    subprocess.run(
        [sys.executable, "-m", "benchmarks.instructions.loop", "2000", *parts], cwd=ROOT, timeout=110, check=True
    )


@pytest.mark.parametrize("way", ways.WAYS)
def test_every_way_whose_instructions_are_counted_answers_rightly(way: str) -> None:
    """Without callgrind: each reply is looked at, and a forwarded request must have been forwarded."""
    subprocess.run(
        [sys.executable, "-m", "benchmarks.instructions.ways", "--serve", way], cwd=ROOT, timeout=110, check=True
    )
