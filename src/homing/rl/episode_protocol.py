"""What crosses the wire to agent servers, environment servers, and collectors of rollouts.

Not here: identifiers and the bodies of a resources server (`protocol.py`), and what the servers do (`agents`,
`episodes`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from homing.identity import AGENT
from homing.rl.protocol import EpisodeId, SessionText, Strict, TaskId, Verdict

AGENT_SESSION_ID_KEY: Final = AGENT.cookie_key
"""The key of an agent server's signed session cookie: `agent_session_id`."""

ACTIVATION_HEADER: Final = "x-ng-agent-activation"
"""The 1-based index of an activation in its session: a completed one is answered again without running again."""

MAX_REASON_CHARACTERS: Final = 2000


class ToolAccess(Strict):
    """Where an agent finds the tools of a session.

    Attributes:
        name: Of the server that has the tools; unique in a seed.
        transport: `direct_http`: a tool is `POST <url>/<tool>` with its arguments as the JSON body, and the definitions
            come with the activation's `tools`. `mcp`: the server lists its own tools at `url`.
        headers, cookies: Sent with every call. Cookies that a direct call sets are kept, and come back with the close.
    """

    name: SessionText
    transport: Literal["direct_http", "mcp"]
    url: SessionText
    headers: dict[str, str] = Field(default_factory=dict)
    cookies: dict[str, str] = Field(default_factory=dict)


def _each_named_once(accesses: list[ToolAccess]) -> list[ToolAccess]:
    if len({access.name for access in accesses}) < len(accesses):
        raise ValueError("each has a name of its own")
    return accesses


class AgentSeedRequest(Strict):
    """`POST /v1/agent_sessions`."""

    agent_session_id: SessionText
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: Annotated[list[ToolAccess], AfterValidator(_each_named_once)] = Field(default_factory=list)
    sandbox_access: dict[str, JsonValue] | None = None


class AgentCapabilities(BaseModel):
    """`GET /v1/agent_sessions/capabilities`: what sessions of this agent can do, asked before one is seeded.

    Attributes:
        tool_transports: The kinds of tool access that a seed may grant.
        sandbox_access: A seed may grant a sandbox.
        stop: A running activation can be stopped, and answers with what it has.
    """

    tool_transports: list[Literal["direct_http", "mcp"]]
    sandbox_access: bool = False
    stop: bool = True


class AgentSeedReply(BaseModel):
    agent_session_id: str
    capabilities: AgentCapabilities


class AgentCloseRequest(Strict):
    """`POST /v1/agent_sessions/close`. It finds the session by itself: a cookie is not needed."""

    agent_session_id: SessionText
    episode_id: EpisodeId


class AgentCloseReply(BaseModel):
    """The receipt of a close: the same every time, for the close retry window.

    Attributes:
        agent_observations: What the agent noted of the session.
        resources_cookies: The cookies of the session's resources server as the last tool call left them, by name.
        agent_trajectory: Everything that the activations put out, in order.
        partial_response: What an activation had so far that was cut off before it answered.
    """

    agent_session_id: str
    agent_observations: dict[str, Any] | None = None
    resources_cookies: dict[str, str] | None = None
    agent_trajectory: list[dict[str, Any]] | None = None
    partial_response: dict[str, Any] | None = None


class StopRequest(BaseModel):
    """`POST /rollouts/{rollout_id}/stop`."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON_CHARACTERS)] = "stopped"


class StopReply(BaseModel):
    """`stopped` is false when no activation of the rollout runs here, or a stop was requested already."""

    stopped: bool


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`: parameters as the OpenAI Responses API has them, of which these are looked at here."""

    model_config = ConfigDict(extra="allow")

    input: str | list[dict[str, JsonValue]]
    tools: list[dict[str, JsonValue]] = Field(default_factory=list)


class AgentRunRequest(BaseModel):
    """`POST /run` of an agent: a task's own fields beside what the policy is asked."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: ResponsesRequest


class EpisodeTask(Strict):
    """What an environment server is asked to do.

    Attributes:
        task_input: The task's fields: seeded as `task_data`, and part of the body of `/verify`. What the policy is asked
            is in `responses_create_params`.
    """

    task_id: TaskId
    task_input: dict[str, JsonValue]


class EpisodeRequest(Strict):
    """`POST /run` of an environment server."""

    episode_id: EpisodeId
    task: EpisodeTask


class EpisodeFailure(BaseModel):
    """Why an episode has no verdict. It is no measurement of the policy, so there is no reward.

    Attributes:
        terminal: Another attempt would fail in the same way.
        failure_kind: One of few words, such as `session_lost`.
        stage: Where: `admission`, `seed`, `agent`, `cleanup` or `verification`.
    """

    failure_reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)]
    terminal: bool
    failure_kind: str | None = None
    stage: str | None = None


class EpisodeReply(BaseModel):
    """What became of an episode: a verdict, or a failure; both come with status 200."""

    episode_id: EpisodeId
    task_id: TaskId
    result: Verdict | None = None
    failure: EpisodeFailure | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.result is None) == (self.failure is None):
            raise ValueError("an episode has either a result or a failure")
        return self
