"""Where Playwright is not installed, or was removed under a running server: no retry helps, and the caller is told so."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from homing.web.chromium.driver import Driver, import_driver
from homing.web.errors import BrowserStartError, NoBrowserError
from homing.web.replies import error_response


@pytest.fixture(autouse=True)
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "playwright"] + ["playwright"]:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_driver_that_is_not_installed_is_no_matter_of_trying_again(tmp_path: Path) -> None:
    with pytest.raises(NoBrowserError, match=r"pip install 'homing\[web\]'"):
        import_driver()
    with pytest.raises(NoBrowserError, match=r"pip install 'homing\[web\]'"):
        asyncio.run(Driver.start(tmp_path))


def test_its_reply_says_so_and_names_no_time_to_come_again() -> None:
    for error, retryable in ((NoBrowserError("x"), False), (BrowserStartError("x"), True)):
        reply = error_response(error)
        told = json.loads(bytes(reply.body))
        assert (reply.status_code, told["error_kind"]) == (503, "capacity_unavailable")
        assert told["retryable"] is retryable
        assert ("retry-after" in reply.headers) is retryable
