"""How long does ownership last?"""

from homing.lifetime.base import SessionLifetimes
from homing.lifetime.records import (
    CLOSE_FOLLOWS_HEADER,
    AgentSessionHolder,
    AgentSessionLifetimes,
    OwnershipReleaser,
    ResourcesSessionLifetimes,
)
from homing.lifetime.window import BEGAN_SCOPE_KEY, ENDED_SCOPE_KEY, IdleLifetimes, Seen, succeeded

__all__ = [
    "BEGAN_SCOPE_KEY",
    "CLOSE_FOLLOWS_HEADER",
    "ENDED_SCOPE_KEY",
    "AgentSessionHolder",
    "AgentSessionLifetimes",
    "IdleLifetimes",
    "OwnershipReleaser",
    "ResourcesSessionLifetimes",
    "Seen",
    "SessionLifetimes",
    "succeeded",
]
