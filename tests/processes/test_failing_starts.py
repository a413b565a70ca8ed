"""A supervisor that cannot start a process now, for want of a descriptor or of a process: the workers that run go on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.processes.test_drain import Drain, serving, start, step
from tests.support.few_descriptors import descriptors
from tests.support.running import Running, running, until

STOPS = "the restart stops, and the workers that run go on: a new worker could not start: "
TRIES_AGAIN = r"a new worker could not start \(next try in \d+ s\): "
NO_DESCRIPTOR = "Too many open files"


def descriptors_of(server: Running) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def test_a_restart_that_can_start_no_process_stops_there_and_gives_back_what_it_opened() -> None:
    with serving("--drain-timeout", "1") as server:
        session, _ = start(server.port)
        before, opened = server.workers(), descriptors_of(server)
        # At each of what a start opens: two ends of the link, one of ours more, and what Python opens. A worker that did start
        # would have this limit too.
        for more in range(7):
            with descriptors(server.process.pid, more):
                server.process.send_signal(signal.SIGHUP)
                server.wait_for(f"{STOPS}.*{NO_DESCRIPTOR}", more + 1)
            assert server.workers() == before
            # Python's own part goes with the error, which the line in the log is a moment ahead of.
            until(lambda: descriptors_of(server) == opened, server, 10)
            assert step(server.port, session)[0] == 200
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("all 2 workers were restarted")


def test_a_worker_that_dies_is_replaced_once_there_can_be_a_process_again() -> None:
    with serving() as server:
        dying, staying = server.workers()
        with descriptors(server.process.pid, 0):
            # Less than a start needs, though what the dead one's took is free by then.
            session = next(session for session, at in iter(lambda: start(server.port), None) if at == staying)
            os.kill(dying, signal.SIGKILL)
            server.wait_for(TRIES_AGAIN + f".*{NO_DESCRIPTOR}")
            assert step(server.port, session)[0] == 200
        until(lambda: len(server.workers()) == 2, server)
        server.wait_for(r"\] serves", 3)
        assert step(server.port, session)[0] == 200


def test_one_worker_more_that_can_be_no_process_is_none() -> None:
    with serving() as server:
        before = server.workers()
        with descriptors(server.process.pid, 0):
            server.process.send_signal(signal.SIGTTIN)
            server.wait_for(f"Received SIGTTIN, but a new worker could not start: .*{NO_DESCRIPTOR}")
        with descriptors(server.process.pid, 3):  # enough for a socket, not for a process
            server.process.send_signal(signal.SIGTTIN)
            server.wait_for(f"Received SIGTTIN, but a new worker could not start: .*{NO_DESCRIPTOR}", 2)
        assert server.workers() == before
        server.process.send_signal(signal.SIGTTIN)
        server.wait_for("Received SIGTTIN, there are now 3 workers")
        until(lambda: len(server.workers()) == 3, server)
        server.wait_for(r"\] serves", 3)


def test_a_drain_whose_replacement_can_be_no_process_says_so_and_the_worker_goes_on() -> None:
    with serving() as server:
        before = server.workers()
        with descriptors(server.process.pid, 1):  # for whoever asks
            code, trouble = Drain(server, before[0]).end()
        assert code == 3
        assert "a new worker could not start" in trouble
        assert NO_DESCRIPTOR in trouble
        assert server.workers() == before


def test_a_server_that_can_start_no_process_at_first_ends_in_one_line(tmp_path: Path) -> None:
    few = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10)); os.execv(sys.argv[1], sys.argv[1:])"
    command = (sys.executable, "-c", few, sys.executable, "-m", "homing", "run")
    (tmp_path / "served.py").write_text("async def app(scope, receive, send): ...\n")
    with running("served:app", "--session", "cookie:a", "--workers", "2", cwd=tmp_path, command=command) as server:
        assert server.wait() == 3
        assert server.lines[-1].startswith("homing: cannot start a worker: ")
        assert NO_DESCRIPTOR in server.lines[-1]
