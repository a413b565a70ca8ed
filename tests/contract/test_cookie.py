"""The router reads a session cookie exactly as the installed SessionMiddleware does, whatever the cookie is.

Each test runs the installed middleware as an ASGI app on the same headers and clock, and compares the session it gives
the app with what homing read. Where the middleware itself fails, homing must find no session.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import itsdangerous
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import cookie_parser
from tests.support.identity_scopes import SetClock, request, signed

from homing.identity import RESOURCES, SESSION_MAX_AGE_SECONDS, KindIdentity, cookie_session
from homing.identity.cookie import ClockedSigner, SignedCookieReader, parse_cookies
from homing.identity.specs import signed_cookie

SECRET = "a secret of thirty-two bytes or more"
NAME = "session"
NOW = 1_700_000_000


def middleware_session(headers: list[tuple[bytes, bytes]], clock: SetClock) -> dict[str, Any] | None:
    """The session that the installed middleware gives the app; None if it fails."""
    found: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(dict(scope["session"]))

    middleware = SessionMiddleware(app, SECRET, NAME)
    middleware.signer = ClockedSigner(SECRET, clock)

    async def never(*_: Any) -> Any:
        raise AssertionError("nothing is received or sent")

    running = middleware({"type": "http", "headers": headers}, never, never)
    try:
        running.send(None)  # It waits for nothing, so it needs no event loop.
    except StopIteration:
        return found[0]
    except Exception:
        return None
    raise AssertionError("the middleware waits for something")


def agree(headers: list[tuple[bytes, bytes]], clock: SetClock | None = None) -> str | None:
    """The session ID, on which both agree; read twice, since the second may be remembered."""
    clock = clock or SetClock(NOW)
    session = middleware_session(headers, clock)
    expected = (session or {}).get("session_id")
    expected = expected if isinstance(expected, str) and expected else None
    reader = SignedCookieReader(NAME, "session_id", SECRET, clock=clock)
    assert reader.read(headers) == expected
    assert reader.read(headers) == expected
    return expected


def cookie_header(*texts: str | bytes) -> list[tuple[bytes, bytes]]:
    return [(b"cookie", text.encode("latin-1") if isinstance(text, str) else text) for text in texts]


def good(session_id: object = "s1", at: float = NOW) -> str:
    return signed({"session_id": session_id}, SECRET, SetClock(at))


@pytest.mark.parametrize(
    ("age", "accepted"),
    [
        (0, True),
        (SESSION_MAX_AGE_SECONDS - 1, True),
        (SESSION_MAX_AGE_SECONDS, True),
        (SESSION_MAX_AGE_SECONDS + 1, False),
        (-1, False),
        (-86_400, False),
    ],
)
def test_a_cookie_is_good_from_its_signing_to_exactly_its_greatest_age(age: int, accepted: bool) -> None:
    found = agree(cookie_header(f"{NAME}={good(at=NOW - age)}"))
    assert (found == "s1") is accepted


def test_a_remembered_cookie_expires_and_comes_back_when_the_clock_is_set_back() -> None:
    clock = SetClock(NOW)
    reader = SignedCookieReader(NAME, "session_id", SECRET, clock=clock)
    headers = cookie_header(f"{NAME}={good()}")
    assert reader.read(headers) == "s1"
    for moved in (SESSION_MAX_AGE_SECONDS + 0.999, SESSION_MAX_AGE_SECONDS + 1, 5, -1, 0):
        clock.now = NOW + moved
        expected = (middleware_session(headers, clock) or {}).get("session_id")
        assert reader.read(headers) == expected


def test_every_flipped_byte_is_judged_as_the_middleware_judges_it() -> None:
    cookie = good().encode()
    for at in range(len(cookie)):
        for flip in (0x01, 0x20, 0x80):
            tampered = cookie[:at] + bytes([cookie[at] ^ flip]) + cookie[at + 1 :]
            agree(cookie_header(NAME.encode() + b"=" + tampered))


def test_cookies_that_differ_in_unused_bits_of_their_last_character_name_one_session() -> None:
    body, last = good()[:-1], good()[-1]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    found = [agree(cookie_header(f"{NAME}={body}{other}")) for other in alphabet]
    assert set(found) == {"s1", None}
    assert found.count("s1") == 4
    assert found[alphabet.index(last)] == "s1"


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"null", b"[]", b"[1,2]", b'"text"', b"0", b"true", b'[["session_id","pairs"]]', b'["ab"]', b"{", b"\xff",
        b'{"session_id":1}', b'{"session_id":""}', b'{"session_id":null}', b'{"session_id":["x"]}', b"{}",
        b'{"session_id":"a","session_id":"b"}', b'{"session_id":NaN}', b'\xef\xbb\xbf{"session_id":"bom"}',
        '{"session_id":"ü"}'.encode(), '{"session_id":"utf16"}'.encode("utf-16"), b'{"session_id":"\\ud800"}',
        b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b'{"session_id":"x","n":' + b"9" * 5_000 + b"}",
    ],
)  # fmt: skip
def test_a_validly_signed_payload_of_any_kind_is_read_as_the_middleware_reads_it(payload: bytes) -> None:
    signer = ClockedSigner(SECRET, SetClock(NOW))
    agree(cookie_header(NAME.encode() + b"=" + signer.sign(base64.b64encode(payload))))


@pytest.mark.parametrize("payload", [b"a", b"abc=d", b"!!!!", b"eyJhIjox", b"=", b"e30", b"e30=", b"e3 0=", b"e30=.x"])
def test_a_validly_signed_payload_that_is_no_base64_is_read_as_the_middleware_reads_it(payload: bytes) -> None:
    signer = ClockedSigner(SECRET, SetClock(NOW))
    agree(cookie_header(NAME.encode() + b"=" + signer.sign(payload)))


@pytest.mark.parametrize("timestamp", [b"", b"A", b"____________", b"!!", b"AAAA" * 40, b"-"])
def test_a_validly_signed_timestamp_of_any_kind_is_judged_as_the_middleware_judges_it(timestamp: bytes) -> None:
    payload = base64.b64encode(b'{"session_id":"s1"}') + b"." + timestamp
    cookie = itsdangerous.Signer(SECRET, salt=itsdangerous.TimestampSigner(SECRET).salt).sign(payload)
    agree(cookie_header(NAME.encode() + b"=" + cookie))


def test_the_place_of_the_cookie_does_not_matter_and_its_exact_name_does() -> None:
    cookie = good()
    assert agree(cookie_header(f"a=1; {NAME}={cookie}; b=2")) == "s1"
    assert agree(cookie_header(f'{NAME}="{cookie}"')) == "s1"
    assert agree(cookie_header("a=1", f"{NAME}={cookie}")) == "s1"
    assert agree(cookie_header(f"{NAME}={cookie}; {NAME}=bad")) is None
    assert agree(cookie_header(f"{NAME}=bad; {NAME}={cookie}")) == "s1"
    assert agree(cookie_header(f"{NAME}={cookie}", f"{NAME}={good('s2')}")) == "s2"
    assert agree(cookie_header(f"{NAME}={good('s2')}", "other=1")) == "s2"
    assert agree(cookie_header(f"not{NAME}={cookie}")) is None
    assert agree(cookie_header(f"{NAME.upper()}={cookie}")) is None
    assert agree(cookie_header(f"{NAME} = {cookie} ")) == "s1"
    assert agree(cookie_header(f"{NAME}")) is None
    assert agree(cookie_header(f"{NAME}={cookie}".encode() + "; ü=ÿ".encode())) == "s1"
    assert agree([]) is None


def test_a_cookie_of_another_secret_or_another_purpose_is_rejected() -> None:
    other = signed({"session_id": "s1"}, "another secret, as long as this one is", SetClock(NOW))
    token = itsdangerous.URLSafeSerializer(SECRET, salt="a token").dumps({"session_id": "s1"})
    assert agree(cookie_header(f"{NAME}={other}")) is None
    assert agree(cookie_header(f"{NAME}={token}")) is None


def test_a_cookie_of_eight_kilobytes_is_read() -> None:
    cookie = signed({"session_id": "s1", "much": "x" * 6_000}, SECRET, SetClock(NOW))
    assert len(cookie) > 8_000
    assert agree(cookie_header(f"{NAME}={cookie}")) == "s1"


cookie_texts = st.text(st.characters(min_codepoint=0, max_codepoint=255), max_size=60)
fragments = st.sampled_from(["session", "=", ";", '"', "\\", "\\054", " ", "\x85", "\xa0", "\x1c", "é", "a", '\\"'])
cookie_lines = st.one_of(cookie_texts, st.lists(fragments, max_size=25).map("".join))


@settings(deadline=None)
@given(cookie_lines)
@example('session="a\\"b\\054\\377"')
@example("session")
@example("=; ;=x;x")
def test_the_cookie_header_is_parsed_as_starlette_parses_it(line: str) -> None:
    assert parse_cookies(line) == cookie_parser(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.dictionaries(st.sampled_from(["session_id", "x"]), json_values, max_size=2), json_values),
    st.integers(-5, SESSION_MAX_AGE_SECONDS + 5),
    st.binary(max_size=4),
    st.booleans(),
    st.one_of(st.just(b""), cookie_lines.map(lambda line: line.encode("latin-1"))),
)
def test_any_cookie_gets_the_verdict_of_the_middleware(
    session: object, age: int, junk: bytes, quoted: bool, before: bytes
) -> None:
    cookie = signed(session, SECRET, SetClock(NOW - age)).encode()
    at = len(junk) * 7 % (len(cookie) + 1)
    cookie = cookie[:at] + junk + cookie[at:]
    cookie = b'"' + cookie + b'"' if quoted else cookie
    agree(cookie_header(before + b"; " + NAME.encode() + b"=" + cookie))


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_cookie_session_gives_back_what_the_middleware_stored(session: dict[str, str]) -> None:
    signer = itsdangerous.TimestampSigner(SECRET)
    cookie = signer.sign(base64.b64encode(json.dumps(session).encode())).decode()
    assert cookie_session(cookie, signer) == session
    assert cookie_session(cookie + "x", signer) is None


def test_a_kind_and_a_signed_cookie_source_read_the_same_cookie() -> None:
    clock = SetClock(NOW)
    headers = cookie_header(f"{NAME}={good()}")
    kind = KindIdentity(RESOURCES, NAME, SECRET, clock=clock)
    named = kind.from_head(request(headers=headers))
    assert named is not None
    assert named.session_id == "s1"
    read = signed_cookie(NAME, "session_id", secret=SECRET).head_reader(clock)
    assert read is not None
    assert read(request(headers=headers), headers) == "s1"


def test_remembered_cookies_are_bounded() -> None:
    reader = SignedCookieReader(NAME, "session_id", SECRET, clock=SetClock(NOW))
    cookie = good()
    for number in range(9_000):
        assert reader.read(cookie_header(f"{NAME}={cookie}; n={number}")) == "s1"
    assert 2_048 <= len(reader) <= 4_096


def test_remembered_cookies_are_bounded_in_bytes() -> None:
    reader = SignedCookieReader(NAME, "session_id", SECRET, clock=SetClock(NOW))
    cookie = good()
    for number in range(2_000):
        assert reader.read(cookie_header(f"{NAME}={cookie}; n={number:03800}")) == "s1"
    assert 256 <= len(reader) <= 2**21 // 3_800


def test_a_cookie_that_is_seen_again_and_again_is_not_forgotten_for_new_ones() -> None:
    clock = SetClock(NOW)
    reader = SignedCookieReader(NAME, "session_id", SECRET, clock=clock)
    usual = cookie_header(f"{NAME}={good()}")
    most = 0
    for number in range(9_000):
        assert reader.read(cookie_header(f"{NAME}={good()}; n={number}")) == "s1"
        before = len(reader)
        assert reader.read(usual) == "s1"
        most += len(reader) > before
    assert most == 1, "it was decoded anew"
