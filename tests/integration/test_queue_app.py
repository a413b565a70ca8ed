"""IDs in JSON bodies, queries and paths, as Gradio's queue uses them (tests/scenarios.md, 3)."""

import asyncio
import json
import secrets
from collections.abc import Iterator

import pytest
from tests.support.plain_http import Reply, request
from tests.support.served import Served, served

CLIENTS = 30
OPTIONS = (
    *("--session", "body:session_hash@/queue/join", "--session", "query:session_hash"),
    *("--session", "path:/call/predict/{session}", "--learn", "body:event_id@/call/predict"),
    *("--start", "POST /queue/join", "--max-body", "100000", "--scatter"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """In the test mode in which every request first lands on a wrong worker."""
    with served("tests.support.queue_app:app", *OPTIONS) as server:
        yield server


def events(stream: Reply) -> list[dict[str, object]]:
    assert stream.status == 200, stream
    return [json.loads(line.removeprefix("data: ")) for line in stream.body.decode().split("\n\n") if line]


def test_the_query_of_the_stream_reaches_the_worker_that_the_join_body_named(server: Served) -> None:
    async def client() -> None:
        session = secrets.token_hex(6)
        body = json.dumps({"data": [1], "session_hash": session}).encode()
        joined = [(await request(f"{server.url}/queue/join", "POST", body=body)).json()["pid"] for _ in range(3)]
        stream = events(await request(f"{server.url}/queue/data?session_hash={session}"))
        assert joined == [joined[0]] * 3
        assert stream == [{"msg": f"done by {joined[0]}", "pid": joined[0]}] * 3

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    asyncio.run(clients())


def test_an_event_id_learned_from_a_reply_is_found_in_the_path(server: Served) -> None:
    async def client() -> None:
        reply = await request(f"{server.url}/call/predict", "POST", body=b'{"data": [1]}')
        [event] = events(await request(f"{server.url}/call/predict/{reply.json()['event_id']}"))
        assert event["msg"] == f"done by {event['pid']}"

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    asyncio.run(clients())


@pytest.mark.parametrize(
    "body", [b"not json", b"\xff\xfe\x00", b"", b"{", b"x" * 90_000], ids=["text", "bytes", "empty", "cut", "large"]
)
def test_a_body_that_is_not_json_reaches_the_app_untouched(server: Served, body: bytes) -> None:
    reply = asyncio.run(request(f"{server.url}/queue/join", "POST", body=body))
    assert (reply.status, reply.body) == (422, body)


def test_a_json_body_too_large_to_look_into_is_refused(server: Served) -> None:
    """A session named in it would be missed."""
    body = json.dumps({"session_hash": "x", "data": "y" * 100_000}).encode()
    reply = asyncio.run(
        request(f"{server.url}/queue/join", "POST", body=body, headers={"content-type": "application/json"})
    )
    assert reply.status == 413


def test_a_session_named_twice_in_one_body_is_refused(server: Served) -> None:
    reply = asyncio.run(request(f"{server.url}/queue/join", "POST", body=b'{"session_hash": "a", "session_hash": "b"}'))
    assert (reply.status, reply.header("homing-error") is not None) == (400, True)
