"""One line makes any ASGI app keep its sessions together: `app = homing.sticky(app, …)`; and what handlers may say.

Not here: `homing run`, which does the same from outside (`homing.runtime`), and the servers whose kind of session is
declared (`install.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeVar, cast

from homing.errors import ConfigurationError
from homing.identity import McpHandleSource, Source, SourcesIdentity
from homing.lifetime import IdleLifetimes
from homing.routing.middleware import SessionRoutingMiddleware
from homing.routing.options import DAY_SECONDS, CheckedOptions, RoutingOptions
from homing.routing.policy import Policy
from homing.routing.request import REQUEST_SCOPE_KEY, RoutedRequest
from homing.routing.sweeper import sweep_interval
from homing.routing.unnamed import UnnamedRequests, UnnamedStarts
from homing.rundir import leave_run_directory, siblings_directory
from homing.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

CLOSE_RETRY_WINDOW_SECONDS = 300.0
"""How long the owner of an ended session is kept, so that a late or repeated close still finds it; no longer than idle."""


def sticky(
    app: ASGIApp,
    *,
    sessions: Source | str | Sequence[Source | str] = (),
    learn: Source | str | Sequence[Source | str] = (),
    starts: str | Sequence[str] = (),
    ends: str | Sequence[str] = (),
    preset: str | None = None,
    idle_seconds: float = DAY_SECONDS,
    unowned: Literal["adopt", "refuse"] | None = None,
    gone_status: int | None = None,
    max_body_bytes: int = 2**20,
    owner_timeout_seconds: float = 30.0,
) -> SessionRoutingMiddleware:
    """Route each request of `app` to the worker that holds its session, under `homing run` or a plain launcher of ASGI workers.

    Args:
        app: Any ASGI app, of ASGI 2 too. It is called as before, at the worker that holds the session.
        sessions: Where requests name their session: `homing.header("x-session")`, …; the first that names one decides.
            Here, and for `learn`, `starts` and `ends`, one alone needs no list around it.
        learn: Where replies first name a session that the app has made, if that is nowhere in `sessions`.
        starts: Routes that start a session, such as `"POST /sessions"`.
        ends: Routes that end the session they name, such as `"DELETE /sessions/{id}"`.
        preset: A protocol's bundle of all that: `"engineio"` (Socket.IO), `"gradio"` or `"mcp"`.
        idle_seconds: A session without a request for so long loses its owner.
        unowned: `"adopt"` serves a session that nobody owns where its request lands, `"refuse"` answers *gone*. By
            default: refuse where a start, `learn`, `mcp_handle` or the preset `"mcp"` says where sessions begin, else
            adopt.
        gone_status: The status of *gone*; by default 410, or the preset's.
        max_body_bytes: The longest JSON body that is read to find a session in it.
        owner_timeout_seconds: How long an owner may take to say that a forwarded request is its own.

    Raises:
        ConfigurationError: a setting cannot work; the message says which and what to do.
    """
    options = RoutingOptions(
        sessions=_each(sessions),
        learn=_each(learn),
        starts=_each(starts),
        ends=_each(ends),
        preset=preset,
        idle_seconds=idle_seconds,
        unowned=unowned,
        gone_status=gone_status,
        max_body_bytes=max_body_bytes,
        owner_timeout_seconds=owner_timeout_seconds,
    )
    if not options.tells_sessions:
        raise ConfigurationError(
            "sticky needs to know which session a request names: add sessions=[homing.header(NAME)], cookie, "
            "signed_cookie, query, path, body or mcp_handle, or preset='mcp' for an MCP server, 'engineio' for Socket.IO, "
            "'gradio' for Gradio"
        )
    router = build(_single_callable(app), options)
    if (spec := options.learns_nothing) is not None:
        logger.warning(
            "%s is in requests only, and nothing says where sessions begin: if the app makes their IDs, add "
            "learn='body:FIELD@/route' and starts='METHOD /route'; if clients choose them, unowned='adopt' says so",
            spec,
        )
    return router


def _single_callable(app: ASGIApp) -> ASGIApp:
    """The app as ASGI 3 calls it: one of ASGI 2 takes the scope alone, and gives what takes the rest."""
    try:
        signature = inspect.signature(app)
    except (TypeError, ValueError):
        return app
    if _takes(signature, 3) or not _takes(signature, 1):
        return app
    double_callable = cast("Callable[[Scope], Callable[[Receive, Send], Awaitable[None]]]", app)

    async def single_callable(scope: Scope, receive: Receive, send: Send) -> None:
        await double_callable(scope)(receive, send)

    return single_callable


def _takes(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


_Item = TypeVar("_Item", str, Source | str)


def _each(given: _Item | Sequence[_Item]) -> tuple[_Item, ...]:
    """What was given, of which one alone needs no list around it."""
    return (given,) if isinstance(given, str | Source) else tuple(given)


def build(app: ASGIApp, options: RoutingOptions) -> SessionRoutingMiddleware:
    """The router for `app` as `options` say: what `sticky` and `homing run` have in common.

    Raises:
        ConfigurationError: a setting cannot work; the message says which and what to do.
    """
    checked = options.checked()
    preset = checked.preset
    identity = SourcesIdentity(
        checked.sessions,
        checked.learn,
        starts=checked.starts,
        ends=checked.ends,
        preset=preset,
        max_body_bytes=options.max_body_bytes,
    )
    # A session without a request for the idle time loses its owner: one that has ended does not keep it for longer.
    window_seconds = min(checked.idle_seconds, CLOSE_RETRY_WINDOW_SECONDS)
    lifetimes = IdleLifetimes(
        checked.idle_seconds,
        window_seconds,
        starts=identity.starts,
        ends=identity.ends,
        used_reopens=checked.adopts,
        being_served=lambda session_id: router.served_now(session_id),  # noqa: PLW0108 - it is made below
    )
    policy = Policy(
        adopts=checked.adopts,
        gone_status=options.gone_status,
        gone_reply=preset.gone_reply if preset is not None and options.gone_status is None else None,
        max_sessions=options.max_sessions_per_worker,
        placing=options.placing,
        unnamed_start=UnnamedStarts(identity.starts),
        unnamed_request=_watch_of_nameless(checked),
        scatter=options.scatter,
        owner_timeout_seconds=options.owner_timeout_seconds,
        graceful_seconds=options.graceful_seconds,
        sweep_seconds=sweep_interval(window_seconds),
        backlog=options.backlog,
        lifespan_required=options.lifespan_required,
    )
    # Two routed apps of one module may be set up alike, and are two all the same: siblings make them in the same order.
    # Where the directory is given, its giver says that there is one.
    app_name = options.app
    if options.socket_dir is None:
        number = _alike[app_name]
        _alike[app_name] += 1
        app_name += f" {number}"
    socket_dir = None if options.workers == 1 else _run_directory(options.socket_dir, app_name)
    router = SessionRoutingMiddleware(
        app,
        identity,
        lifetimes,
        policy,
        socket_dir=socket_dir,
        leave_dir=None if options.socket_dir is not None else leave_run_directory,
        app_name=app_name,
    )
    return router


def _watch_of_nameless(checked: CheckedOptions) -> UnnamedRequests:
    preset = checked.preset
    sources = [source.spec for source in checked.sessions] + ([] if preset is None else [f"--preset {preset.name}"])
    # Whoever has declared one handle knows what handles are.
    knows = any(isinstance(source, McpHandleSource) for source in checked.sessions)
    return UnnamedRequests(sources, None if preset is None or knows else preset.hint, scatter=checked.options.scatter)


def _run_directory(given: str | None, app_name: str) -> Callable[[], str]:
    """Where this server's workers meet: looked up when a worker starts, in its own process."""
    return lambda: siblings_directory(app_name) if given is None else given


