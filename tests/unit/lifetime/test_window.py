"""Deadlines, and how long a generic app's sessions are kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.hand_clock import HandClock

from homing.lifetime import BEGAN_SCOPE_KEY, ENDED_SCOPE_KEY, IdleLifetimes, Seen, SessionLifetimes
from homing.lifetime.window import Deadlines
from homing.routes import Routes
from homing.types import Scope

IDLE, WINDOW = 1000.0, 100.0


def request(method: str = "GET", path: str = "/other", **more: object) -> Scope:
    return {"type": "http", "method": method, "path": path, "headers": [], **more}


START, END, OTHER = request("POST", "/start"), request("DELETE", "/session"), request()


class Kept:
    """An `IdleLifetimes`, its clock, and how many requests of each session are being served."""

    def __init__(self, *, used_reopens: bool = True) -> None:
        self.clock = HandClock()
        self.serving: dict[str, int] = {}
        self.lifetimes = IdleLifetimes(
            IDLE,
            WINDOW,
            starts=Routes.parse(["POST /start", "/again"]),
            ends=Routes.parse(["DELETE /session", "/close", "/again"]),
            clock=self.clock,
            used_reopens=used_reopens,
            being_served=lambda session_id: self.serving.get(session_id, 0),
        )

    def lasts(self, session_id: str = "s") -> float:
        """For how long from now the session is kept; it is not kept afterwards."""
        start = self.clock.now
        while self.lifetimes.holds(session_id):
            self.clock.move(50)
            swept = self.lifetimes.sweep()
            assert self.lifetimes.holds(session_id) == (session_id not in swept)
        return self.clock.now - start


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_it_is_what_the_router_records_through(kept: Kept) -> None:
    lifetimes: SessionLifetimes = kept.lifetimes
    assert lifetimes.starts("/start")
    assert not lifetimes.starts("/session")


def test_an_empty_one_is_false(kept: Kept) -> None:
    assert not kept.lifetimes
    kept.lifetimes.opened("s")
    assert kept.lifetimes
    assert len(kept.lifetimes) == 1
    assert repr(kept.lifetimes) == "<IdleLifetimes: 1 sessions>"


@pytest.mark.parametrize(
    ("scope", "status", "seconds"),
    [
        (START, 200, IDLE),
        (START, 201, IDLE),
        (OTHER, 200, IDLE),  # adopted: it used the session
        (OTHER, 304, IDLE),
        ({"type": "websocket", "path": "/other", "headers": []}, 101, IDLE),
        (END, 204, WINDOW),
        (START, 500, 0),
        (START, None, 0),
        (OTHER, 400, 0),  # an adopted ID whose reply is 400 or more leaves no record
        (OTHER, None, 0),
        (END, 404, 0),
        (END, None, 0),
        (request("OPTIONS", "/close"), 404, 0),
    ],
)
def test_the_first_request_of_a_session(kept: Kept, scope: Scope, status: int | None, seconds: float) -> None:
    kept.lifetimes.served("s", scope, status)
    assert kept.lasts() == seconds


@pytest.mark.parametrize(
    ("scope", "status", "seconds"),
    [
        (OTHER, 200, IDLE),
        (OTHER, 500, IDLE),  # a request all the same
        (OTHER, None, IDLE),
        (START, 409, IDLE),
        (START, 200, IDLE),
        (END, 200, WINDOW),
        (END, 302, IDLE),
        (END, 500, IDLE),  # a failed end leaves it open
        (END, None, IDLE),
        (request("HEAD", "/close"), 200, IDLE),  # a method that changes nothing ends nothing
        (request("OPTIONS", "/close"), 200, IDLE),
        (request("POST", "/close"), 200, WINDOW),
        (request("POST", "/again"), 200, IDLE),  # an end that is a start too: the session goes on
        (request("GET", "/other", **{ENDED_SCOPE_KEY: True}), None, WINDOW),  # homing.end in the handler
        (request("GET", "/other", **{ENDED_SCOPE_KEY: True}), 200, WINDOW),
    ],
)
def test_a_request_of_an_open_session(kept: Kept, scope: Scope, status: int | None, seconds: float) -> None:
    kept.lifetimes.opened("s")
    kept.clock.move(IDLE - 100)
    kept.lifetimes.served("s", scope, status)
    assert kept.lasts() == seconds


@pytest.mark.parametrize("used_reopens", [True, False])
@pytest.mark.parametrize(("status", "uses"), [(200, True), (302, True), (404, False), (None, False)])
def test_a_request_after_the_end(used_reopens: bool, status: int | None, uses: bool) -> None:
    kept = Kept(used_reopens=used_reopens)
    kept.lifetimes.opened("s")
    kept.lifetimes.ended("s")
    kept.clock.move(WINDOW - 50)
    kept.lifetimes.served("s", OTHER, status)
    assert kept.lasts() == (IDLE if used_reopens and uses else WINDOW)


@pytest.mark.parametrize("scope", [OTHER, {"type": "websocket", "path": "/other", "headers": []}])
def test_a_request_that_began_before_the_end_does_not_open_the_session_again(kept: Kept, scope: Scope) -> None:
    kept.lifetimes.opened("s")
    began = kept.lifetimes.ends
    kept.lifetimes.ended("another")
    kept.lifetimes.ended("s")
    kept.serving["s"] = 1
    kept.clock.move(WINDOW)  # it is kept on, since that request is still served
    assert kept.lifetimes.sweep() == ["another"]
    kept.serving["s"] = 0
    kept.lifetimes.served("s", {**scope, BEGAN_SCOPE_KEY: began}, 200)
    assert kept.lifetimes.count_ended() == 1
    later = kept.lifetimes.ends
    kept.lifetimes.ended("another")
    kept.lifetimes.served("s", {**scope, BEGAN_SCOPE_KEY: later}, 200)
    assert kept.lifetimes.count_ended() == 1
    kept.lifetimes.served("s", {**scope, BEGAN_SCOPE_KEY: began}, 200)  # the session is open, so it is kept as such
    assert kept.lasts() == IDLE


def test_a_start_whose_reply_comes_after_an_end_opens_the_session(kept: Kept) -> None:
    began = kept.lifetimes.ends
    kept.lifetimes.opened("s")
    kept.lifetimes.served("s", END, 200)
    kept.lifetimes.served("s", {**START, BEGAN_SCOPE_KEY: began}, 200)
    assert kept.lasts() == IDLE


def test_a_start_after_the_end_opens_it_and_the_old_deadline_never_fires() -> None:
    kept = Kept(used_reopens=False)
    kept.lifetimes.opened("s")
    kept.lifetimes.ended("s")
    kept.clock.move(WINDOW - 50)
    kept.lifetimes.served("s", START, 200)
    assert kept.lasts() == IDLE


def test_a_session_that_is_being_served_is_kept_and_has_its_time_again(kept: Kept) -> None:
    kept.lifetimes.opened("s")
    kept.serving["s"] = 1
    for _ in range(10):
        kept.clock.move(IDLE)
        assert kept.lifetimes.sweep() == []
    kept.serving["s"] = 0
    assert kept.lasts() == IDLE


def test_ended_sessions_are_counted_while_they_are_kept(kept: Kept) -> None:
    lifetimes = kept.lifetimes
    for session_id in ("again", "served", "gone"):
        lifetimes.opened(session_id)
        lifetimes.ended(session_id)
        lifetimes.ended(session_id)
    assert lifetimes.count_ended() == 3
    lifetimes.opened("again")
    assert lifetimes.count_ended() == 2
    kept.serving["served"] = 1
    kept.clock.move(WINDOW)
    assert lifetimes.sweep() == ["gone"]
    assert lifetimes.count_ended() == 1
    kept.serving["served"] = 0
    kept.clock.move(WINDOW)
    assert lifetimes.sweep() == ["served"]
    assert lifetimes.count_ended() == 0


def test_after_a_lag_deadlines_move_by_the_lag(kept: Kept) -> None:
    kept.lifetimes.opened("before")
    kept.clock.move(IDLE + 500)  # the loop was blocked, and a request for the session is queued
    kept.lifetimes.postpone(IDLE + 500)
    kept.lifetimes.opened("after")
    assert kept.lifetimes.sweep() == []
    kept.clock.move(IDLE)
    assert sorted(kept.lifetimes.sweep()) == ["after", "before"]


def test_each_session_goes_at_its_own_deadline(kept: Kept) -> None:
    for session_id in ("a", "b", "c"):
        kept.lifetimes.opened(session_id)
        kept.clock.move(1)
    kept.lifetimes.ended("c")
    kept.lifetimes.served("a", OTHER, 200)
    swept = []
    for seconds in (WINDOW - 1, 1, IDLE - WINDOW - 3, 1, 1, 1):
        kept.clock.move(seconds)
        swept.append(kept.lifetimes.sweep())
    assert swept == [[], ["c"], [], ["b"], [], ["a"]]


def test_the_heap_does_not_grow_with_requests_or_with_sessions_that_went() -> None:
    clock = HandClock()
    deadlines: Deadlines[None] = Deadlines(clock)
    for number in range(10_000):
        deadlines.keep("one", None, 86_400)
        deadlines.keep(f"gone {number}", None, 86_400)
        deadlines.remove(f"gone {number}")
        clock.move(1)
    assert len(deadlines._heap) < 100  # its memory is the point
    clock.move(86_400)
    assert [due.key for due in deadlines.pop_due()] == ["one"]


keys = st.sampled_from("abc")
times = st.sampled_from([None, 0.0, 1.0, 5.0, 5.0, 20.0])


class AnyOrder(RuleBasedStateMachine):
    """Any order of steps agrees with a plain dict of deadlines that is searched through."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.deadlines: Deadlines[int] = Deadlines(self.clock)
        self.model: dict[str, tuple[int, float | None]] = {}
        self.steps = 0

    @rule(key=keys, seconds=times)
    def keep(self, key: str, seconds: float | None) -> None:
        self.steps += 1
        self.deadlines.keep(key, self.steps, seconds)
        self.model[key] = self.steps, None if seconds is None else self.clock.now + seconds

    @rule(key=keys)
    def remove(self, key: str) -> None:
        self.deadlines.remove(key)
        self.model.pop(key, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 30.0]))
    def move(self, seconds: float) -> None:
        self.clock.move(seconds)

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0]))
    def postpone(self, seconds: float) -> None:
        self.deadlines.postpone(seconds)
        self.model = {
            key: (state, None if until is None else until + seconds) for key, (state, until) in self.model.items()
        }

    @rule()
    def pop_due(self) -> None:
        due = {
            key: state for key, (state, until) in self.model.items() if until is not None and until <= self.clock.now
        }
        assert {kept.key: kept.state for kept in self.deadlines.pop_due()} == due
        for key in due:
            del self.model[key]

    @invariant()
    def agree(self) -> None:
        assert len(self.deadlines) == len(self.model)
        for key, (state, _) in self.model.items():
            kept = self.deadlines.get(key)
            assert kept is not None
            assert kept.state == state


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_session_that_went_idle_is_told_from_one_that_ended() -> None:
    clock = HandClock()
    lifetimes = IdleLifetimes(10.0, 4.0, starts=Routes(), ends=Routes(), clock=clock)
    idle: list[str] = []
    lifetimes.on_idle = idle.append
    lifetimes.opened("idle")
    lifetimes.opened("ended")
    clock.move(3.0)
    lifetimes.ended("ended")
    clock.move(2.0)
    assert lifetimes.seen("idle") == Seen(False, 5.0)
    assert lifetimes.seen("ended") == Seen(True, 2.0)
    assert lifetimes.seen("other") is None
    clock.move(20.0)
    assert sorted(lifetimes.sweep()) == ["ended", "idle"]
    assert idle == ["idle"]
