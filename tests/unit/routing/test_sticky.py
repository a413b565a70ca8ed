"""What `homing.sticky` makes of its settings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import homing
from homing.errors import HomingError
from homing.identity import Named
from homing.routes import Routes
from homing.routing.options import RoutingOptions
from homing.routing.unnamed import UnnamedStarts
from homing.types import Message, SessionId


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


def test_a_connection_of_engineio_is_kept_for_minutes_unless_other_sessions_are_kept_beside_it() -> None:
    """One that lives always has a request in flight; a visitor's basket has not."""
    assert RoutingOptions(preset="engineio").checked().idle_seconds == 300
    assert RoutingOptions(preset="engineio", idle_seconds=60).checked().idle_seconds == 60
    assert RoutingOptions(preset="engineio", sessions=("cookie:visitor",)).checked().idle_seconds == 86_400
    assert RoutingOptions(preset="mcp").checked().idle_seconds == 86_400


@pytest.mark.parametrize(
    ("mounted", "hint"), [(True, "wrap the outermost app with homing.sticky instead"), (False, "--lifespan off")]
)
def test_a_routed_app_that_is_given_no_lifespan_says_what_to_do_about_it(mounted: bool, hint: str) -> None:
    """Starlette gives none to what it mounts; a server gives none if it is told so."""
    routed = homing.sticky(app, sessions=[homing.header("x-session")])
    outermost = Starlette(routes=[Mount("/inner", routed)]) if mounted else routed

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        """Starlette answers 500 before it raises the error anew."""

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/inner/",
        "query_string": b"",
        "headers": [(b"x-session", b"one")],
    }
    with pytest.raises(HomingError, match=hint):
        asyncio.run(outermost(scope, receive, send))


@pytest.mark.parametrize(
    ("options", "adopts"),
    [
        (RoutingOptions(preset="mcp"), False),
        (RoutingOptions(preset="engineio"), True),
        (RoutingOptions(preset="gradio", sessions=("cookie:visitor",)), True),
        (RoutingOptions(preset="gradio", starts=("POST /sessions",)), False),
        (RoutingOptions(preset="mcp", unowned="adopt"), True),
        (RoutingOptions(preset="gradio", unowned="refuse"), False),
    ],
    ids=repr,
)
def test_a_preset_says_what_becomes_of_a_session_that_nobody_owns_unless_something_else_does(
    options: RoutingOptions, adopts: bool
) -> None:
    assert options.checked().adopts is adopts


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


@pytest.mark.parametrize("source", [homing.path("/s/{session}"), homing.query("sid")])
def test_sources_that_learn_nothing_are_warned_of_unless_something_says_where_sessions_begin(
    caplog: pytest.LogCaptureFixture, source: Any
) -> None:
    said: dict[str, Any]
    for said in ({"learn": "body:id@/s"}, {"starts": "POST /s"}, {"preset": "mcp"}, {"unowned": "adopt"}):
        homing.sticky(app, sessions=source, **said)
    homing.sticky(app, sessions=[source, homing.header("x-session")])
    assert caplog.messages == []
    homing.sticky(app, sessions=source)
    (line,) = caplog.messages
    assert line.startswith(f"{source.spec} is in requests only, and nothing says where sessions begin")
    assert "learn='body:FIELD@/route'" in line


def test_a_start_that_names_no_session_is_warned_of_once_for_each_route(caplog: pytest.LogCaptureFixture) -> None:
    unnamed = UnnamedStarts(Routes.parse(("POST /sessions", "/rooms/{room}/sessions")))
    for path in ("/sessions", "/rooms/1/sessions", "/rooms/2/sessions", "/sessions"):
        unnamed({"type": "http", "method": "POST", "path": path}, 201)
    assert [line.partition(" (")[0] for line in caplog.messages] == [
        "POST /sessions answered 201, but its reply names no session: add --learn body:FIELD@/sessions",
        "/rooms/{room}/sessions answered 201, but its reply names no session: "
        "add --learn body:FIELD@/rooms/{room}/sessions",
    ]
