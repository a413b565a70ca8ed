from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.identity_scopes import (
    SetClock,
    body_of,
    handshake,
    learned,
    leaving,
    part,
    request,
    signed,
    start,
)

from homing.identity import Named, SourcesIdentity, signed_cookie
from homing.identity.base import Learner
from homing.routes import Routes
from homing.types import Message

SECRET = "a secret of thirty-two bytes or more"
JSON = ("content-type", "application/json; charset=utf-8")
SSE = ("content-type", "text/event-stream")
PLAIN = ("content-type", "text/plain")

BODY = SourcesIdentity(learn=["body:x.id@POST /join"], max_body_bytes=1_000)
HEAD = SourcesIdentity(["header:x-s", "cookie:sid"])


def learner(identity: SourcesIdentity, scope: Any = None, named: Named | None = None) -> Learner:
    scope = scope or request("POST", "/join")
    found = identity.learner(scope, named or identity.from_head(scope) or Named())
    assert found is not None
    return found


def reply(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


# --- headers ---


def test_a_reply_s_header_makes_a_session_known_with_the_head_it_is_in() -> None:
    head = start(200, ("X-S", "new"), PLAIN)
    step = learner(HEAD).feed(head)
    assert step.session_ids == ("new",)
    assert step.messages == (head,)


@pytest.mark.parametrize("identity", [HEAD, BODY])
def test_headers_that_can_be_read_only_once_reach_the_server(identity: SourcesIdentity) -> None:
    pairs = [(b"x-s", b"new"), (b"content-type", b"application/json")]
    head = {"type": "http.response.start", "status": 200, "headers": iter(pairs)}
    reading = learner(identity)
    left = [each for event in (head, part(b"{}")) for each in reading.feed(event).messages]
    assert [list(each["headers"]) for each in left if "headers" in each] == [pairs]


@pytest.mark.parametrize("status", [200, 201, 204, 302, 303, 304])
def test_a_redirect_or_an_empty_reply_makes_a_session_known_too(status: int) -> None:
    assert learned(learner(HEAD), start(status, ("x-s", "new")), part(b"")) == ["new"]


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500, 503])
def test_nothing_is_learned_from_a_reply_of_status_400_and_above(status: int) -> None:
    headers = (("x-s", "new"), ("set-cookie", "sid=c"), JSON)
    assert learned(learner(HEAD), start(status, *headers), part(b"{}")) == []
    assert learned(learner(BODY), start(status, JSON), part(b'{"x":{"id":"j"}}')) == []


@pytest.mark.parametrize(
    ("set_cookie", "expected"),
    [
        ("sid=new; Path=/; HttpOnly", ["new"]),
        ('sid="quo\\073ted"; Path=/', ["quo;ted"]),
        ("sid=new; Max-Age=60; Expires=Thu, 01 Jan 1970 00:00:00 GMT", ["new"]),
        ("sid=new; expires=Tue, 19 Jan 2038 03:14:07 GMT", ["new"]),
        ("sid=new; Max-Age=x; expires=nonsense", ["new"]),
        ("sid=null; Path=/; Max-Age=0", []),
        ("sid=null; max-age=-1", []),
        ("sid=null; expires=Thu, 01 Jan 1970 00:00:00 GMT", []),
        ("sid=; Path=/", []),
        ('sid=""', []),
        ("Sid=new", []),
        ("xsid=new", []),
        ("other=1; sid=new", []),
    ],
)
def test_set_cookie_makes_a_session_known_unless_it_deletes_the_cookie(set_cookie: str, expected: list[str]) -> None:
    assert learned(learner(HEAD), start(200, ("Set-Cookie", set_cookie)), part(b"")) == expected


def test_a_signed_cookie_in_a_reply_is_decoded() -> None:
    clock = SetClock()
    identity = SourcesIdentity([signed_cookie("session", "user", secret=SECRET)], clock=clock)
    cookie = signed({"user": "u1"}, SECRET, clock)
    deleted = "session=null; path=/; expires=Thu, 01 Jan 1970 00:00:00 GMT; httponly"
    assert learned(learner(identity), start(200, ("set-cookie", f"session={cookie}; path=/")), part(b"")) == ["u1"]
    assert learned(learner(identity), start(200, ("set-cookie", f"session={cookie[:-3]}xyz")), part(b"")) == []
    assert learned(learner(identity), start(200, ("set-cookie", deleted)), part(b"")) == []


