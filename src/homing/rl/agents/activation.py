"""One activation of an agent: what it was asked, what it has put out so far, and how it is told to stop.

The invariant: what an activation has put out is never lost, however it ends: it answers with it, or, cut off, leaves it
to the close's receipt.

Not here: what an agent does (`server.py`), and the model and tools of the ready one (`tool_calling.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from homing.rl.disconnect import end_tasks
from homing.rl.episode_protocol import AgentSeedRequest, ResponsesRequest, ToolAccess
from homing.rl.outgoing import Cookies

T = TypeVar("T")


class StoppedError(Exception):
    """The activation was asked to stop while it waited for something that may be given up."""


class AgentSession:
    """One session of an agent server, from its seed to its close.

    Attributes:
        seed: What it was opened with.
        state: For the agent's own use.
        responses: Of its completed activations, in order.
        activation: The one that runs now.
        resources_cookies: As the last direct tool call left them, by the name of the tool access.
        partial_response: What an activation had that was cut off.
        set_up_began: There may be something to clean up. The server's.
    """

    def __init__(self, seed: AgentSeedRequest) -> None:
        self.seed = seed
        self.state: Any = None
        self.responses: list[dict[str, Any]] = []
        self.activation: Activation | None = None
        self.resources_cookies = {access.name: Cookies(dict(access.cookies)) for access in seed.tool_accesses}
        self.partial_response: dict[str, Any] | None = None
        self.set_up_began = False

    def __repr__(self) -> str:
        return f"<AgentSession of {self.seed.episode_id.capture_key}: {len(self.responses)} responses>"

    @property
    def id(self) -> str:
        return self.seed.agent_session_id


class Activation:
    """One `POST /v1/responses`.

    Attributes:
        request: The parameters, as in the OpenAI Responses API.
        session: None for an activation without a session.
        rollout_id: Of the rollout it belongs to, if it is known: a stop names it.
        tool_accesses: Where its tools are.
        cookies: The cookies for each tool access, by its name; direct tool calls send and change them.
        output: The items put out so far: append to it as you go.
        usage: Tokens, added up; `None` if the model said nothing about them.
        stop_reason: Why it was asked to stop; None if it was not.
        model: The name of the model, for the response.
        task: What runs it. The server's.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        *,
        session: AgentSession | None,
        rollout_id: str | None,
        tool_accesses: list[ToolAccess],
        cookies: dict[str, Cookies],
    ) -> None:
        self.request = request
        self.session = session
        self.rollout_id = rollout_id
        self.tool_accesses = tool_accesses
        self.cookies = cookies
        self.output: list[dict[str, Any]] = []
        self.usage: dict[str, int] | None = None
        self.model = str((request.model_extra or {}).get("model") or "agent")
        self.stop_reason: str | None = None
        self.task: asyncio.Task[dict[str, Any]] | None = None
        self._id = f"resp_{secrets.token_hex(16)}"
        self._began_at = int(time.time())
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Activation {self._id}: {len(self.output)} items>"

    def stop(self, reason: str) -> bool:
        """Ask it to stop; False if it was asked before."""
        if self.stop_reason is not None:
            return False
        self.stop_reason = reason
        self._stopping.set()
        return True

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which may be given up, such as a call of the model.

        Raises:
            StoppedError: the activation was asked to stop; `work` is cancelled.
        """
        task = asyncio.create_task(work, name="homing agent work that may be given up")
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise StoppedError
        finally:
            stopping.cancel()
            await end_tasks([task])

    def response(self, *, incomplete: str | None = None) -> dict[str, Any]:
        """What it has put out, as a response object of the OpenAI Responses API.

        Args:
            incomplete: Why it ends before it is done. The reason of a stop comes first.
        """
        reason = self.stop_reason or incomplete
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._began_at,
            "model": self.model,
            "status": "completed" if reason is None else "incomplete",
            "incomplete_details": None if reason is None else {"reason": reason},
            "error": None,
            "instructions": (self.request.model_extra or {}).get("instructions"),
            "metadata": (self.request.model_extra or {}).get("metadata") or {},
            "output": list(self.output),
            "parallel_tool_calls": False,
            "tool_choice": (self.request.model_extra or {}).get("tool_choice") or "auto",
            "tools": self.request.tools,
            "usage": None
            if self.usage is None
            else {
                **self.usage,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }
