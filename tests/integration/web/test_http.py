"""The HTTP surface, one worker, real uvicorn and a real client: every row of the error table, and session control."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from tests.support.web_app import marks_of, server

from homing.web.processes import is_running
from homing.web.server import WebServer

TASK = {"benchmark": "fake", "task_id": "count"}
IDENTITY = {"_ng_session_id": "session-" + "a" * 16, "_ng_session_close_token": "t" * 40}
OTHER_TOKEN = {**IDENTITY, "_ng_session_close_token": "x" * 40}


@asynccontextmanager
async def serving(app: WebServer) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uv = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        task = asyncio.create_task(uv.serve(sockets=[listener]))
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            uv.should_exit = True
            await task


def play(script: Callable[[httpx.AsyncClient], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        app = server(**changes)
        async with (
            asyncio.timeout(60),
            serving(app) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            await script(client)
            marks = marks_of(await app.manager.health())
        assert not any(is_running(each) for each in marks)

    asyncio.run(main())


def told(reply: httpx.Response) -> tuple[int, str, bool]:
    body = reply.json()
    assert set(body) == {"detail", "error_kind", "retryable"}
    return reply.status_code, body["error_kind"], body["retryable"]


async def settled(client: httpx.AsyncClient) -> None:
    """Return once nothing of a failed session is left, so that its place is free again."""
    while (await client.get("/healthz")).json()["cleanup_pending"]:
        pass


def test_a_session_over_http_from_its_seed_to_its_close() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        seed = await client.post("/seed_session", json={"task": {**TASK, "seed": 0, "own_field": [1]}})
        assert seed.status_code == 200, seed.text
        body = seed.json()
        assert (body["task_id"], body["status"], body["observation"]["axtree"]) == ("count", "ready", "count 0")
        assert body["info"]["browser"]["transport"] == "local_process"
        assert list(client.cookies) == ["WebServer___server"]
        step = (await client.post("/step", json={"operation_id": "1", "action": {"action": "noop"}})).json()
        assert (step["operation_id"], step["reward"], step["terminated"]) == ("1", 1.0, False)
        assert (await client.post("/step", json={"operation_id": "1", "action": {"action": "noop"}})).json() == step
        assert (await client.post("/step", json={"action": "noop()"})).json()["reward"] == 2.0
        assert (await client.get("/observe")).json()["observation"]["axtree"] == "count 2"
        state = (await client.get("/session")).json()
        assert (state["benchmark"], state["status"], state["browser_provider"]) == ("fake", "ready", "fake")
        assert state["session_id"] == body["session_id"]
        assert (await client.post("/reset", json={"task": TASK})).json()["observation"]["axtree"] == "count 0"
        assert (await client.post("/evaluate", json={})).json()["result"]["reward"] == 0.0
        assert (await client.get("/session")).json()["status"] == "finished"
        close = (await client.post("/close")).json()
        assert (close["closed"], close["session_id"]) == (True, body["session_id"])
        assert close["recording_artifacts"][0]["mime_type"] == "text/html"
        assert (await client.post("/close", json={})).json()["closed"] is True
        assert told(await client.get("/observe")) == (404, "session_lost", True)

    play(script)


def test_verify_evaluates_and_always_closes() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await client.post("/seed_session", json={"task": TASK})
        await client.post("/step", json={"action": "noop()"})
        body = (await client.post("/verify", json={"own": {"a": 1}, "final_answer": "x"})).json()
        assert (body["reward"], body["mask_sample"], body["own"]) == (1.0, False, {"a": 1})
        assert told(await client.get("/session"))[1] == "session_lost"
        # Asked again, the same verdict; of a session that never was, a masked sample and no reward of 0.
        assert (await client.post("/verify", json={})).json()["reward"] == 1.0

    play(script)


@pytest.mark.parametrize("fault", [{"evaluate": ["raise"]}, {"step": ["raise"]}])
def test_a_failure_is_masked_and_never_a_measured_reward(fault: dict[str, list[str]]) -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await client.post("/seed_session", json={"task": {**TASK, "task_kwargs": {"faults": fault}}})
        await client.post("/step", json={"action": "noop()"})
        body = (await client.post("/verify", json={})).json()
        assert body["mask_sample"] is True
        assert body["failure_kind"] in ("evaluator_infrastructure", "session_lost")
        assert body["cleanup_failure_kind"] is None
        closed = (await client.post("/close")).json()
        assert closed["closed"] is True
        assert closed["failure_kind"] == ("backend_failure" if "step" in fault else None)

    play(script)


def test_a_failed_release_is_said_beside_the_verdict_and_by_close_as_503() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        faults = {"faults": {"close backend": ["raise"] * 4}}
        await client.post("/seed_session", json={"task": {**TASK, "task_kwargs": faults}})
        body = (await client.post("/verify", json={})).json()
        assert (body["mask_sample"], body["cleanup_failure_kind"]) == (False, "session_release_failed")
        assert told(await client.post("/close")) == (503, "session_release_failed", True)
        assert (await client.post("/close")).json()["closed"] is True

    play(script)


def test_the_error_table() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        # No session named: 400, and neither a cookie nor a session comes of it.
        for method, path, body in (
            ("POST", "/step", {"action": "noop()"}),
            ("GET", "/observe", None),
            ("GET", "/session", None),
            ("POST", "/evaluate", {}),
            ("POST", "/reset", {"task": TASK}),
            ("POST", "/close", None),
            ("POST", "/verify", {}),
        ):
            reply = await client.request(method, path, json=body)
            assert told(reply) == (400, "invalid_request", False), path
            assert "set-cookie" not in reply.headers
        # A cookie that this server did not sign: an earlier server's session, which is gone.
        old = {"cookie": "WebServer___server=abc.def.ghi"}
        assert told(await client.get("/observe", headers=old)) == (404, "session_lost", True)
        # Tasks.
        unknown = await client.post("/seed_session", json={"task": {**TASK, "benchmark": "none"}})
        assert told(unknown) == (400, "invalid_task", False)
        assert "set-cookie" not in unknown.headers
        faults = {"task_kwargs": {"faults": {"reset": ["value"]}}}
        assert told(await client.post("/seed_session", json={"task": {**TASK, **faults}})) == (
            422,
            "benchmark_precondition",
            False,
        )
        await settled(client)
        faults = {"task_kwargs": {"faults": {"reset": ["hang"]}}}
        hung = await client.post("/seed_session", json={"task": {**TASK, **faults}})
        assert told(hung) == (504, "operation_timeout", True)
        await settled(client)
        # In a session.
        faults = {"task_kwargs": {"faults": {"step": ["value"], "evaluate": ["value", "raise"]}}}
        assert (await client.post("/seed_session", json={"task": {**TASK, **faults}})).status_code == 200
        assert told(await client.post("/step", json={"action": "?"})) == (400, "invalid_action", False)
        assert told(await client.post("/evaluate", json={})) == (422, "evaluator_configuration", False)
        assert told(await client.post("/evaluate", json={})) == (502, "evaluator_infrastructure", True)
        assert told(await client.post("/seed_session", json={"task": {**TASK, "task_id": "x"}})) == (
            409,
            "session_conflict",
            True,
        )
        assert (await client.post("/evaluate", json={})).status_code == 200
        assert told(await client.post("/step", json={"action": "noop()"})) == (409, "session_conflict", True)
        # Capacity.
        async with httpx.AsyncClient(base_url=client.base_url) as second:
            full = await second.post("/seed_session", json={"task": TASK})
            assert told(full) == (503, "capacity_unavailable", True)
            assert full.headers["retry-after"] == "1"
            assert "set-cookie" not in full.headers
        # No such route, no such method.
        assert told(await client.get("/none")) == (404, "invalid_request", False)
        assert told(await client.put("/step")) == (405, "invalid_request", False)

    play(script, settings={"max_sessions": 1, "reset_seconds": 0.5})


def test_a_body_that_cannot_be_read_is_answered_without_what_was_in_it() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        secret = "very-secret-" + "s" * 30
        for body in (
            {"task": TASK, "_ng_session_id": "short", "_ng_session_close_token": secret},
            {"task": TASK, "_ng_session_close_token": secret},
            {"task": TASK, "_ng_session_id": "session-" + "a" * 16},
            {"task": {"benchmark": secret}, "_ng_session_id": 3},
            {"task": secret, "more": secret},
            {"task": {**TASK, "mutation_class": secret}},
            [secret],
        ):
            reply = await client.post("/seed_session", json=body)
            assert reply.status_code == 422, reply.text
            assert secret not in reply.text
            assert {"loc", "msg"} == set(reply.json()["detail"][0])
        broken = await client.post("/step", content=b'{"action": "' + secret.encode(), headers=JSON)
        assert broken.status_code in (400, 422)
        assert secret not in broken.text
        assert (await client.get("/healthz")).json()["ledger"]["browser"]["acquired"] == 0

    play(script)


JSON = {"content-type": "application/json"}


def test_bodies_over_the_limit_are_refused_and_the_session_is_as_it_was() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await client.post("/seed_session", json={"task": TASK})
        big = b'{"action": "' + b"x" * 5000 + b'"}'

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(big), 1000):
                yield big[start : start + 1000]

        assert told(await client.post("/step", content=big, headers=JSON)) == (413, "invalid_request", False)
        assert told(await client.post("/step", content=chunks(), headers=JSON)) == (413, "invalid_request", False)
        seed = await client.post("/seed_session", json={"task": {**TASK, "x": "y" * 5000}})
        assert told(seed) == (413, "invalid_request", False)
        assert (await client.post("/step", json={"action": "noop()"})).json()["reward"] == 1.0

    play(script, max_body_bytes=4096)


def test_a_bearer_token_is_asked_for_but_not_by_health() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        assert told(await client.post("/seed_session", json={"task": TASK})) == (401, "authentication_error", False)
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 200
        wrong = {"authorization": "Bearer wrong"}
        assert (await client.post("/seed_session", json={"task": TASK}, headers=wrong)).status_code == 401
        right = {"authorization": "Bearer right"}
        assert (await client.post("/seed_session", json={"task": TASK}, headers=right)).status_code == 200

    play(script, bearer_token="right")


# --- session control ---


def test_seeds_of_one_identity_share_one_session_and_another_payload_is_a_conflict() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        replies = await asyncio.gather(
            *(client.post("/seed_session", json={**IDENTITY, "task": TASK}) for _ in range(5))
        )
        assert {reply.status_code for reply in replies} == {200}
        assert {reply.json()["session_id"] for reply in replies} == {IDENTITY["_ng_session_id"]}
        other = {**IDENTITY, "task": {**TASK, "seed": 5}}
        assert told(await client.post("/seed_session", json=other))[1] == "session_conflict"
        wrong = await client.post("/seed_session", json={**OTHER_TOKEN, "task": TASK})
        assert told(wrong) == (403, "authentication_error", False)
        assert (await client.get("/healthz")).json()["ledger"]["browser"]["acquired"] == 1

    play(script)


def test_a_client_that_hangs_up_does_not_end_its_seed_and_the_next_one_shares_it() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        body = {**IDENTITY, "task": {**TASK, "task_kwargs": {"faults": {"reset": ["slow"]}}}}
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/seed_session", json=body, timeout=0.05)
        assert (await client.post("/seed_session", json=body)).status_code == 200
        assert (await client.get("/healthz")).json()["ledger"]["browser"]["acquired"] == 1

    play(script)


def test_a_client_that_will_know_its_session_by_its_cookie_only_and_leaves_has_none() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        body = {"task": {**TASK, "task_kwargs": {"faults": {"reset": ["hang"]}}}}
        seed = asyncio.create_task(client.post("/seed_session", json=body))
        while (await client.get("/healthz")).json()["ledger"]["browser"]["live"] == 0:
            pass
        seed.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await seed
        while (health := (await client.get("/healthz")).json())["ledger"]["browser"]["released"] == 0:
            pass
        # Its browser is not the last of it to go.
        while health["sessions"] or health["creating"] or health["cleanup_pending"]:
            health = (await client.get("/healthz")).json()

    # Much longer than the test may take: only the client's leaving can end it.
    play(script, settings={"reset_seconds": 500.0})


async def raw_call(
    client: httpx.AsyncClient, head: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose connection is the test's to keep, to half-close, or never to read from."""
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    cookies = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    lines = [head, f"host: {url.host}", f"cookie: {cookies}", "content-type: application/json"]
    writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
    await writer.drain()
    return reader, writer


