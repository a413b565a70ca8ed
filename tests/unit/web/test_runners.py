"""Where operations run: the gate's order and bounds on virtual time, the session's own thread with real threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.support.virtual_time import VirtualLoop, run_virtual

from homing.web.errors import CapacityError, OperationTimeoutError
from homing.web.runners import LoopRunner, OperationGate, ThreadRunner


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


def test_no_more_operations_at_once_than_the_gate_is_wide_and_the_wait_is_told_apart() -> None:
    async def main(loop: VirtualLoop) -> None:
        gate = OperationGate(2, 60.0)
        inside = most = 0

        async def operation() -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(1.0)
            inside -= 1

        runners = [LoopRunner(gate) for _ in range(6)]
        ran = await asyncio.gather(*(runner.run(operation, timeout_seconds=1.5) for runner in runners))
        assert most == 2
        assert [round(each.waited_seconds) for each in ran] == [0, 0, 1, 1, 2, 2]
        assert all(round(each.ran_seconds) == 1 for each in ran)

    run_virtual(main)


def test_a_turn_that_does_not_come_in_time_is_refused_and_nothing_ran() -> None:
    async def main(loop: VirtualLoop) -> None:
        gate = OperationGate(1, 5.0, turn_seconds=1000.0)
        ran = []

        async def operation() -> None:
            ran.append(loop.now)
            await asyncio.sleep(100.0)

        first = asyncio.create_task(LoopRunner(gate).run(operation, timeout_seconds=200.0))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await LoopRunner(gate).run(operation, timeout_seconds=200.0)
        assert loop.now == 1005.0
        await first
        assert len(ran) == 1
        assert (gate.inside, gate.waiting) == (0, 0)

    run_virtual(main)


def test_an_operation_that_hangs_holds_up_the_others_for_a_turn_and_no_longer() -> None:
    async def main(loop: VirtualLoop) -> None:
        gate = OperationGate(1, 60.0, turn_seconds=2.0)
        over = asyncio.Event()

        async def hangs() -> None:
            await over.wait()

        async def quick() -> float:
            return loop.time()

        began = loop.time()
        hanging = asyncio.create_task(LoopRunner(gate).run(hangs, timeout_seconds=30.0))
        await asyncio.sleep(0)
        ran = await LoopRunner(gate).run(quick, timeout_seconds=5.0)
        assert ran.value - began == pytest.approx(2.0)
        assert (await LoopRunner(gate).run(quick, timeout_seconds=5.0)).waited_seconds == pytest.approx(0.0)
        assert gate.inside == 0
        over.set()
        await hanging
        assert (gate.inside, gate.waiting) == (0, 0)
        # The place that the hanging one gave back early is not given back twice.
        async with gate.turn():
            assert gate._places.locked()

    run_virtual(main)


def test_who_is_cancelled_while_waiting_leaves_no_hole_in_the_queue() -> None:
    async def main(loop: VirtualLoop) -> None:
        gate = OperationGate(1, 60.0)
        order: list[int] = []

        async def operation(number: int) -> None:
            order.append(number)
            await asyncio.sleep(1.0)

        tasks = []
        for number in range(10):
            tasks.append(asyncio.create_task(LoopRunner(gate).run(operation, number, timeout_seconds=9.0)))
            await asyncio.sleep(0)
        for number in (2, 3, 7):
            tasks[number].cancel()
        await asyncio.wait(tasks)
        assert order == [0, 1, 4, 5, 6, 8, 9]
        assert (gate.inside, gate.waiting) == (0, 0)

    run_virtual(main)


def test_an_operation_that_ignores_its_end_keeps_its_runner_busy_and_nobody_elses() -> None:
    async def main(loop: VirtualLoop) -> None:
        gate = OperationGate(1, 60.0)
        runner, other = LoopRunner(gate), LoopRunner(gate)

        async def stubborn() -> None:
            until = loop.now + 50.0
            while loop.now < until:
                try:
                    await asyncio.sleep(until - loop.now)
                except asyncio.CancelledError:
                    continue

        async def quick() -> int:
            return 1

        with pytest.raises(OperationTimeoutError):
            await runner.run(stubborn, timeout_seconds=2.0)
        assert (await other.run(quick, timeout_seconds=1.0)).value == 1
        with pytest.raises(CapacityError):
            await runner.run(quick, timeout_seconds=1.0)
        with pytest.raises(RuntimeError):
            await runner.aclose()
        await asyncio.sleep(50.0)
        await runner.aclose()
        with pytest.raises(RuntimeError):
            await runner.run(quick, timeout_seconds=1.0)

    run_virtual(main)


def test_a_timeout_of_the_operations_own_is_its_own() -> None:
    async def main(loop: VirtualLoop) -> None:
        async def fails() -> None:
            raise TimeoutError("the page's own")

        with pytest.raises(TimeoutError, match="own"):
            await LoopRunner(OperationGate(1, 1.0)).run(fails, timeout_seconds=5.0)

    run_virtual(main)


# --- the session's own thread ---


class ThreadBound:
    """A driver that belongs to the thread that first used it, as some are."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.entered = threading.Event()
        self.proceed = threading.Event()
        self.count = 0
        self.closed_on: threading.Thread | None = None

    def use(self) -> int:
        here = threading.current_thread()
        self.thread = self.thread or here
        assert self.thread is here, "used from another thread"
        self.count += 1
        return self.count

    def block(self) -> None:
        self.use()
        self.entered.set()
        assert self.proceed.wait(15)

    def close(self) -> None:
        self.use()
        self.closed_on = threading.current_thread()


