from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.identity_scopes import parts, receiving, request, whole_body

from homing.errors import (
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    DuplicateFieldError,
    EncodedBodyError,
    ReplyError,
    SessionIdTooLongError,
    UnavailableError,
)
from homing.identity import Named, SourcesIdentity
from homing.identity.body import BodyReader
from homing.routes import Routes
from homing.types import Message, Receive

IDENTITY = SourcesIdentity(["body:a.b@POST /start"], starts=Routes.parse(["POST /start"]), max_body_bytes=1_000)


def start(headers: list[tuple[str | bytes, str | bytes]] | None = None, **more: Any) -> Any:
    return request("POST", "/start", headers or [("content-length", "9")], **more)


def read(*bodies: bytes, identity: SourcesIdentity = IDENTITY, scope: Any = None) -> tuple[Named, bytes]:
    """What a request's body names, and the body that the app reads after it; checks that the app gets it once."""

    async def run() -> tuple[Named, bytes]:
        named, receive = await identity.from_body(scope or start(), receiving(parts(*bodies)))
        body, cut = await whole_body(receive)
        assert cut is None
        assert await receive() == {"type": "http.disconnect"}
        return named, body

    return asyncio.run(run())


def test_only_a_declared_route_has_its_body_read() -> None:
    assert IDENTITY.from_head(start()) is None
    for scope in (request("POST", "/other", [("content-length", "9")]), request("GET", "/start")):
        assert IDENTITY.from_head(scope) is not None
    any_method = SourcesIdentity(["body:a@/start"])
    assert any_method.from_head(request("GET", "/start")) is not None
    assert any_method.from_head(request("GET", "/start", [("content-length", "0")])) is not None
    assert any_method.from_head(request("GET", "/start", [("content-length", "2")])) is None
    assert any_method.from_head(request("GET", "/start", [("transfer-encoding", "chunked")])) is None
    assert any_method.from_head(request("GET", "/start", http_version="2")) is None


@given(st.lists(st.integers(0, 60), max_size=10), st.text(min_size=1, max_size=8))
def test_a_body_in_any_pieces_names_its_session_and_reaches_the_app_once(cuts: list[int], name: str) -> None:
    body = json.dumps({"x": [1, {"b": "no"}], "a": {"b": name}}).encode()
    at = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    pieces = [body[one:other] for one, other in itertools.pairwise(at)]
    named, seen = read(*pieces)
    assert named == Named(name, start=True)  # type: ignore[arg-type]
    assert seen == body


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"null", b"x=1&y=2", b"{", b'{"a":{"b":"s"}', b'{"a":{"b":"s"}} x', b"[]", b'["a"]', b"{}",
        b'{"a":1}', b'{"a":{}}', b'{"a":{"b":1}}', b'{"a":{"b":null}}', b'{"a":{"b":""}}', b'{"a":{"b":["s"]}}',
        b'{"b":"s"}', b'{"a.b":"s"}', b'{"a":[{"b":"s"}]}', b'{"A":{"b":"s"}}', b"\xff\xfe", b'{"a":{"b":"\xff"}}',
        b'"a"', b"--boundary\r\n", b"{'a': {'b': 's'}}",
    ],
)  # fmt: skip
def test_a_body_that_names_no_session_is_the_app_s_to_judge(body: bytes) -> None:
    named, seen = read(body)
    assert named == Named(start=True)
    assert seen == body


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'\xef\xbb\xbf{"a":{"b":"s"}}', "s"),
        ('{"a":{"b":"s"}}'.encode("utf-16"), "s"),
        ('{"a":{"b":"s"}}'.encode("utf-32-le"), "s"),
        (b'{"x":NaN,"y":-Infinity,"a":{"b":"s"}}', "s"),
        (b'{"a":{"b":"\\ud800"}}', "\ud800"),
        (b'{"\\u0061":{"\\u0062":"s"}}', "s"),
        (b'{"x":' + b"9" * 900 + b',"a":{"b":"s"}}', "s"),
        (b'{"x":{"a":1,"b":2},"a":{"b":"s","c":{"b":"t"}}}', "s"),
        (b'{"x":{"q":1,"q":2},"a":{"b":"s"}}', "s"),
        (b'{"x":{"a":1,"a":2},"a":{"b":"s"}}', "s"),
        (b'\n\t {"a":{"b":"s"}}\r\n', "s"),
        ('{"a":{"b":"\N{HOUSE BUILDING}/../%00 "}}'.encode(), "\N{HOUSE BUILDING}/../%00 "),
        (b'{"a":{"b":"\\u0000"}}', "\x00"),
    ],
)
def test_whatever_some_app_s_parser_may_read_is_read(body: bytes, name: str) -> None:
    assert read(body)[0].session_id == name


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":{"b":"s","b":"s"}}',
        b'{"a":{"b":"s","b":1}}',
        b'{"a":{"b":"s"},"a":{"b":"t"}}',
        b'{"a":1,"a":{"b":"t"}}',
        b'{"a":{"b":"s","\\u0062":"t"}}',
        b'{"\\u0061":{"b":"s"},"a":{"b":"t"}}',
        '{"a":{"b":"s","b":"t"}}'.encode("utf-16"),
    ],
)
def test_a_field_that_occurs_twice_anywhere_on_its_way_is_refused(body: bytes) -> None:
    with pytest.raises(DuplicateFieldError) as refused:
        read(body)
    assert refused.value.status == 400


