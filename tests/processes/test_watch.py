"""`homing ps` and `homing top`, over real servers: what they show is what happened."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.running import HOMING, ROOT, Running, environment, refused, running

from homing.rundir import PAGE_NAME, SERVER_DESCRIPTION, SESSION_OWNERS_DIR, boot_id
from homing.watch.live import Live

APP = (
    "tests.support.counter_app:app",
    "--session",
    "path:/sessions/{session}",
    "--learn",
    "body:session@/sessions",
    "--start",
    "POST /sessions",
    "--end",
    "DELETE /sessions/{session}",
)
LOOK_SECONDS = 60.0


def homing(*arguments: str, env: dict[str, str | None]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOMING, *arguments], cwd=ROOT, env=environment(env), capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str | None]:
    """Where this test's run directories live, so that it sees its own servers only."""
    base = tmp_path / "run"
    base.mkdir(mode=0o700)
    empty = tmp_path / "tmp"
    empty.mkdir(mode=0o700)
    return {"XDG_RUNTIME_DIR": str(base), "TMPDIR": str(empty)}


def ask(port: int, method: str, path: str) -> tuple[int, bytes]:
    """One request on a connection of its own."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path)
        with connection.getresponse() as reply:
            return reply.status, reply.read()


def start(port: int) -> str:
    return str(json.loads(ask(port, "POST", "/sessions")[1])["session"])


def documents(place: dict[str, str | None], *name: str) -> list[dict[str, Any]]:
    done = homing("ps", "--json", *name, env=place)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    mine = place["XDG_RUNTIME_DIR"]
    return [each for each in found if name or each["run_directory"].startswith(str(mine)) or "elsewhere" in str(each)]


def until(look: Any, true: Any) -> Any:
    """Rows are written once a second, and nothing tells of it: look until what is awaited is there."""
    deadline, pause = time.monotonic() + LOOK_SECONDS, threading.Event()
    while not true(found := look()):
        assert time.monotonic() < deadline, found
        pause.wait(0.1)
    return found


@contextlib.contextmanager
def two_workers(place: dict[str, str | None], *options: str) -> Iterator[Running]:
    with running(*APP, "--workers", "2", *options, cwd=ROOT, env=place) as server:
        server.wait_for("Application startup complete", 2)
        yield server


def test_ps_shows_what_a_servers_workers_have_done(place: dict[str, str | None]) -> None:
    began = time.monotonic()
    with two_workers(place) as server:
        sessions = [start(server.port) for _ in range(12)]
        for session in sessions:
            for _ in range(5):
                assert ask(server.port, "POST", f"/sessions/{session}/step")[0] == 200
        assert ask(server.port, "DELETE", f"/sessions/{sessions[0]}")[0] == 200
        assert ask(server.port, "POST", "/sessions/unknown/step")[0] == 410
        port = str(server.port)
        # 12 starts, 60 steps, one end; what was asked and not served is an answer of homing's own.
        [found] = until(lambda: documents(place, port), lambda found: found[0]["served"] >= 73 and found[0]["gone"])
        assert (found["address"], found["workers_wanted"]) == (f"127.0.0.1:{port}", 2)
        assert found["pid"] == server.process.pid
        assert found["run_directory"] == server.run_directory
        assert (found["sessions"], found["open_sessions"], found["serving"]) == (12, 11, 0)
        assert found["ended_sessions"] == sum(each["ended_sessions"] for each in found["workers"]) == 1
        assert (found["served"], found["gone"], found["answers"]) == (73, 1, {"session_gone": 1})
        assert {worker["pid"] for worker in found["workers"]} == set(server.workers())
        assert sum(worker["received"] for worker in found["workers"]) == found["forwarded"]
        assert not any(worker["stale"] for worker in found["workers"])

        for name in (port, f"127.0.0.1:{port}", str(server.process.pid), server.run_directory):
            shown = homing("ps", name, env=place)
            assert shown.returncode == 0, shown.stderr
            assert all(str(pid) in shown.stdout for pid in server.workers())
        listed = homing("ps", env={**place, "COLUMNS": "160"})
        sums = rf"11 \(\d+\+\d+\) +73 +{found['forwarded']} +{found['handoffs']} +1 +\d+ s"
        row = rf"127\.0\.0\.1:{port} +tests\.support\.counter_app:app +2/2 +{sums}"
        assert re.search(row, listed.stdout), listed.stdout
        assert 0 < found["uptime_seconds"] < time.monotonic() - began


def test_connections_that_moved_are_shown_where_they_went(place: dict[str, str | None]) -> None:
    with two_workers(place) as server:
        session, port = start(server.port), str(server.port)
        found = documents(place, port)[0]
        while not found["handoffs"]:  # until a connection was accepted by the other worker
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
                for _ in range(6):
                    connection.request("POST", f"/sessions/{session}/step")
                    pid = json.loads(connection.getresponse().read())["pid"]
                found = documents(place, port)[0]
        [found] = until(
            lambda: documents(place, port),
            lambda found: sum(each["adopted"] for each in found[0]["workers"]) == found[0]["handoffs"],
        )
        by_pid = {each["pid"]: each for each in found["workers"]}
        assert by_pid.pop(pid)["adopted"] == found["handoffs"]
        assert [each["given"] for each in by_pid.values()] == [found["handoffs"]]


def test_a_server_on_a_unix_socket_is_shown_and_named_by_it(place: dict[str, str | None], tmp_path: Path) -> None:
    path = str(tmp_path / "public")
    with running(*APP, "--workers", "2", "--uds", path, cwd=ROOT, env=place) as server:
        server.wait_for("all 2 workers are ready")
        [found] = documents(place, path)
        assert (found["address"], found["pid"]) == (path, server.process.pid)
        assert path in homing("ps", env=place).stdout


def test_a_run_directorys_control_characters_are_shown_escaped(place: dict[str, str | None]) -> None:
    """Nor is anything in its name taken for markup. A program gets it as it is."""
    name = "elsewhere\x1b[31m[bold]\x9b"
    directory = f"{place['XDG_RUNTIME_DIR']}/{name}"
    shown_name = r"elsewhere\x1b[31m[bold]\x9b"
    with two_workers(place, "--run-dir", directory) as server:
        port = str(server.port)
        assert documents(place, port)[0]["run_directory"] == directory
        for command in (("ps", port), ("top", port, "--seconds", "0")):
            shown = homing(*command, env=place)
            assert shown.returncode == 0, shown.stderr
            assert shown_name in "".join(shown.stdout.split())
            assert "\x1b" not in shown.stdout
        os.symlink(f"{boot_id()}.\x1b[2J", Path(directory, SESSION_OWNERS_DIR, "\x1b" * 64))
        shown = homing("ps", port, "--sessions", env=place)
        assert r"\x1b[2J" in shown.stdout
        assert "\x1b" not in shown.stdout
        unknown = homing("ps", f"{directory}/unknown", env=place)
        assert rf"{shown_name}/unknown" in unknown.stderr
        assert "\x1b" not in unknown.stderr


def test_a_dead_workers_counters_stay_and_its_sessions_go(place: dict[str, str | None]) -> None:
    with two_workers(place) as server:
        session = start(server.port)
        pid = json.loads(ask(server.port, "POST", f"/sessions/{session}/step")[1])["pid"]
        port = str(server.port)
        until(lambda: documents(place, port), lambda found: found[0]["served"] == 2)
        os.kill(pid, signal.SIGKILL)
        server.wait_for("Application startup complete", 3)
        [found] = until(lambda: documents(place, port), lambda found: len(found[0]["workers"]) == 2)
        assert (found["sessions"], found["served"]) == (0, 2)
        assert pid not in {worker["pid"] for worker in found["workers"]}


def test_a_server_whose_directory_is_elsewhere_is_found_too(place: dict[str, str | None], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with two_workers(place, "--run-dir", str(elsewhere)) as server:
        found = [each for each in documents(place) if each["pid"] == server.process.pid]
        assert [each["run_directory"] for each in found] == [str(elsewhere)]
    assert not [each for each in documents(place) if each["pid"] == server.process.pid]
    assert os.listdir(str(place["XDG_RUNTIME_DIR"])) == []


def test_a_page_that_is_held_delays_no_worker_and_its_first_reply_is_whole(
    place: dict[str, str | None], tmp_path: Path
) -> None:
    """Between listening and the server's main loop nothing may wait: its first turn makes the headers of every reply."""
    chosen = tmp_path / "chosen"
    chosen.mkdir(mode=0o700)
    with running(*APP, "--workers", "2", "--run-dir", str(chosen), cwd=ROOT, env=place) as server:
        deadline = time.monotonic() + 60
        while not (chosen / SERVER_DESCRIPTION).exists():  # then the directory is emptied, and no worker has begun
            assert time.monotonic() < deadline, server.log
        with open(chosen / PAGE_NAME, "wb") as page:
            fcntl.flock(page, fcntl.LOCK_EX)
            port = int(server.wait_for(r"Uvicorn running on https?://\S+?:(\d+) ")[0][1])
            while True:
                assert time.monotonic() < deadline, server.log
                with (
                    contextlib.suppress(ConnectionRefusedError),
                    contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection,
                ):
                    connection.request("GET", "/")
                    with connection.getresponse() as reply:
                        assert (reply.getheader("date") is None, reply.getheader("server")) == (False, "uvicorn")
                    break
            server.wait_for("do not see this worker", 2)
        server.wait_for("see this worker from now on", 2)
        [shown] = documents(place, str(port))
        assert {each["pid"] for each in shown["workers"]} == set(server.workers())