def test_an_id_that_the_request_named_in_any_source_is_not_news() -> None:
    scope = request("POST", "/", [("x-s", "decides"), ("cookie", "sid=other")])
    headers = (("x-s", "decides"), ("set-cookie", "sid=other"), ("set-cookie", "sid=new"))
    assert learned(learner(HEAD, scope), start(200, *headers), part(b"")) == ["new"]


def test_an_id_in_two_places_of_a_reply_is_news_once() -> None:
    assert learned(learner(HEAD), start(200, ("x-s", "new"), ("set-cookie", "sid=new")), part(b"")) == ["new"]


def test_an_over_long_id_is_not_learned() -> None:
    assert learned(learner(HEAD), start(200, ("x-s", "x" * 1025)), part(b"")) == []
    assert learned(learner(HEAD), start(200, ("x-s", "x" * 1024)), part(b"")) == ["x" * 1024]


def test_nothing_is_learned_on_an_end_route_or_where_no_reply_can_hold_an_id() -> None:
    identity = SourcesIdentity(["header:x-s"], ends=Routes.parse(["DELETE /s"]))
    scope = request("DELETE", "/s", [("x-s", "1")])
    assert identity.learner(scope, identity.from_head(scope) or Named()) is None
    assert SourcesIdentity(["query:q"]).learner(request(), Named()) is None
    assert BODY.learner(request("POST", "/other"), Named()) is None
    assert BODY.learner(handshake("/join"), Named()) is None


@pytest.mark.parametrize(
    "message",
    [
        start(200, PLAIN),
        start(200, ("X-S", "new"), PLAIN),
        start(200, ("Set-Cookie", "sid=new"), ("x-s", "newer")),
        start(200, ("x-s", "known"), ("set-cookie", "sid=null; Max-Age=0")),
        start(500, ("x-s", "new")),
        {"type": "http.response.start", "status": 200},
        {"type": "http.response.start", "status": 200, "headers": ((b"x-s", b"new"),)},
        {"type": "websocket.accept", "headers": [[b"x-s", b"new"]]},
        {"type": "websocket.accept"},
    ],
)
@pytest.mark.parametrize("end", [False, True])
def test_where_only_headers_hold_ids_a_glance_at_the_head_learns_the_same(message: Message, end: bool) -> None:
    scope = request("POST", "/", [("x-s", "known")])
    named = (HEAD.from_head(scope) or Named())._replace(end=end)
    reads = HEAD.learner(scope, named)
    assert HEAD.head_learner is not None
    expected = () if reads is None else reads.feed(message).session_ids
    assert tuple(HEAD.head_learner(scope, named, message)) == expected


def test_headers_that_can_be_read_only_once_are_learned_from() -> None:
    message = {"type": "http.response.start", "status": 200, "headers": iter([(b"x-s", b"new")])}
    assert HEAD.head_learner is not None
    assert HEAD.head_learner(request(), Named(), message) == ("new",)


def test_where_bodies_may_hold_ids_or_no_reply_can_each_reply_has_its_own_learner() -> None:
    assert BODY.head_learner is None
    assert SourcesIdentity(["header:x-s"], learn=["body:id@/join"]).head_learner is None
    assert SourcesIdentity(["query:q"]).head_learner is None


def test_an_accepted_websocket_s_headers_make_a_session_known_and_a_refused_one_s_do_not() -> None:
    accept: Message = {"type": "websocket.accept", "headers": [(b"set-cookie", b"sid=new")]}
    assert learned(learner(HEAD, handshake()), accept, {"type": "websocket.send", "text": "x"}) == ["new"]
    for refusal in ("websocket.http.response.start", "websocket.close"):
        event: Message = {"type": refusal, "status": 403, "headers": [(b"set-cookie", b"sid=new")]}
        assert learned(learner(HEAD, handshake()), event) == []


# --- JSON replies ---


@given(st.lists(st.integers(0, 40), max_size=6))
def test_a_json_reply_leaves_as_a_whole_once_its_id_is_known(cuts: list[int]) -> None:
    body = b'{"y": 1, "x": {"id": "new"}}'
    at = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    pieces = [body[one:other] for one, other in itertools.pairwise(at)]
    events = [start(200, JSON), *(part(piece, more=True) for piece in pieces), part(b"")]
    reading = learner(BODY)
    for event in events[:-1]:
        assert reading.feed(event).messages == ()
    step = reading.feed(events[-1])
    assert step.session_ids == ("new",)
    assert step.messages == tuple(events)
    assert reading.done


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON ;x=y", "application/problem+json", "text/json"])
def test_json_of_any_name_is_read(kind: str) -> None:
    assert learned(learner(BODY), start(200, ("Content-Type", kind)), part(b'{"x":{"id":"j"}}')) == ["j"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b'{"x":1}', b'{"x":{"id":1}}', b'{"x":{"id":""}}', b'{"id":"j"}', b"\xff", b'{"x":{"id":"a'],
)
def test_a_json_reply_without_an_id_passes_unchanged(body: bytes) -> None:
    assert learned(learner(BODY), start(200, JSON), part(body)) == []


