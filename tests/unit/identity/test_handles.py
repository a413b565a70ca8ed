from __future__ import annotations

import asyncio
import base64
import json

import pytest
from tests.support.identity_scopes import parts, receiving, request, whole_body

from homing.errors import DuplicateFieldError, SessionConflictError
from homing.identity import Named, SourcesIdentity
from homing.identity.handles import decode_param

IDENTITY = SourcesIdentity(["mcp-handle:Basket"])


def call(message: object, *headers: tuple[str, str]) -> Named:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()

    async def run() -> Named:
        scope = request("POST", "/mcp", [("content-length", str(len(body))), *headers])
        assert IDENTITY.from_head(scope) is None
        named, receive = await IDENTITY.from_body(scope, receiving(parts(body)))
        assert await whole_body(receive) == (body, None)
        return named

    return asyncio.run(run())


def tool(arguments: object, method: str = "tools/call") -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"name": "add", "arguments": arguments}}


def test_the_argument_of_a_tool_call_names_the_session() -> None:
    assert call(tool({"Basket": "b1", "x": 1})).session_id == "b1"


@pytest.mark.parametrize(
    "message",
    [
        tool({"Basket": ""}),
        tool({"Basket": 7}),
        tool({"basket": "b1"}),
        tool({"x": {"Basket": "b1"}}),
        tool([]),
        tool({"Basket": "b1"}, "prompts/get"),
        {"method": "tools/call", "params": []},
        {"params": {"arguments": {"Basket": "b1"}}},
        [],
        b"nothing",
    ],
)
def test_what_is_no_call_with_that_argument_names_none(message: object) -> None:
    assert call(message).session_id is None


def test_a_batch_names_the_handle_its_calls_agree_on_and_is_refused_if_they_do_not() -> None:
    assert call([tool({}), tool({"Basket": "b1"}), tool({"Basket": "b1"})]).session_id == "b1"
    with pytest.raises(SessionConflictError) as refused:
        call([tool({"Basket": "b1"}), tool({"Basket": "b2"})])
    assert refused.value.detail == "Two places of the request name different sessions."


@pytest.mark.parametrize(
    "body",
    [
        b'{"method":"tools/call","params":{"arguments":{"Basket":"a","Basket":"b"}}}',
        b'{"method":"tools/call","params":{"arguments":{"Basket":"a"},"arguments":{}}}',
        b'{"method":"tools/call","params":{},"params":{"arguments":{"Basket":"b"}}}',
        b'{"method":"ping","method":"tools/call","params":{"arguments":{"Basket":"b"}}}',
    ],
)
def test_an_argument_that_two_parsers_may_read_differently_is_refused(body: bytes) -> None:
    with pytest.raises(DuplicateFieldError):
        call(body)


def test_the_header_that_mirrors_an_argument_never_outvotes_it() -> None:
    assert call(tool({"Basket": "b1"}), ("mcp-param-basket", "b2")).session_id == "b1"


def test_the_mirroring_header_counts_where_the_call_has_no_such_argument() -> None:
    encoded = base64.b64encode("bü".encode()).decode()
    assert call(tool({}), ("mcp-param-basket", "b2")).session_id == "b2"
    assert call(tool({}), ("mcp-param-basket", f"=?base64?{encoded}?=")).session_id == "bü"
    assert call(tool({}), ("mcp-param-other", "b2")).session_id is None
    assert call(tool({}, "tools/list"), ("mcp-param-basket", "b2")).session_id is None


@pytest.mark.parametrize(
    ("value", "decoded"),
    [
        ("plain value", "plain value"),
        ("=?base64??=", ""),
        ("=?base64?YQ==?=", "a"),
        ("=?base64?YR==?=", None),
        ("=?base64?YQ?=", None),
        ("=?base64?/w==?=", None),
        ("=?base64?Y Q==?=", None),
        ("=?base64?ü?=", None),
        ("=?BASE64?YQ==?=", "=?BASE64?YQ==?="),
        ("x=?base64?YQ==?=", "x=?base64?YQ==?="),
    ],
)
def test_the_base64_form_is_read_only_as_the_sdk_writes_it(value: str, decoded: str | None) -> None:
    assert decode_param(value) == decoded