_alike: Counter[str] = Counter()
"""How many routers of apps that tell sessions alike this process has made."""


def request_of(scope: Scope) -> RoutedRequest:
    """The routed request that a handler's scope belongs to.

    Raises:
        LookupError: the scope is not a routed request's: the app is not behind homing.
    """
    request = scope.get(REQUEST_SCOPE_KEY)
    if not isinstance(request, RoutedRequest):
        raise LookupError(  # noqa: TRY004 - it is missing, not of a wrong type
            "this scope is not a request that homing routed: run the app with homing, or wrap it with sticky"
        )
    return request


def end(scope: Scope) -> None:
    """This request's session has ended. Its owner is kept for the close retry window (300 s).

    On any thread: inside the handler, where the session has ended once that returns, or later, by a task or a thread that
    outlives the request: then at once, and if the session is not at this worker any more, the log says so. Of a request
    that named no session, those have ended that its reply has made known.

    Raises:
        LookupError: the scope is not a routed request's.
    """
    request_of(scope).end()


def serving(scope: Scope, session_id: str) -> AbstractContextManager[None]:
    """Enter this before a handler touches another session than its request's: it looks, and counts. On any thread.

    Example:
        >>> with homing.serving(scope, "other"):  # doctest: +SKIP
        ...     states["other"].step()

    Raises:
        LookupError: the scope is not a routed request's.
        NotHereError: on entering, if this worker does not own that session.
        SessionMovingError: on entering, if the session is fenced or on the move.
    """
    return request_of(scope).serving(session_id)
