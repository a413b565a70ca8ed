"""An agent's `/run`: seed the agent's own resources server, call the agent itself, verify.

The invariants: the close of the resources session is registered before its seed, and a fault becomes a masked sample,
never a reward. The call to itself names its own worker, so it stays where the run is.

Not here: episodes of an environment server, which also seed the agent (`episodes`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from homing.rl.episode_protocol import AgentRunRequest
from homing.rl.episodes.cleanup import CleanUp
from homing.rl.outgoing import SESSION_LOST, CallError, Cookies, OutgoingCalls, under_rollout
from homing.rl.protocol import CLOSE_FOLLOWS, EpisodeId, Verdict

logger = logging.getLogger(__name__)

CLEANUP_SECONDS: Final = 30.0


class AgentRun:
    """One run. Call `drive` once.

    Args:
        own_url, own_headers: Where this very worker is reached.
        capture_key: Of the rollout that the run's path names; None: it names none.
        taskset: What the seed calls the run's task, with the rollout's ID.
    """

    def __init__(
        self,
        calls: OutgoingCalls,
        *,
        resources_url: str,
        own_url: str,
        own_headers: Mapping[str, str],
        capture_key: str | None,
        taskset: str,
        call_timeout_seconds: float,
    ) -> None:
        self._calls = calls
        self._own = under_rollout(own_url, capture_key)
        self._own_headers = own_headers
        self._episode = _episode(capture_key)
        self._resources = under_rollout(resources_url, capture_key)
        self._resources_id = f"resources-session-{secrets.token_hex(16)}"
        self._taskset = taskset
        self._call_timeout_seconds = call_timeout_seconds
        self._cookies = Cookies()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<AgentRun {self._episode.capture_key}>"

    async def drive(self, request: AgentRunRequest) -> dict[str, Any]:
        """The verdict, with the fields of the request; a masked one if something other than the policy failed."""
        body = request.model_dump(mode="json")
        cleanup = CleanUp(CLEANUP_SECONDS, self._tasks)
        try:
            return await self._drive(body, cleanup)
        except CallError as error:
            masked = Verdict(reward=0.0, mask_sample=True, failure_kind=error.kind, failure_reason=error.detail)
            return {**body, **masked.model_dump()}
        finally:
            await cleanup.aclose()

    async def _drive(self, body: dict[str, Any], cleanup: CleanUp) -> dict[str, Any]:
        cleanup.register("the resources session", self._close)
        await self._post(
            f"{self._resources}/seed_session",
            {
                "resources_session_id": self._resources_id,
                "episode_id": self._episode.model_dump(),
                "task_id": {"taskset": self._taskset, "task_id": self._episode.rollout_id},
                "task_data": body,
            },
        )
        response = await self._calls.post(
            f"{self._own}/v1/responses",
            body["responses_create_params"],
            cookies=self._cookies,
            headers=self._own_headers,
            timeout_seconds=None,
        )
        document = await self._post(f"{self._resources}/verify", {**body, "response": response}, headers=CLOSE_FOLLOWS)
        try:
            return Verdict.model_validate(document).model_dump()
        except ValidationError as error:
            raise CallError("bad_reply", "the resources server's verdict is malformed", retryable=False) from error

    async def _close(self) -> None:
        body = {"resources_session_id": self._resources_id, "episode_id": self._episode.model_dump()}
        try:
            await self._post(f"{self._resources}/close_session", body)
        except CallError as error:
            if error.kind != SESSION_LOST:
                raise

    async def _post(self, url: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Any:
        return await self._calls.post(
            url, body, cookies=self._cookies, headers=headers, timeout_seconds=self._call_timeout_seconds
        )


def _episode(capture_key: str | None) -> EpisodeId:
    if capture_key is not None:
        try:
            return EpisodeId.from_capture_key(capture_key)
        except ValidationError:
            logger.warning("the run's path names no rollout ID that can be used; it gets one of its own")
    return EpisodeId(rollout_id=f"run-x{secrets.token_hex(8)}")
