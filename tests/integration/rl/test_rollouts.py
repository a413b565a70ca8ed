"""`homing rl rollouts` as a process, against servers in this one: what it keeps, goes on with, tries again and gives up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_world import EpisodeWorld, episode_world
from tests.support.running import environment

from homing.rl.rollouts.results import whole_results

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_tasks(path: Path, *tasks: dict[str, Any]) -> Path:
    """Tasks that name their rollouts `r0`, `r1`, …; `asked` is what the agent is asked."""
    lines = []
    for number, task in enumerate(tasks):
        asked, task_id = task.pop("asked", "hello"), task.pop("task_id", "1")
        params = {"input": asked}
        line = {
            "rollout_id": f"r{number}",
            "task_id": {"taskset": "t", "task_id": task_id},
            "task_input": {"responses_create_params": params, **task},
        }
        lines.append(json.dumps(line))
    tasks_path = path / "tasks.jsonl"
    tasks_path.write_text("\n".join(lines) + "\n")
    return tasks_path


async def begin(url: str, path: Path, *options: str, terminal: int | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "homing", "rl", "rollouts", "--environment", url),
        *("--tasks", str(path / "tasks.jsonl"), "--out", str(path / "out.jsonl"), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if terminal is None else terminal,
        env=environment(TERM="xterm", COLUMNS="160"),
    )


async def run_at_a_terminal(url: str, path: Path) -> tuple[str, str]:
    """What it prints, and what a terminal shows meanwhile."""
    ours, its = os.openpty()
    try:
        process = await begin(url, path, terminal=its)
    finally:
        os.close(its)
    shown, (out, _) = await asyncio.gather(asyncio.to_thread(read_to_the_end, ours), process.communicate())
    assert process.returncode == 0, shown
    return out.decode(), shown


def read_to_the_end(terminal: int) -> str:
    parts: list[bytes] = []
    with (
        os.fdopen(terminal, "rb", buffering=0) as file,
        contextlib.suppress(OSError),
    ):  # EIO: nobody has it open any more
        while part := file.read(2**16):
            parts.append(part)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(parts).decode())


async def run(url: str, path: Path, *options: str, code: int = 0) -> tuple[str, str]:
    process = await begin(url, path, *options)
    out, err = await process.communicate()
    assert process.returncode == code, err.decode()
    return out.decode(), err.decode()


def attempts_of(world: EpisodeWorld, rollout: str) -> int:
    """How many episodes of the rollout were begun."""
    keys = (call.split("/")[2] for call in world.calls if call.endswith("/seed_session"))
    return sum(key == rollout or key.startswith(f"{rollout}-a") for key in keys)


async def test_rollouts_are_collected_tried_again_and_counted(tmp_path: Path) -> None:
    async with episode_world() as world:
        write_tasks(
            tmp_path,
            {},
            {"reward": 0.0},
            {"mask_first": 2, "key": "flaky"},
            {"mask": True},
            {"reject": True},
            {"asked": "lost"},
        )
        out, err = await run(world.url, tmp_path, "--json", "--attempts", "3", "--concurrency", "2")
        found = json.loads(out)
        assert (found["rollouts"], found["done"], found["valid"], found["masked"]) == (6, 6, 3, 3)
        assert found["mean_reward"] == pytest.approx(2 / 3)
        assert found["masked_by_reason"] == {"judge_unreachable": 1, "seed_rejected": 1, "session_lost": 1}
        assert (found["episodes"], found["retried"]) == (12, 6)
        assert "6 of 6 done" in err
        assert [attempts_of(world, f"r{number}") for number in range(6)] == [1, 1, 3, 3, 1, 3]
        assert world.open_sessions() == 0
    lines = whole_results(tmp_path / "out.jsonl")
    # A fault is never a reward, and a reward is no fault.
    assert all((each["reward"] is None) == each["mask_sample"] for each in lines)
    flaky = [(each["attempt"], each["final"], each["reward"]) for each in lines if each["rollout_id"] == "r2"]
    assert flaky == [(0, False, None), (1, False, None), (2, True, 1.0)]
    rejected = next(each for each in lines if each["rollout_id"] == "r4")
    assert (rejected["mask_reason"], rejected["stage"], rejected["final"]) == ("seed_rejected", "seed", True)


async def test_a_cut_run_goes_on_where_it_was(tmp_path: Path) -> None:
    async with episode_world() as world:
        write_tasks(tmp_path, {}, {"mask_first": 1, "key": "k"}, {}, {})
        await run(world.url, tmp_path, "--attempts", "1")
        lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
        by_rollout = {json.loads(each)["rollout_id"]: each for each in lines}
        # As a run leaves it that was cut: r0 done, r1 to be tried again, r2 half written, r3 never begun.
        again = json.dumps(json.loads(by_rollout["r1"]) | {"final": False}) + "\n"
        (tmp_path / "out.jsonl").write_text(by_rollout["r0"] + again + by_rollout["r2"][:40])
        world.calls.clear()
        out, _ = await run(world.url, tmp_path, "--json")
        assert [attempts_of(world, f"r{number}") for number in range(4)] == [0, 1, 1, 1]
        assert "resources /ng-rollout/r1-a1/seed_session" in world.calls
        found = json.loads(out)
        assert (found["done"], found["valid"], found["episodes"], found["retried"]) == (4, 4, 3, 1)
        # And there is nothing left to do.
        world.calls.clear()
        out, shown = await run_at_a_terminal(world.url, tmp_path)
        assert "4/4 0 running, 0 failed, 0 masked, reward 1.000" in shown
        rows = [line.strip("│").split("│") for line in out.splitlines() if "│" in line]
        table = {name.strip(): value.strip() for name, value in rows}
        assert (table.pop("duration p50")[-1], table.pop("duration p99")[-1]) == ("s", "s")
        assert table == {
            "rollouts done": "4 of 4",
            "valid samples": "4",
            "mean reward of these": "1.0000",
            "masked": "0",
            "episodes run": "0",
            "of these retries": "0",
            "throughput": "0.0 episodes/s",
        }
        assert not any("seed_session" in call for call in world.calls)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_run_closes_everything_that_is_open(tmp_path: Path, number: int) -> None:
    async with episode_world() as world:
        write_tasks(tmp_path, {}, *({"asked": "hang /dev/null"} for _ in range(3)))
        process = await begin(world.url, tmp_path, "--json")
        for rollout in range(1, 4):
            await world.until(f"agent /ng-rollout/r{rollout}/v1/responses")
        await world.until("resources /ng-rollout/r0/close_session")
        while not (tmp_path / "out.jsonl").read_text():
            await asyncio.sleep(0.01)  # another process's file
        process.send_signal(number)
        out, err = await process.communicate()
        assert process.returncode == 130, err
        found = json.loads(out)
        assert (found["done"], found["valid"], found["rollouts"]) == (1, 1, 4)
        assert b"run the same command again" in err
        assert b"Traceback" not in err
        for rollout in range(1, 4):
            await world.until(f"resources /ng-rollout/r{rollout}/close_session")
    assert world.open_sessions() == 0
    assert len(whole_results(tmp_path / "out.jsonl")) == 1


async def test_what_cannot_work_is_one_line(tmp_path: Path) -> None:
    write_tasks(tmp_path, {})
    # Port 9 discards, where anything listens there at all.
    _, err = await run("http://127.0.0.1:9", tmp_path, code=3)
    assert err.splitlines()[-1].startswith("homing: no environment server answers at http://127.0.0.1:9")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    _, err = await run("http://127.0.0.1:9", tmp_path, code=2)
    assert err.splitlines()[-1].endswith("line 1: task_input: Field required")
