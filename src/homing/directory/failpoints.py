"""Named points where a test stops, kills or watches a worker between two steps of the protocol.

Off, which is always outside tests, a point costs one test for None. A test in the same process sets an action with
`failpoint(name, action)`; a process started by a test reads `HOMING_FAILPOINTS`, such as `acquire.after_symlink=kill`
or `lock.held=stop@3,give.before_rename=kill`: `kill` and `stop` send SIGKILL or SIGSTOP to the process itself, `@3` at
the third time only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

FAILPOINTS_ENV: Final = "HOMING_FAILPOINTS"

POINTS: Final = frozenset(
    {
        "acquire.after_symlink",  # the record is there, memory does not know yet
        "release.after_unlink",  # the record is gone, memory does not know yet
        "give.fenced",  # new requests get 503, those in flight go on
        "give.before_rename",  # forgotten and dropped, the record still names this worker
        "give.after_rename",  # the record names the asker, who has not heard
        "take.before_rename",  # a dead worker's record, under the lock
        "take.after_rename",
        "restore.asked",  # the ask has ended, the asker has not looked again
        "rewrite.taken",  # in the thread: one record taken, memory does not know yet
        "compact.before_unlink",  # in the thread: under the lock
        "lock.held",
    }
)

Action = Callable[[], None]

on: dict[str, Action] | None = None
"""The actions by point; None where there are none: `if failpoints.on is not None: failpoints.hit("lock.held")`."""


def hit(name: str) -> None:
    """Reach a point: do what a test set for it, if anything."""
    if on is not None and (action := on.get(name)) is not None:
        action()


@contextmanager
def failpoint(name: str, action: Action) -> Iterator[None]:
    """Do `action` whenever this process reaches the point, until the end of the block."""
    global on  # noqa: PLW0603 - the points are the process's, as a debugger's breakpoints are
    _check(name)
    before = on
    on = {**(before or {}), name: action}
    try:
        yield
    finally:
        on = before


def _check(name: str) -> None:
    if name not in POINTS:
        raise ValueError(f"no failpoint {name!r}; there are {', '.join(sorted(POINTS))}")


def _signal(number: signal.Signals, at: int) -> Action:
    seen = 0

    def act() -> None:
        nonlocal seen
        seen += 1
        if at in (0, seen):
            os.kill(os.getpid(), number)

    return act


def from_environment(text: str) -> dict[str, Action] | None:
    """The actions that `HOMING_FAILPOINTS` asks for; None for an empty text.

    Raises:
        ValueError: it names no such point or action.
    """
    actions: dict[str, Action] = {}
    for part in filter(None, text.split(",")):
        name, _, action = part.partition("=")
        what, _, at = action.partition("@")
        _check(name)
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        if what not in signals:
            raise ValueError(f'a failpoint\'s action is "kill" or "stop", not {what!r}')
        actions[name] = _signal(signals[what], int(at or 0))
    return actions or None


on = from_environment(os.environ.get(FAILPOINTS_ENV, ""))
