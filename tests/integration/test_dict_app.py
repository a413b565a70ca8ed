"""The plain dict app on several workers (tests/scenarios.md, 1): start a session, then call it."""

import asyncio

import pytest
from tests.support.plain_http import Reply, request
from tests.support.served import served

SESSIONS = 200
CALLS = 20
AT_ONCE = 32
OPTIONS = ("--session", "path:/sessions/{session}", "--learn", "body:session@/sessions", "--no-access-log")


async def count_right(url: str) -> tuple[int, set[int], set[int]]:
    """How many calls were counted as their session's own, in order; the statuses; the processes."""
    gate = asyncio.Semaphore(AT_ONCE)
    statuses: set[int] = set()
    processes: set[int] = set()

    async def session() -> int:
        async with gate:
            started = (await request(f"{url}/sessions", "POST")).json()
            right = 0
            for number in range(1, CALLS + 1):
                reply = await request(f"{url}/sessions/{started['session']}/calls", "POST")
                statuses.add(reply.status)
                right += reply.status == 200 and reply.json() == {"count": number, "pid": started["pid"]}
            processes.add(started["pid"])
            return right

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(session()) for _ in range(SESSIONS)]
    return sum(task.result() for task in running), statuses, processes


def test_each_call_of_200_sessions_runs_in_the_process_that_started_its_session() -> None:
    with served("examples.dict_app:app", *OPTIONS) as server:
        right, statuses, processes = asyncio.run(count_right(server.url))
        unknown = asyncio.run(request(f"{server.url}/sessions/nobody-made-this/calls", "POST"))
    assert statuses == {200}
    assert right == SESSIONS * CALLS
    assert len(processes) > 1, "one worker took every start, so this shows nothing"
    assert is_gone(unknown), "an ID that the app never gave out must not get an empty session"


def is_gone(reply: Reply) -> bool:
    return reply.status == 410 and reply.header("homing-error") == "session_gone"


@pytest.mark.long
def test_without_homing_most_calls_are_answered_and_wrong() -> None:
    with served("examples.dict_app:app", "--no-access-log", plain=True) as server:
        right, statuses, _ = asyncio.run(count_right(server.url))
    assert statuses == {200}
    assert right < SESSIONS * CALLS / 2
