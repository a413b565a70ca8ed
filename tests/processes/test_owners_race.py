"""Workers that acquire one session in the same instant: one owns it, and all hear the same."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier

import pytest
from tests.support.worlds import make_run_directory

from homing.directory import SessionOwners
from homing.rundir import SESSION_OWNERS_DIR, new_worker_id, remove_run_directory
from homing.types import SESSION, key_digest

SPAWN = multiprocessing.get_context("spawn")
WORKERS = 3


@pytest.fixture
def path() -> Iterator[str]:
    path = make_run_directory()
    yield path
    remove_run_directory(path)


def _race(path: str, sessions: int, start: Barrier, round_: Synchronized[int], pipe: Connection) -> None:
    owners = SessionOwners(path, new_worker_id(), lambda session_id: True)
    heard: list[str] = []
    start.wait()
    for number in range(sessions):
        # Everyone in: the last one sees the whole count, and all go on in the same instant.
        with round_.get_lock():
            round_.value += 1
        while round_.value < (number + 1) * WORKERS:
            os.sched_yield()
        heard.append(owners.acquire(f"session {number}"))
    pipe.send((owners.worker_id, heard, [owners.mine(f"session {number}") for number in range(sessions)]))


def _splits(path: str, sessions: int) -> int:
    start, round_ = SPAWN.Barrier(WORKERS), SPAWN.Value("q", 0)
    pipes = [SPAWN.Pipe(duplex=False) for _ in range(WORKERS)]
    workers = [SPAWN.Process(target=_race, args=(path, sessions, start, round_, theirs)) for _, theirs in pipes]
    for worker in workers:
        worker.start()
    results = [ours.recv() for ours, _ in pipes]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
        worker.close()
    for ends in pipes:
        for end in ends:
            end.close()
    splits = 0
    for number in range(sessions):
        record = os.readlink(os.path.join(path, SESSION_OWNERS_DIR, key_digest(SESSION, f"session {number}")))
        owners = {record.partition(".")[2], *(heard[number] for _, heard, _ in results)}
        believers = [worker_id for worker_id, _, mine in results if mine[number]]
        splits += len(owners) != 1 or believers != list(owners)
    winners = {heard[number] for _, heard, _ in results for number in range(sessions)}
    assert len(winners) > 1, "no race: one worker was always first"
    return splits


def test_five_hundred_sessions_started_everywhere_at_once_have_one_owner_each(path: str) -> None:
    assert _splits(path, 500) == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_thousand_sessions_started_everywhere_at_once_have_one_owner_each(path: str) -> None:
    assert _splits(path, 10_000) == 0
