"""What every test shares: a directory of its own, with a path short enough for a private socket in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, but short: a Unix socket's path has 107 bytes, and pytest's names spend most of them."""
    path = Path(tempfile.mkdtemp(prefix="h-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
