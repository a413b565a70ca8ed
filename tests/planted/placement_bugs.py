"""Bugs in the placement of new sessions, in their limit and in the queue before it (`docs/design/placement.md`)."""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change

_PLACEMENT: Final = "src/homing/placement"
_ROUTING: Final = "src/homing/routing"
_PLACED: Final = "tests/processes/test_placement.py"
_LIMIT: Final = "tests/processes/test_session_limit.py"
_UNIT: Final = "tests/unit/placement"


def _one(name: str, promise: str, path: str, old: str, new: str, *tests: str) -> Bug:
    return Bug(name, promise, (Change(path, old, new),), tests)


PLACEMENT_BUGS: Final = (
    _one(
        "a start whose target may have read it runs again where it arrived",
        "P4",
        f"{_ROUTING}/starts.py",
        "        except OwnerBusyError:\n            return False\n",
        "        except (OwnerBusyError, HomingError):\n            return False\n",
        f"{_PLACED}::test_a_start_whose_target_is_killed_while_it_runs_there_is_not_run_again",
    ),
    _one(
        "a start whose target was killed is not run where it arrived",
        "answers",
        f"{_ROUTING}/starts.py",
        "            placement.refused_by(target)\n            return False\n",
        "            placement.refused_by(target)\n            raise\n",
        f"{_PLACED}::test_a_start_that_is_placed_at_a_worker_which_was_killed_runs_where_it_arrived",
    ),
    _one(
        "a client that leaves the queue is missed only if something is read from it",
        "P5",
        f"{_ROUTING}/starts.py",
        "        if self._left is not None:\n            await self._left()\n            return\n",
        "",
        f"{_LIMIT}::test_a_client_that_leaves_the_queue_is_missed_though_nothing_is_read_from_it",
    ),
    _one(
        "a worker that is about to stop is given new sessions",
        "P2",
        f"{_PLACEMENT}/placement.py",
        "            takes=not other[DRAINS] and silent",
        "            takes=silent",
        f"{_UNIT}/test_placement.py::test_a_worker_that_drains_is_no_target_and_what_arrives_there_goes_elsewhere",
        f"{_PLACED}::test_a_worker_that_is_told_to_stop_gets_no_new_sessions",
    ),
    _one(
        "a worker that stands still is given new sessions",
        "answers",
        f"{_PLACEMENT}/placement.py",
        " and silent <= STUCK_SECONDS and self._below_limit(sessions),",
        " and self._below_limit(sessions),",
        f"{_PLACED}::test_a_worker_that_stands_still_is_no_target",
    ),
    _one(
        "starts on their way are counted nowhere, so a burst goes to one worker",
        "P6",
        f"{_PLACEMENT}/board.py",
        "        self[SENT] = max(self[SENT] + by, 0)\n",
        "        self._shorts[self._sent_at + slot] = 0\n",
        f"{_UNIT}/test_placement.py::test_starts_that_are_on_their_way_count_where_they_go_for_everybody",
    ),
    _one(
        "a start that was not taken stays counted",
        "P3",
        f"{_PLACEMENT}/placement.py",
        "        board, self._board = self._board, None\n        if board is not None:\n            board.sent(self._slot)\n",
        "        self._board = None\n",
        f"{_UNIT}/test_placement.py::test_starts_that_are_on_their_way_count_where_they_go_for_everybody",
    ),
    _one(
        "a start needs no permit",
        "answers",
        f"{_PLACEMENT}/placement.py",
        "        return self.permits is None or self.permits.take()\n",
        "        return True\n",
        f"{_LIMIT}::test_there_are_never_more_sessions_than_the_limit_and_ended_and_dead_ones_do_not_count",
    ),
    _one(
        "permits of sessions that ended are kept",
        "P3",
        f"{_PLACEMENT}/placement.py",
        "            self.permits.keep(live)\n",
        "            pass\n",
        f"{_UNIT}/test_placement.py::test_what_ends_makes_room_and_what_came_without_a_start_is_counted_too",
        f"{_LIMIT}::test_starts_under_way_count_and_make_room_when_they_fail",
    ),
    _one(
        "a forked child keeps its dead parent's permits",
        "P3",
        f"{_PLACEMENT}/permits.py",
        "        self._undo = close_after_fork(self._fd)\n",
        "        self._undo = lambda: None\n",
        f"{_UNIT}/test_permits.py::test_a_forked_child_does_not_keep_its_dead_parents",
    ),
    _one(
        "whoever comes takes what is free, whoever waits",
        "answers",
        f"{_PLACEMENT}/queue.py",
        "        start.allowed = not self._somebody_waits()\n",
        "        start.allowed = True\n",
        f"{_UNIT}/test_queue.py::test_a_newcomer_does_not_overtake_who_waits_at_another_worker",
    ),
    _one(
        "each worker lets in its own oldest, whoever waits elsewhere",
        "answers",
        f"{_PLACEMENT}/queue.py",
        "        return all((ticket, each.slot) > own for each, ticket in self._tickets())\n",
        "        return bool(own)\n",
        f"{_UNIT}/test_queue.py::test_first_come_first_served_over_all_workers",
    ),
    _one(
        "a dead or stopped worker's ticket holds up everybody",
        "P3",
        f"{_PLACEMENT}/queue.py",
        "if ticket and each.silent_seconds() <= STUCK_SECONDS]",
        "if ticket]",
        f"{_UNIT}/test_queue.py::test_a_worker_without_a_beat_holds_up_nobody_and_counts_again_when_it_goes_on",
    ),
    _one(
        "a client that has left keeps its place in the queue, and its start runs",
        "P5",
        f"{_PLACEMENT}/queue.py",
        "                if watcher.done():\n",
        "                if watcher.done() and self._closed:\n",
        f"{_UNIT}/test_queue.py::test_a_client_that_leaves_gives_up_its_place",
    ),
    _one(
        "what is mapped has no room behind it until it is written",
        "P3",
        "src/homing/rundir/files.py",
        "        os.posix_fallocate(fd, 0, size)\n",
        "        os.ftruncate(fd, size)\n",
        "tests/unit/watch/test_page.py::test_a_full_file_system_is_an_error_as_the_row_is_opened_and_no_signal_later",
    ),
)
