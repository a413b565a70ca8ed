"""What is decoded equals what was encoded, types included; what cannot cross is refused where it is sent."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homing.forwarding.frames import PIECE_BYTES, event_frame, pieces, read_event
from homing.forwarding.heads import (
    BODY_NONE,
    BODY_OPEN,
    BODY_WHOLE,
    crossable_extensions,
    read_request,
    read_start,
    request_head,
    request_scope,
    start_head,
)
from homing.forwarding.values import MAX_HEAD_BYTES, MalformedFrameError, NotCarriedError, decode_value, encode_value

busy_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(), max_size=20)  # lone surrogates included
keys = st.text("abcdefghijklmnopqrstuvwxyz._", min_size=1, max_size=12)
leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts | st.binary()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
headers = st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=5)
addresses = st.none() | st.tuples(texts, st.none() | st.integers(0, 65535))


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down: 1 is not True, and a list is no tuple."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@busy_machine
@given(values)
def test_values_cross_as_they_are(value: object) -> None:
    assert same(decode_value(encode_value(value, "it")), value)


@st.composite
def scopes(draw: st.DrawFn) -> dict[str, Any]:
    websocket = draw(st.booleans())
    scope: dict[str, Any] = {
        "type": "websocket" if websocket else "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": draw(st.sampled_from(["1.0", "1.1", "2"])),
        "scheme": "http",
        "path": "/" + draw(texts),
        "query_string": draw(st.binary(max_size=20)),
        "root_path": draw(texts),
        "headers": draw(headers),
        "client": draw(addresses),
        "server": draw(addresses),
    }
    if draw(st.booleans()):
        scope["raw_path"] = draw(st.none() | st.binary(max_size=20))
    if websocket:
        scope["subprotocols"] = draw(st.lists(texts, max_size=3))
    else:
        scope["method"] = draw(st.sampled_from(["GET", "POST"]))
    if draw(st.booleans()):
        scope["homing.head_length"] = draw(st.integers(0, 5))
    scope |= draw(st.dictionaries(keys.map("x-{}".format), values, max_size=2))
    return scope


@busy_machine
@given(
    scopes(),
    st.lists(values, max_size=3).map(tuple),
    st.integers(0, 3),
    st.sampled_from([BODY_NONE, BODY_WHOLE, BODY_OPEN]),
    st.lists(st.integers(0, 2**16), max_size=3).map(tuple),
)
def test_requests_cross_as_they_are(
    scope: dict[str, Any], note: tuple[object, ...], reason: int, body: int, early: tuple[int, ...]
) -> None:
    request = read_request(request_head(reason, note, scope | {"state": {}, "app": object()}, body, early))
    assert same(request_scope(request), scope)
    assert same(request.note, note)
    assert (request.reason, request.body, request.early) == (reason, body, early)


@busy_machine
@given(st.integers(100, 599), headers)
def test_starts_cross_as_they_are(status: int, headers: list[tuple[bytes, bytes]]) -> None:
    start = {"type": "http.response.start", "status": status, "headers": headers}
    head = start_head(start)
    assert head is not None
    assert same(read_start(head), start)


@busy_machine
@given(
    st.fixed_dictionaries(
        {"type": st.just("websocket.send")},
        optional={"text": st.none() | st.text(), "bytes": st.none() | st.binary()},
    )
    | st.dictionaries(keys, values, max_size=3).map(lambda event: {**event, "type": "some.event"})
)
def test_events_cross_as_they_are(event: dict[str, Any]) -> None:
    kind, head, payload = event_frame(event)
    assert same(read_event(kind, head, payload, "websocket.send"), event)


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"a": {1}}, 2**64, -(2**63) - 1, 1j, bytes(MAX_HEAD_BYTES), [[]] * 3 + [set()]]
)
def test_what_cannot_cross_is_refused(value: object) -> None:
    with pytest.raises(NotCarriedError):
        encode_value(value, "it")
    with pytest.raises(NotCarriedError):
        event_frame({"type": "custom", "value": value})


@pytest.mark.parametrize(
    "event",
    [
        {"type": "http.response.start", "status": 200, "headers": [(b"a", b"1")], "trailers": True},
        {"type": "http.response.body", "body": b"ok", "more_body": True},
        {"type": "http.response.trailers", "headers": [(b"a", b"1")], "more_trailers": False},
        {"type": "websocket.accept", "subprotocol": None, "headers": [(b"a", b"1")]},
        {"type": "websocket.send", "text": "hello"},
        {"type": "websocket.close", "code": 1000, "reason": ""},
    ],
)
def test_of_an_event_that_every_server_knows_only_keys_that_none_knows_may_be_lost(event: dict[str, Any]) -> None:
    more = {**event, "note": "crosses", "live": object(), "all": {1, 2}, 3: 4}
    kind, head, payload = event_frame(more)
    assert same(read_event(kind, head, payload, "websocket.send"), {**event, "note": "crosses"})
    for key in event.keys() - {"type"}:
        with pytest.raises(TypeError):
            event_frame({**more, key: object()})


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(NotCarriedError):
        encode_value(value, "it")


@busy_machine
@given(st.binary(max_size=200))
def test_heads_that_are_none_are_malformed(head: bytes) -> None:
    for read in (decode_value, read_request, read_start):
        with contextlib.suppress(MalformedFrameError):
            read(head)
    for kind in (3, 4, 5, 9, 68, 69, 77):
        with contextlib.suppress(MalformedFrameError):
            assert isinstance(read_event(kind, head, head, "websocket.receive")["type"], str)


def test_extensions_that_cannot_cross_are_hidden() -> None:
    assert crossable_extensions({}) is None
    assert crossable_extensions({"extensions": None}) is None
    hidden = {"http.response.zerocopysend": {}, "http.response.debug": {}, "http.response.template": {}, "x": object()}
    shown = {"http.response.pathsend": {}, "tls": {"client_cert_name": None, "cipher_suite": 0x1301}}
    assert crossable_extensions({"extensions": hidden | shown}) == shown


@busy_machine
@given(st.integers(0, 3), st.integers(-1, 1))
def test_pieces_are_bounded_and_whole(count: int, more: int) -> None:
    body = bytes(max(0, count * PIECE_BYTES + more))
    parts = list(pieces(body))
    assert b"".join(parts) == body
    assert all(0 < len(part) <= PIECE_BYTES for part in parts)
