"""At which worker a start runs: the plain function, against what is promised of each policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.placement import POLICIES, Place
from homing.placement.choice import Standing, choose, pressure, slack

STANDINGS = st.builds(
    Standing,
    slot=st.just(0),
    sessions=st.integers(0, 2000),
    in_flight=st.integers(0, 500),
    lag_seconds=st.floats(0, 5),
    takes=st.booleans(),
)


def workers(*sessions: int) -> list[Standing]:
    return [Standing(slot, count) for slot, count in enumerate(sessions)]


def chosen(place: Place, standings: list[Standing], at: int = 0, seed: int = 0) -> int:
    """The slot of the worker that a start which arrived at `at` runs at."""
    others = [each for each in standings if each.slot != at]
    slot = choose(place, standings[at], others, random.Random(seed))
    return at if slot is None else slot


def test_accepting_never_moves_a_start() -> None:
    assert chosen("accepting", workers(100, 0)) == 0
    assert chosen("accepting", [replace(workers(5)[0], takes=False), *workers(0, 0)[1:]]) == 0


def test_balanced_leaves_a_start_where_it_arrived_while_that_worker_has_no_more_than_its_share() -> None:
    for sessions in ((0, 0), (1, 1), (2, 0), (3, 1, 2), (103, 100), (1000, 1000, 960)):
        assert chosen("balanced", workers(*sessions)) == 0


@pytest.mark.parametrize("sessions", [(4, 0), (3, 0, 1), (110, 100), (12, 8, 9)])
def test_balanced_sends_a_start_to_the_fewest_once_its_worker_has_more_than_its_share(
    sessions: tuple[int, ...],
) -> None:
    assert chosen("balanced", workers(*sessions)) == sessions.index(min(sessions))


def test_balanced_does_not_leave_a_worker_behind_that_the_kernel_wakes_for_no_connection() -> None:
    assert chosen("balanced", workers(4, 4, 4, 4, 4, 4, 4, 1)) == 7


def test_fewest_always_goes_to_the_fewest_and_stays_where_it_is_one_of_them() -> None:
    assert chosen("fewest", workers(1, 0)) == 1
    assert chosen("fewest", workers(1, 1, 1)) == 0


def test_random_reaches_every_worker() -> None:
    assert {chosen("random", workers(5, 0, 9), seed=seed) for seed in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("place", [each for each in POLICIES if each != "accepting"])
def test_a_worker_that_takes_none_is_no_target_and_a_start_that_arrives_there_goes_elsewhere(place: Place) -> None:
    few, many, more = workers(0, 50, 60)
    closed = replace(few, takes=False)
    for seed in range(20):
        assert chosen(place, [closed, many, more], 1, seed) in (1, 2)
        assert chosen(place, [closed, many, more], 0, seed) in (1, 2)


@pytest.mark.parametrize("place", POLICIES)
def test_where_no_other_takes_any_it_runs_where_it_arrived(place: Place) -> None:
    here, *others = workers(50, 0, 0)
    assert chosen(place, [here, *(replace(each, takes=False) for each in others)]) == 0
    assert chosen(place, [here]) == 0


def test_workers_that_are_alike_are_chosen_by_chance() -> None:
    assert {chosen("balanced", workers(9, 0, 0, 0), seed=seed) for seed in range(50)} == {1, 2, 3}


def test_requests_in_flight_and_lag_tip_the_scales_inside_the_slack() -> None:
    calm = workers(10, 10)
    assert chosen("balanced", calm) == 0
    assert chosen("balanced", [replace(calm[0], in_flight=200), calm[1]]) == 1
    assert chosen("balanced", [replace(calm[0], lag_seconds=1.0), calm[1]]) == 1
    # A worker that is as loaded as the others is not loaded.
    assert chosen("balanced", [replace(each, lag_seconds=3.0) for each in calm]) == 0
    # A few requests more say nothing.
    assert chosen("balanced", [replace(calm[0], in_flight=1), calm[1]]) == 0


def test_a_loaded_worker_is_chosen_before_one_that_has_more_than_its_share() -> None:
    full, loaded = workers(20, 0)
    assert chosen("balanced", [full, replace(loaded, lag_seconds=5.0, in_flight=100)]) == 1


@given(st.lists(STANDINGS, min_size=1, max_size=12), st.integers(0, 2**32))
def test_whatever_the_load_nobody_gets_more_than_the_slack_above_the_mean(found: list[Standing], seed: int) -> None:
    standings = [replace(each, slot=slot) for slot, each in enumerate(found)]
    at = chosen("balanced", standings, 0, seed)
    takers = [each for each in standings if each.takes or each.slot == 0]
    assert standings[at].takes or at == 0
    if at == 0 and not any(each.takes for each in standings[1:]):
        return
    if not standings[0].takes:
        takers = takers[1:]
    mean = (sum(each.sessions for each in takers) + 1) / len(takers)
    assert standings[at].sessions + 1 <= mean + slack(mean) + 0.5  # half a session: who is alike is a matter of chance


@given(st.lists(STANDINGS, min_size=1, max_size=12))
def test_pressure_is_a_share(found: list[Standing]) -> None:
    assert all(0 <= pressure(each, found) <= 1 for each in found)


@pytest.mark.parametrize("workers_count", [2, 4, 8])
@pytest.mark.parametrize("each", [5, 100, 400])
def test_starts_that_all_arrive_at_one_worker_are_spread_as_promised(workers_count: int, each: int) -> None:
    chance = random.Random(1)
    had = [0] * workers_count
    for _ in range(each * workers_count):
        standings = workers(*had)
        slot = choose("balanced", standings[0], standings[1:], chance)
        had[0 if slot is None else slot] += 1
    assert max(had) <= max(each + 2, 1.1 * each)
    assert min(had) >= min(each - 2, 0.9 * each)
