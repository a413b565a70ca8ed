"""The planted bugs: which promise each breaks, what it changes in the source, and the tests that must then fail.

A change names a text that is in its file exactly once; `test_planted.py` holds that together with the source.
"""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change
from tests.planted.drain_bugs import DRAIN_BUGS
from tests.planted.episode_bugs import EPISODE_BUGS
from tests.planted.placement_bugs import PLACEMENT_BUGS
from tests.planted.served_app_bugs import SERVED_APP_BUGS
from tests.planted.shared_bugs import SHARED_BUGS
from tests.planted.web_bugs import WEB_BUGS

__all__ = ["BUGS", "Bug", "Change"]


RULES: Final = "tests/integration/seeds/test_protocol_rules.py"
OWNERS: Final = "tests/contract/test_owners.py"
RECEIVER: Final = "tests/integration/forwarding/test_receiver.py"
FAILURES: Final = "tests/integration/forwarding/test_failures.py"

ENGINEIO: Final = "tests/unit/identity/test_engineio.py"

_DIRECTORY: Final = "src/homing/directory"
_FORWARDING: Final = "src/homing/forwarding"
_IDENTITY: Final = "src/homing/identity"
_ROUTING: Final = "src/homing/routing"

BUGS: Final = (
    Bug(
        "no look again where it arrives: what a peer sends to an owner is handled there",
        "P1, P2",
        (
            Change(
                f"{_ROUTING}/middleware.py",
                "                request = None if self.policy.scatter else enter_here(worker, named)\n",
                "                request = None if self.policy.scatter else enter_here(worker, named)\n"
                "                if request is None and hop is not None and hop.reason is Reason.OWNED:\n"
                "                    request = RoutedRequest(worker, named, named.session_id)\n",
            ),
        ),
        (f"{RULES}::test_a_request_sent_to_a_worker_that_let_the_session_go_is_not_mine_and_does_not_run",),
    ),
    Bug(
        "a session nobody owns is acquired after its handler",
        "P1",
        (
            Change(
                f"{_ROUTING}/route.py",
                "                    placed_at = self._acquire(request, session_id)\n"
                "                    if placed_at == worker.id:\n"
                "                        return request\n",
                "                    return request\n                    placed_at = None\n",
            ),
            Change(
                f"{_ROUTING}/request.py",
                "        entry = self._entry\n        try:\n",
                "        entry = self._entry\n"
                "        if session_id is not None and entry is None:\n"
                "            entry = self._entry = self._record(worker, session_id)\n"
                "        try:\n",
            ),
        ),
        (
            f"{RULES}::test_a_request_of_a_session_nobody_owns_owns_it_before_its_handler",
            "tests/integration/seeds/test_use_and_cookies.py::test_a_start_owns_its_session_before_its_handler_runs",
        ),
    ),
    Bug(
        "between the check of a release and its unlink, others run (an await)",
        "P1",
        (
            Change(
                f"{_DIRECTORY}/ownership.py",
                "        if entry is None or not entry.owned or entry.serving or entry.taking or self._holds(session_id):\n"
                "            return\n"
                "        if why is not None:\n"
                "            self._end(entry, why)\n"
                "        self._remove(entry)\n",
                "        if entry is None or not entry.owned or entry.serving or entry.taking or self._holds(session_id):\n"
                "            return\n"
                "        asyncio.get_running_loop().call_soon(self._remove, entry)\n",
            ),
        ),
        (f"{OWNERS}::test_nothing_enters_between_the_check_of_a_release_and_its_end",),
    ),
    Bug(
        "a restore opens when the deadline of its ask has passed",
        "P1",
        (
            Change(
                f"{_DIRECTORY}/restores.py",
                "        if not task.done():\n            raise SessionMovingError\n",
                "        if not task.done():\n"
                "            self._opened(self._entry(session_id, self._name(session_id)), restore)\n"
                "            return\n",
            ),
        ),
        (f"{OWNERS}::test_nobody_opens_because_the_deadline_of_an_ask_passed",),
    ),
    Bug(
        "a POST whose owner was lost after it had read it is sent again",
        "P4",
        (
            Change(
                f"{_FORWARDING}/relay.py",
                "        failure = OwnerUnreachableError("
                'f"worker {owner} was lost before it said whether the session is its own")\n',
                "        failure = UndeliveredError("
                'f"worker {owner} was lost before it said whether the session is its own")\n',
            ),
        ),
        (
            f"{FAILURES}::test_an_end_after_the_first_frame_was_read_is_unknown",
            f"{FAILURES}::test_a_pooled_connection_that_read_the_request_is_not_tried_again",
        ),
    ),
    Bug(
        "a full backlog is taken for a dead worker: 410",
        "answers",
        (
            Change(
                f"{_FORWARDING}/pool.py",
                "        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):\n",
                "        if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):\n",
            ),
        ),
        (f"{FAILURES}::test_a_full_backlog_is_busy",),
    ),
    # --- more than the first six ---
    Bug(
        "memory alone is trusted: a request enters without a look at the record",
        "P1, P2",
        (
            Change(
                f"{_DIRECTORY}/ownership.py",
                "        if entry is None or not entry.owned or not self._records.names_us(entry.name):\n",
                "        if entry is None or not entry.owned:\n",
            ),
        ),
        (
            f"{OWNERS}::test_a_removed_directory_is_an_error_and_nobody_adopts",
            f"{OWNERS}::test_a_session_taken_from_a_live_worker_is_not_served_there_and_its_state_goes",
        ),
    ),
    Bug(
        "a dead worker's record is taken without the look under the lock",
        "P1",
        (
            Change(
                f"{_DIRECTORY}/restores.py",
                "            if self._records.read(entry.name) != text:\n",
                "            if self._records.read(entry.name) is None:\n",
            ),
        ),
        (f"{OWNERS}::test_a_dead_workers_record_that_changed_before_the_lock_was_held_is_looked_at_anew",),
    ),
    Bug(
        "a give keeps the session's state",
        "P2",
        (
            Change(
                f"{_DIRECTORY}/gives.py",
                "        self._forget(entry)\n        self._drop_state(entry)\n",
                "        self._forget(entry)\n",
            ),
        ),
        (f"{OWNERS}::test_an_idle_session_is_given_at_once_with_its_state_dropped",),
    ),
    Bug(
        "a session is released though it is being served",
        "P1",
        (
            Change(
                f"{_DIRECTORY}/ownership.py",
                "        if entry is None or not entry.owned or entry.serving or entry.taking or self._holds(session_id):\n",
                "        if entry is None or not entry.owned or entry.taking or self._holds(session_id):\n",
            ),
        ),
        (f"{OWNERS}::test_a_session_that_is_being_served_is_not_released",),
    ),
    Bug(
        "a refused connection means gone, without another look at the record",
        "P2",
        (
            Change(
                f"{_ROUTING}/route.py",
                "    if records.owner(key) == owner:\n        raise OwnerGoneError",
                "    raise OwnerGoneError",
            ),
        ),
        (f"{RULES}::test_a_session_released_before_its_worker_exited_is_not_gone",),
    ),
    Bug(
        "a served request is not counted off",
        "P3",
        (
            Change(
                f"{_DIRECTORY}/ownership.py",
                "        entry.serving -= 1\n        # Of most",
                "        # Of most",
            ),
        ),
        (f"{OWNERS}::test_the_last_request_to_leave_releases_a_session_of_which_nothing_is_left",),
    ),
    Bug(
        "the loop lagged, and the sweep does not wait for it",
        "P2",
        (
            Change(
                f"{_ROUTING}/sweeper.py",
                "            worker.lifetimes.postpone(lag)\n",
                "            pass\n",
            ),
        ),
        (f"{RULES}::test_after_a_lag_of_the_loop_a_sweep_releases_nothing_that_waited_for_it",),
    ),
    Bug(
        "an ended session keeps its owner for 300 s, whatever the idle time is",
        "P3",
        (
            Change(
                f"{_ROUTING}/sticky.py",
                "    window_seconds = min(checked.idle_seconds, CLOSE_RETRY_WINDOW_SECONDS)\n",
                "    window_seconds = CLOSE_RETRY_WINDOW_SECONDS\n",
            ),
        ),
        ("tests/unit/routing/test_sticky.py::test_an_ended_session_is_kept_no_longer_than_an_idle_one",),
    ),
    Bug(
        "a complete reply that its client is slow to read is cut as an idle connection",
        "P5",
        (
            Change(
                f"{_FORWARDING}/receiver.py",
                "            if idle and connection.unsent:\n",
                "            if idle and not connection:\n",
            ),
        ),
        (f"{RECEIVER}::test_a_complete_reply_is_not_cut_however_long_its_client_takes_to_read_it",),
    ),
    Bug(
        "a worker leaves before what its sessions were answered is sent",
        "P4, P5",
        (
            Change(
                f"{_FORWARDING}/receiver.py",
                "                while self.in_flight or self._unsent():\n",
                "                while self.in_flight:\n",
            ),
        ),
        (f"{RECEIVER}::test_a_drain_waits_until_complete_replies_are_sent",),
    ),
    Bug(
        "a worker that leaves lets forwarded WebSockets wait for the graceful limit",
        "P5",
        (Change(f"{_ROUTING}/worker.py", "            self._receiver.end_websockets()\n", ""),),
        (
            "tests/processes/test_drain.py::test_websockets_of_a_worker_that_leaves_are_closed_alike_wherever_they_arrived",
        ),
    ),
    Bug(
        "what is held back of a reply is what the app makes of it until it leaves",
        "P5",
        (
            Change(
                f"{_IDENTITY}/learned.py",
                "        held = dict(message)\n",
                "        self._held.append(message)\n        return\n        held = dict(message)\n",
            ),
        ),
        (
            "tests/unit/identity/test_learned.py"
            "::test_what_is_held_back_leaves_as_it_was_sent_though_the_app_uses_its_parts_again",
        ),
    ),
    Bug(
        "an app that asks for more while its body is still being taken is never told that its client has left",
        "P5",
        (
            Change(
                f"{_FORWARDING}/relay.py",
                "            self._pulled = True\n",
                "            self._pulled = False\n",
            ),
        ),
        (
            "tests/integration/differential/test_disconnects.py"
            "::test_a_client_that_leaves_is_known_after_a_body_as_long_as_what_goes_with_the_head",
        ),
    ),
    Bug(
        "what other tasks send gets into the middle of a large event",
        "P5",
        (
            Change(
                f"{_FORWARDING}/exchange.py",
                "        while connection is not None and (connection.write_paused or self._in_pieces is not None):\n"
                "            if self._in_pieces is not None:\n",
                "        while connection is not None and connection.write_paused:\n            if False:\n",
            ),
        ),
        ("tests/integration/forwarding/test_http.py::test_a_large_event_is_sent_as_one_whatever_other_tasks_send",),
    ),
    Bug(
        "a handler on a thread looks at a record and counts in two steps",
        "P1, P2",
        (
            Change(
                f"{_ROUTING}/worker.py",
                "        if self._loop is None or asyncio._get_running_loop() is self._loop:\n",
                "        if self._loop is not None:\n",
            ),
        ),
        ("tests/integration/test_sticky.py::test_a_session_stays_while_a_handler_on_a_thread_touches_it",),
    ),
    Bug(
        "a path source takes no notice of a FastAPI app's own root_path",
        "P1",
        (
            Change(
                f"{_ROUTING}/middleware.py",
                "        if self._with_root_path is not None and self._with_root_path.root_path:\n",
                "        if self._with_root_path is not None and not self._with_root_path.root_path:\n",
            ),
        ),
        (
            "tests/integration/test_fastapi_sessions.py"
            "::test_an_app_with_a_root_path_of_its_own_keeps_sessions_with_and_without_that_prefix",
        ),
    ),
    Bug(
        "of several headers of one name, a forwarded reply keeps the last (Set-Cookie)",
        "P5",
        (
            Change(
                f"{_FORWARDING}/heads.py",
                '    return {"type": "http.response.start", "status": start.status, "headers": start.headers}\n',
                '    return {"type": "http.response.start", "status": start.status, '
                '"headers": list(dict(start.headers).items())}\n',
            ),
        ),
        ("tests/integration/forwarding/test_http.py::test_app_and_client_see_what_they_see_without_the_hop",),
    ),
    Bug(
        "a forwarded reply's header names are in lower case",
        "P5",
        (
            Change(
                f"{_FORWARDING}/heads.py",
                '    return {"type": "http.response.start", "status": start.status, "headers": start.headers}\n',
                '    return {"type": "http.response.start", "status": start.status, '
                '"headers": [(name.lower(), value) for name, value in start.headers]}\n',
            ),
        ),
        ("tests/integration/forwarding/test_http.py::test_app_and_client_see_what_they_see_without_the_hop",),
    ),
    Bug(
        "a WebSocket whose owner is lost is closed as if all were well (1000)",
        "answers",
        (Change(f"{_FORWARDING}/relay.py", '"code": 1011, "reason": ""', '"code": 1000, "reason": ""'),),
        (f"{FAILURES}::test_a_websockets_owner_lost",),
    ),
    Bug(
        "the reply to a handshake of Engine.IO leaves before its connection is on record",
        "P2",
        (
            Change(
                f"{_IDENTITY}/learned.py",
                "        return Learned((), ()) if self._in_openings else self._released()\n",
                "        return self._released()\n",
            ),
        ),
        (f"{ENGINEIO}::test_nothing_leaves_before_the_sid_is_known_and_everything_does_after",),
    ),
    Bug(
        "a cookie that changes moves a living connection of Engine.IO to another worker",
        "P2",
        (Change(f"{_IDENTITY}/presets.py", "        first=True,\n", "        first=False,\n"),),
        (f"{ENGINEIO}::test_the_sid_counts_before_a_cookie_that_the_same_request_carries",),
    ),
    Bug(
        "the span of a forwarded request is written into its headers",
        "P5",
        (
            Change(
                f"{_ROUTING}/spans.py",
                "        watched = _StatusWatch(span, send).send if span.is_recording() else send\n",
                "        watched = _StatusWatch(span, send).send if span.is_recording() else send\n"
                "        carrier: dict[str, str] = {}\n"
                "        propagate.inject(carrier, trace.set_span_in_context(span))\n"
                "        added = [(name.encode(), value.encode()) for name, value in carrier.items()]\n"
                "        scope['headers'] = [*scope['headers'], *added]\n",
            ),
        ),
        ("tests/integration/test_spans.py::test_a_forwarded_request_is_one_span_of_the_callers_trace",),
    ),
    Bug(
        "a header of a usual reply may hold a line's end",
        "P5",
        (
            Change(
                "src/homing/runtime/replies.py",
                "len(head.translate(None, _CONTROL)) != len(head) - 2 * (len(lines) - 1)",
                "not head",
            ),
        ),
        ("tests/unit/runtime/test_quick_reply.py::test_no_header_says_more_than_one_thing",),
    ),
    Bug(
        "a usual reply begins while the client does not read",
        "P5",
        (Change("src/homing/runtime/replies.py", "cycle.flow.write_paused or ", ""),),
        ("tests/unit/runtime/test_quick_reply.py::test_the_next_reply_waits_for_a_client_that_does_not_read",),
    ),
    *EPISODE_BUGS,
    *PLACEMENT_BUGS,
    *WEB_BUGS,
    *DRAIN_BUGS,
    *SERVED_APP_BUGS,
    *SHARED_BUGS,
)
