"""Where connections are accepted: one queue per worker, and none is lost or left waiting when a worker goes, hangs or dies."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.forwarding.setups import free_port
from tests.support.few_descriptors import descriptors
from tests.support.running import HOMING, ROOT, Running, environment, running, until, wait_until_gone
from tests.support.short_connections import Clients, accepted_by, ask, listening_sockets, listens_at, not_accepted

from homing.runtime.control import ask_to_drain
from homing.watch.servers import look_at

APP = "tests.processes.apps:app"
COUNTERS = (
    "tests.support.counter_app:app",
    *("--session", "path:/sessions/{session}", "--learn", "body:session@/sessions", "--start", "POST /sessions"),
    *("--no-access-log", "--drain-timeout", "20"),
)
SESSIONS = ("--session", "cookie:visit", "--no-access-log")

linux = pytest.mark.skipif(sys.platform != "linux", reason="one socket for all workers elsewhere")


@contextlib.contextmanager
def serving(*options: str, workers: int, env: dict[str, str | None] | None = None) -> Iterator[Running]:
    with running(*options, "--workers", str(workers), cwd=ROOT, env=env) as server:
        server.wait_for(f"all {workers} workers are ready")
        yield server


def answers(server: Running, count: int, path: str = "/who") -> None:
    """So many connections in a row, each answered: with two queues or more, some are spread to each."""
    for _ in range(count):
        _, how, _ = ask(server.port, path, timeout_seconds=40)
        assert how == "answered", (how, server.log)


# --- who may have a port ---


@linux
def test_each_worker_has_a_queue_of_its_own() -> None:
    with serving(APP, *SESSIONS, workers=3) as server:
        assert listening_sockets(server.port) == 3
        answers(server, 10)


@linux
@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::"])
def test_whatever_the_address_is_called(host: str) -> None:
    if host == "::":
        with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
            try:
                probe.bind(("::", 0))
            except OSError:
                pytest.skip("no IPv6 here")
    with serving(APP, *SESSIONS, "--host", host, workers=2) as server:
        answers(server, 6)
        second = [*HOMING, "run", APP, *SESSIONS, "--workers", "2", "--host", host, "--port", str(server.port)]
        done = subprocess.run(
            second, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 3
        assert f"cannot serve on port {server.port}" in done.stderr.splitlines()[-1]
        assert len(done.stderr.splitlines()) == 1
        answers(server, 2)


@linux
def test_of_two_servers_that_start_at_once_on_one_port_one_serves() -> None:
    """Neither listens yet when the other looks, and one user's sockets with SO_REUSEPORT would share the port unnoticed."""
    port = free_port()
    argv = [*HOMING, "run", APP, *SESSIONS, "--workers", "2", "--port", str(port)]
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(subprocess.Popen(argv, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        for each in both:
            stack.callback(each.terminate)
        until_one_ended(both)
        [loser] = [each for each in both if each.poll() is not None]
        [winner] = [each for each in both if each is not loser]
        assert loser.stderr is not None
        assert f"cannot serve on port {port}" in loser.stderr.read().splitlines()[-1]
        assert loser.returncode == 3
        _, how, _ = ask_until_answered(port)
        assert how == "answered"
        winner.send_signal(signal.SIGTERM)
        winner.communicate(timeout=60)
        assert winner.returncode == 0


def until_one_ended(processes: list[subprocess.Popen[str]]) -> None:
    with contextlib.ExitStack() as stack:
        ends = [os.pidfd_open(each.pid) for each in processes]
        for end in ends:
            stack.callback(os.close, end)
        assert select.select(ends, [], [], 90)[0], "none of them has ended"


def ask_until_answered(port: int) -> tuple[int, str, str]:
    deadline = time.monotonic() + 60
    while (found := ask(port, "/who"))[1] == "ConnectionRefusedError after 0 bytes":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_behind_a_unix_socket_all_workers_share_one(tmp_path: Path) -> None:
    path = tmp_path / "public"
    with serving(APP, *SESSIONS, "--uds", str(path), workers=2) as server:
        os.kill(server.workers()[0], signal.SIGKILL)
        for _ in range(10):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(30)
                client.connect(str(path))
                client.sendall(b"GET /who HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert b"200 OK" in client.makefile("rb").read()


# --- queues without a worker ---

QUEUED = 30
"""Connections, each with an even chance to be in the queue in question: that none is there is one chance in 10⁹."""


@linux
def test_a_dead_workers_queue_is_served_though_no_replacement_can_start(tmp_path: Path) -> None:
    trouble = tmp_path / "trouble"
    with serving(APP, *SESSIONS, workers=2, env={"TEST_FAIL_IF": str(trouble)}) as server:
        first, _ = server.workers()
        trouble.touch()
        os.kill(first, signal.SIGKILL)
        server.wait_for("a new worker could not start")
        answers(server, QUEUED)
        trouble.unlink()
        server.wait_for("Application startup complete", 3)
        answers(server, QUEUED)


@linux
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_worker_without_descriptors_is_lent_a_queue_once_it_has_some(tmp_path: Path, loop: str) -> None:
    trouble = tmp_path / "trouble"
    options = (APP, *SESSIONS, "--loop", loop)
    with serving(*options, workers=2, env={"TEST_FAIL_IF": str(trouble)}) as server:
        first, second = server.workers()
        trouble.touch()
        # What a worker opens for a moment as it starts, it has closed once its figures are there.
        until(lambda: (shown := look_at(server.run_directory)) is not None and len(shown.alive) == 2, server)
        with descriptors(second, 0):
            os.kill(first, signal.SIGKILL)
            server.wait_for("a new worker could not start")
            server.wait_for("cannot accept connections that wait for another worker: no descriptor is left")
            # It is lent it again and again, which the log says once.
            server.wait_for("a new worker could not start", 2)
        # Whatever it could not be lent, its supervisor is there, and so is it.
        answers(server, QUEUED)
        assert second in server.workers()
        assert len(server.find("cannot accept connections that wait")) == 1
        assert not server.find("the supervisor is gone")


@linux
def test_a_stopped_workers_queue_is_served_by_the_others() -> None:
    with serving(APP, *SESSIONS, workers=2) as server:
        first, second = server.workers()
        os.kill(first, signal.SIGSTOP)
        try:
            began = time.monotonic()
            # What it has accepted before waits for it; here that is nothing.
            answers(server, QUEUED)
            assert time.monotonic() - began < 29, "its supervisor had killed it"
            assert server.workers() == [first, second]
        finally:
            os.kill(first, signal.SIGCONT)
        answers(server, QUEUED)


@linux
def test_the_queue_of_a_worker_whose_event_loop_stands_still_is_served_by_the_others(tmp_path: Path) -> None:
    notes, end = tmp_path / "notes", tmp_path / "end"
    with (
        serving(APP, *SESSIONS, workers=2, env={"TEST_NOTES": str(notes)}) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as blocked,
    ):
        blocked.sendall(f"GET /block?until={end} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        until(lambda: "blocked" in notes.read_text(), server)
        answers(server, QUEUED)
        assert not end.exists()
        end.touch()
        assert b"200 OK" in blocked.makefile("rb").read()


@linux
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_worker_that_was_told_to_stop_leaves_its_queue_to_the_others_at_once(loop: str) -> None:
    with serving(APP, *SESSIONS, "--loop", loop, workers=2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n")
            assert client.recv(100)
            [at] = [pid for pid in server.workers() if client.getsockname()[1] in accepted_by(pid, server.port)]
            os.kill(at, signal.SIGTERM)
            server.wait_for("Waiting for connections to close")
            answers(server, QUEUED)
            assert at in server.workers(), "the stream holds it"
        wait_until_gone(at, 30)


@linux
def test_the_queue_of_a_worker_that_was_taken_away_is_served_and_given_to_the_next_that_is_added() -> None:
    with serving(APP, *SESSIONS, workers=2) as server:
        _, second = server.workers()
        server.process.send_signal(signal.SIGTTOU)
        wait_until_gone(second, 30)
        answers(server, QUEUED)
        assert listening_sockets(server.port) == 2
        server.process.send_signal(signal.SIGTTIN)
        server.wait_for("Application startup complete", 3)
        answers(server, QUEUED)
        assert listening_sockets(server.port) == 2


@linux
def test_what_is_lent_is_given_back() -> None:
    with serving(APP, *SESSIONS, workers=2) as server:
        first, second = server.workers()
        for restarts in range(2):
            assert listens_at(second, server.port) == 1
            os.kill(first, signal.SIGKILL)
            until(lambda: listens_at(second, server.port) == 2, server)
            server.wait_for("Application startup complete", 3 + restarts)
            until(lambda: listens_at(second, server.port) == 1, server)
            [first] = set(server.workers()) - {second}


# --- all at once ---


def churn(connections: int, restarts: int, kills: int, *, loop: str, seed: int) -> Clients:
    """So many connections at least, and meanwhile planned restarts of single workers, and kills. Nothing else may be lost."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    with serving(*COUNTERS, "--loop", loop, workers=3) as server:
        clients = Clients(server.port)
        clients.start(12)
        accepted: set[int] = set()
        killed_at: list[float] = []
        queued = 0
        faults = ["restart"] * restarts + ["kill"] * kills
        chance.shuffle(faults)
        for fault in faults:
            serving_now = [int(match[1]) for match in server.find(r"worker [0-9a-f]{32} \[(\d+)\] serves")]
            pid = chance.choice([each for each in serving_now if each in server.workers()])
            if fault == "restart":
                states = [each.state for each in ask_to_drain(server.run_directory, pid, look_seconds=60) if each]
                assert states[-1] == "drained", (states, server.log)
                continue
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: stopped(pid), server)
            # It has accepted what it has; what waits in its queue now must reach somebody else.
            with contextlib.suppress(AssertionError):
                until(lambda: not_accepted(server.port), server, seconds=0.6)
                queued += 1
            accepted |= accepted_by(pid, server.port)
            killed_at.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)
            server.wait_for(r"\[\d+\] serves", len(serving_now) + 1)
        until(lambda: clients.total >= connections, server, seconds=900)
        clients.stop()
        lost = [each for each in clients.broken if each.port not in accepted]
        # What another worker had sent on to one that was killed is answered 502: it was being served there.
        lost = [each for each in lost if not (each.how.startswith("answered 502") and within(each, killed_at))]
        assert lost == [], (seed, lost[:10], server.log[-5000:])
        print(
            f"{clients.total} connections, {len(clients.broken)} lost with {kills} killed workers, queued at {queued}"
        )
        assert queued or not kills, "nothing ever waited in a killed worker's queue"
        assert len(clients.answered) >= 3 + restarts // 2, "each of the workers has answered"
        assert server.stop() == 0
    return clients


def within(broken: object, killed_at: list[float]) -> bool:
    return any(broken.began <= at <= broken.ended for at in killed_at)  # type: ignore[attr-defined]


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@linux
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_short_connections_are_answered_while_workers_are_replaced_and_killed(loop: str) -> None:
    churn(600, restarts=1, kills=1, loop=loop, seed=random.randrange(1 << 30))


@linux
@pytest.mark.long
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_ten_thousand_short_connections_through_twenty_planned_restarts_and_five_kills(loop: str) -> None:
    churn(10_000, restarts=20, kills=5, loop=loop, seed=random.randrange(1 << 30))
