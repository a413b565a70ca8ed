"""Which session does a request to a resources or agent server name?

One rule per place, from the most binding to the least:

- On the MCP path the session token alone names the session: a cookie there is not used.
- Elsewhere the signed session cookie does; the token only where no cookie does, and a rejected cookie is no cookie.
- A seed or close may name the session in its body, which is read only there. Cookie (or token) and body that differ:
  409.
- A stop of a rollout, where nothing above names a session, names its path key.
- A request that names none of these may name a worker (`x-ng-session-owner`).

Every route also matches below a rollout prefix (`/ng-rollout/<id>`).

Not here: who owns a session, and making IDs: where the kind's router mints, `Named.mints` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from itsdangerous import URLSafeSerializer

from homing.clock import SYSTEM_CLOCK, Clock
from homing.errors import BadOwnerHeaderError, ConfigurationError, SessionConflictError
from homing.identity.base import Learner, Named
from homing.identity.body import MAX_BODY_BYTES, BodyReader, has_body
from homing.identity.cookie import SESSION_MAX_AGE_SECONDS, SignedCookieReader
from homing.identity.documents import field_text
from homing.identity.ids import head_headers, header_text, session_id
from homing.identity.sources import Headers
from homing.identity.token import mcp_token_session_id
from homing.routes import ROLLOUT_PATH_PREFIX, ROLLOUT_PREFIX, Route, Routes, path_below_root, request_method
from homing.types import Receive, Scope, SessionId, WorkerId

SESSION_OWNER_HEADER: Final = "x-ng-session-owner"
"""The request header by which a request without a session names the worker it belongs to: its worker ID, once."""

_OWNER_HEADER: Final = SESSION_OWNER_HEADER.encode()
_PREFIXED: Final = f"/{ROLLOUT_PATH_PREFIX}/"
_WORKER_ID: Final = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True)
class SessionKind:
    """Where one kind of server's requests name their session.

    Attributes:
        cookie_key: The key of the signed session cookie that holds the session ID.
        id_field: The field of a seed's or close's JSON body that holds it.
        seed_path: The path of a seed, such as `/seed_session`.
        close_path: The path of a close.
        cookie_session: The session ID lives in the cookie of every request, so a request without one gets an ID that
            the router mints. Not so for agents, whose callers choose the IDs.
        path_key: Matches the paths that name a session by a key of their own, whole and below `root_path`, with or
            without a rollout prefix. The key's text is the pattern's first group, or all that it matched if it has no
            group; it never holds the rollout prefix, so the group leaves that out.
        path_key_field: The field of a seed's body, dotted, from which the seed's own path key is formed:
            `path_key_prefix` and the field's text. A text with a slash in it is no segment of a path, and forms no key.
        path_key_prefix: What stands before that text.
        owner_header: A request that names no session may name its worker in `x-ng-session-owner`.
    """

    cookie_key: str
    id_field: str
    seed_path: str
    close_path: str
    cookie_session: bool
    path_key: re.Pattern[str] | None = None
    path_key_field: str | None = None
    path_key_prefix: str = "/rollouts/"
    owner_header: bool = True

    @property
    def body_paths(self) -> re.Pattern[str]:
        """Matches the paths whose body may name the session, with `fullmatch`: seed and close, also below a rollout
        prefix.
        """
        return _body_paths(self.seed_path, self.close_path)


RESOURCES: Final = SessionKind(
    cookie_key="session_id",
    id_field="resources_session_id",
    seed_path="/seed_session",
    close_path="/close_session",
    cookie_session=True,
)
"""A resources server's sessions."""

AGENT: Final = SessionKind(
    cookie_key="agent_session_id",
    id_field="agent_session_id",
    seed_path="/v1/agent_sessions",
    close_path="/v1/agent_sessions/close",
    cookie_session=False,
    path_key=re.compile(rf"{ROLLOUT_PREFIX}(/rollouts/[^/]+)/stop\n?"),
    path_key_field="episode_id.rollout_id",
)
"""An agent server's sessions; a stop, `/rollouts/<rollout id>/stop`, names the key `/rollouts/<rollout id>`."""


