"""How long the sessions of resources servers and agents are kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.hand_clock import HandClock

from homing.lifetime import (
    CLOSE_FOLLOWS_HEADER,
    ENDED_SCOPE_KEY,
    AgentSessionHolder,
    AgentSessionLifetimes,
    OwnershipReleaser,
    ResourcesSessionLifetimes,
    Seen,
    SessionLifetimes,
)
from homing.types import Scope

WINDOW, MAX_AGE, FOREVER = 100.0, 1000.0, 20_000.0


def request(path: str, *values: bytes, method: str = "POST") -> Scope:
    headers = [(CLOSE_FOLLOWS_HEADER.encode(), value) for value in values]
    return {"type": "http", "method": method, "path": path, "headers": headers}


SEED, CLOSE, VERIFY, STEP = (request(path) for path in ("/seed_session", "/close_session", "/verify", "/step"))
VERIFY_FIRST = request("/verify", b"1")


class Kept:
    def __init__(self) -> None:
        self.clock = HandClock()
        self.serving: dict[str, int] = {}
        self.lifetimes = ResourcesSessionLifetimes(
            WINDOW,
            ("/seed_session", "POST /reset"),
            ("/close_session", "/verify"),
            CLOSE_FOLLOWS_HEADER,
            clock=self.clock,
            max_age_seconds=MAX_AGE,
            being_served=lambda session_id: self.serving.get(session_id, 0),
        )

    def lasts(self, session_id: str = "s") -> float:
        """For how long from now the session is kept, up to FOREVER."""
        start = self.clock.now
        while self.lifetimes.holds(session_id) and self.clock.now - start < FOREVER:
            self.clock.move(50)
            swept = self.lifetimes.sweep()
            assert self.lifetimes.holds(session_id) == (session_id not in swept)
        return self.clock.now - start


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_it_is_what_the_router_records_through(kept: Kept) -> None:
    lifetimes: SessionLifetimes = kept.lifetimes
    for path in ("/seed_session", "/reset", "/ng-rollout/r1/seed_session", "/ng-rollout/r1/2/reset"):
        assert lifetimes.starts(path)
    for path in ("/verify", "/seed_session/x", "/ng-rollout/r1/2/3/seed_session", "/x/seed_session"):
        assert not lifetimes.starts(path)


def test_an_empty_one_is_false(kept: Kept) -> None:
    assert not kept.lifetimes
    kept.lifetimes.opened("s")
    assert kept.lifetimes
    assert repr(kept.lifetimes) == "<ResourcesSessionLifetimes: 1 sessions>"


@pytest.mark.parametrize(
    ("scope", "status", "seconds"),
    [
        (SEED, 200, FOREVER),
        (request("/ng-rollout/r1/seed_session"), 200, FOREVER),
        (request("/reset"), 201, FOREVER),
        (request("/reset", method="GET"), 200, WINDOW),
        (request("/seed_session", method="OPTIONS"), 200, WINDOW),
        (request("/seed_session", method="HEAD"), 200, WINDOW),
        (SEED, 307, WINDOW),
        (SEED, 500, WINDOW),
        (SEED, None, WINDOW),  # the reply broke: whether it took effect is unknown
        (CLOSE, 200, WINDOW),  # of a session never seeded: a late seed is refused where the fence is
        (STEP, 200, WINDOW),
        (VERIFY_FIRST, 200, WINDOW),  # no open session that a close could follow
        ({"type": "websocket", "path": "/seed_session", "headers": []}, 101, WINDOW),
    ],
)
def test_the_first_request_of_a_session(kept: Kept, scope: Scope, status: int | None, seconds: float) -> None:
    kept.lifetimes.served("s", scope, status)
    assert kept.lasts() == seconds


@pytest.mark.parametrize(
    ("scope", "status", "seconds"),
    [
        (STEP, 200, FOREVER),
        (STEP, 500, FOREVER),
        (STEP, None, FOREVER),
        (SEED, 409, FOREVER),  # a failed seed or close of an open session leaves it open
        (CLOSE, 500, FOREVER),
        (CLOSE, None, FOREVER),  # a 2xx head and then a broken stream is no completed reply
        (CLOSE, 302, FOREVER),
        (request("/close_session", method="OPTIONS"), 200, FOREVER),
        (request("/close_session", method="HEAD"), 200, FOREVER),
        (CLOSE, 200, WINDOW),
        (VERIFY, 200, WINDOW),
        (request("/ng-rollout/r1/2/verify"), 200, WINDOW),
        (VERIFY_FIRST, 200, MAX_AGE),
        (VERIFY_FIRST, 500, FOREVER),
        (request("/verify", b"true"), 200, WINDOW),  # strict: exactly "1", exactly once
        (request("/verify", b"0"), 200, WINDOW),
        (request("/verify", b" 1"), 200, WINDOW),
        (request("/verify", b"1,1"), 200, WINDOW),
        (request("/verify", b"1", b"1"), 200, WINDOW),
        (request("/verify", b"", b"1"), 200, WINDOW),
        ({**VERIFY_FIRST, "homing.head_length": 0}, 200, WINDOW),  # in a trailer
        (request("/step", b"1"), 200, FOREVER),  # on end routes only
        ({**STEP, ENDED_SCOPE_KEY: True}, 500, WINDOW),
    ],
)
def test_a_request_of_an_open_session(kept: Kept, scope: Scope, status: int | None, seconds: float) -> None:
    kept.lifetimes.served("s", SEED, 200)
    kept.clock.move(5000)
    kept.lifetimes.served("s", scope, status)
    assert kept.lasts() == seconds


def test_requests_cannot_say_that_a_close_follows_where_no_header_is_declared() -> None:
    lifetimes = ResourcesSessionLifetimes(WINDOW, ("/seed_session",), ("/verify",), clock=(clock := HandClock()))
    lifetimes.served("s", SEED, 200)
    lifetimes.served("s", VERIFY_FIRST, 200)
    clock.move(WINDOW)
    assert lifetimes.sweep() == ["s"]


def test_a_closed_session_is_kept_from_its_last_request(kept: Kept) -> None:
    kept.lifetimes.served("s", SEED, 200)
    kept.lifetimes.served("s", CLOSE, 200)
    for status in (200, 404, None):
        kept.clock.move(WINDOW - 50)
        kept.lifetimes.served("s", CLOSE, status)
    assert kept.lasts() == WINDOW


def test_a_close_that_follows_ends_the_session(kept: Kept) -> None:
    kept.lifetimes.served("s", SEED, 200)
    kept.lifetimes.served("s", VERIFY_FIRST, 200)
    kept.clock.move(MAX_AGE - 50)
    kept.lifetimes.served("s", CLOSE, 200)
    assert kept.lasts() == WINDOW


def test_saying_again_that_a_close_follows_does_not_keep_the_session_for_ever(kept: Kept) -> None:
    kept.lifetimes.served("s", SEED, 200)
    kept.lifetimes.served("s", VERIFY_FIRST, 200)
    for _ in range(9):
        kept.clock.move(MAX_AGE / 10)
        kept.lifetimes.served("s", VERIFY_FIRST, 200)
        kept.lifetimes.served("s", STEP, 200)
    assert kept.lasts() == MAX_AGE / 10


def test_a_step_that_outlives_the_verify_is_the_last_request(kept: Kept) -> None:
    """Of two requests at once, the first ends the session while the other runs."""
    kept.lifetimes.served("s", SEED, 200)
    kept.serving["s"] = 2
    kept.serving["s"] = 1
    kept.lifetimes.served("s", VERIFY, 200)
    kept.clock.move(3 * WINDOW)
    assert kept.lifetimes.sweep() == []
    kept.serving["s"] = 0
    kept.lifetimes.served("s", STEP, 200)
    assert kept.lasts() == WINDOW


def test_a_session_seeded_again_in_its_window_is_open_and_its_old_deadline_never_fires(kept: Kept) -> None:
    kept.lifetimes.served("s", SEED, 200)
    kept.lifetimes.served("s", CLOSE, 200)
    kept.clock.move(WINDOW - 1)
    kept.lifetimes.served("s", SEED, 200)
    assert kept.lasts() == FOREVER


def test_a_retained_session_is_kept_until_it_is_ended(kept: Kept) -> None:
    kept.lifetimes.opened("s")
    kept.lifetimes.retain("s")
    kept.clock.move(MAX_AGE - 50)
    kept.lifetimes.served("s", STEP, 410)
    assert kept.lifetimes.sweep() == []
    kept.lifetimes.ended("s")
    assert kept.lasts() == WINDOW


def test_a_retained_session_whose_refusal_never_ends_is_dropped_in_the_end(kept: Kept) -> None:
    kept.lifetimes.retain("s")
    kept.clock.move(MAX_AGE - 50)
    kept.lifetimes.served("s", STEP, 410)
    assert kept.lasts() == 50


def test_a_forgotten_session_is_dropped_at_once_even_while_it_is_served(kept: Kept) -> None:
    kept.lifetimes.opened("s")
    kept.serving["s"] = 1
    kept.lifetimes.forget("s")
    assert not kept.lifetimes.holds("s")
    kept.lifetimes.forget("s")
    kept.serving["s"] = 0
    kept.lifetimes.served("s", STEP, 404)
    assert kept.lasts() == WINDOW


def test_after_a_lag_deadlines_move_by_the_lag(kept: Kept) -> None:
    kept.lifetimes.ended("s")
    kept.clock.move(2 * WINDOW)
    kept.lifetimes.postpone(2 * WINDOW)
    assert kept.lifetimes.sweep() == []
    assert kept.lasts() == WINDOW


sessions = st.sampled_from("abc")


class AnyRequests(RuleBasedStateMachine):
    """Any order of requests agrees with a model that is only the sentences of the class, searched through each time."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()
        self.open: set[str] = set()
        self.until: dict[str, float] = {}

    @property
    def now(self) -> float:
        return self.kept.clock.now

    def _close(self, session: str) -> None:
        self.open.discard(session)
        self.until[session] = self.now + WINDOW

    @rule(session=sessions, status=st.sampled_from([200, 299, 302, 500, None]))
    def seed(self, session: str, status: int | None) -> None:
        self.kept.lifetimes.served(session, SEED, status)
        if status in (200, 299):
            self.open.add(session)
            self.until.pop(session, None)
        elif session not in self.open:
            self._close(session)

    @rule(session=sessions, status=st.sampled_from([200, 404, None]))
    def close(self, session: str, status: int | None) -> None:
        self.kept.lifetimes.served(session, CLOSE, status)
        if status == 200 or session not in self.open:
            self._close(session)

    @rule(session=sessions)
    def verify_before_a_close(self, session: str) -> None:
        self.kept.lifetimes.served(session, VERIFY_FIRST, 200)
        if session in self.open:
            self.until.setdefault(session, self.now + MAX_AGE)
        else:
            self._close(session)

    @rule(session=sessions, status=st.sampled_from([200, 500, None]))
    def step(self, session: str, status: int | None) -> None:
        self.kept.lifetimes.served(session, STEP, status)
        if session not in self.open:
            self._close(session)

    @rule(session=sessions)
    def forget(self, session: str) -> None:
        self.kept.lifetimes.forget(session)
        self.open.discard(session)
        self.until.pop(session, None)

    @rule(session=sessions, serving=st.booleans())
    def serve(self, session: str, serving: bool) -> None:
        self.kept.serving[session] = int(serving)

    @rule(seconds=st.sampled_from([1.0, WINDOW / 2, WINDOW, MAX_AGE]))
    def move(self, seconds: float) -> None:
        self.kept.clock.move(seconds)

    @rule()
    def sweep(self) -> None:
        due = {session for session, until in self.until.items() if until <= self.now}
        served = {session for session in due if self.kept.serving.get(session)}
        assert set(self.kept.lifetimes.sweep()) == due - served
        for session in served:
            self.until[session] = self.now + (MAX_AGE if session in self.open else WINDOW)
        for session in due - served:
            self.open.discard(session)
            del self.until[session]

    @invariant()
    def agree(self) -> None:
        held = {session for session in "abc" if self.kept.lifetimes.holds(session)}
        assert held == self.open | set(self.until)
        assert len(self.kept.lifetimes) == len(held)
        assert self.kept.lifetimes.count_ended() == len(held - self.open)


