"""The oracle sees every kind of violation, planted here one by one, and none in a history that is right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.soak.app import Journal, chained
from tests.soak.oracle import Call, Fate, History, Line, Outcome, Window, check, read_journals

ONE, TWO = 101, 202  # workers


class Story:
    """Writes a history as a server that keeps its promises would leave it; a test then spoils it."""

    def __init__(self) -> None:
        self.history = History(fates={ONE: Fate(ONE), TWO: Fate(TWO)}, idle_seconds=5.0)
        self.now = 0.0
        self.sequence = 0
        self.chain = ""
        self.numbers = 0

    def lines(self, pid: int, what: str, call: Call, incarnation: str) -> None:
        self.numbers += 1
        begin, effect, end = self.now + 0.1, self.now + 0.2, self.now + 0.3
        self.history.lines += [
            Line(pid, begin, "begin", self.numbers, call.session, call.token),
            Line(pid, effect, what, self.numbers, call.session, call.token, incarnation, self.sequence),
            Line(pid, end, "end", self.numbers, call.session, call.token),
        ]

    def call(self, what: str, pid: int | None, *, incarnation: str = "i", outcome: Outcome = Outcome.ANSWERED) -> Call:
        """One call that runs at this worker (at none: None), and is answered so."""
        call = Call(f"t{len(self.history.calls)}", "s", what, self.now, done=self.now + 0.4, outcome=outcome, owner=pid)
        self.history.calls.append(call)
        if pid is not None:
            if what == "start":
                self.sequence, self.chain = 0, ""
                self.lines(pid, "made", call, incarnation)
            elif what == "step":
                self.sequence += 1
                self.chain = chained(self.chain, call.token)
                self.lines(pid, "step", call, incarnation)
            elif what == "close":
                call.acts = False
                self.lines(pid, "closed", call, incarnation)
        if outcome is Outcome.ANSWERED:
            call.status, call.reply_token, call.pid = 200, call.token, pid
            call.incarnation, call.sequence, call.chain = incarnation, self.sequence, self.chain
        self.now += 1.0
        return call

    def ended(self, pid: int) -> None:
        """The worker is killed now."""
        self.history.fates[pid] = Fate(pid, doomed=self.now, killed=self.now, exited=self.now + 0.01)

    def broken(self) -> set[str]:
        self.history.lines.sort(key=lambda line: line.time)
        return {violation.promise for violation in check(self.history)}


@pytest.fixture
def story() -> Story:
    """A session of three steps at one worker."""
    story = Story()
    story.call("start", ONE)
    for _ in range(3):
        story.call("step", ONE)
    return story


def spoil(story: Story, index: int, **changes: object) -> None:
    story.history.lines[index] = replace(story.history.lines[index], **changes)  # type: ignore[arg-type]


def test_a_right_history_breaks_nothing(story: Story) -> None:
    story.call("close", ONE)
    closed = story.call("step", None, outcome=Outcome.CLOSED)
    closed.reply_token = closed.token
    gone = story.call("step", None, outcome=Outcome.REFUSED)
    gone.status, gone.code = 410, "session_gone"
    story.now += 1
    story.call("start", TWO, incarnation="j")
    story.call("step", TWO, incarnation="j")
    story.ended(TWO)
    for status, code in ((502, "owner_unreachable"), (504, "owner_timeout"), (None, None)):
        unknown = story.call("step", None, outcome=Outcome.UNKNOWN)
        unknown.status, unknown.code, unknown.sent = status, code, story.history.fates[TWO].doomed - 0.1
    assert story.broken() == set()


# --- P1 ---


def test_p1_intervals_of_one_session_at_two_workers(story: Story) -> None:
    last = story.history.lines[-2].time
    story.history.lines.append(Line(TWO, last, "begin", 1, "s", "other"))
    story.history.lines.append(Line(TWO, last + 0.01, "end", 1, "s", "other"))
    assert story.broken() == {"P1"}


def test_p1_an_interval_inside_a_long_one_that_began_before_others(story: Story) -> None:
    story.history.lines.append(Line(TWO, 0.0, "begin", 1, "s", "other"))
    story.history.lines.append(Line(TWO, 99.0, "end", 1, "s", "other"))
    assert story.broken() == {"P1"}


def test_p1_a_handler_that_never_ended_reaches_to_the_death_of_its_worker(story: Story) -> None:
    story.history.lines.append(Line(TWO, 0.0, "begin", 1, "s", "other"))
    story.history.fates[TWO] = Fate(TWO, doomed=0.05, killed=0.05, exited=1.5)
    assert story.broken() == set()
    story.history.fates[TWO] = Fate(TWO, doomed=0.15, killed=0.15, exited=0.16)
    assert story.broken() == {"P1"}


def test_p1_is_not_two_requests_at_one_worker(story: Story) -> None:
    story.history.lines.append(Line(ONE, 0.0, "begin", 99, "s", "other"))
    story.history.lines.append(Line(ONE, 99.0, "end", 99, "s", "other"))
    assert story.broken() == set()


# --- P2 ---


def test_p2_a_step_on_another_incarnation_than_the_last_start_made(story: Story) -> None:
    story.call("start", TWO, incarnation="j")
    story.sequence, story.chain = 3, story.history.calls[3].chain or ""
    story.call("step", ONE, incarnation="i")
    assert story.broken() == {"P2"}


def test_p2_a_changed_incarnation_that_no_start_asked_for(story: Story) -> None:
    made = story.call("step", None, outcome=Outcome.LEFT)
    story.history.lines.append(Line(ONE, story.now, "made", 99, "s", made.token, "j", 0))
    assert story.broken() == {"P2"}


def test_p2_a_step_without_any_start(story: Story) -> None:
    story.history.lines = [line for line in story.history.lines if line.what != "made"]
    story.history.calls[0].outcome = Outcome.LEFT
    assert story.broken() == {"P2"}


def test_p2_an_answer_from_a_fresh_state(story: Story) -> None:
    call = story.call("step", None, outcome=Outcome.CLOSED)
    call.reply_token = call.token
    story.history.calls.append(Call("c", "s", "close", 0.0, done=0.1, acts=False, outcome=Outcome.LEFT))
    story.history.lines.append(Line(TWO, story.now, "hollow", 99, "s", call.token))
    assert story.broken() == {"P2"}


def test_p2_is_not_a_request_beside_a_start_that_has_made_nothing_yet(story: Story) -> None:
    start = story.call("start", None, outcome=Outcome.LEFT)
    beside = story.call("step", None, outcome=Outcome.LEFT)
    at = story.now + 10
    story.history.lines.append(Line(TWO, at, "begin", 98, "s", start.token))
    story.history.lines.append(Line(TWO, at + 1, "hollow", 99, "s", beside.token))
    assert story.broken() == set()
    story.history.lines.append(Line(TWO, at + 0.5, "end", 98, "s", start.token))
    assert story.broken() == {"P2"}


def test_p2_a_log_that_lost_a_step(story: Story) -> None:
    story.history.calls[-1].chain = chained("", story.history.calls[-1].token)
    assert story.broken() == {"P2"}


# --- P4 ---


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.LEFT])
def test_p4_what_is_unknown_may_run_once_and_not_twice(story: Story, outcome: Outcome) -> None:
    story.ended(TWO)
    call = story.call("step", ONE, outcome=outcome)
    call.sent = story.history.fates[TWO].doomed
    assert story.broken() == set()
    story.sequence += 1
    story.lines(ONE, "step", call, "i")
    assert "P4" in story.broken()


def test_p4_a_request_that_was_handled_twice(story: Story) -> None:
    story.history.lines.append(Line(ONE, 99.0, "begin", 99, "s", story.history.calls[1].token))
    assert story.broken() == {"P4"}


def test_p4_an_answer_without_an_effect(story: Story) -> None:
    del story.history.lines[-3:]
    assert story.broken() == {"P4"}


@pytest.mark.parametrize(("status", "code"), [(503, "owner_busy"), (410, "session_gone")])
def test_p4_what_was_refused_must_not_have_run(story: Story, status: int, code: str) -> None:
    story.ended(ONE)
    call = story.call("step", None, outcome=Outcome.REFUSED)
    call.status, call.code, call.owner = status, code, ONE
    assert story.broken() == set()
    story.history.lines.append(Line(TWO, 99.0, "begin", 99, "s", call.token))
    assert story.broken() == {"P4"}


def test_p4_a_gap_in_the_counts_of_a_worker(story: Story) -> None:
    spoil(story, -2, sequence=4)
    story.history.calls[-1].sequence = 4
    assert "P4" in story.broken()


def test_p4_two_answers_with_one_number(story: Story) -> None:
    story.history.calls[-1].sequence = 2
    assert "P4" in story.broken()


def test_p4_a_gap_that_the_clients_see_and_nobody_asked_for(story: Story) -> None:
    del story.history.calls[2]
    assert "P4" in story.broken()


# --- P5 ---


def test_p5_another_requests_answer(story: Story) -> None:
    story.history.calls[-1].reply_token = story.history.calls[-2].token
    assert story.broken() == {"P5"}


def test_p5_an_answer_that_is_not_what_the_worker_did(story: Story) -> None:
    story.history.calls[-1].pid = TWO
    assert story.broken() == {"P5"}


# --- the table of answers ---


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (Outcome.WRONG, 500, None),
        (Outcome.REFUSED, 503, "directory_unavailable"),
        (Outcome.REFUSED, 503, "malformed_record"),
        (Outcome.REFUSED, 500, "session_not_recorded"),
        (Outcome.UNKNOWN, 502, "something_else"),
    ],
)
def test_answers_that_no_row_allows(story: Story, outcome: Outcome, status: int, code: str | None) -> None:
    story.ended(ONE)
    call = story.call("step", None, outcome=outcome)
    call.status, call.code = status, code
    assert story.broken() == {"answers"}


def test_answers_gone_while_its_worker_lives(story: Story) -> None:
    call = story.call("step", None, outcome=Outcome.REFUSED)
    call.status, call.code, call.owner = 410, "session_gone", ONE
    assert story.broken() == {"answers"}
    call.done = story.history.lines[-1].time + 5.0  # idle for so long
    assert story.broken() == set()
    spoil(story, -1, time=call.done - 4.0)  # no: its last request ended only then
    assert story.broken() == {"answers"}


def test_answers_cut_off_while_no_worker_ended(story: Story) -> None:
    call = story.call("step", ONE, outcome=Outcome.UNKNOWN)
    assert story.broken() == {"answers"}
    story.history.fates[TWO].doomed = call.sent
    assert story.broken() == set()


def test_answers_a_message_is_cut_off_long_after_its_worker_ended(story: Story) -> None:
    call = story.call("message", None, outcome=Outcome.UNKNOWN)
    call.sent, call.owner = story.now + 50.0, TWO
    call.done = call.sent + 0.1
    assert story.broken() == {"answers"}
    story.ended(TWO)
    assert story.broken() == set()


def test_answers_what_could_not_be_looked_up_or_recorded_only_while_there_is_no_room(story: Story) -> None:
    refused = story.call("start", None, outcome=Outcome.REFUSED)
    refused.status, refused.code = 503, "directory_unavailable"
    unrecorded = story.call("new", None, outcome=Outcome.UNRECORDED)
    unrecorded.session, story.sequence = "t", 0
    story.lines(ONE, "made", unrecorded, "k")
    assert story.broken() == {"answers"}
    story.history.windows.append(Window("room", refused.sent, unrecorded.done))
    assert story.broken() == set()


def test_answers_who_lives_could_not_be_told_while_a_worker_had_no_descriptors(story: Story) -> None:
    refused = story.call("start", None, outcome=Outcome.REFUSED)
    refused.status, refused.code = 503, "directory_unavailable"
    assert story.broken() == {"answers"}
    story.history.windows.append(Window("descriptors", refused.sent, refused.done, TWO))
    assert story.broken() == set()


def test_p4_what_is_said_to_have_run_has_run(story: Story) -> None:
    story.ended(TWO)
    raised = story.call("raises", None, outcome=Outcome.RAISED)
    assert story.broken() == {"P4"}
    story.sequence += 1
    story.lines(ONE, "step", raised, "i")
    assert story.broken() == set()


def test_p2_an_answer_while_the_record_named_nobody(story: Story) -> None:
    call = story.history.calls[-1]
    story.history.windows.append(Window("record, surely", call.sent, call.done, "s"))
    assert story.broken() == {"P2"}


def test_answers_malformed_only_where_the_record_of_that_session_was(story: Story) -> None:
    call = story.call("step", None, outcome=Outcome.REFUSED)
    call.status, call.code = 503, "malformed_record"
    story.history.windows.append(Window("record", call.sent, call.done, "another"))
    assert story.broken() == {"answers"}
    story.history.windows.append(Window("record", call.sent, call.done, "s"))
    assert story.broken() == set()


def test_answers_cut_off_while_a_worker_had_no_descriptors(story: Story) -> None:
    call = story.call("step", ONE, outcome=Outcome.UNKNOWN)
    assert story.broken() == {"answers"}
    story.history.windows.append(Window("descriptors", call.sent, call.done, TWO))
    assert story.broken() == set()


def test_answers_a_worker_that_could_not_start_for_want_of_room_and_served_nothing(story: Story) -> None:
    story.history.fates[3] = Fate(3, born=10.0, exited=11.0)
    assert story.broken() == {"answers"}
    story.history.windows.append(Window("room", 9.5, 10.5))
    assert story.broken() == set()
    story.history.lines.append(Line(3, 10.9, "begin", 1, "other", "token"))
    assert story.broken() == {"answers"}


def test_answers_closed_though_nobody_closed_it(story: Story) -> None:
    call = story.call("step", None, outcome=Outcome.CLOSED)
    call.reply_token = call.token
    assert story.broken() == {"answers"}


def test_answers_a_worker_that_ended_by_itself(story: Story) -> None:
    story.history.fates[TWO] = Fate(TWO, exited=1.0)
    assert story.broken() == {"answers"}


# --- journals ---


def test_a_journal_is_read_as_it_was_written_but_for_a_line_that_was_cut(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.write("begin", 0, "s", "t", "step")
    journal.write("step", 0, "s", "t", "i", 1)
    journal.close()
    (path,) = tmp_path.glob("*.journal")
    with path.open("ab") as cut:
        cut.write(b'[1.0, "end", 0')
    begin, step = read_journals(tmp_path)
    assert (begin.what, begin.session, begin.token, begin.incarnation) == ("begin", "s", "t", "")
    assert (step.what, step.incarnation, step.sequence) == ("step", "i", 1)
    assert 0 < begin.time <= step.time < math.inf
