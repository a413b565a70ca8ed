"""Planted bugs of what apps do that is unusual: lifespans, failures, and what outlives its session."""

from __future__ import annotations

from typing import Final

from tests.planted.bug import Bug, Change

_LIFESPANS: Final = "tests/integration/test_lifespans.py"
_STICKY: Final = "tests/integration/test_sticky.py"
_FAILURES: Final = "tests/integration/forwarding/test_failures.py"

SERVED_APP_BUGS: Final = (
    Bug(
        "whatever an app sends in its lifespan is taken for an answer",
        "P5",
        (
            Change(
                "src/homing/routing/lifespan.py",
                "        self.answered = self.answered or first\n",
                "        self.answered = True\n",
            ),
        ),
        (f"{_LIFESPANS}::test_an_app_that_takes_every_scope_for_a_request_is_served_as_without_homing",),
    ),
    Bug(
        "a second answer of a lifespan opens the worker again",
        "P5",
        (
            Change(
                "src/homing/routing/lifespan.py",
                "        first = not self.answered and message",
                "        first = message",
            ),
        ),
        (f"{_LIFESPANS}::test_a_second_answer_of_a_lifespan_goes_to_the_server_alone",),
    ),
    Bug(
        "an app of ASGI 2 is called by sticky as one of ASGI 3",
        "P5",
        (
            Change(
                "src/homing/routing/sticky.py",
                "build(_single_callable(app), options)",
                "build(app, options)",
            ),
        ),
        (f"{_LIFESPANS}::test_an_app_that_takes_every_scope_for_a_request_is_served_as_without_homing",),
    ),
    Bug(
        "a forwarded request whose task is marked as cancelled was cancelled by this worker",
        "answers",
        (
            Change(
                "src/homing/forwarding/exchange.py",
                "            if receiver.cancels:\n",
                "            if (task := asyncio.current_task()) is not None and task.cancelling():\n",
            ),
        ),
        (f"{_FAILURES}::test_an_app_whose_task_is_marked_as_cancelled_by_the_app_has_failed_as_any_other",),
    ),
    Bug(
        "what was under way when its session ended opens it again",
        "P3",
        (
            Change(
                "src/homing/routing/request.py",
                "            arrived[BEGAN_SCOPE_KEY] = self._began\n",
                "            pass\n",
            ),
        ),
        (
            f"{_STICKY}::"
            "test_what_was_under_way_when_its_session_ended_does_not_open_it_again_and_what_comes_later_does",
        ),
    ),
    Bug(
        "a session that is kept on while it is served has not ended when it did",
        "P3",
        (
            Change(
                "src/homing/lifetime/window.py",
                "                self._keep(kept.key, kept.state).end = kept.end\n",
                "                self._keep(kept.key, kept.state)\n",
            ),
        ),
        (
            "tests/unit/lifetime/test_window.py::"
            "test_a_request_that_began_before_the_end_does_not_open_the_session_again",
        ),
    ),
    Bug(
        "the code with which a WebSocket's client left is lost when a send finds out first",
        "P5",
        (
            Change(
                "src/homing/forwarding/relay.py",
                "            if self._open and self._pump is not None:\n",
                "            if False:\n",
            ),
        ),
        (
            "tests/integration/forwarding/test_websocket.py::"
            "test_the_code_with_which_a_client_left_reaches_an_app_that_was_sending",
        ),
    ),
)
