"""Every cell of the decision, held against the rules of the protocol rather than against the code's own order."""

from __future__ import annotations

import itertools

import pytest

from homing.routing.decision import (
    Acquire,
    Decision,
    Forward,
    Gone,
    Moving,
    NotMine,
    Serve,
    ServeUnowned,
    Unowned,
    decide,
)
from homing.types import Reason, WorkerId

HERE = WorkerId("a" * 32)
THERE = WorkerId("b" * 32)
CELLS = list(itertools.product([None, HERE, THERE], [True, False], [None, *Reason], list(Unowned)))


def _decide(owner: WorkerId | None, mine: bool, reason: Reason | None, unowned: Unowned) -> Decision:
    return decide(owner=owner, here=HERE, mine=mine, reason=reason, unowned=unowned)


@pytest.mark.parametrize(("owner", "mine", "reason", "unowned"), CELLS)
def test_only_a_clients_own_request_and_a_scattered_one_are_passed_on(
    owner: WorkerId | None, mine: bool, reason: Reason | None, unowned: Unowned
) -> None:
    decision = _decide(owner, mine, reason, unowned)
    if isinstance(decision, Forward):
        assert reason in (None, Reason.SCATTERED)
        assert decision.owner == owner != HERE


@pytest.mark.parametrize(("owner", "mine", "reason", "unowned"), CELLS)
def test_a_request_is_served_only_where_the_record_and_the_memory_say_so(
    owner: WorkerId | None, mine: bool, reason: Reason | None, unowned: Unowned
) -> None:
    decision = _decide(owner, mine, reason, unowned)
    assert (decision == Serve()) == (owner == HERE and mine)
    assert (decision == Moving()) == (owner == HERE and not mine)


@pytest.mark.parametrize(("mine", "unowned"), list(itertools.product([True, False], list(Unowned))))
def test_a_request_sent_to_an_owner_is_not_mine_once_nobody_owns_the_session(mine: bool, unowned: Unowned) -> None:
    assert _decide(None, mine, Reason.OWNED, unowned) == NotMine()


@pytest.mark.parametrize("reason", [None, Reason.NAMED, Reason.PLACED, Reason.SCATTERED])
@pytest.mark.parametrize(
    ("unowned", "expected"),
    [(Unowned.ACQUIRE, Acquire()), (Unowned.REFUSE, Gone()), (Unowned.SERVE, ServeUnowned())],
)
def test_what_nobody_owns_is_treated_as_the_server_says(
    reason: Reason | None, unowned: Unowned, expected: Decision
) -> None:
    assert _decide(None, False, reason, unowned) == expected


@pytest.mark.parametrize("reason", [Reason.OWNED, Reason.NAMED, Reason.PLACED])
def test_a_peers_request_for_another_workers_session_is_not_mine(reason: Reason) -> None:
    assert _decide(THERE, False, reason, Unowned.ACQUIRE) == NotMine()
