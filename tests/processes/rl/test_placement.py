"""Where the sessions of RL servers begin, on whole servers: placed, under minted IDs and with path keys."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.processes.rl.test_agents import close
from tests.processes.test_metrics import starts_that_wait
from tests.support.launchers import UVICORN, launched
from tests.support.rl_agents import NOWHERE, said
from tests.support.running import ROOT, Running, running, until, wait_until_gone

from homing.rl.agents.checks import names
from homing.rl.calls import Answer, Caller

WORKERS = 3
TASK = {"task_id": {"taskset": "test", "task_id": "1"}}


class Client:
    """One keep-alive connection, so that all its requests arrive at one worker."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, path: str, content: Any) -> tuple[int, dict[str, Any], str]:
        """Status, JSON, and the cookie that was set."""
        self._http.request("POST", path, json.dumps(content), {"content-type": "application/json"})
        with self._http.getresponse() as reply:
            return reply.status, json.loads(reply.read()), (reply.getheader("set-cookie") or "").partition(";")[0]

    def close(self) -> None:
        self._http.close()


def is_spread(counts: Counter[Any], total: int) -> bool:
    mean = total / WORKERS
    return len(counts) == WORKERS and all(mean - 2 <= each <= mean + 2 for each in counts.values())


@pytest.fixture(scope="module")
def agent() -> Iterator[Running]:
    options = ("--factory", "--workers", str(WORKERS), "--place", "fewest", "--no-handoff", "--no-access-log")
    env = {"TEST_RESOURCES_URL": NOWHERE}
    with running("tests.support.rl_agents:echo", *options, cwd=ROOT, env=env) as server:
        server.wait_for(f"all {WORKERS} workers are ready")
        yield server
        assert server.stop() == 0, server.log


def pid_of(caller: Caller) -> int:
    return int(said(caller.post("/v1/responses", {"input": "hello"}).content)[0])


def test_rollouts_spread_and_all_that_names_one_reaches_its_worker(agent: Running) -> None:
    url = f"http://127.0.0.1:{agent.port}"
    at: Counter[int] = Counter()
    with contextlib.closing(Client(agent.port)) as client, ThreadPoolExecutor(12) as pool:
        sessions: list[tuple[Caller, dict[str, Any]]] = []
        for _ in range(12):
            session = names()
            status, _, cookie = client.post("/v1/agent_sessions", session | TASK)
            assert status == 200
            caller = Caller(url, dict([cookie.split("=", 1)]))
            sessions.append((caller, session))
            at[pid_of(caller)] += 1
        assert is_spread(at, 12), at
        # The second session of a rollout begins where its first one is, whatever else is there.
        for caller, session in list(sessions):
            again = names() | {"episode_id": session["episode_id"]}
            other = Caller(url)
            seeded: Answer = other.post("/v1/agent_sessions", again | TASK)
            assert seeded.status == 200, seeded
            assert pid_of(other) == pid_of(caller)
            sessions.append((other, again))
        # And a stop, which knows the rollout only, finds what runs.
        runs = [pool.submit(caller.post, "/v1/responses", {"input": "wait"}) for caller, _ in sessions[:12]]
        for (_, session), response in zip(sessions[:12], runs, strict=True):
            path = f"/rollouts/{session['episode_id']['rollout_id']}/stop"
            while not Caller(url).post(path, {"reason": "enough"}).content["stopped"]:
                assert not response.done()  # until the activation runs, there is nothing to stop
            assert response.result(60).content["status"] == "incomplete"
    for caller, session in sessions:
        assert close(caller, session).status == 200


def test_closed_agent_sessions_take_no_place_and_a_drain_does_not_wait_for_what_is_remembered_of_them() -> None:
    options = ("--factory", "--workers", "2", "--max-sessions", "2", "--queue", "60", "--no-access-log")
    env = {"TEST_RESOURCES_URL": NOWHERE, "TEST_CLOSE_RETRY_WINDOW": "3600"}
    with running("tests.support.rl_agents:echo", *options, cwd=ROOT, env=env) as server, ThreadPoolExecutor(1) as pool:
        server.wait_for("all 2 workers are ready")
        url = f"http://127.0.0.1:{server.port}"

        def seed() -> tuple[Caller, dict[str, Any]]:
            caller, session = Caller(url), names()
            assert caller.post("/v1/agent_sessions", session | TASK).status == 200
            return caller, session

        held = [seed() for _ in range(2)]
        waiting = pool.submit(seed)
        until(lambda: starts_that_wait(server) == 1, server)
        assert close(*held.pop()).status == 200
        for each in (waiting.result(60), held.pop()):
            assert close(*each).status == 200
        old = server.workers()
        server.process.send_signal(signal.SIGHUP)
        for pid in old:
            wait_until_gone(pid, 60)
        server.wait_for("all 2 workers were restarted")
        assert server.stop() == 0


@contextlib.contextmanager
def placed_seeds(launcher: str) -> Iterator[int]:
    """The port of a server that places its own starts, by this launcher."""
    if launcher == "homing run":
        app = ("tests.support.placed_seeds:app", "--workers", str(WORKERS), "--no-access-log")
        with running(*app, cwd=ROOT) as server:
            server.wait_for(f"all {WORKERS} workers are ready")
            yield server.port
            assert server.stop() == 0
        return
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="homing-placed-") as folder:
        Path(folder).chmod(0o700)
        env = {"HOMING_SESSION_SOCKET_DIR": folder}
        context = launched(UVICORN, "tests.support.placed_seeds:app", workers=WORKERS, env=env, clean=False)
        launcher_process = runner.run(context.__aenter__())
        try:
            yield launcher_process.address[1]
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("launcher", ["homing run", "uvicorn"])
def test_seeds_without_an_id_spread_under_ids_that_are_minted_where_they_begin(launcher: str) -> None:
    with placed_seeds(launcher) as port, contextlib.closing(Client(port)) as client:
        made: list[tuple[dict[str, Any], str]] = []
        for number in range(12):
            status, seeded, cookie = client.post("/seed_session", {"episode_id": f"e{number}"})
            assert status == 200, seeded
            made.append((seeded, cookie))
        assert len({seeded["resources_session_id"] for seeded, _ in made}) == 12
        assert is_spread(at := Counter(seeded["worker"] for seeded, _ in made), 12), at
        for count in (1, 2, 3):
            for seeded, cookie in made:
                stepped = Caller(f"http://127.0.0.1:{port}", dict([cookie.split("=", 1)])).post(
                    "/increment_counter", {}
                )
                assert stepped.content == {"worker": seeded["worker"], "count": count}
        # As many as there may be; one that ends makes room.
        assert client.post("/seed_session", {"episode_id": "more"})[0] == 503
        caller = Caller(f"http://127.0.0.1:{port}", dict([made[0][1].split("=", 1)]))
        assert caller.post("/close_session", {}).status == 200
        assert client.post("/seed_session", {"episode_id": "more"})[0] == 200
