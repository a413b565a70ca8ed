"""Web tasks as a resources server, on several workers: its contract, and rollouts over it by the command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.running import HOMING, ROOT, Running, environment, running
from tests.support.web_episodes import task_line

from homing.rl.testing import check_resources_server

APP = "tests.support.web_episodes:"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def resources() -> Iterator[Running]:
    with running(APP + "resources", "--factory", "--workers", "2", cwd=ROOT) as server:
        server.wait_for("Application startup complete", 2)
        yield server
        assert server.stop() == 0, server.log


def url_of(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_it_keeps_the_contract_of_resources_servers(resources: Running) -> None:
    check_resources_server(
        url_of(resources),
        task_data={"benchmark": "fake", "task_id": "count"},
        task_id={"taskset": "fake", "task_id": "count"},
    )


def test_rollouts_of_web_tasks_are_rewarded_as_the_browser_says_and_a_lost_browser_is_masked(
    resources: Running, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        "".join(task_line(number, number % 4) for number in range(8))
        + task_line(8, 3, task_kwargs={"faults": {"step": ["raise"]}})
    )
    addresses = {"TEST_RESOURCES_URL": url_of(resources)}
    with running(APP + "model", "--factory", "--workers", "1", cwd=ROOT) as model:
        addresses["TEST_MODEL_URL"] = url_of(model)
        with running(APP + "agent", "--factory", "--workers", "1", cwd=ROOT, env=addresses) as agent:
            addresses["TEST_AGENT_URL"] = url_of(agent)
            with running(APP + "environment", "--factory", "--workers", "1", cwd=ROOT, env=addresses) as driver:
                done = subprocess.run(
                    [
                        *(*HOMING, "rl", "rollouts", "--environment", url_of(driver), "--tasks", "tasks.jsonl"),
                        *("--out", "out.jsonl", "--concurrency", "1", "--attempts", "1", "--json"),
                    ],
                    cwd=tmp_path,
                    env=environment(),
                    capture_output=True,
                    text=True,
                    timeout=120,
                    check=False,
                )
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    said = f"{done.stdout}\n{done.stderr}\n{json.dumps(results)[:3000]}\n{resources.log[-2000:]}"
    found = {result["task_id"]["task_id"]: result for result in results}
    assert len(found) == 9, said
    for number in range(8):
        verdict = found[f"count-{number}"]
        assert (verdict["reward"], verdict.get("mask_sample", False)) == (float(number % 4), False), said
    assert found["count-8"]["mask_sample"] is True, said
