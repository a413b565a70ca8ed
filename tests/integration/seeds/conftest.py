"""Two workers of a resources server, and two of an agent server, in the seeds' way."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.seed_servers import SeedServer, seed_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def run_directory() -> Iterator[str]:
    """Short, since the path of a Unix socket is; 0700, as homing wants it."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="homing-seeds-", dir=base, ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.fixture
async def resources(run_directory: str) -> AsyncIterator[SeedServer]:
    async with seed_server("resources", directory=run_directory) as served:
        yield served


@pytest.fixture
async def agents(run_directory: str) -> AsyncIterator[SeedServer]:
    async with seed_server("agent", directory=run_directory) as served:
        yield served
