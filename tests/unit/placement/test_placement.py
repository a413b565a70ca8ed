"""One worker's part in the placement of new sessions: two workers' parts over one board, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from homing.placement import Placement, PlacementOptions
from homing.rundir import RunDirectory, new_worker_id


@contextmanager
def workers(path: Path, options: PlacementOptions, count: int = 2) -> Iterator[list[Placement]]:
    path.chmod(0o700)
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory.open(str(path)))
        made = []
        for _ in range(count):
            identifier = new_worker_id()
            stack.callback(directory.hold_life(identifier).close)
            made.append(Placement(options, directory, identifier, "", chance=random.Random(1)))
            stack.callback(made[-1].close)
        for each in made:
            each.board.refresh()
        yield made


@pytest.mark.parametrize("place", ["balanced", "fewest"])
def test_starts_that_are_on_their_way_count_where_they_go_for_everybody(tmp_path: Path, place: str) -> None:
    with workers(tmp_path, PlacementOptions(place=place), 4) as found:  # type: ignore[arg-type]
        first, second = found[:2]
        # All in one turn of two event loops: none of these has been counted where it goes.
        went = {each.board.slot: 0 for each in found}
        kept = []
        for number in range(80):
            here = (first, second)[number % 2]
            target = here.choose()
            if target is None:
                went[here.board.slot] += 1
                here.count(went[here.board.slot], 0)
            else:
                went[target.slot] += 1
                kept.append(here.on_its_way(target))
        assert all(18 <= count <= 22 for count in went.values()), went
        # The other two took none: where nothing is on its way any more, they are the ones with the fewest.
        for way in kept:
            way.close()
            way.close()
        slots = {target.slot for _ in range(20) if (target := first.choose()) is not None}
        assert slots <= {found[2].board.slot, found[3].board.slot}
        assert slots


def test_a_worker_that_drains_is_no_target_and_what_arrives_there_goes_elsewhere(tmp_path: Path) -> None:
    with workers(tmp_path, PlacementOptions(place="fewest")) as (first, second):
        first.count(5, 0)
        assert first.choose() is not None
        second.drain()
        assert first.choose() is None
        target = second.choose()
        assert target is not None
        assert target.worker_id == first.board.worker_id


def test_a_worker_at_its_own_limit_is_no_target(tmp_path: Path) -> None:
    with workers(tmp_path, PlacementOptions(place="balanced", max_sessions_per_worker=3)) as (first, second):
        first.count(3, 0)
        target = first.choose()
        assert target is not None
        second.count(3, 0)
        assert first.choose() is None


def test_what_ends_makes_room_and_what_came_without_a_start_is_counted_too(tmp_path: Path) -> None:
    with workers(tmp_path, PlacementOptions(place="balanced", max_sessions=4)) as (first, second):
        assert [first.take() for _ in range(3)] == [True] * 3
        first.count(3, 0)
        assert second.take()
        second.count(1, 0)
        assert not first.take()
        first.count(1, 0)
        assert [second.take() for _ in range(3)] == [True, True, False]
        # Taken, and not needed after all.
        second.count(1, 0)
        assert first.has_permit()


def test_after_the_end_of_a_worker_its_figures_are_nowhere_and_nothing_fails(tmp_path: Path) -> None:
    with workers(tmp_path, PlacementOptions(place="balanced", max_sessions=2)) as (first, second):
        second.count(2, 0)
        target = next(first.board.others())
        way = second.on_its_way(next(second.board.others()))
        second.close()
        second.close()
        way.close()
        second.count(0, 0)
        first.board.refresh()
        assert list(first.board.others()) == []
        assert target.worker_id == second.board.worker_id
        assert [first.take(), first.take()] == [True, True]