class KindIdentity:
    """Finds the session of each request of a server whose sessions are of one kind.

    Keeps nothing of a request but a bounded number of decoded cookies. Borrows `scope` and `receive`.

    Args:
        kind: Where the session is named.
        session_cookie: The session middleware's cookie.
        secret_key: The session middleware's secret.
        starts: Further paths that start a session, as `"METHOD /route"` or `"/route"`; the seed is one by itself.
        ends: Further paths that end the session they name; the close is one by itself.
        mcp_token_header: The header that carries an MCP session token; None: there are no tokens.
        mcp_token_serializer: Verifies the token; given together with its header.
        mcp_path: The path of the MCP endpoint, on which the token alone counts. With or without a slash at its end.
        close_follows_header: The header by which an end route's caller says `1`: a close follows, so this is no end yet.
        max_body_bytes: The largest JSON body of a seed or close.
        max_age_seconds: How long a cookie is good for, as the session middleware's `max_age`.
        clock: Whose wall clock ages cookies.

    Raises:
        ConfigurationError: cookie or secret is empty, a token's header came without its serializer, or a route is
            malformed.
    """

    def __init__(
        self,
        kind: SessionKind,
        session_cookie: str,
        secret_key: str,
        *,
        starts: Routes | Iterable[str] = (),
        ends: Routes | Iterable[str] = (),
        mcp_token_header: str | None = None,
        mcp_token_serializer: URLSafeSerializer | None = None,
        mcp_path: str = "/mcp",
        close_follows_header: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_age_seconds: int | None = SESSION_MAX_AGE_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not session_cookie or not secret_key:
            raise ConfigurationError("a session kind needs the session middleware's cookie name and its secret")
        if (mcp_token_header is None) != (mcp_token_serializer is None):
            raise ConfigurationError("an MCP token needs both its header and its serializer: give both, or neither")
        self.kind: Final = kind
        self._seeds = Routes((Route(None, kind.seed_path),), rollout_prefix=True)
        self._closes = Routes((Route(None, kind.close_path),), rollout_prefix=True)
        self._starts = _below_prefix(starts)
        self._ends = _below_prefix(ends)
        self._mcp = Routes.parse(
            () if mcp_token_header is None else {mcp_path, mcp_path.rstrip("/") + "/"}, rollout_prefix=True
        )
        declared = [self._seeds, self._closes, self._starts, self._ends, self._mcp]
        self._declared: Final = frozenset(route.template for routes in declared for route in routes.routes)
        self._has_templates: Final = any("{" in template for template in self._declared)
        self._token_header = None if mcp_token_header is None else mcp_token_header.lower().encode("ascii")
        self._token_serializer = mcp_token_serializer
        self._close_follows = None if close_follows_header is None else close_follows_header.lower().encode("latin-1")
        self._cookie = SignedCookieReader(
            session_cookie, kind.cookie_key, secret_key, max_age_seconds=max_age_seconds, clock=clock
        )
        self._id_path = (kind.id_field,)
        self._path_key_path = tuple(kind.path_key_field.split(".")) if kind.path_key_field else ()
        self._body = BodyReader(max_body_bytes, (*self._id_path, *self._path_key_path))

    def from_head(self, scope: Scope) -> Named | None:
        """What the head says, or None for a seed or close, whose body has to be read first.

        Raises:
            SessionIdTooLongError: the session's ID is over 1,024 bytes long.
            BadOwnerHeaderError: `x-ng-session-owner` counts, and is no worker ID, or occurs twice.
        """
        path = path_below_root(scope)
        if self._is_ordinary(path):
            headers = head_headers(scope)
            named, mints = self._in_head(False, headers)
            return self._named(path, headers, named, mints=mints, start=False, end=False)
        seed, close = self._seeds.matches(None, path), self._closes.matches(None, path)
        if (seed or close) and scope["type"] == "http" and has_body(scope):
            return None
        headers = head_headers(scope)
        named, mints = self._in_head(self._mcp.matches(None, path), headers)
        start, end = self._start_and_end(scope, path, seed, close)
        return self._named(path, headers, named, mints=mints, start=start, end=end)

    async def from_body(self, scope: Scope, receive: Receive) -> tuple[Named, Receive]:
        """What head and body of a seed or close say, and a `receive` that gives the body once more and then the real
        events.

        A client that left half-way starts and ends nothing, gets no ID, and its body names nothing.

        Raises:
            BadRequestError: 400, 408, 413 or 415, as the subclass says.
            SessionConflictError: cookie (or token) and body name different sessions.
            UnavailableError: 503, too much is being read at once.
        """
        path, headers = path_below_root(scope), head_headers(scope)
        in_head, mints = self._in_head(self._mcp.matches(None, path), headers)
        body = await self._body.read(scope, receive)
        if not body.complete:
            return self._named(path, headers, in_head, mints=False, start=False, end=False), body.receive
        in_body = session_id(field_text(body.document, self._id_path))
        if in_head is not None and in_body is not None and in_head != in_body:
            raise SessionConflictError
        seed = self._seeds.matches(None, path)
        start, end = self._start_and_end(scope, path, seed, self._closes.matches(None, path))
        key = None
        if seed and self._path_key_path:
            rollout = field_text(body.document, self._path_key_path)
            if rollout is not None and "/" not in rollout:
                key = self.kind.path_key_prefix + rollout
        named = self._named(path, headers, in_head or in_body, mints=mints, start=start, end=end, start_path_key=key)
        return named, body.receive

    @property
    def head_learner(self) -> None:
        """None, as `learner`."""
        return None

    def learner(self, scope: Scope, named: Named) -> Learner | None:
        """None: every ID is the caller's, or one that the router minted."""
        return None

    def __repr__(self) -> str:
        return f"<KindIdentity {self.kind.cookie_key}>"

    def _is_ordinary(self, path: str) -> bool:
        """Whether the path is surely on none of the declared routes, as most are: a fast answer for every request."""
        return (
            path not in self._declared
            and not self._has_templates
            and not path.startswith(_PREFIXED)
            and path[-1:] != "\n"
        )

    def _in_head(self, on_mcp: bool, headers: Headers) -> tuple[SessionId | None, bool]:
        """The session that cookie or token name, and whether the router may mint one if they name none."""
        if not on_mcp:
            in_cookie = session_id(self._cookie.read(headers))
            if in_cookie is not None:
                return in_cookie, False
        token = self._token(headers)
        if token is None:
            return None, self.kind.cookie_session and not on_mcp
        assert self._token_serializer is not None
        # A rejected token is no token, and its request gets no new session either: whoever checks it must refuse it.
        return session_id(mcp_token_session_id(header_text(token), self._token_serializer)), False

    def _token(self, headers: Headers) -> bytes | None:
        if self._token_header is not None:
            for name, value in headers:
                if name == self._token_header:
                    return value
        return None

    def _start_and_end(self, scope: Scope, path: str, seed: bool, close: bool) -> tuple[bool, bool]:
        method = request_method(scope)
        return (
            seed or self._starts.matches(method, path),
            close or (self._ends.matches(method, path) and not self._close_is_to_follow(scope)),
        )

    def _close_is_to_follow(self, scope: Scope) -> bool:
        return [value for name, value in head_headers(scope) if name == self._close_follows] == [b"1"]

    def _named(
        self,
        path: str,
        headers: Headers,
        named: SessionId | None,
        *,
        mints: bool,
        start: bool,
        end: bool,
        start_path_key: str | None = None,
    ) -> Named:
        if named is not None:
            return Named(named, start, end, start_path_key=start_path_key)
        path_key = self._path_key(path)
        worker = self._worker(headers) if self.kind.owner_header and path_key is None else None
        return Named(None, start, end, mints=mints, path_key=path_key, worker=worker)

    def _path_key(self, path: str) -> str | None:
        pattern = self.kind.path_key
        found = None if pattern is None else pattern.fullmatch(path)
        if found is None:
            return None
        return found[1] if found.re.groups else found[0]

    def _worker(self, headers: Headers) -> WorkerId | None:
        """The worker that the request names.

        Raises:
            BadOwnerHeaderError: the header is no worker ID, or occurs twice.
        """
        values = [value for name, value in headers if name == _OWNER_HEADER]
        if not values:
            return None
        if len(values) > 1 or not _WORKER_ID.fullmatch(values[0]):
            raise BadOwnerHeaderError
        return WorkerId(values[0].decode("ascii"))


@lru_cache(maxsize=64)
def _body_paths(seed_path: str, close_path: str) -> re.Pattern[str]:
    return re.compile(rf"{ROLLOUT_PREFIX}(?:{re.escape(seed_path)}|{re.escape(close_path)})\n?")


def _below_prefix(routes: Routes | Iterable[str]) -> Routes:
    if isinstance(routes, Routes):
        return Routes(routes.routes, rollout_prefix=True)
    return Routes.parse(routes, rollout_prefix=True)