TestAnyRequests = AnyRequests.TestCase
TestAnyRequests.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


class Agent:
    """An agent that keeps one record a session."""

    def __init__(self) -> None:
        self.records = {"s"}
        self.owners: OwnershipReleaser | None = None

    def holds_agent_session(self, agent_session_id: str) -> bool:
        return agent_session_id in self.records

    def expire_agent_session_records(self) -> None:
        while self.records:
            session_id = self.records.pop()
            if self.owners is not None:
                self.owners.release(session_id)

    def use_agent_session_owners(self, owners: OwnershipReleaser) -> None:
        self.owners = owners


class Released(list[str]):
    def release(self, session_id: str) -> None:
        self.append(session_id)


def test_an_agents_own_records_decide_and_it_releases_by_itself() -> None:
    agent: AgentSessionHolder = Agent()
    agent.use_agent_session_owners(released := Released())
    lifetimes: SessionLifetimes = AgentSessionLifetimes(agent, ("/seed",))
    assert lifetimes.starts("/ng-rollout/r1/seed")
    lifetimes.served("s", CLOSE, 200)
    lifetimes.served("t", SEED, 200)
    lifetimes.opened("t")
    lifetimes.ended("s")
    lifetimes.postpone(1)
    assert lifetimes.holds("s")
    assert not lifetimes.holds("t")
    assert lifetimes.sweep() == []
    assert released == ["s"]
    assert not lifetimes.holds("s")


