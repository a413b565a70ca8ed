"""Several workers of one web server, as real processes: each session at its own, and what becomes of it when that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.running import ROOT, Running, running, wait_until_gone

from homing.runtime.secret import SERVER_SECRET_ENV

TASK = {"benchmark": "fake", "task_id": "count"}
APP = ("tests.support.web_app:server", "--factory")


def client_of(server: Running) -> httpx.Client:
    """One that opens a new connection for every request, so that any worker may take it."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30, limits=limits)


def seeded(server: Running, count: int, **more: Any) -> list[httpx.Client]:
    clients = [client_of(server) for _ in range(count)]
    for client in clients:
        reply = client.post("/seed_session", json={"task": {**TASK, **more}})
        assert reply.status_code == 200, reply.text
    return clients


def health_of_all(server: Running, workers: int) -> dict[str, dict[str, Any]]:
    """Each worker's health, by its ID."""
    found: dict[str, dict[str, Any]] = {}
    with client_of(server) as client:
        for _ in range(400):
            health = client.get("/healthz").json()
            found[health["worker"]] = health
            if len(found) == workers:
                return found
    raise AssertionError(f"only {len(found)} of {workers} workers answered")


def pids_of(server: Running, workers: int) -> set[int]:
    healths = health_of_all(server, workers).values()
    return {pid for health in healths for pid in health["browser_provider"]["pids"]}


# The worst case of a restart: old cookies are still good. One that this server did not sign is gone in any case.
SECRET = {SERVER_SECRET_ENV: "a secret that survives the restart"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One for all tests but those of `restarted`, which come last: starting one costs more than most of them."""
    with running(*APP, "--workers", "2", cwd=ROOT, env=SECRET) as started:
        started.wait_for("Application startup complete", 2)
        yield started


@pytest.fixture(scope="module")
def restarted(server: Running) -> Iterator[tuple[Running, list[str], set[int]]]:
    """A second one after the first was killed outright, the cookies of the first one's sessions, and their browsers."""
    clients = seeded(server, 4)
    pids = pids_of(server, 2)
    assert len(pids) == 4
    cookies = [f"WebServer___server={client.cookies['WebServer___server']}" for client in clients]
    for pid in [server.process.pid, *server.workers()]:
        os.kill(pid, signal.SIGKILL)
    for client in clients:
        client.close()
    with running(*APP, "--workers", "2", cwd=ROOT, env=SECRET) as second:
        second.wait_for("Application startup complete", 2)
        yield second, cookies, pids


def test_every_call_reaches_the_worker_of_its_session(server: Running) -> None:
    clients = seeded(server, 8)
    for number in range(1, 6):
        for client in clients:
            assert (
                client.post("/step", json={"operation_id": str(number), "action": "noop()"}).json()["reward"] == number
            )
    healths = health_of_all(server, 2)
    assert sum(health["sessions"] for health in healths.values()) == 8
    pids = {pid for health in healths.values() for pid in health["browser_provider"]["pids"]}
    assert len(pids) == 8
    for client in clients:
        assert client.post("/verify", json={}).json()["reward"] == 5.0
        client.close()
    for pid in pids:
        wait_until_gone(pid, 5.0)


def test_a_close_without_a_cookie_reaches_the_worker_of_its_session(server: Running) -> None:
    for number in range(6):
        identity = {"_ng_session_id": f"closed-by-name-{number:04}", "_ng_session_close_token": "t" * 32}
        with client_of(server) as client:
            assert client.post("/seed_session", json={**identity, "task": TASK}).status_code == 200
        for _ in range(2):
            with client_of(server) as other:
                assert other.post("/close", json=identity).json()["closed"] is True
        with client_of(server) as late:
            reply = late.post("/seed_session", json={**identity, "task": TASK})
            assert (reply.status_code, reply.json()["error_kind"]) == (409, "session_conflict")
    assert pids_of(server, 2) == set()


def test_a_site_is_one_writers_over_all_workers(server: Running) -> None:
    holders = seeded(server, 1, sites=["shop"])
    # Whichever worker takes it: the site is taken, so it waits, and has its turn when the first one ends.
    with client_of(server) as second:
        before = time.monotonic()
        with pytest.raises(httpx.ReadTimeout):
            second.post("/seed_session", json={"task": {**TASK, "sites": ["shop"]}}, timeout=0.3)
        assert time.monotonic() - before < 10
    readers = seeded(server, 2, sites=["wiki"], mutation_class="read_only")
    for client in [*holders, *readers]:
        assert client.post("/close").json()["closed"] is True
        client.close()
    (last,) = seeded(server, 1, sites=["shop"])
    assert last.post("/close").json()["closed"] is True
    last.close()


def test_sessions_of_a_killed_worker_are_gone_their_browsers_end_and_the_others_live(server: Running) -> None:
    clients = seeded(server, 8, sites=["forum"], mutation_class="read_only")
    victim = server.workers()[0]
    pids = pids_of(server, 2)
    os.kill(victim, signal.SIGKILL)
    wait_until_gone(victim, 5.0)
    server.wait_for("Application startup complete", 3)  # the one in its place, which ends what it had left
    lost = 0
    for client in clients:
        reply = client.post("/step", json={"action": "noop()"})
        if reply.status_code == 200:
            assert reply.json()["reward"] == 1.0
        else:
            lost += 1
            assert (reply.status_code, reply.json()["error_kind"]) == (410, "session_gone")
            assert reply.headers["homing-error"] == "session_gone"
            # And it stays gone: no empty new session under the old cookie.
            assert client.get("/observe").json()["error_kind"] == "session_gone"
    assert 0 < lost < 8
    alive = pids_of(server, 2)
    assert len(alive) == 8 - lost
    for pid in pids - alive:
        wait_until_gone(pid, 5.0)
    # The dead worker's share of the site went with it; the living ones' did not.
    for client in clients:
        client.post("/close")
        client.close()
    (writer,) = seeded(server, 1, sites=["forum"])
    assert writer.post("/close").json()["closed"] is True
    writer.close()


def test_after_the_whole_server_was_killed_old_cookies_are_gone_and_its_browsers_are_ended(
    restarted: tuple[Running, list[str], set[int]],
) -> None:
    second, cookies, pids = restarted
    for pid in pids:
        wait_until_gone(pid, 2.0)
    with client_of(second) as late:
        for cookie in cookies:
            for method, path in (("POST", "/step"), ("GET", "/observe"), ("POST", "/evaluate")):
                reply = late.request(
                    method, path, json={"action": "noop()"} if path == "/step" else {}, headers={"cookie": cookie}
                )
                assert (reply.status_code, reply.json()["error_kind"]) == (404, "session_lost"), reply.text
                assert "gone" in reply.json()["detail"]
    assert sum(health["sessions"] for health in health_of_all(second, 2).values()) == 0


def test_a_server_that_is_stopped_ends_its_browsers(restarted: tuple[Running, list[str], set[int]]) -> None:
    second, _, _ = restarted
    clients = seeded(second, 4)
    pids = pids_of(second, 2)
    assert len(pids) == 4
    assert second.stop() == 0
    for pid in pids:
        wait_until_gone(pid, 5.0)
    for client in clients:
        client.close()
