from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from itsdangerous import URLSafeSerializer
from tests.support.identity_scopes import SetClock, handshake, parts, receiving, request, signed, whole_body

from homing.errors import (
    BadOwnerHeaderError,
    BodyTooLargeError,
    ConfigurationError,
    DuplicateFieldError,
    EncodedBodyError,
    SessionConflictError,
    SessionIdTooLongError,
)
from homing.identity import AGENT, RESOURCES, KindIdentity, Named, SessionKind, mcp_token_session_id
from homing.routes import Routes
from homing.types import PATH, SESSION, key_digest

SECRET = "a secret of thirty-two bytes or more"
COOKIE = "Counter___srv"
TOKEN = "X-NeMo-Gym-Session-Token"
WORKER = "0123456789abcdef" * 2
CLOCK = SetClock()
TOKENS = URLSafeSerializer(SECRET, salt="nemo-gym-mcp-session-token")

Headers = Iterable[tuple[str | bytes, str | bytes]]

resources = KindIdentity(
    RESOURCES,
    COOKIE,
    SECRET,
    starts=["POST /reset"],
    ends=Routes.parse(["/verify"]),
    mcp_token_header=TOKEN,
    mcp_token_serializer=TOKENS,
    clock=CLOCK,
)
agent = KindIdentity(AGENT, COOKIE, SECRET, clock=CLOCK)


def cookie(session_id: object, key: str = "session_id") -> tuple[str | bytes, str | bytes]:
    return ("cookie", f"{COOKIE}={signed({key: session_id}, SECRET, CLOCK)}")


def agent_cookie(session_id: str) -> tuple[str | bytes, str | bytes]:
    return cookie(session_id, "agent_session_id")


def token(session_id: object, secret: str = SECRET) -> tuple[str | bytes, str | bytes]:
    serializer = URLSafeSerializer(secret, salt="nemo-gym-mcp-session-token")
    return (TOKEN.lower(), serializer.dumps({"sid": session_id, "tools": None}))


BAD_TOKEN = token("forged", "another secret, as long as this one is")
BAD_COOKIE: tuple[str | bytes, str | bytes] = ("cookie", f"{COOKIE}=forged")


def head(identity: KindIdentity, path: str, *headers: tuple[str | bytes, str | bytes], method: str = "POST") -> Named:
    named = identity.from_head(request(method, path, headers))
    assert named is not None
    return named


