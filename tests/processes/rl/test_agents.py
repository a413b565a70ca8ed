"""An agent server on several workers, by `homing run`: the contract, stops, runs, and what is said when it goes wrong."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_servers import live_records
from tests.support.rl_agents import said
from tests.support.running import ROOT, Running, running

from homing.rl.agents.checks import names
from homing.rl.calls import Answer, Caller
from homing.rl.testing import check_agent_server

WORKERS = 3


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Running, Running]]:
    with running("tests.support.rl_servers:nothing", "--workers", "2", cwd=ROOT) as resources:
        env = {"TEST_RESOURCES_URL": f"http://127.0.0.1:{resources.port}"}
        with running(
            "tests.support.rl_agents:echo", "--factory", "--workers", str(WORKERS), cwd=ROOT, env=env
        ) as agent:
            agent.wait_for(f"all {WORKERS} workers are ready")
            resources.wait_for("all 2 workers are ready")
            yield resources, agent
            assert agent.stop() == 0, agent.log
        assert resources.stop() == 0, resources.log


@pytest.fixture
def agent(servers: tuple[Running, Running]) -> Running:
    return servers[1]


@pytest.fixture
def url(agent: Running) -> str:
    return f"http://127.0.0.1:{agent.port}"


def seed(url: str, task_id: str = "1", **more: Any) -> tuple[Caller, dict[str, Any], Answer]:
    caller, session = Caller(url), names()
    body = session | {"task_id": {"taskset": "test", "task_id": task_id}} | more
    return caller, session, caller.post("/v1/agent_sessions", body)


def close(caller: Caller, session: dict[str, Any]) -> Answer:
    return caller.post("/v1/agent_sessions/close", session)


def test_the_server_keeps_the_contract_across_workers(url: str) -> None:
    check_agent_server(url, responses={"input": "hello"})


def test_what_a_session_keeps_is_found_by_every_call(url: str) -> None:
    def episode(number: int) -> set[str]:
        caller, session, seeded = seed(url)
        assert seeded.status == 200
        pids = {said(caller.post("/v1/responses", {"input": f"hello {number}"}).content)[0] for _ in range(4)}
        receipt = close(Caller(url), session).content
        assert receipt["agent_observations"] == {"asked": 4, "pid": int(next(iter(pids)))}
        assert len(receipt["agent_trajectory"]) == 4
        return pids

    with ThreadPoolExecutor(8) as pool:
        pids = list(pool.map(episode, range(24)))
    assert all(len(each) == 1 for each in pids)
    assert len(set.union(*pids)) > 1


def test_a_stop_reaches_the_worker_that_runs_the_rollout(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        sessions = [seed(url)[:2] for _ in range(8)]
        running_now = [pool.submit(caller.post, "/v1/responses", {"input": "wait"}) for caller, _ in sessions]
        for (_, session), activation in zip(sessions, running_now, strict=True):
            path = f"/rollouts/{session['episode_id']['rollout_id']}/stop"
            deadline = time.monotonic() + 30
            # Until the activation runs, there is nothing to stop.
            while not Caller(url).post(path, {"reason": "enough"}).content["stopped"]:
                assert time.monotonic() < deadline
            assert Caller(url).post(path, {"reason": "again"}).content == {"stopped": False}
            response = activation.result(30).content
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "enough"}
        for caller, session in sessions:
            assert close(caller, session).status == 200


def test_a_close_cuts_off_what_runs_and_tells_what_it_had(url: str, tmp_path: Path) -> None:
    caller, session, _ = seed(url)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(caller.post, "/v1/responses", {"input": f"hang {tmp_path}/runs"})
        wait_for(tmp_path / "runs")
        receipt = close(Caller(url), session).content
        assert said(receipt["partial_response"])[2] == "hang"
        assert receipt["partial_response"]["status"] == "incomplete"
        assert cut.result(30).status == 409
    assert close(Caller(url), session).content == receipt


def test_an_activation_ends_when_its_caller_leaves(url: str, tmp_path: Path) -> None:
    caller, session, _ = seed(url)
    leaving = http.client.HTTPConnection(*url.removeprefix("http://").split(":"), timeout=30)  # type: ignore[misc]
    cookie = "; ".join(f"{name}={value}" for name, value in caller.cookies.items())
    leaving.request("POST", "/v1/responses", json.dumps({"input": f"hang {tmp_path}/runs"}), {"cookie": cookie})
    wait_for(tmp_path / "runs")
    leaving.close()
    deadline = time.monotonic() + 30
    while (reply := caller.post("/v1/responses", {"input": "hello"})).status == 409:
        assert time.monotonic() < deadline, "it runs on, though nobody waits for it"
    assert said(reply.content)[2] == "hello"
    assert close(caller, session).status == 200


def wait_for(path: Path) -> None:
    """Until the agent has made this file: it says so that it runs."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # another process's file


def test_a_runs_call_to_itself_stays_on_its_worker(url: str) -> None:
    """One run at a time, so only the worker that serves it counts one: over new connections, another would often answer."""
    pids = set()
    for number in range(20):
        verdict = Caller(url).post("/run", {"responses_create_params": {"input": f"hello {number}"}, "mark": number})
        assert verdict.status == 200, verdict.content
        assert (verdict.content["reward"], verdict.content["mark"]) == (1.0, number)
        pid, runs, *_ = said(verdict.content["response"])
        assert runs == "1"
        pids.add(pid)
    assert len(pids) > 1


def test_a_run_that_fails_is_masked(url: str) -> None:
    verdict = Caller(url).post("/ng-rollout/r7/run", {"responses_create_params": {"input": "lost"}}).content
    assert (verdict["mask_sample"], verdict["failure_kind"]) == (True, "session_lost")


