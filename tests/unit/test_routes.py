from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette._utils import get_route_path
from starlette.routing import Match
from starlette.routing import Route as AppRoute
from tests.support.identity_scopes import handshake, request

from homing.errors import ConfigurationError
from homing.routes import MountedRoute, Route, Routes, path_below_root, rollout_readings, strip_rollout_prefix


async def endpoint(_: object) -> None:
    """Never run: only its route is asked."""


@pytest.mark.parametrize(
    ("text", "method", "template"),
    [
        ("/x", None, "/x"),
        ("POST /x/{id}", "POST", "/x/{id}"),
        ("post /x", "POST", "/x"),
        ("  DELETE   /x/ ", "DELETE", "/x/"),
        ("/", None, "/"),
    ],
)
def test_a_route_is_a_method_and_a_path_or_a_path(text: str, method: str | None, template: str) -> None:
    assert Route.parse(text) == Route(method, template)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "write 'METHOD /route' or '/route'"),
        ("POST", "the path is missing: write 'POST /route'"),
        ("start", "write '/start'"),
        ("POST /a /b", "write 'METHOD /route' or '/route'"),
        ("P0ST /a", "write 'POST /a'"),
        ("PSOT /a", "did you mean POST? write 'POST /a'"),
        ("G/T /a", "'G/T' is no HTTP method: write 'POST /route'"),
        ("/sessions POST", "route '/sessions POST': the method comes first: write 'POST /sessions'"),
        ("/a /b", "route '/a /b': '/a' is no HTTP method: write 'POST /route'"),
        ("/a?b=c", "write the path alone"),
        ("/a#b", "write the path alone"),
        ("/a/{id:path}", "write '/x/{name}'"),
        ("/a/{", "write '/x/{name}'"),
        ("/a/}", "write '/x/{name}'"),
        ("/a/{}", "write '/x/{name}'"),
        ("/{a}/{a}", "name each segment once"),
    ],
)
def test_a_text_that_is_no_route_is_refused_with_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(ConfigurationError, match="route") as refused:
        Route.parse(text)
    assert advice in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_method_that_is_rare_is_no_mistake() -> None:
    for method in ("PROPFIND", "PURGE", "QUERY", "LOCK", "REPORT", "MOVE", "SEARCH"):
        assert Route.parse(f"{method} /a").method == method


def test_one_string_in_place_of_a_list_of_routes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="tuple"):
        Routes.parse("/start")


def test_a_template_matches_whole_paths_and_a_placeholder_is_one_segment_that_is_not_empty() -> None:
    route = Route.parse("/sessions/{id}/step")
    assert route.matches("GET", "/sessions/a/step")
    assert route.matches("PATCH", "/sessions/ü b/step")
    for path in ("/sessions//step", "/sessions/a/b/step", "/sessions/a/step/", "/x/sessions/a/step", "/sessions/a"):
        assert not route.matches("GET", path)


def test_a_get_route_takes_head_and_a_websocket_handshake_and_a_route_with_another_method_does_not() -> None:
    assert Routes.parse(["GET /ws"]).match(request("HEAD", "/ws"))
    assert Routes.parse(["GET /ws"]).match(handshake("/ws"))
    assert Routes.parse(["/ws"]).match(handshake("/ws"))
    assert not Routes.parse(["POST /ws"]).match(handshake("/ws"))
    assert not Routes.parse(["POST /ws"]).match(request("GET", "/ws"))
    assert Routes.parse(["POST /ws"]).match_path("/ws")
    assert Routes.parse(["POST /ws/{x}"]).match_path("/ws/1")


def test_several_routes_on_one_path_each_count() -> None:
    routes = Routes.parse(["POST /x", "DELETE /x", "PUT /{y}"])
    assert [method for method in ("GET", "POST", "DELETE", "PUT") if routes.match(request(method, "/x"))] == [
        "POST",
        "DELETE",
        "PUT",
    ]


def test_no_routes_are_falsy_and_match_nothing() -> None:
    assert not Routes()
    assert len(Routes.parse(["/a", "/b"])) == 2
    assert not Routes().match(request(path="/"))
    assert not Routes().match_path("/")


