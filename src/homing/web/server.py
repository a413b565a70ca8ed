"""The HTTP surface of browser sessions: an ASGI app that routes itself, so several workers are like one.

The routes are those of `docs/reference/web-server.md`. A session is named by the signed session cookie that its seed sets;
a client may also name it itself in the seed's and the close's body (`_ng_session_id` with a secret token).

The invariant: only a seed makes a session. Every other route that names one which is not here says so (`session_lost`),
and one that names none gets 400; neither sets a cookie or leaves an owner record.

Not here: the sessions (`manager.py`), repeated seeds (`control.py`), and what a server is put together from
(`assembly.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import homing
from homing.clock import SYSTEM_CLOCK
from homing.errors import ConfigurationError
from homing.identity import SessionKind
from homing.routing import RoutingOptions, end, install_session_routing
from homing.routing.sticky import request_of
from homing.runtime.meeting import MeetingPlace
from homing.types import ASGIApp, Receive, Scope, Send
from homing.web.assembly import Assemble, SiteRule
from homing.web.control import SessionControl
from homing.web.envelopes import (
    CloseReply,
    CloseRequest,
    ErrorReply,
    EvaluateReply,
    EvaluateRequest,
    ObserveReply,
    ResetRequest,
    SeedRequest,
    StepReply,
    StepRequest,
    VerifyReply,
    VerifyRequest,
)
from homing.web.errors import BearerError, NoIdentityError, ReleaseError, SessionLostError, WebError
from homing.web.manager import WebSessionManager
from homing.web.models import SeedReply, SessionState, Task
from homing.web.opening import open_manager
from homing.web.replies import BodyLimit, add_error_replies, error_response, router_reply
from homing.web.settings import WebSettings

logger = logging.getLogger(__name__)

WEB: Final = SessionKind(
    cookie_key="session_id",
    id_field="_ng_session_id",
    seed_path="/seed_session",
    close_path="/close",
    cookie_session=True,
)
"""A web server's sessions."""

COOKIE_MAX_AGE_SECONDS: Final = 14 * 24 * 3600
IDENTITY_BOUND_KEY: Final = "web_identity_bound"

_OPEN_PATHS: Final = frozenset({"/", "/healthz", "/docs", "/redoc", "/openapi.json"})
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 409, 410, 413, 422, 502, 503, 504)
}


