"""A resources server on several workers, by `homing run`: the contract, state, and what is said when it is lost."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.running import HOMING, ROOT, Running, running

from homing.rl.calls import Answer, Caller
from homing.rl.testing import check_resources_server

TASK = {"task_id": {"taskset": "counting", "task_id": "1"}, "task_data": {"start": 3, "expected": 5}}


def names() -> dict[str, Any]:
    return {"resources_session_id": secrets.token_hex(16), "episode_id": {"rollout_id": secrets.token_hex(4)}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("tests.support.rl_servers:counter", "--workers", "2", cwd=ROOT) as server:
        server.wait_for("all 2 workers are ready")
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


def seeded(url: str, **data: Any) -> tuple[Caller, dict[str, Any]]:
    caller, session = Caller(url), names()
    answer = caller.post("/seed_session", session | TASK | {"task_data": TASK["task_data"] | data})
    assert answer.status == 200, answer
    assert len(answer.headers["x-ng-session-owner"]) == 32
    return caller, session


def refused(answer: Answer, status: int, code: str, field: str | None = None) -> None:
    assert (answer.status, answer.code) == (status, code), answer
    assert answer.content["error"]["code"] == code
    if field is not None:
        assert field in [each["field"] for each in answer.content["error"]["fields"]], answer
        assert answer.content["error"]["detail"].startswith(f"{field}: ")


EPISODE = {"rollout_id": "r1"}
BAD_SEEDS = [
    ({"episode_id": EPISODE}, "resources_session_id"),
    ({"resources_session_id": "x"}, "episode_id"),
    ({"resources_session_id": 5, "episode_id": EPISODE}, "resources_session_id"),
    ({"resources_session_id": "", "episode_id": EPISODE}, "resources_session_id"),
    ({"resources_session_id": "x", "episode_id": "r1"}, "episode_id"),
    ({"resources_session_id": "x", "episode_id": {"rollout_id": "-r"}}, "episode_id.rollout_id"),
    ({"resources_session_id": "x", "episode_id": {"rollout_id": "r-a1"}}, "episode_id.rollout_id"),
    ({"resources_session_id": "x", "episode_id": {"rollout_id": "r", "attempt": -1}}, "episode_id.attempt"),
    ({"resources_session_id": "x", "episode_id": {"rollout_id": "r", "attempt": "1"}}, "episode_id.attempt"),
    ({"resources_session_id": "x", "episode_id": {"rollout_id": "r", "more": 1}}, "episode_id.more"),
    (
        {"resources_session_id": "x", "episode_id": EPISODE, "task_id": {"taskset": "", "task_id": "1"}},
        "task_id.taskset",
    ),
    ({"resources_session_id": "x", "episode_id": EPISODE, "task_data": []}, "task_data"),
    ({"resources_session_id": "x", "episode_id": EPISODE, "extra": 1}, "extra"),
]


@pytest.mark.parametrize(("change", "field"), BAD_SEEDS, ids=[field for _, field in BAD_SEEDS])
def test_a_malformed_seed_is_refused_by_name_and_sets_no_cookie(url: str, change: dict[str, Any], field: str) -> None:
    caller = Caller(url)
    answer = caller.post("/seed_session", TASK | change)
    assert answer.status == 422
    assert field in [each["field"] for each in answer.content["error"]["fields"]], answer
    assert field in answer.content["error"]["detail"]
    assert not caller.cookies


def test_a_task_that_cannot_be_seeded_is_rejected_for_good(url: str) -> None:
    caller = Caller(url)
    bad = names() | TASK | {"task_data": {"start": "three"}}
    refused(caller.post("/seed_session", bad), 422, "seed_rejected", "task_data.start")
    refused(caller.post("/seed_session", bad), 422, "seed_rejected", "task_data.start")
    refused(caller.post("/seed_session", names() | TASK | {"task_data": {"unseedable": True}}), 422, "seed_rejected")
    refused(Caller(url).post("/seed_session", {"start": "three"}), 422, "seed_rejected", "start")
    assert not caller.cookies


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b'{"a": NaN}', b"\xff"])
def test_a_body_that_is_no_json_object_is_refused_everywhere(url: str, body: bytes) -> None:
    caller, session = seeded(url)
    for path in ("/increment", "/verify", "/aggregate_metrics"):
        refused(caller.post(path, raw=body), 422, "invalid_request")
    refused(Caller(url).post("/seed_session", raw=body), 422, "invalid_request")
    refused(Caller(url).post("/close_session", raw=body), 422, "invalid_request")
    assert caller.post("/increment").content["count"] == 4
    caller.post("/close_session", session)


BAD_ARGUMENTS = [
    ({"by": "many"}, "by"),
    ({"by": 0}, "by"),
    ({"by": 1.5}, "by"),
    ({"by": None}, "by"),
    ({"by": [1]}, "by"),
    ({"by": 1, "more": 2}, "more"),
]


@pytest.mark.parametrize(("arguments", "field"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_by_name_and_the_session_is_unharmed(
    url: str, arguments: dict[str, Any], field: str
) -> None:
    caller, session = seeded(url)
    refused(caller.post("/increment", arguments), 422, "invalid_request", field)
    refused(caller.post("/divide"), 422, "invalid_request", "by")
    assert caller.post("/increment", {"by": 2}).content["count"] == 5
    caller.post("/close_session", session)


def test_a_tool_says_why_it_cannot_and_a_bug_in_it_is_not_the_callers(server: Running, url: str) -> None:
    caller, session = seeded(url)
    answer = caller.post("/divide", {"by": 0})
    refused(answer, 400, "tool_error")
    assert answer.content["error"]["detail"] == "nothing can be divided by 0"
    broken = caller.post("/divide", {"by": 2})
    refused(broken, 500, "internal_error")
    assert "a bug that the test wants" not in str(broken.content)
    server.wait_for("RuntimeError: a bug that the test wants")
    assert caller.post("/divide", {"by": 3}).content == 1
    caller.post("/close_session", session)


def test_what_there_is_not_is_said_with_what_there_is(url: str) -> None:
    caller, session = seeded(url)
    unknown = caller.post("/decrement")
    refused(unknown, 404, "not_found")
    assert "divide, go_on, increment, wait" in unknown.content["error"]["detail"]
    refused(caller.call("GET", "/increment"), 405, "method_not_allowed")
    refused(caller.post("/sandbox_access"), 404, "not_found")
    refused(Caller(url).post("/sandbox_access"), 404, "session_lost")
    caller.post("/close_session", session)


def test_a_tool_call_without_a_session_is_lost_and_sets_no_cookie(url: str) -> None:
    caller = Caller(url)
    refused(caller.post("/increment"), 404, "session_lost")
    assert not caller.cookies


def test_bodies_over_the_limit_are_refused_and_the_session_is_unharmed(url: str) -> None:
    caller, session = seeded(url)
    large = {"by": 1, "x": "x" * 2**20}
    for path in ("/increment", "/verify", "/aggregate_metrics"):
        refused(caller.post(path, large), 413, "body_too_large")
    refused(Caller(url).post("/seed_session", large), 413, "body_too_large")
    refused(Caller(url).post("/close_session", session | large), 413, "body_too_large")
    assert caller.post("/increment").content["count"] == 4
    caller.post("/close_session", session)


def test_a_seed_of_an_open_session_with_another_task_is_a_conflict(url: str) -> None:
    caller, session = seeded(url)
    other = session | TASK | {"task_data": {"start": 9}}
    refused(caller.post("/seed_session", other), 409, "session_conflict")
    refused(caller.post("/seed_session", {"start": 9}), 409, "session_conflict")
    assert caller.post("/increment").content["count"] == 4
    caller.post("/close_session", session)


def test_a_cookie_and_a_body_that_name_different_sessions_are_a_conflict(url: str) -> None:
    caller, session = seeded(url)
    refused(caller.post("/seed_session", names() | TASK), 409, "session_conflict")
    refused(caller.post("/close_session", names()), 409, "session_conflict")
    assert caller.post("/increment").content["count"] == 4
    caller.post("/close_session", session)


def test_a_release_that_fails_can_be_retried_and_is_never_recorded_as_closed(url: str) -> None:
    caller, session = seeded(url, fail_release=2)
    for _ in range(2):
        failed = caller.post("/close_session", session)
        refused(failed, 503, "release_failed")
        assert failed.headers["retry-after"] == "1"
        refused(caller.post("/increment"), 409, "session_closing")
        refused(caller.post("/seed_session", session | TASK), 409, "session_closing")
    assert Caller(url).post("/close_session", session).status == 200
    refused(caller.post("/seed_session", session | TASK), 409, "session_closed")
    refused(caller.post("/increment"), 404, "session_lost")


def test_a_cookie_session_begins_anew_with_each_seed_and_ends_with_its_verify(url: str) -> None:
    caller = Caller(url)
    for start in (1, 7, 7):
        assert caller.post("/seed_session", {"start": start, "expected": start + 1}).content == {}
        assert caller.post("/increment").content["count"] == start + 1
    verdict = caller.post("/verify", {"responses_create_params": {"input": "x"}, "response": {"output": []}}).content
    assert verdict == {
        "responses_create_params": {"input": "x"},
        "response": {"output": []},
        "expected": None,
        "reward": 1.0,
        "mask_sample": False,
    }
    refused(caller.post("/increment"), 404, "session_lost")
    assert caller.post("/verify").content["failure_kind"] == "session_lost"
    assert caller.post("/seed_session", {"start": 2}).status == 200
    assert caller.post("/increment").content["count"] == 3
    caller.post("/verify")


def test_no_reward_is_given_where_nothing_was_measured(url: str) -> None:
    caller, session = seeded(url)
    follows = {"x-ng-close-follows": "1"}
    lost = Caller(url).post("/verify", {"question": 1}).content
    assert (lost["reward"], lost["mask_sample"], lost["failure_kind"], lost["question"]) == (0, True, "session_lost", 1)
    odd = caller.post("/verify", {"expected": 999}, headers=follows).content
    assert (odd["reward"], odd["mask_sample"], odd["failure_kind"]) == (0, True, "invalid_reward")
    unreachable = caller.post("/verify", {"expected": -1}, headers=follows).content
    assert (unreachable["mask_sample"], unreachable["failure_kind"]) == (True, "judge_unreachable")
    refused(caller.post("/verify", {"expected": "five"}, headers=follows), 422, "invalid_request", "expected")
    refused(caller.post("/verify", {"response": []}, headers=follows), 422, "invalid_request", "response")
    assert caller.post("/verify", {"expected": 3}, headers=follows).content["reward"] == 1.0
    caller.post("/close_session", session)


def test_metrics_are_over_valid_samples(url: str) -> None:
    caller = Caller(url)
    verdicts = [{"reward": 1.0}, {"reward": 0.5, "x": 1}, {"reward": 0.0, "mask_sample": True, "failure_kind": "oom"}]
    found = caller.post("/aggregate_metrics", {"verify_responses": verdicts})
    assert found.content == {"count": 3, "valid": 2, "masked": 1, "mean_reward": 0.75, "masked_by_kind": {"oom": 1}}
    assert not caller.cookies
    empty = caller.post("/aggregate_metrics", {"verify_responses": []}).content
    assert empty["mean_reward"] is None
    refused(caller.post("/aggregate_metrics", {}), 422, "invalid_request", "verify_responses")


def test_calls_below_a_rollout_prefix_reach_the_same_session(url: str) -> None:
    caller, session = Caller(url), names()
    prefix = "/ng-rollout/r1"
    assert caller.post(prefix + "/seed_session", session | TASK).status == 200
    assert caller.post(prefix + "/increment").content["count"] == 4
    assert caller.post("/increment").content["count"] == 5
    assert caller.post(prefix + "/verify", headers={"x-ng-close-follows": "1"}).content["reward"] == 1.0
    assert caller.post(prefix + "/close_session", session).status == 200
    refused(caller.post(prefix + "/increment"), 404, "session_lost")


def test_two_tools_of_one_session_run_at_once_and_a_close_waits_for_them(url: str) -> None:
    caller, session = seeded(url)
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(caller.post, "/wait")
        assert caller.post("/go_on").content is True
        assert waiting.result().content == 3
        assert pool.submit(caller.post, "/close_session", session).result().status == 200


def test_liveness_and_the_schema_need_no_session(url: str) -> None:
    caller = Caller(url)
    for path in ("/", "/healthz"):
        alive = caller.call("GET", path).content
        assert alive["status"] == "ok"
        assert len(alive["worker"]) == 32
    assert caller.call("GET", "/reverify_mode").content == "unknown"
    schema = caller.call("GET", "/openapi.json").content
    assert {"/seed_session", "/close_session", "/verify", "/aggregate_metrics", "/increment"} <= set(schema["paths"])
    increment = schema["paths"]["/increment"]["post"]
    assert increment["description"] == "Add to the count."
    assert {"200", "404", "409", "413", "422"} <= set(increment["responses"])
    assert not caller.cookies


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


OTHER_LAUNCHERS = {
    "one worker": ((*HOMING, "run"), ("--workers", "1"), 1),
    "scatter": ((*HOMING, "run"), ("--workers", "2", "--scatter"), 2),
    "plain uvicorn": ((sys.executable, "-m", "uvicorn"), ("--workers", "2"), 2),
}


@pytest.mark.parametrize(
    "launcher", [pytest.param(each, marks=[pytest.mark.long] * (each == "scatter")) for each in OTHER_LAUNCHERS]
)
def test_the_contract_holds_under_any_launcher(launcher: str) -> None:
    command, options, workers = OTHER_LAUNCHERS[launcher]
    with running("tests.support.rl_servers:counter", *options, cwd=ROOT, command=command) as server:
        server.wait_for("Application startup complete", workers)
        server.wait_for("Uvicorn running on")
        check_resources_server(f"http://127.0.0.1:{server.port}")
        server.stop()
        assert "Traceback" not in server.log
