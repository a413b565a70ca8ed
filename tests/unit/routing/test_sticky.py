"""What `homing.sticky` makes of its settings."""

from __future__ import annotations

from typing import Any

import pytest

import homing
from homing.identity import Named
from homing.types import SessionId


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


def test_without_a_way_to_tell_sessions_it_is_refused() -> None:
    for given in ({}, {"starts": ["POST /sessions"]}, {"ends": ["POST /close"]}):
        with pytest.raises(homing.ConfigurationError, match=r"which session a request names: add sessions=\["):
            homing.sticky(app, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("one", [homing.header("x-session"), "header:x-session"])
def test_one_source_or_route_needs_no_list_around_it(one: Any) -> None:
    router = homing.sticky(app, sessions=one, learn="body:id@/make", starts="POST /make", ends="POST /close")
    assert repr(router.identity) == "<SourcesIdentity header:x-session>"
    scope = {"type": "http", "method": "POST", "path": "/make", "headers": [(b"x-session", b"one")]}
    assert router.identity.from_head(scope) == Named(SessionId("one"), start=True)
