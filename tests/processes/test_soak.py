"""Half a minute of load and faults on a real server, and nothing broken: `tests/soak` says how that is seen."""

from __future__ import annotations

import asyncio
import os
import secrets

import pytest
from tests.soak.run import soak

SECONDS = 30
MANY_SECONDS = 600
SEED_ENV = "HOMING_SEED"


def seed() -> int:
    return int(os.environ.get(SEED_ENV, secrets.randbits(32)))


async def no_promise_is_broken(seconds: float) -> None:
    number = seed()
    print(f"soak: {SEED_ENV}={number}")
    report = await soak(seconds, number)
    print(report)
    assert not report.broken, f"{SEED_ENV}={number}\n{report}\n" + "\n".join(report.log[-400:])
    assert report.faults_in_flight >= 20, report
    assert report.signals_in_flight >= 8, report
    assert {"kill", "stop", "term", "restart", "disconnect"} <= set(report.faults), report


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_under_load_and_faults_no_promise_is_broken_and_everything_comes_back() -> None:
    asyncio.run(no_promise_is_broken(SECONDS))


@pytest.mark.soak
@pytest.mark.long
@pytest.mark.timeout(MANY_SECONDS + 240)
def test_for_ten_minutes_under_load_and_faults_no_promise_is_broken() -> None:
    asyncio.run(no_promise_is_broken(MANY_SECONDS))
