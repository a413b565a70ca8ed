"""Environments for tests: `tests.support.rl_envs:Every-v0` and others, registered as this module is imported."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register


def every_space() -> spaces.Dict:
    """A space of every kind that can be served, some of them with the values that are easily lost."""
    return spaces.Dict(
        {
            "box": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
            "bounded": spaces.Box(np.array([-1.5, 0.1]), np.array([1e300, 0.2]), dtype=np.float64),
            "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "long": spaces.Box(-(2**62), 2**62, (2,), np.int64),
            "scalar": spaces.Box(-1, 1, (), np.float32),
            "bits": spaces.MultiBinary(5),
            "bit rows": spaces.MultiBinary([2, 3]),
            "many": spaces.MultiDiscrete([3, 70_000], start=[-1, 5]),
            "one": spaces.Discrete(5, start=-2),
            "text": spaces.Text(8, min_length=0, charset='abcß€😀\\"'),
            "pair": spaces.Tuple((spaces.Discrete(2), spaces.Dict({"inner": spaces.Box(0, 1, (1,), np.float64)}))),
        }
    )


class Every(gymnasium.Env[Any, Any]):
    """Observes the action that it was given, or a sample of the same space."""

    def __init__(self, steps: int = 3) -> None:
        self.observation_space = every_space()
        self.action_space = every_space()
        self._steps = steps
        self._taken = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._taken = 0
        if seed is not None:
            self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {"options": options, "thread": threading.get_ident()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        info = {"taken": self._taken, "pid": os.getpid(), "array": np.arange(3, dtype=np.int16), "odd": float("nan")}
        info["thread"] = threading.get_ident()
        return action, float(self.np_random.random()), self._taken >= self._steps, False, info


class Count(gymnasium.Env[Any, Any]):
    """Counts its steps. Fails when told to; sleeps, if that is wanted, as an environment that works would."""

    def __init__(self, steps: int = 10**9, busy_seconds: float = 0.0) -> None:
        self.observation_space = spaces.Box(0, np.inf, (1,), np.float64)
        self.action_space = spaces.Discrete(3)
        self._steps = steps
        self._busy_seconds = busy_seconds
        self._fails_to_close = 0
        self._hangs_at = 0
        self._hangs_in_close = False
        self._count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if options and options.get("fail"):
            raise RuntimeError("the test wants this reset to fail")
        if options and options.get("hang"):
            _wait_for_ever()
        self._fails_to_close = (options or {}).get("failing_closes", 0)
        self._hangs_at = (options or {}).get("hangs_at", 0)
        self._hangs_in_close = (options or {}).get("hang_in_close", False)
        self._count = 0
        return np.array([0.0]), {"pid": os.getpid()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 2:
            raise RuntimeError("the test wants this step to fail")
        until = time.perf_counter() + self._busy_seconds
        while time.perf_counter() < until:
            pass
        self._count += 1
        if self._count == self._hangs_at:
            _wait_for_ever()
        over = self._count >= self._steps
        return (
            np.array([float(self._count)]),
            float(action),
            over and action == 0,
            over and action == 1,
            {"pid": os.getpid()},
        )

    def close(self) -> None:
        if self._hangs_in_close:
            _wait_for_ever()
        if self._fails_to_close:
            self._fails_to_close -= 1
            raise RuntimeError("the test wants this close to fail")


def _wait_for_ever() -> None:
    threading.Event().wait()


class Unservable(gymnasium.Env[Any, Any]):
    """Has a space that does not cross the wire."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({"good": spaces.Discrete(2), "bad": spaces.Sequence(spaces.Discrete(2))})
        self.action_space = spaces.Discrete(2)


register("Every-v0", f"{__name__}:Every", disable_env_checker=True)
register("Count-v0", f"{__name__}:Count", disable_env_checker=True)
register("Unservable-v0", f"{__name__}:Unservable", disable_env_checker=True)
