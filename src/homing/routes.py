"""Which declared route does a request match?

A route is a method and a path template, or a template alone: `"POST /start"`, `"/sessions/{id}"`. Templates match whole
paths below `root_path`, as Starlette's own routes do, so that *the router says start* is *the start's handler runs*:
`{x}` is one segment that is not empty, `GET` answers `HEAD` too, nothing is normalised (`//start`, `/Start` and
`/start;x` are other paths), and the path is the decoded one.

Not here: what a route means. The rooms above declare starts, ends and routes whose body is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from homing.errors import ConfigurationError
from homing.types import Scope

ROLLOUT_PATH_PREFIX: Final = "ng-rollout"
"""The first segment of a path that names the rollout it belongs to: `/ng-rollout/<id>` before the path itself."""

ROLLOUT_PREFIX: Final = rf"(?:/{ROLLOUT_PATH_PREFIX}/[^/]+(?:/[^/]+)?)?"
"""A regular expression for what may stand before a path: nothing, or `/ng-rollout/` and one or two segments."""

_METHOD: Final = re.compile(r"[A-Z][A-Z-]*")
_KNOWN_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY")
_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def path_below_root(scope: Scope) -> str:
    """The path that the app's routes are matched against: `scope["path"]` less `root_path`.

    The same text as Starlette's `get_route_path`: a `root_path` that is no prefix, or ends inside a segment, removes
    nothing.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest[0] == "/" else path


def request_method(scope: Scope) -> str:
    """The method of an HTTP request; `GET` for a WebSocket, whose handshake is one."""
    return scope["method"] if scope["type"] == "http" else "GET"


def rollout_readings(path: str) -> tuple[str, ...]:
    """Every path that `path` may mean once an optional rollout prefix is taken off; the bare path comes first.

    `/ng-rollout/r1/x/seed` may be `/x/seed` of rollout `r1`, or `/seed` of `r1` with the capture segment `x`: a route
    matches if one of the readings does.
    """
    parts = path.split("/", 4)
    if len(parts) < 3 or parts[0] or parts[1] != ROLLOUT_PATH_PREFIX or not parts[2]:
        return (path,)
    below_one = path[len(parts[1]) + len(parts[2]) + 2 :]
    if len(parts) < 4 or not parts[3]:
        return (path, below_one)
    return (path, below_one, below_one[len(parts[3]) + 1 :])


def strip_rollout_prefix(path: str) -> str:
    """`path` without `/ng-rollout/<id>`, as a rollout server takes it off before its app; other paths as they are."""
    readings = rollout_readings(path)
    return readings[1] if len(readings) > 1 else path


def template_pattern(template: str, *, below: bool = False) -> re.Pattern[str]:
    """The compiled template; its `{x}` are named groups, and `below` also lets it match anything beneath it.

    Raises:
        ConfigurationError: the template cannot match a path; the line says what to write.
    """
    if not template.startswith("/"):
        raise ConfigurationError(f"route {template!r}: a path starts with '/': write '/{template}'")
    if "?" in template or "#" in template:
        raise ConfigurationError(f"route {template!r}: a route has no query: write the path alone")
    pattern, end = "", 0
    names: set[str] = set()
    for placeholder in _PLACEHOLDER.finditer(template):
        name = placeholder[1]
        if name in names:
            raise ConfigurationError(f"route {template!r}: {{{name}}} occurs twice: name each segment once")
        names.add(name)
        pattern += re.escape(template[end : placeholder.start()]) + f"(?P<{name}>[^/]+)"
        end = placeholder.end()
    pattern += re.escape(template[end:])
    if "{" in _PLACEHOLDER.sub("", template) or "}" in _PLACEHOLDER.sub("", template):
        raise ConfigurationError(
            f"route {template!r}: a placeholder is one segment and only a name: write '/x/{{name}}'"
        )
    # `$` and not `\Z`: it also matches before one trailing newline (`%0A`), and so do the app's own routes. The handler
    # of a path that this pattern refused would run without its session being routed.
    return re.compile(pattern + ("(?:/.*)?$" if below else "$"), re.DOTALL)


