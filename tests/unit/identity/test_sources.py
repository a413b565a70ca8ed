from __future__ import annotations

import pickle
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.identity_scopes import SetClock, handshake, request, signed

from homing.errors import BadRequestError, ConfigurationError, SessionIdTooLongError
from homing.identity import (
    PRESETS,
    SESSION_MAX_AGE_SECONDS,
    Named,
    Source,
    SourcesIdentity,
    body,
    cookie,
    header,
    mcp_handle,
    parse_source,
    path,
    query,
    signed_cookie,
)
from homing.identity.cookie import SignedCookieReader
from homing.identity.ids import header_text
from homing.routes import Routes
from homing.types import key_digest

SECRET = "a secret of thirty-two bytes or more"

SPECS: list[tuple[str, Source]] = [
    ("header:X-Session", header("x-session")),
    ("cookie:sid", cookie("sid")),
    ("signed-cookie:session:user:id", signed_cookie("session", "user:id", secret=SECRET)),
    ("query:session_hash", query("session_hash")),
    ("path:/sessions/{session}", path("/sessions/{session}")),
    ("path:/users/{user}/sessions/{session}/x", path("/users/{user}/sessions/{session}/x")),
    ("body:a.b@/route", body("a.b", "/route")),
    ("body:a@POST /route", body("a", "POST /route")),
    ("mcp-handle:basket", mcp_handle("basket")),
    ("mcp-handle:basket@/tools", mcp_handle("basket", "/tools")),
    ("mcp-handle:basket@POST /tools", mcp_handle("basket", route="POST /tools")),
]


@pytest.mark.parametrize(("spec", "source"), SPECS)
def test_a_spec_and_the_call_it_stands_for_are_the_same_value(spec: str, source: Source) -> None:
    parsed = parse_source(spec, secret=SECRET)
    assert parsed == source
    assert hash(parsed) == hash(source)
    assert pickle.loads(pickle.dumps(source)) == source
    assert parse_source(str(source), secret=SECRET) == source


