"""A process that has no descriptors left, from outside it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors(pid: int, more: int) -> Iterator[None]:
    """The process may open so many descriptors more than it has, and no others."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(max(taken) + more + 2) if number not in taken]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[more], hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
