"""Which session does an MCP session token name?

A token is a signed dict, sent in a header in place of the session cookie; it has no date, so it does not expire.

Not here: the token's list of tools, and refusing a bad token. The MCP endpoint does both.
"""

from __future__ import annotations

from itsdangerous import BadData, URLSafeSerializer


def mcp_token_session_id(token: str, serializer: URLSafeSerializer) -> str | None:
    """The session ID in an MCP session token; None for a token with a bad signature, or without one.

    Args:
        token: The header's text: a signed JSON object with `sid`, the session ID.
        serializer: The endpoint's own, so a token for another server or another purpose has a bad signature here.

    Bad input raises nothing. A rejected token names no session: its request is handled where it arrives, where the MCP
    endpoint's own check refuses it.
    """
    try:
        payload = serializer.loads(token)
    except (BadData, ValueError, RecursionError):
        return None
    session_id = payload.get("sid") if isinstance(payload, dict) else None
    return session_id if isinstance(session_id, str) and session_id else None