@dataclass(frozen=True, slots=True)
class Route:
    """A method, or None for any, and a path template; comparable, hashable and picklable.

    Raises:
        ConfigurationError: as `Route.parse`.
    """

    method: str | None
    template: str
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.method is not None and not _METHOD.fullmatch(self.method):
            raise ConfigurationError(f"route {str(self)!r}: {self.method!r} is no HTTP method: write 'POST /route'")
        object.__setattr__(self, "_pattern", template_pattern(self.template))

    @classmethod
    def parse(cls, text: str) -> Route:
        """The route that `"POST /x/{id}"` or `"/x"` describes; the method may be written in lower case.

        Raises:
            ConfigurationError: the text is no route; the line says what to write.
        """
        words = text.split()
        if len(words) == 1:
            method = words[0].upper()
            if method in _KNOWN_METHODS:
                raise ConfigurationError(f"route {text!r}: the path is missing: write '{method} /route'")
            return cls(None, words[0])
        if len(words) == 2:
            method = words[0].upper()
            # Any token is a method, so only what looks like a slip of the pen is refused.
            meant = [] if method in _KNOWN_METHODS else get_close_matches(method, _KNOWN_METHODS, 1, cutoff=0.7)
            if meant:
                raise ConfigurationError(f"route {text!r}: did you mean {meant[0]}? write '{meant[0]} {words[1]}'")
            if words[1].upper() in _KNOWN_METHODS:
                raise ConfigurationError(
                    f"route {text!r}: the method comes first: write '{words[1].upper()} {words[0]}'"
                )
            if not _METHOD.fullmatch(method):
                raise ConfigurationError(f"route {text!r}: {words[0]!r} is no HTTP method: write 'POST /route'")
            return cls(method, words[1])
        raise ConfigurationError(f"route {text!r}: write 'METHOD /route' or '/route'")

    def matches(self, method: str, path: str) -> bool:
        """Whether a request with this method, on this whole path below `root_path`, is one of this route."""
        return self.allows(method) and self._pattern.match(path) is not None

    def allows(self, method: str) -> bool:
        """Whether the route takes requests with this method; a `GET` route takes `HEAD`, as in the app."""
        return self.method is None or method == self.method or (method == "HEAD" and self.method == "GET")

    def __str__(self) -> str:
        return self.template if self.method is None else f"{self.method} {self.template}"


@dataclass(frozen=True, slots=True)
class MountedRoute(Route):
    """A route of an app that may be mounted at any path of another: its template is where the path ends."""

    def __post_init__(self) -> None:
        # Not `super()`: a dataclass with slots is another class than the one it was written as.
        Route.__post_init__(self)
        pattern = template_pattern(self.template).pattern
        object.__setattr__(self, "_pattern", re.compile("(?:/.*)?" + pattern, re.DOTALL))

    def found_in(self, path: str) -> re.Match[str] | None:
        """The match, whose groups are the template's placeholders; None if the path does not end so."""
        return self._pattern.match(path)


class Routes:
    """Several routes, asked as one; falsy when there are none. Immutable; picklable.

    Args:
        routes: The routes, in any order.
        rollout_prefix: Each also matches below a rollout prefix (see `ROLLOUT_PREFIX`).
    """

    __slots__ = ("_literal", "_patterned", "rollout_prefix", "routes")

    def __init__(self, routes: Iterable[Route] = (), *, rollout_prefix: bool = False) -> None:
        self.routes: Final = tuple(routes)
        self.rollout_prefix: Final = rollout_prefix
        literal: dict[str, tuple[Route, ...]] = {}
        for route in self.routes:
            if "{" not in route.template:
                literal[route.template] = (*literal.get(route.template, ()), route)
        self._literal: Final[Mapping[str, tuple[Route, ...]]] = literal
        self._patterned: Final = tuple(route for route in self.routes if "{" in route.template)

    @classmethod
    def parse(cls, texts: Iterable[str], *, rollout_prefix: bool = False) -> Routes:
        """The routes that `texts` describe, each `"METHOD /route"` or `"/route"`.

        Raises:
            ConfigurationError: a text is no route, or `texts` is one string; the line says what to write.
        """
        if isinstance(texts, str):
            raise ConfigurationError(f"routes {texts!r}: write a tuple of routes, such as ({texts!r},)")
        return cls((Route.parse(text) for text in texts), rollout_prefix=rollout_prefix)

    def match(self, scope: Scope) -> bool:
        """Whether the HTTP or WebSocket request is on one of the routes."""
        return bool(self.routes) and self.matches(request_method(scope), path_below_root(scope))

    def match_path(self, path: str) -> bool:
        """Whether a request on `path`, whatever its method, may be on one of the routes."""
        return bool(self.routes) and self.matches(None, path)

    def matches(self, method: str | None, path: str) -> bool:
        """Whether one of the routes takes `path`, a whole path below `root_path`; a method of None stands for any."""
        if self.rollout_prefix and path.startswith("/" + ROLLOUT_PATH_PREFIX + "/"):
            return any(self._matches(method, reading) for reading in rollout_readings(path))
        return self._matches(method, path)

    def _matches(self, method: str | None, path: str) -> bool:
        literal = path[:-1] if path[-1:] == "\n" else path
        if any(method is None or route.allows(method) for route in self._literal.get(literal, ())):
            return True
        return any(
            (method is None or route.allows(method)) and route.matches(method or route.method or "GET", path)
            for route in self._patterned
        )

    def __bool__(self) -> bool:
        return bool(self.routes)

    def __len__(self) -> int:
        return len(self.routes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Routes):
            return NotImplemented
        return self.routes == other.routes and self.rollout_prefix == other.rollout_prefix

    def __hash__(self) -> int:
        return hash((self.routes, self.rollout_prefix))

    def __repr__(self) -> str:
        texts = ", ".join(repr(str(route)) for route in self.routes)
        return f"Routes({texts}{', rollout_prefix=True' if self.rollout_prefix else ''})"
