"""A server that drives episodes: `POST /run` seeds a resources server and an agent, lets the agent act, and verifies.

The invariants: what became of an episode is told with status 200, as a verdict or as a failure and never as a reward for
a fault; what an episode opened is closed before its reply, also if its caller left; and over all workers together, no
more episodes run than were allowed.

Not here: the order of an episode (`episode.py`), and trying a failed one again, which is its collector's
(`homing.rl.rollouts`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Final

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

import homing
from homing.errors import ConfigurationError
from homing.rl.disconnect import END_SECONDS, end_tasks, unless_client_leaves
from homing.rl.episode_protocol import MAX_REASON_CHARACTERS, EpisodeFailure, EpisodeReply, EpisodeRequest
from homing.rl.episodes.admission import Admission, NotAdmittedError
from homing.rl.episodes.episode import Episode, EpisodeFailedError, EpisodeSettings, Stage, ToolTransport
from homing.rl.episodes.leases import Close, Leases
from homing.rl.json_route import add_error_replies, add_json_route, json_response, read_body, validated
from homing.rl.outgoing import SESSION_LOST, CallError, OutgoingCalls
from homing.rl.rollout import RolloutPrefixMiddleware
from homing.routing import RoutingOptions
from homing.rundir import EPISODES_DIR, RunDirectory, leave_run_directory, siblings_directory
from homing.runtime.meeting import MeetingPlace
from homing.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

_EPISODE: Final = TypeAdapter(EpisodeRequest)


class EnvironmentServer:
    """An environment server: an ASGI app. `homing run module:server --workers 4` serves it.

    It keeps nothing between requests, so any worker runs any episode; the limit of episodes is the whole server's.

    Args:
        resources_url: The resources server of its episodes, reached at one address.
        agent_url: Their agent server, likewise.
        name: Names this server beside others.
        tool_transports: How the agent reaches the resources server's tools: `direct_http`, `mcp`, or both.
        max_concurrent_episodes: How many may run at once, in all workers together; None: no limit.
        queue_timeout_seconds: How long one waits for its turn; needed with `max_concurrent_episodes`.
        max_queued_episodes: How many may wait, in all workers together; one more fails at once.
        default_episode_timeout_seconds: After so long an episode that runs is a failure; None: no limit.
        agent_timeout_seconds: After so long the agent is stopped, and what it has is verified; None: no limit.
        stop_grace_seconds: How long it may then take to answer; after that it is cut off.
        call_timeout_seconds: For every call to another server but the agent's activation.
        cleanup_timeout_seconds: For all that an episode has to close, together.
        training_token_capture: Activations go below `…/training-token-capture`.
        new_connection_per_call: Keep no connections to the servers open.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    homing_routed: Final = True
    """What tells `homing run` that there is nothing to route."""

    def __init__(
        self,
        *,
        resources_url: str,
        agent_url: str,
        name: str = "environment",
        tool_transports: tuple[ToolTransport, ...] = ("direct_http",),
        max_concurrent_episodes: int | None = None,
        queue_timeout_seconds: float | None = None,
        max_queued_episodes: int = 1000,
        default_episode_timeout_seconds: float | None = None,
        agent_timeout_seconds: float | None = None,
        stop_grace_seconds: float = 5.0,
        call_timeout_seconds: float = 60.0,
        cleanup_timeout_seconds: float = 30.0,
        training_token_capture: bool = False,
        new_connection_per_call: bool = False,
    ) -> None:
        if max_concurrent_episodes is not None and queue_timeout_seconds is None:
            raise ConfigurationError("max_concurrent_episodes needs queue_timeout_seconds: how long may one wait?")
        if not tool_transports or set(tool_transports) - {"direct_http", "mcp"}:
            raise ConfigurationError(f"tool_transports is {tool_transports!r}: use 'direct_http', 'mcp', or both")
        for setting, seconds in {
            "queue_timeout_seconds": queue_timeout_seconds,
            "default_episode_timeout_seconds": default_episode_timeout_seconds,
            "agent_timeout_seconds": agent_timeout_seconds,
            "stop_grace_seconds": stop_grace_seconds,
            "call_timeout_seconds": call_timeout_seconds,
            "cleanup_timeout_seconds": cleanup_timeout_seconds,
        }.items():
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ConfigurationError(f"{setting} is {seconds}: give a positive, finite number of seconds")
        self.name = name
        self.max_concurrent_episodes = max_concurrent_episodes
        self.queue_timeout_seconds = queue_timeout_seconds
        self.max_queued_episodes = max_queued_episodes
        self.default_episode_timeout_seconds = default_episode_timeout_seconds
        self._settings = EpisodeSettings(
            resources_url=resources_url,
            agent_url=agent_url,
            tool_transports=tool_transports,
            agent_timeout_seconds=agent_timeout_seconds,
            stop_grace_seconds=stop_grace_seconds,
            call_timeout_seconds=call_timeout_seconds,
            cleanup_timeout_seconds=cleanup_timeout_seconds,
            training_token_capture=training_token_capture,
        )
        # A cancelled episode still closes what it has opened.
        self._end_seconds = cleanup_timeout_seconds + END_SECONDS
        self._calls = OutgoingCalls(new_connection_per_call=new_connection_per_call)
        self._meeting = MeetingPlace(f"environment {name}")
        self._admission: Admission | None = None
        self._leases: Leases | None = None
        self._running = 0
        # Clean-ups under way: each outlives the request it belongs to, and none outlives the server.
        self._tasks: set[asyncio.Task[Any]] = set()
        self.app = self._make_app()

    def __repr__(self) -> str:
        return f"<EnvironmentServer {self.name}: {self._running} episodes>"

    @property
    def running(self) -> int:
        """Episodes running at this worker."""
        return self._running

    @property
    def waiting(self) -> int:
        """Episodes waiting for their turn at this worker."""
        return 0 if self._admission is None else self._admission.waiting

    def use_routing_options(self, options: RoutingOptions) -> None:
        """How this server runs; `homing run` says so before the server starts."""
        self._meeting.options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    def _make_app(self) -> FastAPI:
        app = FastAPI(
            title=f"EnvironmentServer ({self.name})",
            version=homing.__version__,
            lifespan=lambda _: self._serving(),
        )
        for path, name in (("/", "alive"), ("/healthz", "healthz")):
            add_json_route(app, path, self._answer_alive, name=name, reply=dict[str, Any], methods=("GET",))
        add_json_route(
            app,
            "/run",
            self._serve_run,
            name="run_episode",
            body=EpisodeRequest,
            reply=EpisodeReply,
            summary="Drive one episode: its verdict, or why it has none.",
            errors={413: "the body is over the limit", 422: "the body cannot be used"},
        )
        add_error_replies(app, lambda: "An environment server has POST /run.")
        app.add_middleware(RolloutPrefixMiddleware)
        return app

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._calls)
            stack.push_async_callback(self._finish_cleanups)
            if self.max_concurrent_episodes is not None or self._meeting.has_others:
                directory = os.path.join(self._shared_directory(stack), EPISODES_DIR)
                if self._meeting.has_others:
                    self._leases = Leases(directory, self._close_left)
                    sweeper = asyncio.create_task(self._leases.sweep_forever(), name="homing episode leases")
                    stack.push_async_callback(end_tasks, [sweeper])
                if self.max_concurrent_episodes is not None:
                    admission = Admission(
                        directory, slots=self.max_concurrent_episodes, max_waiting=self.max_queued_episodes
                    )
                    self._admission = await stack.enter_async_context(admission)
            yield

    def _shared_directory(self, stack: AsyncExitStack) -> str:
        """The run directory, until the stack is left."""
        directory = self._meeting.directory() or siblings_directory(self._meeting.name)
        if self._meeting.options is None or self._meeting.options.socket_dir is None:
            stack.callback(leave_run_directory, directory)
        # Held, so that nobody takes it for one that a dead server has left.
        stack.enter_context(RunDirectory.open(directory))
        return directory

    async def _finish_cleanups(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._end_seconds)
            await end_tasks(list(self._tasks))

    async def _answer_alive(self, request: Request) -> Response:
        return json_response({"status": "ok", "server": self.name, "running": self.running, "waiting": self.waiting})

    async def _serve_run(self, request: Request) -> Response:
        body: EpisodeRequest = validated(_EPISODE, await read_body(request, _MAX_BODY_BYTES))
        return json_response(await unless_client_leaves(request, self.run(body), end_seconds=self._end_seconds))

    async def run(self, request: EpisodeRequest) -> EpisodeReply:
        """Drive one episode, once it is its turn. Cancelled, it still closes what it opened before it ends."""
        try:
            if self._admission is None:
                return await self._run_admitted(request)
            assert self.queue_timeout_seconds is not None
            async with self._admission.admitted(self.queue_timeout_seconds):
                return await self._run_admitted(request)
        except NotAdmittedError as error:
            return _failure(request, error.kind, str(error), stage="admission", terminal=False)

    async def _close_left(self, close: Close) -> bool:
        try:
            await self._calls.post(close.url, close.body, timeout_seconds=self._settings.call_timeout_seconds)
        except CallError as error:
            logger.info("%s of a dead worker's episode: %s", close.what, error.detail)
            # Lost with its own worker, or refused for good.
            return error.kind == SESSION_LOST or not error.retryable
        return True

    async def _run_admitted(self, request: EpisodeRequest) -> EpisodeReply:
        episode = Episode(request, self._settings, self._calls, self._tasks)
        self._running += 1
        try:
            # Held until all is closed; if this worker dies before, another one closes it.
            with nullcontext() if self._leases is None else self._leases.held(episode.closes()):
                try:
                    async with asyncio.timeout(self.default_episode_timeout_seconds):
                        verdict = await episode.drive()
                finally:
                    await episode.cleanup.aclose()
        except EpisodeFailedError as error:
            if episode.lost:
                # A call that broke says only that its worker was lost; the close found that the session was, too.
                return _failure(request, SESSION_LOST, error.reason, stage=error.stage, terminal=False)
            return _failure(request, error.kind, error.reason, stage=error.stage, terminal=error.terminal)
        except TimeoutError:
            reason = f"the episode took longer than {self.default_episode_timeout_seconds:g} s"
            return _failure(request, "episode_timeout", reason, stage=episode.stage, terminal=False)
        except Exception as error:
            logger.exception("episode %s failed", request.episode_id.capture_key)
            reason = f"{type(error).__name__}: {error}"
            return _failure(request, "environment_error", reason, stage=episode.stage, terminal=True)
        finally:
            self._running -= 1
        return EpisodeReply(episode_id=request.episode_id, task_id=request.task.task_id, result=verdict)


_MAX_BODY_BYTES: Final = 16 * 2**20


def _failure(request: EpisodeRequest, kind: str, reason: str, *, stage: Stage, terminal: bool) -> EpisodeReply:
    return EpisodeReply(
        episode_id=request.episode_id,
        task_id=request.task.task_id,
        failure=EpisodeFailure(
            failure_reason=reason[:MAX_REASON_CHARACTERS], terminal=terminal, failure_kind=kind, stage=stage
        ),
    )
