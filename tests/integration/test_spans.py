"""Forwarded requests as OpenTelemetry spans: the real SDK with its exporter in memory, and real workers over real sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.support.running import ROOT, environment

from homing.errors import OwnerRefusedError
from homing.forwarding.base import HOP_SCOPE_KEY
from homing.forwarding.private_socket import serve_private_socket
from homing.forwarding.replay import replayable
from homing.routing.spans import TracingForwarder
from homing.rundir import new_worker_id, worker_socket_path
from homing.types import Reason, Receive, Scope, Send, session_tag

pytestmark = pytest.mark.anyio

CALLER_TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{CALLER_TRACE}-{CALLER_SPAN}-01".encode()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """A process has one provider, for good."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


class Owner:
    """An owner's app: what it was asked with, and the status it answers with; None raises."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.status: int | None = 200
        self.mine = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hop = scope.pop(HOP_SCOPE_KEY)
        if not self.mine:
            hop.not_mine()
            return
        hop.mine()
        self.headers = scope["headers"]
        if self.status is None:
            raise RuntimeError("the app fails")
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


class Sent:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def send(self, event: Any) -> None:
        self.events.append(event)


@asynccontextmanager
async def pair(tmp_path: Path, owner: Owner) -> AsyncIterator[Any]:
    """A forwarder, and what sends one request through it to the owner; gives the sender."""
    identifier = new_worker_id()
    async with (
        serve_private_socket(owner, worker_socket_path(str(tmp_path), identifier)),
        TracingForwarder(str(tmp_path)) as forwarder,
    ):

        async def send_one(headers: list[tuple[bytes, bytes]], to: str = identifier) -> tuple[bool, Sent]:
            sent = Sent()
            scope = {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": "1.1",
                "method": "POST",
                "scheme": "http",
                "path": "/sessions/secret-id/step",
                "raw_path": b"/sessions/secret-id/step",
                "query_string": b"session=secret-id",
                "root_path": "",
                "headers": headers,
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 2),
            }

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"", "more_body": False}

            handled = await forwarder.forward(
                to,
                Reason.OWNED,
                ("secret-id",),
                scope,
                replayable(receive),
                sent.send,  # type: ignore[arg-type]
            )
            return handled, sent

        yield send_one


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    [span] = exporter.get_finished_spans()
    return span


async def test_a_forwarded_request_is_one_span_of_the_callers_trace(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    owner = Owner()
    headers = [(b"host", b"a"), (b"traceparent", TRACEPARENT), (b"tracestate", b"x=1")]
    async with pair(tmp_path, owner) as send_one:
        handled, sent = await send_one(list(headers))
    assert handled
    assert sent.events[0]["status"] == 200
    span = only(spans)
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == CALLER_TRACE
    assert f"{span.parent.span_id:016x}" == CALLER_SPAN
    assert (span.name, span.kind) == ("forward POST", SpanKind.INTERNAL)
    attributes = dict(span.attributes or {})
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.response.status_code"] == 200
    assert attributes["homing.session"] == session_tag("secret-id")
    assert attributes["homing.reason"] == "owned"
    assert "secret-id" not in span.to_json()
    # The owner's app sees what the client sent: as if there were one worker.
    assert owner.headers == headers


async def test_a_request_without_a_trace_begins_one_and_its_headers_stay_as_they_are(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    owner = Owner()
    async with pair(tmp_path, owner) as send_one:
        await send_one([(b"host", b"a")])
    assert only(spans).parent is None
    assert owner.headers == [(b"host", b"a")]


async def test_a_span_that_is_current_outside_the_router_is_the_parent(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with pair(tmp_path, Owner()) as send_one:
        with trace.get_tracer("server").start_as_current_span("server") as outer:
            await send_one([(b"traceparent", TRACEPARENT)])
    forwarded, _ = spans.get_finished_spans()
    assert forwarded.parent == outer.get_span_context()


@pytest.mark.parametrize(("status", "error"), [(200, False), (404, False), (500, True), (503, True)])
async def test_a_reply_of_500_and_more_is_an_error(
    tmp_path: Path, spans: InMemorySpanExporter, status: int, error: bool
) -> None:
    owner = Owner()
    owner.status = status
    async with pair(tmp_path, owner) as send_one:
        await send_one([])
    span = only(spans)
    assert (span.status.status_code is StatusCode.ERROR) == error
    assert ("error.type" in (span.attributes or {})) == error


async def test_what_was_not_delivered_or_sent_back_says_so(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    owner = Owner()
    async with pair(tmp_path, owner) as send_one:
        with pytest.raises(OwnerRefusedError):
            await send_one([], new_worker_id())
        owner.mine = False
        handled, _ = await send_one([])
        assert not handled
    refused, sent_back = spans.get_finished_spans()
    assert refused.status.status_code is StatusCode.ERROR
    assert dict(refused.attributes or {})["error.type"] == "OwnerRefusedError"
    assert dict(sent_back.attributes or {})["homing.not_mine"] is True


def test_without_opentelemetry_no_request_looks_for_it(tmp_path: Path) -> None:
    """Forwarding makes the plain forwarder, and nothing of OpenTelemetry is imported, or asked for again."""
    code = """
import sys
asked = []
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry"):
            asked.append(name)
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import homing.routing.worker as worker
from homing.forwarding.forwarder import Forwarder
made = worker._forwarder(sys.argv[1], 30.0)
assert type(made) is Forwarder, made
assert asked == ["opentelemetry"], asked
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
assert "homing.routing.spans" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
