"""Leases of episodes: closed by whoever finds their worker dead, once, and never while it lives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from homing.rl.episodes.leases import MAX_TRIES, Close, Leases

CLOSES = [
    Close("the agent session", "http://a/close", {"id": "x"}),
    Close("the resources session", "http://r/close", {}),
]

HOLDER = """
import sys, time
from homing.rl.episodes.leases import Close, Leases
async def close(each): return True
with Leases(sys.argv[1], close).held([Close("the agent session", "http://a/close", {"id": "x"}), Close("the resources session", "http://r/close", {})]):
    print("held", flush=True)
    sys.stdin.read()
"""


class Closer:
    """Notes what it is asked to close; fails so often first."""

    def __init__(self, fails: int = 0) -> None:
        self.closed: list[Close] = []
        self.fails = fails

    async def __call__(self, close: Close) -> bool:
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            return False
        self.closed.append(close)
        return True


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "episodes")


def leave_behind(directory: str, *, kill: bool = True) -> None:
    """Hold a lease in another process, and kill it, or let it end as it should."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        if kill:
            closer = Closer()
            asyncio.run(Leases(directory, closer).sweep())
            assert closer.closed == []  # it lives
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.communicate("")
    assert process.returncode == (-signal.SIGKILL if kill else 0)


def test_what_a_killed_worker_had_open_is_closed_once_by_several(directory: str) -> None:
    leave_behind(directory)
    closer = Closer()

    async def sweep_at_once() -> None:
        await asyncio.gather(*(Leases(directory, closer).sweep() for _ in range(4)))

    asyncio.run(sweep_at_once())
    assert closer.closed == CLOSES
    assert os.listdir(directory) == []


def test_what_ends_as_it_should_leaves_nothing(directory: str) -> None:
    leave_behind(directory, kill=False)
    assert os.listdir(directory) == []


def test_a_worker_leaves_its_own_leases_alone(directory: str) -> None:
    closer = Closer()
    leases = Leases(directory, closer)
    with leases.held(CLOSES):
        asyncio.run(leases.sweep())
        asyncio.run(Leases(directory, closer).sweep())
        assert len(os.listdir(directory)) == 1
    assert (closer.closed, os.listdir(directory)) == ([], [])


def test_a_close_that_fails_is_tried_again_with_those_beside_it(directory: str) -> None:
    leave_behind(directory)
    closer = Closer(fails=1)
    leases = Leases(directory, closer)
    asyncio.run(leases.sweep())
    assert closer.closed == CLOSES[1:]
    assert len(os.listdir(directory)) == 1
    asyncio.run(leases.sweep())
    assert closer.closed[1:] == CLOSES
    assert os.listdir(directory) == []


def test_what_cannot_be_closed_is_given_up_and_told(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    leave_behind(directory)
    leases = Leases(directory, Closer(fails=2 * MAX_TRIES))
    for _ in range(MAX_TRIES):
        assert len(os.listdir(directory)) == 1
        asyncio.run(leases.sweep())
    assert os.listdir(directory) == []
    assert "except the agent session, the resources session, which cannot be" in caplog.text