@pytest.mark.parametrize(
    "body", [b'{"x":{"\\u0069d":"j"}}', '{"x":{"id":"j"}}'.encode("utf-16"), b'\xef\xbb\xbf{"x":{"id":"j"}}']
)
def test_an_id_is_found_however_json_writes_it(body: bytes) -> None:
    assert learned(learner(BODY), start(200, JSON), part(body)) == ["j"]


def test_a_key_that_json_may_write_in_several_ways_is_found() -> None:
    identity = SourcesIdentity(learn=["body:a/b@/join"])
    assert learned(learner(identity), start(200, JSON), part(b'{"a\\/b":"j"}')) == ["j"]


def test_what_is_held_back_leaves_as_it_was_sent_though_the_app_uses_its_parts_again() -> None:
    text, buffer = json.dumps({"x": {"id": "new"}, "more": "abcdefgh" * 20}).encode(), bytearray(16)
    head = start(200, JSON)
    reading, event, left = learner(BODY), {"type": "http.response.body"}, []
    left += reading.feed(head).messages
    head["headers"].clear()
    for n in range(0, len(text), len(buffer)):
        buffer[: len(text[n : n + 16])] = text[n : n + 16]
        event |= {"body": memoryview(buffer)[: len(text[n : n + 16])], "more_body": n + 16 < len(text)}
        left += reading.feed(event).messages
    assert body_of(left) == text
    assert left[0]["headers"]
    assert [each["more_body"] for each in left[1:]] == [True] * (len(left) - 2) + [False]


def test_a_json_reply_over_the_limit_passes_unlearned_and_at_once() -> None:
    body = b'{"x":{"id":"j"},"y":"' + b"y" * 2_000 + b'"}'
    declared = learner(BODY)
    head = start(200, JSON, ("content-length", str(len(body))))
    assert declared.feed(head).messages == (head,)
    assert declared.done
    undeclared = learner(BODY)
    assert undeclared.feed(start(200, JSON)).messages == ()
    assert leaving(undeclared.feed(part(body[:1_100], more=True))) == body[:1_100]
    assert undeclared.done
    assert learned(learner(BODY), start(200, JSON), part(body[:500], True), part(body[500:])) == []


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_an_encoded_reply_passes_unread_and_its_headers_are_read(encoding: str) -> None:
    identity = SourcesIdentity(["header:x-s"], learn=["body:x.id@/join"])
    head = start(200, JSON, ("Content-Encoding", encoding), ("x-s", "new"))
    reading = learner(identity)
    step = reading.feed(head)
    assert (step.session_ids, step.messages) == (("new",), (head,))
    assert reading.done


@pytest.mark.parametrize("kind", ["text/plain", "text/html", "application/octet-stream", "application/x-ndjson", ""])
def test_a_stream_that_cannot_carry_an_id_is_not_held_back(kind: str) -> None:
    reading = learner(BODY)
    head = start(200, ("content-type", kind))
    assert reading.feed(head).messages == (head,)
    assert reading.done
    for event in (part(b'{"x":{"id":"j"}}', more=True), part(b"")):
        assert reading.feed(event).messages == (event,)


def test_a_reply_to_head_and_one_without_a_body_are_not_waited_for() -> None:
    identity = SourcesIdentity(learn=["body:x.id@/join"])
    for scope, status in [
        (request("HEAD", "/join"), 200),
        (request("GET", "/join"), 204),
        (request("GET", "/join"), 304),
    ]:
        reading = learner(identity, scope)
        head = start(status, JSON, ("content-length", "16"))
        assert reading.feed(head).messages == (head,)
        assert reading.done


def test_events_that_are_no_part_of_the_reply_keep_their_order() -> None:
    hint: Message = {"type": "http.response.early_hint", "links": []}
    debug: Message = {"type": "http.response.debug", "info": {}}
    trailers: Message = {"type": "http.response.trailers", "headers": [], "more_trailers": False}
    reading = learner(BODY)
    assert reading.feed(hint).messages == (hint,)
    head, first, last = start(200, JSON), part(b'{"x":{"id"', True), part(b':"j"}}')
    assert [reading.feed(event).messages for event in (head, debug, first)] == [(), (), ()]
    step = reading.feed(last)
    assert step.messages == (head, debug, first, last)
    assert step.session_ids == ("j",)
    assert reading.feed(trailers).messages == (trailers,)