def test_nesting_too_deep_to_be_read_is_refused() -> None:
    identity = SourcesIdentity(["body:a@/start"])
    with pytest.raises(BadRequestError) as refused:
        read(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b',"a":"s"}', identity=identity)
    assert refused.value.status == 400


def test_an_id_over_1024_bytes_is_refused() -> None:
    identity = SourcesIdentity(["body:a@/start"])
    assert read(json.dumps({"a": "x" * 1024}).encode(), identity=identity)[0].session_id == "x" * 1024
    with pytest.raises(SessionIdTooLongError):
        read(json.dumps({"a": "x" * 1025}).encode(), identity=identity)


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "x"])
def test_an_encoded_body_is_refused_before_it_is_read(encoding: str) -> None:
    with pytest.raises(EncodedBodyError) as refused:
        read(b"", scope=start([("content-encoding", encoding), ("content-length", "9")]))
    assert refused.value.status == 415


def test_the_identity_encoding_is_none() -> None:
    scope = start([("content-encoding", "Identity"), ("content-length", "9")])
    assert read(b'{"a":{"b":"s"}}', scope=scope)[0].session_id == "s"


def test_a_json_body_over_the_limit_is_refused_also_when_only_declared_or_only_sent() -> None:
    whole = b'{"x":"' + b"y" * 975 + b'","a":{"b":"s"}}'
    assert len(whole) == 997
    assert read(whole + b"   ")[0].session_id == "s"
    for bodies, length in [((whole + b"    ",), "1"), ((whole[:500], whole[500:] + b" " * 4), "1"), ((b"{",), "1001")]:
        with pytest.raises(BodyTooLargeError) as refused:
            read(*bodies, scope=start([("content-length", length)]))
        assert refused.value.status == 413
    with pytest.raises(BodyTooLargeError):
        read(b" " * 600, b" " * 600, b"{}")


def test_a_body_that_is_no_json_is_not_limited_and_passes_as_it_comes() -> None:
    taken: list[int] = []

    async def run() -> None:
        events = parts(b"--x\r\n" + b"y" * 2_000, b"z" * 5_000, b"end")
        inner = receiving(events)

        async def counted() -> Message:
            taken.append(1)
            return await inner()

        scope = start([("content-length", "7008"), ("content-type", "multipart/form-data")])
        named, receive = await IDENTITY.from_body(scope, counted)
        assert named == Named(start=True)
        assert len(taken) == 1
        assert await whole_body(receive) == (b"--x\r\n" + b"y" * 2_000 + b"z" * 5_000 + b"end", None)
        assert len(taken) == 3

    asyncio.run(run())


@pytest.mark.parametrize("bodies", [(b'{"a":{"b":"s"}}',), (b'{"a":', b'{"b":"s"}}'), (b"",), ()])
def test_a_client_that_leaves_half_way_names_and_starts_nothing_and_the_app_sees_it_leave(
    bodies: tuple[bytes, ...],
) -> None:
    async def run() -> None:
        named, receive = await IDENTITY.from_body(start(), receiving(parts(*bodies, disconnect=True)))
        assert named == Named()
        assert await whole_body(receive) == (b"".join(bodies), {"type": "http.disconnect"})

    asyncio.run(run())


