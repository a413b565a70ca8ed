"""The router: finds a request's session, looks up its owner, and serves the request here or forwards it there.

One request's way is `__call__`: identify, route (look up, decide, act), serve. The invariant: between the last look at a
session's record and the handler there is no `await`, and a request that came from a peer is never passed on (the test
mode's scattered one excepted).

Not here: what a request says (`homing.identity`), who owns what (`homing.directory`), the hop (`homing.forwarding`), how
long ownership lasts (`homing.lifetime`); and what a worker has open (`worker.py`).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from homing.errors import HomingError, ReplyCutError, ReplyError
from homing.forwarding.base import HOP_SCOPE_KEY, WHOLE_BODY_SCOPE_KEY, Hop
from homing.forwarding.heads import crossable_extensions
from homing.forwarding.replay import replayable
from homing.identity import HeadLearner, Identity, Learner, Named
from homing.lifetime import ENDED_SCOPE_KEY
from homing.lifetime.base import SessionLifetimes
from homing.routing.answers import answer
from homing.routing.lifespan import run_lifespan
from homing.routing.notes import named_from
from homing.routing.policy import Policy
from homing.routing.request import (
    REQUEST_SCOPE_KEY,
    SESSION_ACQUIRE_SCOPE_KEY,
    SESSION_ID_SCOPE_KEY,
    RoutedRequest,
    new_session_id,
)
from homing.routing.root_path import app_with_root_path
from homing.routing.route import LOOKS, Routing, enter_here, forward_at_once, owned_elsewhere
from homing.routing.worker import Worker, fresh_worker_id
from homing.types import (
    ASGIApp,
    Message,
    Reason,
    Receive,
    Scope,
    Send,
    SessionId,
    WorkerId,
    session_tag,
    with_lasting_headers,
)

ABORT_SCOPE_KEY: Final = "homing.abort"
"""Set by `homing run`'s protocol class: aborts the client's connection, for a reply that was cut."""

CLIENT_LEFT_SCOPE_KEY: Final = "homing.client_left"
"""Set by `homing run`'s protocol class, where starts may wait: returns, once awaited, when the client has left."""

FORWARDED_SCOPE_KEY: Final = "homing.forwarded"
"""Set by `homing run`'s protocol class: told the owner that has handled a request whose session its head named."""


