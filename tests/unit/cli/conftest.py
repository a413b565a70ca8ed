from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from tests.support.logs import logging_restored


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line configures logging and puts the app's directory on the path, as a process of its own may."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("HOMING_SESSION_SOCKET_DIR", raising=False)
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    with logging_restored():
        yield
