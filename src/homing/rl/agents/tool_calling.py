"""The ready agent: asks a model, calls the tools that it names, gives it the results, until it answers in words.

The model is any OpenAI-compatible endpoint; the tools are what the session's seed grants (`tool_access.py`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from homing.errors import ConfigurationError
from homing.rl.agents.activation import Activation, StoppedError
from homing.rl.agents.models import Item, Model, ModelApi, model_for
from homing.rl.agents.server import AgentServer
from homing.rl.agents.tool_access import Tools, open_tools


class ToolCallingAgent(AgentServer):
    """An agent server that works with any OpenAI-compatible model.

    Args:
        model_url: The endpoint's base, with its `/v1`; by default `OPENAI_BASE_URL`, else OpenAI's own.
        model: The model's name, where a request names none.
        model_api: `"chat"` asks `/chat/completions`, `"responses"` asks `/responses`.
        api_key: By default `OPENAI_API_KEY`; an endpoint that needs none gets a placeholder.
        max_steps: How often the model is asked at most in one activation; one that wants more ends incomplete.
        model_timeout_seconds: For one call of the model.
        tool_timeout_seconds: For one call of a tool.
        model_retries: How often a call that the endpoint did not answer, or answered 429 or 5xx, is repeated.
        settings: As for `AgentServer`.
    """

    def __init__(
        self,
        *,
        model_url: str | None = None,
        model: str = "default",
        model_api: ModelApi = "chat",
        api_key: str | None = None,
        max_steps: int = 32,
        model_timeout_seconds: float = 300.0,
        tool_timeout_seconds: float = 60.0,
        model_retries: int = 2,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if max_steps < 1:
            raise ConfigurationError(f"max_steps is {max_steps}: the model has to be asked at least once")
        self.model = model
        self.model_api: ModelApi = model_api
        self.max_steps = max_steps
        self.tool_timeout_seconds = tool_timeout_seconds
        self._model_url = model_url
        self._api_key = api_key
        self._model_timeout_seconds = model_timeout_seconds
        self._model_retries = model_retries
        self._asked: Model | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with (
            super().serving(),
            AsyncOpenAI(
                base_url=self._model_url,
                # The client refuses to start without one, and endpoints of one's own seldom want any.
                api_key=self._api_key or os.environ.get("OPENAI_API_KEY") or "none",
                timeout=self._model_timeout_seconds,
                max_retries=self._model_retries,
            ) as client,
        ):
            self._asked = model_for(self.model_api, client, self.model)
            yield

    async def respond(self, activation: Activation) -> dict[str, Any]:
        """Ask and call until the model answers without a call, was asked often enough, or is stopped."""
        definitions = [tool for tool in activation.request.tools if tool.get("type") == "function"]
        async with open_tools(
            activation.tool_accesses,
            activation.cookies,
            definitions,
            self.calls,
            timeout_seconds=self.tool_timeout_seconds,
        ) as tools:
            try:
                return await self._loop(activation, tools)
            except StoppedError:
                return activation.response()

    async def _loop(self, activation: Activation, tools: Tools) -> dict[str, Any]:
        assert self._asked is not None
        params = activation.request.model_extra or {}
        activation.model = str(params.get("model") or self.model)
        asked = activation.request.input
        conversation: list[Item] = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        for _ in range(self.max_steps):
            items, usage = await activation.unless_stopped(self._asked.answer(conversation, tools.definitions, params))
            _add_usage(activation, usage)
            activation.output += items
            conversation += items
            calls = [item for item in items if item.get("type") == "function_call"]
            if not calls:
                return activation.response()
            for call in calls:
                if activation.stop_reason is not None:
                    raise StoppedError
                # Not given up half-way: a tool may have an effect.
                output = await tools.call(str(call.get("name")), str(call.get("arguments")))
                item = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
                activation.output.append(item)
                conversation.append(item)
        return activation.response(incomplete="max_steps")


def _add_usage(activation: Activation, usage: dict[str, int] | None) -> None:
    if usage is None:
        return
    so_far = activation.usage or {}
    activation.usage = {name: so_far.get(name, 0) + count for name, count in usage.items()}
