"""A server of several workers from start to stop: signals, deaths, restarts, and what is left afterwards."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.running import ROOT, Running, children, running, until, wait_until_gone
from tests.support.short_connections import listens_at

from homing.runtime.control import ask_to_drain

APP = "tests.processes.apps:app"
SESSIONS = ("--session", "cookie:visit")


def get(port: int, path: str = "/who", headers: dict[str, str] | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers or {})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        return json.loads(reply.read())


def ready(server: Running, workers: int) -> list[int]:
    server.wait_for(f"all {workers} workers are ready")
    return server.workers()


def notes(path: Path) -> list[tuple[str, int]]:
    return [(what, int(pid)) for what, pid in (line.split() for line in path.read_text().splitlines())]


def gone(server: Running, pids: list[int], *, within_seconds: float = 5.0) -> None:
    for pid in pids:
        wait_until_gone(pid, within_seconds)


@pytest.fixture(scope="module")
def three() -> Iterator[Running]:
    """A server of three workers for tests that only ask it things."""
    with running(APP, *SESSIONS, cwd=ROOT, env={"WEB_CONCURRENCY": "3"}) as server:
        ready(server, 3)
        yield server


def test_web_concurrency_counts_the_workers(three: Running) -> None:
    assert len(three.workers()) == 3


def test_a_session_stays_with_its_worker_over_new_connections(three: Running) -> None:
    seen = [{get(three.port, headers={"Cookie": f"visit={n}"})["pid"] for _ in range(5)} for n in range(12)]
    assert all(len(pids) == 1 for pids in seen)


def test_workers_may_open_as_many_files_as_the_system_allows(three: Running) -> None:
    soft, hard = get(three.port, "/limits")
    assert soft == hard


# What whoever runs the tests has set (the seed of a run to repeat, say) is theirs.
SURROUNDINGS = {name: value for name, value in os.environ.items() if name.startswith("HOMING_")}


def test_neither_run_directory_nor_secret_is_in_the_environment_of_what_the_app_starts(three: Running) -> None:
    assert get(three.port, "/surroundings") == SURROUNDINGS


def test_nor_with_one_worker() -> None:
    with running(APP, *SESSIONS, cwd=ROOT) as server:
        server.wait_for("Application startup complete")
        assert get(server.port, "/surroundings") == SURROUNDINGS


def test_the_clients_address_is_taken_from_a_trusted_proxy_served_here_or_forwarded(three: Running) -> None:
    headers = {"Cookie": "visit=proxied", "X-Forwarded-For": "203.0.113.9"}
    assert {get(three.port, headers=headers)["client"] for _ in range(10)} == {"203.0.113.9"}


def test_the_banner_says_how_the_server_runs(tmp_path: Path) -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        banner = server.wait_for(
            r"homing \S+: 2 workers, sessions named by cookie:visit, unowned: adopt, run directory (\S+)$"
        )
        directory = Path(banner[0][1])
        assert directory.stat().st_mode & 0o777 == 0o700
        ready(server, 2)
        assert get(server.port)["pid"] in server.workers()
        assert server.stop() == 0
        assert not directory.exists()


def test_app_starts_and_stops_once_per_worker(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    with running(APP, "--workers", "3", *SESSIONS, cwd=ROOT, env={"TEST_NOTES": str(path)}) as server:
        workers = ready(server, 3)
        assert sorted(notes(path)) == [("startup", pid) for pid in sorted(workers)]
        assert server.stop() == 0
    assert collections.Counter(notes(path)) == collections.Counter(
        [(what, pid) for what in ("startup", "shutdown") for pid in workers]
    )


def test_a_killed_worker_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    with running(APP, "--workers", "3", *SESSIONS, cwd=ROOT) as server:
        first, *others = ready(server, 3)
        os.kill(first, signal.SIGKILL)
        server.wait_for(rf"worker \[{first}\] exited \(signal SIGKILL\); its sessions are gone")
        server.wait_for("Application startup complete", 4)
        now = server.workers()
        assert first not in now
        assert set(others) < set(now)
        assert server.stop() == 0
        gone(server, now)


def test_a_worker_that_a_signal_without_a_name_has_ended_is_replaced_too() -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        first, second = ready(server, 2)
        number = signal.SIGRTMIN + 2
        os.kill(first, number)
        server.wait_for(rf"worker \[{first}\] exited \(signal {number}\); its sessions are gone")
        server.wait_for("Application startup complete", 3)
        assert second in server.workers()
        assert server.stop() == 0


def test_a_stopped_worker_is_killed_while_the_server_goes_on(tmp_path: Path) -> None:
    with running(APP, "--workers", "2", *SESSIONS, "--timeout-worker-healthcheck", "1", cwd=ROOT) as server:
        first, second = ready(server, 2)
        os.kill(first, signal.SIGSTOP)
        server.wait_for(rf"worker \[{first}\] did not answer within 1 s and is killed")
        server.wait_for("Application startup complete", 3)
        assert second in server.workers()


def look(server: Running) -> None:
    """Wait until the supervisor has looked at its workers: the second answer comes after the turn of the first."""
    for _ in range(2):
        [answer] = [each for each in ask_to_drain(server.run_directory, os.getpid(), look_seconds=60) if each]
        assert answer.state == "refused"


def test_a_server_that_was_paused_kills_no_worker_that_had_no_time_to_answer() -> None:
    with running(APP, "--workers", "2", *SESSIONS, "--timeout-worker-healthcheck", "5", cwd=ROOT) as server:
        first, second = ready(server, 2)
        os.kill(first, signal.SIGSTOP)
        # It has not answered for a second, so its queue is lent.
        until(lambda: listens_at(second, server.port) == 2, server)
        os.killpg(server.process.pid, signal.SIGSTOP)
        paused_at = time.monotonic()
        until(lambda: time.monotonic() - paused_at > 5, server)
        for pid in (server.process.pid, second):
            os.kill(pid, signal.SIGCONT)
        look(server)
        os.killpg(server.process.pid, signal.SIGCONT)
        until(lambda: listens_at(second, server.port) == 1, server)
        assert server.workers() == [first, second]
        assert not server.find("did not answer")


def test_sigterm_is_heeded_at_once_though_a_worker_does_not_answer() -> None:
    with running(APP, "--workers", "2", *SESSIONS, "--timeout-worker-healthcheck", "2", cwd=ROOT) as server:
        first, second = ready(server, 2)
        os.kill(first, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        wait_until_gone(second, 1.9)
        assert server.wait() == 0
        gone(server, [first])


def test_a_rolling_restart_replaces_every_worker_after_its_replacement_serves() -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        before = ready(server, 2)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("all 2 workers were restarted")
        gone(server, before)
        after = server.workers()
        assert len(after) == 2
        assert set(after).isdisjoint(before)
        stops = [i for i, line in enumerate(server.lines) if "drains: its sessions go on" in line]
        starts = [i for i, line in enumerate(server.lines) if "Application startup complete" in line]
        assert starts[2] < stops[0]
        assert starts[3] < stops[1]
        assert get(server.port)["pid"] in after


def test_a_rolling_restart_stops_at_a_replacement_that_cannot_start(tmp_path: Path) -> None:
    trouble = tmp_path / "trouble"
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT, env={"TEST_FAIL_IF": str(trouble)}) as server:
        before = ready(server, 2)
        trouble.touch()
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("the restart stops, and the workers that run go on")
        assert server.workers() == before
        assert get(server.port)["pid"] in before


def test_a_replacement_that_cannot_start_is_tried_again_and_costs_no_other_session(tmp_path: Path) -> None:
    trouble = tmp_path / "trouble"
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT, env={"TEST_FAIL_IF": str(trouble)}) as server:
        first, second = ready(server, 2)
        trouble.touch()
        os.kill(first, signal.SIGKILL)
        server.wait_for(r"a new worker could not start \(next try in 1 s\): the app's start-up failed")
        assert get(server.port)["pid"] == second
        trouble.unlink()
        server.wait_for("Application startup complete", 3)
        assert second in server.workers()
        assert server.stop() == 0


def test_workers_are_added_and_taken_away() -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        first, second = ready(server, 2)
        server.process.send_signal(signal.SIGTTIN)
        server.wait_for("Application startup complete", 3)
        added = set(server.workers()) - {first, second}
        assert len(added) == 1
        server.process.send_signal(signal.SIGTTOU)
        gone(server, list(added))
        assert server.workers() == [first, second]
        server.process.send_signal(signal.SIGTTOU)
        gone(server, [second])
        server.process.send_signal(signal.SIGTTOU)
        server.wait_for("one worker has to stay")
        assert server.workers() == [first]


def test_a_rolling_restart_ends_though_its_last_worker_is_taken_away_meanwhile() -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        first, second = ready(server, 2)
        server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGTTOU)
        gone(server, [first, second], within_seconds=20)
        server.wait_for("all 1 workers were restarted")


def test_a_request_under_way_ends_before_the_server_does() -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        ready(server, 2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(b"GET /halves HTTP/1.1\r\nHost: a\r\n\r\n")
            reply = client.makefile("rb")
            while reply.readline() != b"begun\n":
                pass
            server.process.send_signal(signal.SIGTERM)
            assert b"ended\n" in reply.read()
        assert server.wait() == 0


def test_ctrl_c_twice_does_not_wait_for_a_stream() -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        workers = ready(server, 2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(100)
            server.process.send_signal(signal.SIGINT)
            server.wait_for("Waiting for connections to close")
            server.process.send_signal(signal.SIGINT)
            assert server.wait(8) == 0
        gone(server, workers)
        assert "Traceback" not in server.log


def test_streams_end_at_the_graceful_limit() -> None:
    with running(APP, "--workers", "2", *SESSIONS, "--timeout-graceful-shutdown", "1", cwd=ROOT) as server:
        ready(server, 2)
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
                client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
                assert client.recv(100)
            server.process.send_signal(signal.SIGTERM)
            assert server.wait(4) == 0
        assert not Path(server.run_directory).exists()


def test_the_supervisor_uses_no_time_of_its_own_while_nothing_happens(three: Running) -> None:
    # Both windows are a second of the server's own time: the ticks of a stream that it serves.
    with socket.create_connection(("127.0.0.1", three.port), timeout=20) as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        lines = client.makefile("rb")
        before = wakeups(three.process.pid)
        for _ in range(40):
            lines.readline()
        assert wakeups(three.process.pid) - before < 50


def test_the_supervisor_is_idle_while_it_waits_for_workers_that_drain() -> None:
    with running(APP, "--workers", "2", "--no-sessions", "--timeout-graceful-shutdown", "2", cwd=ROOT) as server:
        ready(server, 2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(100)
            server.process.send_signal(signal.SIGTERM)
            # Not routed, so the worker that serves nothing does not wait for the other.
            server.wait_for("Finished server process")
            before = wakeups(server.process.pid)
            server.wait_for("timeout graceful shutdown exceeded")
            assert wakeups(server.process.pid) - before < 50
        assert server.wait() == 0


def wakeups(pid: int) -> int:
    """How often a process has gone to sleep and woken; a loop that does not wait does so thousands of times a second."""
    status = Path(f"/proc/{pid}/status").read_text()
    cpu = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return switches + int(cpu[11]) + int(cpu[12])


def test_workers_do_not_outlive_a_killed_supervisor_and_the_next_server_clears_up() -> None:
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        workers = ready(server, 2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(100)
            server.process.kill()
            gone(server, workers, within_seconds=5.0)
        left = Path(server.run_directory)
        assert left.exists()
    with running(APP, "--workers", "2", *SESSIONS, cwd=ROOT) as server:
        ready(server, 2)
        assert not left.exists()


def test_one_worker_has_no_run_directory_and_no_child(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running(APP, "--workers", "1", *SESSIONS, cwd=ROOT, env={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        server.wait_for(r"homing \S+: 1 worker, sessions named by cookie:visit$")
        assert get(server.port, headers={"Cookie": "visit=one"})["pid"] == server.process.pid
        assert list(tmp_path.iterdir()) == []
        assert children(server.process.pid) == []
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0


def test_an_app_that_routes_itself_is_not_routed_twice_and_uses_the_servers_run_directory() -> None:
    with running("tests.processes.apps:routed", "--workers", "2", cwd=ROOT) as server:
        server.wait_for("2 workers, sessions as the app itself declares them")
        ready(server, 2)
        serving = server.wait_for(r"worker ([0-9a-f]{32}) \[(\d+)\] serves$", 2)
        assert sorted(int(each[2]) for each in serving) == sorted(server.workers())
        assert all(Path(server.run_directory, f"{each[1]}.sock").is_socket() for each in serving)
        assert len(server.find(re.escape(server.run_directory))) == 1
        cookie = {"Cookie": "visit=one"}
        assert len({get(server.port, headers=cookie)["pid"] for _ in range(20)}) == 1
        assert server.find("no effect") == []
        # What the supervisor keeps there is not taken for what an earlier server has left.
        assert Path(server.run_directory, "server.json").is_file()


@pytest.mark.parametrize("workers", [1, 2])
def test_options_about_sessions_have_no_effect_on_an_app_that_routes_itself_and_are_said_to(workers: int) -> None:
    options = ("--workers", str(workers), "--session", "header:x-other", "--unowned", "refuse")
    with running("tests.processes.apps:routed", *options, cwd=ROOT) as server:
        server.wait_for("workers?, sessions as the app itself declares them")
        server.wait_for("--session, --unowned have no effect: the app routes itself")
        if workers > 1:
            ready(server, workers)
        assert len({get(server.port, headers={"Cookie": "visit=one"})["pid"] for _ in range(20)}) == 1


@pytest.mark.parametrize("scatter", [(), ("--scatter",)])
def test_headers_that_can_be_read_only_once_reach_the_client(scatter: tuple[str, ...]) -> None:
    options = ("--workers", "2", "--session", "cookie:visit", "--unowned", "adopt", *scatter)
    with running("tests.processes.apps:headers_once", *options, cwd=ROOT) as server:
        ready(server, 2)
        plain = said(server.port, "GET / HTTP/1.1\r\nHost: a\r\nCookie: visit=one\r\nConnection: close\r\n\r\n")
        assert b"\r\nx-only: once\r\n" in plain
        assert b"\r\ncontent-length: 2\r\n" in plain
        upgrade = (
            "Host: a\r\nCookie: visit=one\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        for path, status in (("/", b"101"), ("/denied", b"418")):
            found = said(server.port, f"GET {path} HTTP/1.1\r\n{upgrade}")
            assert found.startswith(b"HTTP/1.1 " + status), found
            assert b"x-only: once\r\n" in found


def said(port: int, request: str) -> bytes:
    """All that a server says to a request before it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(request.encode())
        found = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while piece := client.recv(65536):
                found += piece
                if b"\x88\x02" in piece:  # a WebSocket's close, which waits for the client's
                    break
        return found


