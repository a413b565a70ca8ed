"""A server that runs an agent: sessions bound to an episode, and activations in them.

The invariants: a session's records, and so its ownership, are kept as `records.py` says; at most one activation
runs in a session; and what a worker that stops has open is cleaned up first.

Not here: how an activation runs and ends (`activations.py`), the ready agent (`tool_calling.py`), and which worker a request reaches (`homing.routing`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

from fastapi import FastAPI
from itsdangerous import TimestampSigner
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from homing.errors import ReplyError
from homing.identity import AGENT, SessionKind, cookie_session
from homing.lifetime.records import OwnershipReleaser
from homing.rl.agents.activation import Activation, AgentSession
from homing.rl.agents.activations import Activations, activation_index, cut_off
from homing.rl.agents.errors import AgentCleanUpError, AgentRunError
from homing.rl.agents.records import AgentRecords
from homing.rl.agents.run import CLEANUP_SECONDS, AgentRun
from homing.rl.disconnect import END_SECONDS, unless_client_leaves
from homing.rl.episode_protocol import (
    AGENT_SESSION_ID_KEY,
    AgentCapabilities,
    AgentCloseReply,
    AgentCloseRequest,
    AgentRunRequest,
    AgentSeedReply,
    AgentSeedRequest,
    ResponsesRequest,
    StopReply,
    StopRequest,
    ToolAccess,
)
from homing.rl.errors import ConflictError, NotFoundError, SeedRejectedError
from homing.rl.json_route import add_json_route, json_response, read_body, validated
from homing.rl.outgoing import Cookies, OutgoingCalls, under_rollout
from homing.rl.protocol import Aggregate, AggregateRequest, EpisodeId, Verdict, aggregate
from homing.rl.rollout import current_rollout
from homing.rl.server import RlServer
from homing.routing import SESSION_ID_SCOPE_KEY
from homing.routing.answers import ERROR_HEADER

logger = logging.getLogger(__name__)

OWN_TOOLS: Final = "resources"
"""The name of the tool access of an activation without a session: the agent's own resources server."""

_SEED: Final = TypeAdapter(AgentSeedRequest)
_CLOSE: Final = TypeAdapter(AgentCloseRequest)
_RESPONSES: Final = TypeAdapter(ResponsesRequest)
_RUN: Final = TypeAdapter(AgentRunRequest)
_STOP: Final = TypeAdapter(StopRequest)
_AGGREGATE: Final = TypeAdapter(AggregateRequest)

_Serve = Callable[[Request], Awaitable[Response]]


