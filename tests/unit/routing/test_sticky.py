"""What `homing.sticky` makes of its settings."""

from __future__ import annotations

from typing import Any

import homing


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Never called: only the settings are looked at."""


def test_an_ended_session_is_kept_no_longer_than_an_idle_one() -> None:
    router = homing.sticky(app, sessions=[homing.header("x-session")], ends=["POST /close"], idle_seconds=1e-9)
    router.lifetimes.opened("open")
    router.lifetimes.ended("ended")
    assert sorted(router.lifetimes.sweep()) == ["ended", "open"]


def test_an_ended_session_is_kept_for_the_close_retry_window() -> None:
    router = homing.sticky(app, sessions=[homing.header("x-session")], ends=["POST /close"])
    router.lifetimes.ended("ended")
    assert router.lifetimes.sweep() == []
    assert router.lifetimes.holds("ended")
