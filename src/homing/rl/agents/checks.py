"""The contract of an agent server, checked from outside. Users call `homing.rl.testing.check_agent_server`."""

from __future__ import annotations

import secrets
from typing import Any

from homing.rl.calls import Answer, Caller
from homing.rl.episode_protocol import ACTIVATION_HEADER


class AgentCheck:
    """Each method seeds and closes sessions of its own, each call over a new connection.

    Args:
        url: Where the server is.
        seed: Further fields of a seed, such as `tool_accesses`.
        responses: What an activation is asked; None: none is tried.
    """

    def __init__(self, url: str, seed: dict[str, Any], responses: dict[str, Any] | None) -> None:
        self._url = url
        self._fields = {"task_id": {"taskset": "check", "task_id": "1"}} | seed
        self._responses = responses

    def it_says_what_its_sessions_can_do(self) -> None:
        found = Caller(self._url).call("GET", "/v1/agent_sessions/capabilities")
        _expect(found, 200, "a question for the capabilities")
        assert isinstance(found.content.get("tool_transports"), list), (
            f"the capabilities name tool_transports, a list: {found.content}"
        )

    def seeding_again_is_success(self) -> None:
        session, first, second = names(), Caller(self._url), Caller(self._url)
        seeded = self._seed(first, session)
        _expect(seeded, 200, "a seed")
        assert seeded.content.get("agent_session_id") == session["agent_session_id"], (
            f"a seed's reply repeats agent_session_id: {seeded.content}"
        )
        assert first.cookies, "a seed's reply sets the session cookie"
        _expect(self._seed(first, session), 200, "the same seed again")
        _expect(self._seed(second, session), 200, "the same seed again, without its cookie")
        _expect(self._close(first, session), 200, "a close")

    def another_seed_of_an_open_session_is_refused(self) -> None:
        session, caller = names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        later = session | {"episode_id": session["episode_id"] | {"attempt": 1}}
        _expect(self._seed(caller, later), 409, "a seed of an open session with another attempt")
        other = self._fields | session | {"task_id": {"taskset": "check", "task_id": "2"}}
        _expect(caller.post("/v1/agent_sessions", other), 409, "a seed of an open session with another task")
        _expect(self._seed(caller, session), 200, "the first seed again, after refused ones")
        _expect(self._close(caller, session), 200, "a close")

    def closing_again_gives_the_same_receipt(self) -> None:
        session, caller = names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        receipts = [self._close(caller, session), self._close(caller, session), self._close(Caller(self._url), session)]
        for receipt, which in zip(receipts, ("a close", "it again", "it again, without the cookie"), strict=True):
            _expect(receipt, 200, which)
            assert receipt.content.get("agent_session_id") == session["agent_session_id"], (
                f"a receipt repeats agent_session_id: {receipt.content}"
            )
            assert receipt.content == receipts[0].content, f"{which} gives the same receipt: {receipt.content}"

    def a_close_of_another_episode_is_refused(self) -> None:
        session, caller = names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        other = session | {"episode_id": {"rollout_id": f"check-x{secrets.token_hex(4)}"}}
        _expect(self._close(caller, other), 409, "a close that names another episode")
        _expect(self._seed(caller, session), 200, "the seed again, after a refused close: the session is still open")
        _expect(self._close(caller, session), 200, "the right close, after a refused one")
        _expect(self._close(caller, other), 409, "a close that names another episode, after the right one")

    def a_seed_after_a_close_is_refused(self) -> None:
        for seeded_before in (True, False):
            session, caller = names(), Caller(self._url)
            if seeded_before:
                _expect(self._seed(caller, session), 200, "a seed")
            _expect(self._close(caller, session), 200, "a close, seeded before or not")
            for late in (caller, Caller(self._url)):
                _expect(self._seed(late, session), 409, "a seed after its close")

    def cookie_and_body_name_one_session(self) -> None:
        session, other, caller = names(), names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        _expect(self._seed(caller, other), 409, "a seed whose cookie names another session")
        _expect(self._close(caller, other), 409, "a close whose cookie names another session")
        _expect(self._close(caller, session), 200, "a close")

    def an_activation_needs_an_open_session(self) -> None:
        session, caller = names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        _expect(self._close(caller, session), 200, "a close")
        # It must not fall into an activation without a session.
        late = caller.post("/v1/responses", self._responses or {"input": "hello"})
        _expect(late, 409, "an activation in a session that is closed")

    def what_is_malformed_is_refused_and_harms_nothing(self) -> None:
        session, caller = names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        for field in ("agent_session_id", "episode_id"):
            body = {name: value for name, value in (self._fields | session).items() if name != field}
            _expect(Caller(self._url).post("/v1/agent_sessions", body), 422, f"a seed without {field}")
            body = {name: value for name, value in session.items() if name != field}
            _expect(Caller(self._url).post("/v1/agent_sessions/close", body), 422, f"a close without {field}")
        more = self._fields | session | {"no_such_field": 1}
        _expect(caller.post("/v1/agent_sessions", more), 422, "a seed with an unknown field")
        _expect(self._seed(caller, session), 200, "the seed again, after malformed bodies")
        _expect(self._close(caller, session), 200, "a close, after malformed bodies")

    def a_stop_of_a_rollout_that_nobody_runs_stops_nothing(self) -> None:
        stop = Caller(self._url).post(f"/rollouts/check-x{secrets.token_hex(4)}/stop", {"reason": "check"})
        _expect(stop, 200, "a stop of a rollout that nobody runs")
        assert stop.content == {"stopped": False}, f"it stops nothing: {stop.content}"

    def an_activation_answers_and_is_not_run_again(self) -> None:
        session, caller = names(), Caller(self._url)
        _expect(self._seed(caller, session), 200, "a seed")
        prefix = f"/ng-rollout/{session['episode_id']['rollout_id']}"
        first = caller.post(f"{prefix}/v1/responses", self._responses, headers={ACTIVATION_HEADER: "1"})
        _expect(first, 200, "an activation")
        assert isinstance(first.content.get("output"), list), f"a response has an output, a list: {first.content}"
        again = caller.post("/v1/responses", self._responses, headers={ACTIVATION_HEADER: "1"})
        _expect(again, 200, "the same activation again")
        assert again.content == first.content, "an activation that was completed is answered again, and not run again"
        _expect(
            caller.post("/v1/responses", self._responses, headers={ACTIVATION_HEADER: "3"}),
            409,
            "an activation beyond the next",
        )
        _expect(self._close(caller, session), 200, "a close")

    def run(self) -> None:
        """Check all of it."""
        self.it_says_what_its_sessions_can_do()
        self.seeding_again_is_success()
        self.another_seed_of_an_open_session_is_refused()
        self.closing_again_gives_the_same_receipt()
        self.a_close_of_another_episode_is_refused()
        self.a_seed_after_a_close_is_refused()
        self.cookie_and_body_name_one_session()
        self.an_activation_needs_an_open_session()
        self.what_is_malformed_is_refused_and_harms_nothing()
        self.a_stop_of_a_rollout_that_nobody_runs_stops_nothing()
        if self._responses is not None:
            self.an_activation_answers_and_is_not_run_again()

    def _seed(self, caller: Caller, session: dict[str, Any]) -> Answer:
        return caller.post("/v1/agent_sessions", self._fields | session)

    def _close(self, caller: Caller, session: dict[str, Any]) -> Answer:
        return caller.post("/v1/agent_sessions/close", session)


def names() -> dict[str, Any]:
    """A session of its own, and an episode of its own."""
    return {
        "agent_session_id": f"agent-session-{secrets.token_hex(16)}",
        "episode_id": {"rollout_id": f"check-x{secrets.token_hex(4)}", "attempt": 0},
    }


def _expect(answer: Answer, status: int, what: str) -> None:
    assert answer.status == status, f"{what} is answered {status}, not {answer.status}: {answer.content}"