def test_a_secret_is_in_no_text_of_its_source() -> None:
    source = signed_cookie("session", "user", secret=SECRET)
    assert SECRET not in repr(source)
    assert SECRET not in str(source)
    assert SECRET not in repr(SourcesIdentity([source]))


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("", "write header:NAME"),
        ("sid", "write header:NAME"),
        ("heder:x", "write header:NAME"),
        ("header", "write 'header:NAME'"),
        ("header:", "write 'header:NAME'"),
        ("header:a b", "write 'header:NAME'"),
        ("header:ü", "write 'header:NAME'"),
        ("cookie:", "write 'cookie:NAME'"),
        ("cookie:a=b", "write 'cookie:NAME'"),
        ("cookie:a;b", "write 'cookie:NAME'"),
        ("signed-cookie:", "write 'signed-cookie:NAME:KEY'"),
        ("signed-cookie:session", "write 'signed-cookie:NAME:KEY'"),
        ("signed-cookie:session:", "write 'signed-cookie:NAME:KEY'"),
        ("signed-cookie:session:user", "--secret-env VAR"),
        ("query:", "write 'query:NAME'"),
        ("path:", "write 'path:/sessions/{session}'"),
        ("path:/sessions/{id}", "write 'path:/sessions/{session}'"),
        ("path:sessions/{session}", "write '/sessions/{session}'"),
        ("path:/{session}/{session}", "name each segment once"),
        ("path:/{session}/{x:int}", "write '/x/{name}'"),
        ("body:", "write 'body:FIELD@/route'"),
        ("body:a", "write 'body:FIELD@/route'"),
        ("body:a@", "write 'body:FIELD@/route'"),
        ("body:@/x", "write 'body:FIELD@/route'"),
        ("body:a..b@/x", "write 'body:FIELD@/route'"),
        ("body:a@x", "write '/x'"),
        ("mcp-handle:", "write 'mcp-handle:NAME'"),
        ("mcp-handle:@/mcp", "write 'mcp-handle:NAME'"),
        ("mcp-handle:a@", "write 'METHOD /route'"),
        ("mcp-handle:a@mcp", "write '/mcp'"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_by_one_line_that_says_what_to_write(spec: str, advice: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_source(spec)
    assert advice in str(refused.value)
    assert "\n" not in str(refused.value)
    assert repr(spec) in str(refused.value) or f"'{spec}" in str(refused.value) or not spec


def named(source: Source | str, scope: dict[str, object] | object) -> str | None:
    found = SourcesIdentity([source]).from_head(scope)  # type: ignore[arg-type]
    assert found is not None
    return found.session_id


def test_a_header_names_the_session_and_the_first_of_two_counts() -> None:
    assert named("header:X-S", request(headers=[("x-s", "a"), ("x-s", "b")])) == "a"
    assert named("header:X-S", handshake(headers=[("x-s", "a")])) == "a"
    assert named("header:X-S", request(headers=[("x-session", "a")])) is None
    assert named("header:X-S", request(headers=[("x-s", "")])) is None


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_header_or_cookie_names_the_session_of_its_text_in_either_encoding(encoding: str) -> None:
    value = "zoë".encode(encoding)
    assert named("header:x-s", request(headers=[(b"x-s", value)])) == "zoë"
    assert named("cookie:s", request(headers=[(b"cookie", b"a=b; s=" + value)])) == "zoë"
    replied = SourcesIdentity(["header:x-s", "cookie:s"])
    for pair in ((b"x-s", value), (b"set-cookie", b"s=" + value + b"; Path=/")):
        learner = replied.learner(request(), Named())
        assert learner is not None
        assert learner.feed({"type": "http.response.start", "status": 200, "headers": [pair]}).session_ids == ("zoë",)


@given(st.binary(min_size=1))
@example(b"\xc3\xa9")
@example(b"\xe9")
@example(b"\xc3")
@example("\ufffd".encode())
def test_headers_that_are_not_two_encodings_of_one_text_name_distinct_sessions(value: bytes) -> None:
    text = header_text(value)
    assert value in (text.encode(), text.encode("latin-1", "replace"))


def test_only_the_exact_cookie_name_counts_and_the_later_of_two() -> None:
    assert named("cookie:sid", request(headers=[("cookie", "thisisnotasid=x; sid2=y; Sid=z")])) is None
    assert named("cookie:sid", request(headers=[("cookie", 'a=1; sid="q\\073"; b=2')])) == "q;"
    assert named("cookie:sid", request(headers=[("cookie", "sid=x; sid=y"), ("cookie", "b=1")])) == "y"
    assert named("cookie:sid", request(headers=[("cookie", "sid=")])) is None


def test_a_signed_cookie_names_the_session_by_a_string_under_its_key() -> None:
    clock = SetClock()
    identity = SourcesIdentity([signed_cookie("session", "user", secret=SECRET)], clock=clock)
    for session, expected in [({"user": "u"}, "u"), ({"user": 1}, None), ({"user": ""}, None), ({}, None)]:
        scope = request(headers=[("cookie", f"session={signed(session, SECRET, clock)}")])
        found = identity.from_head(scope)
        assert found is not None
        assert found.session_id == expected


def test_a_cookie_signed_with_another_secret_is_warned_of_once_and_one_that_is_too_old_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SetClock()
    reader = SignedCookieReader("session", "user", SECRET, clock=clock)
    old = signed({"user": "one"}, SECRET, clock)
    clock.now += SESSION_MAX_AGE_SECONDS + 1
    other = signed({"user": "two"}, "another secret", clock)
    for texts in ([old], [], [other], [other, other], ["nonsense"]):
        assert reader.read([(b"cookie", f"session={text}".encode()) for text in texts]) is None
    (line,) = caplog.messages
    assert line.startswith("the cookie 'session' is present, but its signature does not match: is --secret-env")
    assert other not in line


def test_a_signed_cookie_keeps_to_its_own_greatest_age() -> None:
    clock = SetClock()
    cookie_text = signed({"user": "u"}, SECRET, clock)
    scope = request(headers=[("cookie", f"session={cookie_text}")])
    short = SourcesIdentity([signed_cookie("session", "user", secret=SECRET, max_age_seconds=10)], clock=clock)
    ever = SourcesIdentity([signed_cookie("session", "user", secret=SECRET, max_age_seconds=None)], clock=clock)
    for seconds, expected in [(10, "u"), (11, None)]:
        clock.now = SetClock().now + seconds
        assert (short.from_head(scope) or ...).session_id == expected  # type: ignore[union-attr]
        assert (ever.from_head(scope) or ...).session_id == "u"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"s=a", "a"),
        (b"x=1&s=a%20b%2Fc", "a b/c"),
        (b"s=a+b", "a b"),
        (b"%73=a", "a"),
        (b"s=%C3%BC", "ü"),
        (b"s=", None),
        (b"s", None),
        (b"S=a", None),
        (b"ss=a", None),
        (b"x=s", None),
        (b"s=a&s=a", "a"),
        (b"", None),
    ],
)
def test_a_query_parameter_names_the_session_as_the_app_decodes_it(text: bytes, expected: str | None) -> None:
    assert named("query:s", request(query=text)) == expected
    assert named("query:s", handshake(query=text)) == expected


