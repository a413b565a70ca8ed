"""What RL servers have in common: an ASGI app that routes itself, with a secret that its workers share.

`homing run module:server --workers 4` serves it. The app is made when it is first needed, since only then is it known how
many workers there are and where they meet.

Not here: the routes (`resources.py`, `gymnasium.py`, and the agent's), and how requests are routed (`homing.routing`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

from fastapi import FastAPI
from itsdangerous import URLSafeSerializer
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import Response

import homing
from homing.clock import SYSTEM_CLOCK, Clock
from homing.errors import ConfigurationError
from homing.identity import SESSION_OWNER_HEADER, SessionKind
from homing.lifetime import CLOSE_FOLLOWS_HEADER, AgentSessionHolder
from homing.rl.json_route import (
    DEFAULT_MAX_BODY_BYTES,
    FastRoutes,
    Handler,
    add_error_replies,
    add_json_route,
    json_response,
)
from homing.rl.rollout import RolloutPrefixMiddleware
from homing.routing import RoutingOptions, SessionRoutingMiddleware, install_session_routing
from homing.runtime.meeting import MeetingPlace
from homing.types import Receive, Scope, Send, WorkerId

logger = logging.getLogger(__name__)

DEFAULT_CLOSE_RETRY_WINDOW_SECONDS: Final = 300.0

COOKIE_MAX_AGE_SECONDS: Final = 14 * 24 * 3600


class RlServer:
    """An RL server: an ASGI app that routes its own sessions.

    Subclasses say what kind of sessions they have, and add their routes.

    Args:
        name: Names this server beside others of its class: in its cookie, and as the MCP server's name.
        secret: Signs the session cookie and the MCP tokens. By default one that the supervisor makes and all workers
            share; give one if several machines serve the same sessions.
        close_retry_window_seconds: How long a closed session is remembered, so that a late seed is refused and a
            repeated close succeeds. Positive and finite.
        max_body_bytes: The largest body of a request.
        clock: Measures windows.
    """

    homing_routed: Final = True
    """What tells `homing run` that an app routes itself."""

    kind: ClassVar[SessionKind]
    session_starts: ClassVar[tuple[str, ...]] = ()
    session_ends: ClassVar[tuple[str, ...]] = ()
    close_follows_header: ClassVar[str | None] = CLOSE_FOLLOWS_HEADER

    def __init__(
        self,
        *,
        name: str = "server",
        secret: str | None = None,
        close_retry_window_seconds: float = DEFAULT_CLOSE_RETRY_WINDOW_SECONDS,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not 0 < close_retry_window_seconds < float("inf"):
            raise ConfigurationError(
                f"close_retry_window_seconds is {close_retry_window_seconds}: give a positive, finite number of seconds"
            )
        if secret is not None and not secret:
            raise ConfigurationError("secret is empty: give one, or leave it out to have one made")
        self.name = name
        self.close_retry_window_seconds = close_retry_window_seconds
        self.max_body_bytes = max_body_bytes
        self.clock = clock
        self._secret = secret
        self._meeting = MeetingPlace(f"{type(self).__module__}.{type(self).__qualname__} {name}")
        self._app: FastAPI | None = None
        self.fast_routes: dict[str, Handler] = {}
        """POST routes, added in `add_routes`, that make no session and need no cookie but the one that names theirs."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # --- what subclasses give ---

    def add_routes(self, app: FastAPI) -> None:
        """Add this server's routes. Called once, before the server starts."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Open what the server needs while it serves, and close it again: the app's lifespan."""
        yield

    def drop_session(self, session_id: str) -> None:
        """Another worker restores the session: let go of it here. Synchronous, and does not raise."""

    def agent_sessions(self) -> AgentSessionHolder | None:
        """What decides how long an agent server owns its sessions; None for a resources server."""
        return None

    def token_header(self) -> str | None:
        """The request header that carries an MCP session token; None if this server has no MCP endpoint."""
        return None

    def token_serializer(self) -> URLSafeSerializer | None:
        """What signs and reads MCP session tokens."""
        return None

    def lists(self) -> str:
        """What there is to call, for the answer to a path that is not."""
        return ""

    # --- what they may use ---

    @property
    def cookie_name(self) -> str:
        """The session cookie's name: `<class>___<name>`."""
        return f"{type(self).__name__}___{self.name}"

    @property
    def secret(self) -> str:
        """What this server signs with; the same in each of its workers."""
        if self._secret is None:
            self._secret = self._meeting.secret()
        return self._secret

    @property
    def app(self) -> FastAPI:
        """The app, which is made now if it was not needed before. Add routes and middleware of your own before it starts:
        they are inside the router and the session cookie."""
        if self._app is None:
            self._app = self._make_app()
        return self._app

    @property
    def router(self) -> SessionRoutingMiddleware:
        """The router of the app. Its `worker` is None until the server serves, and with one worker."""
        router: SessionRoutingMiddleware = self.app.state.homing_router
        return router

    @property
    def worker_id(self) -> WorkerId | None:
        """This worker's ID, by which `x-ng-session-owner` names it; None with one worker."""
        found: WorkerId | None = self.app.state.homing_routing_id
        return found

    def owner_headers(self) -> dict[str, str]:
        """Reply headers by which a caller learns the session's worker; none with one worker."""
        return {} if self.worker_id is None else {SESSION_OWNER_HEADER: self.worker_id}

    def still_owns(self, session_id: str) -> bool:
        """Whether this worker is still the session's owner. With one worker, always."""
        worker = self.router.worker if self._app is not None else None
        return worker is None or worker.owners.mine(session_id)

    # --- ASGI ---

    def use_routing_options(self, options: RoutingOptions) -> None:
        """How this server runs; `homing run` says so before the server starts.

        Raises:
            ConfigurationError: the app was already made, so it is too late.
        """
        self._meeting.options = options
        if self._app is not None:
            # Made to add routes to: all that was decided with it is made again as the options say.
            raise ConfigurationError(
                f"{self!r}.app was used before the server started; add routes by overriding add_routes instead"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with self.serving():
                yield

        app = FastAPI(title=f"{type(self).__name__} ({self.name})", version=homing.__version__, lifespan=lifespan)
        add_json_route(app, "/", self._answer_alive, name="alive", reply=dict[str, Any], methods=("GET",))
        add_json_route(app, "/healthz", self._answer_alive, name="healthz", reply=dict[str, Any], methods=("GET",))
        self.add_routes(app)
        # A middleware of the subclass's own has to see every request.
        fast = {} if app.user_middleware else self.fast_routes
        add_error_replies(app, self.lists)
        # Inside the session cookie and the router, which match prefixed paths themselves.
        app.add_middleware(RolloutPrefixMiddleware)
        app.add_middleware(
            SessionMiddleware,
            secret_key=self.secret,
            session_cookie=self.cookie_name,
            max_age=COOKIE_MAX_AGE_SECONDS,
        )
        app.add_middleware(FastRoutes, routes=fast)
        self._install_routing(app)
        return app

    def _install_routing(self, app: FastAPI) -> None:
        token_header = self.token_header()
        install_session_routing(
            app,
            self.kind,
            session_cookie=self.cookie_name,
            secret_key=self.secret,
            mcp_token_header=token_header,
            mcp_token_serializer=None if token_header is None else self.token_serializer(),
            agent_sessions=self.agent_sessions(),
            close_retry_window_seconds=self.close_retry_window_seconds,
            session_starts=self.session_starts,
            session_ends=self.session_ends,
            close_follows_header=self.close_follows_header,
            max_body_bytes=self.max_body_bytes,
            drop=self.drop_session,
            clock=self.clock,
            **self._meeting.settings(),
        )

    async def _answer_alive(self, request: Request) -> Response:
        return json_response({"status": "ok", "server": self.name, "worker": self.worker_id})
