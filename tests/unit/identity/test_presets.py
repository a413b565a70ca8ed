from __future__ import annotations

import json
import pickle

import pytest
from tests.support.identity_scopes import learned, part, request, start

from homing.errors import ConfigurationError
from homing.identity import PRESETS, Named, SourcesIdentity, preset

ID = "0123456789abcdef0123456789abcdef"
MCP = SourcesIdentity(preset=PRESETS["mcp"])


def named(scope: object) -> Named:
    found = MCP.from_head(scope)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_an_unknown_preset_is_refused_by_a_line_that_lists_the_known_ones() -> None:
    for name in ("engine.io", "Gradio", ""):
        with pytest.raises(ConfigurationError, match="write one of: engineio, gradio, mcp"):
            preset(name)
    assert preset("mcp") is PRESETS["mcp"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_crosses_to_a_worker(name: str) -> None:
    assert pickle.loads(pickle.dumps(PRESETS[name])) == PRESETS[name]


def test_the_mcp_session_header_names_the_session_on_any_path_and_method() -> None:
    for method, path in [("POST", "/mcp"), ("GET", "/mcp"), ("POST", "/api/tools/mcp/")]:
        found = named(request(method, path, [("mcp-session-id", "m1")]))
        assert (found.session_id, found.start, found.end) == ("m1", False, False)


def test_a_tool_that_is_called_without_a_session_takes_a_handle() -> None:
    hint = PRESETS["mcp"].hint
    assert hint is not None
    call = hint(request("POST", "/mcp", [("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/call")]))
    assert call is not None
    assert "add --session mcp-handle:NAME" in call
    assert hint(request("POST", "/mcp", [("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/list")])) is None
    assert hint(request("POST", "/mcp", [("mcp-protocol-version", "2025-06-18")])) is None


def test_a_delete_ends_the_session_its_header_names_wherever_the_server_is_mounted() -> None:
    for path in ("/mcp", "/", "/api/tools/mcp/"):
        assert named(request("DELETE", path, [("mcp-session-id", "m1")])).end
    assert not named(request("DELETE", "/mcp")).end


def test_a_delete_whose_session_another_source_names_ends_nothing() -> None:
    mixed = SourcesIdentity(["path:/baskets/{session}"], preset=PRESETS["mcp"])
    found = mixed.from_head(request("DELETE", "/baskets/b1/items", [("mcp-session-id", "m1")]))
    assert found is not None
    assert (found.session_id, found.end) == ("b1", False)


def test_a_new_session_is_learned_from_the_reply_to_initialize() -> None:
    scope = request("POST", "/mcp")
    reply = start(200, ("Content-Type", "text/event-stream"), ("Mcp-Session-Id", "m1"))
    assert learned(MCP.learner(scope, named(scope)), reply, part(b"data: {}\r\n\r\n")) == ["m1"]


def test_a_reply_that_repeats_the_request_s_session_makes_none_known() -> None:
    scope = request("POST", "/mcp", [("mcp-session-id", "m1")])
    assert learned(MCP.learner(scope, named(scope)), start(200, ("mcp-session-id", "m1")), part(b"")) == []


def test_nothing_is_learned_from_a_refusal_or_a_delete() -> None:
    scope = request("POST", "/mcp")
    assert learned(MCP.learner(scope, named(scope)), start(404, ("mcp-session-id", "m1")), part(b"x")) == []
    scope = request("DELETE", "/mcp", [("mcp-session-id", "m1")])
    assert MCP.learner(scope, named(scope)) is None


def test_the_older_transport_s_session_is_learned_from_its_endpoint_event() -> None:
    scope = request("GET", "/sse")
    stream = f"event: endpoint\r\ndata: /messages/?session_id={ID}\r\n\r\n".encode()
    pieces = [part(stream[at : at + 7], more=True) for at in range(0, len(stream), 7)]
    learner = MCP.learner(scope, named(scope))
    assert learned(learner, start(200, ("content-type", "text/event-stream")), *pieces, part(b": ping\r\n\r\n")) == [ID]
    assert named(request("POST", "/messages/", query=f"session_id={ID}".encode())).session_id == ID


def test_only_the_first_event_of_a_stream_is_waited_for() -> None:
    scope = request("GET", "/mcp", [("mcp-session-id", "m1")])
    learner = MCP.learner(scope, named(scope))
    assert learner is not None
    assert (
        learned(learner, start(200, ("content-type", "text/event-stream")), part(b"data: x\n\ndata: half", True)) == []
    )
    assert learner.done


def test_every_spelling_of_the_older_transport_s_uuid_names_one_session() -> None:
    dashed = f"{ID[:8]}-{ID[8:12]}-{ID[12:16]}-{ID[16:20]}-{ID[20:]}"
    spellings = (ID, ID.upper(), dashed, "{" + dashed + "}", "urn:uuid:" + dashed)
    found = {named(request("POST", "/m", query=b"session_id=" + text.encode())).session_id for text in spellings}
    assert found == {ID}


@pytest.mark.parametrize(
    ("method", "query"),
    [("POST", b"session_id=7"), ("GET", b"session_id=" + ID.encode()), ("POST", b"x_session_id=" + ID.encode())],
)
def test_a_parameter_of_that_name_elsewhere_in_the_app_names_no_session(method: str, query: bytes) -> None:
    assert named(request(method, "/page", query=query)).session_id is None


def test_gone_is_answered_as_the_official_sdk_answers_an_unknown_session() -> None:
    assert PRESETS["mcp"].gone_status == 404
    reply = PRESETS["mcp"].gone_reply
    assert reply is not None
    answered = reply(request("POST", "/mcp", [("mcp-session-id", "m1")]))
    assert answered is not None
    status, headers, body = answered
    assert status == 404
    assert dict(headers)[b"content-type"] == b"application/json"
    assert dict(headers)[b"content-length"] == str(len(body)).encode()
    assert json.loads(body) == {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": -32600, "message": "Session not found"},
    }
    answered = reply(request("POST", "/messages/", query=b"session_id=" + ID.encode()))
    assert answered is not None
    status, headers, body = answered
    assert (status, body) == (404, b"Could not find session")


@pytest.mark.parametrize(
    "data", ["nothing", f"?session_id={ID}x", "//[", "?other=1", f"/m?session_id=1&session_id={ID}"]
)
def test_an_endpoint_event_of_another_shape_makes_known_what_its_server_would_look_up(data: str) -> None:
    scope = request("GET", "/sse")
    stream = part(f"event: endpoint\ndata: {data}\n\n".encode())
    expected = [ID] if data.endswith(f"={ID}") else []
    assert (
        learned(MCP.learner(scope, named(scope)), start(200, ("content-type", "text/event-stream")), stream) == expected
    )


def test_of_two_parameters_of_the_older_transport_the_later_counts_as_at_its_server() -> None:
    for query, expected in [(f"session_id=1&session_id={ID}", ID), (f"session_id={ID}&session_id=1", None)]:
        assert named(request("POST", "/m", query=query.encode())).session_id == expected
