"""Planted bugs of the web room: sessions whose handles are lost, or whose failures pass for rewards."""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change

_UNIT: Final = "tests/unit/web/test_manager.py"
_MACHINE: Final = "tests/unit/web/test_manager_machine.py::test_any_history_agrees_with_the_model"
_HTTP: Final = "tests/integration/web/test_http.py"
_SESSIONS: Final = "tests/integration/web/test_chromium_sessions.py"
_ISOLATION: Final = "tests/integration/web/test_chromium_isolation.py"
_WEB: Final = "src/homing/web"
_CHROMIUM: Final = f"{_WEB}/chromium"

WEB_BUGS: Final = (
    Bug(
        "a browser that comes late stays",
        "P3",
        (Change(f"{_WEB}/session.py", "if self.fenced and self._teardown is None:", "if False:"),),
        (
            f"{_UNIT}::test_a_browser_that_comes_late_is_counted_and_released",
            _MACHINE,
        ),
    ),
    Bug(
        "a release that failed counts as done",
        "P3",
        (
            Change(
                f"{_WEB}/session.py",
                'self._around.ledger.fail(entry, f"{type(error).__name__}: {error}")',
                "self._around.ledger.settle(entry)",
            ),
        ),
        (_MACHINE,),
    ),
    Bug(
        "giving up a seed cancels the provider's acquire",
        "P3",
        (Change(f"{_WEB}/seeding.py", "stop_when_given_up=False", "stop_when_given_up=True"),),
        (f"{_UNIT}::test_a_cancelled_seed_gives_its_browser_back_when_it_comes",),
    ),
    Bug(
        "a site is let go of while its backend is still open",
        "P3",
        (Change(f"{_WEB}/session.py", "site.needs = (*site.needs, entry)", "pass"),),
        (f"{_UNIT}::test_a_failed_backend_close_keeps_its_runner_and_its_site_but_not_its_browser",),
    ),
    Bug(
        "an operation begins in a session that is to end",
        "P2",
        (
            Change(f"{_WEB}/operations.py", "if self._session.fenced:", "if False:"),
            Change(f"{_WEB}/session.py", "if task is not here:", "if False:"),
        ),
        (f"{_UNIT}::test_a_call_that_waits_for_its_turn_does_not_begin_in_a_session_that_is_to_end",),
    ),
    Bug(
        "each call of evaluate evaluates",
        "P4",
        (
            Change(
                f"{_WEB}/manager.py",
                "if session.verdict is None:\n            verdict",
                "if True:\n            verdict",
            ),
        ),
        (f"{_UNIT}::test_there_is_one_verdict_whoever_asks_and_no_step_after_it", _MACHINE),
    ),
    Bug(
        "a step sent again is done again",
        "P4",
        (Change(f"{_WEB}/manager.py", "session.stepped[operation_id] = stepped", "pass"),),
        (_MACHINE,),
    ),
    Bug(
        "what waits for its release makes room for another session",
        "P3",
        (
            Change(
                f"{_WEB}/manager.py",
                "if len(self._sessions) >= self.settings.max_sessions:",
                "if sum(not each.fenced for each in self._sessions.values()) >= self.settings.max_sessions:",
            ),
        ),
        (f"{_UNIT}::test_no_more_sessions_than_there_may_be_and_pending_releases_count",),
    ),
    Bug(
        "a reset that failed leaves the session to be used",
        "P2",
        (Change(f"{_WEB}/operations.py", "always=True, spared=CapacityError", "spared=CapacityError"),),
        (f"{_UNIT}::test_a_reset_that_fails_or_is_cancelled_ends_the_session_at_once", _MACHINE),
    ),
    Bug(
        "looking at a session keeps it alive",
        "P3",
        (
            Change(
                f"{_WEB}/manager.py",
                "return session is not None and session.status is SessionStatus.LIVE",
                "return session is not None and (session.touch() or session.status is SessionStatus.LIVE)",
            ),
        ),
        (f"{_UNIT}::test_an_idle_session_is_closed_and_looking_at_it_does_not_keep_it",),
    ),
    Bug(
        "cancelling a seed leaves it where it was",
        "P3",
        (Change(f"{_WEB}/manager.py", "self._sessions.end(session, CANCELLED)\n            raise", "raise"),),
        (f"{_UNIT}::test_a_cancelled_seed_is_no_session", _MACHINE),
    ),
    Bug(
        "a failure of the evaluator is a measured reward",
        "P2",
        (Change(f"{_WEB}/server.py", '"mask_sample": True,', '"mask_sample": False,'),),
        (f"{_HTTP}::test_a_failure_is_masked_and_never_a_measured_reward",),
    ),
    Bug(
        "a lease counts as released though its processes are there",
        "P3",
        (Change(f"{_WEB}/session.py", "    left = left_of(handle.footprint)\n", "    left: list[str] = []\n"),),
        (f"{_UNIT}::test_a_lease_is_released_only_when_its_processes_and_folders_are_gone",),
    ),
    Bug(
        "a fence does not refuse the late seed of a closed identity",
        "P2",
        (
            Change(
                f"{_WEB}/control.py",
                "        payload = _payload(task)\n        if record.closed_at is not None:",
                "        payload = _payload(task)\n        if False:",
            ),
        ),
        (f"{_HTTP}::test_a_close_needs_no_cookie_and_fences_the_identity_before_and_after_its_seed",),
    ),
    Bug(
        "another's close token is as good as one's own",
        "P1",
        (Change(f"{_WEB}/control.py", "elif not hmac.compare_digest(record.token_digest, digest):", "elif False:"),),
        (f"{_HTTP}::test_seeds_of_one_identity_share_one_session_and_another_payload_is_a_conflict",),
    ),
    Bug(
        "a client that leaves before it knows its session leaves the session",
        "P3",
        (
            Change(
                f"{_WEB}/server.py",
                "await asyncio.wait((seed, left), return_when=asyncio.FIRST_COMPLETED)\n            if not left.done():",
                "await asyncio.wait((seed,))\n            if True:",
            ),
        ),
        (f"{_HTTP}::test_a_client_that_will_know_its_session_by_its_cookie_only_and_leaves_has_none",),
    ),
    Bug(
        "a page that hangs keeps its turn at a core",
        "P6",
        (Change(f"{_WEB}/runners.py", "call_later(self._turn_seconds, end_turn)", "call_later(1e6, end_turn)"),),
        ("tests/unit/web/test_runners.py::test_an_operation_that_hangs_holds_up_the_others_for_a_turn_and_no_longer",),
    ),
    Bug(
        "a writer shares its site",
        "P1",
        (Change(f"{_WEB}/sites.py", "(fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)", "fcntl.LOCK_SH"),),
        ("tests/unit/web/test_sites.py::test_readers_share_a_site_and_a_writer_has_it_alone_over_all_workers",),
    ),
    Bug(
        "an address inside an IPv6 one is not looked at",
        "answers",
        (Change(f"{_CHROMIUM}/rules.py", "        real = _unwrapped(address)\n", "        real = address\n"),),
        ("tests/unit/web/test_rules.py::test_no_setting_lets_a_browser_reach_a_metadata_service",),
    ),
    Bug(
        "a name is judged once, and looked up again to connect",
        "answers",
        (
            Change(
                f"{_CHROMIUM}/gateway.py",
                "asyncio.open_connection(address, port)",
                "asyncio.open_connection(host, port)",
            ),
        ),
        (f"{_ISOLATION}::test_a_name_is_connected_to_where_its_one_look_up_led",),
    ),
    Bug(
        "a browser knows the run directory",
        "answers",
        (Change(f"{_WEB}/processes.py", "    environment.pop(SESSION_SOCKET_DIR_ENV, None)\n", ""),),
        (f"{_ISOLATION}::test_the_browser_does_not_know_the_run_directory",),
    ),
    Bug(
        "a reset keeps the cookies of the try before",
        "P1",
        (Change(f"{_CHROMIUM}/backend.py", "await self._context.raw.clear_cookies()", "pass"),),
        (f"{_ISOLATION}::test_a_reset_session_has_none_of_the_cookies_of_the_try_before",),
    ),
    Bug(
        "a stopped renderer outlives its session",
        "P3",
        (
            Change(
                f"{_CHROMIUM}/browser.py", "await asyncio.to_thread(end, footprint.processes, _KILL_SECONDS)", "pass"
            ),
        ),
        (f"{_SESSIONS}::test_a_stopped_renderer_is_gone_when_its_session_is_closed",),
    ),
    Bug(
        "a crashed page goes unnoticed",
        "P2",
        (
            Change(
                f"{_CHROMIUM}/backend.py",
                "if any(view.crashed.done() and not view.page.is_closed() for view in self._context.views):",
                "if False:",
            ),
            Change(f"{_CHROMIUM}/backend.py", "if crashes and self._context.has_page:", "if False:"),
        ),
        (f"{_SESSIONS}::test_a_page_that_crashed_is_replaced_where_the_task_says_so",),
    ),
    Bug(
        "a ref of an earlier observation is as good as the last one's",
        "P2",
        (
            Change(f"{_CHROMIUM}/backend.py", "if named is not None and named != self._observation_id:", "if False:"),
            Change(f"{_CHROMIUM}/hands.py", 'if error == "stale":', "if False:"),
        ),
        (f"{_SESSIONS}::test_a_ref_is_good_for_the_last_observation_only",),
    ),
    Bug(
        "a dialog waits for somebody to answer it",
        "P6",
        (Change(f"{_CHROMIUM}/context.py", 'self._tasks.spawn(_quietly(answer), "answer dialog")', "answer.close()"),),
        (f"{_SESSIONS}::test_dialogs_are_answered_and_shown_and_hold_nothing_up",),
    ),
    Bug(
        "a driver that a signal holds is waited for",
        "P6",
        (Change(f"{_CHROMIUM}/provider.py", "            await self._end_lost_driver()\n", ""),),
        (f"{_SESSIONS}::test_a_stopped_driver_is_ended_and_replaced_for_the_next_session",),
    ),
    Bug(
        "who outlived a browser and its worker is told by a mark alone",
        "P3",
        (
            Change(
                f"{_WEB}/processes.py",
                "for folder, worker in worker_folders(namespaces())\n        if",
                "for folder, worker in ()\n        if",
            ),
        ),
        (
            "tests/processes/web/test_chromium_restart.py"
            "::test_a_stopped_page_that_outlived_its_browser_and_its_worker_is_ended_by_the_worker_in_its_place",
        ),
    ),
    Bug(
        "a trace of any size is kept",
        "P6",
        (Change(f"{_CHROMIUM}/trace.py", "if size > self._max_bytes:", "if False:"),),
        (
            "tests/integration/web/test_chromium_traces.py"
            "::test_a_trace_ends_after_its_last_step_and_one_that_is_too_large_is_not_kept",
        ),
    ),
    Bug(
        "a session's context is given to the next one too",
        "P1",
        (
            Change(
                f"{_CHROMIUM}/browser.py",
                "raw = await self.playwright.new_context(**options)",
                "raw = (self.playwright.contexts or [await self.playwright.new_context(**options)])[0]",
            ),
        ),
        (f"{_ISOLATION}::test_nothing_of_one_session_is_seen_by_another",),
    ),
    Bug(
        "a driver that a signal holds is seen before it is asked only",
        "P6",
        (Change(f"{_CHROMIUM}/driver.py", "if self.is_held or (is_held is not None", "if (is_held is not None"),),
        (f"{_SESSIONS}::test_a_stopped_driver_is_ended_and_replaced_for_the_next_session",),
    ),
    Bug(
        "a part of a recording's file counts as whole on a full disk",
        "answers",
        (Change(f"{_WEB}/recording.py", "        make_empty(path)\n        raise", "        raise"),),
        (
            "tests/unit/web/test_recording.py::test_a_file_that_cannot_be_written_to_its_end_is_empty_and_told_as_failed",
        ),
    ),
)
