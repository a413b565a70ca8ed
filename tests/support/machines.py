"""Runs a hypothesis state machine: always the same examples, or ever new ones, of which a run that failed can be repeated."""

from __future__ import annotations

import os
import secrets
import time
from typing import Final

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SEED_ENV: Final = "HOMING_SEED"
CHUNK: Final = 50
"""So many examples have a seed of their own, so that what failed after an hour is repeated in a minute."""


def run_same(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """The same examples in every run."""
    run_state_machine_as_test(machine, settings=_settings(examples, steps, same=True))


def run_new(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """New examples, in chunks of a seed each, which are printed; `HOMING_SEED` is the first one's."""
    first, began = int(os.environ.get(SEED_ENV, secrets.randbits(32))), time.monotonic()
    for done in range(0, examples, CHUNK):
        number = first + done // CHUNK
        print(
            f"{machine.__name__}: {SEED_ENV}={number}, {done} of {examples} in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        seed(number)(machine)
        run_state_machine_as_test(machine, settings=_settings(min(CHUNK, examples - done), steps, same=False))


def _settings(examples: int, steps: int, *, same: bool) -> settings:
    # No shrinking: whole processes are behind each step, and a schedule of them is rarely the same twice.
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        database=None,
        derandomize=same,
    )
