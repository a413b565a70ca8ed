"""The board: each worker's row, seen by the others, and what is left of a worker that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.running import ROOT, environment
from tests.support.small_disk import small_memory_disk

from homing.errors import RunDirectoryError
from homing.placement import Placement, PlacementOptions
from homing.placement.board import DRAINS, SESSIONS, SLOTS, Board
from homing.rundir import BOARD_NAME, RunDirectory, new_worker_id
from homing.types import WorkerId


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    tmp_path.chmod(0o700)
    with RunDirectory.open(str(tmp_path)) as opened:
        yield opened


@contextmanager
def worker(directory: RunDirectory, app: str = "") -> Iterator[Board]:
    identifier = new_worker_id()
    with ExitStack() as stack:
        stack.callback(directory.hold_life(identifier, app).close)
        board = Board(directory, identifier, app)
        stack.callback(board.close)
        yield board


def test_what_one_writes_the_others_see_at_once(directory: RunDirectory) -> None:
    with worker(directory) as one, worker(directory) as two:
        (seen,) = one.others()
        assert (seen.worker_id, seen[SESSIONS]) == (two.worker_id, 0)
        two[SESSIONS] = 7
        two.send(one.slot)
        assert (seen[SESSIONS], seen.sent_to(one.slot)) == (7, 1)
        two.sent(one.slot)
        two.sent(one.slot)
        assert seen.sent_to(one.slot) == 0


def test_who_comes_and_who_goes_is_seen_at_once_and_not_with_the_next_beat(directory: RunDirectory) -> None:
    with worker(directory) as one:
        for _ in range(3):
            with worker(directory) as two:
                assert [each.worker_id for each in one.others()] == [two.worker_id]
            assert list(one.others()) == []
    assert list(one.others()) == []  # closed itself, it sees nobody


def test_workers_of_another_app_are_not_seen(directory: RunDirectory) -> None:
    with worker(directory) as one, worker(directory, " another"):
        one.refresh()
        assert list(one.others()) == []


def test_a_row_is_free_again_after_its_worker_and_begins_empty(directory: RunDirectory) -> None:
    with worker(directory) as one:
        with worker(directory) as two:
            slot = two.slot
            two[SESSIONS] = 9
            two[DRAINS] = 1
        one.refresh()
        assert list(one.others()) == []
        with worker(directory) as three:
            assert (three.slot, three[SESSIONS], three[DRAINS]) == (slot, 0, 0)


def test_a_killed_workers_row_is_left_out_once_its_life_is_looked_at_and_then_another_has_it(
    directory: RunDirectory,
) -> None:
    code = (
        "import sys\n"
        "from homing.placement.board import Board, SESSIONS\n"
        "from homing.rundir import RunDirectory, new_worker_id\n"
        "directory, identifier = RunDirectory.open(sys.argv[1]), new_worker_id()\n"
        "directory.hold_life(identifier)\n"
        "board = Board(directory, identifier, '')\n"
        "board[SESSIONS] = 40\n"
        "print(identifier, board.slot, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with worker(directory) as one:
        process = subprocess.Popen(
            [sys.executable, "-c", code, directory.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        identifier, slot = process.stdout.readline().split()
        one.refresh()
        (seen,) = one.others()
        assert (seen.worker_id, seen[SESSIONS]) == (WorkerId(identifier), 40)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()
        assert one.is_dead(seen)
        one.refresh()
        assert list(one.others()) == []
        with worker(directory) as two:
            assert two.slot == int(slot)
            one.refresh()
            assert [each.worker_id for each in one.others()] == [two.worker_id]


def test_more_workers_than_rows_begin_sessions_where_they_arrive(directory: RunDirectory) -> None:
    options = PlacementOptions(place="balanced")
    with ExitStack() as stack:
        boards = [Board(directory, new_worker_id(), "") for _ in range(SLOTS)]
        for each in boards:
            stack.callback(each.close)
        assert Placement.open(options, directory, new_worker_id(), "") is None
        with pytest.raises(RunDirectoryError, match="rows"):
            Placement.open(PlacementOptions(max_sessions=5), directory, new_worker_id(), "")


def test_a_full_file_system_is_an_error_as_the_board_is_opened_and_no_signal_later(tmp_path: Path) -> None:
    with (
        small_memory_disk(tmp_path / "small", 64) as place,
        RunDirectory.open(str(place)) as directory,
        pytest.raises(RunDirectoryError, match=f"{BOARD_NAME} cannot be used: No space left"),
    ):
        Board(directory, new_worker_id(), "")