class SessionRoutingMiddleware:
    """Route each request to the worker that holds its session. An ASGI app around an ASGI app.

    Args:
        app: What serves the requests; it is called at the worker that owns the session, and never knows.
        identity: Which session a request names.
        lifetimes: How long a worker keeps a session.
        policy: How sessions are treated.
        socket_dir: Makes or finds the run directory, once the worker starts; None: one worker, nothing is routed, and
            only identity is checked (400, 409).
        leave_dir: Called with the run directory's path once the worker has closed.
        app_name: Tells this app from others in the same run directory; None: it has the directory to itself.
        on_open: Called with the worker once it has opened, before it serves.
    """

    homing_routed: Final = True
    """What tells `homing run` that an app routes itself."""

    def __init__(
        self,
        app: ASGIApp,
        identity: Identity,
        lifetimes: SessionLifetimes,
        policy: Policy,
        *,
        socket_dir: Callable[[], str] | None,
        leave_dir: Callable[[str], None] | None = None,
        app_name: str | None = None,
        entry: ASGIApp | None = None,
        drop: Callable[[str], None] | None = None,
        on_open: Callable[[Worker], None] | None = None,
    ) -> None:
        self.app = app
        self.identity = identity
        self.lifetimes = lifetimes
        self.policy = policy
        self.worker: Worker | None = None
        self._socket_dir = socket_dir
        self._leave_dir = leave_dir
        self._app_name = app_name
        self._entry = entry
        self._drop = drop
        self._on_open = on_open
        self._state: dict[str, Any] | None = None
        self._context: contextvars.Context | None = None
        self._fresh = fresh_worker_id()
        self._judges_routes = lifetimes.judges_routes
        self._with_root_path = app_with_root_path(app)
        # Where nothing is routed, nothing is recorded, so nothing has to be learned.
        self._identity_of_replies = identity if self.routes else None

    def __repr__(self) -> str:
        return f"<SessionRoutingMiddleware {self.worker!r}>"

    # --- the worker's life ---

    async def open(self) -> None:
        """Open this worker, unless it is the only one. The server calls this once, when the app has started."""
        if self._socket_dir is None:
            return
        worker = Worker(
            self._socket_dir(),
            self.worker_id,
            self.lifetimes,
            owner_timeout_seconds=self.policy.owner_timeout_seconds,
            graceful_seconds=self.policy.graceful_seconds,
            app=self._app_name,
            drop=self._drop,
            placing=self.policy.placing,
            limited=self.policy.max_sessions is not None,
        )
        await worker.open(
            self._entry or self,
            state=lambda: self._state,
            context=self._context,
            backlog=self.policy.backlog,
            sweep_seconds=self.policy.sweep_seconds,
        )
        if self._on_open is not None:
            self._on_open(worker)
        self.worker = worker

    async def aclose(self) -> None:
        """Drain and close the worker. Safe to call twice."""
        if self.worker is not None:
            worker = self.worker
            try:
                await worker.drain()
            finally:
                # Until its private socket is closed, other workers may still send requests here, and they are served.
                try:
                    await worker.aclose()
                finally:
                    self.worker = None
                    if self._leave_dir is not None:
                        self._leave_dir(worker.run_directory.path)

    @property
    def worker_id(self) -> WorkerId:
        """This worker's ID; a process that was forked since gets one of its own."""
        if self._fresh[1] != os.getpid():
            self._fresh = fresh_worker_id()
        return self._fresh[0]

    @property
    def routes(self) -> bool:
        """Whether requests are routed at all: the server may have several workers."""
        return self._socket_dir is not None

    def served_now(self, session_id: str) -> int:
        """How many requests of the session are being served here."""
        return 0 if self.worker is None else self.worker.owners.served_now(session_id)

    def use_lifespan(self, state: dict[str, Any] | None, context: contextvars.Context) -> None:
        """What a request from another worker gets as its own server would give it: a copy of the lifespan's state, and
        of the context that the server had before the app could set anything in it."""
        self._state = state
        self._context = context

    # --- one request's way ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await run_lifespan(self, scope, receive, send)
            return
        if kind not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        hop: Hop | None = scope.pop(HOP_SCOPE_KEY, None)
        undecided = hop
        # The scope as the app's routes see it: where the app sets its `root_path` by itself, it will.
        seen = scope
        if self._with_root_path is not None and self._with_root_path.root_path:
            seen = {**scope, "root_path": self._with_root_path.root_path}
        cut: Callable[[], None] | None = scope.pop(ABORT_SCOPE_KEY, None)
        forwarded: Callable[[WorkerId], None] | None = scope.pop(FORWARDED_SCOPE_KEY, None)
        named: Named | None = None
        if hop is not None and (self.worker is None or self.worker.drained):
            # It would be cut off, and nothing has run: its sender looks again, until this worker is gone.
            hop.not_mine()
            return
        try:
            if hop is None:
                named = self.identity.from_head(seen)
                if named is None:
                    forwarded = None
                    named, receive = await self.identity.from_body(seen, receive)
            else:
                named = named_from(hop.note)
                if hop.reason is Reason.SCATTERED:
                    # As if a client had sent it here: this worker's to answer, wherever it is then served.
                    hop.mine()
                    undecided = None
            request: RoutedRequest | None
            worker = self.worker
            if worker is None:
                request = self._alone(named, scope)
            else:
                client_left = None if worker.placement is None else scope.pop(CLIENT_LEFT_SCOPE_KEY, None)
                request = None if self.policy.scatter else enter_here(worker, named)
                if request is None:
                    looks = LOOKS
                    owner = owned_elsewhere(worker, named) if hop is None and not self.policy.scatter else None
                    if owner is not None:
                        receive = replayable(receive)
                        if await forward_at_once(worker, owner, named, scope, receive, send):
                            if forwarded is not None:
                                forwarded(owner)
                            return
                        looks -= 1
                    routing = Routing(worker, self.policy, named, hop, scope, receive, send, client_left)
                    request = await routing.route(looks)
                    if request is None and forwarded is not None and routing.forwarded_to is not None:
                        forwarded(routing.forwarded_to)
                    receive = routing.receive
        except ReplyError as error:
            if undecided is not None:
                undecided.mine()
            if self.worker is not None and error.is_heard:
                self.worker.answers[error.code] += 1
                if hop is not None:
                    self.worker.peer_answers[error.code] += 1
            policy = self.policy
            await answer(
                error,
                scope,
                send,
                gone_status=policy.gone_status,
                gone_reply=policy.gone_reply,
                shape=policy.error_reply,
                session=None if named is None or named.session_id is None else session_tag(named.session_id),
            )
            return
        except ReplyCutError:
            if kind == "websocket":
                return  # closed with 1011 by the forwarder
            if cut is None:
                raise
            await abort(cut)
            return
        if request is None:
            return
        if undecided is not None:
            undecided.mine()

        # Serve it: run the handler, let its reply pass, and record what became of the session. Not a method of its own,
        # since that would be one more coroutine for every event to pass through.
        if scope.get("extensions"):
            scope["extensions"] = crossable_extensions(scope)
        # An app that mounts others, or strips a prefix, may change its scope in place: where the route will be judged once
        # the app is done, it is judged by a copy.
        arrived = dict(seen) if self._judges_routes or named.start or named.end else scope
        scope.pop(WHOLE_BODY_SCOPE_KEY, None)
        scope[REQUEST_SCOPE_KEY] = request
        if request.session_id is not None:
            scope[SESSION_ID_SCOPE_KEY] = request.session_id
            scope[SESSION_ACQUIRE_SCOPE_KEY] = request.acquire
        watch = ReplyWatch(request, seen, self._identity_of_replies, send, self.policy.sees_use)
        if worker is not None:
            worker.served += 1
            worker.serving += 1
            if hop is not None:
                worker.received += 1
        failed = True
        try:
            await self.app(scope, receive, watch.send)
            failed = False
        except BaseException as error:
            # A handler that raises after its whole reply has done what it said, whatever it raises (SystemExit too).
            failed = request.unrecorded is not None or not watch.complete
            if request.unrecorded is None or not isinstance(error, Exception):
                raise
        finally:
            if scope.get(ENDED_SCOPE_KEY):
                request.end()
            if worker is not None:
                worker.serving -= 1
            request.leave(arrived, failed=failed)
        if request.unrecorded is not None:
            if not watch.begun:
                await answer(request.unrecorded, scope, send, shape=self.policy.error_reply)
            elif cut is None:
                raise ReplyCutError("the reply made a session known that could not be recorded")
            else:
                await abort(cut)

    def _alone(self, named: Named, scope: Scope) -> RoutedRequest:
        if self.routes:
            # Starlette's and FastAPI's routers, which put themselves into the scope, give no lifespan to what they mount.
            hint = (
                "it is mounted in another app, which hands it none, so wrap the outermost app with homing.sticky instead"
                if "router" in scope
                else "leave out `--lifespan off`, and wrap the outermost app, since one that is mounted gets none"
            )
            raise HomingError(
                f"a request came before this worker's start-up: homing.sticky needs the server's lifespan events; {hint}"
            )
        session_id = named.session_id
        if session_id is None and named.mints:
            session_id = new_session_id()
        return RoutedRequest(None, named, session_id)


