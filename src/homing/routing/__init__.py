"""What does this worker do with a request? Joins the four rooms below: identify, who owns it, decide, serve or forward."""

from __future__ import annotations

from homing.routing.middleware import SessionRoutingMiddleware
from homing.routing.options import RoutingOptions
from homing.routing.sticky import build, end, serving, sticky
from homing.routing.worker import Worker, worker_id

__all__ = [
    "RoutingOptions",
    "SessionRoutingMiddleware",
    "Worker",
    "build",
    "end",
    "serving",
    "sticky",
    "worker_id",
]
