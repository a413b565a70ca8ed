"""Was a promise broken, anywhere in what the clients saw and the workers wrote down?

Plain functions over one `History`. Each violation names the promise: P1 two workers at once, P2 state that is not the
session's, P4 run twice, or although the reply said that nothing ran, or not though it said so, P5 an answer that is not
the request's own, *answers* a reply that is not in the table of `docs/design/protocol.md`, or without the cause that its row names.

What is unknown stays so: a request whose client was answered 502 or 504, was cut off, or left, may have run once or not.
`test_oracle.py` feeds each check a planted violation.

Not here: where a history comes from (`load`, `app`, `faults`).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from tests.soak.app import chained


class Outcome(Enum):
    """What a call came to, as its client saw it."""

    ANSWERED = "answered"
    """By the app, from the session's state."""
    CLOSED = "closed"
    """By the app: the session is closed, or it has none such."""
    REFUSED = "refused"
    """By homing: nothing ran."""
    RAISED = "raised"
    """By the server, since the app raised: it ran."""
    UNRECORDED = "unrecorded"
    """By homing: it ran, and the session that it made cannot be used."""
    UNKNOWN = "unknown"
    """502, 504, or the connection ended: it may have run."""
    LEFT = "left"
    """The client went away: it may have run."""
    WRONG = "wrong"
    """Something that no row of the table of answers allows; `why` says what."""


@dataclass(slots=True, eq=False)
class Call:
    """One request (or one message of a WebSocket), from its client's side. Times are on CLOCK_MONOTONIC.

    Attributes:
        token: Its own, and no other call's.
        alone: No other client uses the session.
        acts: It makes or steps the session: a `made` or `step` line of its token says that it ran.
        owner: The pid that answered for the session before, if known.
        reply_token: The token that the reply said; the request's own, if all is well.
    """

    token: str
    session: str
    what: str
    sent: float
    alone: bool = True
    acts: bool = True
    done: float = math.inf
    outcome: Outcome = Outcome.WRONG
    status: int | None = None
    code: str | None = None
    why: str = ""
    owner: int | None = None
    pid: int | None = None
    worker: str | None = None
    incarnation: str | None = None
    sequence: int = 0
    chain: str | None = None
    reply_token: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a worker's journal."""

    pid: int
    time: float
    what: str
    number: int
    session: str
    token: str
    incarnation: str = ""
    sequence: int = 0


@dataclass(slots=True)
class Fate:
    """What became of one worker.

    Attributes:
        born: When it was first seen.
        doomed: When the first signal that ends it was sent, or it had drained: a restart, or the number of workers, made it leave.
        killed: When SIGKILL was sent: nothing of it runs later.
        exited: When it was gone.
    """

    pid: int
    born: float = 0.0
    doomed: float = math.inf
    killed: float = math.inf
    exited: float = math.inf


@dataclass(frozen=True, slots=True)
class Window:
    """A while in which something was wrong on purpose.

    Attributes:
        what: `room`: no owner record could be made. `descriptors`: the worker had no more of them. `record`: the
            session's record may have been garbage; `record, surely`: it was.
        of: The worker's pid, or the session; None for all.
    """

    what: str
    begin: float
    end: float = math.inf
    of: int | str | None = None

    def meets(self, begin: float, end: float) -> bool:
        return self.begin <= end + CLOCK_SLACK_SECONDS and begin <= self.end + CLOCK_SLACK_SECONDS


@dataclass
class History:
    """One soak, whole."""

    calls: list[Call] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    fates: dict[int, Fate] = field(default_factory=dict)
    idle_seconds: float = math.inf
    windows: list[Window] = field(default_factory=list)

    def wrong(self, what: str, begin: float, end: float, of: int | str | None = None) -> bool:
        """Whether that was wrong at any time between the two."""
        return any(
            window.what == what and (of is None or window.of == of) and window.meets(begin, end)
            for window in self.windows
        )


@dataclass(frozen=True, slots=True)
class Violation:
    promise: str
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


REFUSALS: Final = {
    410: frozenset({"session_gone"}),
    503: frozenset({"owner_busy", "session_moving", "directory_unavailable", "malformed_record"}),
}
UNKNOWNS: Final = {502: frozenset({"owner_unreachable"}), 504: frozenset({"owner_timeout"})}

CLOCK_SLACK_SECONDS: Final = 0.05
CAUSE_SECONDS: Final = 1.0
"""How long after a fault is over its effects may be met."""


def check(history: History) -> list[Violation]:
    """Every violation in the history; none if all promises were kept."""
    return [
        *one_owner(history),
        *own_state(history),
        *run_once(history),
        *own_answers(history),
        *answers_of_the_table(history),
    ]


