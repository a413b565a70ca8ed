"""Metrics over real servers: the whole server's whichever worker answers, well-formed, and as the page documents them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from tests.processes.test_watch import APP, ask, place, start, two_workers, until
from tests.support.running import ROOT, Running, refused

from homing.clock import boot_seconds
from homing.placement.board import ROW_BYTES, SLOTS, WAITING
from homing.rundir import BOARD_NAME
from homing.watch.figures import STALE_SECONDS, Figures
from homing.watch.servers import look_at

__all__ = ["place"]

Place = dict[str, str | None]
Counted = dict[tuple[str, ...], float]


def scraped(server: Running, *, accept: str = "text/plain") -> str:
    """The metrics as the server's own port gives them."""
    [found] = server.wait_for(r"metrics on (http://\S+)")
    with urllib.request.urlopen(urllib.request.Request(found[1], headers={"accept": accept}), timeout=30) as reply:
        return str(reply.read().decode())


def routed(server: Running, *, accept: str = "text/plain", method: str = "GET") -> tuple[int, str, str]:
    """The same by the route, over a connection of its own: status, content type, text."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.request(method, "/-/metrics", headers={"accept": accept})
        with connection.getresponse() as reply:
            return reply.status, reply.getheader("content-type") or "", reply.read().decode()


def families(text: str) -> dict[str, Metric]:
    return {each.name: each for each in text_string_to_metric_families(text)}


def counted(text: str, name: str, label: str) -> dict[str, float]:
    """The samples of one name, summed over workers."""
    sums: dict[str, float] = {}
    for family in families(text).values():
        for sample in family.samples:
            if sample.name == name:
                key = sample.labels.get(label, "")
                sums[key] = sums.get(key, 0) + sample.value
    return sums


@contextlib.contextmanager
def measured(place: Place, *more: str) -> Iterator[Running]:
    with two_workers(place, "--metrics-port", "0", "--metrics-route", "/-/metrics", *more) as server:
        yield server


def test_what_became_of_requests_is_counted_once_and_for_the_whole_server(place: Place) -> None:
    with measured(place) as server:
        made = [start(server.port) for _ in range(10)]
        for session in made:
            for _ in range(3):
                assert ask(server.port, "POST", f"/sessions/{session}/step")[0] == 200
        assert ask(server.port, "POST", "/sessions/unknown/step")[0] == 410
        # 10 starts, 30 steps and one that is gone: each a client's request, each counted once.
        text = until(
            lambda: scraped(server), lambda text: sum(counted(text, "homing_requests_total", "outcome").values()) == 41
        )
        outcomes = counted(text, "homing_requests_total", "outcome")
        assert set(outcomes) == {
            *("local", "forwarded", "handed_off", "failed", "gone", "stuck", "conflict", "refused", "not_mine")
        }
        assert outcomes["gone"] == 1
        assert outcomes["local"] + outcomes["forwarded"] == 40
        received = counted(text, "homing_requests_received_total", "")
        assert sum(received.values()) == outcomes["forwarded"]
        assert counted(text, "homing_hop_seconds_count", "") == {"": outcomes["forwarded"]}
        assert counted(text, "homing_sessions", "state") == {"open": 10, "ended": 0}
        assert sum(counted(text, "homing_sessions_placed_total", "place").values()) == 10


def test_a_connection_that_moved_is_counted_as_handed_off(place: Place) -> None:
    with measured(place) as server:
        session, before = start(server.port), 0.0
        while not before:  # until one connection was accepted by the other worker
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
                for _ in range(4):
                    connection.request("POST", f"/sessions/{session}/step")
                    assert connection.getresponse().read()
            found = until(lambda: scraped(server), lambda text: "handed_off" in text)
            before = counted(found, "homing_requests_total", "outcome")["handed_off"]
        moved = counted(found, "homing_connections_moved_total", "direction")
        assert moved["given"] == before


def test_connections_that_leaving_workers_give_away_are_no_requests(place: Place) -> None:
    """What a counter says never goes back: a connection that moves as its worker leaves follows no request."""
    with measured(place) as server, contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            stack.callback(connection.close)
            connection.request("GET", "/")
            assert connection.getresponse().read()
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("all 2 workers were restarted")
        server.wait_for(r"worker \[\d+\] has stopped", 2)
        text = until(lambda: scraped(server), lambda text: counted(text, "homing_workers", "")[""] == 2)
        assert counted(text, "homing_connections_moved_total", "direction")["given"] >= 8
        outcomes = counted(text, "homing_requests_total", "outcome")
        assert {name for name, count in outcomes.items() if count} == {"local"}
        assert outcomes["local"] == 8
        assert all(sample.value >= 0 for family in families(text).values() for sample in family.samples)


def stream_at(server: Running, session: str, pid: int) -> socket.socket:
    """An endless stream of the session over a connection that the worker `pid` has accepted."""
    while True:
        stream = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        stream.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        if int(stream.recv(65536).split()[-1]) == pid:
            break
        stream.close()
    stream.sendall(b"GET /sessions/%s/events HTTP/1.1\r\nHost: a\r\n\r\n" % session.encode())
    assert stream.recv(12) == b"HTTP/1.1 200"
    return stream


def test_what_a_worker_serves_while_it_stops_is_counted_and_it_is_not_called_silent(place: Place) -> None:
    """A worker that is told to stop, and that a stream keeps, serves what others send it until the stream has ended."""
    with measured(place, "--drain-timeout", "0", "--no-handoff", "--timeout-graceful-shutdown", "30") as server:
        session = start(server.port)
        pid = json.loads(ask(server.port, "POST", f"/sessions/{session}/step")[1])["pid"]
        with contextlib.closing(stream_at(server, session, pid)):
            os.kill(pid, signal.SIGTERM)
            server.wait_for("Waiting for connections to close")

            def leaver() -> Figures:
                seen = look_at(server.run_directory)
                assert seen is not None
                return next(each for each in seen.alive if each.pid == pid)

            for _ in range(20):
                assert ask(server.port, "POST", f"/sessions/{session}/step")[0] == 200
            time.sleep(STALE_SECONDS + 1)
            assert boot_seconds() - leaver().written < STALE_SECONDS
            assert leaver().served == 4 + 20  # with the start, a step, and two requests over the stream's connection
        server.wait_for(rf"worker \[{pid}\] exited")


def test_a_start_that_waited_and_an_owner_that_did_not_answer_are_counted(place: Place) -> None:
    limits = ("--max-sessions", "1", "--queue", "60", "--owner-timeout", "0.5", "--no-handoff")
    with measured(place, *limits) as server, ThreadPoolExecutor(1) as waiting:
        first = start(server.port)
        second = waiting.submit(start, server.port)
        until(lambda: starts_that_wait(server), lambda count: count == 1)
        assert ask(server.port, "DELETE", f"/sessions/{first}")[0] == 200
        session = second.result(60)
        pid = json.loads(ask(server.port, "POST", f"/sessions/{session}/step")[1])["pid"]
        with contextlib.closing(connected_elsewhere(server, pid)) as other:
            os.kill(pid, signal.SIGSTOP)
            try:
                other.request("POST", f"/sessions/{session}/step")
                assert other.getresponse().status == 504
            finally:
                os.kill(pid, signal.SIGCONT)

        def is_told(text: str) -> bool:
            """Both workers have written their rows since."""
            stuck = counted(text, "homing_requests_total", "outcome").get("stuck")
            return bool(stuck and counted(text, "homing_queue_wait_seconds_count", "").get(""))

        text = until(lambda: scraped(server), is_told)
        assert counted(text, "homing_requests_total", "outcome")["stuck"] == 1
        assert counted(text, "homing_answers_total", "code") == {"owner_timeout": 1}
        assert counted(text, "homing_queue_wait_seconds_count", "") == {"": 1}
        assert counted(text, "homing_queue_wait_seconds_sum", "")[""] > 0


def starts_that_wait(server: Running) -> int:
    board = (Path(server.run_directory) / BOARD_NAME).read_bytes()
    return sum(int.from_bytes(board[slot * ROW_BYTES + WAITING * 8 :][:8], "little") for slot in range(SLOTS))


def connected_elsewhere(server: Running, pid: int) -> http.client.HTTPConnection:
    """A connection that another worker than that has accepted."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/")
        if int(connection.getresponse().read().split()[-1]) != pid:
            return connection
        connection.close()


