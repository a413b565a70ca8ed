"""A secret is changed by a restart; and who does not know the whole of a session's ID learns nothing of it."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from contextlib import AsyncExitStack
from pathlib import Path

from tests.support.raw import Reply, Wire, request
from tests.support.running import ROOT, Running, running
from tests.support.workers import connections

from homing.routing.request import new_session_id
from homing.rundir import SESSION_OWNERS_DIR
from homing.types import SESSION, key_digest

WORKERS = 2
STAYS = ("--no-handoff", "--timeout-keep-alive", "600")
"""A connection asks one worker, however long the test takes."""
SIGNED = ("tests.support.signed_app:app", "--session", "signed-cookie:session:sid", "--secret-env", "SESSION_SECRET")


async def ask(wire: Wire, method: str, target: str, cookie: str = "") -> Reply:
    await wire.send(request(method, target, [("Cookie", cookie)] if cookie else [], b"" if method == "POST" else None))
    return await wire.reply(timeout_seconds=60)


def recorded(server: Running, session: str) -> bool:
    return (Path(server.run_directory) / SESSION_OWNERS_DIR / key_digest(SESSION, session)).is_symlink()


async def log_in(wire: Wire) -> tuple[str, dict[str, object]]:
    """The cookie of a new session, and what the app said of it."""
    reply = await ask(wire, "POST", "/login")
    assert reply.status == 200, reply
    return reply.one(b"set-cookie").split(b";")[0].decode(), json.loads(reply.body)


def test_after_a_restart_with_another_secret_no_older_cookie_names_a_session_for_router_or_app() -> None:
    """How a secret is changed: the restart ends the sessions in memory anyway."""
    old: list[tuple[str, dict[str, object]]] = []

    async def visit(server: Running) -> None:
        async with connections(("127.0.0.1", server.port), WORKERS) as wires:
            for cookie, said in old:
                for pid, wire in wires.items():
                    reply = await ask(wire, "GET", "/whose", cookie)
                    assert json.loads(reply.body) == {"sid": None, "pid": pid}
                assert not recorded(server, str(said["sid"]))
            new = [await log_in(wire) for wire in wires.values()]
            for cookie, said in new:
                for wire in wires.values():
                    assert json.loads((await ask(wire, "GET", "/whose", cookie)).body) == said
                assert recorded(server, str(said["sid"]))
            old.extend(new)

    for _ in range(2):
        environment = {"SESSION_SECRET": secrets.token_hex(16)}
        with running(*SIGNED, "--workers", str(WORKERS), *STAYS, cwd=ROOT, env=environment) as server:
            asyncio.run(visit(server))
            assert server.stop() == 0, server.log


def nearly(session: str) -> list[str]:
    """IDs that share as much as can be shared with a session's, and some that share nothing."""
    other = "A" if session[-1] != "A" else "B"
    near = [session[:-1], session[1:], session[:8], session + "x", session[:-1] + other, other + session[1:]]
    near += [session.swapcase(), session[::-1], key_digest(SESSION, session)]
    return near + [secrets.token_urlsafe(16) for _ in near]


def test_who_knows_a_session_s_id_but_for_a_character_is_answered_like_one_who_knows_nothing() -> None:
    async def play(server: Running) -> None:
        async with AsyncExitStack() as stack:
            wires = await stack.enter_async_context(connections(("127.0.0.1", server.port), WORKERS))
            owner, _ = wires.values()
            session = json.loads((await ask(owner, "POST", "/sessions")).body)["session"]
            answers = set()
            for wire in wires.values():
                for each in nearly(session):
                    reply = await ask(wire, "GET", f"/sessions/{each}")
                    answers.add((re.sub(rb"(?i)\r\ndate: [^\r]*", b"", reply.head), reply.body))
            [(head, body)] = answers
            assert head.split()[1] == b"410", head
            assert json.loads(body)["error"]["code"] == "session_gone"
            for count, wire in enumerate(wires.values(), start=1):  # and nothing of it reached the session
                assert json.loads((await ask(wire, "GET", f"/sessions/{session}")).body)["count"] == count

    arguments = ("tests.support.sticky_app:app", "--workers", str(WORKERS), *STAYS)
    with running(*arguments, cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}) as server:
        asyncio.run(play(server))


def test_the_ids_that_homing_makes_are_122_bits_that_no_order_and_no_other_id_tell() -> None:
    ids = [int(new_session_id(), 16) for _ in range(4096)]
    assert len(set(ids)) == len(ids)
    fixed = {*range(76, 80), 62, 63}  # version and variant. RFC 9562, 4.1 and 4.2
    for bit in set(range(128)) - fixed:
        values = [each >> bit & 1 for each in ids]
        follows = sum(now == then for now, then in zip(values[1:], values, strict=False))
        # 7.8 standard deviations: of 244 such checks one fails by chance once in 10^12 runs.
        assert all(abs(count - 2048) < 250 for count in (sum(values), follows)), (bit, sum(values), follows)
