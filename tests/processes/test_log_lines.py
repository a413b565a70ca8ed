"""Log lines as JSON from a real server: one line for each event of a worker's life and each refused request, with fields."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any

from tests.processes.test_watch import APP, ask, place, start, two_workers
from tests.support.running import ROOT, Running, refused

from homing.types import session_tag

__all__ = ["place"]

Place = dict[str, str | None]


def events(server: Running) -> list[dict[str, Any]]:
    found = []
    for line in server.lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if "event" in line]


def test_each_event_is_one_line_with_fields_and_no_id(place: Place) -> None:
    with two_workers(place, "--log-format", "json") as server:
        session = start(server.port)
        pid = json.loads(ask(server.port, "POST", f"/sessions/{session}/step")[1])["pid"]
        assert ask(server.port, "POST", "/sessions/never-made/step")[0] == 410
        os.kill(pid, signal.SIGKILL)
        server.wait_for("Application startup complete", 3)
        server.wait_for("worker_replaced")
        assert ask(server.port, "POST", f"/sessions/{session}/step")[0] == 410
        assert server.stop() == 0
        for line in server.lines:
            assert json.loads(line)["level"] in ("info", "warning"), line
        lines = events(server)
        serves = [line for line in lines if line["event"] == "worker_serves"]
        assert len(serves) == len({line["worker"] for line in serves}) == 3
        refusals = [(line["status"], line["code"], line["session"]) for line in lines if line["event"] == "answered"]
        assert refusals == [(410, "session_gone", session_tag(each)) for each in ("never-made", session)]
        [exited] = [line for line in lines if line["event"] == "worker_exited"]
        assert (exited["pid"], exited["level"]) == (pid, "warning")
        [replaced] = [line for line in lines if line["event"] == "worker_replaced"]
        assert replaced["pid"] == pid
        assert replaced["by"] in {line["pid"] for line in serves} - {pid}
        for what in ("worker_drains", "worker_stops"):
            assert {line["worker"] for line in lines if line["event"] == what} == {
                line["worker"] for line in serves if line["pid"] != pid
            }
        homings = [line for line in server.lines if '"logger": "homing' in line]
        assert not [line for line in homings if session in line or "never-made" in line]


def test_a_restart_is_told_step_by_step(place: Place) -> None:
    with two_workers(place, "--log-format", "json") as server:
        server.wait_for("server_ready")
        old = server.workers()
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("server_restarted")
        server.wait_for("worker_stopped", 2)
        assert server.stop() == 0
        lines = events(server)
        for what in ("worker_told", "worker_drained", "worker_replaced", "worker_stopped"):
            assert sorted(line["pid"] for line in lines if line["event"] == what and line.get("to") != "stop") == old
        assert {line["workers"] for line in lines if line["event"].startswith("server_")} == {2}


def test_a_log_configuration_and_a_format_are_refused_together(place: Place, tmp_path: Any) -> None:
    config = tmp_path / "log.json"
    config.write_text('{"version": 1}')
    arguments = (*APP, "--workers", "2", "--log-format", "json", "--log-config", str(config))
    code, lines = refused("run", *arguments, cwd=ROOT, env=place)
    assert (code, len(lines)) == (2, 1)
    assert "--log-format" in lines[0]
