"""Where the workers of an app that routes itself meet, and with what settings: as `homing run` says, or by themselves.

The invariant: every worker of a server comes to the same answer.

Not here: apps that `homing run` or `homing.sticky` route (`homing.routing.sticky`).
"""

from __future__ import annotations

from typing import Any

from homing.routing import RoutingOptions
from homing.rundir import leave_run_directory, made_by_launcher, named_run_directory, siblings_directory
from homing.runtime.secret import server_secret


class MeetingPlace:
    """What an app that routes itself knows of its workers.

    Args:
        name: Tells the app from others in a run directory that several share.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.options: RoutingOptions | None = None
        """How this server runs; None until `homing run` says so, and for ever under other servers."""

    def __repr__(self) -> str:
        return f"<MeetingPlace of {self.name}>"

    @property
    def has_others(self) -> bool:
        """Whether there may be other workers."""
        if self.options is not None:
            return self.options.socket_dir is not None
        return named_run_directory() is not None or made_by_launcher()

    def directory(self) -> str | None:
        """The run directory; None if there are no other workers."""
        return self._directory() if self.has_others else None

    def secret(self) -> str:
        """What the workers share to sign with."""
        return server_secret(self.directory())

    def settings(self) -> dict[str, Any]:
        """For `install_session_routing`: where, and what `homing run` was told."""
        found: dict[str, Any] = {
            "socket_dir": self._directory if self.has_others else None,
            "leave_dir": leave_run_directory,
            "app_name": self.name,
            "lifespan_required": True,
        }
        if self.options is not None:
            found |= {
                "leave_dir": None,
                "app_name": None,
                "backlog": self.options.backlog,
                "owner_timeout_seconds": self.options.owner_timeout_seconds,
                "max_sessions": self.options.max_sessions_per_worker,
                "placing": self.options.placing,
                "scatter": self.options.scatter,
                "graceful_seconds": self.options.graceful_seconds,
            }
        return found

    def _directory(self) -> str:
        if self.options is not None and self.options.socket_dir is not None:
            return self.options.socket_dir
        return siblings_directory(self.name)
