"""The preset `engineio`: what its requests name, and what the replies to its handshakes make known."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.identity_scopes import handshake, learned, leaving, part, request, start

from homing.errors import BadRequestError
from homing.identity import PRESETS, Named, SourcesIdentity
from homing.identity.engineio import MAX_OPENING_BYTES
from homing.types import Scope

EIO = SourcesIdentity(preset=PRESETS["engineio"])
SID = "lv_VI97HAXpY6yYWAAAC"
OPEN = '0{"sid":"lv_VI97HAXpY6yYWAAAC","upgrades":["websocket"],"pingInterval":25000,"pingTimeout":20000}'
JSONP = '___eio[0]("' + OPEN.replace('"', '\\"') + '");'
IN_BINARY = b"\x00" + bytes(int(digit) for digit in str(len(OPEN))) + b"\xff" + OPEN.encode()
FRAMINGS = {
    "4": OPEN.encode(),
    "4, with a packet after it": f'{OPEN}\x1e40{{"sid":"other"}}'.encode(),
    "4, JSONP": JSONP.encode(),
    "3, text": f"{len(OPEN)}:{OPEN}2:40".encode(),
    "3, binary": IN_BINARY + b"\x00\x02\xff40",
}


def named(scope: Scope, identity: SourcesIdentity = EIO) -> Named:
    found = identity.from_head(scope)
    assert found is not None
    return found


def opening(query: bytes = b"EIO=4&transport=polling") -> Scope:
    return request("GET", "/socket.io/", query=query)


def learner_of(scope: Scope) -> object:
    return EIO.learner(scope, named(scope))


@pytest.mark.parametrize("path", ["/socket.io/", "/api/ws/socket.io/", "/_nicegui_ws/socket.io"])
def test_a_request_names_its_sid_wherever_the_server_is_mounted(path: str) -> None:
    query = f"EIO=4&transport=polling&t=abc&sid={SID}".encode()
    for scope in (request("GET", path, query=query), request("POST", path, query=query), handshake(path, query=query)):
        assert named(scope) == Named(SID)  # type: ignore[arg-type]
        assert EIO.learner(scope, named(scope)) is None


@pytest.mark.parametrize(
    "query", [b"EIO=4&transport=polling", b"sid=1", b"MYEIO=4&sid=1", b"EIO=4&mysid=1", b"EIO=4&sid=", b""]
)
def test_a_sid_without_the_protocol_s_version_names_no_session(query: bytes) -> None:
    assert named(request("GET", "/page", query=query)).session_id is None
    assert named(handshake("/page", query=query)).session_id is None


def test_two_sids_are_refused() -> None:
    with pytest.raises(BadRequestError):
        EIO.from_head(request("GET", "/socket.io/", query=b"EIO=4&sid=1&sid=2"))


@pytest.mark.parametrize("framing", FRAMINGS)
def test_the_open_packet_of_a_handshake_makes_its_sid_known_in_every_framing(framing: str) -> None:
    scope = opening(b"EIO=3&transport=polling" if framing.startswith("3") else b"EIO=4&transport=polling&j=0")
    assert learned(EIO.learner(scope, named(scope)), start(), part(FRAMINGS[framing])) == [SID]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_nothing_leaves_before_the_sid_is_known_and_everything_does_after(framing: str) -> None:
    body = FRAMINGS[framing]
    scope = opening()
    learner = EIO.learner(scope, named(scope))
    assert learner is not None
    left, known_at = b"", None
    steps = [learner.feed(start())]
    for at in range(len(body)):
        steps.append(learner.feed(part(body[at : at + 1], more=at < len(body) - 1)))
        left += leaving(steps[-1])
        if steps[-1].session_ids:
            known_at = at
            assert left == body[: at + 1]
        assert bool(left) is (known_at is not None)
    assert left == body
    assert known_at is not None
    assert known_at < len(body) - (framing != "4")


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
def test_a_compressed_handshake_makes_its_sid_known_too(encoding: str, compress: object) -> None:
    body = compress(FRAMINGS["4, with a packet after it"] + b"x" * 5000)  # type: ignore[operator]
    scope = opening()
    reply = start(200, ("content-encoding", encoding), ("content-type", "text/plain"))
    pieces = [part(body[at : at + 5], more=at + 5 < len(body)) for at in range(0, len(body), 5)]
    assert learned(EIO.learner(scope, named(scope)), reply, *pieces) == [SID]


@pytest.mark.parametrize(
    "reply",
    [
        start(400, ("content-type", "text/plain")),
        start(200, ("content-encoding", "br")),
        start(200, ("content-type", "text/event-stream")),
        start(204),
    ],
    ids=["refused", "unknown encoding", "events", "no content"],
)
def test_no_other_reply_is_held_back(reply: dict[str, object]) -> None:
    scope = opening()
    learner = EIO.learner(scope, named(scope))
    assert learner is not None
    learner.feed(reply)
    assert leaving(learner.feed(part(OPEN.encode()[:20], more=True))) == OPEN.encode()[:20]


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"0[1]",
        b'0{"pid":1}',
        b"4hello",
        b"5:4hell",
        b"\x00\x05\xff4hell",
        b'0{"sid":7}',
        b"___eio[",
        b"",
        b"0{",
    ],
)
def test_a_reply_that_begins_otherwise_makes_nothing_known(body: bytes) -> None:
    scope = opening()
    assert learned(EIO.learner(scope, named(scope)), start(), part(body)) == []


def test_a_page_whose_query_looks_like_a_handshake_is_not_held_back() -> None:
    scope = opening()
    learner = EIO.learner(scope, named(scope))
    assert learner is not None
    learner.feed(start(200, ("content-type", "text/html")))
    assert leaving(learner.feed(part(b"<!doctype html>", more=True))) == b"<!doctype html>"
    assert learner.done


def test_what_never_ends_its_open_packet_passes_once_it_is_too_long() -> None:
    scope = opening()
    learner = EIO.learner(scope, named(scope))
    assert learner is not None
    learner.feed(start())
    assert leaving(learner.feed(part(b'0{"sid":"', more=True))) == b""
    assert leaving(learner.feed(part(b"x" * MAX_OPENING_BYTES, more=True))) == b'0{"sid":"' + b"x" * MAX_OPENING_BYTES
    assert learner.done


@given(st.lists(st.binary(max_size=40), max_size=6), st.sampled_from(["", "gzip", "deflate", "br"]))
def test_any_reply_leaves_whole_and_in_order(pieces: list[bytes], encoding: str) -> None:
    scope = opening()
    events = [part(piece, more=True) for piece in pieces]
    learned(EIO.learner(scope, named(scope)), start(200, ("content-encoding", encoding)), *events, part(b""))


def test_the_sid_counts_before_a_cookie_that_the_same_request_carries() -> None:
    """A cookie may change while a connection lives: the connection stays where it is."""
    mixed = SourcesIdentity(["cookie:visitor"], preset=PRESETS["engineio"])
    scope = request("GET", "/socket.io/", [("cookie", "visitor=v2")], query=f"EIO=4&sid={SID}".encode())
    assert named(scope, mixed).session_id == SID
    assert named(request("GET", "/socket.io/", [("cookie", "visitor=v2")], query=b"EIO=4"), mixed).session_id == "v2"


def test_gone_is_answered_as_the_reference_server_does_and_only_to_the_protocol_s_requests() -> None:
    reply = PRESETS["engineio"].gone_reply
    assert reply is not None
    assert reply(request("GET", "/basket", [("cookie", "visitor=v1")])) is None
    answered = reply(request("GET", "/socket.io/", query=f"EIO=4&transport=polling&sid={SID}".encode()))
    assert answered is not None
    status, headers, body = answered
    assert status == PRESETS["engineio"].gone_status == 400
    assert dict(headers) == {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
    assert json.loads(body) == {"code": 1, "message": "Session ID unknown"}
