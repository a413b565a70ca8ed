"""What a web server is put together from, in each worker when it starts.

The invariant: whatever an assembly opens (page servers, browsers) it closes, after the last session has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from homing.errors import ConfigurationError
from homing.web.base import BackendFactory, BrowserProvider, PrepareRuntime, Recordings, SitePool
from homing.web.settings import WebSettings
from homing.web.sites import LimitedSites, LockedSites, UnmanagedSites


@dataclass(frozen=True, slots=True)
class Assembly:
    """A manager's collaborators; the site pool is the server's own."""

    backends: BackendFactory
    browsers: BrowserProvider
    recordings: Recordings
    prepare: PrepareRuntime | None = None


class Assemble(Protocol):
    """Opens an assembly. Picklable, since each worker calls it in its own process."""

    def __call__(self, settings: WebSettings) -> AbstractAsyncContextManager[Assembly]: ...


@dataclass(frozen=True, slots=True)
class SiteRule:
    """How sites are shared: `unmanaged`, `locked`, or `limited` to so many sessions."""

    mode: str = "unmanaged"
    limit: int = 1

    @classmethod
    def parse(cls, text: str) -> SiteRule:
        """`unmanaged`, `locked`, or `limited:N`.

        Raises:
            ConfigurationError: it is none of these.
        """
        mode, _, limit = text.partition(":")
        if mode in ("unmanaged", "locked") and not limit:
            return cls(mode)
        if mode == "limited" and limit.isdigit() and int(limit) > 0:
            return cls(mode, int(limit))
        raise ConfigurationError(f"sites {text!r}: write unmanaged, locked, or limited:N")

    def pool(self, folder: str) -> SitePool:
        """The pool, with its lock files in this folder."""
        made: dict[str, Callable[[], SitePool]] = {
            "unmanaged": UnmanagedSites,
            "locked": lambda: LockedSites(folder),
            "limited": lambda: LimitedSites(folder, self.limit),
        }
        return made[self.mode]()