_HEADS: Final = ("http.response.start", "websocket.accept")

_SendT = TypeVar("_SendT", bound=Callable[..., Awaitable[None]])


def _marked_as_coroutine_function(function: _SendT) -> _SendT:
    """Some libraries (asgiref) warn of a `send` that does not say that it is to be awaited."""
    mark = getattr(inspect, "markcoroutinefunction", None)
    if mark is not None:
        mark(function)
    else:  # Python 3.11
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return function


class ReplyWatch:
    """Stands between a handler and the server: lets a session's ID pass only once its owner is on record.

    The app is given `send`. It is no coroutine function, so that most events cost no coroutine beyond the server's own:
    what it returns is awaited as if it were one.

    Args:
        identity: Learns from the reply; None: nothing is learned.

    Attributes:
        begun: Something of the reply has left.
        complete: All of it has.
    """

    __slots__ = ("_head_learner", "_learner", "_request", "_scope", "_sees_use", "_send", "begun", "complete")

    def __init__(
        self, request: RoutedRequest, scope: Scope, identity: Identity | None, send: Send, sees_use: bool
    ) -> None:
        self._request = request
        self._scope = scope
        self._send = send
        self._sees_use = sees_use
        self._learner: Learner | None = None
        self._head_learner: HeadLearner | None = None
        if identity is not None:
            self._head_learner = identity.head_learner
            if self._head_learner is None:
                self._learner = identity.learner(scope, request.named)
        self.begun = self.complete = False

    @_marked_as_coroutine_function
    def send(self, message: Message) -> Awaitable[None]:
        """As the server's `send`, of which everything that leaves is handed on to.

        Raises (once awaited):
            SessionNotRecordedError: the reply made a session known that could not be recorded; nothing leaves any more.
        """
        request = self._request
        if self._learner is not None or request.unrecorded is not None:
            return self._send_learning(message)
        if message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
            return self._send(message)
        if not self.begun and self._head_learner is not None and message["type"] in _HEADS:
            message = with_lasting_headers(message)
            learned = self._head_learner(self._scope, request.named, message)
            if learned:
                return self._send_after(learned, message)
        self._note(message)
        return self._send(message)

    async def _send_learning(self, message: Message) -> None:
        if self._request.unrecorded is not None:
            raise self._request.unrecorded
        assert self._learner is not None
        if self._learner.done:
            self._learner = None
            self._note(message)
            await self._send(message)
            return
        learned = self._learner.feed(message)
        await self._send_after(learned.session_ids, *learned.messages)

    async def _send_after(self, session_ids: Sequence[SessionId], *messages: Message) -> None:
        if session_ids:
            self._request.learn(session_ids)
        for each in messages:
            self._note(each)
            await self._send(each)

    def _note(self, message: Message) -> None:
        kind, request = message["type"], self._request
        if kind == "http.response.start":
            self.begun = True
            request.status = status = message["status"]
            if status < 400 and not self._sees_use:
                request.used = True
        elif kind == "http.response.body":
            self.complete = not message.get("more_body", False)
        elif kind == "websocket.accept":
            self.begun = True
            request.status = 101
            if not self._sees_use:
                request.used = True
        elif kind in ("websocket.close", "websocket.http.response.body"):
            self.begun = self.complete = True
        elif kind == "websocket.http.response.start":
            self.begun = True
            request.status = message["status"]


async def abort(cut: Callable[[], None]) -> None:
    """Abort the client's connection, so that a cut reply cannot look complete.

    Only `homing run`'s protocol class offers this. Another server is told of an error, and closes the connection, which
    shows a cut in a reply with a length or in chunks.
    """
    cut()
    # The server hears of it in the loop's next turns, and then takes the missing rest for what it is.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