class RememberingAgent(Agent):
    """One that tells what it only remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: set[str] = set()

    def ended_agent_sessions(self) -> set[str]:
        return self.closed


def test_what_an_agent_only_remembers_counts_as_ended_if_it_says_so() -> None:
    agent = RememberingAgent()
    lifetimes = AgentSessionLifetimes(agent)
    assert (lifetimes.count_ended(), lifetimes.seen("s")) == (0, Seen(False, None))
    agent.closed.add("s")
    assert (lifetimes.count_ended(), lifetimes.seen("s")) == (1, Seen(True, None))
    silent = AgentSessionLifetimes(Agent())
    assert (silent.count_ended(), silent.seen("s")) == (0, None)


def test_what_is_seen_of_a_session_is_what_its_requests_did() -> None:
    kept = Kept()
    idle: list[str] = []
    kept.lifetimes.on_idle = idle.append
    for session in ("used", "closed", "waiting"):
        kept.lifetimes.served(session, SEED, 200)
    kept.clock.move(30.0)
    kept.lifetimes.served("used", STEP, 200)
    kept.lifetimes.served("closed", CLOSE, 200)
    kept.lifetimes.served("waiting", VERIFY_FIRST, 200)
    kept.clock.move(7.0)
    assert kept.lifetimes.seen("used") == Seen(False, 7.0)
    assert kept.lifetimes.seen("closed") == Seen(True, 7.0)
    assert kept.lifetimes.seen("waiting") == Seen(False, 7.0)
    assert kept.lifetimes.seen("other") is None
    kept.clock.move(MAX_AGE)
    # The one whose close was announced and never came went idle; an open one has no limit.
    assert sorted(kept.lifetimes.sweep()) == ["closed", "waiting"]
    assert idle == ["waiting"]
