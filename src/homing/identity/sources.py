"""Where do an app's requests name their session? The sources, as a user declares them.

A source is a value: frozen, comparable, picklable, the same whether it was written in Python (`cookie("sid")`) or on
the command line (`cookie:sid`). For each place it says how to read a request's head, which field of a body to read on
which route, and where replies first name a session that the app has just made.

Not here: how users write a source (`specs`), which of several decides (`generic`), and how a reply is read as it passes
(`learned`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeAlias
from urllib.parse import parse_qsl

from homing.clock import SYSTEM_CLOCK, Clock
from homing.errors import BadRequestError
from homing.identity import handles
from homing.identity.cookie import SESSION_MAX_AGE_SECONDS, SignedCookieReader, cookie_text, cookie_value
from homing.identity.documents import Json, field_text
from homing.identity.events import Event
from homing.identity.ids import header_text
from homing.identity.set_cookie import SET_COOKIE, cookies_set
from homing.routes import Route, path_below_root, template_pattern
from homing.types import Scope

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
HeadReader: TypeAlias = Callable[[Scope, Headers], str | None]
"""Reads a request's head: its scope, and those of its headers that came with the head."""

HeadersReader: TypeAlias = Callable[[Headers], Sequence[str]]
"""Reads the headers of a reply, or of an accepted WebSocket."""


class BodyField(Protocol):
    """A place in the bodies of one route, in requests, in replies, or in both.

    Attributes:
        route: The only route whose bodies are read for it.
        keys: Every key on the way to the field, in requests; one that occurs twice in its object is an error.
        reply_keys: Keys of which a reply has at least one where it names a session; what has none is not parsed.
    """

    @property
    def route(self) -> Route: ...

    @property
    def keys(self) -> frozenset[str]: ...

    @property
    def reply_keys(self) -> frozenset[str]: ...

    def in_request(self, document: Json, headers: Headers) -> str | None:
        """The session that a request's JSON body names.

        Raises:
            DuplicateFieldError: the field, or one on the way to it, occurs twice.
            SessionConflictError: the body names several sessions.
        """
        ...

    def in_reply(self, document: Json) -> Iterator[str]:
        """The sessions that a JSON reply, or the JSON data of one server-sent event, names."""
        ...


class ReplyOpening(Protocol):
    """How the replies to certain requests begin, where that names a session in neither JSON nor server-sent events.

    Attributes:
        max_bytes: The most that is held back for it.
    """

    @property
    def max_bytes(self) -> int: ...

    def expected(self, scope: Scope) -> bool:
        """Whether the reply to this HTTP request may begin so."""
        ...

    def read(self, data: bytes, encoding: bytes, complete: bool) -> Sequence[str] | None:
        """The sessions that the beginning of a reply's body names; None: it takes more to say.

        Args:
            encoding: The reply's `Content-Encoding`, in lower case; empty if it has none.
            complete: There is no more.
        """
        ...


class Source:
    """A place where requests, replies or both name a session. Subclasses say where; each default is *not here*."""

    __slots__ = ()

    @property
    def spec(self) -> str:
        """The source as the command line writes it, without its secret."""
        raise NotImplementedError

    def head_reader(self, clock: Clock) -> HeadReader | None:
        """What reads a request's head for it."""
        return None

    @property
    def reply_header(self) -> bytes | None:
        """The only header of replies that its `headers_reader` reads, in lower case."""
        return None

    def headers_reader(self, clock: Clock) -> HeadersReader | None:
        """What reads a reply's headers for it."""
        return None

    def body_field(self) -> BodyField | None:
        """The field of requests' and replies' bodies that it is."""
        return None

    def event_reader(self) -> Callable[[Event], Iterator[str]] | None:
        """What reads server-sent events for it, on any route, beyond their JSON data."""
        return None

    def reply_opening(self) -> ReplyOpening | None:
        """What reads how replies of a shape of their own begin."""
        return None

    @property
    def learns(self) -> bool:
        """Whether replies can name a session in it."""
        return (
            self.headers_reader(SYSTEM_CLOCK) is not None
            or self.body_field() is not None
            or self.event_reader() is not None
            or self.reply_opening() is not None
        )

    def __str__(self) -> str:
        return self.spec


@dataclass(frozen=True, slots=True)
class HeaderSource(Source):
    """A request header; a reply's header of the same name makes a session known. Of two headers the first counts."""

    name: str

    @property
    def spec(self) -> str:
        return f"header:{self.name}"

    def head_reader(self, clock: Clock) -> HeadReader:
        name = self.name.encode("ascii")

        def read(scope: Scope, headers: Headers) -> str | None:
            for key, value in headers:
                if key == name:
                    return header_text(value)
            return None

        return read

    @property
    def reply_header(self) -> bytes:
        return self.name.encode("ascii")

    def headers_reader(self, clock: Clock) -> HeadersReader:
        name = self.name.encode("ascii")

        def read(headers: Headers) -> Sequence[str]:
            for key, value in headers:
                # An app may give its reply's header names in any case; a server lowers a request's only.
                if key == name or key.lower() == name:
                    return (header_text(value.strip(b" \t")),)
            return ()

        return read


