"""Gymnasium environments on several workers, by `homing rl serve`, and their clients: the same as in process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
from examples import q_learning
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.support import rl_envs
from tests.support.running import HOMING, ROOT, Running, environment, running

from homing.rl import RemoteEnv, RemoteError, RemoteVectorEnv
from homing.rl.calls import Caller

WORKERS = 2
SERVE = (*HOMING, "rl", "serve")


@contextlib.contextmanager
def served(*arguments: str, workers: int = WORKERS) -> Iterator[Running]:
    with running(*arguments, "--workers", str(workers), cwd=ROOT, command=SERVE) as server:
        server.wait_for(f"all {workers} workers are ready" if workers > 1 else "startup complete")
        yield server


@pytest.fixture(scope="module")
def cart_pole() -> Iterator[str]:
    with served("CartPole-v1") as server:
        yield f"http://127.0.0.1:{server.port}"
        assert server.stop() == 0


@pytest.fixture(scope="module")
def count() -> Iterator[Running]:
    with served("tests.support.rl_envs:Count-v0", "--env-kwargs", '{"steps": 4}') as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def every() -> Iterator[str]:
    with served("tests.support.rl_envs:Every-v0", workers=1) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def frozen_lake() -> Iterator[Running]:
    with served("FrozenLake-v1", "--env-kwargs", '{"is_slippery": false}', workers=4) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_ps_calls_the_server_as_it_was_started(count: Running) -> None:
    shown = subprocess.run(
        [*HOMING, "ps", count.run_directory, "--json"], env=environment(), capture_output=True, text=True, check=True
    )
    assert [each["app"] for each in json.loads(shown.stdout)] == ["rl serve tests.support.rl_envs:Count-v0"]


def rolled_out(env: gymnasium.Env[Any, Any], seed: int, steps: int) -> list[Any]:
    """What an environment gives for actions that the seed alone decides, through several episodes."""
    env.action_space.seed(seed)
    seen: list[Any] = [env.reset(seed=seed)]
    for _ in range(steps):
        stepped = env.step(env.action_space.sample())
        seen.append(stepped)
        if stepped[2] or stepped[3]:
            seen.append(env.reset())
    return seen


@pytest.mark.filterwarnings("ignore:.*A Box observation space")  # its own, here or there
def test_the_client_passes_gymnasiums_own_check(cart_pole: str) -> None:
    with contextlib.closing(RemoteEnv(cart_pole)) as env:
        check_env(env)


def test_a_remote_environment_gives_what_a_local_one_gives_bit_for_bit(cart_pole: str) -> None:
    def compare(seed: int) -> None:
        remote, local = RemoteEnv(cart_pole), gymnasium.make("CartPole-v1")
        with contextlib.closing(remote), contextlib.closing(local):
            assert remote.observation_space == local.observation_space
            assert remote.action_space == local.action_space
            assert data_equivalence(rolled_out(remote, seed, 80), rolled_out(local, seed, 80), exact=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compare, range(12)))


def test_every_kind_of_space_is_carried_exactly(every: str) -> None:
    remote, local = RemoteEnv(every), rl_envs.Every()
    assert remote.observation_space == local.observation_space
    assert list(remote.observation_space.spaces) == list(local.observation_space.spaces)
    local.action_space.seed(5)
    remote.reset(seed=1)
    for _ in range(60):
        action = local.action_space.sample()
        action["box"][0, 0], action["box"][1, 1] = np.inf, -np.inf
        action["bounded"][0] = np.nextafter(0.1, 1)
        observation, _, terminated, _, info = remote.step(action)
        assert data_equivalence(observation, plain(action), exact=True)
        assert info["array"].dtype == np.int16
        assert np.isnan(info["odd"])
        if terminated:
            remote.reset()
    remote.close()


def plain(value: Any) -> Any:
    """As observations are: whole numbers of a Discrete space are Python's, a Box's lone number an array."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if isinstance(value, np.floating):
        return np.asarray(value)
    return int(value) if isinstance(value, np.integer) else value


def plain_all(values: Any) -> list[Any]:
    return [plain(each) for each in values]


def test_json_carries_the_same_with_words_for_what_json_has_not(every: str) -> None:
    caller, local = Caller(every), rl_envs.Every()
    caller.post("/reset", {"seed": 1, "options": {"a": [1, None]}})
    codec = rl_codec()
    for _ in range(3):
        action = local.action_space.sample()
        action["box"][0, 0] = -np.inf
        content = codec.encode(action, binary=False)
        answered = caller.post("/step", {"action": content}, headers={"x-ng-close-follows": "1"})
        assert answered.content["observation"] == content
        assert content["box"][0][0] == "-Infinity"
        assert answered.content["info"]["odd"] == "NaN"
        decoded = codec.decode(answered.content["observation"], inside="observation")
        assert data_equivalence(decoded, plain(action), exact=True)
    assert caller.post("/close_session").status == 200


