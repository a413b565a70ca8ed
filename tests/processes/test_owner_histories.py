"""Whatever workers do to the sessions they share, and wherever they are killed or paused: P1, P2 and P3 hold.

Three real processes, replaced as they die. A rule is one thing that happens to one of them, whatever its state: what
cannot happen then, does not. Failpoints stop or kill a worker between two steps of the protocol. The plain model is
`owner_history`.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import re
import select
import shutil
import time
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.support.machines import run_new, run_same
from tests.support.owner_history import BrokenPromiseError, History
from tests.support.owner_zygote import HANG_SECONDS, DiedError, ForkedWorker, StoppedError, Zygote
from tests.support.worlds import make_run_directory

from homing.directory.failpoints import POINTS
from homing.rundir import SESSION_OWNERS_DIR
from homing.types import SESSION, key_digest

SESSIONS = ("a", "b")
ACTIONS = ("kill", "stop", "stop", "cancel")
ASKS_FAIL = ("", "", "before", "after")
numbers = st.integers(0, 2)
sessions = st.sampled_from(SESSIONS)
actions = st.sampled_from(ACTIONS)
asks_fail = st.sampled_from(ASKS_FAIL)
wide = st.integers(0, 2**32 - 1)
GIVES = (
    ("restore", "give.fenced"),
    ("restore", "give.before_rename"),
    ("restore", "give.after_rename"),
    ("restore", "restore.asked"),
    ("rewrite_all", "give.after_rename"),
    ("rewrite_all", "restore.asked"),
)
"""What leads to which point when the session's owner lives: the owner comes to those of a give, the asker to the others."""
TAKES = (
    ("restore", "take.before_rename"),
    ("restore", "take.after_rename"),
    ("rewrite", "take.before_rename"),
    ("rewrite_all", "take.before_rename"),
    ("rewrite_all", "take.before_rename"),
    ("rewrite_all", "take.after_rename"),
    ("rewrite_all", "rewrite.taken"),
    ("compact", "compact.before_unlink"),
    ("compact", "lock.held"),
)
"""The same when its owner is dead."""
PENDING_SECONDS = 0.004
"""How long a restore that may have to wait is waited for; then it goes on while other things happen."""


@functools.cache
def zygote() -> Zygote:
    made = Zygote()
    atexit.register(made.close)
    return made