@pytest.mark.parametrize("kind", ["wsgi", "asgi2"])
def test_older_interfaces_are_routed_too(kind: str) -> None:
    options = ("--interface", kind, "--workers", "3", "--session", "query:visit")
    with running(f"tests.processes.older_apps:{kind}", *options, cwd=ROOT) as server:
        ready(server, 3)
        assert len({get(server.port, "/?visit=one")["pid"] for _ in range(20)}) == 1


def change(module: Path, text: str, server: Running, expected: str, count: int = 1) -> None:
    """Write the module until the server has seen it: the reloader begins to watch some time after the app serves."""
    for attempt in range(20):
        module.write_text(f"{text}# {attempt}\n")
        try:
            server.wait_for(expected, count, timeout_seconds=3)
        except AssertionError:
            continue
        return
    server.wait_for(expected, count, timeout_seconds=0)


def test_reload_works_with_one_worker_and_an_app_that_fails_waits_for_the_next_change(tmp_path: Path) -> None:
    module = tmp_path / "changing.py"
    module.write_text("from tests.processes.apps import app\n")
    env: dict[str, str | None] = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with running("changing:app", "--reload", "--workers", "1", *SESSIONS, cwd=tmp_path, env=env) as server:
        server.wait_for("Application startup complete")
        change(
            module, "raise ValueError('half-written')\n", server, "cannot load changing:app: ValueError: half-written"
        )
        change(
            module, "from tests.processes.apps import app  # whole again\n", server, "Application startup complete", 2
        )
        assert get(server.port)
        assert "Traceback" not in server.log


