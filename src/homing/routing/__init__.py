"""What does this worker do with a request? Joins the four rooms below: identify, who owns it, decide, serve or forward."""

from __future__ import annotations

from homing.routing.install import install_session_routing
from homing.routing.middleware import SessionRoutingMiddleware
from homing.routing.options import RoutingOptions
from homing.routing.request import SESSION_ACQUIRE_SCOPE_KEY, SESSION_ID_SCOPE_KEY
from homing.routing.sticky import build, end, serving, sticky
from homing.routing.worker import Worker, worker_id

__all__ = [
    "SESSION_ACQUIRE_SCOPE_KEY",
    "SESSION_ID_SCOPE_KEY",
    "RoutingOptions",
    "SessionRoutingMiddleware",
    "Worker",
    "build",
    "end",
    "install_session_routing",
    "serving",
    "sticky",
    "worker_id",
]
