"""Spans of a real server whose app has set OpenTelemetry up as apps do: one for each forwarded request, in the caller's trace."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path

from tests.processes.test_watch import APP, documents, place, start, until
from tests.support.running import ROOT, running

from homing.types import session_tag

__all__ = ["place"]

TRACED = """
import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from tests.support.counter_app import app

spans = open(os.environ["SPANS"], "a")
provider = TracerProvider()
to_file = ConsoleSpanExporter(out=spans, formatter=lambda span: span.to_json(indent=None) + chr(10))
provider.add_span_processor(SimpleSpanProcessor(to_file))
trace.set_tracer_provider(provider)
"""
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_each_forwarded_request_is_one_span_of_its_callers_trace(place: dict[str, str | None], tmp_path: Path) -> None:
    (tmp_path / "traced.py").write_text(TRACED)
    file = tmp_path / "spans"
    options = ("traced:app", "--app-dir", str(tmp_path), *APP[1:], "--workers", "2", "--no-handoff")
    with running(*options, cwd=ROOT, env={**place, "SPANS": str(file)}) as server:
        server.wait_for("Application startup complete", 2)
        session, sent = start(server.port), 0
        while sent < 8 or not file.exists() or not file.read_text():  # until one came to the other worker
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
                headers = {"traceparent": f"00-{TRACE}-{sent + 1:016x}-01"}
                connection.request("POST", f"/sessions/{session}/step", headers=headers)
                assert connection.getresponse().read()
                sent += 1
        until(lambda: documents(place, str(server.port)), lambda found: found[0]["served"] == sent + 1)
        spans = [json.loads(line) for line in file.read_text().splitlines()]
        # Each worker writes its own figures, when its second is over.
        [found] = until(lambda: documents(place, str(server.port)), lambda found: found[0]["forwarded"] == len(spans))
        assert len(spans) == found["forwarded"] > 0
        assert {span["context"]["trace_id"] for span in spans} == {f"0x{TRACE}"}
        assert {span["attributes"]["homing.session"] for span in spans} == {session_tag(session)}
        assert {span["attributes"]["http.response.status_code"] for span in spans} == {200}
        parents = [int(span["parent_id"], 16) for span in spans]
        assert len(set(parents)) == len(parents)
        assert set(parents) <= set(range(1, sent + 1))
        assert session not in file.read_text()