def body(
    identity: KindIdentity,
    path: str,
    document: object,
    *headers: tuple[str | bytes, str | bytes],
    leaves: bool = False,
) -> Named:
    """What head and body of a request say; checks that the body had to be read, and that the app gets it."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()

    async def run() -> Named:
        scope = request("POST", path, [("content-length", str(len(text))), *headers])
        assert identity.from_head(scope) is None
        named, receive = await identity.from_body(scope, receiving(parts(text, disconnect=leaves)))
        assert await whole_body(receive) == (text, {"type": "http.disconnect"} if leaves else None)
        return named

    return asyncio.run(run())


prefixes = pytest.mark.parametrize("prefix", ["", "/ng-rollout/r1", "/ng-rollout/r1/capture"])


# --- the table of the seeds, row by row ---


@pytest.mark.parametrize("path", ["/increment_counter", "/verify", "/", "/ng-rollout/r1/step"])
def test_any_request_to_a_resources_server_names_its_session_by_the_cookie(path: str) -> None:
    assert head(resources, path, cookie("s1")).session_id == "s1"
    assert resources.from_head(handshake(path, [cookie("s1")])) == head(resources, path, cookie("s1"), method="GET")


@prefixes
def test_a_tool_call_over_mcp_names_its_session_by_the_token_alone(prefix: str) -> None:
    for path in (prefix + "/mcp", prefix + "/mcp/"):
        assert head(resources, path, token("t1")).session_id == "t1"
        assert head(resources, path, token("t1"), cookie("c1")).session_id == "t1"
        assert head(resources, path, cookie("c1")) == Named()
        assert head(resources, path, BAD_TOKEN, cookie("c1")) == Named()
        assert head(resources, path) == Named()


def test_a_token_counts_elsewhere_only_where_no_cookie_does_and_a_rejected_cookie_is_none() -> None:
    assert head(resources, "/step", token("t1")).session_id == "t1"
    assert head(resources, "/step", token("t1"), cookie("c1")).session_id == "c1"
    assert head(resources, "/step", token("t1"), BAD_COOKIE).session_id == "t1"
    assert head(resources, "/step", token("t1"), cookie("")).session_id == "t1"
    assert head(resources, "/step", BAD_TOKEN, cookie("c1")).session_id == "c1"


@prefixes
@pytest.mark.parametrize("path", ["/seed_session", "/close_session"])
def test_the_body_of_a_seed_or_close_names_the_session(prefix: str, path: str) -> None:
    document = {"resources_session_id": "r1", "episode_id": {"rollout_id": "x"}}
    named = body(resources, prefix + path, document)
    assert named == Named("r1", start=path == "/seed_session", end=path == "/close_session")  # type: ignore[arg-type]
    assert body(resources, prefix + path, document, BAD_COOKIE).session_id == "r1"
    assert body(resources, prefix + path, document, cookie("r1")).session_id == "r1"


@prefixes
@pytest.mark.parametrize("path", ["/v1/agent_sessions", "/v1/agent_sessions/close"])
def test_the_body_of_an_agent_s_seed_or_close_names_the_session(prefix: str, path: str) -> None:
    assert body(agent, prefix + path, {"agent_session_id": "a1"}).session_id == "a1"
    assert head(agent, prefix + "/v1/responses", agent_cookie("a1")).session_id == "a1"


@prefixes
def test_a_stop_without_a_cookie_names_the_key_of_its_rollout_and_never_the_prefix(prefix: str) -> None:
    named = head(agent, prefix + "/rollouts/r.1-x/stop")
    assert named == Named(path_key="/rollouts/r.1-x")
    assert head(agent, prefix + "/rollouts/r1/stop", agent_cookie("a1")) == Named("a1")  # type: ignore[arg-type]
    assert head(agent, prefix + "/rollouts/r1/stop", BAD_COOKIE).path_key == "/rollouts/r1"
    assert head(resources, prefix + "/rollouts/r1/stop").path_key is None


@pytest.mark.parametrize("path", ["/rollouts/r1", "/rollouts/a/b/stop", "/rollouts//stop", "/x/rollouts/r1/stop"])
def test_other_paths_below_rollouts_name_no_key(path: str) -> None:
    assert head(agent, path) == Named()


# --- cookie, token and body ---


@pytest.mark.parametrize(
    ("identity", "path", "field", "in_head"),
    [
        (resources, "/seed_session", "resources_session_id", cookie("c1")),
        (resources, "/close_session", "resources_session_id", cookie("c1")),
        (resources, "/ng-rollout/r/seed_session", "resources_session_id", cookie("c1")),
        (resources, "/seed_session", "resources_session_id", token("t1")),
        (agent, "/v1/agent_sessions", "agent_session_id", agent_cookie("c1")),
        (agent, "/v1/agent_sessions/close", "agent_session_id", agent_cookie("c1")),
    ],
)
def test_a_cookie_or_token_and_a_body_that_differ_are_refused(
    identity: KindIdentity, path: str, field: str, in_head: tuple[str, str]
) -> None:
    with pytest.raises(SessionConflictError) as refused:
        body(identity, path, {field: "other"}, in_head)
    assert refused.value.status == 409


def test_a_seed_without_an_id_in_its_body_keeps_the_cookie_s() -> None:
    for document in ({}, {"resources_session_id": ""}, {"resources_session_id": 3}, b"no json", b""):
        assert body(resources, "/seed_session", document, cookie("c1")) == Named("c1", start=True)  # type: ignore[arg-type]


def test_a_seed_without_any_id_is_minted_one_by_a_resources_server_only() -> None:
    assert body(resources, "/seed_session", {}) == Named(start=True, mints=True)
    assert body(agent, "/v1/agent_sessions", {}) == Named(start=True)


def test_a_request_without_a_session_is_minted_one_but_not_where_a_token_was_refused() -> None:
    assert head(resources, "/step").mints
    assert head(resources, "/step", BAD_COOKIE).mints
    assert not head(resources, "/step", BAD_TOKEN).mints
    assert not head(resources, "/step", BAD_TOKEN, BAD_COOKIE).mints
    assert not head(resources, "/mcp", BAD_TOKEN).mints
    assert not head(resources, "/mcp").mints
    assert not head(resources, "/step", cookie("s1")).mints
    assert not head(agent, "/run").mints


def test_only_a_seed_s_or_close_s_body_is_read() -> None:
    for path in ("/verify", "/reset", "/step", "/close_session/x", "//seed_session", "/seed_session/", "/Seed_session"):
        assert resources.from_head(request("POST", path, [("content-length", "9")])) is not None
    assert resources.from_head(request("GET", "/seed_session")) == Named(start=True, mints=True)


def test_a_client_that_leaves_half_way_starts_ends_and_mints_nothing() -> None:
    for path in ("/seed_session", "/close_session"):
        assert body(resources, path, {"resources_session_id": "r1"}, leaves=True) == Named()
        assert body(resources, path, {}, cookie("c1"), leaves=True) == Named("c1")  # type: ignore[arg-type]
    assert body(agent, "/v1/agent_sessions", {"agent_session_id": "a1"}, leaves=True) == Named()


def test_the_limits_of_bodies_hold() -> None:
    with pytest.raises(DuplicateFieldError):
        body(resources, "/seed_session", b'{"resources_session_id":"a","resources_session_id":"a"}')
    with pytest.raises(EncodedBodyError):
        body(resources, "/seed_session", {}, ("content-encoding", "gzip"))
    with pytest.raises(BodyTooLargeError):
        body(resources, "/seed_session", {"x": "y" * 2**20})
    for too_long in (cookie("x" * 1025), token("x" * 1025)):
        with pytest.raises(SessionIdTooLongError):
            head(resources, "/step", too_long)
    with pytest.raises(SessionIdTooLongError):
        body(resources, "/seed_session", {"resources_session_id": "x" * 1025})


def test_declared_starts_and_ends_count_beside_seed_and_close_and_below_a_prefix() -> None:
    for prefix in ("", "/ng-rollout/r1", "/ng-rollout/r1/c"):
        assert head(resources, prefix + "/reset", cookie("s1")).start
        assert head(resources, prefix + "/verify", cookie("s1")).end
        assert not head(resources, prefix + "/reset", cookie("s1"), method="GET").start
        step = head(resources, prefix + "/step", cookie("s1"))
        assert not step.start
        assert not step.end


# --- path keys of seeds ---


def seed(rollout: object, **more: Any) -> dict[str, Any]:
    return {"agent_session_id": "a1", "episode_id": {"rollout_id": rollout, "attempt": 0}, **more}


def test_a_seed_s_path_key_is_the_one_its_stop_names() -> None:
    key = body(agent, "/v1/agent_sessions", seed("r.1-x")).start_path_key
    assert key == "/rollouts/r.1-x"
    assert key == head(agent, f"/ng-rollout/r.1-x{key}/stop").path_key


@pytest.mark.parametrize("rollout", ["", None, 7, "a/b", "/", ["r"]])
def test_a_rollout_that_is_no_segment_of_a_path_forms_no_key(rollout: object) -> None:
    assert body(agent, "/v1/agent_sessions", seed(rollout)) == Named("a1", start=True)  # type: ignore[arg-type]


def test_only_a_seed_that_names_its_session_forms_a_path_key() -> None:
    assert body(agent, "/v1/agent_sessions/close", seed("r1")).start_path_key is None
    assert body(agent, "/v1/agent_sessions", {"episode_id": {"rollout_id": "r1"}}).start_path_key is None
    assert body(agent, "/v1/agent_sessions", seed("r1", agent_session_id=None), agent_cookie("c1")).start_path_key == (
        "/rollouts/r1"
    )
    assert body(resources, "/seed_session", {**seed("r1"), "resources_session_id": "r"}).start_path_key is None


def test_a_rollout_that_occurs_twice_is_refused() -> None:
    with pytest.raises(DuplicateFieldError):
        body(agent, "/v1/agent_sessions", b'{"agent_session_id":"a","episode_id":{"rollout_id":"r","rollout_id":"q"}}')
    with pytest.raises(DuplicateFieldError):
        body(agent, "/v1/agent_sessions", b'{"agent_session_id":"a","episode_id":1,"episode_id":{"rollout_id":"q"}}')


def test_a_session_that_is_called_like_a_path_key_is_not_that_key() -> None:
    session = body(agent, "/v1/agent_sessions", {"agent_session_id": "/rollouts/x"}).session_id
    key = head(agent, "/rollouts/x/stop").path_key
    assert session == key == "/rollouts/x"
    assert key_digest(SESSION, session or "") != key_digest(PATH, key or "")


# --- the owner header ---

OWNER = ("x-ng-session-owner", WORKER)
BAD_OWNERS: list[str | bytes] = [
    "", WORKER[:-1], WORKER + "0", WORKER.upper(), WORKER + "\n", f"{WORKER},{WORKER}", f"{WORKER}/../../x",
    " " + WORKER, "g" * 32, b"\xff" * 32, "٣" * 32,
]  # fmt: skip


def test_a_request_without_a_session_may_name_its_worker() -> None:
    assert head(agent, "/v1/responses", OWNER) == Named(worker=WORKER)  # type: ignore[arg-type]
    assert head(resources, "/step", OWNER).worker == WORKER
    assert body(agent, "/v1/agent_sessions", {}, OWNER).worker == WORKER


@pytest.mark.parametrize("bad", BAD_OWNERS)
def test_a_malformed_owner_header_is_refused_where_it_counts_and_ignored_where_it_does_not(bad: str | bytes) -> None:
    owner = ("x-ng-session-owner", bad)
    with pytest.raises(BadOwnerHeaderError) as refused:
        head(agent, "/v1/responses", owner)
    assert refused.value.status == 400
    with pytest.raises(BadOwnerHeaderError):
        body(agent, "/v1/agent_sessions", {}, owner)
    assert head(agent, "/v1/responses", owner, agent_cookie("a1")) == Named("a1")  # type: ignore[arg-type]
    assert head(agent, "/rollouts/r1/stop", owner).path_key == "/rollouts/r1"
    assert body(agent, "/v1/agent_sessions", {"agent_session_id": "a1"}, owner).session_id == "a1"


def test_two_owner_headers_are_refused_even_if_they_agree() -> None:
    with pytest.raises(BadOwnerHeaderError):
        head(agent, "/run", OWNER, OWNER)


def test_a_worker_is_not_named_where_a_session_is() -> None:
    assert head(agent, "/run", OWNER, agent_cookie("a1")).worker is None
    assert head(agent, "/rollouts/r1/stop", OWNER).worker is None
    assert head(resources, "/mcp", OWNER, token("t1")).worker is None


def test_a_kind_that_does_not_declare_the_owner_header_lets_it_be() -> None:
    plain = KindIdentity(dataclasses.replace(AGENT, owner_header=False), COOKIE, SECRET)
    assert head(plain, "/run", OWNER) == Named()
    assert head(plain, "/run", ("x-ng-session-owner", "x")) == Named()


def test_a_trailer_names_neither_worker_nor_session() -> None:
    late: Headers = [("host", "h"), OWNER, agent_cookie("a1")]
    assert agent.from_head(request("POST", "/run", late, **{"homing.head_length": 1})) == Named()


# --- kinds ---


def test_without_a_token_header_the_mcp_path_is_an_ordinary_one() -> None:
    plain = KindIdentity(RESOURCES, COOKIE, SECRET, clock=CLOCK)
    assert head(plain, "/mcp", cookie("c1")).session_id == "c1"
    assert head(plain, "/mcp", token("t1")) == Named(mints=True)


def test_a_kind_s_body_paths_are_its_seed_and_close_below_any_rollout_prefix() -> None:
    for path in ("/seed_session", "/ng-rollout/a/close_session", "/ng-rollout/a/b/seed_session"):
        assert RESOURCES.body_paths.fullmatch(path)
    for path in ("/seed_sessions", "/x/seed_session", "/ng-rollout/seed_session", "/ng-rollout/a/b/c/seed_session"):
        assert not RESOURCES.body_paths.fullmatch(path)


def test_a_kind_takes_the_positions_of_the_seeds() -> None:
    kind = SessionKind("k", "f", "/s", "/c", False, re.compile("/things/[^/]+"))
    assert kind == SessionKind("k", "f", "/s", "/c", False, path_key=re.compile("/things/[^/]+"))
    assert pickle.loads(pickle.dumps(AGENT)) == AGENT
    assert head(KindIdentity(kind, COOKIE, SECRET), "/things/1").path_key == "/things/1"


def test_a_kind_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="secret"):
        KindIdentity(RESOURCES, COOKIE, "")
    with pytest.raises(ConfigurationError, match="serializer"):
        KindIdentity(RESOURCES, COOKIE, SECRET, mcp_token_header=TOKEN)


def test_no_reply_of_a_kind_makes_a_session_known() -> None:
    assert resources.learner(request(), Named()) is None


# --- tokens ---


@pytest.mark.parametrize("payload", [{}, {"sid": ""}, {"sid": 1}, {"sid": None}, [], ["sid"], "sid", None, 7])
def test_a_token_without_an_id_names_no_session(payload: object) -> None:
    assert mcp_token_session_id(TOKENS.dumps(payload), TOKENS) is None


@pytest.mark.parametrize("text", ["", ".", "a.b", "ü", "\udcff", "x" * 9_000])
def test_a_text_that_is_no_token_names_no_session(text: str) -> None:
    assert mcp_token_session_id(text, TOKENS) is None


def test_a_validly_signed_token_that_holds_no_json_names_no_session() -> None:
    for raw in (b"!", b"abc", b".abc"):
        signed_raw = TOKENS.make_signer(TOKENS.salt).sign(raw).decode()
        assert mcp_token_session_id(signed_raw, TOKENS) is None


def test_a_token_for_another_server_or_purpose_is_rejected() -> None:
    assert mcp_token_session_id(str(BAD_TOKEN[1]), TOKENS) is None
    assert mcp_token_session_id(URLSafeSerializer(SECRET, salt="x").dumps({"sid": "s"}), TOKENS) is None
    assert mcp_token_session_id(signed({"sid": "s"}, SECRET, CLOCK), TOKENS) is None
    assert head(resources, "/step", ("cookie", f"{COOKIE}={token('t')[1]!s}")).session_id is None


@given(st.text(min_size=1, max_size=20), st.integers(0, 10_000), st.integers(1, 255))
def test_a_token_with_a_flipped_byte_names_its_own_session_or_none(session_id: str, at: int, flip: int) -> None:
    text = TOKENS.dumps({"sid": session_id})
    good = text.decode() if isinstance(text, bytes) else text
    at %= len(good)
    bad = good[:at] + chr(ord(good[at]) ^ flip) + good[at + 1 :]
    assert mcp_token_session_id(bad, TOKENS) in (None, session_id)
    assert mcp_token_session_id(good, TOKENS) == session_id
