"""Which episodes may run, over several workers: here several objects on one directory, and processes that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from homing.errors import ConfigurationError
from homing.rl.episodes.admission import Admission, NotAdmittedError

pytestmark = pytest.mark.anyio

LONG = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def worker(stack: AsyncExitStack, path: Path, *, slots: int = 1, max_waiting: int = 1000) -> Admission:
    return await stack.enter_async_context(Admission(str(path / "e"), slots=slots, max_waiting=max_waiting))


async def begun(admission: Admission, waiting: int) -> None:
    """Wait until so many wait at the worker."""
    while admission.waiting < waiting:
        await asyncio.sleep(0)


def files(path: Path, ending: str = "") -> list[str]:
    return [name for name in os.listdir(path / "e") if name.endswith(ending) and not name.startswith("slot-")]


async def test_no_more_run_than_there_are_slots_in_all_workers_together(stack: AsyncExitStack, tmp_path: Path) -> None:
    workers = [await worker(stack, tmp_path, slots=3) for _ in range(4)]
    running = most = ran = 0

    async def episode(admission: Admission) -> None:
        nonlocal running, most, ran
        async with admission.admitted(LONG):
            running += 1
            most = max(most, running)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            ran += 1

    await asyncio.gather(*(episode(workers[number % 4]) for number in range(200)))
    assert (most, ran) == (3, 200)
    assert files(tmp_path, ".wake") == files(tmp_path)  # no ticket is left


async def test_who_came_first_is_next_wherever_it_waits(stack: AsyncExitStack, tmp_path: Path) -> None:
    workers = [await worker(stack, tmp_path) for _ in range(3)]
    order: list[int] = []

    async def episode(number: int) -> None:
        async with workers[number % 3].admitted(LONG):
            order.append(number)

    async with asyncio.TaskGroup() as tasks, workers[0].admitted(LONG):
        for number in range(12):
            tasks.create_task(episode(number))
            await begun(workers[number % 3], number // 3 + 1)
    assert order == list(range(12))


async def test_a_new_one_does_not_pass_those_that_wait(stack: AsyncExitStack, tmp_path: Path) -> None:
    first, second = [await worker(stack, tmp_path) for _ in range(2)]
    order: list[str] = []

    async def episode(admission: Admission, name: str) -> None:
        async with admission.admitted(LONG):
            order.append(name)

    async with asyncio.TaskGroup() as tasks:
        async with first.admitted(LONG):
            tasks.create_task(episode(second, "waited"))
            await begun(second, 1)
        # The slot is free, and the one that waits elsewhere has not been able to take it yet.
        await episode(first, "new")
    assert order == ["waited", "new"]


async def test_one_that_waits_too_long_is_told_and_does_not_hold_up_the_next(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    admission = await worker(stack, tmp_path)
    async with admission.admitted(LONG):
        with pytest.raises(NotAdmittedError) as refused:
            async with admission.admitted(0.01):
                raise AssertionError("there is no slot")
        assert refused.value.kind == "queue_timeout"
    async with admission.admitted(LONG):
        pass


async def test_one_that_is_cancelled_leaves_no_ticket_and_lets_the_next_run(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    admission, other = [await worker(stack, tmp_path) for _ in range(2)]

    async def episode(at: Admission) -> None:
        async with at.admitted(LONG):
            pass

    async with admission.admitted(LONG):
        given_up = asyncio.create_task(episode(admission))
        await begun(admission, 1)
        patient = asyncio.create_task(episode(other))
        await begun(other, 1)
        given_up.cancel()
        await asyncio.wait({given_up})
    await patient
    assert files(tmp_path, ".wake") == files(tmp_path)


async def test_the_queue_is_bounded_in_all_workers_together(stack: AsyncExitStack, tmp_path: Path) -> None:
    first, second = [await worker(stack, tmp_path, max_waiting=1) for _ in range(2)]

    async def episode() -> None:
        async with first.admitted(LONG):
            pass

    async with first.admitted(LONG):
        waiting = asyncio.create_task(episode())
        await begun(first, 1)
        with pytest.raises(NotAdmittedError) as refused:
            async with second.admitted(LONG):
                raise AssertionError("there is no slot")
        assert refused.value.kind == "queue_full"
    await waiting


HOLDER = """
import asyncio, sys
from homing.rl.episodes.admission import Admission

async def main():
    async with Admission(sys.argv[1], slots=1, max_waiting=10) as admission:
        if sys.argv[2] == "wait":
            waiting = asyncio.create_task(admission._take(60))
            while not admission.waiting:
                await asyncio.sleep(0)
            print("waiting", flush=True)
            await waiting
        else:
            async with admission.admitted(60):
                print("holding", flush=True)
                await asyncio.Event().wait()

asyncio.run(main())
"""


def process(path: Path, what: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path / "e"), what], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() in ("waiting", "holding")
    return holder


def kill(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


async def test_the_slot_of_a_worker_that_is_killed_is_free_again(stack: AsyncExitStack, tmp_path: Path) -> None:
    admission = await worker(stack, tmp_path)
    holder = process(tmp_path, "hold")
    try:
        with pytest.raises(NotAdmittedError):
            async with admission.admitted(0.01):
                raise AssertionError("there is no slot")
    finally:
        kill(holder)
    async with admission.admitted(LONG):
        pass


async def test_the_turn_of_a_worker_that_is_killed_goes_to_the_next(stack: AsyncExitStack, tmp_path: Path) -> None:
    admission = await worker(stack, tmp_path)

    async def episode() -> None:
        async with admission.admitted(LONG):
            pass

    async with admission.admitted(LONG):
        waiter = process(tmp_path, "wait")
        second = asyncio.create_task(episode())
        await begun(admission, 1)
        kill(waiter)
    async with asyncio.timeout(20):
        await second
    assert len(files(tmp_path)) == 2  # the sockets of this worker and of the dead one


@pytest.mark.parametrize(("slots", "max_waiting"), [(0, 1), (1, -1)])
def test_what_cannot_admit_anything_is_refused(slots: int, max_waiting: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        Admission(str(tmp_path), slots=slots, max_waiting=max_waiting)