def test_the_command_line_wins_over_the_environment(tmp_path: Path) -> None:
    env: dict[str, str | None] = {"HOMING_SESSION_SOCKET_DIR": str(tmp_path / "named")}
    with running(APP, "--workers", "2", *SESSIONS, "--run-dir", str(tmp_path / "won"), cwd=ROOT, env=env) as server:
        assert server.run_directory == str(tmp_path / "won")


def test_a_users_own_run_directory_stays_and_is_empty(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (own / "kept").touch()
    with running(APP, "--workers", "2", *SESSIONS, "--run-dir", str(own), cwd=ROOT) as server:
        assert server.run_directory == str(own)
        ready(server, 2)
        assert server.stop() == 0
    assert [entry.name for entry in own.iterdir() if entry.name != "server.lock"] == ["kept"]


def test_a_worker_that_has_served_its_number_of_requests_is_replaced_and_this_is_said_at_start() -> None:
    with running(APP, "--workers", "2", "--no-sessions", "--limit-max-requests", "3", cwd=ROOT) as server:
        server.wait_for("--limit-max-requests 3: a worker ends after it has accepted so many requests")
        ready(server, 2)
        for _ in range(6):
            get(server.port)
        server.wait_for(r"worker \[\d+\] exited \(exit code 0\); its sessions are gone")
        server.wait_for("Application startup complete", 3)
        assert get(server.port)


def test_the_head_of_a_request_ends_before_its_trailers() -> None:
    with running("tests.processes.apps:head", "--workers", "2", "--no-sessions", cwd=ROOT) as server:
        server.wait_for(r"2 workers, requests are not routed \(--no-sessions\)$")
        ready(server, 2)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(
                b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: x-late\r\n\r\n"
                b"3\r\nabc\r\n0\r\nx-late: 1\r\n\r\n"
            )
            client.shutdown(socket.SHUT_WR)
            _, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
        seen = json.loads(body)
    assert seen["head_length"] == 3
    assert seen["headers"][3:] == ["x-late"]
    assert seen["aborts"]


def test_another_http_protocol_is_left_as_it_is() -> None:
    with running("tests.processes.apps:head", "--http", "h11", cwd=ROOT) as server:
        server.wait_for("1 worker, which holds every session")
        seen = get(server.port, "/")
    assert seen["head_length"] is None
    assert not seen["aborts"]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_aborted_connection_is_reset(loop: str) -> None:
    with (
        running("tests.processes.apps:cut", "--loop", loop, cwd=ROOT) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as client,
    ):
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            while client.recv(1000):
                pass
