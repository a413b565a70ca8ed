"""A server's limit of sessions, held by several processes: never more than there are, whoever is killed or stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.running import ROOT, environment

from homing.placement.permits import Permits

HOLDER = """
import sys
from homing.placement.permits import Permits
permits = Permits(sys.argv[1], int(sys.argv[2]))
for line in sys.stdin:
    command, number = line.split()
    if command == "take":
        print(sum(permits.take() for _ in range(int(number))), flush=True)
    elif command == "keep":
        permits.keep(int(number))
        print(len(permits), flush=True)
"""


class Holder:
    """Another process, which takes and gives back what it is told to."""

    def __init__(self, path: Path, count: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )

    def tell(self, command: str, number: int) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {number}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def holder(path: Path, count: int) -> Iterator[Holder]:
    made = Holder(path, count)
    try:
        yield made
    finally:
        made.end()


def test_no_more_are_held_than_there_are_and_what_is_given_back_is_free(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, two = (Permits(str(tmp_path / "permits"), 5, begin=begin) for begin in (0, 3))
        stack.callback(one.close)
        stack.callback(two.close)
        assert sum(one.take() for _ in range(3)) == 3
        assert sum(two.take() for _ in range(3)) == 2
        assert (len(one), len(two)) == (3, 2)
        assert not one.any_free()
        assert not two.any_free()
        one.keep(1)
        assert two.any_free()
        assert sum(two.take() for _ in range(9)) == 2
        assert not two.take()


def test_whoever_takes_and_gives_back_in_whatever_order_the_sum_stays_within_the_limit(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance, limit = random.Random(seed), 37
    with ExitStack() as stack:
        held = [Permits(str(tmp_path / "permits"), limit, begin=begin) for begin in (0, 12, 24)]
        for each in held:
            stack.callback(each.close)
        for _ in range(3000):
            one = chance.choice(held)
            if chance.random() < 0.55:
                free = sum(map(len, held)) < limit
                assert one.any_free() == free
                assert one.take() == free
            else:
                one.keep(len(one) - chance.randrange(4))
            assert sum(map(len, held)) <= limit


def test_a_dead_workers_are_free_at_once_and_a_stopped_ones_hold_up_nobody(tmp_path: Path) -> None:
    path = tmp_path / "permits"
    with holder(path, 10) as victim, holder(path, 10) as other:
        assert victim.tell("take", 6) == 6
        os.kill(victim.process.pid, signal.SIGSTOP)
        assert other.tell("take", 10) == 4
        victim.process.kill()
        victim.process.wait()
        assert other.tell("take", 10) == 6


def test_a_forked_child_does_not_keep_its_dead_parents(tmp_path: Path) -> None:
    path = tmp_path / "permits"
    # The parent takes, forks a child that stays, and dies.
    code = (
        "import os, signal, sys\n"
        "from homing.placement.permits import Permits\n"
        "permits = Permits(sys.argv[1], 3)\n"
        "assert all(permits.take() for _ in range(3))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(0); os.close(2); print(os.getpid(), flush=True); os.close(1)\n"
        "    signal.pause()\n"
        "os.read(0, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        cwd=ROOT,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        permits = Permits(str(path), 3)
        assert not permits.take()
        parent.communicate(b".")
        assert permits.take()
        permits.close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("begins", [(0, 0, 0), (0, 30_000, 60_000)])
def test_what_one_holds_is_found_in_a_few_steps_whatever_the_number(tmp_path: Path, begins: tuple[int, ...]) -> None:
    limit = 90_000
    with ExitStack() as stack:
        held = [Permits(str(tmp_path / "permits"), limit, begin=begin) for begin in begins]
        for each in held:
            stack.callback(each.close)
            assert sum(each.take() for _ in range(limit // 3)) == limit // 3
        # Nothing that a timed test would show is left to chance: the runs are few, so a look at all of them is short.
        assert not any(each.any_free() for each in held)
        for each in held:
            each.keep(len(each) - 1)
            assert each.any_free()