def test_every_call_of_eight_interleaved_sessions_runs_on_the_thread_of_its_session() -> None:
    async def main() -> None:
        drivers = [ThreadBound() for _ in range(8)]
        runners = [ThreadRunner(f"session {number}", 10.0) for number in range(8)]
        blocked = asyncio.create_task(runners[0].run(drivers[0].block, timeout_seconds=10.0))
        await asyncio.to_thread(drivers[0].entered.wait, 10)
        for _ in range(5):
            pairs = zip(runners[1:], drivers[1:], strict=True)
            await asyncio.gather(*(runner.run(driver.use, timeout_seconds=10.0) for runner, driver in pairs))
        cancelled = asyncio.create_task(runners[1].run(drivers[1].use, timeout_seconds=10.0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        drivers[0].proceed.set()
        await blocked
        for runner, driver in zip(runners, drivers, strict=True):
            await runner.run(driver.close, timeout_seconds=10.0)
            await runner.aclose()
            await runner.aclose()
        assert len({driver.thread for driver in drivers}) == 8
        assert all(driver.closed_on is driver.thread for driver in drivers)
        assert [driver.count for driver in drivers[2:]] == [6] * 6
        assert not any(driver.thread.is_alive() for driver in drivers if driver.thread)

    run(main)


def test_an_operation_out_of_time_keeps_the_thread_until_it_has_ended() -> None:
    async def main() -> None:
        driver, runner = ThreadBound(), ThreadRunner("slow", 10.0)
        with pytest.raises(OperationTimeoutError):
            await runner.run(driver.block, timeout_seconds=0.05)
        with pytest.raises(CapacityError):
            await runner.run(driver.close, timeout_seconds=1.0)
        with pytest.raises(RuntimeError):
            await runner.aclose()
        assert driver.count == 1
        driver.proceed.set()  # as the end of its renderer does

    run(main)


def test_a_thread_survives_whatever_an_operation_raises() -> None:
    async def main() -> None:
        finalized = []
        runner = ThreadRunner("raises", 10.0, finalizer=lambda: finalized.append(threading.current_thread().name))
        for error in (KeyError("k"), SystemExit(3), StopIteration()):

            def fails(error: BaseException = error) -> None:
                raise error

            with pytest.raises((KeyError, RuntimeError)):
                await runner.run(fails, timeout_seconds=5.0)
        assert (await runner.run(lambda: 1, timeout_seconds=5.0)).value == 1
        await runner.aclose()
        assert finalized == ["raises"]
        with pytest.raises(RuntimeError):
            await runner.run(lambda: 1, timeout_seconds=5.0)

    run(main)


def test_a_runner_that_was_never_used_has_no_thread() -> None:
    async def main() -> None:
        before = threading.active_count()
        runner = ThreadRunner("unused", 10.0)
        assert threading.active_count() == before
        await runner.aclose()

    run(main)
