"""What several workers did to the sessions they share, as one history, and whether it keeps the promises.

Each worker appends a line to one file in the very block in which something happens to a session (`O_APPEND`, so the lines
of all processes have one order). `History` reads them and keeps a plain model: who has each session's state, which
requests are inside. It knows nothing of records, locks or fences.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

BEGAN, OPENED, DROPPED, ENDED = "began", "opened", "dropped", "ended"
ENTERED, LEFT, DIES, COMPACTS, COMPACTED = "entered", "left", "dies", "compacts", "compacted"
FAILED = "failed"


class BrokenPromiseError(AssertionError):
    """P1, P2 or P3 was broken, with the last lines before that."""


class Journal:
    """The file's writing end: one write for each line."""

    def __init__(self, fd: int, worker: str) -> None:
        self._fd = fd
        self._worker = worker

    def __call__(self, what: str, session: str = "-", token: int = 0) -> None:
        os.write(self._fd, f"{what} {self._worker} {session} {token}\n".encode())


@dataclass
class _Session:
    """Attributes:
    holder, token: The worker that has the session's state, and which state that is; None: nobody has one.
    inside: Requests that run, by worker.
    forgotten: Its dead holder's record may have been removed beyond the limit: then it may begin anew.
    """

    holder: str | None = None
    token: int = 0
    inside: Counter[str] = field(default_factory=Counter)
    forgotten: bool = False


class History:
    """The lines so far, and the model of them. `feed` raises BrokenPromiseError at the first line that breaks one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sessions: dict[str, _Session] = {}
        self.dying: set[str] = set()
        self.failed: set[tuple[str, int]] = set()
        self._compacting = 0
        self.counts: Counter[str] = Counter()

    def feed(self, line: str) -> None:
        self.lines.append(line)
        what, worker, session_id, token = line.split()
        self.counts[what] += 1
        session = self.sessions.setdefault(session_id, _Session())
        match what:
            case "dies":
                self.dying.add(worker)
                self._forget_the_dead()
            case "compacts":
                self._compacting += 1
                self._forget_the_dead()
            case "compacted":
                self._compacting -= 1
            case "failed":
                self.failed.add((worker, int(token)))
            case "began" | "opened":
                self._begins(what, session, worker, int(token))
            case "dropped" | "ended":
                self._alone(session, worker, "P1: it lets go of a session that another worker runs")
                self._hold(session.holder == worker, f"P2: it has no state of it to let go ({session.holder} has)")
                session.holder, session.token = None, 0
            case "entered":
                self._alone(session, worker, "P1: another worker runs the session")
                self._hold(
                    session.holder == worker and session.token == int(token),
                    f"P2: that is not the session's state ({session.token} at {session.holder} is)",
                )
                session.inside[worker] += 1
            case "left":
                session.inside[worker] -= 1
                self._hold(session.inside[worker] >= 0, "it left more often than it entered")
            case _:
                raise ValueError(line)

    def _begins(self, what: str, session: _Session, worker: str, token: int) -> None:
        self._alone(session, worker, "P1: another worker runs the session")
        if what == OPENED:
            self._hold(not session.inside[worker], "P2: its state is replaced under a request")
            self._hold((worker, token) not in self.failed, "P3: its caller was told of a failure, and let the state go")
        if session.holder is not None and session.holder != worker:
            self._hold(session.holder in self.dying, f"P1: {session.holder}, which lives, has it")
            if what == BEGAN:
                self._hold(session.forgotten, "P2: its state was lost with its worker, and nobody is told")
        session.holder, session.token, session.forgotten = worker, token, False

    def _alone(self, session: _Session, worker: str, broken: str) -> None:
        others = [each for each, count in session.inside.items() if count and each != worker and each not in self.dying]
        self._hold(not others and worker not in self.dying, f"{broken} {others}")

    def _forget_the_dead(self) -> None:
        if self._compacting:
            for session in self.sessions.values():
                session.forgotten = session.forgotten or session.holder in self.dying

    def _hold(self, condition: bool, broken: str) -> None:
        if not condition:
            last = "\n".join(self.lines[-30:])
            raise BrokenPromiseError(f"{broken}, at the last of these lines:\n{last}")
