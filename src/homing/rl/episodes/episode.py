"""One episode, from the seeds to the verdict.

    close of resources registered → seed resources → close of agent registered → seed agent → activation
    → close agent → verify → [clean-up: whatever is not closed yet, last opened first]

The invariants: every close is registered before its seed is sent, so whatever a seed did that was cut off is closed too;
a failure is never a reward; and a verdict, once there, is not lost by a close that fails.

Not here: whether the episode may run now (`admission.py`), and what its caller is told (`server.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from homing.rl.episode_protocol import AgentCloseReply, EpisodeRequest, ToolAccess
from homing.rl.episodes.cleanup import CleanUp
from homing.rl.episodes.leases import Close
from homing.rl.outgoing import SESSION_LOST, CallError, Cookies, OutgoingCalls, under_rollout
from homing.rl.protocol import CLOSE_FOLLOWS, ResourcesSeedReply, Verdict

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)

ToolTransport: TypeAlias = Literal["direct_http", "mcp"]
Stage: TypeAlias = Literal["admission", "seed", "agent", "cleanup", "verification"]

CLOSE_RETRY_SECONDS: Final = 0.5

DIRECT_TOOLS: Final = "direct_http"
"""The name of the direct tool access that every episode has."""


class EpisodeFailedError(Exception):
    """An episode that came to no verdict, for a reason that says nothing about the policy."""

    def __init__(self, kind: str, reason: str, *, stage: Stage, terminal: bool) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.stage = stage
        self.terminal = terminal


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """How episodes are driven.

    Attributes:
        resources_url, agent_url: The servers' addresses.
        tool_transports: What the agent is given: the resources server's tools as plain routes, over MCP, or both.
        agent_timeout_seconds: After it, the agent is stopped, and what it has is verified. None: no such deadline.
        stop_grace_seconds: How long an agent that was stopped may take to answer with what it has; then it is cut off.
        call_timeout_seconds: For every call but the activation; one that takes longer is a fault, and no verdict.
        cleanup_timeout_seconds: For all closes of an episode together.
        training_token_capture: Activations go below `…/training-token-capture`, where a model server captures tokens.
    """

    resources_url: str
    agent_url: str
    tool_transports: tuple[ToolTransport, ...] = ("direct_http",)
    agent_timeout_seconds: float | None = None
    stop_grace_seconds: float = 5.0
    call_timeout_seconds: float = 60.0
    cleanup_timeout_seconds: float = 30.0
    training_token_capture: bool = False


class Episode:
    """One attempt at one task. Call `drive` once, and `cleanup.aclose` whatever came of it.

    Attributes:
        stage: How far it has come.
        cleanup: What it has to close.
        lost: One of its closes found that its session died with its worker.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        settings: EpisodeSettings,
        calls: OutgoingCalls,
        tasks: set[asyncio.Task[Any]],
    ) -> None:
        self.stage: Stage = "seed"
        self.lost = False
        self.cleanup = CleanUp(settings.cleanup_timeout_seconds, tasks)
        self._request = request
        self._settings = settings
        self._calls = calls
        key = request.episode_id.capture_key
        self._resources = under_rollout(settings.resources_url, key)
        self._agent = under_rollout(settings.agent_url, key)
        self._episode = request.episode_id.model_dump()
        self._task = request.task.task_id.model_dump()
        self._resources_id = f"resources-session-{secrets.token_hex(16)}"
        self._agent_id = f"agent-session-{secrets.token_hex(16)}"
        self._resources_cookies = Cookies()
        self._agent_cookies = Cookies()

    def __repr__(self) -> str:
        return f"<Episode {self._request.episode_id.capture_key}: {self.stage}>"

    def closes(self) -> list[Close]:
        """What another worker has to close if this one dies, the last to be opened first."""
        return [
            Close(
                "the agent session",
                f"{self._agent}/v1/agent_sessions/close",
                {"agent_session_id": self._agent_id, "episode_id": self._episode},
            ),
            Close(
                "the resources session",
                f"{self._resources}/close_session",
                {"resources_session_id": self._resources_id, "episode_id": self._episode},
            ),
        ]

    async def drive(self) -> Verdict:
        """The verdict.

        Raises:
            EpisodeFailedError: there is none.
        """
        try:
            seeded = await self._seed_resources()
            response = await self._turn(seeded)
            self.stage = "verification"
            return await self._verify(response)
        except CallError as error:
            raise EpisodeFailedError(
                error.kind, error.detail, stage=self.stage, terminal=not error.retryable
            ) from error

    # --- the resources session ---

    async def _seed_resources(self) -> ResourcesSeedReply:
        # Before the seed: one whose reply is lost may have opened the session all the same.
        self.cleanup.register("the resources session", self._close_resources)
        document = await self._post(
            f"{self._resources}/seed_session",
            {
                "resources_session_id": self._resources_id,
                "episode_id": self._episode,
                "task_id": self._task,
                "task_data": self._request.task.task_input,
            },
            self._resources_cookies,
        )
        seeded = self._checked(ResourcesSeedReply, document, "resources server's seed")
        if seeded.resources_session_id != self._resources_id:
            raise self._bad_reply("the resources server seeded another session than it was asked to")
        if not self._resources_cookies:
            raise self._bad_reply("the resources server's seed set no session cookie")
        return seeded

    async def _close_resources(self) -> None:
        body = {"resources_session_id": self._resources_id, "episode_id": self._episode}
        await self._close(f"{self._resources}/close_session", body, self._resources_cookies)

    def _tool_accesses(self, seeded: ResourcesSeedReply) -> list[dict[str, Any]]:
        found = []
        if "direct_http" in self._settings.tool_transports:
            found.append(
                ToolAccess(
                    name=DIRECT_TOOLS,
                    transport="direct_http",
                    url=self._resources,
                    cookies=self._resources_cookies.values,
                )
            )
        if "mcp" in self._settings.tool_transports:
            tools = seeded.resources_tools
            if tools is None:
                raise self._bad_reply("the resources server offers no tools over MCP")
            found.append(
                ToolAccess(
                    name=tools.server_name,
                    transport="mcp",
                    url=self._resources + tools.url_path,
                    headers=tools.headers,
                )
            )
        return [access.model_dump() for access in found]

    # --- the agent's turn ---

    async def _turn(self, seeded: ResourcesSeedReply) -> dict[str, Any]:
        seed: dict[str, Any] = {
            "agent_session_id": self._agent_id,
            "episode_id": self._episode,
            "task_id": self._task,
            "tool_accesses": self._tool_accesses(seeded),
        }
        if seeded.sandbox_access is not None:
            seed["sandbox_access"] = seeded.sandbox_access
        close = self.cleanup.register("the agent session", self._close_agent)
        document = await self._post(f"{self._agent}/v1/agent_sessions", seed, self._agent_cookies)
        if not isinstance(document, dict) or document.get("agent_session_id") != self._agent_id:
            raise self._bad_reply("the agent seeded another session than it was asked to")
        self.stage = "agent"
        response, timed_out = await self._respond(seeded.observation)
        # Before the verdict: its receipt has the cookies that the agent's last tool call left.
        self.stage = "cleanup"
        receipt: AgentCloseReply | None = await close()
        if receipt is not None and receipt.resources_cookies:
            self._resources_cookies.values.update(receipt.resources_cookies)
        if response is None and receipt is not None:
            response = receipt.partial_response
        if response is None:
            self.stage = "agent"
            raise EpisodeFailedError(
                "agent_timeout" if timed_out else SESSION_LOST,
                "the agent did not answer before its deadline, and has nothing to show"
                if timed_out
                else "the agent's session is gone",
                stage="agent",
                terminal=False,
            )
        return response

    async def _respond(self, observation: Any) -> tuple[dict[str, Any] | None, bool]:
        """The agent's response, None if it was cut off, and whether its deadline passed.

        Only this deadline lets a stopped state be graded: a call that breaks or is too slow is a fault.
        """
        capture = "/training-token-capture" if self._settings.training_token_capture else ""
        call = asyncio.create_task(
            self._calls.post(
                f"{self._agent}{capture}/v1/responses",
                self._params(observation),
                timeout_seconds=None,
                cookies=self._agent_cookies,
            )
        )
        try:
            done, _ = await asyncio.wait({call}, timeout=self._settings.agent_timeout_seconds)
            if done:
                return self._response(call.result()), False
            with contextlib.suppress(CallError):
                await self._post(
                    f"{self._agent}/rollouts/{self._request.episode_id.rollout_id}/stop",
                    {"reason": "deadline"},
                    self._agent_cookies,
                )
            done, _ = await asyncio.wait({call}, timeout=self._settings.stop_grace_seconds)
            # Not done: cutting the call off ends the activation, and the close then tells what it had.
            return (self._response(call.result()) if done else None), True
        finally:
            call.cancel()
            await asyncio.wait({call})

    def _params(self, observation: Any) -> dict[str, Any]:
        params = self._request.task.task_input.get("responses_create_params")
        if not isinstance(params, dict):
            raise EpisodeFailedError(
                "invalid_task",
                "task_input.responses_create_params: say what the policy is asked",
                stage="agent",
                terminal=True,
            )
        if observation is None:
            return params
        text = observation if isinstance(observation, str) else json.dumps(observation)
        asked = params.get("input")
        before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}] if asked else []
        return {**params, "input": [*before, {"role": "user", "content": text}]}

    def _response(self, document: Any) -> dict[str, Any]:
        if not isinstance(document, dict):
            raise self._bad_reply("the agent's response is no JSON object")
        return document

    async def _close_agent(self) -> AgentCloseReply | None:
        """The receipt; None if the session died with its worker."""
        document = await self._close(
            f"{self._agent}/v1/agent_sessions/close",
            {"agent_session_id": self._agent_id, "episode_id": self._episode},
            self._agent_cookies,
        )
        return None if document is None else self._checked(AgentCloseReply, document, "agent's close")

    # --- the verdict ---

    async def _verify(self, response: dict[str, Any]) -> Verdict:
        body = {**self._request.task.task_input, "response": response}
        document = await self._post(f"{self._resources}/verify", body, self._resources_cookies, headers=CLOSE_FOLLOWS)
        return self._checked(Verdict, document, "resources server's verdict")

    # --- calls ---

    async def _post(self, url: str, body: Any, cookies: Cookies, *, headers: dict[str, str] | None = None) -> Any:
        return await self._calls.post(
            url, body, cookies=cookies, headers=headers, timeout_seconds=self._settings.call_timeout_seconds
        )

    async def _close(self, url: str, body: Any, cookies: Cookies) -> Any:
        """Close, with one more try where that may help; None if what was to be closed died with its worker, or is closed."""
        for tries_left in (1, 0):
            try:
                # Cookies that a close sets are of no use any more.
                return await self._post(url, body, Cookies(dict(cookies.values)))
            except CallError as error:
                if error.kind == SESSION_LOST:
                    self.lost = True
                    return None
                if error.status == 409 and not tries_left:
                    # The ID is this episode's own, so the first try, whose reply was lost, has closed it; that was too
                    # long ago for its receipt to be kept.
                    return None
                if not error.retryable or not tries_left:
                    raise
                await asyncio.sleep(CLOSE_RETRY_SECONDS)
        raise AssertionError("the last try returned or raised")

    def _checked(self, model: type[ModelT], document: Any, what: str) -> ModelT:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise self._bad_reply(f"the {what} is malformed: {field}: {first['msg']}") from error

    def _bad_reply(self, reason: str) -> EpisodeFailedError:
        return EpisodeFailedError("bad_reply", reason, stage=self.stage, terminal=True)