@pytest.mark.parametrize(
    ("task_id", "status", "code"),
    [("reject", 422, "seed_rejected"), ("unavailable", 503, "agent_setup_failed"), ("broken", 500, "internal_error")],
)
def test_a_seed_that_fails_can_be_tried_again_and_closed(url: str, task_id: str, status: int, code: str) -> None:
    caller, session, failed = seed(url, task_id)
    assert (failed.status, failed.code) == (status, code)
    body = session | {"task_id": {"taskset": "test", "task_id": task_id}}
    assert caller.post("/v1/agent_sessions", body).status == status
    assert Caller(url).post("/v1/agent_sessions", body | {"task_id": {"taskset": "test", "task_id": "1"}}).status == 409
    assert close(Caller(url), session).status == 200


def test_a_clean_up_that_fails_is_said_and_can_be_tried_again(url: str) -> None:
    caller, session, _ = seed(url, "stays")
    for _ in range(2):
        failed = close(Caller(url), session)
        assert (failed.status, failed.code) == (503, "agent_cleanup_failed")
        assert caller.post("/v1/responses", {"input": "hello"}).status == 409
    assert close(Caller(url), session).content["agent_observations"]["asked"] == 0


@pytest.mark.parametrize(("asked", "status", "code"), [("lost", 502, "session_lost"), ("bug", 500, "internal_error")])
def test_an_activation_that_fails_says_how_and_leaves_its_session_open(
    url: str, asked: str, status: int, code: str
) -> None:
    caller, session, _ = seed(url)
    failed = caller.post("/v1/responses", {"input": asked})
    assert (failed.status, failed.code) == (status, code)
    if asked == "lost":
        assert failed.content["error"]["retryable"] is True
    assert said(caller.post("/v1/responses", {"input": "hello"}).content)[2] == "hello"
    receipt = close(caller, session).content
    assert len(receipt["agent_trajectory"]) == 1


ACCESS = {"name": "a", "transport": "mcp", "url": "u"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/agent_sessions", {"tool_accesses": "x"}, "tool_accesses"),
        ("/v1/agent_sessions", {"tool_accesses": [{"name": "a", "transport": "smoke", "url": "u"}]}, "transport"),
        ("/v1/agent_sessions", {"tool_accesses": [ACCESS, ACCESS]}, "tool_accesses: each"),
        ("/v1/agent_sessions", {"episode_id": {"rollout_id": "x-a1"}}, "rollout_id"),
        ("/v1/agent_sessions", {"episode_id": {"rollout_id": "x", "attempt": -1}}, "attempt"),
        ("/v1/agent_sessions", {"agent_session_id": 5}, "agent_session_id"),
        ("/v1/responses", {"input": 5}, "input"),
        ("/v1/responses", {}, "input"),
        ("/run", {"responses_create_params": 5}, "responses_create_params"),
        ("/rollouts/x/stop", {"reason": ""}, "reason"),
        ("/aggregate_metrics", {"verify_responses": [{"reward": "x"}]}, "reward"),
    ],
)
def test_a_malformed_body_is_refused_with_the_field_at_fault(
    url: str, path: str, body: dict[str, Any], field: str
) -> None:
    if path == "/v1/agent_sessions":
        body = names() | {"task_id": {"taskset": "test", "task_id": "1"}} | body
    refused = Caller(url).post(path, body)
    assert refused.status == 422
    assert field in refused.content["error"]["detail"]


def test_a_grant_that_the_agent_cannot_use_is_refused(url: str) -> None:
    _, session, refused = seed(url, sandbox_access={"kind": "shell"})
    assert (refused.status, refused.code) == (422, "seed_rejected")
    assert "sandbox_access" in refused.content["error"]["detail"]
    assert close(Caller(url), session).status == 200


def test_metrics_need_no_session(url: str) -> None:
    verdicts = [{"reward": 1.0}, {"reward": 0.0}, {"reward": 0.0, "mask_sample": True, "failure_kind": "session_lost"}]
    found = Caller(url).post("/aggregate_metrics", {"verify_responses": verdicts})
    assert found.content["mean_reward"] == 0.5
    assert found.content["masked_by_kind"] == {"session_lost": 1}


def test_a_session_of_a_killed_worker_is_gone_and_its_rollout_can_be_seeded_again(agent: Running, url: str) -> None:
    caller, session, _ = seed(url)
    pid = int(said(caller.post("/v1/responses", {"input": "hello"}).content)[0])
    os.kill(pid, signal.SIGKILL)
    agent.wait_for(rf"worker \[{pid}\] exited")
    for gone in (caller.post("/v1/responses", {"input": "hello"}), close(Caller(url), session)):
        assert (gone.status, gone.code) == (410, "session_gone")
    again = {
        "agent_session_id": f"agent-session-{secrets.token_hex(16)}",
        "episode_id": session["episode_id"] | {"attempt": 1},
        "task_id": {"taskset": "test", "task_id": "1"},
    }
    second = Caller(url)
    assert second.post("/v1/agent_sessions", again).status == 200
    assert said(second.post("/v1/responses", {"input": "hello"}).content)[2] == "hello"
    assert close(second, {name: again[name] for name in ("agent_session_id", "episode_id")}).status == 200


def test_nothing_is_left_once_the_windows_have_passed(agent: Running) -> None:
    """The last of this module, so that it sees what all of them left."""
    deadline = time.monotonic() + 60
    while left := live_records(agent):
        assert time.monotonic() < deadline, f"{len(left)} records are left"
        time.sleep(0.1)  # other processes' files: there is no event to wait for
