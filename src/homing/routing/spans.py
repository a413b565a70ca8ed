"""One OpenTelemetry span per forwarded request. Imported only where OpenTelemetry's API is installed.

A span joins the caller's trace: the one that is current here (a server that is instrumented outside the router), or the one
that the request's headers name, as the configured propagator reads them. The request goes on with the headers that it came with,
so the app at the owner sees the caller as its parent, as if there were one worker; the hop's span stands beside the app's.

Attributes are those of OpenTelemetry's conventions for HTTP where there is one. The path and the query may name the session, so
they are left out, and the session is shown by its tag.

Not here: what an app traces itself, and where spans go: the app's own set-up of OpenTelemetry decides that.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from homing.errors import HomingError, ReplyError
from homing.forwarding.forwarder import Forwarder, Replayable
from homing.types import Message, Reason, Scope, Send, WorkerId, session_tag

_NOBODY_LISTENS: Final = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
_ASKED_AGAIN_SECONDS: Final = 1.0
"""So long after it was found that nobody listens, spans may still be left out."""

_STARTS: Final = ("http.response.start", "websocket.http.response.start")


class TracingForwarder(Forwarder):
    """A forwarder whose requests are spans."""

    def __init__(self, socket_dir: str, *, owner_timeout_seconds: float = 30.0) -> None:
        super().__init__(socket_dir, owner_timeout_seconds=owner_timeout_seconds)
        # Of whichever provider the app sets, now or later.
        self._tracer = trace.get_tracer("homing")
        self._nobody_listens_until = 0.0

    def forward(
        self,
        owner: WorkerId,
        reason: Reason,
        note: tuple[object, ...],
        scope: Scope,
        receive: Replayable,
        send: Send,
    ) -> Coroutine[Any, Any, bool]:
        """As the forwarder's own. Where nobody has set a provider, which may come later, no span is even begun."""
        now = time.monotonic()
        if now < self._nobody_listens_until or self._nobody_listens(now):
            return super().forward(owner, reason, note, scope, receive, send)
        return self._traced(owner, reason, note, scope, receive, send)

    def _nobody_listens(self, now: float) -> bool:
        # To ask reads the environment, at a twentieth of what the hop costs; so it is asked once in a while.
        if not isinstance(trace.get_tracer_provider(), _NOBODY_LISTENS):
            return False
        self._nobody_listens_until = now + _ASKED_AGAIN_SECONDS
        return True

    async def _traced(
        self,
        owner: WorkerId,
        reason: Reason,
        note: tuple[object, ...],
        scope: Scope,
        receive: Replayable,
        send: Send,
    ) -> bool:
        method = scope.get("method") or "websocket"
        span = self._tracer.start_span(
            f"forward {method}",
            context=_context_of(scope),
            kind=SpanKind.INTERNAL,
            attributes=_attributes(owner, reason, note, scope),
        )
        watched = _StatusWatch(span, send).send if span.is_recording() else send
        try:
            handled = await super().forward(owner, reason, note, scope, receive, watched)
        except BaseException as error:
            span.set_attribute("error.type", error.code if isinstance(error, ReplyError) else type(error).__qualname__)
            # Its message has nothing but tags and worker IDs; what else is raised may have anything.
            said = str(error) if isinstance(error, HomingError) else None
            span.set_status(StatusCode.ERROR, said)
            raise
        else:
            if not handled:
                span.set_attribute("homing.not_mine", True)
            return handled
        finally:
            span.end()


def _context_of(scope: Scope) -> Context | None:
    """The context to make a span in; None: the current one."""
    if trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return propagate.extract(carrier)


def _attributes(owner: WorkerId, reason: Reason, note: tuple[object, ...], scope: Scope) -> dict[str, str]:
    found = {
        "homing.owner": owner,
        "homing.reason": reason.name.lower(),
        "network.protocol.name": "http",
        "network.protocol.version": str(scope.get("http_version", "1.1")),
        "url.scheme": str(scope.get("scheme", "http")),
    }
    if "method" in scope:
        found["http.request.method"] = scope["method"]
    if note and isinstance(note[0], str):
        found["homing.session"] = session_tag(note[0])
    return found


class _StatusWatch:
    """Notes the status of a reply that is relayed. No coroutine of its own for every event."""

    __slots__ = ("_send", "_span")

    def __init__(self, span: Span, send: Send) -> None:
        self._span = span
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] in _STARTS:
            status = message["status"]
            self._span.set_attribute("http.response.status_code", status)
            if status >= 500:
                self._span.set_attribute("error.type", str(status))
                self._span.set_status(StatusCode.ERROR)
        return self._send(message)
