"""When is a worker asked for a sign of life, and when has it failed to give one?

The invariant: at most one ping per `interval_seconds`, however often the supervisor looks. An answer wakes the
supervisor, so a ping for each look would be answered by a look for each ping, and both processes would do nothing else.

A process that was stopped together with its workers (`docker pause`, Ctrl-Z in a terminal) finds every deadline past when it goes
on, though nobody has had the time to keep one. So deadlines are on the clock of the supervisor's loop, which stands still while
the loop does.

Not here: how a ping travels (`supervisor.py`, `worker.py`).
"""

from __future__ import annotations

from homing.clock import SYSTEM_CLOCK, Clock


class LoopClock:
    """The clock of a loop that turns every `turn_seconds` or more often: a turn that comes later counts as one that came then.

    Within a turn no time passes, so that whoever was stopped in the middle of one hears others first before it finds them late.
    """

    def __init__(self, turn_seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._turned_at = clock.monotonic()
        self._now = self._turned_at

    def turn(self) -> None:
        """A turn begins."""
        before, self._turned_at = self._turned_at, self._clock.monotonic()
        self._now += min(self._turned_at - before, self._turn_seconds)

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._clock.wall()


class Heartbeat:
    """The pings of one worker, as its supervisor counts them.

    Args:
        interval_seconds: The least time from one ping to the next.
    """

    def __init__(self, interval_seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._sent_at: float | None = None
        self._answered = True

    def due(self) -> bool:
        """Whether to ping now: the last ping was answered, and is long enough ago."""
        if not self._answered:
            return False
        return self._sent_at is None or self._clock.monotonic() - self._sent_at >= self._interval_seconds

    @property
    def waiting(self) -> bool:
        """Whether the last ping has not been answered yet."""
        return not self._answered

    def sent(self) -> None:
        """A ping is on its way."""
        self._sent_at = self._clock.monotonic()
        self._answered = False

    def heard(self) -> None:
        """The worker said something, whatever it was."""
        self._answered = True

    def missed(self, timeout_seconds: float) -> bool:
        """Whether the last ping has gone unanswered for longer than that."""
        if self._answered or self._sent_at is None:
            return False
        return self._clock.monotonic() - self._sent_at > timeout_seconds
