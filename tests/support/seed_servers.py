"""A resources server and an agent server in the seeds' way, and several workers of one of them in this process.

Each worker is a uvicorn server with a public port of its own, on one event loop; they share a run directory, so a test
chooses which worker a request arrives at. `install_session_routing` is all the routing they have.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn
import websockets.asyncio.client as websockets
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from itsdangerous import TimestampSigner, URLSafeSerializer
from starlette.middleware.sessions import SessionMiddleware

from homing import (
    AGENT,
    RESOURCES,
    SESSION_ACQUIRE_SCOPE_KEY,
    SESSION_ID_SCOPE_KEY,
    SESSION_OWNERS_DIR,
    install_session_routing,
)
from homing.lifetime.records import OwnershipReleaser
from homing.routes import ROLLOUT_PATH_PREFIX
from homing.routing import SessionRoutingMiddleware, Worker
from homing.routing.sweeper import sweep
from homing.types import ASGIApp, Receive, Scope, Send

COOKIE: Final = "Counter___srv"
SECRET: Final = "Counter___srv"
WINDOW_SECONDS: Final = 300.0
"""The close retry window, which nothing here sets: it is the default."""
TOKEN_HEADER: Final = "X-Test-Session-Token"
TOKENS: Final = URLSafeSerializer(SECRET, salt="tests-mcp-session-token")
CLOSE_FOLLOWS: Final = "x-ng-close-follows"


class ManualClock:
    """Monotonic time stands still until it is moved; the wall clock is the machine's, which signs the cookies.

    Attributes:
        wall_is_ahead_seconds: By how much somebody has set the wall clock forward.
    """

    def __init__(self) -> None:
        self._now = 1000.0
        self.wall_is_ahead_seconds = 0.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return time.time() + self.wall_is_ahead_seconds

    def advance(self, seconds: float) -> None:
        self._now += seconds


class StripRollout:
    """Takes `/ng-rollout/<id>` off the path, in place, as a rollout server's own middleware may."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"/{ROLLOUT_PATH_PREFIX}/"):
            rest = scope["path"].split("/", 3)[3]
            scope["path"] = "/" + rest.removeprefix("training-token-capture/")
        await self.app(scope, receive, send)


class NotePaths:
    """Appends the path of each request that came as far as the app."""

    def __init__(self, app: ASGIApp, paths: list[str]) -> None:
        self.app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._paths.append(scope["path"])
        await self.app(scope, receive, send)


# --- a resources server ---