def test_every_worker_answers_the_route_with_the_same_and_no_app_sees_it(place: Place) -> None:
    with measured(place) as server:
        sessions = [start(server.port) for _ in range(6)]
        text = until(lambda: scraped(server), lambda text: counted(text, "homing_sessions", "state").get("open") == 6)
        served = sum(counted(text, "homing_requests_total", "outcome").values())
        for _ in range(12):  # whichever worker accepts the connection
            status, content_type, page = routed(server)
            assert (status, content_type.split(";")[0]) == (200, "text/plain")
            assert counted(page, "homing_sessions", "state")["open"] == 6
            assert sum(counted(page, "homing_requests_total", "outcome").values()) == served
            assert families(page).keys() == families(text).keys()
        assert routed(server, method="HEAD")[::2] == (200, "")
        assert routed(server, method="POST")[0] == 405
        # Below it, and beside it, is the app.
        assert ask(server.port, "GET", "/-/metrics/more")[1].startswith(b"counter")
        assert ask(server.port, "POST", f"/sessions/{sessions[0]}/step")[0] == 200


def test_a_dead_workers_counters_are_kept_whoever_answers(place: Place) -> None:
    with measured(place) as server:
        session = start(server.port)
        pid = json.loads(ask(server.port, "POST", f"/sessions/{session}/step")[1])["pid"]
        until(
            lambda: scraped(server), lambda text: sum(counted(text, "homing_requests_total", "outcome").values()) == 2
        )
        os.kill(pid, signal.SIGKILL)
        server.wait_for("Application startup complete", 3)
        text = until(lambda: scraped(server), lambda text: counted(text, "homing_workers", "")[""] == 2)
        for page in (text, routed(server)[2]):
            assert sum(counted(page, "homing_requests_total", "outcome").values()) == 2
            assert counted(page, "homing_sessions", "state") == {"open": 0, "ended": 0}
            workers = {sample.labels["worker"] for sample in families(page)["homing_requests"].samples}
            assert len(workers) == 3
            alive = {sample.labels["worker"] for sample in families(page)["homing_process_open_fds"].samples}
            assert len(alive) == 2 < len(workers)
            assert alive < workers


