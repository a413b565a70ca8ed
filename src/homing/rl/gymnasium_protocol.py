"""The bodies of a Gymnasium server's routes.

They describe; what a body has to be is checked where it is used (`gymnasium.py`), since most of it depends on the environment's spaces.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from homing.rl.hosted import MAX_SEED

MAX_BATCH_ITEMS: Final = 4096


class ResetRequest(BaseModel):
    """`POST /reset`. Further fields are the caller's own, and are ignored."""

    model_config = ConfigDict(extra="allow")

    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    options: dict[str, Any] | None = None


class ResetReply(BaseModel):
    """An episode's first observation. `session_id` names the session in a batch."""

    observation: Any
    info: dict[str, Any]
    session_id: str


class StepRequest(BaseModel):
    """`POST /step`. Further fields are the caller's own, and are ignored."""

    model_config = ConfigDict(extra="allow")

    action: Any
    then_reset: bool = False


class StepReply(BaseModel):
    """What a step gave. With `then_reset`, at an episode's end: also the episode's last observation and info."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class BatchRequest(BaseModel):
    """`POST /batch`, for sessions of the worker that the header `x-ng-session-owner` names.

    Each item is an object with `session_id`, and with `action` and perhaps `then_reset`, or with `reset`, an object as
    `/reset` takes. Each is judged, and answered, by itself.
    """

    items: Annotated[list[Any], Field(max_length=MAX_BATCH_ITEMS)]


class BatchReply(BaseModel):
    """For each item in its place: what `/step` or `/reset` answers, or `{"error": {"code", "detail", "status"}}`.

    `not_here`: the session is at another worker, or nowhere; nothing ran.
    """

    items: list[dict[str, Any]]