def test_routes_are_values() -> None:
    routes = Routes.parse(["POST /x/{id}", "/y"], rollout_prefix=True)
    assert pickle.loads(pickle.dumps(routes)) == routes
    assert hash(pickle.loads(pickle.dumps(routes))) == hash(routes)
    assert routes != Routes.parse(["POST /x/{id}", "/y"])
    assert routes != "routes"
    assert "POST /x/{id}" in repr(routes)


@pytest.mark.parametrize("prefix", ["", "/ng-rollout/r1", "/ng-rollout/r1/capture", "/ng-rollout/seed_session"])
@pytest.mark.parametrize("path", ["/seed_session", "/rollouts/x/stop"])
def test_a_rollout_prefix_of_no_one_or_two_segments_may_stand_before_a_path(prefix: str, path: str) -> None:
    routes = Routes.parse(["/seed_session", "POST /rollouts/{id}/stop"], rollout_prefix=True)
    assert routes.match(request("POST", prefix + path))
    assert Routes.parse(["/seed_session", "POST /rollouts/{id}/stop"]).match(request("POST", prefix + path)) is (
        not prefix
    )


@pytest.mark.parametrize(
    "path",
    [
        "/ng-rollout/seed_session",
        "/ng-rollout//seed_session",
        "/ng-rollout/a/b/c/seed_session",
        "/NG-rollout/a/seed_session",
        "/ng-rolloutx/a/seed_session",
        "/x/ng-rollout/a/seed_session",
        "//seed_session",
        "/seed_session/",
        "/Seed_session",
        "/seed_session;x",
    ],
)
def test_what_only_looks_like_a_rollout_prefix_or_a_route_is_neither(path: str) -> None:
    assert not Routes.parse(["/seed_session"], rollout_prefix=True).match(request("POST", path))


def test_a_rollout_prefix_is_taken_off_as_one_segment_and_may_be_read_as_two() -> None:
    assert strip_rollout_prefix("/ng-rollout/r1/v1/responses") == "/v1/responses"
    assert strip_rollout_prefix("/v1/responses") == "/v1/responses"
    assert strip_rollout_prefix("/ng-rollout") == "/ng-rollout"
    assert rollout_readings("/ng-rollout/r/c/x/y") == ("/ng-rollout/r/c/x/y", "/c/x/y", "/x/y")


segments = st.text("ab%;.{}\n ü", max_size=3)
paths = st.lists(segments, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@settings(deadline=None)
@given(paths, st.sampled_from(["GET", "HEAD", "POST", "DELETE"]), st.sampled_from(["GET", "POST"]))
def test_a_route_matches_exactly_where_the_app_s_own_route_runs_its_handler(
    path: str, method: str, declared: str
) -> None:
    for template in ("/a", "/a/{x}", "/{x}/b", "/a/b", "/{x}"):
        theirs = AppRoute(template, endpoint, methods=[declared])
        runs = theirs.matches(request(method, path))[0] is Match.FULL
        assert Route(declared, template).matches(method, path) is runs
        assert Routes([Route(declared, template)]).match(request(method, path)) is runs


@settings(deadline=None)
@given(paths, st.sampled_from(["", "/", "/a", "/a/", "/api", "a", "/a/b"]))
def test_the_path_below_the_root_is_the_one_the_app_s_routes_see(path: str, root: str) -> None:
    scope = request(path=root + path, root_path=root)
    assert path_below_root(scope) == get_route_path(scope)
    scope = request(path=path, root_path=root)
    assert path_below_root(scope) == get_route_path(scope)


@pytest.mark.parametrize("mount", ["", "/demo", "/a/b"])
def test_a_mounted_route_matches_where_a_path_ends_so(mount: str) -> None:
    route = MountedRoute("POST", "/api/{name}")
    assert route.matches("POST", f"{mount}/api/x")
    found = route.found_in(f"{mount}/api/x")
    assert found is not None
    assert found["name"] == "x"
    for path in (f"{mount}/api/x/y", f"{mount}/xapi/y/", f"{mount}x/api", f"{mount}/api/"):
        assert not route.matches("POST", path)
    assert not route.matches("GET", f"{mount}/api/x")
    assert pickle.loads(pickle.dumps(route)) == route != Route("POST", "/api/{name}")
