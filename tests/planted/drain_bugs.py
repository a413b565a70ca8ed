"""Planted bugs of where connections are accepted, and of workers that leave while their server goes on."""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change

_RUNTIME: Final = "src/homing/runtime"
_SLOTS: Final = "tests/processes/test_slots.py"
_DRAIN: Final = "tests/processes/test_drain.py"
_STARTS: Final = "tests/processes/test_failing_starts.py"
_KEEPS: Final = f"{_DRAIN}::test_a_drained_worker_keeps_its_sessions_takes_no_new_ones_and_leaves_when_they_have_ended"

DRAIN_BUGS: Final = (
    Bug(
        "workers that reach their number of requests together close what is idle, for want of others to take it",
        "P5",
        (
            Change(
                f"{_RUNTIME}/leaving.py",
                "            or (_is_within(graceful_seconds, ends) and self._will_be_taken())\n",
                "",
            ),
        ),
        (
            "tests/processes/test_leaving_by_itself.py::"
            "test_idle_connections_of_workers_that_reach_their_number_together_wait_for_a_replacement",
        ),
    ),
    Bug(
        "a worker that leaves takes a connection with half a head for an idle one",
        "P5",
        (
            Change(
                f"{_RUNTIME}/leaving.py",
                "            or (_is_within(FIRST_REQUEST_SECONDS, ends) and self._is_asked())\n",
                "",
            ),
        ),
        (f"{_DRAIN}::test_a_client_that_has_sent_half_a_head_as_its_worker_leaves_is_heard_out",),
    ),
    Bug(
        "a worker for which there is no process ends the server, and every session",
        "P5",
        (
            Change(
                f"{_RUNTIME}/supervisor.py",
                "            slot.worker = self._start_worker(slot)\n        except OSError as error:\n",
                "            slot.worker = self._start_worker(slot)\n        except ZeroDivisionError as error:\n",
            ),
        ),
        (f"{_STARTS}::test_a_worker_that_dies_is_replaced_once_there_can_be_a_process_again",),
    ),
    Bug(
        "a start that fails keeps its end of the link",
        "P3",
        (
            Change(
                f"{_RUNTIME}/process.py",
                "            undo.callback(self._link.close)\n",
                "            undo.callback(_kept.append, self._link)\n",
            ),
            Change(f"{_RUNTIME}/process.py", "class Worker:\n", "_kept: list[object] = []\n\n\nclass Worker:\n"),
        ),
        (f"{_STARTS}::test_a_restart_that_can_start_no_process_stops_there_and_gives_back_what_it_opened",),
    ),
    Bug(
        "a drain waits for what arrived here, not for what other workers sent",
        "P5",
        (
            Change(
                f"{_RUNTIME}/leaving.py",
                "        return bool(self._state.tasks) or (self._worker is not None and self._worker.serving > 0)\n",
                "        return bool(self._state.tasks)\n",
            ),
        ),
        (f"{_DRAIN}::test_what_is_served_of_no_open_session_has_the_time_to_drain_wherever_it_arrived",),
    ),
    Bug(
        "a restart waits for an app that never ends its shutdown",
        "P3",
        (
            Change(
                f"{_RUNTIME}/worker.py",
                "        if self._app_shutdown_seconds is None or self._signalled:\n",
                "        if True:\n",
            ),
        ),
        (
            "tests/processes/test_leaving_by_itself.py::"
            "test_a_restart_goes_on_past_workers_whose_app_does_not_end_its_shutdown",
        ),
    ),
    Bug(
        "a worker that leaves closes the idle connections that fit no queue at once",
        "P5",
        (
            Change(
                f"{_RUNTIME}/leaving.py",
                "            if stayed_now == stayed or time.monotonic() >= until:\n",
                "            if True:\n",
            ),
        ),
        (f"{_DRAIN}::test_all_idle_connections_of_a_worker_that_leaves_move_however_many_they_are",),
    ),
    Bug(
        "headers that an app gives as an iterator are used up before the server sends them",
        "P5",
        (
            Change(
                "src/homing/routing/middleware.py",
                "            message = with_lasting_headers(message)\n",
                "",
            ),
        ),
        ("tests/processes/test_run_lifecycle.py::test_headers_that_can_be_read_only_once_reach_the_client",),
    ),
    Bug(
        "an end that comes after its request ends nothing",
        "P3",
        (
            Change(
                "src/homing/routing/request.py",
                "        if self._left and worker is not None and not worker.drained:\n",
                "        if False:\n",
            ),
        ),
        (
            "tests/integration/test_sticky.py::"
            "test_an_end_that_comes_after_its_request_ends_the_session_that_it_named_or_made",
        ),
    ),
    Bug(
        "a connection over a Unix socket is given away, and not taken",
        "P5",
        (
            Change(
                f"{_RUNTIME}/handoff.py",
                "_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)\n",
                "_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)\n",
            ),
        ),
        ("tests/processes/test_handoff.py::test_a_connection_over_a_unix_socket_moves_as_any_other",),
    ),
    Bug(
        "a server that a worker starts is told the run directory of that worker's server",
        "P2",
        (
            Change(
                "src/homing/rundir/places.py",
                "    os.environ.pop(SESSION_SOCKET_DIR_ENV, None)\n",
                "    os.environ[SESSION_SOCKET_DIR_ENV] = path\n",
            ),
        ),
        ("tests/processes/test_meeting.py::test_a_server_that_a_worker_of_another_has_started_never_meets_that",),
    ),
    Bug(
        "a queue of connections that no worker of its own accepts from is lent to nobody",
        "P5",
        (
            Change(
                f"{_RUNTIME}/supervisor.py",
                "        for worker in self._workers():\n            worker.lend(",
                "        for worker in []:\n            worker.lend(",
            ),
        ),
        (f"{_SLOTS}::test_a_dead_workers_queue_is_served_though_no_replacement_can_start",),
    ),
    Bug(
        "the queue of a worker that hangs waits for it",
        "P5",
        (
            Change(
                f"{_RUNTIME}/process.py",
                "        return may and not (self._late or self._heartbeat.missed(LATE_SECONDS))\n",
                "        return may\n",
            ),
        ),
        (f"{_SLOTS}::test_a_stopped_workers_queue_is_served_by_the_others",),
    ),
    Bug(
        "a worker is late only if its process is, not its event loop",
        "P5",
        (
            Change(
                f"{_RUNTIME}/link.py",
                "                self._late = self._asked\n",
                "                self._late = False\n",
            ),
        ),
        (f"{_SLOTS}::test_the_queue_of_a_worker_whose_event_loop_stands_still_is_served_by_the_others",),
    ),
    Bug(
        "what was lent is not given back",
        "P3",
        (Change(f"{_RUNTIME}/process.py", "            self._send(TakeBack(number))\n", "            pass\n"),),
        (f"{_SLOTS}::test_what_is_lent_is_given_back",),
    ),
    Bug(
        "two servers of one user that start at once share a port",
        "P2",
        (
            Change(
                f"{_RUNTIME}/listeners.py",
                '        name.bind(f"\\0homing port {bound.getsockname()[1]}")\n        return name\n',
                "        return name\n",
            ),
        ),
        (
            "tests/unit/runtime/test_listeners.py::test_a_second_server_on_the_port_has_one_socket_that_cannot_listen_beside_the_first",
        ),
    ),
    Bug(
        "sessions begin at a worker that drains",
        "P5",
        (
            Change(
                "src/homing/routing/worker.py",
                '            self.placement.drain()\n        self._mark("draining")\n',
                '            pass\n        self._mark("draining")\n',
            ),
        ),
        (_KEEPS,),
    ),
    Bug(
        "a worker that leaves closes its clients' idle connections",
        "P5",
        (
            Change(
                f"{_RUNTIME}/protocol.py",
                "        return self._give(handoffs, to, self._moves if self.cycle is None else max(1, self._moves))\n",
                "        return False\n",
            ),
        ),
        (_KEEPS,),
    ),
    Bug(
        "a worker drains for ever if a session stays open",
        "P3",
        (
            Change(
                f"{_RUNTIME}/leaving.py",
                "and time.monotonic() < deadline and not told_to_stop()",
                "and not told_to_stop()",
            ),
        ),
        (f"{_DRAIN}::test_sessions_that_outlast_the_time_to_drain_end_with_their_worker_and_are_gone",),
    ),
    Bug(
        "a worker that drains does not heed a stop",
        "P3",
        (Change(f"{_RUNTIME}/leaving.py", "< deadline and not told_to_stop()", "< deadline"),),
        (f"{_DRAIN}::test_a_stop_during_a_drain_ends_within_its_limit_and_the_dead_are_replaced_meanwhile",),
    ),
)
