"""Homing: several workers of one stateful server behave like one.

`homing run package.module:app --workers 4` needs no change to the app; `app = homing.sticky(app, …)` is the same in one
line, under `uvicorn --workers`.
"""

from __future__ import annotations

from homing.directory import SessionOwners
from homing.errors import (
    ConfigurationError,
    HomingError,
    NotHereError,
    ReplyError,
    SessionGoneError,
    SessionMovingError,
    SessionNotRecordedError,
)
from homing.forwarding import serve_private_socket
from homing.identity import (
    AGENT,
    RESOURCES,
    SESSION_OWNER_HEADER,
    SessionKind,
    Source,
    body,
    cookie,
    cookie_session,
    header,
    mcp_handle,
    mcp_token_session_id,
    path,
    query,
    signed_cookie,
)
from homing.lifetime import AgentSessionHolder, ResourcesSessionLifetimes, SessionLifetimes
from homing.routing import (
    SESSION_ACQUIRE_SCOPE_KEY,
    SESSION_ID_SCOPE_KEY,
    SessionRoutingMiddleware,
    end,
    install_session_routing,
    serving,
    sticky,
    worker_id,
)
from homing.rundir import (
    SESSION_OWNERS_DIR,
    SESSION_SOCKET_DIR_ENV,
    create_session_socket_dir,
    worker_socket_path,
)

__version__ = "0.1.0"

__all__ = [
    "AGENT",
    "RESOURCES",
    "SESSION_ACQUIRE_SCOPE_KEY",
    "SESSION_ID_SCOPE_KEY",
    "SESSION_OWNERS_DIR",
    "SESSION_OWNER_HEADER",
    "SESSION_SOCKET_DIR_ENV",
    "AgentSessionHolder",
    "ConfigurationError",
    "HomingError",
    "NotHereError",
    "ReplyError",
    "ResourcesSessionLifetimes",
    "SessionGoneError",
    "SessionKind",
    "SessionLifetimes",
    "SessionMovingError",
    "SessionNotRecordedError",
    "SessionOwners",
    "SessionRoutingMiddleware",
    "Source",
    "body",
    "cookie",
    "cookie_session",
    "create_session_socket_dir",
    "end",
    "header",
    "install_session_routing",
    "mcp_handle",
    "mcp_token_session_id",
    "path",
    "query",
    "serve_private_socket",
    "serving",
    "signed_cookie",
    "sticky",
    "worker_id",
    "worker_socket_path",
]
