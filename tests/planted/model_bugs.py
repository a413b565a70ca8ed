"""The rules that the models leave out (`model/*.pml`), planted in the code: what breaks the model breaks a test too.

`RULES_WITHOUT_CODE` says where the code has no such rule to leave out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.planted.bug import Bug, Change
from tests.planted.bugs import BUGS, FAILURES, OWNERS, RULES

DEATHS: Final = "tests/processes/test_owners_deaths.py"
RECORDS: Final = "tests/unit/directory/test_records.py"
PATHS: Final = "tests/integration/seeds/test_path_keys.py"
STICKY: Final = "tests/integration/test_sticky.py"
LIVES: Final = "tests/unit/test_rundir.py"
STOPS: Final = "tests/processes/test_lifecycle_under_load.py"

DIRECTORY: Final = "src/homing/directory"
FORWARDING: Final = "src/homing/forwarding"
ROUTING: Final = "src/homing/routing"
RUNDIR: Final = "src/homing/rundir"


def _one(rule: str, name: str, promise: str, path: str, old: str, new: str, *tests: str) -> Bug:
    return Bug(name, promise, (Change(path, old, new),), tests, rule)


MODEL_BUGS: Final = (
    # --- ownership.pml ---
    _one(
        "ownership.AWAIT_BETWEEN_LOOK_AND_COUNT",
        "a request is looked at, and counted in a later turn of the loop",
        "P1",
        f"{DIRECTORY}/ownership.py",
        "        entry.serving += 1\n        return entry\n",
        '        asyncio.get_running_loop().call_soon(setattr, entry, "serving", entry.serving + 1)\n        return entry\n',
        f"{OWNERS}::test_a_request_is_counted_from_entering_to_leaving",
    ),
    _one(
        "ownership.GIVEN_WHILE_SERVED",
        "a session is given while it is being served",
        "P1",
        f"{DIRECTORY}/gives.py",
        "lambda: not entry.serving and not entry.taking,",
        "lambda: not entry.taking,",
        f"{OWNERS}::test_a_give_waits_for_what_is_being_served_and_refuses_what_is_new",
    ),
    _one(
        "ownership.NO_LAST_LOOK",
        "a restore whose ask broke does not look again",
        "P3",
        f"{DIRECTORY}/restores.py",
        "                answer = await self._ask(owner, entry, restore)\n",
        "                answer = await self._ask(owner, entry, restore)\n"
        "                if answer is None:\n                    return False\n",
        f"{OWNERS}::test_however_an_ask_ends_the_record_says_what_came_of_it",
    ),
    _one(
        "ownership.TAKEN_WITHOUT_THE_LOCK",
        "a restore takes a dead worker's record without the lock",
        "P1",
        f"{DIRECTORY}/restores.py",
        "                if await locked(self._records, self.counters, "
        "partial(self._replace_dead, entry, text, restore)):\n",
        "                if self._replace_dead(entry, text, restore):\n",
        f"{OWNERS}::test_a_held_lock_is_busy_after_its_deadline_and_nothing_has_changed",
    ),
    Bug(
        "the lock is a file that is there, and stays when its holder dies",
        "P3",
        (
            Change(
                f"{DIRECTORY}/records.py",
                "        try:\n            fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=self._run.fd)\n",
                "        try:\n            fd = os.open(LOCK_NAME, flags | os.O_EXCL, 0o600, dir_fd=self._run.fd)\n"
                "        except FileExistsError:\n            yield False\n            return\n",
            ),
            Change(
                f"{DIRECTORY}/records.py",
                "                fcntl.flock(fd, fcntl.LOCK_UN)\n            os.close(fd)\n",
                "                os.unlink(LOCK_NAME, dir_fd=self._run.fd)\n            os.close(fd)\n",
            ),
        ),
        (f"{DEATHS}::test_killed_while_holding_the_lock_the_next_gets_it_at_once",),
        "ownership.LOCK_SURVIVES_ITS_HOLDER",
    ),
    _one(
        "ownership.ID_LEAVES_BEFORE_ITS_RECORD",
        "the bytes that carry a new session's ID leave before its record is made",
        "P1, P2",
        f"{ROUTING}/middleware.py",
        "        if session_ids:\n            self._request.learn(session_ids)\n"
        "        for each in messages:\n            self._note(each)\n            await self._send(each)\n",
        "        for each in messages:\n            self._note(each)\n            await self._send(each)\n"
        "        if session_ids:\n            self._request.learn(session_ids)\n",
        f"{STICKY}::test_an_id_is_owned_before_the_bytes_that_carry_it_leave_however_slow_the_disk",
    ),
    _one(
        "ownership.COMPACTED_WITHOUT_THE_LOCK",
        "dead workers' records are compacted without the lock",
        "P1",
        f"{DIRECTORY}/compaction.py",
        "    return locked_in_thread(records, counters, act)\n",
        "    return act()\n",
        f"{OWNERS}::test_while_the_lock_is_held_nothing_is_compacted",
    ),
    _one(
        "ownership.FOUND_DEAD_AFTER_THE_LOOK",
        "a record is compacted though it says something else by now",
        "P1",
        f"{DIRECTORY}/compaction.py",
        "            if records.read(name) == text:\n",
        "            if records.read(name) is not None:\n",
        f"{OWNERS}::test_a_record_that_changed_since_it_was_found_dead_is_not_compacted",
    ),
    _one(
        "ownership.DEAD_IS_GUESSED",
        "an owner that does not answer an ask is taken for dead",
        "P1",
        f"{DIRECTORY}/restores.py",
        "                answer = await self._ask(owner, entry, restore)\n",
        "                answer = await self._ask(owner, entry, restore)\n"
        "                if answer is None and self._replace_dead(entry, text, restore):\n"
        "                    return self._open(entry, restore)\n",
        f"{OWNERS}::test_an_owner_whose_asks_fail_is_not_taken_for_dead",
    ),
    Bug(
        "a life file is linked before it is locked: a starting worker looks dead",
        "P1",
        (
            Change(
                f"{RUNDIR}/lives.py",
                "                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
                "                os.write(fd, app.encode())\n"
                "                os.link(prepared, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)\n",
                "                os.write(fd, app.encode())\n"
                "                os.link(prepared, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)\n"
                "                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            ),
        ),
        (f"{LIVES}::test_a_life_file_is_never_there_unlocked_while_its_worker_lives",),
        "ownership.LIFE_LOCKED_AFTER_START",
    ),
    _one(
        "ownership.LIFE_LET_GO_BEFORE_THE_LAST",
        "a worker that stops lets go of its life before its last handler has ended",
        "P1",
        f"{ROUTING}/worker.py",
        '        self._mark("drained")\n        deadline = self._drain_until()\n',
        '        self._mark("drained")\n        for life in list(self.run_directory._lives.values()):\n'
        "            life.close()\n        deadline = self._drain_until()\n",
        f"{STOPS}::test_an_owner_that_stops_lives_until_its_last_handler_has_ended",
    ),
    _one(
        "ownership.SOCKET_CLOSED_BEFORE_THE_LAST",
        "a worker that stops closes its private socket before its last handler has ended",
        "P2",
        f"{ROUTING}/worker.py",
        '        self._mark("drained")\n        deadline = self._drain_until()\n',
        '        self._mark("drained")\n        if self._receiver is not None:\n            self._receiver.listener.close()\n'
        "            self._receiver._acceptor._accepting.cancel()\n        deadline = self._drain_until()\n",
        f"{STOPS}::test_an_owner_that_stops_finishes_what_it_serves_for_others_and_takes_nothing_more",
    ),
    _one(
        "ownership.LIFE_KEPT_BY_A_CHILD",
        "a forked child keeps its dead parent alive",
        "P3",
        f"{RUNDIR}/lives.py",
        "        self._undo = run_in_forked_child(self._close_fd)\n",
        "        self._undo = lambda: None\n",
        f"{DEATHS}::test_a_forked_child_does_not_keep_its_dead_parent_alive",
    ),
    _one(
        "ownership.ABANDONED_KEEPS_THE_RECORD",
        "a restore that was abandoned keeps the record that it was given",
        "P3",
        f"{DIRECTORY}/restores.py",
        "            if not entry.owned and self._records.names_us(entry.name):\n",
        "            if False:\n",
        f"{OWNERS}::test_a_restore_nobody_waits_for_any_more_goes_on_and_releases_what_it_is_given",
    ),
    _one(
        "ownership.ASK_CUT_BEFORE_ITS_ANSWER",
        "a restore that nobody waits for any more cuts its ask",
        "P3",
        f"{DIRECTORY}/restores.py",
        "            if not task.done():\n                restore.abandoned.set()\n",
        "            if not task.done():\n                restore.abandoned.set()\n                task.cancel()\n",
        f"{OWNERS}::test_a_restore_nobody_waits_for_any_more_goes_on_and_releases_what_it_is_given",
    ),
    _one(
        "ownership.SERVED_BEFORE_IT_IS_OPEN",
        "a record that names this worker is enough to serve its session",
        "P2",
        f"{DIRECTORY}/ownership.py",
        "        if entry is None or not entry.owned or not self._records.names_us(entry.name):\n            return None\n",
        "        entry = entry or self._entry(session_id, self._name(session_id))\n"
        "        if not self._records.names_us(entry.name):\n            return None\n",
        f"{OWNERS}::test_a_record_that_names_a_worker_which_does_not_count_it_means_moving",
    ),
    _one(
        "ownership.GIVEN_WITHOUT_A_LOOK",
        "an owner gives without looking whether the session is still its own",
        "P1",
        f"{DIRECTORY}/gives.py",
        "        if not entry.owned or not self._records.names_us(entry.name):\n",
        "        if False:\n",
        f"{OWNERS}::test_a_session_taken_from_its_owner_while_a_give_waited_is_not_given_again",
    ),
    Bug(
        "an owner forgets a session after it has given it",
        "P1",
        (
            Change(
                f"{DIRECTORY}/gives.py",
                "        self._forget(entry)\n        self._drop_state(entry)\n",
                "        self._drop_state(entry)\n",
            ),
            Change(
                f"{DIRECTORY}/gives.py",
                "        self.counters.given += 1\n",
                "        self.counters.given += 1\n        asyncio.get_running_loop().call_later(1, self._forget, entry)\n",
            ),
        ),
        (f"{OWNERS}::test_an_idle_session_is_given_at_once_with_its_state_dropped",),
        "ownership.FORGOTTEN_AFTER_THE_GIVE",
    ),
    Bug(
        "requests are not counted",
        "P1",
        (
            Change(
                f"{DIRECTORY}/ownership.py",
                "        entry.serving += 1\n        return entry\n",
                "        return entry\n",
            ),
            Change(
                f"{DIRECTORY}/ownership.py",
                "        entry.serving -= 1\n        # Of most",
                "        # Of most",
            ),
        ),
        (f"{OWNERS}::test_a_request_is_counted_from_entering_to_leaving",),
        "ownership.NOT_COUNTED",
    ),
    _one(
        "ownership.FENCE_STAYS_AFTER_BUSY",
        "the fence stays up after *busy*",
        "P3",
        f"{DIRECTORY}/gives.py",
        "        finally:\n            entry.fenced -= 1\n",
        "        finally:\n            entry.fenced -= quiet\n",
        f"{OWNERS}::test_a_give_that_times_out_has_changed_nothing",
    ),
    _one(
        "ownership.FAILED_UNLINK_IS_FORGOTTEN",
        "a record that could not be removed is forgotten",
        "P3",
        f"{DIRECTORY}/ownership.py",
        "            self._pending.add(entry)\n",
        "",
        f"{RECORDS}::test_a_release_that_cannot_unlink_is_pending_and_tried_again",
    ),
    _one(
        "ownership.FAILED_GIVE_KEEPS_THE_RECORD",
        "a give that failed after it dropped the state keeps the record",
        "P3",
        f"{DIRECTORY}/gives.py",
        "            self._records.discard(prepared)\n            self._remove(entry)\n",
        "            self._records.discard(prepared)\n",
        f"{RECORDS}::test_a_give_that_fails_after_the_state_was_dropped_leaves_no_record",
    ),
    _one(
        "ownership.RESTORED_WITHOUT_DRAINING",
        "a restore of a session that is here replaces its state under a request",
        "P2",
        f"{DIRECTORY}/restores.py",
        "lambda: entry.serving <= own_requests,",
        "lambda: True,",
        f"{OWNERS}::test_a_restore_of_a_session_that_is_here_drains_it_first",
    ),
    # --- rewrite.pml ---
    _one(
        "rewrite.OPENED_THOUGH_OPEN_ALREADY",
        "what a rewrite took is opened though a restore has opened it meanwhile",
        "P2",
        f"{DIRECTORY}/restores.py",
        "            ready = [entry for entry in taken if not entry.owned]\n",
        "            ready = list(taken)\n",
        f"{OWNERS}::test_what_a_restore_opened_while_a_rewrite_took_it_is_drained_before_it_is_opened_again",
    ),
    Bug(
        "a rewrite's thread changes memory",
        "P2",
        (
            Change(
                f"{DIRECTORY}/restores.py",
                "                    if not entry.owned and self._records.create(entry.name):\n",
                "                    if not entry.owned and self._records.create(entry.name):\n"
                "                        self._own(entry)\n",
            ),
        ),
        (f"{OWNERS}::test_a_rewrite_all_cancelled_twice_ends_with_its_batch_and_owns_exactly_what_it_took",),
        "rewrite.MEMORY_CHANGED_IN_THE_THREAD",
    ),
    _one(
        "rewrite.CANCELLED_LEAVES_ITS_BATCH",
        "a rewrite that is cancelled does not wait for its batch",
        "P3",
        f"{DIRECTORY}/restores.py",
        "                    restore.abandoned.set()\n                    cancelled = error\n",
        "                    restore.abandoned.set()\n                    cancelled = error\n                    raise\n",
        f"{OWNERS}::test_a_rewrite_all_cancelled_twice_ends_with_its_batch_and_owns_exactly_what_it_took",
    ),
    _one(
        "rewrite.FORGETS_WHAT_IT_TOOK_ON_ERROR",
        "a rewrite that fails forgets what it took before",
        "P3",
        f"{DIRECTORY}/restores.py",
        "            ready = [entry for entry in taken if not entry.owned]\n",
        "            ready = [entry for entry in taken if not entry.owned and not errors]\n",
        f"{OWNERS}::test_a_rewrite_all_that_finds_the_lock_held_owns_what_it_took_before",
    ),
    _one(
        "rewrite.TAKEN_WITHOUT_THE_LOCK",
        "a rewrite takes dead workers' records without the lock",
        "P1",
        f"{DIRECTORY}/restores.py",
        "                locked_in_thread(self._records, self.counters, lambda: self._replace_all_dead(dead, taken))\n",
        "                self._replace_all_dead(dead, taken)\n",
        f"{OWNERS}::test_a_rewrite_all_that_finds_the_lock_held_owns_what_it_took_before",
    ),
    _one(
        "rewrite.SETTLED_BY_THE_FIRST_TO_END",
        "a restore that ends releases what another one is taking",
        "P3",
        f"{DIRECTORY}/restores.py",
        "        if not entry.taking:\n            if not entry.owned and",
        "        if True:\n            if not entry.owned and",
        f"{OWNERS}::test_an_abandoned_restore_does_not_release_what_a_rewrite_takes_meanwhile",
    ),
    _one(
        "rewrite.BUSY_AFTER_A_CHANGE",
        "an owner says *busy* after it has dropped the state",
        "P2",
        f"{DIRECTORY}/gives.py",
        "            return self._answered(self._give_now(entry, to) if quiet else Given.BUSY)\n",
        "            if not quiet:\n                self._drop_state(entry)\n"
        "            return self._answered(self._give_now(entry, to) if quiet else Given.BUSY)\n",
        f"{OWNERS}::test_a_give_that_times_out_has_changed_nothing",
    ),
    _one(
        "rewrite.BATCH_AFTER_A_CANCELLATION",
        "a cancelled rewrite begins another batch",
        "P3",
        f"{DIRECTORY}/restores.py",
        "                task.exception()  # seen: the cancellation is what the caller hears of\n"
        "                raise cancelled\n",
        "                task.exception()  # seen: the cancellation is what the caller hears of\n"
        "                if start + REWRITE_BATCH >= len(ids):\n                    raise cancelled\n",
        f"{OWNERS}::test_a_rewrite_all_cancelled_twice_ends_with_its_batch_and_owns_exactly_what_it_took",
    ),
    _one(
        "rewrite.GIVEN_BEFORE_IT_IS_OPEN",
        "a session on its way here is given on before it is open",
        "P1",
        f"{DIRECTORY}/gives.py",
        "lambda: not entry.serving and not entry.taking,",
        "lambda: not entry.serving,",
        f"{OWNERS}::test_a_session_on_its_way_here_is_given_on_only_once_it_is_open",
    ),
    # --- path_keys.pml ---
    _one(
        "path_keys.TAKEN_WITHOUT_THE_LOCK",
        "a start takes a dead worker's path key without the lock",
        "P1",
        f"{DIRECTORY}/restores.py",
        "                if not held:\n                    raise lock_busy(self.counters)\n                if self._replace_dead(entry, text):\n",
        "                if self._replace_dead(entry, text):\n",
        f"{OWNERS}::test_a_held_lock_is_busy_after_its_deadline_and_nothing_has_changed",
    ),
    Bug(
        "a start takes the path key of a worker that lives",
        "P1",
        (
            Change(
                f"{ROUTING}/path_keys.py",
                "if owner != self._here and self._run_directory.is_dead(owner):",
                "if owner != self._here:",
            ),
            Change(
                f"{DIRECTORY}/restores.py",
                "            if owner is not None and not self._records.is_dead(owner):\n"
                "                raise OwnerAliveError(entry.key, owner)\n"
                "            with self._records.try_lock()",
                "            with self._records.try_lock()",
            ),
        ),
        (f"{PATHS}::test_two_starts_of_one_rollout_at_once_run_at_one_worker",),
        "path_keys.TAKEN_FROM_THE_LIVING",
    ),
    _one(
        "path_keys.KEY_FREED_BY_THE_FIRST_CLOSE",
        "the first of two sessions to end frees their path key",
        "P2",
        f"{ROUTING}/path_keys.py",
        "        self._bound[binding.key] -= 1\n",
        "        self._bound[binding.key] = 0\n",
        f"{PATHS}::test_of_two_sessions_that_share_a_key_the_first_close_does_not_free_it",
    ),
    _one(
        "path_keys.KEPT_THOUGH_THE_KEY_IS_OTHERS",
        "a start is served here though its path key is another worker's",
        "P2",
        f"{ROUTING}/route.py",
        "            if holder == worker.id:\n                request.enter()\n                return holder\n",
        "            request.enter()\n            return worker.id\n",
        f"{PATHS}::test_two_starts_of_one_rollout_at_once_run_at_one_worker",
        f"{PATHS}::test_a_start_placed_elsewhere_leaves_nothing_where_it_landed",
    ),
    Bug(
        "a path key is acquired after the start's handler",
        "P2",
        (
            Change(
                f"{ROUTING}/route.py",
                "        return self._worker.id if key is None else self._worker.path_keys.bind(session_id, key)\n",
                "        return self._worker.id\n",
            ),
            Change(
                f"{ROUTING}/request.py",
                "            refused = status is not None and not turned\n",
                "            refused = status is not None and not turned\n"
                "            worker.path_keys.bind(session_id, named.start_path_key)\n",
            ),
        ),
        (f"{PATHS}::test_a_stop_reaches_it_from_the_start_of_the_seed",),
        "path_keys.KEY_ACQUIRED_AFTER_THE_START",
    ),
    _one(
        "path_keys.SESSION_KEY_NOT_UNDONE",
        "a start that is placed elsewhere keeps its session's record here",
        "P3",
        f"{ROUTING}/route.py",
        "        owners.release(session_id, why=None)\n        return holder\n",
        "        return holder\n",
        f"{PATHS}::test_a_start_placed_elsewhere_leaves_nothing_where_it_landed",
    ),
    _one(
        "path_keys.GIVER_KEEPS_THE_KEY",
        "a worker that gives a session keeps its path key until a sweep",
        "P2",
        f"{ROUTING}/install.py",
        "        if router.worker is not None:\n            router.worker.path_keys.unbind(SessionId(session_id))\n",
        "",
        f"{PATHS}::test_a_session_that_is_given_takes_its_hold_on_the_key_along",
    ),
    _one(
        "path_keys.STOP_HANDLED_WHERE_IT_LANDS",
        "a stop that a peer sends is handled where it arrives",
        "P2",
        f"{ROUTING}/route.py",
        '        """A path key is looked up and never acquired: with no owner, the request is handled where it lands."""\n',
        '        """A path key is looked up and never acquired: with no owner, the request is handled where it lands."""\n'
        "        if self._reason is Reason.OWNED:\n            return self._serve_nameless()\n",
        f"{RULES}::test_a_stop_sent_to_a_worker_that_let_the_key_go_is_not_mine",
    ),
    # --- of the same kind, where the model has no rule of its own ---
    _one(
        "",
        "a dead worker's session is adopted by whoever comes first",
        "P2",
        f"{DIRECTORY}/ownership.py",
        "            if (owner := self._look(name)) is not None:\n                return owner\n",
        "            if (owner := self._look(name)) is not None:\n"
        "                if owner != self.worker_id and self._records.is_dead(owner):\n"
        "                    self._records.replace(self._records.prepare(self.worker_id), name)\n"
        "                    self._own(entry or self._entry(session_id, name))\n"
        "                    return self.worker_id\n"
        "                return owner\n",
        f"{DEATHS}::test_killed_after_the_record_before_the_handler_its_session_stays_gone",
    ),
    _one(
        "",
        "a release unlinks the record without a look at whom it names",
        "P1",
        f"{DIRECTORY}/ownership.py",
        "            if text is not None and self._records.names_us(entry.name):\n",
        "            if text is not None:\n",
        f"{OWNERS}::test_a_release_leaves_alone_a_record_that_names_another_by_now",
    ),
    _one(
        "",
        "the close retry window runs on the wall clock",
        "P2",
        "src/homing/lifetime/window.py",
        "        self._monotonic = clock.monotonic\n",
        "        self._monotonic = clock.wall\n",
        "tests/integration/seeds/test_lifetimes.py::test_a_change_of_the_wall_clock_ends_no_session",
    ),
    Bug(
        "a record is made in two steps: the file, then what it says",
        "P1",
        (
            Change(
                f"{DIRECTORY}/records.py",
                "            os.symlink(self._ours, name, dir_fd=self._fd)\n",
                '            os.symlink("-", name, dir_fd=self._fd)\n'
                "            self.replace(self.prepare(self._worker_id), name)\n",
            ),
        ),
        (f"{RECORDS}::test_a_record_says_whose_it_is_from_its_first_moment",),
    ),
    _one(
        "",
        "each forwarded request opens a connection of its own",
        "P6",
        f"{FORWARDING}/forwarder.py",
        "            connection = pool.take()\n            pooled = connection is not None\n"
        "            if connection is None:\n                connection = await self._open(pool)\n"
        "            while True:\n                relay",
        "            connection = None\n            pooled = connection is not None\n"
        "            if connection is None:\n                connection = await self._open(pool)\n"
        "            while True:\n                relay",
        f"{FAILURES}::test_not_mine_gives_everything_back",
    ),
    _one(
        "",
        "a session served where its request arrives is looked up more than once",
        "P6",
        f"{ROUTING}/route.py",
        "    entry = worker.owners.try_enter(session_id)\n",
        "    worker.owners.owner(session_id)\n    entry = worker.owners.try_enter(session_id)\n",
        f"{RULES}::test_a_session_served_where_its_request_arrives_costs_one_look",
    ),
)

OWNER_HISTORIES: Final = "tests/processes/test_owner_histories.py::test_any_history_of_workers_keeps_the_promises"
SERVER_HISTORIES: Final = "tests/processes/test_server_histories.py::test_any_history_of_a_server_is_that_of_one_worker"

OWNER_HISTORY_BUGS: Final = (
    "a session is given while it is being served",
    "a record that names this worker is enough to serve its session",
    "a dead worker's session is adopted by whoever comes first",
    "a restore of a session that is here replaces its state under a request",
    "a restore that was abandoned keeps the record that it was given",
    "a rewrite that is cancelled does not wait for its batch",
    "the fence stays up after *busy*",
    "an owner that does not answer an ask is taken for dead",
    "a rewrite takes dead workers' records without the lock",
)
"""Bugs that the histories of workers find by themselves, without a test that knows where to look."""

SERVER_HISTORY_BUGS: Final = (
    _one(
        "",
        "what belongs to another worker is served where it arrives",
        "P2",
        f"{ROUTING}/route.py",
        "    return None if entry is None else RoutedRequest(worker, named, session_id, entry)\n",
        "    if entry is None and owned_elsewhere(worker, named) is not None:\n"
        "        return RoutedRequest(worker, named, None)\n"
        "    return None if entry is None else RoutedRequest(worker, named, session_id, entry)\n",
        SERVER_HISTORIES,
    ),
    _one(
        "",
        "a dead worker's session is moving for ever, never gone",
        "answers",
        f"{ROUTING}/route.py",
        "        raise OwnerGoneError(key, owner) from error\n",
        "        return\n",
        SERVER_HISTORIES,
    ),
    _one(
        "",
        "a session that the app has made is not recorded",
        "P1",
        f"{ROUTING}/request.py",
        "        for session_id in made:\n            self._learned.append(self._record(worker, session_id))\n",
        "",
        SERVER_HISTORIES,
    ),
    _one(
        "",
        "a handler may touch a session wherever that is",
        "P2",
        f"{ROUTING}/request.py",
        "        return _Touch(self._worker, session_id)\n",
        "        return nullcontext()\n",
        SERVER_HISTORIES,
    ),
)
"""Bugs of whole servers, for their histories alone."""

RULES_WITHOUT_CODE: Final = {
    "path_keys.RESTORED_WITHOUT_ITS_KEY": "a restore's caller binds the key; the core moves sessions one by one",
    "path_keys.RUNS_BEFORE_ALL_HAVE_COME": "the same: when a restored group runs is its caller's to say",
}
"""Rules of the models that the core leaves to whoever restores."""

SAME_RULES: Final = {
    "ownership.ACQUIRED_AFTER_THE_HANDLER": "a session nobody owns is acquired after its handler",
    "ownership.HANDLED_WHERE_IT_ARRIVES": "no look again where it arrives: what a peer sends to an owner is handled there",
    "ownership.AWAIT_INSIDE_RELEASE": "between the check of a release and its unlink, others run (an await)",
    "ownership.OPENED_AT_THE_DEADLINE": "a restore opens when the deadline of its ask has passed",
    "ownership.STATE_KEPT_BY_THE_GIVER": "a give keeps the session's state",
    "ownership.REFUSED_IS_GONE": "a refused connection means gone, without another look at the record",
    "ownership.TAKEN_WITHOUT_A_SECOND_LOOK": "a dead worker's record is taken without the look under the lock",
    "path_keys.TAKEN_WITHOUT_A_SECOND_LOOK": "a dead worker's record is taken without the look under the lock",
    "ownership.RELEASED_WHILE_SERVED": "a session is released though it is being served",
}
"""Rules of the models that bugs of `bugs` leave out."""

ALL_BUGS: Final = (*BUGS, *MODEL_BUGS)

CLASSICS: Final = {
    "no lock on dead workers' records": "a restore takes a dead worker's record without the lock",
    "no second look at the owner": "no look again where it arrives: what a peer sends to an owner is handled there",
    "memory is trusted": "memory alone is trusted: a request enters without a look at the record",
    "adoption": "a dead worker's session is adopted by whoever comes first",
    "unlink without a check": "a release unlinks the record without a look at whom it names",
    "a POST is sent again": "a POST whose owner was lost after it had read it is sent again",
    "EAGAIN means gone": "a full backlog is taken for a dead worker: 410",
    "windows on the wall clock": "the close retry window runs on the wall clock",
    "no disowning": "a give keeps the session's state",
    "create, then write": "a record is made in two steps: the file, then what it says",
    "the sweep before the queue": "the loop lagged, and the sweep does not wait for it",
}
"""Mistakes that systems of this kind are known for, and the bug that each is here."""


def rules_planted() -> set[str]:
    """The rules of the models that some bug leaves out, as `model.RULE`."""
    return {bug.rule for bug in ALL_BUGS if bug.rule} | set(SAME_RULES)


def history_bugs() -> list[Bug]:
    """The bugs that the histories have to find, with nothing else to find them."""
    named = {bug.name: bug for bug in ALL_BUGS}
    return [*(replace(named[name], tests=(OWNER_HISTORIES,)) for name in OWNER_HISTORY_BUGS), *SERVER_HISTORY_BUGS]