class Resources:
    """A resources server's state on one worker.

    Attributes:
        sessions: Episode and count of each open session.
        fences: Closed sessions, and until when each is refused.
        allocations, releases: How often a session was made and let go.
        handled: The paths whose handler ran.
        entered, proceed: `/slow` sets the one and waits for the other.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.sessions: dict[str, dict[str, Any]] = {}
        self.fences: dict[str, float] = {}
        self.allocations = 0
        self.releases = 0
        self.handled: list[str] = []
        self.entered = asyncio.Event()
        self.proceed = asyncio.Event()

    def fenced(self, session_id: str) -> bool:
        return self.fences.get(session_id, 0.0) > self.clock.monotonic()


def _reply(request: Request, status: int = 200, **content: Any) -> Response:
    found = json.dumps({"worker": request.app.state.homing_routing_id, **content})  # ASCII, whatever an ID holds
    return Response(found, status_code=status, media_type="application/json")


async def _body(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        found = json.loads(raw) if raw else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def resources_app(clock: ManualClock) -> FastAPI:
    """A counter in the seeds' way. `request.session["session_id"]` is the ID its state is kept under."""
    app = FastAPI()
    state = app.state.resources = Resources(clock)

    @app.get("/")
    async def health(request: Request) -> Response:
        return _reply(request)

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(request: Request) -> Response:
        return _reply(request, metrics={})

    @app.post("/seed_session")
    async def seed_session(request: Request) -> Response:
        body = await _body(request)
        if body.get("fail") == "unused":
            return _reply(request, 503)
        session_id = request.session["session_id"]
        if body.get("fail"):
            return _reply(request, 500)
        if state.fenced(session_id):
            return _reply(request, 409, refused="closed")
        open_session = state.sessions.get(session_id)
        if open_session is None:
            state.allocations += 1
            open_session = state.sessions[session_id] = {"episode": body.get("episode_id"), "count": 0}
        elif open_session["episode"] != body.get("episode_id"):
            return _reply(request, 409, refused="another episode")
        return _reply(request, resources_session_id=session_id)

    @app.post("/close_session")
    async def close_session(request: Request) -> Response:
        session_id = request.session["session_id"]
        if (await _body(request)).get("fail"):
            return _reply(request, 500)
        if state.sessions.pop(session_id, None) is not None:
            state.releases += 1
        state.fences[session_id] = clock.monotonic() + WINDOW_SECONDS
        return _reply(request, resources_session_id=session_id)

    @app.post("/increment_counter")
    async def increment_counter(request: Request) -> Response:
        session = state.sessions.get(request.session["session_id"])
        if session is None:
            return _reply(request, 404, lost=True)
        session["count"] += 1
        return _reply(request, count=session["count"])

    @app.post("/verify")
    async def verify(request: Request) -> Response:
        session = state.sessions.get(request.session["session_id"])
        return _reply(request, reward=float(session["count"]) if session else 0.0, mask_sample=session is None)

    @app.post("/reset")
    async def reset(request: Request) -> Response:
        # It starts a session without looking at the mapping: the router tells it the ID.
        session_id = request.scope[SESSION_ID_SCOPE_KEY]
        state.sessions[session_id] = {"episode": None, "count": 0}
        return _reply(request, session_id=session_id)

    @app.options("/reset")
    async def preflight(request: Request) -> Response:
        return _reply(request)

    @app.post("/broken_reset")
    async def broken_reset(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError("the test wants this stream to break")

        return StreamingResponse(parts())

    @app.get("/session")
    async def session(request: Request) -> Response:
        return _reply(request, session=dict(request.session))

    @app.get("/peek")
    async def peek(request: Request) -> Response:
        return _reply(request, status=int(request.query_params.get("status", 200)), seen=request.session.get("nothing"))

    @app.post("/acquire")
    async def acquire(request: Request) -> Response:
        # A handler that hands the ID out by itself, without the mapping.
        request.scope[SESSION_ACQUIRE_SCOPE_KEY]()
        session_id = request.scope[SESSION_ID_SCOPE_KEY]
        owner = request.app.state.homing_router.worker.owners.owner(session_id)
        return _reply(request, session_id=session_id, owner=owner)

    @app.post("/note")
    async def write(request: Request) -> Response:
        request.session.update(await _body(request))
        return _reply(request)

    @app.post("/slow")
    async def slow(request: Request) -> Response:
        name = request.session["session_id"]
        seen = dict(request.session)
        state.entered.set()
        await state.proceed.wait()
        return _reply(request, session_id=name, session=seen)

    @app.post("/terminal_step")
    async def terminal_step(request: Request) -> Response:
        # A session end under another name.
        request.app.state.homing_router.lifetimes.ended(request.session["session_id"])
        return _reply(request)

    @app.post("/mcp")
    @app.post("/mcp/tools")
    async def mcp(request: Request) -> Response:
        try:
            token = TOKENS.loads(request.headers[TOKEN_HEADER])
        except Exception:
            return _reply(request, 401, session=dict(request.session))
        return _reply(request, sid=token.get("sid"), session=dict(request.session))

    @app.websocket("/socket")
    async def socket_(websocket: WebSocket) -> None:
        session_id = websocket.session["session_id"]
        await websocket.accept()
        await websocket.send_json({"worker": app.state.homing_routing_id, "session_id": session_id})
        await websocket.close()

    mounted = FastAPI()

    @mounted.post("/start")
    async def start(request: Request) -> Response:
        return JSONResponse({"session_id": request.session["session_id"]})

    app.mount("/games", mounted)
    app.add_middleware(NotePaths, paths=state.handled)
    app.add_middleware(StripRollout)
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE)
    return app


def install_resources(
    app: FastAPI, socket_dir: str | Callable[[], str] | None, clock: ManualClock, **settings: Any
) -> str | None:
    settings.setdefault("drop", lambda session_id: app.state.resources.sessions.pop(session_id, None))
    return install_session_routing(
        app,
        RESOURCES,
        socket_dir,
        COOKIE,
        SECRET,
        mcp_token_header=TOKEN_HEADER,
        mcp_token_serializer=TOKENS,
        session_starts=("POST /reset", "/broken_reset", "/games/start"),
        session_ends=("/verify",),
        close_follows_header=CLOSE_FOLLOWS,
        **{"clock": clock, **settings},
    )


# --- an agent server ---