class OwnerHistories(RuleBasedStateMachine):
    """Three workers, two sessions."""

    answers: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.path = make_run_directory()
        self.journal = os.open(f"{self.path}.journal", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.read = 0
        self.rest = ""
        self.history = History()
        self.removed = False
        self.workers: list[ForkedWorker] = []
        self.requests: list[tuple[ForkedWorker, int]] = []
        self.pending: list[tuple[ForkedWorker, int]] = []
        self.count = 0
        for _ in range(3):
            self.workers.append(zygote().fork(self.path, self.journal))

    # --- telling workers ---

    def _number(self) -> int:
        self.count += 1
        return self.count

    def _call(self, worker: ForkedWorker, command: str, *arguments: object, may_wait: bool = False) -> object:
        """None: it is paused, or died of it, or has not answered yet."""
        if worker.stopped or worker not in self.workers:
            return None
        number = worker.send(command, *arguments)
        if may_wait and not worker.answered(number, PENDING_SECONDS) and not worker.stopped:
            self.pending.append((worker, number))
            return None
        try:
            answer = worker.answer(number)
        except StoppedError:
            self.pending.append((worker, number))
            return None
        except DiedError:
            self._replace(worker)
            return None
        finally:
            self._read_journal()
        assert not isinstance(answer, list) or answer[:1] != ["bug"], answer[1]
        type(self).answers[f"{command}: {answer if isinstance(answer, str) else 'done'}"] += 1
        return answer

    def _replace(self, dead: ForkedWorker) -> None:
        dead.close()
        self.requests = [each for each in self.requests if each[0] is not dead]
        self.pending = [each for each in self.pending if each[0] is not dead]
        if not self.removed:
            self.workers[self.workers.index(dead)] = zygote().fork(self.path, self.journal)

    def _hear(self) -> None:
        for worker in list(self.workers):
            worker.hear()
            if worker.dead:
                self._replace(worker)
        for worker, number in list(self.pending):
            if (worker, number) in self.pending and worker.answered(number, 0):
                self.pending.remove((worker, number))
                try:
                    answer = worker.answer(number)
                except DiedError:  # of a point that it has come to since it was last heard
                    self._replace(worker)
                    continue
                assert not isinstance(answer, list) or answer[:1] != ["bug"], answer[1]
                type(self).answers[f"later: {answer if isinstance(answer, str) else 'done'}"] += 1
        self._read_journal()

    def _read_journal(self) -> None:
        text = self.rest + os.pread(self.journal, 1 << 20, self.read).decode()
        self.read += len(text) - len(self.rest)
        *lines, self.rest = text.split("\n")
        for line in lines:
            self.history.feed(line)

    # --- what happens ---

    @rule(number=numbers, session=sessions)
    def start(self, number: int, session: str) -> None:
        worker, request = self.workers[number], self._number()
        if self._call(worker, "start", session, request, self._number()) == "inside":
            self.requests.append((worker, request))

    @rule(number=numbers, session=sessions)
    def request(self, number: int, session: str) -> None:
        worker, request = self.workers[number], self._number()
        if self._call(worker, "request", session, request) == "inside":
            self.requests.append((worker, request))

    @rule(which=st.integers(0, 5), ends=st.booleans())
    def leave(self, which: int, ends: bool) -> None:
        if self.requests:
            worker, request = self.requests[which % len(self.requests)]
            if not worker.stopped:
                self.requests.remove((worker, request))
                self._call(worker, "leave", request, ends)
                self._hear()

    @rule(number=numbers, session=sessions)
    def release(self, number: int, session: str) -> None:
        self._call(self.workers[number], "release", session)

    @rule(number=numbers, session=sessions, deadline=st.sampled_from([0.0, 20.0, 20.0]), fails=asks_fail)
    def restore(self, number: int, session: str, deadline: float, fails: str) -> None:
        self._call(self.workers[number], "restore", session, self._number(), deadline, fails, may_wait=True)

    @rule(number=numbers, session=sessions)
    def rewrite(self, number: int, session: str) -> None:
        self._call(self.workers[number], "rewrite", session, self._number())

    @rule(number=numbers, fails=asks_fail)
    def rewrite_all(self, number: int, fails: str) -> None:
        self._call(self.workers[number], "rewrite_all", list(SESSIONS), self._number(), fails, may_wait=True)

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        self._call(self.workers[number], "cancel")
        self._hear()

    @rule(number=numbers, limit=st.integers(0, 1))
    def compact(self, number: int, limit: int) -> None:
        self._call(self.workers[number], "compact", limit, may_wait=True)

    @rule(number=numbers, session=sessions)
    def disown(self, number: int, session: str) -> None:
        self._call(self.workers[number], "disown", session)

    @rule(number=numbers, point=st.sampled_from(sorted(POINTS)), action=actions)
    def arm(self, number: int, point: str, action: str) -> None:
        self._call(self.workers[number], "arm", point, action)

    # A point that is armed long before is hardly ever come to: the session's owner has to be the right one then.

    @rule(number=numbers, session=sessions, drawn=wide)
    def comes_to_a_point_of_a_give(self, number: int, session: str, drawn: int) -> None:
        chance = self._chance(drawn)
        (act, point), action, fails = chance.choice(GIVES), chance.choice(ACTIONS), chance.choice(ASKS_FAIL)
        owner = self._owner(session, number)
        if owner is None:
            return
        asker = next(each for each in (self.workers[number], *self.workers) if each is not owner)
        self._go_on(asker)
        if asker in self.workers:
            self._call(owner if point.startswith("give") else asker, "arm", point, action)
            self._act(asker, act, session, fails)
            # The record may name the asker already, whose restore has not heard: nothing is open there yet.
            self._act(asker, chance.choice(("", "request", "restore")), session)

    @rule(number=numbers, session=sessions, drawn=wide)
    def comes_to_a_point_of_a_take(self, number: int, session: str, drawn: int) -> None:
        chance = self._chance(drawn)
        (act, point), action = chance.choice(TAKES), chance.choice(ACTIONS)
        owner = self._owner(session, number)
        if owner is None:
            return
        self._kill(owner)
        self._go_on(self.workers[number])
        worker = self.workers[number]
        self._call(worker, "arm", point, action)
        self._act(worker, act, session)
        others = [each for each in self.workers if each is not worker and not each.stopped]
        if others and chance.random() < 0.5:  # if the first one stands under the lock, this has to find it held
            self._act(others[0], "restore", session)

    def _chance(self, drawn: int) -> random.Random:
        """Chances that are even: hypothesis draws again what it drew before, and would hardly go some of the ways."""
        return random.Random(drawn * 1_000_003 + self.count)

    def _owner(self, session: str, number: int) -> ForkedWorker | None:
        """Whoever has the session's state, and runs; this worker, if nobody has it, and it gets it now."""
        for _ in range(2):
            holder = self.history.sessions[session].holder if session in self.history.sessions else None
            for worker in self.workers:
                if worker.id == holder:
                    self._go_on(worker)
                    return worker if worker in self.workers else None
            self._act(self.workers[number], "restore", session)
        return None

    def _act(self, worker: ForkedWorker, act: str, session: str, fails: str = "") -> None:
        match act:
            case "restore":
                self._call(worker, act, session, self._number(), 20.0, fails, may_wait=True)
            case "rewrite":
                self._call(worker, act, session, self._number())
            case "rewrite_all":
                self._call(worker, act, list(SESSIONS), self._number(), fails, may_wait=True)
            case "compact":
                self._call(worker, act, 0, may_wait=True)
            case "request":
                request = self._number()
                if self._call(worker, act, session, request) == "inside":
                    self.requests.append((worker, request))

    @rule(number=numbers)
    def is_killed(self, number: int) -> None:
        self._kill(self.workers[number])

    def _kill(self, worker: ForkedWorker) -> None:
        # What it does between the line and its death would be a dead worker's.
        worker.stop_now()
        os.write(self.journal, f"dies {worker.id} - 0\n".encode())
        worker.kill()
        self._replace(worker)
        self._hear()

    @rule(number=numbers)
    def is_paused(self, number: int) -> None:
        self.workers[number].stop()

    @rule(number=numbers)
    def goes_on(self, number: int) -> None:
        self._go_on(self.workers[number])

    def _go_on(self, worker: ForkedWorker) -> None:
        if worker.stopped:
            worker.go_on()
            self._hear()

    # --- the end ---

    def teardown(self) -> None:
        try:
            self._hear()
            self._settles()
            self._can_be_restored()
            self._directory_goes()
        finally:
            for worker in self.workers:
                worker.close()
            os.close(self.journal)
            os.unlink(f"{self.path}.journal")
            shutil.rmtree(self.path, ignore_errors=True)

    def _settles(self) -> None:
        """P3: once everything has ended, records and memory agree, and nothing is counted, fenced or left."""
        waited_for: dict[ForkedWorker, int] = {}
        deadline = time.monotonic() + HANG_SECONDS
        while not all(worker in waited_for and worker.answered(waited_for[worker], 0) for worker in self.workers):
            assert time.monotonic() < deadline, f"some of {[worker.id for worker in self.workers]} hang"
            for worker in list(self.workers):
                if worker.stopped:  # it goes on, until it dies or stops at a failpoint once more
                    worker.go_on()
                if worker not in waited_for:
                    waited_for[worker] = worker.send("settle")
            select.select(self.workers, [], [], 0.05)
            self._hear()
        self._hear()
        assert not self.pending
        self.requests.clear()
        # A restore that nobody waits for any more goes on until it has looked once more: books that differ may still agree.
        while True:
            try:
                self._books_agree()
            except (AssertionError, FileNotFoundError):
                if time.monotonic() >= deadline:
                    raise
                select.select([], [], [], 0.02)
            else:
                return

    def _books_agree(self) -> None:
        records = {
            session: os.readlink(f"{self.path}/{SESSION_OWNERS_DIR}/{key_digest(SESSION, session)}").partition(".")[2]
            for session in SESSIONS
            if os.path.islink(f"{self.path}/{SESSION_OWNERS_DIR}/{key_digest(SESSION, session)}")
        }
        for worker in self.workers:
            books = worker.call("books")
            mine = sorted(session for session, owner in records.items() if owner == worker.id)
            assert books["mine"] == mine, f"P3: {worker.id} owns {books['mine']}, its records say {mine}"
            assert books["lost"] == 0, f"P1: sessions were taken from {worker.id}, which lives"
            assert f"{len(mine)} owned, 0 serving" in books["looks"]
            assert set(books["states"]) <= set(mine), "P3: it keeps the state of what it does not own"
        live = "|".join(worker.id for worker in self.workers)
        left = [name for name in os.listdir(self.path) if re.fullmatch(rf"\.({live})\..*", name)]
        assert not left, f"P3: {left} of live workers is left"

    def _can_be_restored(self) -> None:
        """Whatever happened, nobody has to wait for ever: a session can be restored at once, and served."""
        worker = self.workers[0]
        for session in SESSIONS:
            assert worker.call("restore", session, self._number(), 20.0) is None
            assert worker.call("request", session, self._number()) == "inside"
        self._read_journal()

    def _directory_goes(self) -> None:
        """Nobody adopts a session whose record cannot be seen any more."""
        self.removed = True
        shutil.rmtree(self.path)
        for worker in self.workers:
            for session in (*SESSIONS, "new"):
                assert worker.call("start", session, self._number(), self._number()) in {"DirectoryError", "elsewhere"}
                assert worker.call("request", session, self._number()) == "elsewhere"
        self._read_journal()


def test_a_state_opened_after_its_caller_was_told_of_a_failure_breaks_a_promise() -> None:
    history = History()
    for line in ("failed one - 3", "opened one a 4", "opened two b 3"):
        history.feed(line)
    with pytest.raises(BrokenPromiseError, match="let the state go"):
        history.feed("opened one a 3")


@pytest.mark.timeout(900)
def test_any_history_of_workers_keeps_the_promises() -> None:
    OwnerHistories.answers = answers = Counter[str]()
    run_same(OwnerHistories, 150, 50)
    for seen in ("start: inside", "restore: done", "rewrite_all: done", "restore: SessionMovingError"):
        assert answers[seen], f"no {seen!r} in {answers}"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_longer_history_of_workers_keeps_the_promises() -> None:
    run_new(OwnerHistories, 5_000, 80)
