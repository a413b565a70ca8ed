"""The requests and replies of the HTTP surface. Unknown fields of a request are refused; a task's own pass through."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, model_validator

from homing.web.models import Action, ArtifactRef, Observation, StepResult, Task, VerifierResult

SessionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{16,128}$")]


class Envelope(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class WithIdentity(Envelope):
    """A request that may name its session itself: then a seed whose reply was lost can be closed all the same.

    Attributes:
        session_id: Names the session, and the worker that holds it; by itself it opens nothing.
        close_token: A secret of the client's: who has it may seed that session again and close it.
    """

    session_id: SessionName | None = Field(default=None, alias="_ng_session_id")
    close_token: SecretStr | None = Field(default=None, alias="_ng_session_close_token", min_length=32, max_length=256)

    @model_validator(mode="after")
    def _both_or_neither(self) -> WithIdentity:
        if (self.session_id is None) != (self.close_token is None):
            raise ValueError("give _ng_session_id and _ng_session_close_token together, or neither")
        return self


class SeedRequest(WithIdentity):
    task: Task


class ResetRequest(Envelope):
    task: Task


class StepRequest(Envelope):
    """`operation_id` makes the step safe to send again: it is done once, and answered alike each time."""

    operation_id: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    action: Action


class EvaluateRequest(Envelope):
    final_answer: str | None = None


class CloseRequest(WithIdentity):
    pass


class VerifyRequest(BaseModel):
    """The task's own fields, which the reply repeats."""

    model_config = ConfigDict(extra="allow")

    final_answer: str | None = None


class StepReply(StepResult):
    operation_id: str | None = None


class ObserveReply(BaseModel):
    observation: Observation


class EvaluateReply(BaseModel):
    result: VerifierResult


class CloseReply(BaseModel):
    """What a close answers, the first time and every time after.

    Attributes:
        failure_kind, failure_reason: Why the session had ended before, if it had not been closed.
    """

    closed: bool
    session_id: str | None = None
    recording_artifacts: tuple[ArtifactRef, ...] = ()
    failure_kind: str | None = None
    failure_reason: str | None = None


class VerifyReply(BaseModel):
    """The verdict. `mask_sample`: the reward measures nothing, since the session or its evaluator failed.

    Attributes:
        cleanup_failure_kind, cleanup_failure_reason: The session could not be released yet; that says nothing of the
            reward.
    """

    model_config = ConfigDict(extra="allow")

    reward: float
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None
    cleanup_failure_kind: str | None = None
    cleanup_failure_reason: str | None = None
    result: VerifierResult | None = None


class ErrorReply(BaseModel):
    """Every error. `detail` is a text, or for a body that cannot be read a list of places and messages."""

    detail: str | list[dict[str, Any]]
    error_kind: str
    retryable: bool
