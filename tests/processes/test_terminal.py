"""A server and the terminal or shell that it was started from: Ctrl-C, and streams that are closed."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tests.support.running import HOMING, ROOT, running, until

APP = "tests.processes.apps:app"
SESSIONS = ("--session", "cookie:visit")


def test_a_terminals_ctrl_c_while_workers_start_is_no_traceback(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running(APP, "--workers", "3", *SESSIONS, cwd=ROOT, env={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        # In the middle of its imports: this module is one of the first.
        until(lambda: any("msgspec" in Path(f"/proc/{pid}/maps").read_text() for pid in server.workers()), server)
        # It would tell them to end as well, and who is quicker decides what is seen: here it is last.
        server.process.send_signal(signal.SIGSTOP)
        os.killpg(server.process.pid, signal.SIGINT)  # to all of them, as a terminal does
        until(lambda: not server.workers(), server)
        server.process.send_signal(signal.SIGCONT)
        assert server.wait() == 0
        assert not server.find("Traceback|KeyboardInterrupt"), server.log
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_whose_input_and_output_are_closed_serves_and_puts_nothing_else_in_their_place(workers: int) -> None:
    closed = ("sh", "-c", 'exec "$@" <&- >&-', "sh", *HOMING, "run")
    with running(APP, "--workers", str(workers), *SESSIONS, cwd=ROOT, command=closed) as server:
        server.wait_for("Application startup complete", workers)
        for pid in [server.process.pid, *server.workers()]:
            assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1)] == ["/dev/null"] * 2
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/who", timeout=20) as reply:
            assert reply.status == 200
        assert server.stop() == (-signal.SIGTERM if workers == 1 else 0)


@pytest.mark.parametrize(
    "arguments", [("run", "--help"), ("ps", "--json"), ("demo", "--sessions", "1", "--calls", "1")]
)
def test_what_cannot_be_printed_for_want_of_room_is_one_line_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*HOMING, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=100
        )
    *_, last = done.stderr.splitlines()
    assert (done.returncode, last) == (1, "homing: the output cannot be written: No space left on device"), done.stderr
    assert "Traceback" not in done.stderr
