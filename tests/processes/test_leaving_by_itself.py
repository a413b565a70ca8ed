"""Workers that leave though nobody has told them to, and workers that do not exit though all is served."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.test_drain import connected, ends_asking, half_asked, is_at, serving, start
from tests.support.running import Running, until, wait_until_gone

from homing.runtime.leaving import TAKES_WITHIN_SECONDS

PROMPT = ("--timeout-graceful-shutdown", "4")


def thread_at(server: Running, pid: int) -> None:
    """A session at this worker, and a thread beside it that Python would wait for, for ever."""
    while True:
        session, at = start(server.port)
        if at == pid:
            break
    with connected(server.port) as connection:
        assert connection.document("POST", f"/sessions/{session}/thread")["pid"] == pid


def test_a_restart_goes_on_past_workers_whose_threads_do_not_end() -> None:
    with serving("--drain-timeout", "1", *PROMPT) as server:
        before = server.workers()
        for pid in before:
            thread_at(server, pid)
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for("all 2 workers were restarted", timeout_seconds=40)
        for pid in before:
            wait_until_gone(pid, 20)
        server.wait_for(r"has served all and does not exit, so it is ended now: its threads go on \(endless\)", 2)
        # And the next one too.
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for("all 2 workers were restarted", 2, timeout_seconds=40)


@contextlib.contextmanager
def slow_to_shut_down(tmp_path: Path, shutdown: str, graceful_seconds: int) -> Iterator[tuple[Running, Path]]:
    """A server whose app is so in its shutdown, and its notes."""
    notes = tmp_path / "notes"
    env = {"TEST_NOTES": str(notes), "TEST_SHUTDOWN": shutdown}
    options = ("--drain-timeout", "1", "--timeout-graceful-shutdown", str(graceful_seconds))
    with serving(*options, app="tests.processes.apps:slow_to_shut_down", env=env) as server:
        yield server, notes


@pytest.mark.parametrize("shutdown", ["never", "blocks"])
def test_a_restart_goes_on_past_workers_whose_app_does_not_end_its_shutdown(tmp_path: Path, shutdown: str) -> None:
    with slow_to_shut_down(tmp_path, shutdown, 2) as (server, notes):
        before = server.workers()
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for("all 2 workers were restarted", timeout_seconds=40)
        for pid in before:
            wait_until_gone(pid, 20)
        assert sorted(notes.read_text().split("\n")[:-1]) == sorted(f"shutdown {pid}" for pid in before)
        server.wait_for("so it is ended now: its app's shutdown goes on", 2)
        os.killpg(server.process.pid, signal.SIGKILL)  # a stop would wait for the app


def test_a_server_that_is_stopped_waits_for_its_apps_shutdown_whatever_its_graceful_limit(tmp_path: Path) -> None:
    """As uvicorn does: an app may have much to put away."""
    with slow_to_shut_down(tmp_path, "4", 1) as (server, notes):
        assert server.stop() == 0
        assert notes.read_text().count("complete") == 2


def test_a_worker_that_was_to_serve_so_many_requests_is_replaced_whatever_its_threads_do() -> None:
    with serving("--limit-max-requests", "40", *PROMPT) as server:
        for pid in server.workers():
            thread_at(server, pid)
        for _ in range(100):
            with connected(server.port) as connection:
                assert connection.ask("GET", "/")[0] == 200
        server.wait_for(r"exited \(exit code 0\); its sessions are gone", 2, timeout_seconds=40)


@pytest.mark.parametrize("place", ["accepting", "balanced"])
def test_streams_of_workers_that_have_served_their_number_keep_nobody_waiting(place: str) -> None:
    """All workers reach their number at about the same time, and a stream that its client never ends keeps each of them."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("--limit-max-requests", "20", "--place", place, *PROMPT))
        before = server.workers()
        session, _ = start(server.port)
        for _ in range(8):
            stream = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            stream.sendall(b"GET /sessions/%s/events HTTP/1.1\r\nHost: a\r\n\r\n" % session.encode())
            assert stream.recv(12) == b"HTTP/1.1 200"
        leave = r"worker \[(\d+)\] is replaced by worker"
        while len(server.find(leave)) < 2:
            with connected(server.port) as connection:  # times out, and fails, if nobody accepts
                assert connection.ask("GET", "/")[0] == 200
        assert {int(each[1]) for each in server.find(leave)[:2]} == set(before)
        # Their time to finish is limited, so they go too.
        until(lambda: not set(before) & set(server.workers()), server, 40)


def test_no_session_begins_at_a_worker_that_has_served_its_number_of_requests() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            serving("--limit-max-requests", "60", "--place", "balanced", "--timeout-graceful-shutdown", "20")
        )
        session, _ = start(server.port)
        streaming, asking = (stack.enter_context(connected(server.port)) for _ in range(2))
        leaver = int(streaming.ask("GET", "/")[1].split()[-1])
        assert streaming.socket is not None
        streaming.socket.sendall(b"GET /sessions/%s/events HTTP/1.1\r\nHost: a\r\n\r\n" % session.encode())
        assert streaming.socket.recv(12) == b"HTTP/1.1 200"
        while int(asking.ask("GET", "/")[1].split()[-1]) != leaver:
            asking = stack.enter_context(connected(server.port))
        while not server.find("Maximum request limit"):
            assert asking.ask("GET", "/")[0] == 200
        server.wait_for(rf"worker \[{leaver}\] is replaced")
        assert leaver not in {start(server.port)[1] for _ in range(12)}
        assert leaver in server.workers()


def test_a_client_that_has_sent_half_a_head_as_its_worker_reaches_its_number_is_heard_out() -> None:
    with serving("--limit-max-requests", "20") as server, contextlib.ExitStack() as stack:
        asking = stack.enter_context(connected(server.port))
        leaver = int(asking.ask("GET", "/")[1].split()[-1])
        half = [half_asked(stack.enter_context(connected(server.port))) for _ in range(8)]
        until(lambda: any(is_at(each, leaver) for each in half), server)
        half = [each for each in half if is_at(each, leaver)]
        while not server.find("Maximum request limit"):
            assert asking.ask("GET", "/")[0] == 200
        replies = ends_asking(half)
        assert all(each.startswith(b"HTTP/1.1 200") and b"connection: close" in each.lower() for each in replies)


def test_idle_connections_of_workers_that_reach_their_number_together_wait_for_a_replacement(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    options = ("--limit-max-requests", "20")
    env = {"TEST_HOLD": str(hold)}
    with (
        serving(*options, app="tests.processes.apps:starts_when_told", env=env) as server,
        contextlib.ExitStack() as stack,
    ):
        hold.touch()
        # Connections of which one has not asked yet, and connections that have.
        idle = [stack.enter_context(connected(server.port)) for _ in range(12)]
        for each in idle[6:]:
            assert each.ask("GET", "/")[0] == 200
        before = server.workers()
        while len(server.find("Maximum request limit")) < 2:
            # Those that were accepted by nobody wait in a queue until somebody serves it.
            with contextlib.suppress(TimeoutError), connected(server.port) as connection:
                connection.socket.settimeout(0.5)
                connection.ask("GET", "/")
        server.wait_for("is replaced by", 2)
        # For longer than a worker tries without a pause to give connections away.
        closed, _, _ = select.select([each.socket for each in idle], [], [], TAKES_WITHIN_SECONDS + 1)
        assert not closed
        hold.unlink()
        assert [each.ask("GET", "/")[0] for each in idle] == [200] * 12
        for pid in before:
            wait_until_gone(pid, 20)