def rl_codec() -> Any:
    from homing.rl.spaces import codec_for

    return codec_for(rl_envs.every_space())


def test_an_environment_stays_on_one_thread(every: str) -> None:
    env = RemoteEnv(every)
    threads = set()
    for _ in range(5):
        threads.add(env.reset()[1]["thread"])
        threads.add(env.step(env.action_space.sample())[4]["thread"])
    env.close()
    assert len(threads) == 1


def test_an_environment_with_another_space_is_refused_by_name() -> None:
    with running("tests.support.rl_envs:Unservable-v0", cwd=ROOT, command=SERVE) as server:
        assert server.wait() != 0
        assert "the observation space of tests.support.rl_envs:Unservable-v0['bad'] is a Sequence" in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("batch", [True, False])
def test_a_vector_environment_gives_what_a_local_one_gives(cart_pole: str, mode: AutoresetMode, batch: bool) -> None:
    number = 9
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * number, autoreset_mode=mode)
    remote = RemoteVectorEnv(cart_pole, number, autoreset_mode=mode, batch=batch)
    with contextlib.closing(local), contextlib.closing(remote):
        assert remote.observation_space == local.observation_space
        assert remote.action_space == local.action_space
        assert remote.metadata["autoreset_mode"] is mode
        local.action_space.seed(7)
        assert data_equivalence(remote.reset(seed=3), local.reset(seed=3), exact=True)
        for _ in range(60):
            actions = local.action_space.sample()
            ours, theirs = remote.step(actions), local.step(actions)
            assert data_equivalence(ours, theirs, exact=True)
            over = theirs[2] | theirs[3]
            if mode is AutoresetMode.DISABLED and over.any():
                ours, theirs = (env.reset(options={"reset_mask": over}) for env in (remote, local))
                assert data_equivalence(ours, theirs, exact=True)


def test_a_terminal_step_ends_the_session_unless_a_close_follows(count: Running) -> None:
    for headers, status in ({}, 404), ({"x-ng-close-follows": "1"}, 409):
        caller = Caller(url(count))
        assert caller.post("/reset").status == 200
        steps = [caller.post("/step", {"action": 0}, headers=headers).content for _ in range(4)]
        assert [each["observation"] for each in steps] == [[1.0], [2.0], [3.0], [4.0]]
        assert [each["terminated"] for each in steps] == [False, False, False, True]
        assert caller.post("/step", {"action": 0}).status == status
        assert caller.post("/reset").status == 200
        assert caller.post("/step", {"action": 1}).content["observation"] == [1.0]
        assert caller.post("/close_session").status == 200
        assert caller.post("/close_session").status == 200


BAD_STEPS = [
    (b"{", 422, "the body"),
    (b"[1]", 422, "the body"),
    (b'{"action": NaN}', 422, "the body"),
    (b"{}", 422, "action"),
    (b'{"action": 3}', 422, "action"),
    (b'{"action": -1}', 422, "action"),
    (b'{"action": 1.5}', 422, "action"),
    (b'{"action": "1"}', 422, "action"),
    (b'{"action": true}', 422, "action"),
    (b'{"action": null}', 422, "action"),
    (b'{"action": [1]}', 422, "action"),
    (b'{"action": 99999999999999999999999}', 422, "action"),
    (b'{"action": 1, "then_reset": 1}', 422, "then_reset"),
    (b'{"action": 1, "x": "' + b"x" * (17 * 2**20) + b'"}', 413, "The body"),
]


@pytest.mark.parametrize(("body", "status", "named"), BAD_STEPS, ids=[repr(body[:30]) for body, _, _ in BAD_STEPS])
def test_a_bad_step_is_refused_by_name_and_changes_nothing(
    count: Running, body: bytes, status: int, named: str
) -> None:
    caller = Caller(url(count))
    caller.post("/reset")
    caller.post("/step", {"action": 0})
    refused = caller.post("/step", raw=body)
    assert refused.status == status, refused
    assert refused.content["error"]["detail"].startswith(named)
    assert caller.post("/step", {"action": 0}).content["observation"] == [2.0]
    caller.post("/close_session")


