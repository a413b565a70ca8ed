"""Each test runs on both event loops, and ends within its time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop
from tests.integration.forwarding.hop import every_small_one_shares


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No delay of a busy machine is an owner's silence."""
    monkeypatch.setattr("homing.forwarding.shared._SILENT_SECONDS", 20.0)


@pytest.fixture(params=["own", "shared"])
def shared(request: pytest.FixtureRequest, patient: None) -> Iterator[bool]:
    """For tests that hold whether or not small exchanges share a connection from the first on: says which."""
    token = every_small_one_shares.set(request.param == "shared")
    yield request.param == "shared"
    every_small_one_shares.reset(token)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    """Runs a test's coroutine to its end, on a new loop."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run(test: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(20):
                return await test

        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(bounded())

    return run