def test_a_client_that_leaves_half_way_keeps_the_session_its_head_names() -> None:
    identity = SourcesIdentity(["header:x-s", "body:a.b@POST /start"], ends=Routes.parse(["/start"]))

    async def run() -> None:
        scope = start([("x-s", "h"), ("content-length", "50")])
        named, _ = await identity.from_body(scope, receiving(parts(b'{"a":{"b":"s"}}', disconnect=True)))
        assert named == Named("h")  # type: ignore[arg-type]

    asyncio.run(run())


def failing(reader: BodyReader, receive: Receive) -> type[ReplyError]:
    async def run() -> None:
        async with asyncio.timeout(10):
            await reader.read(start(), receive)

    with pytest.raises(ReplyError) as refused:
        asyncio.run(run())
    return type(refused.value)


def test_a_body_that_stops_coming_times_out() -> None:
    reader = BodyReader(1_000, gap_seconds=0.01, total_seconds=60)
    assert failing(reader, receiving([{"type": "http.request", "body": b"{", "more_body": True}])) is BodyTimeoutError
    assert BodyTimeoutError.status == 408


def test_a_body_that_comes_too_slowly_times_out_although_each_part_is_in_time() -> None:
    async def dribble() -> Message:
        return {"type": "http.request", "body": b"", "more_body": True}

    async def turn_taking() -> Message:
        await asyncio.sleep(0)
        return await dribble()

    assert failing(BodyReader(1_000, gap_seconds=60, total_seconds=0.02), turn_taking) is BodyTimeoutError


class Looked(bytes):
    """A part of a body that says how much of it was looked at for the beginning of a document."""

    seen = 0

    def lstrip(self, characters: bytes | None = None, /) -> bytes:  # type: ignore[override]
        Looked.seen += len(self)
        return super().lstrip(characters)


def test_blanks_that_come_one_by_one_are_each_looked_at_once() -> None:
    """All of them again with each cost milliseconds of the event loop for every byte that a client sent."""
    blanks = [Looked(b" " * 5_000), *(Looked(b" ") for _ in range(500)), Looked(b"\r\n\t{"), Looked(b"}")]
    events: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in blanks]
    events[-1]["more_body"] = False
    Looked.seen = 0
    body = asyncio.run(BodyReader(10_000).read(start(), receiving(events)))
    assert body.document == {}
    assert Looked.seen == sum(map(len, blanks[:-1]))  # the last is of a document that has begun


def test_a_timeout_of_the_caller_s_own_is_not_taken_for_the_client_s() -> None:
    async def run() -> None:
        async def broken() -> Message:
            raise TimeoutError("the server's own")

        with pytest.raises(TimeoutError, match="the server's own"):
            await BodyReader(1_000).read(start(), broken)

    asyncio.run(run())


def test_bodies_being_read_at_once_are_bounded_together_and_let_go_when_they_end() -> None:
    reader = BodyReader(1_000, ["a"], buffered_bytes=1_500)

    async def run() -> None:
        more = asyncio.Event()

        async def slow() -> Message:
            if not more.is_set():
                more.set()
                return {"type": "http.request", "body": b"{" + b" " * 899, "more_body": True}
            await asyncio.Event().wait()
            raise AssertionError

        first = asyncio.create_task(reader.read(start(), slow))
        await more.wait()
        piece = {"type": "http.request", "body": b"{" + b" " * 899, "more_body": True}
        with pytest.raises(UnavailableError):
            await reader.read(start(), receiving([piece, piece]))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        end = {"type": "http.request", "body": b"}", "more_body": False}
        assert (await reader.read(start(), receiving([piece, end]))).complete

    asyncio.run(run())


def test_the_first_source_decides_and_the_body_s_other_ids_are_known() -> None:
    identity = SourcesIdentity(["header:x-s", "body:a@/start", "body:b@/start", "query:q"])
    body = b'{"a":"A","b":"B"}'
    headers: list[tuple[str | bytes, str | bytes]] = [("content-length", "17")]
    named, _ = read(body, identity=identity, scope=start([*headers, ("x-s", "H")], query=b"q=Q"))
    assert (named.session_id, named.also) == ("H", ("A", "B"))
    named, _ = read(body, identity=identity, scope=start(headers, query=b"q=Q"))
    assert (named.session_id, named.also) == ("A", ("B",))
    named, _ = read(b"{}", identity=identity, scope=start(headers, query=b"q=Q"))
    assert (named.session_id, named.also) == ("Q", ())