class WebServer:
    """Serves browser sessions. Picklable until it is first used, so that workers can be given it.

    Args:
        assemble: Opens backends, browsers and recordings in each worker.
        settings: How many sessions, how long.
        sites: How sites are shared, over all workers.
        name: Names this server beside others: in its cookie.
        bearer_token: What clients must send as `Authorization: Bearer …`; None: nothing.
        max_body_bytes: The largest body of a request.
        secret: Signs the cookie; None: one that the workers of this server share.
    """

    homing_routed: Final = True
    """What tells `homing run` that an app routes itself."""

    def __init__(
        self,
        assemble: Assemble,
        settings: WebSettings | None = None,
        *,
        sites: SiteRule | None = None,
        name: str = "server",
        bearer_token: str | None = None,
        max_body_bytes: int = 2**20,
        secret: str | None = None,
    ) -> None:
        if bearer_token is not None and not bearer_token:
            raise ConfigurationError("the bearer token is empty: give one, or leave it out")
        self.settings = WebSettings() if settings is None else settings
        self.name = name
        self._assemble = assemble
        self._sites = SiteRule() if sites is None else sites
        self._bearer_token = bearer_token
        self._max_body_bytes = max_body_bytes
        self._secret = secret
        self._meeting = MeetingPlace(f"{type(self).__module__}.{type(self).__qualname__} {name}")
        self._app: FastAPI | None = None
        self._manager: WebSessionManager | None = None
        self._control: SessionControl | None = None

    def __repr__(self) -> str:
        return f"<WebServer {self.name} {self._manager!r}>"

    @property
    def cookie_name(self) -> str:
        """The session cookie's name: `WebServer___<name>`."""
        return f"{type(self).__name__}___{self.name}"

    @property
    def manager(self) -> WebSessionManager:
        """This worker's sessions, while the server serves."""
        if self._manager is None:
            raise RuntimeError("the server does not serve")
        return self._manager

    @property
    def app(self) -> FastAPI:
        """The app, made when it is first needed: only then it is known how many workers there are."""
        if self._app is None:
            self._app = self._make_app()
        return self._app

    # --- ASGI ---

    def use_routing_options(self, options: RoutingOptions) -> None:
        """How this server runs; said before it starts.

        Raises:
            ConfigurationError: the app was made already.
        """
        self._meeting.options = options
        if self._app is not None:
            raise ConfigurationError(f"{self!r}.app was used before the server started")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    # --- making it ---

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with self._serving():
                yield

        app = FastAPI(title=f"Web sessions ({self.name})", version=homing.__version__, lifespan=lifespan)
        _Routes(self).add_to(app)
        add_error_replies(app)
        app.add_middleware(BodyLimit, max_body_bytes=self._max_body_bytes)
        if self._bearer_token is not None:
            app.add_middleware(_Bearer, token=self._bearer_token)
        secret = self._secret or self._meeting.secret()
        app.add_middleware(
            SessionMiddleware, secret_key=secret, session_cookie=self.cookie_name, max_age=COOKIE_MAX_AGE_SECONDS
        )
        install_session_routing(
            app,
            WEB,
            session_cookie=self.cookie_name,
            secret_key=secret,
            # As long as a fence is kept, a late seed has to find it: where the session was.
            close_retry_window_seconds=self.settings.idle_seconds,
            session_ends=("/verify",),
            max_body_bytes=self._max_body_bytes,
            error_reply=router_reply,
            **self._meeting.settings(),
        )
        return app

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """The app's life."""
        run_directory = self._meeting.directory()
        async with open_manager(
            self._assemble, self.settings, self._sites, run_directory, self._session_gone
        ) as self._manager:
            self._control = SessionControl(self._manager, SYSTEM_CLOCK, self.settings.idle_seconds)
            self._control.start()
            try:
                yield
            finally:
                await self._control.aclose()

    def _session_gone(self, session_id: str) -> None:
        """However it ended: its owner is kept for the window from now on, so that late calls learn why."""
        router = self.app.state.homing_router
        if router.worker is not None and router.worker.owners.mine(session_id):
            router.lifetimes.ended(session_id)