@pytest.mark.parametrize("kind", ["http.response.pathsend", "http.response.zerocopysend"])
def test_a_file_that_the_server_sends_by_itself_passes_unread(kind: str) -> None:
    event: Message = {"type": kind, "path": "/x"}
    head = start(200, JSON)
    reading = learner(BODY)
    reading.feed(head)
    assert reading.feed(event).messages == (head, event)
    streaming = learner(BODY)
    streaming.feed(start(200, SSE))
    streaming.feed(part(b"data: ha", more=True))
    step = streaming.feed(event)
    assert body_of(step.messages) == b"data: ha"
    assert step.messages[-1] == event


def test_what_a_request_s_body_named_is_not_news_when_the_reply_repeats_it() -> None:
    identity = SourcesIdentity(["header:x-s", "body:id@POST /join"])
    scope = request("POST", "/join", [("x-s", "h"), ("content-length", "9")])
    named = Named("h", also=("echoed",))  # type: ignore[arg-type]
    assert learned(learner(identity, scope, named), start(200, JSON), part(b'{"id":"echoed"}')) == []
    assert learned(learner(identity, scope, named), start(200, JSON), part(b'{"id":"new"}')) == ["new"]


# --- server-sent events ---


@given(st.lists(st.integers(0, 200), max_size=20), st.sampled_from(["\n", "\r\n", "\r"]))
def test_an_event_s_id_is_known_before_the_event_leaves_however_the_stream_is_cut(cuts: list[int], end: str) -> None:
    lines = ["data: {}", "", ": ping", "", "event: e", 'data: {"x":', 'data: {"id": "one"}}', "",
             'data: {"x":{"id":"two"}}', "", 'data: {"x":{"id":"one"}}', "", "data: not json", "", ""]  # fmt: skip
    body = end.join(lines).encode()
    at = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    pieces = [body[one:other] for one, other in itertools.pairwise(at)]
    reading = learner(BODY)
    head = start(200, SSE)
    assert reading.feed(head).messages == (head,)
    known: list[str] = []
    left = fed = b""
    for piece in [*pieces, b""]:
        step = reading.feed(part(piece, more=piece != b""))
        known += step.session_ids
        left += leaving(step)
        for name in ("one", "two"):
            assert f'"{name}"'.encode() not in left or name in known
        fed += piece
        # Only an event that is not complete yet is held back.
        assert len(fed) - len(left) <= len(end.join(lines[4:8]))
    assert left == body
    assert known == ["one", "two"]
    assert reading.done


def test_complete_events_leave_at_once_and_the_started_one_stays() -> None:
    reading = learner(BODY)
    reading.feed(start(200, SSE))
    assert leaving(reading.feed(part(b"data: 1\n\ndata: 2\n\ndata: {", more=True))) == b"data: 1\n\ndata: 2\n\n"
    assert reading.feed(part(b'"x"', more=True)).messages == ()
    step = reading.feed(part(b':{"id":"j"}}\n\n', more=True))
    assert step.session_ids == ("j",)
    assert leaving(step) == b'data: {"x":{"id":"j"}}\n\n'


def test_an_event_that_comes_in_one_piece_leaves_as_the_very_message() -> None:
    reading = learner(BODY)
    reading.feed(start(200, SSE))
    event = part(b'data: {"x":{"id":"j"}}\r\n\r\n', more=True)
    assert reading.feed(event).messages == (event,)


def test_an_event_over_the_limit_passes_unlearned_and_the_next_is_learned() -> None:
    long = b'data: {"x":{"id":"j"},"y":"' + b"y" * 2_000 + b'"}\n\n'
    pieces = [part(long[at : at + 100], more=True) for at in range(0, len(long), 100)]
    last = part(b'data: {"x":{"id":"k"}}\n\n')
    assert learned(learner(BODY), start(200, SSE), *pieces, last) == ["k"]


def test_a_stream_that_ends_inside_an_event_leaves_whole() -> None:
    assert learned(learner(BODY), start(200, SSE), part(b'data: {"x":{"id":"j"}}', True), part(b"")) == ["j"]


# --- MCP tool results ---

HANDLES = SourcesIdentity(["mcp-handle:basket"])


def result(**more: object) -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": 1, "result": more}


TEXT = {"type": "text", "text": 'a "basket": {"basket": "no"}'}

