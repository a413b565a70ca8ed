"""What crosses the wire between RL servers and their callers: identifiers, and the bodies of a resources server's routes.

The invariant: a body that is accepted here says exactly one thing. Identifiers are frozen and comparable, and unknown
fields are refused where the protocol is ours to define.

Not here: what the servers do with it (`resources.py`, `gymnasium.py`), and the bodies of agent and environment servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StringConstraints,
)

from homing.identity import RESOURCES
from homing.lifetime import CLOSE_FOLLOWS_HEADER
from homing.routes import ROLLOUT_PATH_PREFIX

SESSION_ID_KEY: Final = RESOURCES.cookie_key
"""The key of a resources server's signed session cookie: `session_id`."""

MCP_TOKEN_HEADER: Final = "X-NeMo-Gym-Session-Token"  # noqa: S105 - a header's name
"""The request header that names the session of a tool call over MCP."""

MCP_TOKEN_SALT: Final = "nemo-gym-mcp-session-token"  # noqa: S105 - keeps it from posing as a cookie of the same secret

MCP_PATH: Final = "/mcp"

CLOSE_FOLLOWS: Final = {CLOSE_FOLLOWS_HEADER: "1"}
"""Sent with a `/verify` whose caller closes the session itself: then the verify does not end it."""

SESSION_LOST: Final = "session_lost"
"""The failure kind of a verify whose session is not there: its sample is masked."""

_ROLLOUT_ID: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_RESERVED_SUFFIX: Final = re.compile(r"-a([1-9][0-9]*)\Z")


def _without_reserved_suffix(rollout_id: str) -> str:
    if _RESERVED_SUFFIX.search(rollout_id):
        raise ValueError("a rollout ID does not end in -a<number>: that suffix marks a later attempt")
    return rollout_id


def _whole(value: Any) -> Any:
    """A JSON number without a fraction is an integer, however it is written (JSON Schema, 6.3)."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("a number is expected")  # noqa: TRY004 - pydantic's own way to be told
    return value


RolloutId = Annotated[
    str, StringConstraints(pattern=_ROLLOUT_ID, max_length=512), AfterValidator(_without_reserved_suffix)
]
"""The name of one logical series of attempts at a task. May not end in `-a<N>` with N ≥ 1, which marks an attempt."""

SessionText = Annotated[str, StringConstraints(min_length=1)]


class Strict(BaseModel):
    """A body that the protocol defines: types are not coerced, unknown fields are refused, NaN is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class EpisodeId(BaseModel):
    """One attempt of a rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rollout_id: RolloutId
    attempt: Annotated[int, Field(ge=0), BeforeValidator(_whole)] = 0

    @property
    def capture_key(self) -> str:
        """The rollout's ID for its first attempt, `<rollout ID>-a<attempt>` for a later one."""
        return self.rollout_id if self.attempt == 0 else f"{self.rollout_id}-a{self.attempt}"

    @classmethod
    def from_capture_key(cls, key: str) -> EpisodeId:
        """The episode that a capture key stands for.

        Raises:
            pydantic.ValidationError: the key holds no rollout ID.
        """
        found = _RESERVED_SUFFIX.search(key)
        if found is None:
            return cls(rollout_id=key)
        return cls(rollout_id=key[: found.start()], attempt=int(found[1]))


class TaskId(BaseModel):
    """Which task, of which set of tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    taskset: SessionText
    task_id: SessionText


class ResourcesSeedRequest(Strict):
    """`POST /seed_session` of an episode. A body without `resources_session_id` and `episode_id` is a cookie's seed: any
    JSON object, for the session that the cookie names."""

    resources_session_id: SessionText
    episode_id: EpisodeId
    task_id: TaskId
    task_data: dict[str, JsonValue]


class ResourcesTools(Strict):
    """How to reach a session's tools over MCP."""

    server_name: str
    url_path: str = MCP_PATH
    transport: str = "http"
    headers: dict[str, str]


class ResourcesSeedReply(BaseModel):
    """What a seed answers; absent fields are left out. A cookie's seed is answered with `{}`, or `{"mcp": {…}}`."""

    resources_session_id: str
    resources_tools: ResourcesTools | None = None
    sandbox_access: dict[str, Any] | None = None
    observation: Any = None


class ResourcesCloseRequest(Strict):
    """`POST /close_session`. It finds the session by itself: a cookie is not needed."""

    resources_session_id: SessionText
    episode_id: EpisodeId


class ResourcesCloseReply(BaseModel):
    """What a close answers, the first time and every time after."""

    resources_session_id: str


class VerifyRequest(BaseModel):
    """`POST /verify`: the task's own fields, with what the policy was asked and what it answered."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    responses_create_params: dict[str, JsonValue] = Field(default_factory=dict)
    response: dict[str, JsonValue] = Field(default_factory=dict)


class Verdict(BaseModel):
    """What verifying a session came to.

    Attributes:
        reward: Finite. A measurement of the policy only if `mask_sample` is false.
        mask_sample: The reward is no measurement: the session was lost, a judge was unreachable, memory ran out.
        failure_kind: One of few words, or `<server>:<word>`: why the sample is masked.
        failure_reason: The same for people.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    reward: Annotated[float, BeforeValidator(_number)]
    mask_sample: StrictBool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


class AggregateRequest(BaseModel):
    """`POST /aggregate_metrics`: verdicts, as `/verify` answered them."""

    model_config = ConfigDict(allow_inf_nan=False)

    verify_responses: list[Verdict]


class Aggregate(BaseModel):
    """What a list of verdicts comes to. `mean_reward` is over valid samples only; None if there is none."""

    model_config = ConfigDict(extra="allow")

    count: int
    valid: int
    masked: int
    mean_reward: float | None
    masked_by_kind: dict[str, int]


def aggregate(verdicts: list[Verdict]) -> Aggregate:
    """Count verdicts, and average the rewards of those that are measurements."""
    rewards = [verdict.reward for verdict in verdicts if not verdict.mask_sample]
    kinds: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.mask_sample:
            kind = verdict.failure_kind or "unknown"
            kinds[kind] = kinds.get(kind, 0) + 1
    return Aggregate(
        count=len(verdicts),
        valid=len(rewards),
        masked=len(verdicts) - len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        masked_by_kind=kinds,
    )


def close_follows(values: Callable[[str], list[str]]) -> bool:
    """Whether a request says that its caller closes the session itself.

    Args:
        values: Gives a header's values, as `request.headers.getlist` does.
    """
    return values(CLOSE_FOLLOWS_HEADER) == ["1"]


def rollout_path(path: str, capture_key: str | None) -> str:
    """`path` under a rollout's prefix, so that the servers called know whose request it is."""
    return path if capture_key is None else f"/{ROLLOUT_PATH_PREFIX}/{capture_key}{path}"