class _Routes:
    """The routes of one server."""

    def __init__(self, server: WebServer) -> None:
        self._server = server

    def add_to(self, app: FastAPI) -> None:
        def post(path: str, handler: Callable[..., Any], reply: type) -> None:
            app.post(path, response_model=reply, responses=_ERRORS)(handler)

        def get(path: str, handler: Callable[..., Any], reply: Any) -> None:
            app.get(path, response_model=reply, responses=_ERRORS)(handler)

        post("/seed_session", self.seed_session, SeedReply)
        post("/reset", self.reset, SeedReply)
        post("/step", self.step, StepReply)
        post("/evaluate", self.evaluate, EvaluateReply)
        post("/close", self.close, CloseReply)
        post("/verify", self.verify, VerifyReply)
        get("/session", self.session, SessionState)
        get("/observe", self.observe, ObserveReply)
        get("/healthz", self.healthz, dict[str, Any])
        get("/", self.healthz, dict[str, Any])

    async def seed_session(self, request: Request, body: SeedRequest) -> Response:
        """Make the session: acquire its site and browser, begin its task. Sent again, it gives the same."""
        server = self._server
        assert server._control is not None
        session_id = request_of(request.scope).session_id
        assert session_id is not None
        try:
            if body.close_token is None:
                server._control.refuse_fenced(session_id)
                reply = await self._seed_while_there(request, session_id, body.task)
            else:
                reply = await server._control.seed(session_id, body.close_token.get_secret_value(), body.task)
        except WebError:
            if body.close_token is not None:
                # What is remembered of this seed is here, so its owner is kept for the window.
                end(request.scope)
            raise
        if body.close_token is not None:
            request.session[IDENTITY_BOUND_KEY] = True
        return _json(reply)

    async def _seed_while_there(self, request: Request, session_id: str, task: Task) -> SeedReply:
        """Seed for a client that will know its session by the reply's cookie only: if it leaves before the reply, nobody
        could ever use the session or close it, so it is not made.

        Raises:
            ClientDisconnect: it left.
            WebError: what became of the seed.
        """
        manager = self._server.manager
        seed = asyncio.create_task(manager.seed_session(session_id, task), name="seed for a cookie")
        left = asyncio.create_task(_until_left(request.receive), name="watch a seed's client")
        try:
            await asyncio.wait((seed, left), return_when=asyncio.FIRST_COMPLETED)
            if not left.done():
                return await seed
            if not seed.done():
                raise ClientDisconnect
            await manager.close_session(session_id)
            raise ClientDisconnect
        finally:
            for each in (seed, left):
                each.cancel()
            await asyncio.wait((seed, left))

    async def reset(self, request: Request, body: ResetRequest) -> Response:
        """Begin the session's task again, perhaps in another variation."""
        return _json(await self._server.manager.reset_session(self._named(request), body.task))

    async def step(self, request: Request, body: StepRequest) -> Response:
        """Do one action."""
        result = await self._server.manager.step(self._named(request), body.operation_id, body.action)
        return _json(StepReply.model_construct(**dict(result), operation_id=body.operation_id))

    async def observe(self, request: Request) -> Response:
        """What there is to see now."""
        return _json(ObserveReply.model_construct(observation=await self._server.manager.observe(self._named(request))))

    async def evaluate(self, request: Request, body: EvaluateRequest) -> Response:
        """The verdict: the first one, however often it is asked for."""
        verdict = await self._server.manager.evaluate(self._named(request), body.final_answer)
        return _json(EvaluateReply.model_construct(result=verdict))

    async def session(self, request: Request) -> Response:
        """What there is to say about the session, without keeping it alive."""
        return _json(await self._server.manager.session_status(self._named(request)))

    async def close(self, request: Request, body: CloseRequest | None = None) -> Response:
        """End the session. Sent again, it succeeds again; 503 means that something is kept and tried again."""
        server = self._server
        assert server._control is not None
        if body is not None and body.session_id is not None and body.close_token is not None:
            session_id = body.session_id
            await server._control.close(session_id, body.close_token.get_secret_value())
        else:
            session_id = self._named(request)
            await server._control.close_by_cookie(session_id)
        artifacts = await server.manager.recording_artifacts(session_id)
        failure = server.manager.failure_of(session_id)
        return _json(
            CloseReply(
                closed=True,
                session_id=session_id,
                recording_artifacts=artifacts,
                failure_kind=None if failure is None else failure.error_kind,
                failure_reason=None if failure is None else failure.line,
            )
        )

    async def verify(self, request: Request, body: VerifyRequest) -> Response:
        """Evaluate, and close whatever came of that. A failure masks the sample; it is no reward of 0."""
        server = self._server
        assert server._control is not None
        session_id = self._named(request)
        told: dict[str, Any] = {**body.model_extra} if body.model_extra else {}
        try:
            verdict = await server.manager.evaluate(session_id, body.final_answer)
            told |= {
                "reward": verdict.reward,
                "mask_sample": not verdict.valid_sample,
                "failure_kind": verdict.failure_kind,
                "result": verdict,
            }
        except WebError as error:
            told |= {
                "reward": 0.0,
                "mask_sample": True,
                "failure_kind": error.error_kind,
                "failure_reason": error.shown,
            }
        try:
            await server._control.close_by_cookie(session_id)
        except ReleaseError as error:
            told |= {"cleanup_failure_kind": error.error_kind, "cleanup_failure_reason": error.shown}
        return _json(VerifyReply(**told))

    async def healthz(self) -> Response:
        """This worker's state: what it has, and what it could not release yet."""
        health = await self._server.manager.health()
        told = {**health, "server": self._server.name, "worker": self._server.app.state.homing_routing_id}
        return Response(_dumped(told), 200 if health["status"] == "ok" else 503, media_type="application/json")

    def _named(self, request: Request) -> str:
        """The session that the request names.

        Raises:
            NoIdentityError: none.
            SessionLostError: a cookie that this server did not sign, or that is too old: an earlier server's session.
        """
        named = request_of(request.scope).named.session_id
        if named is not None:
            return named
        if self._server.cookie_name in request.cookies:
            raise SessionLostError("the session is gone: start a new one")
        raise NoIdentityError


class _Bearer:
    """Asks for the bearer token, but for who looks whether the server is alive."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
                await error_response(BearerError())(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")


def _dumped(content: Any) -> bytes:
    return to_json(content)
