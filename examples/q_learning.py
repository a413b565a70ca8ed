"""Q-learning on FrozenLake-v1 in 16 environments at once, which may be anywhere.

    python examples/q_learning.py                          the environments are in this process

    homing rl serve FrozenLake-v1 --workers 4 --env-kwargs '{"is_slippery": false}'
    python examples/q_learning.py http://127.0.0.1:8000    they are on the server's four workers

For the same seed both print the same learning curve, digit for digit.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from homing.rl import RemoteVectorEnv

ENVIRONMENTS = 16
SETTINGS = {"is_slippery": False}


def environments(url: str | None) -> VectorEnv[Any, Any, Any]:
    """The environments: a server's, or local ones."""
    if url is not None:
        return RemoteVectorEnv(url, ENVIRONMENTS)
    return SyncVectorEnv([lambda: gymnasium.make("FrozenLake-v1", **SETTINGS)] * ENVIRONMENTS)


def learn(env: VectorEnv[Any, Any, Any], *, steps: int, seed: int) -> list[float]:
    """Learn for so many steps of all environments; the share of episodes that reached the goal, every 100 steps."""
    chance = np.random.default_rng(seed)
    space: Any = env.single_observation_space
    action_space: Any = env.single_action_space
    values = np.zeros((space.n, action_space.n))
    curve: list[float] = []
    finished: list[float] = []
    states, _ = env.reset(seed=seed)
    over = np.zeros(env.num_envs, dtype=bool)
    for step in range(1, steps + 1):
        greedy = np.array([chance.choice(np.flatnonzero(row == row.max())) for row in values[states]])
        explores = chance.random(env.num_envs) < max(0.05, 1 - 2 * step / steps)
        actions = np.where(explores, chance.integers(action_space.n, size=env.num_envs), greedy)
        after, rewards, terminated, truncated, _ = env.step(actions)
        for place in np.flatnonzero(~over):  # one whose episode was over has only begun the next
            state, action = states[place], actions[place]
            ahead = 0.0 if terminated[place] else values[after[place]].max()
            values[state, action] += 0.5 * (rewards[place] + 0.95 * ahead - values[state, action])
        over = terminated | truncated
        finished += rewards[over].tolist()
        states = after
        if step % 100 == 0:
            curve.append(float(np.mean(finished)) if finished else 0.0)
            finished = []
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Q-learning on FrozenLake-v1.")
    parser.add_argument("url", nargs="?", help="a server of the environment; none: here")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    env = environments(given.url)
    try:
        for number, share in enumerate(learn(env, steps=given.steps, seed=given.seed), 1):
            print(f"{number * 100:5} steps: {share:.4f} of the episodes reached the goal")
    finally:
        env.close()


if __name__ == "__main__":
    main()
