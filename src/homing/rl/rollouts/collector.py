"""Collects rollouts: hands tasks to an environment server, a bounded number at a time, and keeps what comes of them.

The invariants: what is no measurement of the policy is masked and has no reward; it is tried again as the next attempt,
a bounded number of times, unless another attempt would fail in the same way; and what is done is not done again.

Not here: reading tasks (`tasks.py`), the file of results (`results.py`), figures (`summary.py`),
and the command line (`command.py`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from homing.errors import StartupError
from homing.rl.episode_protocol import EpisodeReply, EpisodeRequest
from homing.rl.outgoing import CallError, OutgoingCalls
from homing.rl.protocol import EpisodeId
from homing.rl.rollouts.results import Progress, ResultLine, ResultsFile
from homing.rl.rollouts.summary import Summary, summarise
from homing.rl.rollouts.tasks import Rollout

FIRST_BACKOFF_SECONDS: Final = 0.25
LONGEST_BACKOFF_SECONDS: Final = 15.0
REACH_SECONDS: Final = 10.0


@dataclass(slots=True)
class Counts:
    """How a collection is getting on.

    Attributes:
        running: Rollouts under way.
        done: Rollouts that have ended, before this run too.
        failed: Episodes of this run that came to no measurement, those that are tried again included.
        masked: Rollouts that ended without one.
        reward: The sum of the rewards of those that ended with one, and `valid` their number.
        episodes, retried: As in `Summary`.
    """

    running: int = 0
    done: int = 0
    failed: int = 0
    masked: int = 0
    reward: float = 0.0
    valid: int = 0
    episodes: int = 0
    retried: int = 0

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.valid if self.valid else None

    def end(self, line: ResultLine) -> None:
        """A rollout has ended with this line."""
        self.done += 1
        if line.mask_sample or line.reward is None:
            self.masked += 1
        else:
            self.valid += 1
            self.reward += line.reward


class Collector:
    """One collection. Call `collect` once.

    Args:
        environment_url: The environment server.
        rollouts: What is to be collected; those that the results have a final line of are left out.
        results: Borrowed, open.
        concurrency: How many rollouts are under way at most.
        attempts: How many episodes of one rollout are run at most, in this run.
        episode_timeout_seconds: For one call of the environment server.
        changed: Called whenever the counts have changed.
        new_connection_per_call: Keep no connection open.

    Attributes:
        counts: How it is getting on.
    """

    def __init__(
        self,
        environment_url: str,
        rollouts: Iterable[Rollout],
        results: ResultsFile,
        *,
        concurrency: int,
        attempts: int = 3,
        episode_timeout_seconds: float = 3600.0,
        changed: Callable[[], object] = lambda: None,
        new_connection_per_call: bool = False,
    ) -> None:
        self.counts = Counts()
        self._url = environment_url.rstrip("/")
        self._rollouts = list(rollouts)
        self._results = results
        self._concurrency = concurrency
        self._attempts = attempts
        self._episode_timeout_seconds = episode_timeout_seconds
        self._changed = changed
        self._calls = OutgoingCalls(new_connection_per_call=new_connection_per_call)
        self._began_at = 0.0

    def __repr__(self) -> str:
        return f"<Collector {self._url}: {self.counts.done} of {len(self._rollouts)} done>"

    @property
    def total(self) -> int:
        """How many rollouts were asked for, those that are done already included."""
        return len(self._rollouts)

    async def collect(self) -> Summary:
        """Run what is not done yet. Cancelled, it gives up what is under way, whose episodes then close what they opened.

        Raises:
            StartupError: the environment server cannot be reached.
            OSError: a result could not be written; nothing more is run.
        """
        self._began_at = time.monotonic()
        waiting = iter(self._not_done())
        self._changed()
        async with self._calls:
            await self._reach()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(self._concurrency, len(self._rollouts))):
                        tasks.create_task(self._work(waiting))
            except BaseExceptionGroup as errors:
                # Whatever the first of them met, the others were cancelled for it.
                raise errors.exceptions[0] from None
        return self.summary()

    def summary(self) -> Summary:
        """The figures so far."""
        known = self._results.rollouts
        finals = [known[each.rollout_id].final for each in self._rollouts if each.rollout_id in known]
        return summarise(
            (line for line in finals if line is not None),
            rollouts=len(self._rollouts),
            episodes=self.counts.episodes,
            retried=self.counts.retried,
            seconds=time.monotonic() - self._began_at,
        )

    def _not_done(self) -> list[Rollout]:
        left = []
        for rollout in self._rollouts:
            final = self._results.rollouts.get(rollout.rollout_id, Progress()).final
            if final is None:
                left.append(rollout)
            else:
                self.counts.end(final)
        return left

    async def _reach(self) -> None:
        try:
            await self._calls.get(self._url + "/", timeout_seconds=REACH_SECONDS)
        except CallError as error:
            if error.status is None:
                raise StartupError(f"no environment server answers at {self._url}: {error.detail}") from error

    async def _work(self, waiting: Iterator[Rollout]) -> None:
        for rollout in waiting:
            self.counts.running += 1
            self._changed()
            try:
                await self._roll_out(rollout)
            finally:
                self.counts.running -= 1
                self._changed()

    async def _roll_out(self, rollout: Rollout) -> None:
        for tries in range(1, self._attempts + 1):
            attempt = self._results.rollouts.get(rollout.rollout_id, Progress()).attempts
            line, again = await self._run_episode(rollout, attempt)
            line.final = not again or tries == self._attempts
            self._results.add(line)
            self.counts.episodes += 1
            self.counts.retried += attempt > 0
            self.counts.failed += line.mask_sample
            if line.final:
                self.counts.end(line)
                return
            self._changed()
            await asyncio.sleep(_backoff(tries))

    async def _run_episode(self, rollout: Rollout, attempt: int) -> tuple[ResultLine, bool]:
        """What an episode came to, and whether another attempt may come to more."""
        episode_id = EpisodeId(rollout_id=rollout.rollout_id, attempt=attempt)
        request = EpisodeRequest(episode_id=episode_id, task=rollout.task)
        line = ResultLine(
            rollout_id=rollout.rollout_id,
            attempt=attempt,
            task_id=rollout.task.task_id,
            final=True,
            reward=None,
            mask_sample=True,
        )
        began = time.monotonic()
        try:
            document = await self._calls.post(
                self._url + "/run", request.model_dump(mode="json"), timeout_seconds=self._episode_timeout_seconds
            )
            reply = EpisodeReply.model_validate(document)
        except CallError as error:
            line.mask_reason, line.failure_reason, line.stage = error.kind, error.detail, "call"
            again = error.retryable
        except ValidationError as error:
            line.mask_reason, line.failure_reason, line.stage = "bad_reply", str(error)[:500], "call"
            again = False
        else:
            again = _note(line, reply)
        line.duration_seconds = round(time.monotonic() - began, 4)
        return line, again


def _note(line: ResultLine, reply: EpisodeReply) -> bool:
    """Put what the environment server says into the line; whether another attempt may come to more."""
    failure, verdict = reply.failure, reply.result
    if failure is not None:
        line.mask_reason = failure.failure_kind or "unknown"
        line.failure_reason, line.stage = failure.failure_reason, failure.stage
        return not failure.terminal
    assert verdict is not None
    line.result = verdict.model_dump(mode="json")
    if verdict.mask_sample:
        line.mask_reason = verdict.failure_kind or "unknown"
        line.failure_reason, line.stage = verdict.failure_reason, "verification"
        return True
    line.mask_sample, line.reward = False, verdict.reward
    return False


def _backoff(tries: int) -> float:
    longest = min(FIRST_BACKOFF_SECONDS * 2**tries, LONGEST_BACKOFF_SECONDS)
    # Spread: what failed together should not come back together.
    return random.uniform(longest / 2, longest)  # noqa: S311 - a delay needs no secrecy