JUMPED = "import time; wall = time.time; time.time = lambda: wall() + {}; from homing.cli import main; main()"


@pytest.mark.parametrize("by_seconds", [2 * 86_400, -2 * 86_400])
def test_a_wall_clock_that_jumps_makes_no_server_older_and_no_worker_silent(
    place: dict[str, str | None], by_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_workers(place) as server:
        until(lambda: documents(place, str(server.port)), lambda found: len(found[0]["workers"]) == 2)
        command = [sys.executable, "-c", JUMPED.format(by_seconds), "ps", "--json", str(server.port)]
        said = subprocess.run(command, env=environment(place), capture_output=True, check=True, timeout=60).stdout
        [shown] = json.loads(said)
        monkeypatch.setattr(time, "time", lambda wall=time.time: wall() + by_seconds)
        page = Live(shown["run_directory"]).document()
        for each in (shown, *shown["workers"], page["server"], *page["workers"]):
            assert 0 <= each["uptime_seconds"] < LOOK_SECONDS
        assert not any(each["stale"] for each in shown["workers"])
        assert not any(each["silent"] for each in page["workers"])


def test_a_killed_server_is_not_shown(place: dict[str, str | None]) -> None:
    with two_workers(place) as server:
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait()
        assert not [each for each in documents(place) if each["pid"] == server.process.pid]


def test_top_shows_requests_per_second_and_ends_when_told(place: dict[str, str | None]) -> None:
    with two_workers(place) as server:
        over = threading.Event()

        def use() -> None:
            while not over.is_set():
                ask(server.port, "GET", "/")

        using = threading.Thread(target=use)
        using.start()
        try:
            done = homing("top", str(server.port), "--seconds", "4.5", env={**place, "COLUMNS": "200"})
        finally:
            over.set()
            using.join()
        assert done.returncode == 0, done.stderr
        heads = [line for line in done.stdout.splitlines() if line.startswith("worker ")]
        assert len(heads) >= 4, done.stdout
        head = heads[-1]
        column = head.replace("per s", "per-s").split().index("per-s")
        rows = [line.split() for line in done.stdout.splitlines() if re.match("[0-9a-f]{8} ", line)]
        assert len(rows) == 2 * len(heads), done.stdout
        assert sum(int(row[column].replace(",", "")) for row in rows[-2:]) > 0, done.stdout
        lines = homing("top", "--json", str(server.port), "--seconds", "1.5", env=place).stdout.splitlines()
        assert len(lines) >= 2
        assert json.loads(lines[-1])[0]["pid"] == server.process.pid


def test_a_name_that_no_server_has_is_one_line(place: dict[str, str | None]) -> None:
    code, lines = refused("ps", "no-such-server", cwd=ROOT, env=place)
    assert code == 2
    assert len(lines) == 1
    assert "no running server is called no-such-server" in lines[0]


def test_metrics_of_one_worker_and_a_metrics_port_in_use_are_refused(place: dict[str, str | None]) -> None:
    code, lines = refused("run", *APP, "--metrics-port", "0", cwd=ROOT, env=place)
    assert (code, len(lines)) == (2, 1)
    assert "--workers 2" in lines[0]
    with two_workers(place, "--metrics-port", "0") as server:
        [found] = server.wait_for(r"metrics on http://127\.0\.0\.1:(\d+)")
        code, lines = refused(
            "run", *APP, "--workers", "2", "--port", "0", "--metrics-port", found[1], cwd=ROOT, env=place
        )
        assert code == 3
        assert f"port {found[1]}" in lines[-1]
