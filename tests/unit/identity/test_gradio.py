"""The preset `gradio`: what the requests of a Gradio app name, wherever it is mounted."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.support.identity_scopes import learned, part, parts, receiving, request, start

from homing.identity import PRESETS, Named, SourcesIdentity
from homing.types import Scope

GRADIO = SourcesIdentity(preset=PRESETS["gradio"])
HASH = "d2f0c4a8-ab"
EVENT = "0a1b2c"


def named(scope: Scope, document: object = None) -> Named:
    found = GRADIO.from_head(scope)
    if found is None:
        body = json.dumps(document).encode()
        found, _ = asyncio.run(GRADIO.from_body(scope, receiving(parts(body))))
    return found


@pytest.fixture(params=["", "/demo", "/a/b"], ids=["at the root", "mounted", "mounted deeper"])
def mount(request: pytest.FixtureRequest) -> str:
    path: str = request.param
    return path


@pytest.mark.parametrize(
    "path",
    ["queue/join", "cancel", "reset", "run/predict", "api/predict/", "component_server", "stream/0a1b2c"],
)
def test_the_body_s_session_hash_names_the_session(mount: str, path: str) -> None:
    document = {"data": [1], "fn_index": 0, "event_id": EVENT, "session_hash": HASH}
    assert named(request("POST", f"{mount}/gradio_api/{path}"), document) == Named(HASH)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["queue/data", "deep_link"])
def test_the_query_s_session_hash_names_the_session(mount: str, path: str) -> None:
    scope = request("GET", f"{mount}/gradio_api/{path}", query=f"session_hash={HASH}".encode())
    assert named(scope).session_id == HASH


@pytest.mark.parametrize("path", [f"heartbeat/{HASH}", f"stream/{HASH}/3/12/playlist.m3u8", f"stream/{HASH}/3/1/0.ts"])
def test_the_path_s_session_hash_names_the_session(mount: str, path: str) -> None:
    assert named(request("GET", f"{mount}/gradio_api/{path}")).session_id == HASH


@pytest.mark.parametrize("version", ["", "v2/"])
def test_a_call_s_event_is_learned_from_its_reply_and_ends_with_the_stream_of_its_results(
    mount: str, version: str
) -> None:
    call = request("POST", f"{mount}/gradio_api/call/{version}predict")
    reply = start(200, ("content-type", "application/json"))
    nothing = named(call, {"data": [1]})
    assert nothing.session_id is None
    assert learned(GRADIO.learner(call, nothing), reply, part(json.dumps({"event_id": EVENT}).encode())) == [EVENT]
    results = request("GET", f"{mount}/gradio_api/call/{version}predict/{EVENT}")
    assert named(results) == Named(EVENT, end=True)  # type: ignore[arg-type]


def test_an_event_that_joined_under_a_session_hash_is_no_session_of_its_own(mount: str) -> None:
    join = request("POST", f"{mount}/gradio_api/queue/join")
    learner = GRADIO.learner(join, named(join, {"data": [1], "session_hash": HASH}))
    reply = start(200, ("content-type", "application/json"))
    assert learned(learner, reply, part(json.dumps({"event_id": EVENT}).encode())) == []


def test_an_upload_and_its_progress_name_one_session_that_ends_with_the_upload(mount: str) -> None:
    progress = request("GET", f"{mount}/gradio_api/upload_progress", query=b"upload_id=u1")
    upload = request("POST", f"{mount}/gradio_api/upload", query=b"upload_id=u1")
    assert named(progress) == Named("u1")  # type: ignore[arg-type]
    assert named(upload) == Named("u1", end=True)  # type: ignore[arg-type]
    assert named(request("POST", f"{mount}/gradio_api/upload")).session_id is None


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("GET", "/", b""),
        ("GET", "/gradio_api/file=/tmp/gradio/x.png", b""),
        ("GET", "/page", b"session_hash=x&upload_id=y"),
        ("GET", "/heartbeat/x", b""),
        ("GET", "/gradio_api/heartbeat/x/y", b""),
        ("POST", "/gradio_api/call/predict/x", b""),
        ("GET", "/gradio_api/startup-events", b""),
    ],
)
def test_other_requests_name_no_session(method: str, path: str, query: bytes) -> None:
    assert named(request(method, path, query=query)).session_id is None


def test_the_bodies_of_other_routes_are_not_read() -> None:
    for path in ("/queue/join", "/gradio_api/upload", "/gradio_api/queue/join/x"):
        assert GRADIO.from_head(request("POST", path)) is not None


def test_gone_is_answered_as_gradio_does_and_only_to_its_own_requests() -> None:
    reply = PRESETS["gradio"].gone_reply
    assert reply is not None
    assert reply(request("GET", "/basket")) is None
    answered = reply(request("POST", "/demo/gradio_api/queue/join"))
    assert answered is not None
    assert answered[0] == PRESETS["gradio"].gone_status == 404
    assert json.loads(answered[2]) == {"detail": "Session not found.", "error": "Connection errored out. "}
