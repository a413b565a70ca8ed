"""A resources server on several workers, by `homing run`: the contract, state, and what is said when it is lost."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.running import ROOT, Running, running

from homing.rl.calls import Caller
from homing.rl.testing import check_resources_server

TASK = {"task_id": {"taskset": "counting", "task_id": "1"}, "task_data": {"start": 3, "expected": 5}}


def names() -> dict[str, Any]:
    return {"resources_session_id": secrets.token_hex(16), "episode_id": {"rollout_id": secrets.token_hex(4)}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("tests.support.rl_servers:counter", "--workers", "3", cwd=ROOT) as server:
        server.wait_for("all 3 workers are ready")
        yield server
        assert server.stop() == 0


@pytest.fixture
def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_the_server_keeps_the_contract_across_workers(url: str) -> None:
    check_resources_server(url, task_data={"start": 1})


def test_every_call_of_every_session_finds_its_state(url: str) -> None:
    def episode(number: int) -> set[int]:
        caller, session = Caller(url), names()
        seeded = caller.post("/seed_session", session | TASK)
        assert seeded.content == {"resources_session_id": session["resources_session_id"], "observation": {"count": 3}}
        counts = [caller.post("/increment", {"by": 1}).content for _ in range(2)]
        assert [each["count"] for each in counts] == [4, 5]
        verdict = caller.post("/verify", {"question": number}, headers={"x-ng-close-follows": "1"})
        assert verdict.content["reward"] == 1.0
        assert verdict.content["question"] == number
        assert caller.post("/close_session", session).status == 200
        assert caller.post("/increment").code == "session_lost"
        return {each["pid"] for each in counts}

    with ThreadPoolExecutor(8) as pool:
        pids = list(pool.map(episode, range(60)))
    assert all(len(each) == 1 for each in pids)
    assert len(set.union(*pids)) > 1


def test_a_session_of_a_killed_worker_is_said_to_be_gone(server: Running, url: str) -> None:
    caller, session = Caller(url), names()
    assert caller.post("/seed_session", session | TASK).status == 200
    pid = caller.post("/increment").content["pid"]
    os.kill(pid, signal.SIGKILL)
    server.wait_for(rf"worker \[{pid}\] exited")
    for path in ("/increment", "/verify"):
        gone = caller.post(path)
        assert (gone.status, gone.code) == (410, "session_gone")
    assert caller.post("/close_session", session).status == 410


def test_the_secret_is_on_no_command_line_and_in_no_log(server: Running) -> None:
    process = server.process.pid
    worker = server.workers()[0]
    with open(f"/proc/{worker}/environ", "rb") as file:
        variables = dict(each.split(b"=", 1) for each in file.read().split(b"\0") if b"=" in each)
    secret = variables[b"HOMING_SERVER_SECRET"].decode()
    assert len(secret) >= 32
    assert secret not in server.log
    for pid in (process, worker):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            assert secret.encode() not in file.read()
