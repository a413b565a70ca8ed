"""One environment that a session has, and what is done to it, on its own thread.

The invariants: a step is taken only between a reset and the end of its episode, and only with an action of the action
space; what it gave is encoded before the next step can change it.

Not here: sessions, threads and HTTP (`gymnasium.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import gymnasium

from homing.errors import ConfigurationError
from homing.rl.errors import ConflictError, RlError
from homing.rl.spaces import Codec, codec_for, plain_info

logger = logging.getLogger(__name__)

EnvMaker = Callable[[], "gymnasium.Env[Any, Any]"]

MAX_SEED: Final = 2**53 - 1
"""Beyond it not everyone who reads JSON reads the same integer (RFC 8259, 6)."""


class EpisodeOverError(ConflictError):
    code = "episode_over"
    detail = "The episode is over: reset the environment before the next step."


class EnvironmentFailedError(RlError):
    """The environment raised, or gave something that is none of its space; the traceback is logged."""

    status = 500
    code = "environment_failed"
    detail = "The environment failed; the server's log says why."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reset or step gave.

    Attributes:
        content: The reply, of plain types; its observation in the form that was asked for.
        over: The episode has ended with it, and no reset has followed.
    """

    content: dict[str, Any]
    over: bool


class EnvKind:
    """The environments that a server has: how one is made, and what their spaces are.

    Raises:
        ConfigurationError: none can be made, or its spaces cannot be served; the message says which.
    """

    def __init__(self, name: str, make: EnvMaker) -> None:
        self.name = name
        self.make = make
        try:
            env = make()
        except Exception as error:
            # Gymnasium's own errors are sentences; of others, the type says most.
            said = str(error) if isinstance(error, gymnasium.error.Error) else f"{type(error).__name__}: {error}"
            raise ConfigurationError(f"cannot make the environment {name}: {said}") from error
        try:
            self.observation: Codec = codec_for(env.observation_space, name=f"the observation space of {name}")
            self.action: Codec = codec_for(env.action_space, name=f"the action space of {name}")
            self.description: dict[str, Any] = self._describe(env)
        finally:
            try:
                env.close()
            except Exception:
                logger.warning("the first environment of %s could not be closed", name, exc_info=True)

    def _describe(self, env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
        spec = env.spec
        return {
            "environment": self.name,
            "observation_space": self.observation.description,
            "action_space": self.action.description,
            "metadata": plain_info(env.metadata, binary=False),
            "max_episode_steps": None if spec is None else spec.max_episode_steps,
            "reward_threshold": None if spec is None else spec.reward_threshold,
            "nondeterministic": None if spec is None else spec.nondeterministic,
        }


class HostedEnv:
    """One environment. Make it, use it and close it on one thread. Owns the environment."""

    __slots__ = ("_env", "_kind", "_started", "over")

    def __init__(self, kind: EnvKind) -> None:
        self._kind = kind
        self._env = kind.make()
        self._started = False
        self.over = False

    def reset(self, seed: int | None, options: dict[str, Any] | None, binary: bool) -> Outcome:
        """Begin an episode.

        Raises:
            EnvironmentFailedError: the environment raised.
        """
        try:
            observation, info = self._env.reset(seed=seed, options=options)
            content = {
                "observation": self._kind.observation.encode(observation, binary=binary),
                "info": plain_info(info, binary=binary),
            }
        except Exception as error:
            raise self._failed("reset", error) from error
        self._started, self.over = True, False
        return Outcome(content, over=False)

    def step(self, action: Any, then_reset: bool, binary: bool) -> Outcome:
        """Take one step.

        Args:
            then_reset: If the episode ends with it, begin the next: the reply's observation and info are then the next
                episode's, and its last ones are `final_observation` and `final_info`.

        Raises:
            EpisodeOverError: there is no episode to take a step in.
            EnvironmentFailedError: the environment raised.
        """
        if self.over or not self._started:
            raise EpisodeOverError
        try:
            observation, reward, terminated, truncated, info = self._env.step(action)
            content: dict[str, Any] = {
                "observation": self._kind.observation.encode(observation, binary=binary),
                "reward": float(reward),
                "terminated": bool(terminated),
                "truncated": bool(truncated),
                "info": plain_info(info, binary=binary),
            }
        except Exception as error:
            raise self._failed("step", error) from error
        self.over = content["terminated"] or content["truncated"]
        if self.over and then_reset:
            begun = self.reset(None, None, binary).content
            content |= {"final_observation": content["observation"], "final_info": content["info"], **begun}
        return Outcome(content, over=self.over)

    def close(self) -> None:
        """Let the environment go; what it raises is logged by whoever asked."""
        self._env.close()

    def _failed(self, what: str, error: Exception) -> EnvironmentFailedError:
        # Who knows what state it is in: only a reset can go on.
        self.over = True
        logger.error("%s of %s failed", what, self._kind.name, exc_info=error)
        return EnvironmentFailedError(f"{what} failed: {type(error).__name__}; the server's log says why.")


def maker(environment: str | EnvMaker, kwargs: Mapping[str, Any] | None) -> tuple[str, EnvMaker]:
    """An environment's name, and what makes one.

    Args:
        environment: A registered ID (`CartPole-v1`, `module:Env-v0`), or a function that makes one.
        kwargs: For a registered one.

    Raises:
        ConfigurationError: both a function and its arguments are given.
    """
    if callable(environment):
        if kwargs:
            raise ConfigurationError("env_kwargs is for registered environments: let your function use them itself")
        return getattr(environment, "__name__", type(environment).__name__), environment
    settings = {"disable_env_checker": True, **(kwargs or {})}
    return environment, lambda: gymnasium.make(environment, **settings)
