from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.logs import logging_restored


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    with logging_restored():
        yield
