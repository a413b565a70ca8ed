"""How an agent says that it cannot serve a session or an activation, beside what every RL server says (`errors.py`)."""

from __future__ import annotations

from homing.rl.errors import RlError


class AgentSetupError(RlError):
    """Raise it from `set_up` where what the session needs cannot be opened now: the same seed may be sent again."""

    status = 503
    code = "agent_setup_failed"
    detail = "What the session needs could not be opened; the seed can be sent again."
    retry_after_seconds = 1


class AgentCleanUpError(RlError):
    """What a session had opened could not be released. It is still there, and the close can be sent again."""

    status = 503
    code = "agent_cleanup_failed"
    detail = "What the session had opened could not be released; send the close again."
    retry_after_seconds = 1


class AgentRunError(RlError):
    """Raise it from `respond` where an activation failed for a reason that says nothing about the policy.

    Args:
        kind: One word of low cardinality: `"session_lost"`, `"model_unavailable"`, … It becomes the error's `code`.
        detail: What happened, for people.
        retryable: A new episode may succeed.
    """

    status = 502

    def __init__(self, kind: str, detail: str, *, retryable: bool) -> None:
        super().__init__(detail)
        self.code = kind  # type: ignore[misc]  # this failure's own word, in place of a class for each
        self.retryable = retryable
