"""What every test shares: a directory of its own, with a path short enough for a private socket in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOWEST = (
    "tests/processes/test_soak.py",
    "tests/processes/web/test_fault_run.py",
    "tests/processes/test_owner_histories.py",
    "tests/test_docs.py",
    "tests/integration/mcp/test_session_era.py",
    "tests/processes/test_run_lifecycle.py",
    "tests/unit/web/test_manager_machine.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: handed out last, one would run alone at the end, beside an idle core."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOWEST))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, but short: a Unix socket's path has 107 bytes, and pytest's names spend most of them."""
    path = Path(tempfile.mkdtemp(prefix="h-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