def test_a_step_before_a_reset_is_refused_and_leaves_no_cookie(count: Running) -> None:
    refused = Caller(url(count)).post("/step", {"action": 0})
    assert (refused.status, refused.code) == (404, "session_lost")
    assert "reset it first" in refused.content["error"]["detail"]
    assert "set-cookie" not in refused.headers


def test_there_is_nothing_to_seed_or_verify(count: Running) -> None:
    for path in ("/seed_session", "/verify"):
        refused = Caller(url(count)).post(path, {})
        assert (refused.status, refused.code) == (404, "not_found")
        assert "POST /reset, /step" in refused.content["error"]["detail"]
        assert "set-cookie" not in refused.headers


@pytest.mark.parametrize("body", [{"seed": -1}, {"seed": "1"}, {"seed": 1.5}, {"seed": 2**53}, {"options": [1]}])
def test_a_bad_reset_is_refused_by_name(count: Running, body: dict[str, Any]) -> None:
    caller = Caller(url(count))
    refused = caller.post("/reset", body)
    assert refused.status == 422
    assert refused.content["error"]["fields"][0]["field"] == next(iter(body))
    assert not caller.cookies


def test_an_environment_that_fails_can_only_be_reset(count: Running) -> None:
    caller = Caller(url(count))
    failed = caller.post("/reset", {"options": {"fail": True}})
    assert (failed.status, failed.code) == (500, "environment_failed")
    caller.post("/reset")
    failed = caller.post("/step", {"action": 2})
    assert (failed.status, failed.code) == (500, "environment_failed")
    assert caller.post("/step", {"action": 0}).code == "episode_over"
    assert caller.post("/reset").status == 200
    assert caller.post("/step", {"action": 0}).content["observation"] == [1.0]
    caller.post("/close_session")


def test_a_batch_answers_each_item_and_runs_what_is_there(count: Running) -> None:
    here, there = Caller(url(count)), Caller(url(count))
    reset = here.post("/reset")
    owner = {"x-ng-session-owner": reset.headers["x-ng-session-owner"]}
    while (elsewhere := there.post("/reset")).headers["x-ng-session-owner"] == owner["x-ng-session-owner"]:
        there.post("/close_session")
        there.cookies.clear()
    mine, other = reset.content["session_id"], elsewhere.content["session_id"]
    items = [
        {"session_id": mine, "action": 1},
        {"session_id": other, "action": 1},
        {"session_id": mine, "action": 7},
        {"session_id": "nobody's", "action": 1},
        {"session_id": mine, "action": 1},
        {"action": 1},
        {"session_id": mine, "reset": {"seed": -1}},
        {"session_id": mine, "reset": {}},
        {"session_id": mine, "action": 2},
    ]
    answers = Caller(url(count)).post("/batch", {"items": items}, headers=owner).content["items"]
    found = [each.get("observation") or each["error"]["code"] for each in answers]
    assert found == [
        [1.0],
        "not_here",
        "invalid_request",
        "not_here",
        [2.0],
        "invalid_request",
        "invalid_request",
        [0.0],
        "environment_failed",
    ]
    assert "items.5.session_id" in answers[5]["error"]["detail"]
    assert "items.6.reset.seed" in answers[6]["error"]["detail"]
    assert there.post("/step", {"action": 1}).content["observation"] == [1.0]
    gone = Caller(url(count)).post("/batch", {"items": items}, headers={"x-ng-session-owner": "0" * 32})
    assert gone.status == 410
    for caller in (here, there):
        caller.post("/close_session")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_many_environments_of_nested_spaces_on_one_worker_are_what_they_are_in_process(
    every: str, mode: AutoresetMode
) -> None:
    local = SyncVectorEnv([rl_envs.Every] * 3, autoreset_mode=mode)
    remote = RemoteVectorEnv(every, 3, autoreset_mode=mode.value)
    with contextlib.closing(local), contextlib.closing(remote):
        assert remote.observation_space == local.observation_space
        local.action_space.seed(3)
        assert data_equivalence(remote.reset(seed=1)[0], local.reset(seed=1)[0], exact=True)
        for _ in range(9):  # three steps are an episode
            actions = local.action_space.sample()
            ours, theirs = remote.step(actions), local.step(actions)
            assert data_equivalence(ours[:4], theirs[:4], exact=True)
            see_the_same_infos(ours[4], theirs[4])
            if mode is AutoresetMode.DISABLED and theirs[2].any():
                ours, theirs = (env.reset(options={"reset_mask": theirs[2]}) for env in (remote, local))
                assert data_equivalence(ours[0], theirs[0], exact=True)