# --- P1 ---


@dataclass(frozen=True, slots=True)
class Interval:
    session: str
    pid: int
    begin: float
    end: float


def intervals(history: History) -> list[Interval]:
    """When handlers ran. One that a killed worker never ended, ended with the worker."""
    begun: dict[tuple[int, int], Line] = {}
    found = []
    last: dict[int, float] = {}
    for line in history.lines:
        last[line.pid] = max(last.get(line.pid, 0.0), line.time)
        if line.what == "begin":
            begun[line.pid, line.number] = line
        elif line.what == "end" and (begin := begun.pop((line.pid, line.number), None)) is not None:
            found.append(Interval(begin.session, begin.pid, begin.time, line.time))
    for begin in begun.values():
        fate = history.fates.get(begin.pid, Fate(begin.pid))
        end = fate.killed if fate.killed < math.inf else fate.exited
        found.append(Interval(begin.session, begin.pid, begin.time, max(end, begin.time)))
    return found


def one_owner(history: History) -> Iterator[Violation]:
    """P1: intervals of one session at two workers never overlap."""
    by_session: dict[str, list[Interval]] = defaultdict(list)
    for interval in intervals(history):
        if interval.session:
            by_session[interval.session].append(interval)
    for session, found in by_session.items():
        found.sort(key=lambda each: each.begin)
        # The interval of each worker that reaches furthest, so far.
        reach: dict[int, Interval] = {}
        for interval in found:
            for other in reach.values():
                if other.pid != interval.pid and other.end > interval.begin:
                    yield Violation(
                        "P1",
                        f"session {session} ran at worker {other.pid} from {other.begin:.6f} to {other.end:.6f}, and at "
                        f"worker {interval.pid} from {interval.begin:.6f} to {interval.end:.6f}",
                    )
            before = reach.get(interval.pid)
            if before is None or before.end < interval.end:
                reach[interval.pid] = interval


# --- P2 ---


def own_state(history: History) -> Iterator[Violation]:
    """P2: a step ran on the state that the session's last start had made, and nothing ran where there was none."""
    made: dict[str, list[Line]] = defaultdict(list)
    starting: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    tokens_of_starts: dict[tuple[int, int], Line] = {}
    starts = {call.token for call in history.calls if call.what in ("start", "new")}
    for line in history.lines:
        if line.what == "made":
            made[line.session].append(line)
            if line.token not in starts:
                yield Violation("P2", f"session {line.session} has an incarnation that no start asked for")
        elif line.what == "begin" and line.token in starts:
            tokens_of_starts[line.pid, line.number] = line
        elif line.what == "end" and (begin := tokens_of_starts.pop((line.pid, line.number), None)) is not None:
            starting[line.pid, line.session].append((begin.time, line.time))
    for begin in tokens_of_starts.values():
        starting[begin.pid, begin.session].append((begin.time, math.inf))
    for lines in made.values():
        lines.sort(key=lambda each: each.time)
    for line in history.lines:
        if line.what == "step":
            before = [each for each in made[line.session] if each.time <= line.time]
            if not before or before[-1].incarnation != line.incarnation:
                of = "no start" if not before else f"worker {before[-1].pid} has made {before[-1].incarnation}"
                yield Violation(
                    "P2",
                    f"a step of session {line.session} at worker {line.pid} ran on incarnation {line.incarnation}, "
                    f"though {of} before it",
                )
            elif before[-1].pid != line.pid:
                yield Violation("P2", f"incarnation {line.incarnation} was made at another worker than {line.pid}")
        elif line.what == "hollow":
            # A start that is reading its body has not made the state yet; that is the app's own to answer.
            under_way = starting[line.pid, line.session]
            if not any(begin <= line.time <= end for begin, end in under_way):
                yield Violation(
                    "P2", f"a request of session {line.session} ran at worker {line.pid}, which has no state of it"
                )


# --- P4 ---


def run_once(history: History) -> Iterator[Violation]:
    """P4: what was answered ran once, what was refused did not run, and what is unknown ran once at most."""
    ran = Counter(line.token for line in history.lines if line.what in ("step", "made"))
    begun = Counter(line.token for line in history.lines if line.what == "begin")
    for call in history.calls:
        times = ran[call.token]
        if times > 1:
            yield Violation("P4", f"{call.what} {call.token} of session {call.session} ran {times} times")
        if begun[call.token] > 1:
            yield Violation("P4", f"{call.what} {call.token} was handled {begun[call.token]} times")
        if call.outcome is Outcome.ANSWERED and call.acts and not times:
            yield Violation("P4", f"{call.what} {call.token} was answered and never ran")
        if call.outcome in (Outcome.RAISED, Outcome.UNRECORDED) and not times:
            yield Violation("P4", f"{call.what} {call.token} was answered {call.status}: it ran. It did not")
        if call.outcome is Outcome.REFUSED and (times or begun[call.token]):
            yield Violation(
                "P4", f"{call.what} {call.token} ran, and was answered {call.status} {call.code}: nothing ran"
            )
    yield from sequences(history)


