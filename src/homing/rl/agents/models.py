"""Models behind OpenAI-compatible endpoints, asked for the next items of a conversation with the official client.

A conversation is a list of items as the OpenAI Responses API has them: messages, `function_call` and
`function_call_output`. Endpoints that know only chat completions get it as messages.

Not here: what is done with the items (`tool_calling.py`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from homing.errors import ConfigurationError
from homing.rl.agents.errors import AgentRunError

Item: TypeAlias = dict[str, Any]
ModelApi: TypeAlias = Literal["chat", "responses"]

_CHAT_NAMES: Final = {"max_output_tokens": "max_tokens"}
_PASSED: Final = ("temperature", "top_p", "max_output_tokens", "seed", "stop", "metadata", "presence_penalty")
"""Parameters of a request that are handed on to a chat endpoint, where they occur."""

_NOT_PASSED: Final = frozenset({"input", "tools", "model", "stream", "background", "store", "previous_response_id"})
"""Parameters that are the loop's own, or that an endpoint without memory cannot honour."""


class Model(Protocol):
    """Answers a conversation."""

    async def answer(
        self, conversation: Sequence[Item], tools: Sequence[Item], params: Mapping[str, Any]
    ) -> tuple[list[Item], dict[str, int] | None]:
        """The next items, and how many tokens that took.

        Raises:
            AgentRunError: the endpoint could not be reached or refused the request.
        """
        ...


class ChatModel:
    """A model behind `/chat/completions`, which every compatible server has. Borrows the client."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def answer(
        self, conversation: Sequence[Item], tools: Sequence[Item], params: Mapping[str, Any]
    ) -> tuple[list[Item], dict[str, int] | None]:
        settings: dict[str, Any] = {
            _CHAT_NAMES.get(name, name): params[name] for name in _PASSED if params.get(name) is not None
        }
        if tools:
            settings["tools"] = [_chat_tool(tool) for tool in tools]
            if params.get("tool_choice") is not None:
                settings["tool_choice"] = params["tool_choice"]
        try:
            completion = await self._client.chat.completions.create(
                model=params.get("model") or self._model,
                messages=chat_messages(conversation, params.get("instructions")),  # type: ignore[arg-type]  # JSON
                **settings,
            )
        except openai.OpenAIError as error:
            raise model_error(error) from error
        if not completion.choices:
            raise AgentRunError("model_refused", "the model's answer has no choices", retryable=True)
        message = completion.choices[0].message
        items: list[Item] = []
        if message.content:
            items.append(_message(message.content))
        items += [_function_call(call) for call in message.tool_calls or () if call.type == "function"]
        usage = completion.usage
        if usage is None:
            return items, None
        return items, {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        }


class ResponsesModel:
    """A model behind `/responses`. Borrows the client."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def answer(
        self, conversation: Sequence[Item], tools: Sequence[Item], params: Mapping[str, Any]
    ) -> tuple[list[Item], dict[str, int] | None]:
        settings = {name: value for name, value in params.items() if name not in _NOT_PASSED and value is not None}
        if tools:
            settings["tools"] = list(tools)
        try:
            response = await self._client.responses.create(
                model=params.get("model") or self._model,
                input=list(conversation),  # type: ignore[arg-type]  # JSON, as the caller sent it
                store=False,
                **settings,
            )
        except openai.OpenAIError as error:
            raise model_error(error) from error
        items = [item.model_dump(mode="json", exclude_none=True, warnings=False) for item in response.output]
        usage = response.usage
        if usage is None:
            return items, None
        return items, {
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
        }


def model_for(api: ModelApi, client: AsyncOpenAI, model: str) -> Model:
    """The model behind an endpoint of that kind.

    Raises:
        ConfigurationError: there is no such kind.
    """
    match api:
        case "chat":
            return ChatModel(client, model)
        case "responses":
            return ResponsesModel(client, model)
    raise ConfigurationError(f"model_api is {api!r}: use 'chat' or 'responses'")


def chat_messages(conversation: Sequence[Item], instructions: Any = None) -> list[dict[str, Any]]:
    """A conversation as chat messages; calls that follow one another are one assistant's message."""
    messages: list[dict[str, Any]] = []
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    for item in conversation:
        match item.get("type", "message"):
            case "message":
                role = item.get("role", "user")
                messages.append({"role": "system" if role == "developer" else role, "content": _text(item)})
            case "function_call":
                call = {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                }
                last = messages[-1] if messages else {}
                if last.get("role") == "assistant":
                    last.setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = item["output"]
                text = output if isinstance(output, str) else json.dumps(output)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            case _:
                pass  # reasoning and the like are the model's own, and chat has no place for them
    return messages


def model_error(error: openai.OpenAIError) -> AgentRunError:
    """What a failed call of a model says about the run."""
    if isinstance(error, openai.APIStatusError):
        retryable = error.status_code in (408, 409, 429) or error.status_code >= 500
        kind = "model_unavailable" if retryable else "model_refused"
        return AgentRunError(kind, f"the model's endpoint answered {error.status_code}", retryable=retryable)
    if isinstance(error, openai.APIConnectionError):
        return AgentRunError("model_unavailable", f"the model's endpoint: {type(error).__name__}", retryable=True)
    return AgentRunError("model_refused", f"the model's endpoint: {type(error).__name__}", retryable=False)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    named = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in named if tool.get(name) is not None}}


def _message(text: str) -> Item:
    return {
        "type": "message",
        "id": f"msg_{secrets.token_hex(12)}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _function_call(call: ChatCompletionMessageFunctionToolCall) -> Item:
    return {
        "type": "function_call",
        "id": f"fc_{secrets.token_hex(12)}",
        "call_id": call.id,
        "name": call.function.name,
        "arguments": call.function.arguments,
        "status": "completed",
    }


def _text(item: Item) -> Any:
    content = item.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    texts = [part.get("text", "") for part in content if part.get("type") in ("input_text", "output_text", "text")]
    if len(texts) == len(content):
        return "".join(texts)
    return [_chat_part(part) for part in content]


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url", "")}}
    return {"type": "text", "text": str(part.get("text", ""))}
