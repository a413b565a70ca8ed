"""One event loop for the session, and pairs of workers that several tests share (each starts in about a second)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from tests.support.pair import Pair, PairOptions, open_pair

T = TypeVar("T")


class Pairs:
    """Opens each pair on first use; closes them all at the end of the session."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.opened: dict[str, tuple[Any, Pair]] = {}

    def get(self, name: str, options: PairOptions) -> Pair:
        if name not in self.opened:
            context = open_pair(replace(options, shares=True))
            self.opened[name] = (context, self.runner.run(context.__aenter__()))
        return self.opened[name][1]

    def close(self) -> None:
        errors = []
        for context, _ in reversed(self.opened.values()):
            try:
                self.runner.run(context.__aexit__(None, None, None))
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("pairs did not end in an orderly way", errors)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def pairs(runner: asyncio.Runner) -> Iterator[Pairs]:
    pairs = Pairs(runner)
    yield pairs
    pairs.close()


@pytest.fixture
def run(runner: asyncio.Runner) -> Callable[[Coroutine[Any, Any, T]], T]:
    return runner.run


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    return pairs.get("usual", PairOptions())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    pairs = getattr(item, "funcargs", {}).get("pairs")
    if report.failed and isinstance(pairs, Pairs):
        for name, (_, pair) in pairs.opened.items():
            for worker in pair.workers:
                tail = "\n".join(list(worker.process.log.lines)[-40:])
                report.sections.append((f"log of {worker.name} ({name})", tail))
    return report