def sequences(history: History) -> Iterator[Violation]:
    """P4: each incarnation counts 1, 2, 3, …, and the clients saw each number once, with no gap but for the unknown."""
    steps: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in history.lines:
        if line.what == "step":
            steps[line.session, line.incarnation].append(line)
    for (session, incarnation), lines in steps.items():
        numbers = [line.sequence for line in lines]
        if numbers != list(range(1, len(lines) + 1)):
            yield Violation("P4", f"session {session}, incarnation {incarnation} counted {numbers}")
    seen: dict[tuple[str, str], list[Call]] = defaultdict(list)
    unknown: Counter[str] = Counter()
    for call in history.calls:
        if call.outcome is Outcome.ANSWERED and call.acts and call.what not in ("start", "new") and call.incarnation:
            seen[call.session, call.incarnation].append(call)
        elif call.outcome in (Outcome.UNKNOWN, Outcome.LEFT, Outcome.RAISED):
            unknown[call.session] += 1
    for (session, incarnation), calls in seen.items():
        numbers = [call.sequence for call in calls]
        if len(set(numbers)) != len(numbers):
            yield Violation("P4", f"session {session}: two answers have one sequence number: {sorted(numbers)}")
        missing = max(numbers) - len(set(numbers)) - unknown[session]
        if missing > 0:
            yield Violation(
                "P4", f"session {session}, incarnation {incarnation}: {missing} steps that nobody asked for"
            )


# --- P5 ---


def own_answers(history: History) -> Iterator[Violation]:
    """P5: each answer is the answer to its own request, and says what the worker that wrote it did."""
    effects = {line.token: line for line in history.lines if line.what in ("step", "made")}
    chains = dict(_chains(history.lines))
    for call in history.calls:
        if call.outcome not in (Outcome.ANSWERED, Outcome.CLOSED):
            continue
        if call.reply_token != call.token:
            yield Violation("P5", f"{call.what} {call.token} got the answer to {call.reply_token}")
            continue
        effect = effects.get(call.token)
        if effect is None or not call.acts:
            continue
        said = (call.pid, call.incarnation, call.sequence)
        done = (effect.pid, effect.incarnation, effect.sequence)
        if said != done:
            yield Violation("P5", f"{call.what} {call.token} was answered {said}, and the worker did {done}")
        elif effect.what == "step" and call.chain != chains[call.token]:
            yield Violation("P2", f"{call.what} {call.token}: the session's log is not what its steps made")


def _chains(lines: Iterable[Line]) -> Iterator[tuple[str, str]]:
    chains: dict[str, str] = {}
    for line in lines:
        if line.what == "step":
            chain = chains[line.incarnation] = chained(chains.get(line.incarnation, ""), line.token)
            yield line.token, chain


# --- the table of answers ---


