"""An agent server for tests: `homing run tests.support.rl_agents:echo`."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from homing.rl import (
    Activation,
    AgentRunError,
    AgentServer,
    AgentSession,
    AgentSetupError,
    EnvironmentServer,
    SeedRejectedError,
)
from homing.rl.episode_protocol import AgentCapabilities

NOWHERE = "http://127.0.0.1:9"
"""The port that discards, where anything listens there at all."""


class EchoAgent(AgentServer):
    """Does what the first word of its input says. What a session keeps is in the memory of the process that seeded it.

    The task's ID says what becomes of the seed: `reject`, `unavailable`, `broken`, or `stays`, whose clean-up fails twice.
    """

    async def set_up(self, session: AgentSession) -> None:
        session.state = {"asked": 0, "failures": 0}
        match session.seed.task_id.task_id:
            case "reject":
                raise SeedRejectedError("task_id: this agent does not do that")
            case "unavailable":
                raise AgentSetupError
            case "broken":
                raise RuntimeError("the test wants this set-up to fail")

    async def clean_up(self, session: AgentSession) -> dict[str, Any]:
        if session.seed.task_id.task_id == "stays" and session.state["failures"] < 2:
            session.state["failures"] += 1
            raise RuntimeError("the test wants this clean-up to fail")
        return {"asked": session.state["asked"], "pid": os.getpid()}

    async def respond(self, activation: Activation) -> dict[str, Any]:
        asked = str(activation.request.input)
        if activation.session is not None:
            activation.session.state["asked"] += 1
        says(activation, f"{os.getpid()} {self.runs} {asked}")
        match asked.partition(" ")[0]:
            case "wait":
                while activation.stop_reason is None:
                    await asyncio.sleep(0.01)
            case "hang":
                Path(asked.split()[1]).touch()  # tells the test that it runs
                await asyncio.Event().wait()
            case "lost":
                raise AgentRunError("session_lost", "the test wants this", retryable=True)
            case "bug":
                raise RuntimeError("the test wants this")
        return activation.response()


def says(activation: Activation, text: str) -> None:
    activation.output.append(
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    )


def said(response: dict[str, Any]) -> list[str]:
    """What a response's first message says, by word."""
    words: list[str] = response["output"][0]["content"][0]["text"].split()
    return words


def echo() -> EchoAgent:
    window = float(os.environ.get("TEST_CLOSE_RETRY_WINDOW", "2"))
    return EchoAgent(name="echo", close_retry_window_seconds=window, resources_url=os.environ.get("TEST_RESOURCES_URL"))


class SandboxedAgent(EchoAgent):
    """Takes a sandbox, and says first which it was granted."""

    capabilities = AgentCapabilities(tool_transports=["direct_http", "mcp"], sandbox_access=True)

    async def respond(self, activation: Activation) -> dict[str, Any]:
        if activation.session is not None:
            says(activation, json.dumps(activation.session.seed.sandbox_access))
        return await super().respond(activation)


def sandboxed() -> SandboxedAgent:
    return SandboxedAgent(name="sandboxed", close_retry_window_seconds=2.0, resources_url=NOWHERE)


def alone() -> EnvironmentServer:
    """An environment server whose other servers cannot be reached: each of its episodes is a failure."""
    return EnvironmentServer(name="alone", resources_url=NOWHERE, agent_url=NOWHERE)
