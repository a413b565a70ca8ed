"""A minute of load and faults on a real server, and nothing broken: `tests/soak` says how that is seen."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from pathlib import Path

import pytest
from benchmarks.soak import run
from tests.soak.faults import KINDS, ROWS
from tests.soak.run import soak

ROOT = Path(__file__).parents[2]
SECONDS = 60
MANY_SECONDS = 900
SEED_ENV = "HOMING_SEED"


def seed() -> int:
    return int(os.environ.get(SEED_ENV, secrets.randbits(32)))


async def no_promise_is_broken(seconds: float) -> None:
    number = seed()
    print(f"soak: {SEED_ENV}={number}")
    report = await soak(seconds, number)
    print(report)
    assert not report.broken, f"{SEED_ENV}={number}\n{report}\n" + "\n".join(report.log[-400:])
    assert report.injected >= seconds / 3, report
    assert report.in_flight >= max(20, seconds / 5), report
    missing = set(ROWS) - set(report.faults) - set(report.not_raised)
    assert not missing, f"{missing} did not occur: {report}"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_under_load_and_faults_no_promise_is_broken_and_everything_comes_back() -> None:
    asyncio.run(no_promise_is_broken(SECONDS))


@pytest.mark.soak
@pytest.mark.long
@pytest.mark.timeout(MANY_SECONDS + 300)
def test_for_fifteen_minutes_under_load_and_faults_no_promise_is_broken() -> None:
    asyncio.run(no_promise_is_broken(MANY_SECONDS))


def test_the_page_of_results_is_made_of_its_report() -> None:
    kept = Path(run.__file__).parent
    assert (kept / "results.md").read_text() == run.page(json.loads((kept / "report.json").read_text())) + "\n"


def test_every_row_that_a_soak_raises_is_one_of_the_page_of_faults() -> None:
    rows = set(re.findall(r"^\| (F\d+) \|", (ROOT / "docs/design/faults.md").read_text(), re.MULTILINE))
    assert {row for named in ROWS.values() for row in named.split()} <= rows
    assert set(KINDS) <= set(ROWS)