def test_a_client_that_closes_its_side_before_the_reply_is_told_in_words() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        body = json.dumps({"task": {**TASK, "task_kwargs": {"faults": {"acquire": ["slow"]}}}}).encode()
        reader, writer = await raw_call(client, "POST /seed_session HTTP/1.1", body)
        writer.write_eof()
        head, _, said = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        if head:  # a server may also take that for gone, and then says nothing at all
            assert head.startswith(b"HTTP/1.1 400 ")
            assert json.loads(said)["error_kind"] == "invalid_request"
        await settled(client)
        assert (await client.get("/healthz")).json()["sessions"] == 0

    play(script)


def test_a_client_that_never_reads_its_reply_keeps_its_session_for_the_idle_time_and_no_longer() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        faults = {"faults": {"observe": ["slow"]}}
        assert (await client.post("/seed_session", json={"task": {**TASK, "task_kwargs": faults}})).status_code == 200
        _, writer = await raw_call(client, "GET /observe HTTP/1.1")
        while (health := (await client.get("/healthz")).json())["sessions"] or health["cleanup_pending"]:
            await asyncio.sleep(0.02)
        assert health["ledger"]["browser"]["live"] == 0
        assert told(await client.get("/observe")) == (404, "session_lost", True)
        writer.close()

    play(script, settings={"idle_seconds": 1.0, "sweep_seconds": 0.1})


