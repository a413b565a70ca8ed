"""Site pools with real lock files; several pools over one folder stand for several workers (`flock` sees no difference:
each opens the files itself), and a killed process shows what the kernel does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.running import ROOT

from homing.web.base import SiteLease
from homing.web.errors import CapacityError, SessionConflictError
from homing.web.models import Task
from homing.web.sites import LimitedSites, LockedSites, UnmanagedSites, sites_of


def writer(*sites: str) -> Task:
    return Task(benchmark="b", task_id="t", sites=sites)


def reader(*sites: str) -> Task:
    return Task(benchmark="b", task_id="t", sites=sites, mutation_class="read_only")


def pools(folder: Path, count: int = 2) -> list[LockedSites]:
    return [LockedSites(str(folder / "sites"), poll_seconds=0.005) for _ in range(count)]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "sites"))


def test_a_tasks_sites_are_trimmed_in_lower_case_sorted_and_each_once() -> None:
    assert sites_of(writer(" Shop", "shop", "a ", "")) == ("a", "shop")
    assert sites_of(Task(benchmark=" B ", task_id="t")) == ("benchmark:b",)
    assert sites_of(Task(benchmark="b", task_id="t", sites=("x",), site_locks=("y",))) == ("y",)


def test_readers_share_a_site_and_a_writer_has_it_alone_over_all_workers(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pools(tmp_path)
        first = await one.acquire("r1", reader("shop"))
        second = await two.acquire("r2", reader("shop"))
        writing = asyncio.create_task(two.acquire("w", writer("shop")))
        await asyncio.wait((writing,), timeout=0.05)
        assert not writing.done()
        await one.release(first, healthy=True)
        await asyncio.wait((writing,), timeout=0.05)
        assert not writing.done()
        await two.release(second, healthy=True)
        lease = await writing
        assert (lease.isolated, first.isolated) == (True, False)
        other = await one.acquire("o", writer("elsewhere"))
        for pool, held in ((two, lease), (one, other)):
            await pool.release(held, healthy=True)
            await pool.release(held, healthy=True)  # twice is fine
        assert left_in(tmp_path) == []

    run(main)


def test_all_sites_or_none_and_no_two_tasks_wait_for_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pools(tmp_path)
        shop = await one.acquire("a", writer("shop"))
        both = asyncio.create_task(two.acquire("b", writer("wiki", "shop")))
        await asyncio.wait((both,), timeout=0.05)
        # It does not sit on the wiki while it waits for the shop; but who comes later does not overtake it.
        assert two.health()["leases"] == 0
        later = asyncio.create_task(one.acquire("c", writer("wiki")))
        await asyncio.wait((later,), timeout=0.05)
        assert not later.done()
        await one.release(shop, healthy=True)
        lease = await both
        await two.release(lease, healthy=True)
        await one.release(await later, healthy=True)

    run(main)


def test_a_waiting_writer_is_not_starved_by_readers(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pools(tmp_path)
        reading = await one.acquire("r", reader("shop"))
        writing = asyncio.create_task(two.acquire("w", writer("shop")))
        await asyncio.sleep(0)
        late = asyncio.create_task(one.acquire("late", reader("shop")))
        await asyncio.wait((late,), timeout=0.05)
        assert not late.done()
        await one.release(reading, healthy=True)
        await two.release(await writing, healthy=True)
        await one.release(await late, healthy=True)

    run(main)


def test_a_hundred_waiters_of_two_workers_are_served_in_the_order_they_came(tmp_path: Path) -> None:
    async def main() -> None:
        workers = pools(tmp_path)
        order: list[int] = []
        inside = 0

        async def use(number: int, pool: LockedSites) -> None:
            nonlocal inside
            lease = await pool.acquire(f"s{number}", writer("shop"))
            inside += 1
            assert inside == 1
            order.append(number)
            await asyncio.sleep(0)
            inside -= 1
            await pool.release(lease, healthy=True)

        first = await workers[0].acquire("first", writer("shop"))
        tasks = []
        for number in range(100):
            tasks.append(asyncio.create_task(use(number, workers[number % 2])))
            await asyncio.sleep(0)
        gave_up = {number for number in range(100) if number % 7 == 3}
        for number in gave_up:
            tasks[number].cancel()
        await workers[0].release(first, healthy=True)
        await asyncio.wait(tasks)
        assert order == [number for number in range(100) if number not in gave_up]
        assert left_in(tmp_path) == []

    run(main)


def test_whoever_is_cancelled_at_any_moment_leaves_neither_ticket_nor_lock(tmp_path: Path) -> None:
    async def main() -> None:
        workers = pools(tmp_path, 3)
        random.seed(7)

        async def use(number: int) -> None:
            pool = random.choice(workers)
            sites = random.sample(["a", "b", "c"], random.randint(1, 3))
            make = random.choice([reader, writer])
            lease = await pool.acquire(f"s{number}", make(*sites))
            try:
                await asyncio.sleep(random.random() / 500)
            finally:
                await asyncio.shield(pool.release(lease, healthy=random.random() < 0.8))

        tasks = [asyncio.create_task(use(number)) for number in range(60)]
        for each in random.sample(tasks, 25):
            await asyncio.sleep(random.random() / 500)
            each.cancel()
        done, _ = await asyncio.wait(tasks)
        assert [each.exception() for each in done if not each.cancelled() and each.exception()] == []
        for name in "abc":
            lease = await workers[0].acquire("last", writer(name))
            await workers[0].release(lease, healthy=True)
        assert left_in(tmp_path) == []

    run(main)


def test_a_cancellation_in_the_moment_of_its_turn_gives_the_turn_back(tmp_path: Path) -> None:
    async def main() -> None:
        (pool,) = pools(tmp_path, 1)
        first = await pool.acquire("a", writer("shop"))
        second = asyncio.create_task(pool.acquire("b", writer("shop")))
        await asyncio.sleep(0)
        await pool.release(first, healthy=True)  # the turn is given here
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await pool.release(await pool.acquire("c", writer("shop")), healthy=True)
        assert left_in(tmp_path) == []

    run(main)


HOLDER = """
import asyncio, sys
from homing.web.models import Task
from homing.web.sites import LockedSites