def see_the_same_infos(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """But for what is another thread's or process's here than there."""
    own = {"thread", "_thread", "pid", "_pid"}
    assert ours.keys() - own == theirs.keys() - own
    for name in theirs.keys() - own - {"final_obs", "options"}:
        if name == "final_info":
            see_the_same_infos(ours[name], theirs[name])
        else:
            assert np.array_equal(ours[name], theirs[name], equal_nan=name == "odd"), name
    assert data_equivalence(list(ours.get("final_obs", [])), plain_all(theirs.get("final_obs", [])))


def test_a_close_that_fails_can_be_sent_again(count: Running) -> None:
    caller = Caller(url(count))
    caller.post("/reset", {"options": {"failing_closes": 1}})
    failed = caller.post("/close_session")
    assert (failed.status, failed.code) == (503, "release_failed")
    assert caller.post("/step", {"action": 0}).code == "session_closing"
    assert caller.post("/close_session").status == 200
    assert caller.post("/step", {"action": 0}).code == "session_lost"


def test_a_lost_worker_is_told_and_a_reset_goes_on(count: Running) -> None:
    """The last that asks the counting server for anything: it kills one of its workers."""
    env, many = RemoteEnv(url(count)), RemoteVectorEnv(url(count), 8)
    with contextlib.closing(env), contextlib.closing(many):
        pid = env.reset()[1]["pid"]
        many.reset()
        many.step(np.ones(8, dtype=np.int64))
        os.kill(pid, signal.SIGKILL)
        count.wait_for(rf"worker \[{pid}\] exited")
        with pytest.raises(RemoteError) as lost:
            env.step(1)
        assert (lost.value.status, lost.value.code) == (410, "session_gone")
        with pytest.raises(RemoteError) as lost:
            many.step(np.ones(8, dtype=np.int64))
        assert lost.value.status == 410
        assert env.reset()[1]["pid"] != pid
        assert env.step(1)[0] == 1.0
        many.reset()
        observations = many.step(np.ones(8, dtype=np.int64))[0]
        assert observations.tolist() == [[1.0]] * 8


@pytest.mark.long
def test_a_limit_of_sessions_counts_the_open_ones() -> None:
    options = ("tests.support.rl_envs:Count-v0", "--max-sessions-per-worker", "2")
    with served(*options, workers=2) as server:
        opened: list[Caller] = []
        while (answer := (caller := Caller(url(server))).post("/reset")).status == 200:
            opened.append(caller)
            assert len(opened) <= 4
        assert (answer.status, answer.code) == (503, "session_limit")
        assert len(opened) >= 2
        for caller in opened:
            assert caller.post("/close_session").status == 200
        assert Caller(url(server)).post("/reset").status == 200
        server.stop()


@pytest.mark.timeout(300)
def test_the_example_learns_through_four_workers_as_it_does_in_process(
    frozen_lake: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "examples.q_learning", "--steps", "400"]
    remote = subprocess.run(
        [*command, url(frozen_lake)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    ).stdout
    monkeypatch.setattr(sys, "argv", command[2:])
    q_learning.main()
    assert remote == capsys.readouterr().out
    shares = [float(line.split()[2]) for line in remote.splitlines()]
    assert shares[0] < 0.3
    assert shares[-1] > 0.6


@pytest.mark.timeout(300)
def test_a_thousand_sessions_at_once_on_four_workers(frozen_lake: Running) -> None:
    number = 1000
    local = SyncVectorEnv([lambda: gymnasium.make("FrozenLake-v1", is_slippery=False)] * number)
    remote = RemoteVectorEnv(url(frozen_lake), number)
    with contextlib.closing(local), contextlib.closing(remote):
        local.action_space.seed(1)
        assert data_equivalence(remote.reset(seed=1), local.reset(seed=1), exact=True)
        for _ in range(4):
            actions = local.action_space.sample()
            assert data_equivalence(remote.step(actions), local.step(actions), exact=True)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_100_000_steps_are_what_they_are_in_process() -> None:
    number = 100
    with served("CartPole-v1", workers=4) as server:
        local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * number)
        remote = RemoteVectorEnv(url(server), number)
        with contextlib.closing(local), contextlib.closing(remote):
            local.action_space.seed(11)
            assert data_equivalence(remote.reset(seed=5), local.reset(seed=5), exact=True)
            for _ in range(1000):
                actions = local.action_space.sample()
                assert data_equivalence(remote.step(actions), local.step(actions), exact=True)
        assert server.stop() == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_20_000_open_sessions_on_one_server_each_keep_their_count() -> None:
    number = 20_000
    with served("tests.support.rl_envs:Count-v0", workers=2) as server:
        with contextlib.closing(RemoteVectorEnv(url(server), number)) as env:
            env.reset()
            for count in range(1, 4):
                observations = env.step(np.ones(number, dtype=np.int64))[0]
                assert (observations == count).all()
        assert server.stop() == 0


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    """One worker, two threads, which take environments in turn. Each test closes all of its own, so the next finds both empty."""
    options = ("--threads", "2", "--step-timeout", "1")
    with served("tests.support.rl_envs:Count-v0", *options, workers=1) as server:
        yield server


def test_an_environment_that_hangs_costs_its_thread_and_what_lives_there(impatient: Running) -> None:
    at = url(impatient)
    hanging, other, waiting = Caller(at), Caller(at), Caller(at)  # the first and the last share a thread
    hanging.post("/reset", {"options": {"hangs_at": 1}})
    other.post("/reset")
    waiting.post("/reset")
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(caller.post, "/step", {"action": 0}) for caller in (hanging, waiting)]
        hung = steps[0].result(120)
        steps[1].result(120)
    assert (hung.status, hung.code) == (504, "environment_hung")
    impatient.wait_for("has not ended a step, reset or close within 1 s")
    impatient.wait_for("in _wait_for_ever")  # where it hangs
    # What lived on the thread is lost, and says so; nothing begins anew by itself, and the other thread is as it was.
    for caller in (hanging, waiting):
        lost = caller.post("/step", {"action": 0})
        assert (lost.status, lost.code) == (404, "session_lost")
        assert caller.post("/reset").status == 200
        assert caller.post("/step", {"action": 0}).content["observation"] == [1.0]
    assert other.post("/step", {"action": 0}).content["observation"] == [1.0]
    told = Caller(at).call("GET", "/healthz").content
    assert (told["environments"], told["threads_given_up"]) == (3, 1)
    # A close that hangs does not keep its session.
    for caller in (other, waiting):
        assert caller.post("/close_session").status == 200
    hanging.post("/reset", {"options": {"hang_in_close": True}})
    assert hanging.post("/close_session").status == 503
    assert hanging.post("/close_session").status == 200