def test_a_close_needs_no_cookie_and_fences_the_identity_before_and_after_its_seed() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        assert (await client.post("/close", json=IDENTITY)).json()["closed"] is True
        late = await client.post("/seed_session", json={**IDENTITY, "task": TASK})
        assert told(late) == (409, "session_conflict", True)
        second = {**IDENTITY, "_ng_session_id": "session-" + "b" * 16}
        assert (await client.post("/seed_session", json={**second, "task": TASK})).status_code == 200
        cookies = dict(client.cookies)
        client.cookies.clear()
        wrong = {**second, "_ng_session_close_token": "x" * 40}
        assert told(await client.post("/close", json=wrong)) == (403, "authentication_error", False)
        for _ in range(2):
            assert (await client.post("/close", json=second)).json()["closed"] is True
        assert told(await client.post("/seed_session", json={**second, "task": TASK}))[0] == 409
        async with httpx.AsyncClient(base_url=client.base_url, cookies=cookies) as old:
            assert told(await old.post("/seed_session", json={"task": TASK}))[:2] == (409, "session_conflict")
        ledger = (await client.get("/healthz")).json()["ledger"]["browser"]
        assert (ledger["acquired"], ledger["released"]) == (1, 1)

    play(script)


def test_a_close_during_the_seed_leaves_nothing_and_the_seed_is_told() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        body = {**IDENTITY, "task": {**TASK, "task_kwargs": {"faults": {"reset": ["hang"]}}}}
        seed = asyncio.create_task(client.post("/seed_session", json=body))
        while (await client.get("/healthz")).json()["ledger"]["backend"]["live"] == 0:
            pass
        assert (await client.post("/close", json=IDENTITY)).json()["closed"] is True
        assert told(await seed)[:2] == (409, "session_conflict")
        assert (await client.get("/healthz")).json()["ledger"]["browser"]["released"] == 1

    play(script)


