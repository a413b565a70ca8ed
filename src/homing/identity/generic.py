"""Which session does a request of any ASGI app name? The first of its sources that names one.

Order: the sources as the user gave them, then the preset's, or before them where the preset says so. All share one kind: the same text from any of them is the
    same
session. On the declared route of a body source the body is always read, even if a source before it decides: the reply
may repeat what the body named, and only an ID that the app has just made may be learned.

Not here: what a source is (`sources`), and reading replies (`learned`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from homing.clock import SYSTEM_CLOCK, Clock
from homing.errors import BadRequestError, ConfigurationError
from homing.identity.base import Learner, Named, named_only
from homing.identity.body import MAX_BODY_BYTES, BodyReader, has_body
from homing.identity.documents import NOT_JSON, Json
from homing.identity.ids import HEAD_LENGTH_SCOPE_KEY, SURELY_FITS, fits, head_headers, session_id
from homing.identity.learned import ReplyLearner
from homing.identity.presets import Preset
from homing.identity.sources import BodyField, Headers, HeadReader, Source
from homing.identity.specs import parse_source
from homing.routes import Routes, path_below_root, request_method
from homing.types import Message, Receive, Scope, SessionId

_NOTHING = Named()


class SourcesIdentity:
    """Finds the session of each request of one app, and learns new ones from its replies.

    Keeps nothing of a request but a bounded number of decoded cookies. Borrows `scope` and `receive`.

    Args:
        sessions: The sources, in the order in which they are asked; each a `Source` or its spec.
        learn: Sources that are looked for in replies only.
        starts: Routes that start a session.
        ends: Routes that end the session they name.
        preset: A protocol's own sources and ends, asked after those above unless it says otherwise.
        max_body_bytes: The largest JSON body that is read, and the most of a reply that is held back.
        clock: Whose wall clock ages cookies.

    Raises:
        ConfigurationError: a source in `learn` cannot occur in a reply, or a spec is malformed.
    """

    def __init__(
        self,
        sessions: Iterable[Source | str] = (),
        learn: Iterable[Source | str] = (),
        starts: Routes | None = None,
        ends: Routes | None = None,
        preset: Preset | None = None,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        preset = preset or Preset("none")
        asked = _distinct([*preset.sessions, *sessions] if preset.first else [*sessions, *preset.sessions])
        learned_from = _distinct([*asked, *learn, *preset.learn])
        for source in learned_from:
            if source not in asked and not source.learns:
                raise ConfigurationError(
                    f"learn {source.spec!r}: no reply can name a session in it: write a header, cookie, signed-cookie, "
                    "body or mcp-handle source"
                )
        self.starts = _merged(starts, preset.starts)
        self.ends = _merged(ends, preset.ends)
        self._sources = asked
        self._max_body_bytes = max_body_bytes
        # In the order they are asked: a reader of the head, or a field of a body.
        self._asked: list[HeadReader | BodyField] = []
        self._heads: list[HeadReader] = []
        self._fields: list[BodyField] = []
        for source in asked:
            if (head := source.head_reader(clock)) is not None:
                self._asked.append(head)
                self._heads.append(head)
            if (field := source.body_field()) is not None:
                self._asked.append(field)
                self._fields.append(field)
        self._method_ends = {
            end.method: reader for end in preset.method_ends if (reader := end.source.head_reader(clock)) is not None
        }
        self._turns = bool(self.starts or self.ends or self._method_ends)
        """Whether a request's route or method can start or end its session."""
        self._reply_headers = [read for source in learned_from if (read := source.headers_reader(clock)) is not None]
        self._reply_fields = [field for source in learned_from if (field := source.body_field()) is not None]
        self._reply_events = [events for source in learned_from if (events := source.event_reader()) is not None]
        self._reply_openings = [opens for source in learned_from if (opens := source.reply_opening()) is not None]
        self._reply_header_names = tuple(
            {source.reply_header for source in learned_from if source.reply_header is not None}
        )
        self._reply_header_lengths = frozenset(map(len, self._reply_header_names))
        in_bodies = bool(self._reply_fields or self._reply_events or self._reply_openings)
        self.head_learner = self._learn_from_head if self._reply_header_names and not in_bodies else None
        self._body = BodyReader(max_body_bytes, {key for field in self._fields for key in field.keys})

    def from_head(self, scope: Scope) -> Named | None:
        """What the head says, or None if the request is on a route whose body has to be read first.

        Raises:
            SessionIdTooLongError: the session's ID is over 1,024 bytes long.
            BadRequestError: the query names its session twice, and differently.
        """
        if self._fields and scope["type"] == "http" and self._declared(self._fields, scope) and has_body(scope):
            return None
        # As `head_headers`, of which most requests have no need.
        headers: Headers = scope["headers"]
        head_length = scope.get(HEAD_LENGTH_SCOPE_KEY)
        if head_length is not None and head_length != len(headers):
            headers = head_headers(scope)
        for read in self._heads:
            text = read(scope, headers)
            if text:
                # Most are so short that nothing about them needs to be asked.
                if len(text) > SURELY_FITS:
                    session_id(text)
                return self._named(scope, headers, SessionId(text)) if self._turns else named_only(text)
        if not self._turns:
            return _NOTHING
        return self._named(scope, headers, None)

    async def from_body(self, scope: Scope, receive: Receive) -> tuple[Named, Receive]:
        """What head and body say, and a `receive` that gives the body once more and then the real events.

        A client that left half-way starts and ends nothing, and its body names nothing.

        Raises:
            BadRequestError: 400, 408, 413 or 415, as the subclass says.
            SessionConflictError: the body itself names different sessions.
            UnavailableError: 503, too much is being read at once.
        """
        body = await self._body.read(scope, receive)
        headers = head_headers(scope)
        document: Json = body.document if body.complete else NOT_JSON
        fields = self._declared(self._fields, scope)
        decided: SessionId | None = None
        in_body: list[str] = []
        for asked in self._asked:
            if not callable(asked):
                text = asked.in_request(document, headers) if asked in fields else None
                if text:
                    in_body.append(text)
            elif decided is None:
                text = asked(scope, headers)
            else:
                continue
            if text and decided is None:
                decided = session_id(text)
        also = tuple(SessionId(text) for text in in_body if text != decided and fits(text))
        if not body.complete:
            return Named(decided, also=also), body.receive
        return self._named(scope, headers, decided, also), body.receive

    def learner(self, scope: Scope, named: Named) -> Learner | None:
        """What reads this request's reply for new IDs; None where the reply can hold none, or on an end route."""
        if named.end:
            return None
        is_http = scope["type"] == "http"
        fields = self._declared(self._reply_fields, scope) if is_http and self._reply_fields else ()
        events = self._reply_events if is_http and scope["method"] == "GET" else ()
        openings = [opens for opens in self._reply_openings if opens.expected(scope)] if is_http else ()
        if not self._reply_headers and not fields and not events and not openings:
            return None
        return ReplyLearner(
            self._reply_headers,
            fields,
            events,
            openings,
            lambda: self._already_named(scope, named),
            has_body=is_http and scope["method"] != "HEAD",
            max_held_bytes=self._max_body_bytes,
        )

    def _learn_from_head(self, scope: Scope, named: Named, message: Message) -> Sequence[SessionId]:
        """`head_learner`: a glance at the names of the headers, and a learner only for a reply that has one of them."""
        headers = message.get("headers", ())
        names = self._reply_header_names
        if headers.__class__ is list or headers.__class__ is tuple:
            lengths = self._reply_header_lengths
            for name, _ in headers:
                if len(name) in lengths and name.lower() in names:
                    break
            else:
                return ()
        learner = self.learner(scope, named)
        return () if learner is None else learner.feed(message).session_ids

    def __repr__(self) -> str:
        return f"<SourcesIdentity {', '.join(source.spec for source in self._sources) or 'no sources'}>"

    def _named(
        self, scope: Scope, headers: Headers, decided: SessionId | None, also: tuple[SessionId, ...] = ()
    ) -> Named:
        start = self.starts.match(scope)
        end = self.ends.match(scope)
        if not end and decided is not None and self._method_ends:
            reader = self._method_ends.get(request_method(scope))
            end = reader is not None and reader(scope, headers) == decided
        return Named(decided, start, end, also=also)

    def _declared(self, fields: Sequence[BodyField], scope: Scope) -> Sequence[BodyField]:
        path, method = path_below_root(scope), request_method(scope)
        return [field for field in fields if field.route.matches(method, path)]

    def _already_named(self, scope: Scope, named: Named) -> Iterable[str]:
        """Every ID that the request names, in any of its sources and not only in the one that decided.

        A reply may repeat what the request said. Only an ID that the app made for this request is owned at the reply:
        one that the client chose may be another worker's by now.
        """
        headers = head_headers(scope)
        already: list[str] = [*named.also]
        if named.session_id is not None:
            already.append(named.session_id)
        for read in self._heads:
            try:
                text = read(scope, headers)
            except BadRequestError:
                continue
            if text:
                already.append(text)
        return already


def _distinct(sources: Iterable[Source | str]) -> tuple[Source, ...]:
    parsed = (parse_source(source) if isinstance(source, str) else source for source in sources)
    return tuple(dict.fromkeys(parsed))


def _merged(routes: Routes | None, texts: tuple[str, ...]) -> Routes:
    if routes is None:
        return Routes.parse(texts)
    if not texts:
        return routes
    return Routes((*routes.routes, *Routes.parse(texts).routes), rollout_prefix=routes.rollout_prefix)
