"""The sessions of one worker: seeds, closes and fences against a plain model, and what waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.hand_clock import HandClock

from homing.rl.errors import (
    ConflictError,
    ReleaseFailedError,
    SessionBusyError,
    SessionClosedError,
    SessionClosingError,
    SessionLostError,
)
from homing.rl.protocol import EpisodeId
from homing.rl.sessions import SessionTable

_T = TypeVar("_T")
WINDOW = 300.0
EPISODES = [EpisodeId(rollout_id="a"), EpisodeId(rollout_id="a", attempt=1), EpisodeId(rollout_id="b")]
names = st.sampled_from(["one", "two", "three"])
episodes = st.sampled_from(EPISODES)
tasks = st.sampled_from(["easy", "hard"])


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(coroutine)


class Sessions(RuleBasedStateMachine):
    """Any order of seeds, closes and failed releases agrees with a dict of open sessions and one of closed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.failing = False
        self.released: list[object] = []
        self.table: SessionTable[object] = SessionTable(self.release, window_seconds=WINDOW, clock=self.clock)
        self.open: dict[str, dict[str, Any]] = {}
        self.closed: dict[str, tuple[float, EpisodeId]] = {}

    async def release(self, state: object) -> None:
        if self.failing:
            raise RuntimeError("the test wants this")
        self.released.append(state)

    async def seed_now(self, name: str, episode: EpisodeId, task: str) -> object:
        async with self.table.changing(name):
            known = self.table.seedable(name, episode, task)
            if known is not None:
                return known.state
            return self.table.open(name, object(), episode=episode, seed=task).state

    async def close_now(self, name: str, episode: EpisodeId) -> None:
        async with self.table.changing(name):
            await self.table.close(name, episode)

    def fenced(self, name: str) -> EpisodeId | None:
        until, episode = self.closed.get(name, (0.0, EPISODES[0]))
        return episode if until > self.clock.monotonic() else None

    @rule(name=names, episode=episodes, task=tasks)
    def seed(self, name: str, episode: EpisodeId, task: str) -> None:
        known = self.open.get(name)
        expected: type[Exception] | None = None
        if self.fenced(name) is not None:
            expected = SessionClosedError
        elif known is not None and known["closing"]:
            expected = SessionClosingError
        elif known is not None and (known["episode"], known["task"]) != (episode, task):
            expected = ConflictError
        if expected is not None:
            with pytest.raises(expected):
                run(self.seed_now(name, episode, task))
            return
        state = run(self.seed_now(name, episode, task))
        if known is None:
            self.open[name] = {"state": state, "episode": episode, "task": task, "closing": False}
        else:
            assert state is known["state"]

    @rule(name=names, episode=episodes, failing=st.booleans())
    def close(self, name: str, episode: EpisodeId, failing: bool) -> None:
        known, fence = self.open.get(name), self.fenced(name)
        self.failing = failing
        bound = known["episode"] if known else fence
        if bound is not None and bound != episode:
            with pytest.raises(ConflictError):
                run(self.close_now(name, episode))
        elif known and failing:
            with pytest.raises(ReleaseFailedError):
                run(self.close_now(name, episode))
            known["closing"] = True
        else:
            before = len(self.released)
            run(self.close_now(name, episode))
            assert self.released[before:] == ([known["state"]] if known else [])
            self.open.pop(name, None)
            self.closed[name] = (self.clock.monotonic() + WINDOW, episode)

    @rule(name=names)
    def use(self, name: str) -> None:
        known = self.open.get(name)
        if known is None:
            with pytest.raises(SessionLostError):
                self.table.held(name)
        elif known["closing"]:
            with pytest.raises(SessionClosingError), self.table.held(name):
                pass
        else:
            with self.table.held(name) as state:
                assert state is known["state"]

    @rule(seconds=st.sampled_from([1.0, WINDOW / 2, WINDOW]))
    def time_passes(self, seconds: float) -> None:
        self.clock.move(seconds)
        self.table.expire_fences()

    @invariant()
    def the_table_holds_what_is_open_and_nothing_else(self) -> None:
        assert {each.id for each in self.table} == set(self.open)
        assert len(self.released) == len(set(map(id, self.released)))
        live = sum(self.fenced(name) is not None for name in self.closed)
        assert repr(self.table) == f"<SessionTable: {len(self.open)} open, {live} fenced>"


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class Gate:
    """A release that waits until it may go on."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.proceed = asyncio.Event()
        self.released = 0

    async def release(self, state: str) -> None:
        self.entered.set()
        await self.proceed.wait()
        self.released += 1


def opened(gate: Gate, *, wait_seconds: float = 30.0) -> SessionTable[str]:
    table: SessionTable[str] = SessionTable(
        gate.release, window_seconds=WINDOW, clock=HandClock(), wait_seconds=wait_seconds
    )
    table.open("one", "state", episode=EPISODES[0], seed="easy")
    return table


async def close(table: SessionTable[str]) -> None:
    async with table.changing("one"):
        await table.close("one", EPISODES[0])


def test_a_close_waits_for_what_uses_the_session_and_nothing_new_gets_in() -> None:
    async def scenario() -> None:
        gate = Gate()
        gate.proceed.set()
        table = opened(gate)
        session = table.held("one")
        with session:
            closing = asyncio.create_task(close(table))
            while not session.closing:
                await asyncio.sleep(0)
            with pytest.raises(SessionClosingError), session:
                pass
            assert not gate.entered.is_set()
        await closing
        assert gate.released == 1

    run(scenario())


def test_a_seed_waits_for_a_close_and_is_then_refused() -> None:
    async def scenario() -> None:
        gate = Gate()
        table = opened(gate)
        closing = asyncio.create_task(close(table))
        await gate.entered.wait()

        async def seed() -> None:
            async with table.changing("one"):
                table.seedable("one", EPISODES[0], "easy")

        seeding = asyncio.create_task(seed())
        await asyncio.sleep(0)
        assert not seeding.done()
        gate.proceed.set()
        await closing
        with pytest.raises(SessionClosedError):
            await seeding

    run(scenario())


def test_two_closes_at_once_release_once() -> None:
    async def scenario() -> None:
        gate = Gate()
        table = opened(gate)
        closes = [asyncio.create_task(close(table)) for _ in range(3)]
        await gate.entered.wait()
        gate.proceed.set()
        await asyncio.gather(*closes)
        assert gate.released == 1

    run(scenario())


def test_a_close_that_waits_too_long_changes_nothing() -> None:
    async def scenario() -> None:
        gate = Gate()
        gate.proceed.set()
        table = opened(gate, wait_seconds=0.01)
        session = table.held("one")
        with session:
            with pytest.raises(SessionBusyError):
                await close(table)
            with session:
                pass
        await close(table)
        assert gate.released == 1

    run(scenario())


def test_a_change_that_waits_too_long_for_another_is_told_so() -> None:
    async def scenario() -> None:
        gate = Gate()
        table = opened(gate, wait_seconds=0.01)
        closing = asyncio.create_task(close(table))
        await gate.entered.wait()
        with pytest.raises(SessionBusyError):
            await close(table)
        gate.proceed.set()
        await closing

    run(scenario())


def test_a_cancelled_release_can_be_tried_again() -> None:
    async def scenario() -> None:
        gate = Gate()
        table = opened(gate)
        closing = asyncio.create_task(close(table))
        await gate.entered.wait()
        closing.cancel()
        await asyncio.wait([closing])
        assert len(table) == 1
        assert table.fence("one") is None
        gate.proceed.set()
        await close(table)
        assert gate.released == 1
        assert len(table) == 0

    run(scenario())