results = pytest.mark.parametrize(
    ("message", "expected"),
    [
        (result(structuredContent={"basket": "b1"}), ["b1"]),
        (result(structuredContent={"basket": "b1"}, isError=False), ["b1"]),
        (result(content=[TEXT, {"type": "text", "text": ' {"basket": "b1"}'}]), ["b1"]),
        (result(content=[{"type": "text", "text": '{"\\u0062asket": "b1"}'}]), ["b1"]),
        (
            result(content=[{"type": "text", "text": '{"basket":"b2"}'}], structuredContent={"basket": "b1"}),
            ["b1", "b2"],
        ),
        ([result(structuredContent={"basket": "b1"}), result(structuredContent={"basket": "b2"})], ["b1", "b2"]),
        (result(structuredContent={"basket": "b1"}, isError=True), []),
        (result(content=[{"type": "text", "text": '{"basket": "b1"}'}], isError=True), []),
        ({"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "no", "data": {"basket": "b1"}}}, []),
        ({"jsonrpc": "2.0", "method": "notifications/message", "params": {"basket": "b1"}}, []),
        (result(structuredContent={"basket": 1}), []),
        (result(structuredContent={"result": {"basket": "b1"}}), []),
        (result(content="x", structuredContent=[]), []),
        (result(content=[1, {"text": 2}, {"text": "{"}, {"text": '["basket"]'}]), []),
        ({"result": "basket"}, []),
        ([], []),
    ],
)


@results
def test_a_tool_s_result_makes_a_handle_known_as_json(message: object, expected: list[str]) -> None:
    scope = request("POST", "/mcp")
    body = json.dumps(message).encode()
    assert learned(learner(HANDLES, scope, Named()), start(200, JSON), part(body)) == expected


@results
def test_a_tool_s_result_makes_a_handle_known_as_an_event(message: object, expected: list[str]) -> None:
    scope = request("POST", "/mcp")
    body = b"event: message\r\ndata: " + json.dumps(message).encode() + b"\r\n\r\n"
    pieces = [part(body[at : at + 11], more=True) for at in range(0, len(body), 11)]
    assert learned(learner(HANDLES, scope, Named()), start(200, SSE), *pieces, part(b"")) == expected


def test_a_handle_that_the_call_named_is_not_news() -> None:
    scope = request("POST", "/mcp")
    body = json.dumps(result(structuredContent={"basket": "b1"})).encode()
    named = Named("b1")  # type: ignore[arg-type]
    assert learned(learner(HANDLES, scope, named), start(200, JSON), part(body)) == []


# --- what it learns from, and when ---


def test_learn_adds_places_that_occur_in_replies_only() -> None:
    """An event queue: the join's JSON names a session hash and an event; the stream has only the event, in its path."""
    identity = SourcesIdentity(
        ["body:session_hash@POST /join", "query:session_hash", "path:/stream/{session}"],
        learn=["body:event_id@POST /join"],
    )
    scope = request("POST", "/join", [("content-length", "9")])
    named = Named("h1")  # type: ignore[arg-type]
    assert learned(identity.learner(scope, named), start(200, JSON), part(b'{"event_id":"e1"}')) == ["e1"]
    assert (identity.from_head(request(path="/stream/e1")) or named).session_id == "e1"
    assert (identity.from_head(request(query=b"session_hash=h1")) or Named()).session_id == "h1"


def test_an_id_that_only_a_query_with_two_values_names_is_news() -> None:
    identity = SourcesIdentity(["header:x-s", "query:q"])
    scope = request(headers=[("x-s", "1")], query=b"q=a&q=b")
    assert learned(learner(identity, scope), start(200, ("x-s", "2")), part(b"")) == ["2"]


def test_a_learner_says_what_it_is_doing() -> None:
    reading = learner(BODY)
    assert repr(reading) == "<ReplyLearner reading>"
    reading.feed(start(200, JSON))
    assert repr(reading) == "<ReplyLearner holding 1 events>"
    reading.feed(part(b"{}"))
    assert repr(reading) == "<ReplyLearner done>"


def test_events_between_the_parts_of_a_stream_pass() -> None:
    reading = learner(BODY)
    other: Message = {"type": "http.response.debug", "info": {}}
    reading.feed(start(200, SSE))
    assert reading.feed(other).messages == (other,)
    file: Message = {"type": "http.response.pathsend", "path": "/x"}
    assert reading.feed(file).messages == (file,)


def test_a_json_reply_nested_too_deeply_passes_unlearned() -> None:
    identity = SourcesIdentity(learn=["body:id@/join"])
    deep = b'{"id":"j","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert learned(learner(identity), start(200, JSON), part(deep)) == []
