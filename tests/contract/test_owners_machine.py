"""Any interleaving of workers agrees with a plain dict of who came first and has not let go."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.worlds import FileWorld, MemoryWorld, Worker

from homing.directory import Given, OwnerAliveError
from homing.errors import NotHereError, SessionMovingError
from homing.types import WorkerId

SESSIONS = ("a", "b")
numbers = st.integers(0, 2)
sessions = st.sampled_from(SESSIONS)


class Ownership(RuleBasedStateMachine):
    """Three workers, replaced when they die; two sessions; requests that stay while other things happen."""

    make: type[FileWorld] | type[MemoryWorld] = MemoryWorld

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world = self.make()
        self.workers = [self._worker() for _ in range(3)]
        self.model: dict[str, Worker] = {}
        self.requests: list[tuple[Worker, str, contextlib.ExitStack]] = []

    def teardown(self) -> None:
        for _, _, request in self.requests:
            request.close()
        self.runner.run(self.world.aclose())
        self.runner.close()

    def _worker(self) -> Worker:
        return self.world.worker()

    def _serving(self, worker: Worker, session: str) -> int:
        return sum(at is worker and of == session for at, of, _ in self.requests)

    def _alive(self, worker: Worker) -> bool:
        return worker in self.workers

    def _goes(self, worker: Worker, session: str) -> None:
        """The model's release: its owner, serving nothing and holding nothing."""
        if self.model.get(session) is worker and not self._serving(worker, session) and session not in worker.held:
            del self.model[session]

    @rule(number=numbers, session=sessions, holds=st.booleans())
    def acquire(self, number: int, session: str, holds: bool) -> None:
        worker = self.workers[number]
        owner = self.model.setdefault(session, worker)
        assert worker.owners.acquire(session) == owner.id
        if owner is worker and holds:
            worker.held.add(session)

    @rule(number=numbers, session=sessions)
    def request_enters(self, number: int, session: str) -> None:
        worker = self.workers[number]
        request = contextlib.ExitStack()
        if self.model.get(session) is worker:
            request.enter_context(worker.owners.serving(session))
            self.requests.append((worker, session, request))
        else:
            with contextlib.suppress(NotHereError):
                request.enter_context(worker.owners.serving(session))
                raise AssertionError("served a session that is another's")

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def request_leaves(self, data: st.DataObject) -> None:
        worker, session, request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        request.close()
        self._goes(worker, session)

    @rule(number=numbers, session=sessions)
    def ends_and_is_released(self, number: int, session: str) -> None:
        worker = self.workers[number]
        worker.held.discard(session)
        worker.owners.release(session)
        self._goes(worker, session)

    @rule(number=numbers, to=numbers, session=sessions)
    def is_given(self, number: int, to: int, session: str) -> None:
        worker, asker = self.workers[number], self.workers[to]
        if worker is asker:
            return
        answer = self.runner.run(worker.owners.give(session, asker.id, timeout_seconds=0))
        if self.model.get(session) is not worker:
            assert answer is Given.NOT_MINE
        elif self._serving(worker, session):
            assert answer is Given.BUSY
        else:
            assert answer is Given.GIVEN
            # The asker's part: it looks, and opens.
            self.runner.run(asker.owners.restore(session, self._nobody, deadline_seconds=60, opened=asker.open))
            self.model[session] = asker

    @rule(number=numbers, session=sessions)
    def is_restored(self, number: int, session: str) -> None:
        worker = self.workers[number]
        owner = self.model.get(session)
        busy = owner is not None and self._alive(owner) and self._serving(owner, session)
        if busy:
            return  # it would wait: the contract suite has that
        self.runner.run(
            worker.owners.restore(
                session, self.world.asking(worker, timeout_seconds=0), deadline_seconds=60, opened=worker.open
            )
        )
        self.model[session] = worker

    @rule(number=numbers, session=sessions)
    def is_rewritten(self, number: int, session: str) -> None:
        worker, owner = self.workers[number], self.model.get(session)
        if owner is not None and owner is not worker and self._alive(owner):
            with pytest.raises(OwnerAliveError):
                worker.owners.rewrite(session)
        elif self._serving(worker, session):
            with pytest.raises(SessionMovingError):
                worker.owners.rewrite(session)
        else:
            worker.owners.rewrite(session)
            worker.held.add(session)
            self.model[session] = worker

    @rule(number=numbers)
    def dies_and_is_replaced(self, number: int) -> None:
        dead = self.workers[number]
        self.requests = [request for request in self.requests if request[0] is not dead]
        self.runner.run(self.world.kill(dead))
        self.workers[number] = self._worker()

    @invariant()
    def all_agree(self) -> None:
        for session in SESSIONS:
            owner = self.model.get(session)
            for worker in self.workers:
                assert worker.owners.owner(session) == (owner.id if owner is not None else None)
                assert worker.owners.mine(session) == (worker is owner)
                assert worker.owners.served_now(session) == self._serving(worker, session)
                assert session not in worker.held or worker is owner  # no state where it is not owned
        for worker in self.workers:
            assert len(worker.owners) == sum(owner is worker for owner in self.model.values())

    @staticmethod
    async def _nobody(owner: WorkerId, session_id: str) -> Given:
        raise ConnectionRefusedError(owner)


class FileOwnership(Ownership):
    make = FileWorld


_settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestMemoryOwnership = Ownership.TestCase
TestMemoryOwnership.settings = _settings
TestFileOwnership = FileOwnership.TestCase
TestFileOwnership.settings = _settings
