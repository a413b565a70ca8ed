"""Work that was told to end: it is waited for, but not for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from homing.rl.disconnect import end_tasks, unless_client_leaves


class Stubborn:
    """Work that ends when it is let, whoever cancels it."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.may_end = asyncio.Event()

    async def work(self) -> str:
        self.began.set()
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
        return "ended"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def a_request(left: asyncio.Event) -> Request:
    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


def test_what_ignores_its_cancellation_is_told_and_left(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        stubborn = Stubborn()
        task = asyncio.create_task(stubborn.work(), name="the stubborn one")
        await stubborn.began.wait()
        with caplog.at_level(logging.ERROR):
            assert not await end_tasks([task], seconds=0.01)
        assert "the stubborn one was cancelled, and goes on" in caplog.text
        stubborn.may_end.set()
        assert await task == "ended"
        assert await end_tasks([task])

    run(scenario())


def test_what_ends_when_it_is_told_is_waited_for() -> None:
    async def scenario() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        assert await end_tasks([task])
        assert task.cancelled()

    run(scenario())


def test_a_client_that_leaves_does_not_wait_for_work_that_does_not_end() -> None:
    async def scenario() -> None:
        stubborn, left = Stubborn(), asyncio.Event()
        serving = asyncio.create_task(unless_client_leaves(a_request(left), stubborn.work(), end_seconds=0.01))
        await stubborn.began.wait()
        left.set()
        with pytest.raises(ClientDisconnect):
            await serving
        assert stubborn.cancelled.is_set()
        stubborn.may_end.set()

    run(scenario())


def test_work_that_is_done_when_its_client_leaves_is_not_lost() -> None:
    async def scenario() -> None:
        stubborn, left = Stubborn(), asyncio.Event()
        serving = asyncio.create_task(unless_client_leaves(a_request(left), stubborn.work()))
        await stubborn.began.wait()
        left.set()
        await stubborn.cancelled.wait()
        stubborn.may_end.set()
        assert await serving == "ended"

    run(scenario())
