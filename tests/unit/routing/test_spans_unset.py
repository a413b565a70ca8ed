"""Where OpenTelemetry's API is installed and nobody has set a tracer provider, a forwarded request begins no span."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry import trace

from homing.errors import OwnerRefusedError
from homing.forwarding.replay import Replayable
from homing.routing.spans import TracingForwarder
from homing.types import Message, Reason, WorkerId


class NoTracer:
    """Has no `start_span`: whoever begins a span fails."""


def test_no_span_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> Message:
        raise AssertionError("nothing is taken for an owner that is not there")

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def test() -> None:
        async with TracingForwarder(str(tmp_path)) as forwarder:
            monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
            monkeypatch.setattr(forwarder, "_tracer", NoTracer())
            scope = {"type": "http", "method": "GET", "headers": [], "asgi": {"spec_version": "2.3"}}
            with pytest.raises(OwnerRefusedError):
                await forwarder.forward(WorkerId("0" * 32), Reason.OWNED, (), scope, Replayable(receive), send)

    asyncio.run(test())
