"""A server with real browsers that is killed outright: what it leaves is ended by the next one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.soak_web.faults import descendants, marked
from tests.support.chromium import require_chromium
from tests.support.running import HOMING, ROOT, Running, running, wait_until_gone

from homing.web.chromium.browser import kind_of
from homing.web.processes import end, is_running, mark

TASK = {"benchmark": "miniwob", "task_id": "click-test", "seed": 0}
SERVE = (*HOMING, "web", "serve")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One for both tests; the second one kills it."""
    require_chromium()
    with running("--tasks", "miniwob", "--workers", "2", cwd=ROOT, command=SERVE) as started:
        started.wait_for("all 2 workers are ready")
        yield started


def test_a_stopped_page_that_outlived_its_browser_and_its_worker_is_ended_by_the_worker_in_its_place(
    server: Running,
) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=90) as client:
        assert client.post("/seed_session", json={"task": TASK}).status_code == 200
    (worker, pages) = next(
        (worker, pages)
        for worker in server.workers()
        if (pages := [each for pid in descendants(worker) if (each := mark(pid)) and kind_of(each) == "renderer"])
    )
    leader = os.getsid(pages[0].pid)
    drivers = [pid for pid in descendants(worker) if os.getsid(pid) != leader]
    assert drivers
    for page in pages:
        os.kill(page.pid, signal.SIGSTOP)
    try:
        # The worker cannot see to it any more, its driver would end the browser's group, and who could be told by its mark is
        # gone before anybody looks.
        os.kill(worker, signal.SIGSTOP)
        for pid in (*drivers, leader):
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(leader, 20.0)
        os.kill(worker, signal.SIGKILL)
        wait_until_gone(worker, 20.0)
        assert all(is_running(page) for page in pages)
        server.wait_for("Application startup complete", 3)
        for page in pages:
            wait_until_gone(page.pid, 5.0)
    finally:
        end(pages, 5.0)


def test_browsers_of_a_killed_server_are_ended_in_two_seconds_and_other_peoples_are_left_alone(
    server: Running,
) -> None:
    binary = require_chromium()
    with tempfile.TemporaryDirectory() as profile:
        other = subprocess.Popen(
            [
                *(str(binary.path), "--headless", "--no-sandbox", "--remote-debugging-port=0"),
                *(f"--user-data-dir={profile}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _kill_and_start_again(server)
            assert other.poll() is None
        finally:
            os.killpg(other.pid, signal.SIGKILL)
            other.wait()


def _kill_and_start_again(first: Running) -> None:
    cookies = []
    for _ in range(3):
        with httpx.Client(base_url=f"http://127.0.0.1:{first.port}", timeout=90) as client:
            assert client.post("/seed_session", json={"task": TASK}).status_code == 200
            cookies.append(f"WebServer___server={client.cookies['WebServer___server']}")
    workers = first.workers()
    browsers = [found for worker in workers for pid in descendants(worker) if (found := mark(pid)) is not None]
    assert len(browsers) >= 4  # drivers and browsers of at least one worker
    # Stopped, they cannot notice that their driver or its worker is gone.
    for process in browsers:
        os.kill(process.pid, signal.SIGSTOP)
    for pid in [first.process.pid, *workers]:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        wait_until_gone(pid, 5.0)
    assert all(is_running(process) for process in browsers)
    with running("--tasks", "miniwob", "--workers", "2", cwd=ROOT, command=SERVE) as second:
        second.wait_for("Application startup complete")
        began = time.monotonic()
        for process in browsers:
            wait_until_gone(process.pid, max(0.0, 2.0 - (time.monotonic() - began)))
        assert marked(set(workers)) == []
        with httpx.Client(base_url=f"http://127.0.0.1:{second.port}", timeout=30) as client:
            for cookie in cookies:
                reply = client.get("/observe", headers={"cookie": cookie})
                assert (reply.status_code, reply.json()["error_kind"]) == (404, "session_lost")