def test_the_exposition_is_well_formed_in_both_formats_and_as_documented(place: Place) -> None:
    with measured(place) as server:
        for _ in range(4):
            ask(server.port, "POST", f"/sessions/{start(server.port)}/step")
        text = until(lambda: scraped(server), lambda text: counted(text, "homing_hop_seconds_count", ""))
        assert families(text).keys() == {
            each.name for each in openmetrics_families(scraped(server, accept="application/openmetrics-text"))
        }
        assert routed(server, accept="application/openmetrics-text")[1].startswith("application/openmetrics-text")
        for family in families(text).values():
            assert family.documentation
            if family.type == "histogram":
                _check_buckets(family)
        if (promtool := shutil.which("promtool")) is not None:
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
            )
            assert (checked.returncode, checked.stderr) == (0, "")
        shown = re.findall(
            r"^\| `(\w+)` \| (\w+) \| ([^|]*)\|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE
        )
        assert sorted((name, kind, set(re.findall(r"\w+", labels))) for name, kind, labels in shown) == sorted(
            _documented(family) for family in families(text).values()
        )


def _documented(family: Metric) -> tuple[str, str, set[str]]:
    """A family as the table has it; of one that has no samples yet, the labels that it will have."""
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    later = {"homing_answers": "code", "homing_sessions_ended": "reason", "homing_sessions_placed": "place"}
    if family.name in later:
        labels = {"worker", later[family.name]}
    return family.name + ("_total" if family.type == "counter" else ""), family.type, labels


def _check_buckets(family: Metric) -> None:
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            by_worker.setdefault(sample.labels["worker"], []).append((float(sample.labels["le"]), sample.value))
    assert len(by_worker) == 2
    for buckets in by_worker.values():
        assert buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert buckets[-1][0] == float("inf")


@pytest.mark.parametrize(
    ("route", "says"),
    [
        ("metrics", "whole path"),
        ("/{any}", "whole path"),
        ("/sessions/metrics", "path:/sessions/{session} names sessions there"),
        ("/sessions", "body:session@/sessions"),
    ],
)
def test_a_route_that_cannot_be_the_metrics_is_refused(place: Place, route: str, says: str) -> None:
    code, lines = refused("run", *APP, "--workers", "2", "--port", "0", "--metrics-route", route, cwd=ROOT, env=place)
    assert (code, len(lines)) == (2, 1)
    assert says in lines[0]


def test_a_route_that_the_app_has_itself_is_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import fastapi\napp = fastapi.FastAPI()\n@app.get('/metrics')\ndef metrics(): ...\n"
    )
    arguments = ("own:app", "--app-dir", str(tmp_path), "--session", "header:x", "--workers", "2", "--port", "0")
    code, lines = refused("run", *arguments, "--metrics-route", "/metrics", cwd=tmp_path, env=place)
    assert code == 2
    assert "the app has a route of its own there" in lines[-1]
