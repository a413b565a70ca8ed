"""Two starts of one ID at different workers at the same instant: one owner, and the others forward to it (SCENARIOS 6).

On whole servers. The owner records alone are raced in `test_owners_race.py`; a worker killed between the record and the
handler: `test_owners_deaths.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from tests.support.raw import Wire, request
from tests.support.staged import SESSION, open_staged

WORKERS = 3
LANES = 8
"""So many IDs are raced at once, each from one connection to every worker."""


async def start(wire: Wire, session: str) -> dict[str, object]:
    await wire.send(request("POST", "/start", [("x-session", session)], b""))
    reply = await wire.reply("POST")
    assert reply.status == 200, reply
    value: dict[str, object] = json.loads(reply.body)
    return value


async def race(lane: int, wires: list[Wire], times: int) -> Counter[str]:
    """This lane's share of the races."""
    found: Counter[str] = Counter()
    for number in range(lane, times, LANES):
        session = f"race-{number}"
        # Who is sent to first changes, so that every worker wins.
        order = [wires[(number + turn) % len(wires)] for turn in range(len(wires))]
        answers = await asyncio.gather(*(start(wire, session) for wire in order))
        found["splits"] += len({answer["incarnation"] for answer in answers}) != 1
        found["creators"] += sum(bool(answer["made"]) for answer in answers)
        found[f"won by {answers[0]['pid']}"] += 1
    return found


def raced(times: int, place: str) -> None:
    async def test() -> None:
        options = (*SESSION, "--start", "POST /start", "--no-access-log", "--place", place)
        app = "tests.support.counter_app:app"
        async with open_staged(*options, app=app, workers=WORKERS, clean=True) as server, AsyncExitStack() as stack:
            lanes = [list((await stack.enter_async_context(server.wires())).values()) for _ in range(LANES)]
            found = sum(
                await asyncio.gather(*(race(lane, wires, times) for lane, wires in enumerate(lanes))),
                Counter(),
            )
        winners = {who: count for who, count in found.items() if who.startswith("won by")}
        assert found["splits"] == 0, found
        assert found["creators"] == times, found
        assert len(winners) == WORKERS, f"a race that one worker always wins is none: {winners}"

    asyncio.run(test())


# Placed at random, each of the three requests of a race is sent to a worker of its own.
@pytest.mark.parametrize("place", ["accepting", "random"])
def test_five_hundred_starts_raced_at_three_workers_have_one_owner_each(place: str) -> None:
    raced(500, place)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["accepting", "random"])
def test_ten_thousand_starts_raced_at_three_workers_have_one_owner_each(place: str) -> None:
    raced(10_000, place)
