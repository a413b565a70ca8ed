"""Episodes through four servers of several workers each, with a new connection for every call, and with workers killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.episode_servers import WINDOW_SECONDS, episode_servers, live_records, url_of
from tests.support.running import Running

from homing.rl.demo.task import demo_task, demo_task_line
from homing.rl.rollouts.collector import Collector, Counts
from homing.rl.rollouts.results import ResultsFile, whole_results
from homing.rl.rollouts.summary import Summary
from homing.rl.rollouts.tasks import read_tasks

SERVERS = ("model", "resources", "agent", "environment")
SMALL = {"model": 1, "resources": 3, "agent": 3, "environment": 2}
"""Workers of each, for what is run each time: a worker takes a second or two to start. The model keeps nothing."""
BROKEN = {"session_lost", "connection_error", "server_unavailable"}
"""What an episode may be told whose worker was killed: the first if its session died with it, else what a call met."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Running]]:
    # Fewer places than there are rollouts under way, so that some wait for their turn at each worker.
    with episode_servers(SMALL, slots="40") as started:
        yield started
        for name, server in reversed(started.items()):
            # A server of one worker ends by the signal, as uvicorn does.
            assert server.stop() == (0 if SMALL[name] > 1 else -signal.SIGTERM), server.log


def collect(
    servers: dict[str, Running],
    path: Path,
    count: int,
    *,
    concurrency: int,
    attempts: int = 1,
    changed: Callable[[Counts], None] = lambda _: None,
) -> tuple[Summary, Path]:
    tasks, out = path / "demo.jsonl", path / "out.jsonl"
    tasks.write_text("".join(demo_task_line(number) for number in range(count)))
    with ResultsFile(out) as results:
        collector = Collector(
            url_of(servers["environment"]),
            read_tasks(tasks),
            results,
            concurrency=concurrency,
            attempts=attempts,
            changed=lambda: changed(collector.counts),
            new_connection_per_call=True,
        )
        summary = asyncio.run(collector.collect())
    return summary, out


def see_every_verdict_right(out: Path, count: int) -> None:
    """Each rollout has one final line, and its reward is the task's."""
    finals = {line["task_id"]["task_id"]: line for line in whole_results(out) if line["final"]}
    assert len(finals) == count
    for number in range(count):
        task_id, _, reward = demo_task(number)
        line = finals[task_id]
        assert (line["mask_sample"], line["reward"]) == (False, reward), line


def see_everything_gone(servers: dict[str, Running]) -> None:
    """No session, receipt, fence or path key of a worker that lives is left once the windows have passed."""
    deadline = time.monotonic() + WINDOW_SECONDS + 60
    for name in ("resources", "agent"):
        while left := live_records(servers[name]):
            assert time.monotonic() < deadline, f"{name}: {len(left)} records are left"
            time.sleep(0.2)  # other processes' files: there is no event to wait for


def see_all_of_them_right(servers: dict[str, Running], path: Path, count: int) -> None:
    summary, out = collect(servers, path, count, concurrency=64)
    see_every_verdict_right(out, count)
    assert (summary.valid, summary.masked, summary.episodes) == (count, 0, count)
    assert summary.mean_reward == 0.8
    see_everything_gone(servers)


def test_64_episodes_at_once_and_every_verdict_is_right(servers: dict[str, Running], tmp_path: Path) -> None:
    see_all_of_them_right(servers, tmp_path, 150)


def test_episodes_whose_workers_are_killed_are_masked_as_lost_or_tried_again_and_right(
    servers: dict[str, Running], tmp_path: Path
) -> None:
    count = 120
    due = [count // 5, 2 * count // 5, 3 * count // 5]
    killed: list[int] = []

    def kill_some(counts: Counts) -> None:
        if due and counts.done >= due[0]:
            due.pop(0)
            for name in ("resources", "agent"):
                victim = random.choice(servers[name].workers())
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    summary, out = collect(servers, tmp_path, count, concurrency=32, attempts=8, changed=kill_some)
    assert len(killed) == 6
    lines = whole_results(out)
    lost = [line for line in lines if line["mask_sample"]]
    others = [(line["mask_reason"], line["stage"], line["failure_reason"]) for line in lost]
    assert [each for each in others if each[0] not in BROKEN] == []
    assert any(line["mask_reason"] == "session_lost" for line in lost)
    assert all(line["reward"] is None for line in lost)
    see_every_verdict_right(out, count)
    assert summary.retried == len(lost)
    see_everything_gone(servers)


def test_episodes_whose_environment_worker_is_killed_are_tried_again_and_right(
    servers: dict[str, Running], tmp_path: Path
) -> None:
    """And what they had open is closed by another worker."""
    victims = servers["environment"].workers()[:1]

    def kill_one(counts: Counts) -> None:
        if victims and counts.done >= 8:
            os.kill(victims.pop(), signal.SIGKILL)

    collect(servers, tmp_path, 40, concurrency=32, attempts=8, changed=kill_one)
    assert not victims
    see_every_verdict_right(tmp_path / "out.jsonl", 40)
    assert {line["mask_reason"] for line in whole_results(tmp_path / "out.jsonl") if line["mask_sample"]} <= BROKEN
    see_everything_gone(servers)
    servers["environment"].wait_for("a worker died in an episode: what it had open is closed now$")


SCATTER = {"resources": ("--scatter",), "agent": ("--scatter",)}
"""Every request to a server with sessions first lands at a wrong worker."""


def test_every_verdict_is_right_when_every_request_lands_at_a_wrong_worker(tmp_path: Path) -> None:
    with episode_servers({"model": 1, "resources": 2, "agent": 2, "environment": 1}, options=SCATTER) as servers:
        collect(servers, tmp_path, 24, concurrency=12)
        see_every_verdict_right(tmp_path / "out.jsonl", 24)
        see_everything_gone(servers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "mcp"), [({}, "0"), (SCATTER, "0"), (SCATTER, "1")], ids=["plain", "scattered", "scattered over MCP"]
)
def test_five_hundred_episodes_on_four_workers_each_and_every_verdict_is_right(
    tmp_path: Path, options: dict[str, tuple[str, ...]], mcp: str
) -> None:
    with episode_servers(dict.fromkeys(SERVERS, 4), options=options, slots="40", mcp=mcp) as servers:
        see_all_of_them_right(servers, tmp_path, 500)
