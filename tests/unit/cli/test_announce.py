"""What `homing run` says at start: the summary, and a warning for what has no effect or would surprise."""

from __future__ import annotations

from typing import Any

import pytest

from homing.identity import PRESETS, Preset, header
from homing.routing.options import RoutingOptions
from homing.runtime.announce import announce
from homing.runtime.config import RoutedBy, RunConfig


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    def of(*, workers: int = 4, routed_by: RoutedBy = RoutedBy.HOMING_RUN, **options: Any) -> tuple[str, list[str]]:
        caplog.clear()
        caplog.set_level("INFO", logger="homing")
        config = RunConfig("a:b", routing=RoutingOptions(workers=workers, **options), workers=workers, log_config=None)
        announce(config, None, routed_by)
        first, *warnings = caplog.records
        assert {record.levelname for record in warnings} <= {"WARNING"}
        return first.getMessage().partition(": ")[2], [record.getMessage() for record in warnings]

    return of


PATH = ("path:/sessions/{session}",)


def test_the_summary_says_where_sessions_begin_and_end_and_what_becomes_of_unowned_ones(said: Any) -> None:
    summary, warnings = said(
        sessions=PATH, learn=("body:id@/sessions",), starts=("POST /sessions",), ends=("DELETE /sessions/{id}",)
    )
    assert summary == (
        "4 workers, sessions named by path:/sessions/{session}, learned from body:id@/sessions, "
        "started by POST /sessions, ended by DELETE /sessions/{id}, unowned: refuse"
    )
    assert warnings == []
    assert (
        said(sessions=("cookie:a", "header:b"))[0] == "4 workers, sessions named by cookie:a, header:b, unowned: adopt"
    )
    assert said(preset="mcp", workers=1)[0] == "1 worker, sessions named by preset mcp"


def test_a_path_or_query_alone_is_warned_of_with_what_to_add(said: Any) -> None:
    for source in (PATH, ("query:sid",)):
        (line,) = said(sessions=source)[1]
        assert line.startswith(f"{source[0]} is in requests only, and nothing says where sessions begin")
        assert "--learn body:FIELD@/route and --start 'METHOD /route'" in line
    assert said(sessions=PATH, workers=1)[1] == []
    assert said(sessions=PATH, unowned="adopt")[1] == []


def test_what_has_no_effect_is_warned_of(said: Any) -> None:
    assert said(sessions=("cookie:a",), scatter=True, workers=1)[1] == [
        "--scatter has no effect with one worker: use --workers 2 or more"
    ]
    (line,) = said(sessions=("cookie:a",), secret="s")[1]
    assert line.startswith("--secret-env has no effect")
    assert said(sessions=("signed-cookie:session:sid",), secret="s")[1] == []


def test_limits_and_placement_without_a_declared_start_are_warned_of(said: Any) -> None:
    placed = {"sessions": ("cookie:a",), "place": "fewest"}
    assert said(**placed)[1] == [
        "--place has no effect: declared starts alone are placed and limited, and nothing declares one; "
        "add --start 'METHOD /route'"
    ]
    limited = {"preset": "mcp", "max_sessions": 5, "max_sessions_per_worker": 2, "queue_seconds": 1.0}
    (line,) = said(**limited)[1]
    assert line.startswith("--max-sessions, --max-sessions-per-worker, --queue have no effect: ")
    assert said(**placed, **limited, starts=("POST /sessions",))[1] == []
    assert said(sessions=("cookie:a",), place="balanced")[1] == []
    assert said(**placed, workers=1)[1] == []


def test_limits_and_placement_apply_to_the_starts_of_a_preset(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "starting", Preset("starting", (header("x-s"),), starts=("POST /sessions",)))
    assert said(preset="starting", max_sessions=5, place="random")[1] == []


def test_options_about_sessions_are_said_to_have_no_effect_on_an_app_that_routes_itself(said: Any) -> None:
    by_app, as_told = RoutedBy.APP, RoutedBy.APP_AS_TOLD
    summary, (line,) = said(sessions=PATH, gone_status=404, idle_seconds=60, routed_by=by_app)
    assert summary == "4 workers, sessions as the app itself declares them"
    assert line.startswith("--session, --idle, --gone have no effect: the app routes itself")
    assert said(scatter=True, routed_by=by_app)[1][0].startswith("--scatter has no effect")
    assert said(scatter=True, max_sessions_per_worker=3, routed_by=as_told) == (summary, [])
    assert said(sessions=PATH, scatter=True, routed_by=as_told)[1][0].startswith("--session has no effect")
    assert said(place="fewest", routed_by=by_app)[1][0].startswith("--place has no effect: the app routes itself")
    assert said(place="fewest", routed_by=as_told) == (summary, [])
    assert said(place="balanced", routed_by=by_app) == (summary, [])
    assert said(routed_by=by_app) == (summary, [])
