"""`homing demo`: two real servers, side by side."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time

import pytest
from tests.support.running import HOMING, ROOT, children, environment, until_its_end, wait_until_gone

from homing.watch import running_servers

SMALL = ("--workers", "2", "--sessions", "12", "--calls", "6")


PHASES = """\
uvicorn: starting 2 workers
homing: starting 2 workers
uvicorn: making 72 calls
homing: making 72 calls
"""


def demo(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOMING, "demo", *SMALL, *arguments],
        cwd=ROOT,
        env=environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding=encoding,
        timeout=110,
        check=False,
    )


def test_every_call_to_homing_is_right() -> None:
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == PHASES
    plain, routed = json.loads(done.stdout)
    assert (plain["server"], routed["server"]) == ("uvicorn", "homing")
    assert routed["calls"] == routed["right"] == 72
    assert routed["wrong"] == routed["lost"] == 0
    assert plain["calls"] == 72 == plain["right"] + plain["wrong"] + plain["lost"]
    # So few calls may all meet one of the plain workers; `test_packaging.py` runs the whole demo.
    assert min(plain["requests_per_second"], routed["requests_per_second"]) > 0


def test_without_a_terminal_the_table_is_plain_text() -> None:
    done = demo()
    assert done.returncode == 0, done.stderr
    assert done.stderr == PHASES
    assert "\x1b" not in done.stdout
    assert "12 sessions × 6 calls, 2 workers" in done.stdout
    for heading in ("calls", "right", "wrong data", "lost", "req/s"):
        assert heading in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_terminal_without_utf_8_gets_the_table_in_ascii() -> None:
    done = demo(encoding="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stderr == PHASES
    assert "12 sessions x 6 calls, 2 workers" in done.stdout


def test_calls_to_homing_that_were_not_right_are_exit_code_1() -> None:
    """A worker of homing's is killed while calls are made: its sessions are gone, and the calls of those are lost."""
    many = ("--workers", "2", "--sessions", "32", "--calls", "120", "--json")
    with subprocess.Popen(
        [*HOMING, "demo", *many],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        try:
            assert demo.stderr is not None
            for line in demo.stderr:
                if line.startswith("homing: making"):
                    break
            killed = None
            deadline = time.monotonic() + 60
            while killed is None and time.monotonic() < deadline:
                for server in running_servers():
                    if server.description.pid in children(demo.pid):
                        # Sessions of it are under way, whose clients have most of their calls to make.
                        killed = next((each.pid for each in server.alive if each.sessions >= 5), None)
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            out, _ = demo.communicate(timeout=60)
        finally:
            demo.send_signal(signal.SIGINT)
    assert demo.returncode == 1
    _, routed = json.loads(out)
    # After a call that was lost, the demo cannot know a session's count: what follows may be called wrong.
    assert routed["calls"] == 32 * 120 == routed["right"] + routed["wrong"] + routed["lost"]
    assert routed["lost"] > 0


def test_a_terminal_gets_a_progress_bar() -> None:
    terminal, its = pty.openpty()
    with subprocess.Popen(
        [*HOMING, "demo", *SMALL],
        cwd=ROOT,
        env=environment(TERM="xterm", COLUMNS="100"),
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=its,
    ) as demo:
        os.close(its)
        seen = until_its_end(terminal)
        assert demo.wait(60) == 0, seen
    said = seen.decode()
    for phase in ("uvicorn: starting", "homing: starting", "uvicorn: making", "homing: making"):
        assert phase in said
    assert "━" in said
    assert "72/72" in said
    assert "wrong data" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_demo_that_ends_leaves_no_server_behind(number: signal.Signals) -> None:
    """SIGTERM: `timeout 60 homing demo`, or a CI job that is cancelled. SIGHUP: its terminal was closed. SIGKILL: out of memory."""
    with subprocess.Popen(
        [*HOMING, "demo", "--workers", "2", "--calls", "10000"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored where the tests run under `nohup`.
        preexec_fn=None if number == signal.SIGKILL else lambda: signal.signal(number, signal.SIG_DFL),
    ) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith("uvicorn: making"):
                break
        servers = children(demo.pid)
        workers = [worker for server in servers for worker in children(server)]
        assert (len(servers), len(workers) >= 4) == (2, True)
        try:
            demo.send_signal(number)
            assert demo.wait(60) == -number
            for pid in (*servers, *workers):
                wait_until_gone(pid, 5)
        finally:
            demo.kill()
            for group in servers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
