"""What must hold of every session's replies, whatever was killed meanwhile.

- A step's reward is the number of steps that were acknowledged (fakes): none is lost, none is done twice.
- An unmasked verdict is what the last step showed: no fault is scored as a reward.
- There is one verdict: asked again, it is the same to the letter.
- Every failure is of the closed set of kinds, and every call is back in its time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from homing.web.errors import ERROR_KINDS

TRANSPORT = "transport"
"""The connection broke: the worker that had accepted it died."""


@dataclass
class Oracle:
    """Attributes:
    violations: What must not be, in words; empty after a good run.
    calls, outcomes: How many there were of each.
    slowest: Seconds over its limit of the slowest call of each kind, as measured; negative: within.
    late: Calls that were back after their limit as measured, whatever the machine did.
    """

    slack_seconds: float = 0.25
    violations: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    def violated(self, what: str) -> None:
        self.violations.append(what)

    def returned(
        self, call: str, seconds: float, limit_seconds: float, outcome: str, machine_seconds: float = 0.0
    ) -> None:
        """One call is back.

        Args:
            outcome: `ok`, an error kind, or `transport`.
            machine_seconds: By how much the machine may have put it off (`control.py`).
        """
        self.calls[call] += 1
        self.outcomes[outcome] += 1
        over = seconds - limit_seconds
        self.slowest[call] = max(over, self.slowest.get(call, -limit_seconds))
        if over > self.slack_seconds:
            told = f"{call} took {seconds:.2f} s, and may take {limit_seconds:g}; the machine was {machine_seconds:.2f} s late"
            self.late.append(f"{told}: {outcome}")
            if over - machine_seconds > self.slack_seconds:
                self.violated(told)
        if outcome not in ("ok", TRANSPORT) and outcome not in ERROR_KINDS:
            self.violated(f"{call} failed with {outcome!r}, which is no kind")

    def stepped(self, session: str, step: int, reply: dict[str, Any]) -> None:
        if reply["reward"] != step:
            self.violated(f"session {session}: step {step} gave {reply['reward']}: a step was lost or done twice")

    def answered_again(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        if first != second:
            self.violated("a step that was sent twice was answered in two ways")

    def judged(self, session: str, expected: float, verdict: dict[str, Any]) -> None:
        if verdict["reward"] != expected:
            self.violated(f"session {session}: a verdict of {verdict['reward']}, which should be {expected}")

    def judged_again(self, session: str, first: dict[str, Any], second: dict[str, Any]) -> None:
        if first != second:
            self.violated(f"session {session}: two verdicts")

    def verified(self, session: str, expected: float, reply: dict[str, Any]) -> None:
        if not reply["mask_sample"] and reply["reward"] != expected:
            self.violated(f"session {session}: an unmasked reward of {reply['reward']}, which should be {expected}")
        if reply["mask_sample"] and not reply["failure_kind"]:
            self.violated(f"session {session}: a masked sample without a kind")
