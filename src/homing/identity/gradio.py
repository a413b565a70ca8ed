"""Which session does a request to a Gradio app name?

Gradio keeps its state, its queue and its streams in memory, under a `session_hash` that the client makes up: in the JSON
bodies of most POSTs, in the query of the stream of results and in a few paths. `POST /gradio_api/call/{name}` is the
other way in: its reply names an `event_id`, and a GET with that in its path reads the results. An upload that shows its
progress names an `upload_id`, in the query of both requests. The app may be mounted at any path.

What names none of these is served where it arrives: the page, the files (every worker has the same folder of them), and
a component's own upload (`component_server` with a form).

Source: the routes of Gradio 5 and 6, and what gradio_client and the page's own client send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from homing.clock import Clock
from homing.identity.sources import BodySource, Headers, HeadReader, Source, query_value
from homing.routes import MountedRoute, path_below_root, request_method
from homing.types import Scope

GRADIO_PATH: Final = "/gradio_api/"

_HASH_ROUTES: Final = (
    "/gradio_api/queue/join",
    "/gradio_api/cancel",
    "/gradio_api/component_server",
    "/gradio_api/component_server/",
    "/gradio_api/reset",
    "/gradio_api/reset/",
    "/gradio_api/stream/{event_id}",
    "/gradio_api/run/{name}",
    "/gradio_api/run/{name}/",
    "/gradio_api/api/{name}",
    "/gradio_api/api/{name}/",
)
"""Where the body has a `session_hash`."""

_CALL_ROUTES: Final = (
    "/gradio_api/call/{name}",
    "/gradio_api/call/{name}/",
    "/gradio_api/call/v2/{name}",
    "/gradio_api/call/v2/{name}/",
)
"""Where the reply has an `event_id`."""

_HASHES_IN_PATHS: Final = (
    MountedRoute("GET", "/gradio_api/heartbeat/{session_hash}"),
    MountedRoute("GET", "/gradio_api/stream/{session_hash}/{run}/{component}/{file}"),
)
_EVENTS_IN_PATHS: Final = (
    MountedRoute("GET", "/gradio_api/call/{name}/{event_id}"),
    MountedRoute("GET", "/gradio_api/call/v2/{name}/{event_id}"),
)
_UPLOADS: Final = (MountedRoute("POST", "/gradio_api/upload"), MountedRoute("GET", "/gradio_api/upload_progress"))


@dataclass(frozen=True, slots=True)
class GradioHashSource(Source):
    """A client's `session_hash`, in the query or the path of one of Gradio's own requests."""

    @property
    def spec(self) -> str:
        return "gradio:session_hash"

    def head_reader(self, clock: Clock) -> HeadReader:
        def read(scope: Scope, headers: Headers) -> str | None:
            path = path_below_root(scope)
            if GRADIO_PATH not in path:
                return None
            query: bytes = scope.get("query_string", b"")
            if b"session_hash=" in query and (found := query_value("session_hash", query)):
                return found
            return _in_path(_HASHES_IN_PATHS, "session_hash", request_method(scope), path)

        return read


@dataclass(frozen=True, slots=True)
class GradioEventSource(Source):
    """The `event_id` in the path of the request that reads a call's results, and by that ends the call."""

    @property
    def spec(self) -> str:
        return "gradio:event_id"

    def head_reader(self, clock: Clock) -> HeadReader:
        def read(scope: Scope, headers: Headers) -> str | None:
            path = path_below_root(scope)
            if GRADIO_PATH not in path:
                return None
            return _in_path(_EVENTS_IN_PATHS, "event_id", request_method(scope), path)

        return read


@dataclass(frozen=True, slots=True)
class GradioUploadSource(Source):
    """An `upload_id`, in the query of an upload and of the stream that tells how far it is."""

    @property
    def spec(self) -> str:
        return "gradio:upload_id"

    def head_reader(self, clock: Clock) -> HeadReader:
        def read(scope: Scope, headers: Headers) -> str | None:
            query: bytes = scope.get("query_string", b"")
            if b"upload_id=" not in query:
                return None
            path, method = path_below_root(scope), request_method(scope)
            if not any(route.matches(method, path) for route in _UPLOADS):
                return None
            return query_value("upload_id", query)

        return read


def gradio_gone(scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
    """The answer to a session whose state is lost: 404, as Gradio's own to one that it does not know; None for requests
    that are not Gradio's.

    A page that gets it says that the connection was lost, and loads itself again: that is what it does about an answer
    with just this `error`, and about a stream that it cannot open.
    """
    if GRADIO_PATH not in path_below_root(scope):
        return None
    body = b'{"detail":"Session not found.","error":"Connection errored out. "}'
    return 404, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())], body


def _in_path(routes: tuple[MountedRoute, ...], name: str, method: str, path: str) -> str | None:
    for route in routes:
        if route.allows(method) and (found := route.found_in(path)) is not None:
            return found[name]
    return None


GRADIO_EVENT: Final = GradioEventSource()
GRADIO_UPLOAD: Final = GradioUploadSource()

GRADIO_SESSIONS: Final[tuple[Source, ...]] = (
    GradioHashSource(),
    GRADIO_EVENT,
    GRADIO_UPLOAD,
    *(BodySource("session_hash", MountedRoute("POST", template)) for template in _HASH_ROUTES),
)
"""Where requests name a session."""

GRADIO_LEARN: Final[tuple[Source, ...]] = tuple(
    BodySource("event_id", MountedRoute("POST", template)) for template in _CALL_ROUTES
)
"""Where replies make one known."""
