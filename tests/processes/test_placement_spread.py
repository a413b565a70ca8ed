"""How evenly new sessions spread over the workers of a whole server: `benchmarks/placement`, in small."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.placement.drive import ARRIVALS, serving, spread

ROUNDS = 3


@pytest.mark.parametrize("place", ["balanced", pytest.param("fewest", marks=pytest.mark.long)])
def test_sessions_spread_over_the_workers_however_they_arrive(place: str) -> None:
    with serving(place, 4) as port:
        for arrival in ARRIVALS:
            rounds = []
            # Workers that choose in the same moment do not see each other's choice, so now and then one is given one too many.
            while not rounds or not all(10 <= count <= 14 for count in rounds[-1].values()):
                assert len(rounds) < ROUNDS, (arrival, rounds)
                rounds.append(asyncio.run(spread(port, arrival, 48)))
                assert len(rounds[-1]) == 4, (arrival, rounds)
                assert all(8 <= count <= 16 for count in rounds[-1].values()), (arrival, rounds)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_at_a_hundred_sessions_per_worker_the_busiest_has_at_most_1_1_times_the_mean(workers: int) -> None:
    with serving("balanced", workers) as port:
        for arrival in ARRIVALS:
            counts = asyncio.run(spread(port, arrival, 100 * workers))
            assert max(counts.values()) <= 110, (arrival, counts)