class Agent:
    """An agent server's sessions on one worker: an `AgentSessionHolder`."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.records: dict[str, dict[str, Any]] = {}
        self.handled: list[str] = []
        self.owners: OwnershipReleaser | None = None
        self.entered = asyncio.Event()
        self.proceed = asyncio.Event()

    def holds_agent_session(self, agent_session_id: str) -> bool:
        return agent_session_id in self.records

    def ended_agent_sessions(self) -> set[str]:
        return {each for each, record in self.records.items() if record["state"] != "open"}

    def use_agent_session_owners(self, owners: OwnershipReleaser) -> None:
        self.owners = owners

    def expire_agent_session_records(self) -> None:
        assert self.owners is not None
        now = self.clock.monotonic()
        for session_id in [each for each, record in self.records.items() if record.get("until", now + 1) <= now]:
            del self.records[session_id]
            self.owners.release(session_id)

    def write(self, session_id: str, state: str, rollout: str | None) -> None:
        self.records[session_id] = {"state": state, "rollout": rollout}
        if state != "open":
            self.records[session_id]["until"] = self.clock.monotonic() + WINDOW_SECONDS


def agent_app(clock: ManualClock) -> FastAPI:
    app = FastAPI()
    agent = app.state.agent = Agent(clock)

    def rollout_in(body: dict[str, Any]) -> str | None:
        episode = body.get("episode_id")
        return episode.get("rollout_id") if isinstance(episode, dict) else None

    @app.get("/")
    async def health(request: Request) -> Response:
        return _reply(request)

    @app.post("/v1/agent_sessions")
    async def seed(request: Request) -> Response:
        body = await _body(request)
        session_id = body.get("agent_session_id")
        if not isinstance(session_id, str) or not session_id:
            return _reply(request, 422)
        if body.get("wait"):
            agent.entered.set()
            await agent.proceed.wait()
        if body.get("fail") == "kept":
            agent.write(session_id, "failed", rollout_in(body))
            return _reply(request, 500)
        if body.get("fail"):
            return _reply(request, 500)
        record = agent.records.get(session_id)
        if record is not None and record["state"] != "open":
            return _reply(request, 409, refused=record["state"])
        if record is not None and record["rollout"] != rollout_in(body):
            return _reply(request, 409, refused="another seed")
        agent.write(session_id, "open", rollout_in(body))
        return _reply(request, agent_session_id=session_id)

    @app.post("/v1/agent_sessions/close")
    async def close(request: Request) -> Response:
        session_id = (await _body(request))["agent_session_id"]
        agent.write(session_id, "closed", None)
        return _reply(request, agent_session_id=session_id)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        session_id = request.session.get("agent_session_id")
        record = agent.records.get(session_id or "")
        if record is None or record["state"] != "open":
            return _reply(request, 409, agent_session_id=session_id)
        return _reply(request, agent_session_id=session_id)

    @app.post("/run")
    async def run(request: Request) -> Response:
        return _reply(request, owner_header=request.headers.get("x-ng-session-owner"), session=dict(request.session))

    @app.post("/rollouts/{rollout}/stop")
    async def stop(request: Request, rollout: str) -> Response:
        running = [each for each in agent.records.values() if each["state"] == "open" and each["rollout"] == rollout]
        return _reply(request, stopped=bool(running))

    app.add_middleware(NotePaths, paths=agent.handled)
    app.add_middleware(StripRollout)
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE)
    return app


def install_agent(app: FastAPI, socket_dir: str | None, clock: ManualClock, **settings: Any) -> str | None:
    settings.setdefault("drop", lambda session_id: app.state.agent.records.pop(session_id, None))
    return install_session_routing(
        app, AGENT, socket_dir, COOKIE, SECRET, agent_sessions=app.state.agent, **{"clock": clock, **settings}
    )


# --- workers ---


class SeedWorker:
    """One worker, and a client that keeps no cookies."""

    def __init__(self, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.app = app
        self._client = client

    @property
    def id(self) -> str:
        found = self.app.state.homing_routing_id
        assert isinstance(found, str)
        return found

    @property
    def router(self) -> SessionRoutingMiddleware:
        found = self.app.state.homing_router
        assert isinstance(found, SessionRoutingMiddleware)
        return found

    @property
    def worker(self) -> Worker:
        assert self.router.worker is not None
        return self.router.worker

    @property
    def resources(self) -> Resources:
        found = self.app.state.resources
        assert isinstance(found, Resources)
        return found

    @property
    def agent(self) -> Agent:
        found = self.app.state.agent
        assert isinstance(found, Agent)
        return found

    def owner(self, session_id: str) -> str | None:
        return self.worker.owners.owner(session_id)

    def sweep(self) -> None:
        sweep(self.worker)

    async def socket(self, path: str, *, cookie: str | None = None) -> dict[str, Any]:
        """The first message of a WebSocket, as JSON."""
        url = str(self._client.base_url).replace("http", "ws", 1).rstrip("/") + path
        headers = {} if cookie is None else {"cookie": cookie}
        async with websockets.connect(url, additional_headers=headers, proxy=None) as opened:
            found = json.loads(await opened.recv())
        assert isinstance(found, dict)
        return found

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.call("POST", path, json=body, **options)

    async def call(
        self,
        method: str,
        path: str,
        *,
        cookie: str | None = None,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> httpx.Response:
        headers = {**(headers or {}), **({} if cookie is None else {"cookie": cookie})}
        try:
            return await self._client.request(method, path, headers=headers, **options)
        finally:
            self._client.cookies.clear()


class SeedServer:
    """The workers of one server.

    Attributes:
        clock: Of all lifetimes, of the agents' records, and of the fences.
    """

    def __init__(self, workers: list[SeedWorker], directory: str | None, clock: ManualClock) -> None:
        self.workers = workers
        self.directory = directory
        self.clock = clock
        self.stop_worker: Callable[[SeedWorker], Any]

    def records(self) -> int:
        """How many owner records there are, of sessions and path keys."""
        assert self.directory is not None
        found = Path(self.directory, SESSION_OWNERS_DIR)
        return sum(not each.startswith(".") for each in os.listdir(found))

    def at(self, worker_id: str | None) -> SeedWorker:
        return next(each for each in self.workers if each.id == worker_id)

    def sweep(self) -> None:
        for each in self.workers:
            each.sweep()


class _Server(uvicorn.Server):
    """Stops as soon as it is told, not at its next tick. The signals of the test process are its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopped = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopped.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [(number, signal.getsignal(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@asynccontextmanager
async def seed_server(
    kind: str = "resources", *, directory: str | None, count: int = 2, **settings: Any
) -> AsyncIterator[SeedServer]:
    """Serve `count` workers of a resources or agent server.

    Args:
        directory: The run directory; None for the one-worker mode.
        settings: Further arguments of `install_session_routing`.
    """
    clock = ManualClock()
    make, install = {"resources": (resources_app, install_resources), "agent": (agent_app, install_agent)}[kind]
    with _signals_restored():
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            running: dict[int, tuple[_Server, asyncio.Task[None]]] = {}
            workers = []
            for _ in range(count):
                app = make(clock)
                install(app, directory, clock, **settings)
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
                url = "http://{}:{}".format(*listener.getsockname())
                # `verify=False`: plain HTTP, and loading the machine's certificates takes 50 ms.
                client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False)
                await stack.enter_async_context(client)
                worker = SeedWorker(app, client)
                running[id(worker)] = server, tasks.create_task(server.serve(sockets=[listener]))
                workers.append(worker)
            for worker in workers:
                await worker.get("/")  # once it answers, its lifespan has started

            async def stop_worker(worker: SeedWorker) -> None:
                server, task = running[id(worker)]
                await worker._client.aclose()
                server.stopped.set()
                await task

            served = SeedServer(workers, directory, clock)
            served.stop_worker = stop_worker
            try:
                yield served
            finally:
                for worker in workers:
                    await worker._client.aclose()
                for server, _ in running.values():
                    server.stopped.set()


# --- cookies and tokens ---


def cookie(content: dict[str, Any], *, secret: str = SECRET) -> str:
    """A session cookie as the session middleware would sign it."""
    return f"{COOKIE}={TimestampSigner(secret).sign(base64.b64encode(json.dumps(content).encode())).decode()}"


def set_cookies(reply: httpx.Response) -> list[str]:
    """The `name=value` of every Set-Cookie of a reply."""
    return [each.split(";", 1)[0] for each in reply.headers.get_list("set-cookie")]


def cookie_content(name_and_value: str) -> dict[str, Any]:
    payload = name_and_value.split("=", 1)[1].rsplit(".", 2)[0]
    found = json.loads(base64.b64decode(payload))
    assert isinstance(found, dict)
    return found


def token(session_id: str) -> dict[str, str]:
    """The header that carries an MCP token for the session."""
    signed = TOKENS.dumps({"sid": session_id, "tools": None})
    return {TOKEN_HEADER: signed if isinstance(signed, str) else signed.decode()}
