"""Checks that a server of your own keeps the contract: call them from a test, with the URL it serves at.

Not here: what only homing's own servers promise.
"""

from __future__ import annotations

import secrets
from typing import Any

from homing.rl.agents.checks import AgentCheck
from homing.rl.calls import Answer, Caller
from homing.rl.protocol import CLOSE_FOLLOWS

__all__ = ["check_agent_server", "check_resources_server"]


def check_resources_server(
    url: str,
    *,
    task_data: dict[str, Any] | None = None,
    task_id: dict[str, str] | None = None,
    verify: dict[str, Any] | None = None,
    keeps_state: bool = True,
) -> None:
    """Check that a resources server keeps the contract of seeds and closes, and says when a session is lost.

    It seeds and closes sessions of its own, each call over a new connection, so a server of several workers is checked
    across them. Nothing that it opened is left open.

    Args:
        url: Where the server is, such as `http://127.0.0.1:8000`.
        task_data, task_id: A task that it can seed; by default, one without data.
        verify: The body of a verify of that task.
        keeps_state: False for a server that keeps no state: it need not tell one episode from another, nor a session that
            was closed from one that is open.

    Raises:
        AssertionError: it does not; the message says what was expected.
    """
    check = _ResourcesCheck(url, task_data or {}, task_id or {"taskset": "check", "task_id": "1"}, verify or {})
    check.seeding_again_is_success()
    if keeps_state:
        check.another_episode_is_refused()
        check.a_close_of_another_episode_is_refused()
        check.a_seed_after_a_close_is_refused()
        check.a_lost_session_is_masked()
    check.closing_again_is_success()
    check.a_close_without_a_seed_is_success()
    check.a_close_needs_no_cookie()
    check.a_verify_that_a_close_follows_ends_nothing()


def check_agent_server(
    url: str, *, seed: dict[str, Any] | None = None, responses: dict[str, Any] | None = None
) -> None:
    """Check that an agent server keeps the contract of its sessions: seeds, closes and their receipts, activations, stops.

    It seeds and closes sessions of its own, each call over a new connection, so a server of several workers is checked
    across them. Nothing that it opened is left open.

    Args:
        url: Where the server is, such as `http://127.0.0.1:8000`.
        seed: Further fields of a seed that it can serve, such as `tool_accesses`.
        responses: What an activation is asked, such as `{"input": "hello"}`; without it, none is run.

    Raises:
        AssertionError: it does not; the message says what was expected.
    """
    AgentCheck(url, seed or {}, responses).run()


class _ResourcesCheck:
    def __init__(self, url: str, task_data: dict[str, Any], task_id: dict[str, str], verify: dict[str, Any]) -> None:
        self._url = url
        self._task = {"task_data": task_data, "task_id": task_id}
        self._verify = verify

    def seeding_again_is_success(self) -> None:
        session, first, second = self._names(), Caller(self._url), Caller(self._url)
        seeded = self._seed(first, session)
        _expect(seeded, 200, "a seed")
        assert seeded.content.get("resources_session_id") == session["resources_session_id"], (
            f"a seed's reply repeats resources_session_id: {seeded.content}"
        )
        assert first.cookies, "a seed's reply sets the session cookie"
        _expect(self._seed(first, session), 200, "the same seed again")
        _expect(self._seed(second, session), 200, "the same seed again, without its cookie")
        self._close(first, session)

    def another_episode_is_refused(self) -> None:
        session, caller = self._names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        other = session | {"episode_id": {"rollout_id": f"check-x{secrets.token_hex(4)}"}}
        _expect(self._seed(caller, other), 409, "a seed of an open session with another episode")
        later = session | {"episode_id": session["episode_id"] | {"attempt": 1}}
        _expect(self._seed(caller, later), 409, "a seed of an open session with another attempt")
        _expect(self._seed(caller, session), 200, "the first seed again, after a refused one")
        _expect(self._close(caller, session), 200, "a close, after a refused seed")

    def closing_again_is_success(self) -> None:
        session, caller = self._names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        for text in ("a close", "the same close again"):
            closed = self._close(caller, session)
            _expect(closed, 200, text)
            assert closed.content == {"resources_session_id": session["resources_session_id"]}, (
                f"a close's reply is resources_session_id and nothing else: {closed.content}"
            )

    def a_close_of_another_episode_is_refused(self) -> None:
        session, caller = self._names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        other = session | {"episode_id": {"rollout_id": f"check-x{secrets.token_hex(4)}"}}
        _expect(self._close(caller, other), 409, "a close that names another episode")
        _expect(self._seed(caller, session), 200, "the seed again, after a refused close: the session is still open")
        _expect(self._close(caller, session), 200, "the right close, after a refused one")

    def a_close_without_a_seed_is_success(self) -> None:
        session, caller = self._names(), Caller(self._url)
        _expect(self._close(caller, session), 200, "a close of a session that was never seeded")
        _expect(self._close(caller, session), 200, "the same close again")

    def a_seed_after_a_close_is_refused(self) -> None:
        for seeded_before in (True, False):
            session, caller = self._names(), Caller(self._url)
            if seeded_before:
                _expect(self._seed(caller, session), 200, "a seed")
            _expect(self._close(caller, session), 200, "a close")
            for late in (caller, Caller(self._url)):
                refused = self._seed(late, session)
                assert 400 <= refused.status < 500, f"a seed after its close is refused, not answered {refused.status}"

    def a_close_needs_no_cookie(self) -> None:
        session = self._names()
        _expect(self._seed(Caller(self._url), session), 200, "a seed")
        _expect(self._close(Caller(self._url), session), 200, "a close whose caller never saw the seed's reply")
        _expect(self._close(Caller(self._url), session), 200, "the same close again")

    def a_lost_session_is_masked(self) -> None:
        session, caller = self._names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        _expect(self._close(caller, session), 200, "a close")
        lost = caller.post("/verify", self._verify)
        _expect(lost, 200, "a verify of a session that is closed")
        assert lost.content.get("mask_sample") is True, f"a verify of a lost session is masked: {lost.content}"

    def a_verify_that_a_close_follows_ends_nothing(self) -> None:
        session, caller = self._names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        for text in ("a verify", "a verify again"):
            judged = caller.post("/verify", self._verify, headers=CLOSE_FOLLOWS)
            _expect(judged, 200, f"{text} that says that a close follows")
            reward = judged.content.get("reward")
            assert isinstance(reward, int | float), f"a verify's reply has a reward that is a number: {judged.content}"
            assert judged.content.get("failure_kind") != "session_lost", (
                f"a verify that a close follows leaves the session open: {judged.content}"
            )
        _expect(self._close(caller, session), 200, "the close that was announced")

    def _names(self) -> dict[str, Any]:
        return {
            "resources_session_id": f"resources-session-{secrets.token_hex(16)}",
            "episode_id": {"rollout_id": f"check-x{secrets.token_hex(4)}", "attempt": 0},
        }

    def _seed(self, caller: Caller, session: dict[str, Any]) -> Answer:
        return caller.post("/seed_session", session | self._task)

    def _close(self, caller: Caller, session: dict[str, Any]) -> Answer:
        return caller.post("/close_session", session)


def _expect(answer: Answer, status: int, what: str) -> None:
    assert answer.status == status, f"{what} is answered {status}, not {answer.status}: {answer.content}"
