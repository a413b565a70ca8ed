"""The environment that is served: it counts its steps, and works for a given time at each."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register


class Work(gymnasium.Env[Any, Any]):
    """Works for `milliseconds` of CPU time at each step; its observation is how many it has taken: float64, (1,)."""

    def __init__(self, milliseconds: float = 0.0) -> None:
        self.observation_space = spaces.Box(0, np.inf, (1,), np.float64)
        self.action_space = spaces.Discrete(2)
        self._seconds = milliseconds / 1000
        self._count = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0.0
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        # CPU time of this thread: elapsed time would shrink the work of whoever has to wait for a core.
        until = time.thread_time() + self._seconds
        while time.thread_time() < until:
            pass
        return np.array([self._count]), 1.0, False, False, {}


register("Work-v0", f"{__name__}:Work", disable_env_checker=True)
