"""The replies that homing itself gives."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from homing import errors
from homing.errors import OwnerGoneError, OwnerTimeoutError, ReplyError, SessionGoneError, SessionMovingError
from homing.routing.answers import answer, error_reply
from homing.types import SessionId, WorkerId

SECRET_ID = SessionId("an ID that opens a session")


def reply_classes(base: type[ReplyError] = ReplyError) -> Iterator[type[ReplyError]]:
    yield base
    for each in base.__subclasses__():
        yield from reply_classes(each)


def answered(error: ReplyError, scope: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asyncio.run(answer(error, scope, send, **options))
    return sent


def http(method: str = "GET") -> dict[str, Any]:
    return {"type": "http", "method": method, "path": "/x", "headers": []}


DENIAL: dict[str, Any] = {"type": "websocket", "path": "/x", "extensions": {"websocket.http.response": {}}}


@pytest.mark.parametrize("kind", list(reply_classes()), ids=lambda kind: kind.__name__)
def test_a_reply_names_its_code_in_a_header_and_in_its_body(kind: type[ReplyError]) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "for the log")
    start, body = answered(error, http())
    headers = dict(start["headers"])
    assert start["status"] == kind.status
    assert headers[b"homing-error"] == kind.code.encode()
    assert json.loads(body["body"]) == {"error": {"code": kind.code, "detail": kind.detail}}
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert body["more_body"] is False


def test_only_what_did_not_run_may_be_tried_again() -> None:
    for kind in reply_classes():
        assert (kind.retry_after_seconds is not None) == (kind.status == 503), kind
    status, headers, _ = error_reply(SessionMovingError())
    assert (status, dict(headers)[b"retry-after"]) == (503, b"1")
    for error in (errors.SessionNotRecordedError(), OwnerTimeoutError()):
        assert b"retry-after" not in dict(error_reply(error)[1])


def test_a_reply_holds_no_id_and_no_path_though_the_log_line_says_more(caplog: pytest.LogCaptureFixture) -> None:
    error = OwnerGoneError(SECRET_ID, WorkerId("0" * 32))
    with caplog.at_level(logging.INFO, "homing"):
        start, body = answered(error, http())
    assert "0" * 32 in caplog.text
    assert SECRET_ID not in caplog.text
    for text in (body["body"], repr(start).encode()):
        assert b"0" * 32 not in text
        assert SECRET_ID.encode() not in text


def test_head_gets_the_head_of_the_same_reply() -> None:
    get, head = answered(SessionMovingError(), http()), answered(SessionMovingError(), http("HEAD"))
    assert head[0] == get[0]
    assert head[1]["body"] == b""


def test_gone_has_the_status_that_the_server_was_given_and_others_keep_theirs() -> None:
    for error in (SessionGoneError(), OwnerGoneError(SECRET_ID, WorkerId("0" * 32))):
        assert answered(error, http(), gone_status=404)[0]["status"] == 404
    assert answered(SessionMovingError(), http(), gone_status=404)[0]["status"] == 503


def test_gone_has_the_shape_of_its_protocol_and_names_its_code_all_the_same() -> None:
    def shape(scope: Any) -> Any:
        return 404, [(b"content-type", b"text/plain")], scope["path"].encode()

    start, body = answered(SessionGoneError(), http(), gone_reply=shape)
    assert (start["status"], body["body"]) == (404, b"/x")
    assert dict(start["headers"])[b"homing-error"] == b"session_gone"
    assert json.loads(answered(SessionMovingError(), http(), gone_reply=shape)[1]["body"])["error"]


def test_gone_has_homing_s_own_shape_for_a_request_that_is_not_of_the_protocol() -> None:
    start, body = answered(SessionGoneError(), http(), gone_reply=lambda scope: None)
    assert (start["status"], json.loads(body["body"])["error"]["code"]) == (410, "session_gone")


def test_a_websocket_gets_the_same_reply_as_a_denial() -> None:
    start, body = answered(SessionGoneError(), DENIAL)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 410)
    assert dict(start["headers"])[b"homing-error"] == b"session_gone"
    assert (body["type"], json.loads(body["body"])["error"]["code"]) == (
        "websocket.http.response.body",
        "session_gone",
    )


@pytest.mark.parametrize("extensions", [{}, {"extensions": None}, {"extensions": {}}])
def test_a_websocket_is_closed_where_the_server_has_no_denials(extensions: dict[str, Any]) -> None:
    # Before the handshake, which the server answers with a plain 403.
    (close,) = answered(SessionGoneError(), {"type": "websocket", "path": "/x", **extensions})
    assert (close["type"], close["code"]) == ("websocket.close", 1011)
