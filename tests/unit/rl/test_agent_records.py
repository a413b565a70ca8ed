"""An agent's records against a plain model: any operations, in any order, some of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.hand_clock import HandClock

from homing.rl.agents.records import AgentRecords, RecordState
from homing.rl.errors import ConflictError

WINDOW = 10.0


@dataclass(frozen=True)
class Seed:
    agent_session_id: str
    episode_id: str
    body: str = "x"
    fails: bool = field(default=False, compare=False)
    """The set-up raises."""
    stays: int = field(default=0, compare=False)
    """How often a clean-up of what was opened raises first."""


class Boom(Exception):
    """What the test's set-up and clean-up raise."""


class Opened:
    """A session, and how often it was released: what no session may be twice, and none that ended may not be."""

    def __init__(self, seed: Seed) -> None:
        self.seed = seed
        self.stays = seed.stays
        self.released = 0


@dataclass
class Known:
    """What the model knows of one ID. It is absent where there is no such thing."""

    state: RecordState
    episode: str
    seed: Seed | None = None
    session: int | None = None
    stays: int = 0
    receipt: int | None = None
    expires_at: float | None = None


class World:
    """Records with fake resources, and every session that was ever made."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.made: list[Opened] = []
        self.dropped: list[str] = []
        self.receipts = 0
        self.cleaning = asyncio.Event()
        self.may_clean = asyncio.Event()
        self.may_clean.set()
        self.records: AgentRecords[Seed, Opened, int] = AgentRecords(
            make=self.make,
            set_up=self.set_up,
            clean_up=self.clean_up,
            bare_receipt=lambda _: self.receipt(),
            close_retry_window_seconds=WINDOW,
            dropped=self.dropped.append,
            clock=self.clock,
        )

    def make(self, seed: Seed) -> Opened:
        self.made.append(Opened(seed))
        return self.made[-1]

    async def set_up(self, session: Opened) -> None:
        await asyncio.sleep(0)
        if session.seed.fails:
            raise Boom

    async def clean_up(self, session: Opened) -> int:
        await asyncio.sleep(0)
        self.cleaning.set()
        await self.may_clean.wait()
        if session.stays:
            session.stays -= 1
            raise Boom
        session.released += 1
        return self.receipt()

    def receipt(self) -> int:
        self.receipts += 1
        return self.receipts


class Model:
    """The table, one operation after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self.known: dict[str, Known] = {}
        self.sessions = 0
        self.receipts = 0

    def seed(self, seed: Seed, marked: bool) -> Any:
        known = self.known.get(seed.agent_session_id)
        if known is None and marked:
            return ConflictError
        if known is not None:
            if known.state is RecordState.OPEN and known.seed == seed:
                return ("session", known.session)
            if known.state is not RecordState.FAILED_SEED or known.seed != seed:
                return ConflictError
        self.sessions += 1
        made = Known(RecordState.OPEN, seed.episode_id, seed, self.sessions - 1, seed.stays)
        self.known[seed.agent_session_id] = made
        if not seed.fails:
            return ("session", made.session)
        if made.stays:
            made.stays -= 1
            made.state = RecordState.SETUP_FAILED
        else:
            self.receipts += 1
            made.state, made.session, made.expires_at = RecordState.FAILED_SEED, None, self.now + WINDOW
        return Boom

    def close(self, session_id: str, episode: str, marked: bool) -> Any:
        known = self.known.get(session_id)
        if known is None:
            if marked:
                return ConflictError
            known = self.known[session_id] = Known(RecordState.CLOSING, episode)
        if known.episode != episode:
            return ConflictError
        if known.state is not RecordState.CLOSED:
            if known.session is not None:
                known.state = RecordState.CLOSING
                if known.stays:
                    known.stays -= 1
                    return Boom
                known.session = None
            self.receipts += 1
            known.state, known.receipt, known.expires_at = RecordState.CLOSED, self.receipts, self.now + WINDOW
        return ("receipt", known.receipt)

    def state(self, session_id: str) -> RecordState:
        known = self.known.get(session_id)
        return RecordState.ABSENT if known is None else known.state

    def expire(self) -> None:
        for session_id in [i for i, k in self.known.items() if k.expires_at is not None and k.expires_at <= self.now]:
            del self.known[session_id]


ids = strategies.sampled_from(["a", "b"])
episodes = strategies.sampled_from(["e1", "e2"])
seeds = strategies.builds(
    Seed,
    ids,
    episodes,
    body=strategies.sampled_from(["x", "y"]),
    fails=strategies.booleans(),
    stays=strategies.integers(0, 2),
)
seedings = strategies.tuples(strategies.just("seed"), seeds, strategies.booleans())
closings = strategies.tuples(strategies.just("close"), ids, episodes, strategies.booleans())


class RecordsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world = World()
        self.model = Model()
        self.numbers: dict[Any, Any] = {}

    def teardown(self) -> None:
        self.runner.run(self.world.records.aclose())
        for made in self.world.made:
            # What could not be released at the end is the only thing that is not.
            assert made.released == 1 or (made.released == 0 and self.world.records.holds(made.seed.agent_session_id))
        self.runner.close()

    @rule(operations=strategies.lists(seedings | closings, min_size=1, max_size=5))
    def together(self, operations: Sequence[tuple[Any, ...]]) -> None:
        """Begun at once, they end as if each had waited for those before it that name the same session."""

        async def run() -> list[Any]:
            return await asyncio.gather(*(self.do(each) for each in operations))

        found = self.runner.run(run())
        for session_id in ("a", "b"):
            for operation, outcome in zip(operations, found, strict=True):
                if self.named(operation) == session_id:
                    self.compare(outcome, self.expect(operation))

    def compare(self, found: Any, expected: Any) -> None:
        """The model's sessions and receipts are numbers: each stands for one of the real ones, for good."""
        if not isinstance(found, tuple):
            assert found is expected
            return
        assert expected == self.numbers.setdefault(found, expected), (found, expected)
        assert list(self.numbers.values()).count(expected) == 1

    async def do(self, operation: tuple[Any, ...]) -> Any:
        records = self.world.records
        try:
            if operation[0] == "seed":
                return ("session", await records.seed(operation[1], marked=operation[2]))
            return ("receipt", await records.close(operation[1], operation[2], marked=operation[3]))
        except (ConflictError, Boom) as error:
            return type(error)

    def expect(self, operation: tuple[Any, ...]) -> Any:
        if operation[0] == "seed":
            return self.model.seed(operation[1], operation[2])
        return self.model.close(*operation[1:])

    @staticmethod
    def named(operation: tuple[Any, ...]) -> str:
        named: str = operation[1].agent_session_id if operation[0] == "seed" else operation[1]
        return named

    @rule(seconds=strategies.sampled_from([1.0, WINDOW / 2, WINDOW]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.move(seconds)
        self.world.records.expire()
        self.model.now += seconds
        self.model.expire()

    @rule(session_id=ids)
    def activate(self, session_id: str) -> None:
        if self.model.state(session_id) is RecordState.OPEN:
            assert self.world.records.open_session(session_id).seed == self.model.known[session_id].seed
        else:
            with pytest.raises(ConflictError):
                self.world.records.open_session(session_id)

    @invariant()
    def the_states_are_the_same(self) -> None:
        for session_id in ("a", "b"):
            assert self.world.records.state(session_id) is self.model.state(session_id)
            assert self.world.records.holds(session_id) is (session_id in self.model.known)
        ended = (RecordState.CLOSED, RecordState.FAILED_SEED)
        assert self.world.records.ended == {each for each in ("a", "b") if self.model.state(each) in ended}

    @invariant()
    def what_is_open_is_not_released_and_what_ended_is(self) -> None:
        held = sum(known.session is not None for known in self.model.known.values())
        assert sum(made.released == 0 for made in self.world.made) == held
        assert all(made.released <= 1 for made in self.world.made)


TestRecords = RecordsMachine.TestCase
TestRecords.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_seed_goes_on_when_its_caller_is_gone() -> None:
    world = World()
    asking = asyncio.create_task(world.records.seed(Seed("a", "e")))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await world.records.close("a", "e") == 1
    assert world.made[0].released == 1


@pytest.mark.anyio
async def test_the_last_record_of_a_session_is_told() -> None:
    world = World()
    await world.records.seed(Seed("a", "e"))
    await world.records.close("a", "e")
    world.clock.move(WINDOW - 1)
    world.records.expire()
    assert world.dropped == []
    world.clock.move(1)
    world.records.expire()
    assert world.dropped == ["a"]
    assert len(world.records) == 0


@pytest.mark.anyio
async def test_a_failed_seed_that_is_tried_again_does_not_expire_with_its_first_failure() -> None:
    world = World()
    with pytest.raises(Boom):
        await world.records.seed(Seed("a", "e", fails=True))
    world.clock.move(WINDOW - 1)
    await world.records.seed(Seed("a", "e"))
    world.clock.move(WINDOW)
    world.records.expire()
    assert world.records.state("a") is RecordState.OPEN
    await world.records.close("a", "e")


@pytest.mark.anyio
async def test_what_is_open_when_the_worker_stops_is_cleaned_up_once() -> None:
    world = World()
    await world.records.seed(Seed("a", "e"))
    await world.records.aclose()
    await world.records.aclose()
    assert world.made[0].released == 1


@pytest.mark.anyio
async def test_a_seed_that_waited_for_a_record_that_is_gone_begins_with_the_current_one() -> None:
    world = World()
    await world.records.seed(Seed("a", "e"))
    world.may_clean.clear()
    closing = asyncio.create_task(world.records.close("a", "e"))
    await world.cleaning.wait()
    seeding = asyncio.create_task(world.records.seed(Seed("a", "e2")))
    for _ in range(3):
        await asyncio.sleep(0)  # it waits for the record that is closing
    world.records.forget("a")
    world.may_clean.set()
    await closing
    assert (await seeding).seed.episode_id == "e2"
    assert world.records.state("a") is RecordState.OPEN
    await world.records.close("a", "e2")
    assert [made.released for made in world.made] == [1, 1]
