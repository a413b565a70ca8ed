"""Planted bugs of the web room: sessions whose handles are lost, or whose failures pass for rewards."""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change

_UNIT: Final = "tests/unit/web/test_manager.py"
_MACHINE: Final = "tests/unit/web/test_manager_machine.py::test_any_history_agrees_with_the_model"
_WEB: Final = "src/homing/web"

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
        (_MACHINE,),
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
        (Change(f"{_WEB}/manager.py", "always=True, spared=CapacityError", "spared=CapacityError"),),
        (_MACHINE,),
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
)