def test_a_hanging_environment_leaves_the_rest_of_a_batch_as_it_is(impatient: Running) -> None:
    callers = [Caller(url(impatient)) for _ in range(4)]
    options = [{"hangs_at": 2}, {}, {}, {}]  # places 0 and 2 share a thread, and so do 1 and 3
    named = [
        caller.post("/reset", {"options": each}).content["session_id"]
        for caller, each in zip(callers, options, strict=True)
    ]
    items = [{"session_id": session_id, "action": 0} for session_id in named]
    for expected in (
        [[1.0], [1.0], [1.0], [1.0]],
        ["environment_hung", [2.0], "environment_hung", [2.0]],
        ["not_here", [3.0], "not_here", [3.0]],
    ):
        answers = Caller(url(impatient)).post("/batch", {"items": items}).content["items"]
        assert [each.get("observation") or each["error"]["code"] for each in answers] == expected
    for caller in callers:
        caller.post("/close_session")


def test_an_environment_that_hangs_while_it_is_made_leaves_no_session(impatient: Running) -> None:
    caller = Caller(url(impatient))
    hung = caller.post("/reset", {"options": {"hang": True}})
    assert (hung.status, hung.code) == (504, "environment_hung")
    assert caller.call("GET", "/healthz").content["environments"] == 0
    assert caller.post("/reset").status == 200
    assert caller.post("/close_session").status == 200


def test_open_environments_are_closed_as_the_server_stops(impatient: Running) -> None:
    """The last of that server. One that hangs keeps neither the others from being closed nor the process from its end."""
    for options in ({"failing_closes": 9}, {"hang_in_close": True}, {}):
        assert Caller(url(impatient)).post("/reset", {"options": options}).status == 200
    assert impatient.stop() in (0, -signal.SIGTERM)
    assert len(impatient.find("was not released")) == 2


def test_a_vector_deals_its_sessions_out_evenly(frozen_lake: Running) -> None:
    before = sessions_of_each(frozen_lake, 4)
    with contextlib.closing(RemoteVectorEnv(url(frozen_lake), 12)) as many:
        many.reset(seed=1)
        after = sessions_of_each(frozen_lake, 4)
        assert {worker: after[worker] - count for worker, count in before.items()} == dict.fromkeys(before, 3)


def sessions_of_each(server: Running, workers: int) -> dict[str, int]:
    """How many environments each worker has, by the worker's ID."""
    found: dict[str, int] = {}
    while len(found) < workers:
        told = Caller(url(server)).call("GET", "/healthz").content
        found[told["worker"]] = told["environments"]
    return found
