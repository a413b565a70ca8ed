"""Web tasks as a resources server: an episode's session is a live browser, its tools look and act, its verifier judges.

So `homing rl rollouts` runs web tasks as it runs any others: a task's data are a web task's fields
(`{"benchmark": "miniwob", "task_id": "click-button", "seed": 0}`). The invariant: a session's reward is the task's own
verdict, and where browser, page or evaluator failed, the sample is masked.

Not here: browser sessions over their own HTTP surface (`homing.web.server`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from homing.rl import ResourcesServer, Seed, Seeded, SeedRejectedError, ToolError, Verdict, VerifyRequest, tool
from homing.rl.errors import RlError
from homing.rl.errors import SessionLostError as RlSessionLostError
from homing.rl.protocol import SESSION_LOST
from homing.web.assembly import Assemble, SiteRule
from homing.web.errors import (
    BenchmarkPreconditionError,
    InvalidActionError,
    InvalidTaskError,
    SessionConflictError,
    SessionLostError,
    WebError,
)
from homing.web.manager import WebSessionManager
from homing.web.models import Observation, Task
from homing.web.opening import open_manager
from homing.web.settings import WebSettings

logger = logging.getLogger(__name__)

_KIND_PREFIX: Final = "web:"


class Seen(BaseModel):
    """What the policy sees: the observation as text.

    Attributes:
        page: The accessibility tree, with refs that actions name; valid until the next look.
        error: Why the last action did not do what it says.
        reward: The task's own for the last action, if it has one.
    """

    url: str
    title: str
    page: str
    error: str = ""
    dialog: str | None = None
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False


class UnavailableHereError(RlError):
    """No browser, no site or no room now; nothing is left, so the seed can be sent again."""

    status = 503
    code = "unavailable"
    detail = "No browser session can be had now; try again."
    retry_after_seconds = 1


@dataclass(frozen=True, slots=True)
class BrowserState:
    """A session's state: the name of its browser session."""

    session_id: str


class AnsweredRequest(VerifyRequest):
    """A verify may say what the policy answered at the end; else it is the last text of its response."""

    final_answer: str | None = None


class WebVerdict(Verdict):
    """A verdict, and whether the task counts as done, where there is one."""

    task_success: bool | None = None


class WebResources(ResourcesServer[BrowserState]):
    """A resources server of web tasks. `homing web episodes` serves it.

    Args:
        assemble, web_settings, sites: As of `homing.web.server.WebServer`.
        Others: as for every resources server.
    """

    reverify_mode = "unsupported"

    def __init__(
        self,
        assemble: Assemble,
        web_settings: WebSettings | None = None,
        *,
        sites: SiteRule | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._assemble = assemble
        self._web_settings = WebSettings() if web_settings is None else web_settings
        self._site_rule = SiteRule() if sites is None else sites
        self._manager: WebSessionManager | None = None

    @property
    def manager(self) -> WebSessionManager:
        """This worker's browser sessions, while the server serves."""
        if self._manager is None:
            raise RuntimeError("the server does not serve")
        return self._manager

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        run_directory = self._meeting.directory()
        async with (
            open_manager(
                self._assemble, self._web_settings, self._site_rule, run_directory, _forgotten
            ) as self._manager,
            super().serving(),
        ):
            yield

    async def seed(self, seed: Seed) -> Seeded[BrowserState]:
        try:
            task = Task.model_validate(seed.task_data)
        except ValidationError as error:
            raise SeedRejectedError("task_data is no web task: give benchmark and task_id") from error
        try:
            reply = await self.manager.seed_session(seed.session_id, task)
        except (InvalidTaskError, BenchmarkPreconditionError) as error:
            raise SeedRejectedError(error.shown) from error
        except WebError as error:
            raise UnavailableHereError(f"{error.error_kind}: {error.shown}") from error
        seen = seen_of(reply.observation)
        return Seeded(
            BrowserState(seed.session_id),
            observation={"goal": list(reply.observation.goal), **seen.model_dump(exclude_none=True)},
        )

    async def release(self, state: BrowserState) -> None:
        if not await self.manager.close_session(state.session_id):
            raise RuntimeError("something of the browser session could not be released yet; it is tried again")

    @tool
    async def step(self, state: BrowserState, action: dict[str, Any] | str) -> Seen:
        """Do one action in the browser, such as {"action": "click", "ref": "e12"}, and look at what came of it."""
        try:
            result = await self.manager.step(state.session_id, None, action)
        except WebError as error:
            raise _told(error) from error
        seen = seen_of(result.observation)
        return seen.model_copy(
            update={"reward": result.reward, "terminated": result.terminated, "truncated": result.truncated}
        )

    @tool
    async def observe(self, state: BrowserState) -> Seen:
        """Look at the page without doing anything."""
        try:
            return seen_of(await self.manager.observe(state.session_id))
        except WebError as error:
            raise _told(error) from error

    async def verify(self, state: BrowserState, request: AnsweredRequest) -> Verdict:
        try:
            verdict = await self.manager.evaluate(state.session_id, request.final_answer or answer_in(request.response))
        except WebError as error:
            return Verdict(
                reward=0.0, mask_sample=True, failure_kind=failure_kind(error.error_kind), failure_reason=error.shown
            )
        return WebVerdict(
            reward=verdict.reward,
            mask_sample=not verdict.valid_sample,
            failure_kind=None if verdict.failure_kind is None else failure_kind(verdict.failure_kind),
            task_success=verdict.task_success,
        )


def seen_of(observation: Observation) -> Seen:
    dialog = observation.dialog
    return Seen(
        url=observation.url,
        title=observation.title,
        page=observation.axtree,
        error=observation.last_action_error,
        dialog=None if dialog is None else f"{dialog.kind}: {dialog.message}",
    )


def answer_in(response: Mapping[str, Any]) -> str | None:
    """The text of the last message in a response of OpenAI's responses API; None if there is none."""
    output = response.get("output")
    for item in reversed(output if isinstance(output, list) else []):
        if isinstance(item, dict) and item.get("type") == "message":
            parts = item.get("content")
            texts = [
                part["text"]
                for part in (parts if isinstance(parts, list) else [])
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            ]
            return "".join(texts) or None
    return None


def failure_kind(kind: str) -> str:
    """A kind of the web surface among those of resources servers: shared, or this server's own."""
    return SESSION_LOST if kind == SESSION_LOST else _KIND_PREFIX + kind


def _told(error: WebError) -> RlError:
    """A failed tool call: what the model can do something about is a tool's error, the rest loses the session."""
    if isinstance(error, InvalidActionError):
        return ToolError(error.shown)
    if isinstance(error, SessionLostError) or error.ends_session:
        return RlSessionLostError(f"The browser session is lost ({error.error_kind}): {error.shown}")
    if isinstance(error, SessionConflictError):
        return ToolError(error.shown)
    return UnavailableHereError(f"{error.error_kind}: {error.shown}")


def _forgotten(session_id: str) -> None:
    """Its record, and so its owner, stays until the episode's close: that is the caller's to send."""
