"""RL servers and their clients: resources servers, Gymnasium environments, agents, and the episodes that join them.

Needs the extra `homing[rl]`. What a name needs is imported when it is first used, so an agent server does not import
Gymnasium, nor an environment's client the OpenAI SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from homing.rl.agents.activation import Activation, AgentSession
    from homing.rl.agents.errors import AgentRunError, AgentSetupError
    from homing.rl.agents.server import AgentServer
    from homing.rl.agents.tool_calling import ToolCallingAgent
    from homing.rl.client import RemoteEnv, RemoteVectorEnv
    from homing.rl.episode_protocol import ToolAccess
    from homing.rl.episodes.server import EnvironmentServer
    from homing.rl.errors import ConflictError, RemoteError, SeedRejectedError, ToolError
    from homing.rl.gymnasium import GymnasiumServer
    from homing.rl.protocol import EpisodeId, TaskId, Verdict, VerifyRequest
    from homing.rl.resources import ResourcesServer, Seed, Seeded
    from homing.rl.rollout import current_rollout
    from homing.rl.server import RlServer
    from homing.rl.tools import tool

_MODULES: Final = {
    "Activation": "agents.activation",
    "AgentRunError": "agents.errors",
    "AgentServer": "agents.server",
    "AgentSession": "agents.activation",
    "AgentSetupError": "agents.errors",
    "ConflictError": "errors",
    "EnvironmentServer": "episodes.server",
    "EpisodeId": "protocol",
    "GymnasiumServer": "gymnasium",
    "RemoteEnv": "client",
    "RemoteError": "errors",
    "RemoteVectorEnv": "client",
    "ResourcesServer": "resources",
    "RlServer": "server",
    "Seed": "resources",
    "SeedRejectedError": "errors",
    "Seeded": "resources",
    "TaskId": "protocol",
    "ToolAccess": "episode_protocol",
    "ToolCallingAgent": "agents.tool_calling",
    "ToolError": "errors",
    "Verdict": "protocol",
    "VerifyRequest": "protocol",
    "current_rollout": "rollout",
    "tool": "tools",
}
"""Each public name, and the module of this room that it is in."""

__all__ = [
    "Activation",
    "AgentRunError",
    "AgentServer",
    "AgentSession",
    "AgentSetupError",
    "ConflictError",
    "EnvironmentServer",
    "EpisodeId",
    "GymnasiumServer",
    "RemoteEnv",
    "RemoteError",
    "RemoteVectorEnv",
    "ResourcesServer",
    "RlServer",
    "Seed",
    "SeedRejectedError",
    "Seeded",
    "TaskId",
    "ToolAccess",
    "ToolCallingAgent",
    "ToolError",
    "Verdict",
    "VerifyRequest",
    "current_rollout",
    "tool",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
