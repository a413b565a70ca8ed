"""Which session does this request name?"""

from __future__ import annotations

from homing.identity.base import HeadLearner, Identity, Learned, Learner, Named, named_only
from homing.identity.body import MAX_BODY_BYTES
from homing.identity.cookie import SESSION_MAX_AGE_SECONDS, cookie_session
from homing.identity.generic import SourcesIdentity
from homing.identity.ids import HEAD_LENGTH_SCOPE_KEY
from homing.identity.kinds import AGENT, RESOURCES, SESSION_OWNER_HEADER, KindIdentity, SessionKind
from homing.identity.presets import PRESETS, Preset, preset
from homing.identity.sources import McpHandleSource, SignedCookieSource, Source
from homing.identity.specs import body, cookie, header, mcp_handle, parse_source, path, query, signed_cookie
from homing.identity.token import mcp_token_session_id

__all__ = [
    "AGENT",
    "HEAD_LENGTH_SCOPE_KEY",
    "MAX_BODY_BYTES",
    "PRESETS",
    "RESOURCES",
    "SESSION_MAX_AGE_SECONDS",
    "SESSION_OWNER_HEADER",
    "HeadLearner",
    "Identity",
    "KindIdentity",
    "Learned",
    "Learner",
    "McpHandleSource",
    "Named",
    "Preset",
    "SessionKind",
    "SignedCookieSource",
    "Source",
    "SourcesIdentity",
    "body",
    "cookie",
    "cookie_session",
    "header",
    "mcp_handle",
    "mcp_token_session_id",
    "named_only",
    "parse_source",
    "path",
    "preset",
    "query",
    "signed_cookie",
]