def answers_of_the_table(history: History) -> Iterator[Violation]:
    """Each answer is a row of the table, and what its row says was so."""
    closing: dict[str, float] = {}
    used: dict[str, list[Interval]] = defaultdict(list)
    for interval in intervals(history):
        used[interval.session].append(interval)
    for call in sorted(history.calls, key=lambda each: each.sent):
        name = f"{call.what} {call.token} of session {call.session}"
        if call.what == "close":
            closing.setdefault(call.session, call.sent)
        match call.outcome:
            case Outcome.WRONG:
                yield Violation("answers", f"{name}: {call.status} {call.code} {call.why}")
            case Outcome.REFUSED:
                if call.code not in REFUSALS.get(call.status or 0, ()):
                    yield Violation("answers", f"{name}: {call.status} {call.code}")
                elif not _may_be_unavailable(history, call):
                    yield Violation(
                        "answers",
                        f"{name}: {call.status} {call.code}, and nothing was wrong: sent {call.sent:.3f}, done "
                        f"{call.done:.3f}; {_around(history, call)}",
                    )
                elif call.status == 410 and call.alone and not _may_be_gone(history, call, closing, used):
                    yield Violation(
                        "answers",
                        f"{name} is gone, though its worker {call.owner} lives and it was in use: sent {call.sent:.3f}, "
                        f"done {call.done:.3f}; {_around(history, call)}",
                    )
            case Outcome.UNKNOWN:
                if call.status is not None and call.code not in UNKNOWNS.get(call.status, ()):
                    yield Violation("answers", f"{name}: {call.status} {call.code}")
                elif (
                    call.status != 504
                    and not _a_worker_ended(history, call)
                    # A connection is accepted, and closed, before its request is sent.
                    and not history.wrong("descriptors", call.sent - CAUSE_SECONDS, call.done)
                ):
                    yield Violation(
                        "answers",
                        f"{name} was cut off ({call.why}), though no worker ended meanwhile: sent {call.sent:.3f}, "
                        f"done {call.done:.3f}, by worker {call.owner}; {_around(history, call)}",
                    )
            case Outcome.CLOSED:
                if call.alone and closing.get(call.session, math.inf) > call.done:
                    yield Violation("answers", f"{name} was answered as closed, which nobody had asked for")
            case Outcome.UNRECORDED:
                if call.what != "new" or not history.wrong("room", call.sent, call.done):
                    yield Violation("answers", f"{name} could not be recorded, and nothing was wrong")
            case Outcome.ANSWERED | Outcome.LEFT | Outcome.RAISED:
                if call.outcome is Outcome.ANSWERED and _inside_garbage(history, call):
                    yield Violation("P2", f"{name} was answered though its record names nobody")
    served = {line.pid for line in history.lines if line.what == "begin"}
    for fate in history.fates.values():
        if fate.exited < math.inf and fate.doomed > fate.exited + CLOCK_SLACK_SECONDS:
            # One that finds no room for its own files as it starts, exits, and the next one is tried later.
            if fate.pid not in served and history.wrong("room", fate.born - CAUSE_SECONDS, fate.exited):
                continue
            yield Violation("answers", f"worker {fate.pid} ended, and nobody had ended it: {fate}")


AROUND_SECONDS: Final = 10.0


def _around(history: History, call: Call) -> str:
    """What was done to workers, and what was wrong, at about the time of a call."""
    begin, end = call.sent - AROUND_SECONDS, call.done + AROUND_SECONDS
    near = [
        str(fate)
        for fate in history.fates.values()
        if any(begin <= at <= end for at in (fate.born, fate.doomed, fate.killed, fate.exited))
    ]
    near += [str(window) for window in history.windows if window.meets(begin, end)]
    return "around it: " + "; ".join(near)


def _may_be_unavailable(history: History, call: Call) -> bool:
    if call.code == "directory_unavailable":
        # A look at who else lives takes a descriptor.
        return any(history.wrong(what, call.sent, call.done) for what in ("room", "descriptors"))
    if call.code == "malformed_record":
        return history.wrong("record", call.sent, call.done, call.session)
    return True


def _inside_garbage(history: History, call: Call) -> bool:
    return any(
        window.what == "record, surely"
        and window.of == call.session
        and window.begin <= call.sent
        and call.done <= window.end
        for window in history.windows
    )


def _may_be_gone(history: History, call: Call, closing: dict[str, float], used: dict[str, list[Interval]]) -> bool:
    if closing.get(call.session, math.inf) <= call.done:
        return True
    if call.owner is None:  # a start that nobody has answered: whose session it would be is not known
        return _a_worker_ended_before(history, call)
    fate = history.fates.get(call.owner)
    if fate is not None and fate.doomed <= call.done:
        return True
    # A request that is being served counts as use, until its end.
    last = max((each.end for each in used[call.session] if each.begin <= call.done), default=-math.inf)
    return call.done - last >= history.idle_seconds - CLOCK_SLACK_SECONDS


def _a_worker_ended(history: History, call: Call) -> bool:
    """A worker was told to end before the call was over, and had not long been gone when it was sent.

    A WebSocket's message may be sent long after: the worker that has accepted the connection may stand still meanwhile.
    """
    if call.what == "message" and call.owner is not None and history.fates.get(call.owner, Fate(0)).doomed <= call.done:
        return True
    return any(
        fate.doomed <= call.done + CLOCK_SLACK_SECONDS and fate.exited >= call.sent - 1.0
        for fate in history.fates.values()
    )


def _a_worker_ended_before(history: History, call: Call) -> bool:
    return any(fate.doomed <= call.done for fate in history.fates.values())


# --- journals ---


def read_journals(directory: Path) -> list[Line]:
    """All lines of all journals, in the order of time. A line that a killed worker could not finish does not count."""
    lines: list[Line] = []
    for path in directory.glob("*.journal"):
        pid = int(path.name.partition("-")[0])
        for text in path.read_bytes().split(b"\n")[:-1]:
            time, what, number, session, token, *more = json.loads(text)
            kept = more if what in ("made", "step", "closed") else ["", 0]
            lines.append(Line(pid, time, what, number, session, token, *kept))
    lines.sort(key=lambda line: line.time)
    return lines
