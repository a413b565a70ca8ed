"""A route of the public port that answers with the whole server's metrics, whichever worker it reaches.

Not here: what the metrics are (`homing.watch.metrics`), and a port of their own for them (`metrics.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final

from homing.errors import ConfigurationError
from homing.identity import McpHandleSource
from homing.identity.sources import BodySource, PathSource
from homing.routes import template_pattern
from homing.routing.options import RoutingOptions
from homing.routing.worker import Worker, current_worker
from homing.types import ASGIApp, Receive, Scope, Send, WorkerId
from homing.watch.metrics import metrics_registry

_METHODS: Final = ("GET", "HEAD")


def with_metrics_route(app: ASGIApp, path: str) -> ASGIApp:
    """An ASGI app around the router: requests on one path are answered here, all others are passed on as they are.

    Args:
        path: The whole path, `root_path` included.
    """
    # As a method, if it is one: calling an object by its class's `__call__` takes longer than all that is done here. And no
    # coroutine function, so that there is no coroutine around the app's.
    call = getattr(app, "__call__", app)  # noqa: B004 - it is called, not asked whether it can be

    def routed(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope.get("path") == path and scope["type"] == "http":
            return _answer(scope, send)
        passed_on: Awaitable[None] = call(scope, receive, send)
        return passed_on

    return routed


async def _answer(scope: Scope, send: Send) -> None:
    worker = current_worker()
    if scope["method"] not in _METHODS:
        await _reply(send, scope, 405, b"use GET\n", extra=[(b"allow", b"GET, HEAD")])
    elif worker is None:
        await _reply(send, scope, 503, b"this worker does not serve yet\n")
    else:
        accept = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
        # It reads a row per start of a worker and a few files per living one.
        page, content_type = await asyncio.to_thread(_page, worker, accept)
        await _reply(send, scope, 200, page, content_type=content_type.encode())


def _page(worker: Worker, accept: str) -> tuple[bytes, str]:
    from prometheus_client.exposition import choose_encoder

    directory = worker.run_directory
    encode, content_type = choose_encoder(accept)
    page: bytes = encode(metrics_registry(directory.path, lambda each: directory.is_dead(WorkerId(each))))
    return page, content_type


async def _reply(
    send: Send,
    scope: Scope,
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"text/plain; charset=utf-8",
    extra: list[tuple[bytes, bytes]] | None = None,
) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers + (extra or [])})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def check_metrics_route(path: str, routing: RoutingOptions) -> None:
    """See that a path can be the metrics' own.

    Raises:
        ConfigurationError: it is no whole path, or requests on it may name, start or end a session.
    """
    if not path.startswith("/") or any(mark in path for mark in "{}?# ") or not path.isprintable():
        raise ConfigurationError(f"--metrics-route {path}: write a whole path, such as /metrics")
    checked = routing.checked()
    preset = checked.preset
    sources = [*checked.sessions, *checked.learn, *((*preset.sessions, *preset.learn) if preset is not None else ())]
    for source in sources:
        if isinstance(source, PathSource):
            taken = template_pattern(source.template, below=True).match(path) is not None
        else:
            taken = isinstance(source, BodySource | McpHandleSource) and source.route.matches("POST", path)
        if taken:
            raise ConfigurationError(f"--metrics-route {path}: {source.spec} names sessions there; choose another path")
    for name, routes in (("start", checked.starts), ("end", checked.ends)):
        if routes.match_path(path):
            raise ConfigurationError(f"--metrics-route {path}: a --{name} is there; choose another path")


def check_not_the_apps(path: str, app: Any) -> None:
    """See that the app has nothing at this very path, where it says what it has (Starlette, FastAPI).

    Raises:
        ConfigurationError: it has.
    """
    for route in getattr(app, "routes", None) or ():
        if getattr(route, "path", None) == path:
            raise ConfigurationError(
                f"--metrics-route {path}: the app has a route of its own there; choose another path"
            )