@pytest.mark.parametrize("text", [b"s=a&s=b", b"s=&s=b", b"s=a&%73=b"])
def test_a_query_parameter_with_two_values_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequestError) as refused:
        named("query:s", request(query=text))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("path_text", "expected"),
    [
        ("/sessions/abc", "abc"),
        ("/sessions/abc/", "abc"),
        ("/sessions/abc/step/2", "abc"),
        ("/sessions/a b", "a b"),
        ("/sessions/..", ".."),
        ("/sessions/", None),
        ("/sessions", None),
        ("/sessions//x", None),
        ("/sessionsx/abc", None),
        ("/x/sessions/abc", None),
    ],
)
def test_a_segment_of_the_path_names_the_session_also_beneath_the_template(
    path_text: str, expected: str | None
) -> None:
    assert named("path:/sessions/{session}", request(path=path_text)) == expected
    assert named("path:/sessions/{session}", handshake(path_text)) == expected
    assert named("path:/sessions/{session}", request(path="/api" + path_text, root_path="/api")) == expected


def test_the_first_source_that_names_a_session_decides_and_the_presets_are_asked_last() -> None:
    identity = SourcesIdentity(["header:x-a", "query:q", "cookie:c"], preset=PRESETS["mcp"])
    both = request(headers=[("x-a", "a"), ("cookie", "c=c"), ("mcp-session-id", "m")], query=b"q=q")
    assert (identity.from_head(both) or ...).session_id == "a"  # type: ignore[union-attr]
    some = request(headers=[("x-a", ""), ("cookie", "c=c"), ("mcp-session-id", "m")])
    assert (identity.from_head(some) or ...).session_id == "c"  # type: ignore[union-attr]
    last = request(headers=[("mcp-session-id", "m")])
    assert (identity.from_head(last) or ...).session_id == "m"  # type: ignore[union-attr]
    none = identity.from_head(request())
    assert none is not None
    assert none.session_id is None


def test_starts_and_ends_are_where_they_were_declared() -> None:
    identity = SourcesIdentity(["header:x-a"], starts=Routes.parse(["POST /s"]), ends=Routes.parse(["DELETE /s/{x}"]))
    start = identity.from_head(request("POST", "/s"))
    end = identity.from_head(request("DELETE", "/s/1", [("x-a", "1")]))
    neither = identity.from_head(request("GET", "/s"))
    assert start is not None
    assert (start.start, start.end, start.session_id) == (True, False, None)
    assert end is not None
    assert (end.start, end.end, end.session_id) == (False, True, "1")
    assert neither is not None
    assert not neither.start


def test_a_trailer_never_names_a_session() -> None:
    scope = request(headers=[("host", "h"), ("x-a", "late")], **{"homing.head_length": 1})
    assert named("header:x-a", scope) is None
    scope["homing.head_length"] = 2
    assert named("header:x-a", scope) == "late"
    for name in ("cookie:x", "signed-cookie:x:y"):
        late = request(headers=[("host", "h"), ("cookie", "x=late")], **{"homing.head_length": 1})
        assert named(parse_source(name, secret=SECRET), late) is None


@pytest.mark.parametrize("spec", ["header:s", "cookie:s", "query:s", "path:/{session}"])
def test_an_id_is_one_to_1024_bytes_and_a_longer_one_is_refused(spec: str) -> None:
    def scope(text: str) -> object:
        raw = request(headers=[("s", text), ("cookie", f"s={text}")], path="/" + text)
        return {**raw, "query_string": b"s=" + quote(text).encode()}

    for text in ("x", "x" * 255, "x" * 256, "x" * 1024, "ü" * 512, "%00", "🏠" * 255 + "abcd"):
        assert named(spec, scope(text)) == text
    for text in ("x" * 1025, "ü" * 513, "x" * 64_000):
        with pytest.raises(SessionIdTooLongError) as refused:
            named(spec, scope(text))
        assert refused.value.status == 400


awkward = st.one_of(
    st.sampled_from(["../../x", "a/b", "%00", " ", "🏠", "A", "a", "\x00", ".", "..", "session", "a\nb"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
)


@given(awkward, awkward)
def test_distinct_ids_have_distinct_records_and_none_leaves_its_directory(one: str, other: str) -> None:
    names = [named("header:s", request(headers=[("s", text)])) for text in (one, other)]
    assert names == [one, other]
    records = [key_digest("session", name or "") for name in names]
    assert (records[0] == records[1]) is (one == other)
    assert all(record.isalnum() and len(record) == 64 for record in records)


@pytest.mark.parametrize("spec", ["query:q", "path:/x/{session}"])
def test_a_learn_source_that_no_reply_can_hold_is_refused(spec: str) -> None:
    with pytest.raises(ConfigurationError, match="no reply") as refused:
        SourcesIdentity(["cookie:a"], learn=[spec])
    assert spec in str(refused.value)
    assert SourcesIdentity([spec], learn=[spec, "header:x"])
