"""Which worker owns that session?"""

from homing.directory.base import Ask, Counters, Given, OwnerAliveError, StillOwnedError
from homing.directory.memory import MemoryOwners, MemoryTable
from homing.directory.owners import SessionOwners
from homing.directory.ownership import Ownership

__all__ = [
    "Ask",
    "Counters",
    "Given",
    "MemoryOwners",
    "MemoryTable",
    "OwnerAliveError",
    "Ownership",
    "SessionOwners",
    "StillOwnedError",
]
