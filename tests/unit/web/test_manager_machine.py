"""The manager against a plain model, on virtual time: any order of calls, faults, cancellations and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.support.virtual_time import VirtualLoop
from tests.support.web_world import World, task

from homing.web.errors import (
    ERROR_KINDS,
    CapacityError,
    InvalidActionError,
    SessionConflictError,
    SessionLostError,
    WebError,
)
from homing.web.models import WireStatus

SESSIONS = st.sampled_from([f"s{n}" for n in range(6)])
TASKS = st.sampled_from(["count", "other"])
STAGES = st.sampled_from(["start", "site", "acquire", "reset"])
RELEASES = st.sampled_from(["close backend", "close runner", "release", "release site", "finish", "interrupt"])
KINDS = st.sampled_from(["raise", "hang", "late", "stubborn"])
ENDING = {"raise", "hang", "late", "stubborn"}


@dataclass
class Modelled:
    """What the model knows of a live session."""

    task_id: str
    count: int = 0
    used_at: float = 0.0
    seeded_at: float = 0.0
    verdict: float | None = None


class Manager(RuleBasedStateMachine):
    """`live` is the plain model: the sessions that can be used, with their counts. A session whose fate a fault has left
    open is taken out of it, and must then be usable or lost, never anything else.

    A place that failed to come free is taken until time has passed, so capacity is judged from the manager's own length,
    which the invariants hold against the truth.
    """

    @initialize()
    def begin(self) -> None:
        self.loop = VirtualLoop()
        self.runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self.runner.__enter__()
        self.world = World(self.loop, max_sessions=4)
        self.live: dict[str, Modelled] = {}
        self.operations = 0
        self.run(self.world.manager.start())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the call gave, or the `WebError` it raised; nothing else may come out of it."""

        async def bounded() -> Any:
            began = self.loop.now
            try:
                return await coroutine
            except WebError as error:
                return error
            finally:
                # Every call is back in its time: for a seed that is site, browser and reset, each at its limit.
                assert self.loop.now - began <= 100.0 + 100.0 + 60.0 + 60.0 + 0.25

        told = self.runner.run(bounded())
        assert not isinstance(told, WebError) or told.error_kind in ERROR_KINDS
        return told

    def idle(self, known: Modelled) -> float:
        return self.loop.now - known.used_at

    def age(self, known: Modelled) -> float:
        return self.loop.now - known.seeded_at

    def forget_aged(self) -> None:
        for name, known in list(self.live.items()):
            if self.idle(known) >= 3600.0 or self.age(known) >= 14_400.0:
                del self.live[name]

    # --- rules ---

    @rule(name=SESSIONS, task_id=TASKS)
    def seed(self, name: str, task_id: str) -> None:
        manager = self.world.manager
        self.runner.run(asyncio.sleep(0.001))  # what can end by itself has ended
        full = len(manager) >= manager.settings.max_sessions
        occupied = not self.runner.run(manager.can_retry_seed(name))
        told = self.run(manager.seed_session(name, task(task_id)))
        known = self.live.get(name)
        if known is not None:
            if known.task_id == task_id:
                assert told.session_id == name
                known.used_at = self.loop.now
            else:
                assert isinstance(told, SessionConflictError)
        elif occupied:
            assert isinstance(told, SessionConflictError)
        elif full:
            assert isinstance(told, CapacityError)
        else:
            assert told.status is WireStatus.READY, told
            self.live[name] = Modelled(task_id, 0, self.loop.now, self.loop.now)

    @rule(name=SESSIONS, stage=STAGES, kind=KINDS)
    def seed_with_a_fault(self, name: str, stage: str, kind: str) -> None:
        if kind == "hang" and stage == "acquire":
            kind = "late"  # one that never comes keeps its place for ever, which leaves the machine no places
        manager = self.world.manager
        self.runner.run(asyncio.sleep(0.001))
        new = name not in self.live and self.runner.run(manager.can_retry_seed(name))
        new = new and len(manager) < manager.settings.max_sessions
        if not new or (stage == "start" and self.world.browsers.started):
            return
        self.world.faults.add(stage, kind)
        told = self.run(manager.seed_session(name, task()))
        assert isinstance(told, WebError), told
        assert isinstance(self.run(manager.observe(name)), SessionLostError)

    @rule(name=SESSIONS, ticks=st.integers(0, 40))
    def seed_and_cancel(self, name: str, ticks: int) -> None:
        was_live = name in self.live
        done = self.cancelled_after(self.world.manager.seed_session(name, task()), ticks)
        if done is not None:
            if not isinstance(done, WebError) and not was_live:
                self.live[name] = Modelled("count", 0, self.loop.now, self.loop.now)
            elif not isinstance(done, WebError):
                self.live[name].used_at = self.loop.now

    @rule(name=SESSIONS)
    def step(self, name: str) -> None:
        known = self.live.get(name)
        told = self.run(self.world.manager.step(name, None, "noop()"))
        if known is None:
            assert isinstance(told, SessionLostError), told
        elif known.verdict is not None:
            assert isinstance(told, SessionConflictError)
        else:
            known.count += 1
            known.used_at = self.loop.now
            assert told.reward == known.count

    @rule(name=SESSIONS, operation=st.integers(0, 2))
    def step_twice_under_one_id(self, name: str, operation: int) -> None:
        known = self.live.get(name)
        if known is None or known.verdict is not None:
            return
        self.operations += 1  # an ID that was used is answered from memory
        identity = f"{operation}-{self.operations}"

        async def both() -> list[Any]:
            calls = [self.world.manager.step(name, identity, f"noop({operation})") for _ in range(3)]
            return [*await asyncio.gather(*calls)]

        told = self.run(both())
        known.count += 1
        known.used_at = self.loop.now
        assert [each.reward for each in told] == [known.count] * 3

    @rule(name=SESSIONS, kind=st.sampled_from(["raise", "hang", "stubborn", "value"]))
    def step_with_a_fault(self, name: str, kind: str) -> None:
        known = self.live.get(name)
        if known is None or known.verdict is not None:
            return
        self.world.faults.add("step", kind)
        told = self.run(self.world.manager.step(name, "fault", "noop()"))
        if kind == "value":
            assert isinstance(told, InvalidActionError)
            return
        assert isinstance(told, WebError)
        assert told.ends_session
        del self.live[name]
        assert isinstance(self.run(self.world.manager.step(name, "fault", "noop()")), SessionLostError)

    @rule(name=SESSIONS, ticks=st.integers(0, 12))
    def step_and_cancel(self, name: str, ticks: int) -> None:
        known = self.live.get(name)
        if known is None or known.verdict is not None:
            return
        identity = f"c{self.loop.now}-{known.count}"
        self.cancelled_after(self.world.manager.step(name, identity, "noop()"), ticks)
        # Whatever became of the first caller: the step is done once, and the second caller learns what it gave.
        told = self.run(self.world.manager.step(name, identity, "noop()"))
        known.count += 1
        known.used_at = self.loop.now
        assert told.reward == known.count

    @rule(name=SESSIONS)
    def evaluate(self, name: str) -> None:
        known = self.live.get(name)
        told = self.run(self.world.manager.evaluate(name))
        if known is None:
            # Of a session that ended after its verdict, that verdict is still known.
            assert isinstance(told, SessionLostError) or told.metadata == {}
            return
        if known.verdict is None:
            known.verdict = float(known.count)
            known.used_at = self.loop.now
        assert told.reward == known.verdict

    @rule(name=SESSIONS)
    def evaluate_with_a_fault(self, name: str) -> None:
        known = self.live.get(name)
        if known is None or known.verdict is not None:
            return
        self.world.faults.add("evaluate", "raise")
        told = self.run(self.world.manager.evaluate(name))
        assert told.error_kind == "evaluator_infrastructure"

    @rule(name=SESSIONS, task_id=TASKS)
    def reset(self, name: str, task_id: str) -> None:
        known = self.live.get(name)
        told = self.run(self.world.manager.reset_session(name, task(task_id)))
        if known is None:
            assert isinstance(told, SessionLostError)
        elif known.task_id != task_id:
            assert isinstance(told, SessionConflictError)
        else:
            assert told.status is WireStatus.READY
            self.live[name] = Modelled(task_id, 0, self.loop.now, known.seeded_at)

    @rule(name=SESSIONS, kind=st.sampled_from(["raise", "value", "hang"]))
    def reset_with_a_fault(self, name: str, kind: str) -> None:
        known = self.live.get(name)
        if known is None:
            return
        self.world.faults.add("reset", kind)
        assert isinstance(self.run(self.world.manager.reset_session(name, task(known.task_id))), WebError)
        del self.live[name]
        assert isinstance(self.run(self.world.manager.observe(name)), SessionLostError)

    @rule(name=SESSIONS, faults=st.lists(st.tuples(RELEASES, KINDS), max_size=3))
    def close(self, name: str, faults: list[tuple[str, str]]) -> None:
        known = self.live.pop(name, None)
        if known is not None:
            for at, kind in faults:
                self.world.faults.add(at, kind)
        told = self.run(self.world.manager.close_session(name))
        assert told is True or told is False
        if told:
            assert self.runner.run(self.world.manager.can_retry_seed(name))
        self.forget_faults()
        assert isinstance(self.run(self.world.manager.observe(name)), SessionLostError)

    @rule(name=SESSIONS, ticks=st.integers(0, 20), whom=st.sampled_from(["teardown", "release", "call"]))
    def close_and_cancel(self, name: str, ticks: int, whom: str) -> None:
        self.live.pop(name, None)
        self.cancelled_after(self.world.manager.close_session(name), ticks, whom)
        self.run(self.world.manager.close_session(name))

    @rule(seconds=st.sampled_from([1.0, 30.0, 600.0, 2000.0]))
    def pass_time(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))
        # What is at its limit may or may not have been looked at yet: the sweep comes once a minute.
        self.runner.run(asyncio.sleep(61.0))
        for name, known in list(self.live.items()):
            if abs(self.idle(known) - 3600.0) < 130.0 or abs(self.age(known) - 14_400.0) < 130.0:
                del self.live[name]
                self.run(self.world.manager.close_session(name))
        self.forget_aged()

    @precondition(lambda self: hasattr(self, "world"))
    @rule()
    def settle(self) -> None:
        """With no faults left, everything that failed comes to its end."""
        self.forget_faults()
        self.pass_time(1200.0)
        assert len(self.world.manager) <= len(self.live)

    # --- what holds always ---

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def what_is_live_here_is_live_there(self) -> None:
        if hasattr(self, "world"):
            for name, known in self.live.items():
                near = self.idle(known) >= 3470.0 or self.age(known) >= 14_270.0
                assert near or self.world.manager.is_live(name)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.forget_faults()
            self.runner.run(self.world.settle())
            assert self.runner.run(self.world.manager.stop()) == []
            self.world.check_nothing_left()
        finally:
            self.loop.on_tick = lambda: None
            self.runner.__exit__(None, None, None)

    def forget_faults(self) -> None:
        self.world.faults.next.clear()

    def cancelled_after(self, coroutine: Coroutine[Any, Any, Any], ticks: int, whom: str = "call") -> Any:
        """What the call gave or raised if it ended before its cancellation; else None."""

        async def main() -> Any:
            call = asyncio.create_task(coroutine, name="call")
            for _ in range(ticks):
                await asyncio.sleep(0)
            if call.done():
                return call.exception() or call.result()
            for each in asyncio.all_tasks():
                if each.get_name().startswith(whom):
                    each.cancel()
            await asyncio.wait((call,))
            return None if call.cancelled() else call.exception() or call.result()

        return self.runner.run(main())


def test_any_history_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        Manager,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
