"""Routes the requests of a Starlette or FastAPI app whose kind of session is declared: resources servers and agents.

Not here: apps that name their sessions in their own way (`sticky.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from homing.clock import SYSTEM_CLOCK, Clock
from homing.identity import KindIdentity, SessionKind
from homing.lifetime.base import SessionLifetimes
from homing.lifetime.records import AgentSessionHolder, AgentSessionLifetimes, ResourcesSessionLifetimes
from homing.placement import PlacementOptions
from homing.routing.answers import ErrorReply
from homing.routing.middleware import SessionRoutingMiddleware
from homing.routing.policy import Policy
from homing.routing.sticky import CLOSE_RETRY_WINDOW_SECONDS
from homing.routing.sweeper import sweep_interval
from homing.routing.worker import Worker
from homing.types import ASGIApp, SessionId, WorkerId

if TYPE_CHECKING:
    import itsdangerous
    from starlette.applications import Starlette

DEFAULT_BACKLOG: Final = 2048


def install_session_routing(
    app: Starlette,
    kind: SessionKind,
    socket_dir: str | Callable[[], str] | None,
    session_cookie: str,
    secret_key: str,
    mcp_token_header: str | None = None,
    mcp_token_serializer: itsdangerous.URLSafeSerializer | None = None,
    agent_sessions: AgentSessionHolder | None = None,
    close_retry_window_seconds: float | None = None,
    session_starts: tuple[str, ...] = (),
    session_ends: tuple[str, ...] = (),
    close_follows_header: str | None = None,
    backlog: int = DEFAULT_BACKLOG,
    *,
    mcp_path: str = "/mcp",
    max_body_bytes: int = 2**20,
    owner_timeout_seconds: float = 30.0,
    drop: Callable[[str], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    leave_dir: Callable[[str], None] | None = None,
    app_name: str | None = None,
    max_sessions: int | None = None,
    placing: PlacementOptions | None = None,
    scatter: bool = False,
    graceful_seconds: float | None = None,
    lifespan_required: bool = False,
    error_reply: ErrorReply | None = None,
) -> WorkerId | None:
    """Route this worker's requests by session ID, and serve forwarded requests on a private socket.

    Call it once, when the app's middleware is otherwise in place: the router must sit outside `SessionMiddleware`. The
    router is then `app.state.homing_router`, with `lifetimes`, and, while the worker serves, `worker.owners`.

    Args:
        app: Its session middleware uses `session_cookie` and `secret_key`; how long a cookie is good for is read from it.
        kind: Where requests name their session.
        socket_dir: The server's run directory (`create_session_socket_dir`), shared by its workers, or what makes or finds
            it as the worker starts. None: one worker; it only checks and sets the session ID of seeds and closes, and owns
            nothing.
        mcp_token_header: Where MCP tool calls carry a token that names their session.
        mcp_token_serializer: What signed that token.
        agent_sessions: For an agent server, whose own records decide how long it owns its sessions.
        close_retry_window_seconds: For a resources server: how long the owner of a session that is not open is kept
            after its last request. Default 300.
        session_starts: Routes that start a session, beside the kind's seed.
        session_ends: Routes that end one, beside its close.
        close_follows_header: The request header by which an end route's caller says that a close follows.
        backlog: Connections that may wait at the private socket.
        mcp_path: Where the token alone names the session.
        max_body_bytes: The largest JSON body of a seed or close.
        owner_timeout_seconds: How long an owner may take to say whether a forwarded request's session is its own.
        drop: Lets go of a session's state, when this worker gives the session to one that restores it. Synchronous, and
            does not raise.
        clock: Ages cookies and resources sessions.
        leave_dir: Called with the run directory's path once the worker has closed.
        app_name: Tells this app from others in the same run directory; None: it has the directory to itself.
        max_sessions: A start beyond so many sessions of this worker is answered 503.
        placing: How new sessions are placed, and limited over all workers.
        scatter: Test mode: every request first lands on a wrong worker.
        graceful_seconds: How long a stopping worker waits for the others to drain; None: homing's own limit.
        error_reply: The shape of the router's own errors, where the server has one of its own.
        lifespan_required: The app is one that has a lifespan, so a failed one is no sign of having none.

    Returns:
        This worker's ID, also in `app.state.homing_routing_id`; None for one worker.

    Raises:
        RuntimeError: the app has already started.
    """
    # Starlette is imported by its users only.
    from homing.routing.session_id import cookie_max_age, put_session_id_next_to_session

    starts = (kind.seed_path, *session_starts)
    ends = (kind.close_path, *session_ends)
    window = CLOSE_RETRY_WINDOW_SECONDS if close_retry_window_seconds is None else close_retry_window_seconds
    lifetimes: SessionLifetimes
    forget: Callable[[str], None] | None
    if agent_sessions is not None:
        lifetimes = AgentSessionLifetimes(agent_sessions, starts)
        forget = None
    else:
        lifetimes = resources = ResourcesSessionLifetimes(
            window,
            starts,
            ends,
            close_follows_header,
            clock=clock,
            being_served=lambda session_id: router.served_now(session_id),  # noqa: PLW0108
        )
        forget = resources.forget
    identity = KindIdentity(
        kind,
        session_cookie,
        secret_key,
        starts=session_starts,
        ends=session_ends,
        mcp_token_header=mcp_token_header,
        mcp_token_serializer=mcp_token_serializer,
        mcp_path=mcp_path,
        close_follows_header=close_follows_header,
        max_body_bytes=max_body_bytes,
        max_age_seconds=cookie_max_age(app.user_middleware),
        clock=clock,
    )

    def given_away(session_id: str) -> None:
        if forget is not None:
            forget(session_id)
        if router.worker is not None:
            router.worker.path_keys.unbind(SessionId(session_id))
        if drop is not None:
            drop(session_id)

    def opened(worker: Worker) -> None:
        app.state.homing_routing_id = worker.id
        if agent_sessions is not None:
            agent_sessions.use_agent_session_owners(worker.owners)

    async def nothing_yet(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the app's middleware has not been built")

    router = SessionRoutingMiddleware(
        nothing_yet,
        identity,
        lifetimes,
        Policy(
            adopts=True,
            sees_use=True,
            owner_timeout_seconds=owner_timeout_seconds,
            sweep_seconds=sweep_interval(window),
            backlog=backlog,
            max_sessions=max_sessions,
            scatter=scatter,
            graceful_seconds=graceful_seconds,
            lifespan_required=lifespan_required,
            placing=placing,
            error_reply=error_reply,
        ),
        socket_dir=None if socket_dir is None else socket_dir if callable(socket_dir) else lambda: socket_dir,
        leave_dir=leave_dir,
        app_name=app_name,
        entry=app,
        drop=given_away,
        on_open=opened,
    )

    def outermost(inner: ASGIApp) -> ASGIApp:
        router.app = inner
        return router

    # Starlette calls it as it would call a class.
    app.add_middleware(outermost)
    put_session_id_next_to_session(app.user_middleware, kind.cookie_key)
    app.state.homing_router = router
    routing_id = None if socket_dir is None else router.worker_id
    app.state.homing_routing_id = routing_id
    return routing_id