async def main():
    pool = LockedSites(sys.argv[1])
    await pool.acquire("dead", Task(benchmark="b", task_id="t", sites=("shop",)))
    waiting = asyncio.create_task(pool.acquire("dead too", Task(benchmark="b", task_id="t", sites=("shop",))))
    await asyncio.sleep(0)
    print("held", flush=True)
    await waiting

asyncio.run(main())
"""


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a site and waits for it once more."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder
        finally:
            holder.kill()
            holder.wait()


def test_a_killed_workers_locks_and_tickets_are_gone_with_it(tmp_path: Path) -> None:
    with holding(tmp_path / "sites") as holder:

        async def main() -> None:
            (pool,) = pools(tmp_path, 1)
            waiting = asyncio.create_task(pool.acquire("a", writer("shop")))
            await asyncio.wait((waiting,), timeout=0.05)
            assert not waiting.done()
            holder.kill()
            await asyncio.to_thread(holder.wait)
            await pool.release(await waiting, healthy=True)

        run(main)
    assert left_in(tmp_path) == []


def test_a_killed_workers_tickets_are_buried_by_who_takes_its_place_though_nobody_waits(tmp_path: Path) -> None:
    with holding(tmp_path / "sites"):
        pools(tmp_path, 1)
        assert [name for name in left_in(tmp_path) if name.endswith(".ticket")]  # a living one's
    pools(tmp_path, 1)
    assert not [name for name in left_in(tmp_path) if name.endswith(".ticket")]


def test_the_next_one_learns_that_a_site_was_left_unhealthy(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pools(tmp_path)
        lease = await one.acquire("a", writer("shop", "wiki"))
        await one.release(lease, healthy=False)
        lease = await two.acquire("b", writer("shop"))
        assert lease.metadata["left_unhealthy"] == ["shop"]
        await two.release(lease, healthy=True)
        lease = await one.acquire("c", writer("shop"))
        assert lease.metadata["left_unhealthy"] == []
        await one.release(lease, healthy=True)

    run(main)


def test_a_session_cannot_have_its_sites_twice(tmp_path: Path) -> None:
    async def main() -> None:
        (pool,) = pools(tmp_path, 1)
        lease = await pool.acquire("a", writer("shop"))
        with pytest.raises(SessionConflictError):
            await pool.acquire("a", writer("shop"))
        await pool.release(lease, healthy=True)

    run(main)


def test_closing_the_pool_ends_the_wait_and_frees_what_is_held(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pools(tmp_path)
        await one.acquire("a", writer("shop"))
        waiting = asyncio.create_task(one.acquire("b", writer("shop")))
        await asyncio.sleep(0)
        await one.aclose()
        await one.aclose()
        with pytest.raises(CapacityError):
            await waiting
        await two.release(await two.acquire("c", writer("shop")), healthy=True)

    run(main)


def test_a_full_site_refuses_one_more_and_other_sites_do_not_notice(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = (LimitedSites(str(tmp_path / "sites"), 2) for _ in range(2))
        first = await one.acquire("a", reader("shop"))
        second = await two.acquire("b", writer("shop"))
        for pool in (one, two):
            with pytest.raises(CapacityError):
                await pool.acquire("c", reader("wiki", "shop"))
        wiki = await one.acquire("d", reader("wiki"))  # nothing of the refused one's is kept
        also = await two.acquire("e", reader("wiki"))
        await one.release(first, healthy=True)
        third = await two.acquire("c", reader("shop"))
        held: list[tuple[LimitedSites, SiteLease]] = [(two, second), (two, third), (one, wiki), (two, also)]
        for pool, lease in held:
            await pool.release(lease, healthy=True)
        assert left_in(tmp_path) == []

    run(main)


def test_unmanaged_sites_only_count() -> None:
    async def main() -> None:
        pool = UnmanagedSites()
        leases = [await pool.acquire(name, writer("shop")) for name in "ab"]
        assert pool.health() == {"mode": "unmanaged", "leases": 2}
        for lease in leases:
            await pool.release(lease, healthy=True)
        assert pool.health()["leases"] == 0
        await pool.aclose()

    run(main)