def test_a_seed_that_failed_for_capacity_may_run_again_and_any_other_failure_is_said_again() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        body = {**IDENTITY, "task": {**TASK, "task_kwargs": {"faults": {"acquire": ["raise"]}}}}
        first = await client.post("/seed_session", json=body)
        assert told(first) == (503, "capacity_unavailable", True)
        # The fake adds the fault at every try; a session's place, and a good browser, come of another task only.
        second = await client.post("/seed_session", json=body)
        assert told(second) == (503, "capacity_unavailable", True)
        other = {**IDENTITY, "_ng_session_id": "session-" + "c" * 16}
        body = {**other, "task": {**TASK, "task_kwargs": {"faults": {"reset": ["value"]}}}}
        for _ in range(2):
            assert told(await client.post("/seed_session", json=body))[:2] == (422, "benchmark_precondition")
        ledger = (await client.get("/healthz")).json()["ledger"]
        assert (ledger["browser"]["acquired"], ledger["site"]["acquired"]) == (1, 3)

    play(script)


def test_cookie_and_body_that_name_different_sessions_are_a_conflict() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        await client.post("/seed_session", json={**IDENTITY, "task": TASK})
        other = {**IDENTITY, "_ng_session_id": "session-" + "d" * 16}
        assert told(await client.post("/seed_session", json={**other, "task": TASK}))[:2] == (409, "session_conflict")

    play(script)


def test_the_openapi_document_describes_every_route() -> None:
    async def script(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        assert set(document["paths"]) == {
            "/", "/healthz", "/seed_session", "/reset", "/step", "/observe", "/evaluate", "/close", "/verify", "/session",
        }  # fmt: skip
        assert "_ng_session_id" in document["components"]["schemas"]["SeedRequest"]["properties"]

    play(script)