@dataclass(frozen=True, slots=True)
class CookieSource(Source):
    """A cookie's text; the same cookie in a reply's `Set-Cookie` makes a session known. Of two cookies the later
    counts.
    """

    name: str

    @property
    def spec(self) -> str:
        return f"cookie:{self.name}"

    def head_reader(self, clock: Clock) -> HeadReader:
        name = self.name

        def read(scope: Scope, headers: Headers) -> str | None:
            value = cookie_value(name, headers)
            return None if value is None else cookie_text(value)

        return read

    @property
    def reply_header(self) -> bytes:
        return SET_COOKIE

    def headers_reader(self, clock: Clock) -> HeadersReader:
        def read(headers: Headers) -> Sequence[str]:
            return [cookie_text(value) for value in cookies_set(self.name, headers, clock)]

        return read


@dataclass(frozen=True, slots=True)
class SignedCookieSource(Source):
    """A key inside Starlette's signed session cookie, decoded exactly as the installed `SessionMiddleware` does."""

    name: str
    key: str
    secret: str = field(repr=False)
    max_age_seconds: int | None = SESSION_MAX_AGE_SECONDS

    @property
    def spec(self) -> str:
        return f"signed-cookie:{self.name}:{self.key}"

    def _reader(self, clock: Clock) -> SignedCookieReader:
        return SignedCookieReader(self.name, self.key, self.secret, max_age_seconds=self.max_age_seconds, clock=clock)

    def head_reader(self, clock: Clock) -> HeadReader:
        return self._reader(clock).read_head

    @property
    def reply_header(self) -> bytes:
        return SET_COOKIE

    def headers_reader(self, clock: Clock) -> HeadersReader:
        reader = self._reader(clock)

        def read(headers: Headers) -> Sequence[str]:
            found = map(reader.session_id, cookies_set(self.name, headers, clock))
            return [session for session in found if session is not None]

        return read


@dataclass(frozen=True, slots=True)
class QuerySource(Source):
    """A parameter of the query string. It may occur more than once with one value; two values are an error."""

    name: str

    @property
    def spec(self) -> str:
        return f"query:{self.name}"

    def head_reader(self, clock: Clock) -> HeadReader:
        name, name_bytes = self.name, self.name.encode("utf-8")

        def read(scope: Scope, headers: Headers) -> str | None:
            query: bytes = scope.get("query_string", b"")
            if not query or (name_bytes not in query and b"%" not in query and b"+" not in query):
                return None
            return query_value(name, query)

        return read


@dataclass(frozen=True, slots=True)
class PathSource(Source):
    """The segment `{session}` of the path below `root_path`, on the template and on everything beneath it."""

    template: str

    @property
    def spec(self) -> str:
        return f"path:{self.template}"

    def head_reader(self, clock: Clock) -> HeadReader:
        pattern = template_pattern(self.template, below=True)

        def read(scope: Scope, headers: Headers) -> str | None:
            found = pattern.match(path_below_root(scope))
            return None if found is None else found["session"]

        return read


@dataclass(frozen=True, slots=True)
class BodySource(Source):
    """A field of the JSON body on one route; the same field of that route's JSON reply, or of the JSON data of a
    server-sent event, makes a session known."""

    field: str
    route: Route

    @property
    def spec(self) -> str:
        return f"body:{self.field}@{self.route}"

    def body_field(self) -> BodyField:
        return _JsonField(self.route, tuple(self.field.split(".")))


@dataclass(frozen=True, slots=True)
class McpHandleSource(Source):
    """The argument `name` of an MCP `tools/call`; the same key of a tool's result makes a session known."""

    name: str
    route: Route

    @property
    def spec(self) -> str:
        return f"mcp-handle:{self.name}@{self.route}"

    def body_field(self) -> BodyField:
        return handles.McpHandle(self.route, self.name)


@dataclass(frozen=True)
class _JsonField:
    route: Route
    path: tuple[str, ...]

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(self.path)

    @property
    def reply_keys(self) -> frozenset[str]:
        return frozenset(self.path[-1:])

    def in_request(self, document: Json, headers: Headers) -> str | None:
        return field_text(document, self.path)

    def in_reply(self, document: Json) -> Iterator[str]:
        found = field_text(document, self.path)
        if found is not None:
            yield found


def query_value(name: str, query: bytes) -> str | None:
    """One parameter of a query string, decoded as Starlette decodes it; None if it is not there.

    Raises:
        BadRequestError: it has two different values, of which an app may take either.
    """
    values = query_values(name, query)
    if len(set(values)) > 1:
        raise BadRequestError("the query names its session twice, and differently")
    return values[0] if values else None


def query_values(name: str, query: bytes) -> list[str]:
    """Every value of one parameter of a query string, in order, decoded as Starlette decodes them."""
    return [value for key, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if key == name]
