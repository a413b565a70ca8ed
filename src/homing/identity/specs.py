"""Sources as users write them: the constructors of the Python API, and the command line's specs, which mean the same.

Each checks what it is given, and says in one line what to write instead.

Not here: what a source reads (`sources.py`).
"""

from __future__ import annotations

import re
from typing import Final

from homing.errors import ConfigurationError
from homing.identity.cookie import SESSION_MAX_AGE_SECONDS
from homing.identity.sources import (
    BodySource,
    CookieSource,
    HeaderSource,
    McpHandleSource,
    PathSource,
    QuerySource,
    SignedCookieSource,
    Source,
)
from homing.routes import Route, template_pattern

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def header(name: str) -> Source:
    """The session is named by the request header `name`, in any case.

    Replies: the same header names a session that the app has just made.

    Raises:
        ConfigurationError: `name` is no header's name.
    """
    if not _TOKEN.fullmatch(name):
        raise ConfigurationError(f"source 'header:{name}': write 'header:NAME', such as 'header:x-session-id'")
    return HeaderSource(name.lower())


def cookie(name: str) -> Source:
    """The session is named by the text of the cookie `name`; only the exact name counts.

    Replies: the same cookie in `Set-Cookie`; one that deletes the cookie names nothing.

    Raises:
        ConfigurationError: `name` is no cookie's name.
    """
    if not _TOKEN.fullmatch(name):
        raise ConfigurationError(f"source 'cookie:{name}': write 'cookie:NAME', such as 'cookie:sid'")
    return CookieSource(name)


def signed_cookie(name: str, key: str, *, secret: str, max_age_seconds: int | None = SESSION_MAX_AGE_SECONDS) -> Source:
    """The session is named by `key` inside Starlette's signed session cookie `name`.

    Args:
        name: The session middleware's `session_cookie`, `"session"` unless set.
        key: The key of `request.session` whose value is the session ID: a string.
        secret: The session middleware's `secret_key`.
        max_age_seconds: The session middleware's `max_age`, 14 days unless set; None accepts a cookie of any age.

    Replies: the same cookie in `Set-Cookie`.

    Raises:
        ConfigurationError: there is no such cookie name, or the key or the secret is empty.
    """
    if not _TOKEN.fullmatch(name) or not key:
        raise ConfigurationError(
            f"source 'signed-cookie:{name}:{key}': write 'signed-cookie:NAME:KEY', such as 'signed-cookie:session:sid'"
        )
    if not secret:
        raise ConfigurationError(
            f"source 'signed-cookie:{name}:{key}': it needs the session middleware's secret: add "
            "--secret-env VAR with a variable that holds it (in code: signed_cookie(name, key, secret=...))"
        )
    return SignedCookieSource(name, key, secret, max_age_seconds)


def query(name: str) -> Source:
    """The session is named by the query parameter `name`.

    Raises:
        ConfigurationError: `name` is empty.
    """
    if not name:
        raise ConfigurationError("source 'query:': write 'query:NAME', such as 'query:session_id'")
    return QuerySource(name)


def path(template: str) -> Source:
    """The session is named by the segment `{session}` of the path, such as in `/sessions/{session}`.

    Also matches everything beneath the template: `/sessions/abc/step` is of the session `abc`.

    Raises:
        ConfigurationError: the template has no `{session}`, or is no path.
    """
    if "{session}" not in template:
        raise ConfigurationError(f"source 'path:{template}': it has no {{session}}: write 'path:/sessions/{{session}}'")
    try:
        template_pattern(template)
    except ConfigurationError as error:
        raise ConfigurationError(f"source 'path:{template}': {error}") from None
    return PathSource(template)


def body(field: str, route: str) -> Source:
    """The session is named by a field of the JSON body on one route, such as `body("episode.id", "POST /start")`.

    Replies: the same field of that route's JSON reply, or of the JSON data of a server-sent event of it.

    Raises:
        ConfigurationError: the field or the route is missing or malformed.
    """
    if not all(field.split(".")) or not route:
        raise ConfigurationError(f"source 'body:{field}@{route}': write 'body:FIELD@/route', such as 'body:a.b@/start'")
    return BodySource(field, _route(f"body:{field}@{route}", route))


def mcp_handle(name: str, route: str = "POST /mcp") -> Source:
    """The session is named by the argument `name` of MCP tool calls, as servers of the sessionless era (2026-07-28) do.

    Replies: the key `name` of a tool result's structured content, or of a JSON object in its text content.

    The `Mcp-Param-...` header that mirrors an argument counts only where the call has no such argument: see
    `homing.identity.handles` for why it is not trusted in place of the body.

    Raises:
        ConfigurationError: the name is empty, or the route malformed.
    """
    if not name or "@" in name:
        raise ConfigurationError(f"source 'mcp-handle:{name}': write 'mcp-handle:NAME' or 'mcp-handle:NAME@/mcp'")
    return McpHandleSource(name, _route(f"mcp-handle:{name}@{route}", route))


def parse_source(spec: str, *, secret: str | None = None) -> Source:
    """The source that a command line names, such as `cookie:sid` or `body:a.b@/start`.

    Args:
        spec: `header:NAME`, `cookie:NAME`, `signed-cookie:NAME:KEY`, `query:NAME`, `path:/sessions/{session}`,
            `body:FIELD@/route` or `mcp-handle:NAME[@/route]`; a route may have a method before it.
        secret: The session middleware's secret, which only a signed cookie needs.

    Raises:
        ConfigurationError: the spec is none of these; one line that says what to write.
    """
    kind, _, rest = spec.partition(":")
    if kind == "header":
        return header(rest)
    if kind == "cookie":
        return cookie(rest)
    if kind == "signed-cookie":
        name, _, key = rest.partition(":")
        return signed_cookie(name, key, secret=secret or "")
    if kind == "query":
        return query(rest)
    if kind == "path":
        return path(rest)
    if kind == "body":
        field, at, route = rest.partition("@")
        if not at:
            raise ConfigurationError(
                f"source {spec!r}: it has no route: write 'body:FIELD@/route', such as 'body:a.b@/start'"
            )
        return body(field, route)
    if kind == "mcp-handle":
        name, at, route = rest.partition("@")
        if not name:
            raise ConfigurationError(f"source {spec!r}: write 'mcp-handle:NAME' or 'mcp-handle:NAME@/mcp'")
        return mcp_handle(name, route) if at else mcp_handle(name)
    raise ConfigurationError(
        f"source {spec!r}: no such kind: write header:NAME, cookie:NAME, signed-cookie:NAME:KEY, query:NAME, "
        "path:/sessions/{session}, body:FIELD@/route or mcp-handle:NAME"
    )


def _route(spec: str, text: str) -> Route:
    try:
        return Route.parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"source {spec!r}: {error}") from None
