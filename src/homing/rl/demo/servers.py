"""The four servers of `homing rl demo`, as factories for `homing run`. Each imports only what its own server needs.

What a server has to know of the others, and how it is set, comes from the environment.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from homing.errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from homing.rl.agents.tool_calling import ToolCallingAgent
    from homing.rl.demo.task import SumServer
    from homing.rl.episodes.server import EnvironmentServer

URLS: Final = {name: f"HOMING_RL_DEMO_{name.upper()}_URL" for name in ("model", "resources", "agent")}
"""Which variable names the address of which server."""

SETTINGS: Final = "HOMING_RL_DEMO_"


def model() -> Starlette:
    """The model's app."""
    from homing.rl.demo import model as demo_model

    return demo_model.make_app()


def resources() -> SumServer:
    """The resources server."""
    from homing.rl.demo.task import SumServer

    return SumServer(name="demo", close_retry_window_seconds=_window_seconds(), expose_tools_over_mcp=_flag("MCP"))


def agent() -> ToolCallingAgent:
    """The agent server."""
    from homing.rl.agents.tool_calling import ToolCallingAgent
    from homing.rl.demo import model as demo_model

    return ToolCallingAgent(
        name="demo",
        model_url=_url("model") + "/v1",
        model=demo_model.MODEL_NAME,
        resources_url=_url("resources"),
        close_retry_window_seconds=_window_seconds(),
        new_connection_per_call=True,
    )


def environment() -> EnvironmentServer:
    """The environment server."""
    from homing.rl.episodes.server import EnvironmentServer

    return EnvironmentServer(
        name="demo",
        resources_url=_url("resources"),
        agent_url=_url("agent"),
        tool_transports=("mcp",) if _flag("MCP") else ("direct_http",),
        max_concurrent_episodes=int(os.environ.get(SETTINGS + "SLOTS", "64")),
        queue_timeout_seconds=120.0,
        default_episode_timeout_seconds=120.0,
        new_connection_per_call=True,
    )


def _url(name: str) -> str:
    try:
        return os.environ[URLS[name]]
    except KeyError:
        raise ConfigurationError(f"{URLS[name]} is not set: `homing rl demo` starts this server, and sets it") from None


def _flag(name: str) -> bool:
    return os.environ.get(SETTINGS + name) == "1"


def _window_seconds() -> float:
    return float(os.environ.get(SETTINGS + "WINDOW", "300"))