class AgentServer(RlServer):
    """An agent server. Subclass it and write `respond`; and `set_up` and `clean_up`, if a session opens anything.

    Args:
        resources_url: The resources server of `/run` and of activations without a session; None: there is none.
        own_url: Where this server is reached, for a `/run`'s call to itself; by default where the run was accepted.
        call_timeout_seconds: For each call to another server, activations excepted.
        new_connection_per_call: Keep no connections to other servers open.
        settings: As for every RL server: `name`, `secret`, `close_retry_window_seconds`, `max_body_bytes`, `clock`.

    Attributes:
        runs: How many `/run`s this worker is serving.
        calls: For calls to other servers.
    """

    kind: ClassVar[SessionKind] = AGENT
    close_follows_header: ClassVar[str | None] = None
    capabilities: ClassVar[AgentCapabilities] = AgentCapabilities(tool_transports=["direct_http", "mcp"])
    """What a seed may ask for; any other is refused with 422."""

    def __init__(
        self,
        *,
        resources_url: str | None = None,
        own_url: str | None = None,
        call_timeout_seconds: float = 60.0,
        new_connection_per_call: bool = False,
        **settings: Any,
    ) -> None:
        settings.setdefault("max_body_bytes", 16 * 2**20)  # a conversation is longer than a tool call
        super().__init__(**settings)
        self.resources_url = resources_url
        self.own_url = own_url
        self.call_timeout_seconds = call_timeout_seconds
        self.runs = 0
        self.calls = OutgoingCalls(new_connection_per_call=new_connection_per_call)
        self._owners: OwnershipReleaser | None = None
        self._activations = Activations(self.respond)
        self._records: AgentRecords[AgentSeedRequest, AgentSession, AgentCloseReply] = AgentRecords(
            make=AgentSession,
            set_up=self._set_up,
            clean_up=self._clean_up,
            bare_receipt=lambda session_id: AgentCloseReply(agent_session_id=session_id),
            close_retry_window_seconds=self.close_retry_window_seconds,
            dropped=self._dropped,
            clock=self.clock,
        )

    # --- what a subclass writes ---

    async def respond(self, activation: Activation) -> dict[str, Any]:
        """Run the agent, and give the response: usually `activation.response()`, with what was put out.

        Append to `activation.output` as you go, and end soon once `activation.stop_reason` is set. Cancelled when the
        caller is gone or the session is closed.

        Raises:
            AgentRunError: it failed for a reason that says nothing about the policy.
        """
        raise NotImplementedError

    async def set_up(self, session: AgentSession) -> None:
        """Open what the session needs; keep it in `session.state`. What it raises fails the seed, after `clean_up`.

        Raises:
            SeedRejectedError: this agent cannot serve the seed, now or ever.
            AgentSetupError: not now; the same seed may be sent again.
        """

    async def clean_up(self, session: AgentSession) -> dict[str, Any] | None:
        """Release all that `set_up` opened, or the part that it came to; called again if it raised.

        Returns:
            The `agent_observations` of the close's receipt.
        """
        return None

    # --- what it has ---

    def open_sessions(self) -> list[AgentSession]:
        """The sessions that are open at this worker."""
        return self._records.open_sessions()

    # --- how long this worker owns its sessions ---

    def agent_sessions(self) -> AgentServer:
        return self

    def holds_agent_session(self, agent_session_id: str) -> bool:
        """Whether this worker still keeps any record of the session, open, failed or closed."""
        return self._records.holds(agent_session_id)

    def ended_agent_sessions(self) -> Collection[str]:
        """The sessions that this worker only remembers: closed ones, and those whose seed failed."""
        return self._records.ended

    def expire_agent_session_records(self) -> None:
        """Drop the receipts and failed seeds whose window has passed, releasing ownership of their sessions."""
        self._records.expire()

    def use_agent_session_owners(self, owners: OwnershipReleaser) -> None:
        """Keep the session owners, to release this worker's ownership when it drops a session's last record."""
        self._owners = owners

    def drop_session(self, session_id: str) -> None:
        self._records.forget(session_id)

    def _dropped(self, session_id: str) -> None:
        if self._owners is not None:
            self._owners.release(session_id)

    # --- the server ---

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.calls:
            try:
                yield
            finally:
                await self._records.aclose()
                self._owners = None

    def lists(self) -> str:
        return "An agent server has POST /v1/agent_sessions, /v1/agent_sessions/close, /v1/responses and /run."

    def add_routes(self, app: FastAPI) -> None:
        unusable = {413: "the body is over the limit", 422: "the body cannot be used"}
        conflict = {409: "the request does not fit what is recorded of the session", **unusable}
        add_json_route(
            app,
            "/v1/agent_sessions/capabilities",
            self._serve_capabilities,
            name="capabilities",
            reply=AgentCapabilities,
            methods=("GET",),
            summary="What sessions of this agent can do.",
        )
        add_json_route(
            app,
            "/v1/agent_sessions",
            self._answering(self._serve_seed),
            name="seed_agent_session",
            body=AgentSeedRequest,
            reply=AgentSeedReply,
            summary="Open a session.",
            errors={**conflict, 503: "what the session needs could not be opened"},
        )
        add_json_route(
            app,
            "/v1/agent_sessions/close",
            self._answering(self._serve_close),
            name="close_agent_session",
            body=AgentCloseRequest,
            reply=AgentCloseReply,
            summary="Close a session; its receipt.",
            errors={**conflict, 503: "what the session had opened could not be released"},
        )
        add_json_route(
            app,
            "/v1/responses",
            self._answering(self._serve_responses),
            name="respond",
            body=ResponsesRequest,
            reply=dict[str, Any],
            summary="Run the agent once: in the session that the cookie names, or in none.",
            errors={**conflict, 502: "it failed for a reason that says nothing about the policy"},
        )
        add_json_route(
            app,
            "/run",
            self._answering(self._serve_run),
            name="run_agent",
            body=AgentRunRequest,
            reply=Verdict,
            summary="Seed the agent's own resources server, run the agent, and verify.",
            errors={404: "this agent has no resources server", **unusable},
        )
        add_json_route(
            app,
            "/rollouts/{rollout_id}/stop",
            self._answering(self._serve_stop),
            name="stop_rollout",
            body=StopRequest,
            reply=StopReply,
            summary="Ask the rollout's running activations to stop.",
            errors=unusable,
        )
        add_json_route(
            app,
            "/aggregate_metrics",
            self._answering(self._serve_aggregate),
            name="aggregate_metrics",
            body=AggregateRequest,
            reply=Aggregate,
            summary="What a list of verdicts comes to.",
            errors=unusable,
        )

    def _answering(self, serve: _Serve) -> _Serve:
        async def answered(request: Request) -> Response:
            # With one worker no sweeper runs; with several, a request may come before it does.
            self._records.expire()
            try:
                return await serve(request)
            except AgentRunError as error:
                # Beside what every error says: whether a new episode may succeed.
                content = {"code": error.code, "detail": error.detail, "retryable": error.retryable}
                headers = {ERROR_HEADER.decode(): error.code}
                return json_response({"error": content}, status=error.status, headers=headers)

        return answered

    async def _serve_capabilities(self, request: Request) -> Response:
        return json_response(self.capabilities)

    async def _serve_aggregate(self, request: Request) -> Response:
        body: AggregateRequest = validated(_AGGREGATE, await read_body(request, self.max_body_bytes))
        return json_response(aggregate(body.verify_responses))

    # --- sessions ---

    async def _serve_seed(self, request: Request) -> Response:
        seed: AgentSeedRequest = validated(_SEED, await read_body(request, self.max_body_bytes))
        marked = self._is_marked(request, seed.agent_session_id)
        session = await self._records.seed(seed, marked=marked)
        return json_response(AgentSeedReply(agent_session_id=session.id, capabilities=self.capabilities))

    async def _serve_close(self, request: Request) -> Response:
        body: AgentCloseRequest = validated(_CLOSE, await read_body(request, self.max_body_bytes))
        marked = self._is_marked(request, body.agent_session_id)
        receipt = await self._records.close(body.agent_session_id, body.episode_id, marked=marked)
        return json_response(receipt)

    def _check_grants(self, seed: AgentSeedRequest) -> None:
        for access in seed.tool_accesses:
            if access.transport not in self.capabilities.tool_transports:
                raise SeedRejectedError(
                    f"tool_accesses: {access.name} is given by {access.transport}, and this agent knows only "
                    f"{', '.join(self.capabilities.tool_transports) or 'no tools'}"
                )
        if seed.sandbox_access is not None and not self.capabilities.sandbox_access:
            raise SeedRejectedError("sandbox_access: this agent has no use for a sandbox")

    def _is_marked(self, request: Request, session_id: str) -> bool:
        """Whether the request's cookie names the session. The router has seen to it that it names no other.

        Raises:
            ConflictError: the cookie is this server's, and names no session in a way that can be read.
        """
        named = self._cookie_marker(request)
        return named == session_id

    def _cookie_marker(self, request: Request) -> str | None:
        cookie = request.cookies.get(self.cookie_name)
        content = None if cookie is None else cookie_session(cookie, TimestampSigner(self.secret))
        if content is None or AGENT_SESSION_ID_KEY not in content:
            return None
        named = content[AGENT_SESSION_ID_KEY]
        if not isinstance(named, str) or not named:
            raise ConflictError(f"the session cookie's {AGENT_SESSION_ID_KEY} is no session ID")
        return named

    async def _set_up(self, session: AgentSession) -> None:
        # Not before the record: a seed that was refused is remembered too.
        self._check_grants(session.seed)
        session.set_up_began = True
        await self.set_up(session)

    async def _clean_up(self, session: AgentSession) -> AgentCloseReply:
        if session.activation is not None and not await cut_off(session.activation):
            raise AgentCleanUpError  # not beneath it: what it uses would be gone
        try:
            observations = await self.clean_up(session) if session.set_up_began else None
        except ReplyError:
            raise
        except Exception as error:
            logger.exception("an agent session could not be cleaned up")
            raise AgentCleanUpError from error
        cookies = {name: value for jar in session.resources_cookies.values() for name, value in jar.values.items()}
        return AgentCloseReply(
            agent_session_id=session.id,
            agent_observations=observations,
            resources_cookies=cookies or None,
            agent_trajectory=[item for response in session.responses for item in response.get("output", [])] or None,
            partial_response=session.partial_response,
        )

    # --- activations ---

    async def _serve_responses(self, request: Request) -> Response:
        body: ResponsesRequest = validated(_RESPONSES, await read_body(request, self.max_body_bytes))
        session_id = self._cookie_marker(request)
        if session_id is None:
            return await self._respond_without_session(request, body)
        assert request.scope.get(SESSION_ID_SCOPE_KEY) in (None, session_id)
        session = self._records.open_session(session_id)
        index = activation_index(request, len(session.responses) + 1)
        if index <= len(session.responses):
            return json_response(session.responses[index - 1])
        if session.activation is not None:
            raise ConflictError("another activation of this session is running")
        activation = session.activation = Activation(
            body,
            session=session,
            rollout_id=session.seed.episode_id.rollout_id,
            tool_accesses=session.seed.tool_accesses,
            cookies=session.resources_cookies,
        )
        session.partial_response = None
        return json_response(await self._activations.run(activation, request))

    async def _respond_without_session(self, request: Request, body: ResponsesRequest) -> Response:
        key = current_rollout()
        accesses = []
        if self.resources_url is not None:
            url = under_rollout(self.resources_url, key)
            accesses.append(ToolAccess(name=OWN_TOOLS, transport="direct_http", url=url))
        cookies = Cookies({name: value for name, value in request.cookies.items() if name != self.cookie_name})
        before = dict(cookies.values)
        activation = Activation(
            body,
            session=None,
            rollout_id=_rollout_of(key),
            tool_accesses=accesses,
            cookies={OWN_TOOLS: cookies},
        )
        reply = json_response(await self._activations.run(activation, request))
        for name, value in cookies.values.items():
            if before.get(name) != value:
                # Whoever began the session goes on with the cookies that the tools have set.
                reply.headers.append("set-cookie", f"{name}={value}; Path=/; HttpOnly; SameSite=Lax")
        return reply

    async def _serve_stop(self, request: Request) -> Response:
        body: StopRequest = validated(_STOP, await read_body(request, self.max_body_bytes))
        rollout_id = request.path_params["rollout_id"]
        return json_response(StopReply(stopped=self._activations.stop(rollout_id, body.reason)))

    # --- runs ---

    async def _serve_run(self, request: Request) -> Response:
        raw = await read_body(request, self.max_body_bytes)
        body: AgentRunRequest = validated(_RUN, raw)
        if self.resources_url is None:
            raise NotFoundError("This agent runs no tasks of its own: it was given no resources_url.")
        run = AgentRun(
            self.calls,
            resources_url=self.resources_url,
            own_url=self.own_url or _accepted_at(request),
            # The call to itself stays here: what a run keeps in memory is this worker's.
            own_headers=self.owner_headers(),
            capture_key=current_rollout(),
            taskset=self.name,
            call_timeout_seconds=self.call_timeout_seconds,
        )
        self.runs += 1
        try:
            end_seconds = CLEANUP_SECONDS + END_SECONDS
            return json_response(await unless_client_leaves(request, run.drive(body), end_seconds=end_seconds))
        finally:
            self.runs -= 1


def _rollout_of(capture_key: str | None) -> str | None:
    if capture_key is None:
        return None
    try:
        return EpisodeId.from_capture_key(capture_key).rollout_id
    except ValidationError:
        return None


def _accepted_at(request: Request) -> str:
    host, port = request.scope.get("server") or ("", None)
    if not host or port is None:
        raise AgentRunError("no_own_url", "this agent does not know its own address: give it own_url", retryable=False)
    if ":" in host:
        host = f"[{host}]"
    root = request.scope.get("root_path", "").rstrip("/")
    return f"{request.url.scheme}://{host}:{port}{root}"
