"""Resources servers: a task's state, the tools that act on it, and the verifier that judges it.

A session begins with a seed, which makes its state, and ends with a close, or with a `/verify` that no close follows; then
its state is released. The invariants, beyond those of `sessions.py`: a request never runs on another session's state, nor on
none; a session that is not here is said to be lost, and its sample is masked, never given a reward.

Not here: which worker a request reaches (`homing.routing`), and the MCP endpoint (`mcp.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar, get_type_hints

from fastapi import FastAPI
from itsdangerous import URLSafeSerializer
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from homing.errors import ConfigurationError
from homing.identity import RESOURCES
from homing.rl.errors import (
    NotFoundError,
    RlError,
    SeedRejectedError,
    SessionLostError,
    problems,
)
from homing.rl.json_route import add_json_route, json_object, json_response, read_body, validated
from homing.rl.protocol import (
    MCP_PATH,
    MCP_TOKEN_HEADER,
    MCP_TOKEN_SALT,
    SESSION_LOST,
    Aggregate,
    AggregateRequest,
    EpisodeId,
    ResourcesCloseReply,
    ResourcesCloseRequest,
    ResourcesSeedReply,
    ResourcesSeedRequest,
    ResourcesTools,
    TaskId,
    Verdict,
    VerifyRequest,
    aggregate,
    close_follows,
)
from homing.rl.session_server import SessionServer
from homing.rl.tools import Tool, tools_of
from homing.routing import SESSION_ID_SCOPE_KEY
from homing.types import session_tag

if TYPE_CHECKING:
    from homing.rl.mcp import McpEndpoint

logger = logging.getLogger(__name__)

StateT = TypeVar("StateT")

ReverifyMode = Literal["stateless", "unsupported", "unknown"]

_SEED: Final[TypeAdapter[ResourcesSeedRequest]] = TypeAdapter(ResourcesSeedRequest)
_CLOSE: Final[TypeAdapter[ResourcesCloseRequest]] = TypeAdapter(ResourcesCloseRequest)
_AGGREGATE: Final[TypeAdapter[AggregateRequest]] = TypeAdapter(AggregateRequest)


@dataclass(frozen=True, slots=True)
class Seed:
    """What a session is made from.

    Attributes:
        session_id: Names the session; whoever knows it has it.
        episode_id, task_id: Of an episode's seed; None for a cookie's.
        task_data: An episode's `task_data`, or the whole body of a cookie's seed.
    """

    session_id: str
    episode_id: EpisodeId | None
    task_id: TaskId | None
    task_data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seeded(Generic[StateT]):
    """What `seed` may return in place of the state alone.

    Attributes:
        observation: What the policy sees first; in the reply of an episode's seed. JSON.
        tools: The names of the tools that a token of this session may call over MCP; None: all of them.
    """

    state: StateT
    observation: Any = None
    tools: Sequence[str] | None = None


def check_mcp_sdk(setting: str) -> None:
    """See that the MCP SDK is installed, without importing it.

    Args:
        setting: What needs it, as whoever gave it calls it.

    Raises:
        ConfigurationError: it is not.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigurationError(f"{setting} needs the MCP SDK: pip install 'homing[mcp]'")


class ResourcesServer(SessionServer[StateT]):
    """A resources server. Subclass it: `seed` makes a session's state, methods marked `@tool` act on it, `verify` judges it.

    It is an ASGI app: `homing run my_server:server --workers 4` serves it, and every request reaches its session.

    Args:
        expose_tools_over_mcp: Serve the tools over MCP too, at `/mcp`; the seed's reply says with which token.

    The other arguments are those of every RL server (`RlServer`).

    Raises:
        ConfigurationError: a tool or a setting cannot work; the message says which and why.
    """

    kind = RESOURCES
    session_ends: ClassVar[tuple[str, ...]] = ("POST /verify",)
    reverify_mode: ClassVar[ReverifyMode] = "unknown"
    """Whether a verify can be run again from its request alone."""

    def __init__(self, *, expose_tools_over_mcp: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        if expose_tools_over_mcp:
            check_mcp_sdk("expose_tools_over_mcp")
        self.expose_tools_over_mcp = expose_tools_over_mcp
        self.tools: dict[str, Tool] = tools_of(self)
        self._seed_data = _data_model(self.seed)
        self._verify: TypeAdapter[Any] = TypeAdapter(_body_model(self.verify))
        self._mcp: McpEndpoint | None = None

    # --- what subclasses write ---

    async def seed(self, seed: Any) -> StateT | Seeded[StateT]:
        """Make a session's state.

        Annotate the parameter as `Seed`, or as a pydantic model: then it is the task's data, validated. Raise
        `SeedRejectedError` if the task cannot be served and never will be. If it raises, it has left nothing behind.
        """
        raise NotImplementedError

    async def verify(self, state: StateT, request: Any) -> float | Verdict:
        """The reward for what was done in the session, or a whole verdict.

        Annotate `request` as `VerifyRequest`, or as a subclass of it that has the task's own fields.
        """
        raise NotImplementedError

    async def release(self, state: StateT) -> None:
        """Let go of a session's state. If it raises, the session stays, and its close can be sent again."""

    async def sandbox_access(self, state: StateT) -> dict[str, Any] | None:
        """How to reach the sandbox that the session lends; None if it lends none. In the reply of an episode's seed, too."""
        return None

    async def aggregate_metrics(self, verdicts: list[Verdict]) -> BaseModel | Mapping[str, Any]:
        """What a list of verdicts comes to. Keeps nothing."""
        return aggregate(verdicts)

    # --- the server ---

    def lists(self) -> str:
        return f"Tools: {', '.join(self.tools)}." if self.tools else "This server has no tools."

    def token_header(self) -> str | None:
        return MCP_TOKEN_HEADER if self.expose_tools_over_mcp else None

    def token_serializer(self) -> URLSafeSerializer:
        return URLSafeSerializer(self.secret, salt=MCP_TOKEN_SALT)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with super().serving(), contextlib.nullcontext() if self._mcp is None else self._mcp.running():
            yield

    def add_routes(self, app: FastAPI) -> None:
        conflict = "the session is bound to another episode, is being closed, or was closed"
        too_large = "the body is over the limit"
        add_json_route(
            app,
            RESOURCES.seed_path,
            self._answer_seed,
            name="seed_session",
            body=ResourcesSeedRequest | dict[str, Any],
            reply=ResourcesSeedReply | dict[str, Any],
            summary="Begin a session: an episode's, named in the body, or the cookie's",
            errors={409: conflict, 413: too_large, 422: "the seed is malformed, or its task cannot be served"},
        )
        add_json_route(
            app,
            RESOURCES.close_path,
            self._answer_close,
            name="close_session",
            body=ResourcesCloseRequest,
            reply=ResourcesCloseReply,
            summary="End a session and release its state; needs no cookie, and succeeds again",
            errors={
                409: conflict,
                413: too_large,
                422: "the body is malformed",
                503: "the state could not be released, or is in use: send it again",
            },
        )
        self.fast_routes["/verify"] = add_json_route(
            app,
            "/verify",
            self._answer_verify,
            name="verify",
            body=_body_model(self.verify),
            reply=Verdict,
            summary="Judge a session; one that is not here gets a masked sample. Ends the session unless a close follows",
            errors={409: "the session is being closed", 413: too_large, 422: "the body is malformed"},
        )
        add_json_route(
            app,
            "/aggregate_metrics",
            self._answer_aggregate,
            name="aggregate_metrics",
            body=AggregateRequest,
            reply=Aggregate,
            summary="What a list of verdicts comes to; needs no session",
            errors={413: too_large, 422: "the body is malformed"},
        )
        add_json_route(
            app,
            "/sandbox_access",
            self._answer_sandbox,
            name="sandbox_access",
            reply=dict[str, Any],
            summary="How to reach the session's sandbox",
            errors={404: "the session is not here, or lends none"},
        )
        add_json_route(
            app,
            "/reverify_mode",
            self._answer_reverify_mode,
            name="reverify_mode",
            reply=ReverifyMode,
            methods=("GET",),
            summary="Whether a verify can be run again from its request alone",
        )
        if self.expose_tools_over_mcp:
            from homing.rl.mcp import McpEndpoint  # the SDK is imported by servers that use it

            self._mcp = McpEndpoint(self.name, self.tools, self.sessions, self.token_serializer(), self.max_body_bytes)
            app.router.routes.append(Route(MCP_PATH, self._mcp, include_in_schema=False))
        for each in self.tools.values():
            self.fast_routes[f"/{each.name}"] = add_json_route(
                app,
                f"/{each.name}",
                self._tool_handler(each),
                name=each.name,
                body=each.arguments,
                reply=each.result,
                description=each.description,
                errors={
                    400: "the tool could not do that",
                    404: "the session is not here",
                    409: "the session is being closed",
                    413: too_large,
                    422: "the arguments are not what the tool takes",
                },
                tags=("tools",),
            )

    # --- handlers ---

    async def _answer_seed(self, request: Request) -> Response:
        raw = await read_body(request, self.max_body_bytes)
        body = json_object(raw)
        session_id: str = request.scope[SESSION_ID_SCOPE_KEY]
        if "resources_session_id" not in body and "episode_id" not in body:
            return json_response(await self._seed_cookie(session_id, body), headers=self.owner_headers())
        asked: ResourcesSeedRequest = validated(_SEED, raw)
        reply = (await self._seed_episode(asked)).model_dump(exclude_none=True)
        return json_response(reply, headers=self.owner_headers())

    async def _seed_episode(self, asked: ResourcesSeedRequest) -> ResourcesSeedReply:
        session_id, episode = asked.resources_session_id, asked.episode_id
        what = (asked.task_id, asked.task_data)
        async with self.sessions.changing(session_id):
            known = self.sessions.seedable(session_id, episode, what)
            if known is not None:
                again: ResourcesSeedReply = known.reply
                return again
            made = await self._made(Seed(session_id, episode, asked.task_id, asked.task_data), inside="task_data")
            session = self.sessions.open(session_id, made.state, episode=episode, seed=what)
            try:
                access = await self.sandbox_access(made.state)
            except BaseException:
                await self.sessions.end(session_id)
                raise
            session.reply = reply = ResourcesSeedReply(
                resources_session_id=session_id,
                resources_tools=self._tools_access(session_id, made.tools),
                sandbox_access=access,
                observation=made.observation,
            )
        return reply

    async def _seed_cookie(self, session_id: str, body: dict[str, Any]) -> dict[str, Any]:
        """A cookie's seed starts its session anew, since its body says nothing of which episode it is for."""
        async with self.sessions.changing(session_id):
            known = self.sessions.get(session_id)
            if known is not None and known.episode is not None:
                raise SessionBoundToEpisodeError
            await self.sessions.end(session_id)
            made = await self._made(Seed(session_id, None, None, body), inside="")
            self.sessions.open(session_id, made.state)
        access = self._tools_access(session_id, made.tools)
        return {} if access is None else {"mcp": access.model_dump()}

    async def _made(self, seed: Seed, *, inside: str) -> Seeded[StateT]:
        given: Any = seed
        if self._seed_data is not None:
            try:
                given = self._seed_data.validate_python(seed.task_data)
            except ValidationError as error:
                raise _rejected(error, inside) from error
        made = await self.seed(given)
        return made if isinstance(made, Seeded) else Seeded(made)

    async def _answer_close(self, request: Request) -> Response:
        asked: ResourcesCloseRequest = validated(_CLOSE, await read_body(request, self.max_body_bytes))
        session_id = asked.resources_session_id
        try:
            async with self.sessions.changing(session_id):
                await self.sessions.close(session_id, asked.episode_id)
        except RlError as error:
            if error.__cause__ is not None and error.status == 503:
                logger.warning("session %s stays: %s", session_tag(session_id), error, exc_info=error.__cause__)
            raise
        return json_response(ResourcesCloseReply(resources_session_id=session_id))

    async def _answer_verify(self, request: Request) -> Response:
        asked: BaseModel = validated(self._verify, await read_body(request, self.max_body_bytes))
        content = asked.model_dump(mode="json", by_alias=True)
        session_id = request.scope.get(SESSION_ID_SCOPE_KEY)
        session = self.sessions.get(session_id)
        if session is None:
            return json_response(content | lost_verdict().model_dump(exclude_none=True))
        with session as state:
            verdict = await self.verify(state, asked)
        checked = _checked(verdict)
        if not close_follows(request.headers.getlist):
            await self.end_session(session)
        return json_response(content | checked.model_dump(mode="json", exclude_none=True))

    async def _answer_aggregate(self, request: Request) -> Response:
        asked: AggregateRequest = validated(_AGGREGATE, await read_body(request, self.max_body_bytes))
        return json_response(await self.aggregate_metrics(asked.verify_responses))

    async def _answer_sandbox(self, request: Request) -> Response:
        with self.sessions.held(request.scope.get(SESSION_ID_SCOPE_KEY)) as state:
            access = await self.sandbox_access(state)
        if access is None:
            raise NotFoundError("This session lends no sandbox.")
        return json_response(access)

    async def _answer_reverify_mode(self, request: Request) -> Response:
        return json_response(self.reverify_mode)

    def _tool_handler(self, called: Tool) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            raw = await read_body(request, self.max_body_bytes)
            session = self.sessions.held(request.scope.get(SESSION_ID_SCOPE_KEY))
            self._refuse_unless_granted(request, called)
            arguments = called.from_json(raw)
            with session as state:
                result = await called.method(state, **arguments)
            return json_response(result)

        return handler

    def _refuse_unless_granted(self, request: Request, called: Tool) -> None:
        """A token that is limited to some tools is so here too, where it names the session: where there is no cookie."""
        if self._mcp is None or MCP_TOKEN_HEADER not in request.headers or self.cookie_name in request.cookies:
            return
        granted = self._mcp.granted(request.scope)
        if granted is not None and called.name not in granted:
            raise NotFoundError(f"The session's token gives no tool {called.name}: it gives {', '.join(granted)}.")

    def _tools_access(self, session_id: str, tools: Sequence[str] | None) -> ResourcesTools | None:
        if not self.expose_tools_over_mcp:
            return None
        token = self.token_serializer().dumps({"sid": session_id, "tools": None if tools is None else list(tools)})
        text = token if isinstance(token, str) else token.decode()
        return ResourcesTools(server_name=self.name, url_path=MCP_PATH, headers={MCP_TOKEN_HEADER: text})


class SessionBoundToEpisodeError(SeedRejectedError):
    """A cookie's seed for a session that an episode has seeded."""

    status = 409
    code = "session_conflict"
    detail = "The session is an episode's, and can only be seeded by it."


def lost_verdict() -> Verdict:
    """What a verify of a session that is not here comes to: no measurement."""
    return Verdict(
        reward=0.0, mask_sample=True, failure_kind=SESSION_LOST, failure_reason="the session is not held by this server"
    )


def _checked(verdict: float | Verdict) -> Verdict:
    """A verdict whose reward is a number; one that is not measures nothing."""
    reward = verdict.reward if isinstance(verdict, Verdict) else float(verdict)
    if not math.isfinite(reward):
        return Verdict(
            reward=0.0,
            mask_sample=True,
            failure_kind="invalid_reward",
            failure_reason=f"the verifier's reward is {reward}",
        )
    return verdict if isinstance(verdict, Verdict) else Verdict(reward=reward)


def _rejected(error: ValidationError, inside: str) -> SeedRejectedError:
    found = problems(error, inside=inside)
    return SeedRejectedError(f"{found[0].field or 'the body'}: {found[0].problem}", fields=found)


def _data_model(seed: Callable[..., Any]) -> TypeAdapter[Any] | None:
    """What validates the task's data, if `seed` takes that and not a whole `Seed`."""
    annotation = _annotation(seed, 0)
    if annotation in (Any, Seed, inspect.Parameter.empty):
        return None
    try:
        return TypeAdapter(annotation)
    except Exception as error:
        raise ConfigurationError(f"seed: its parameter cannot be validated as {annotation}: {error}") from error


def _body_model(verify: Callable[..., Any]) -> type[BaseModel]:
    annotation = _annotation(verify, 1)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if annotation in (Any, inspect.Parameter.empty):
        return VerifyRequest
    raise ConfigurationError(f"verify: annotate its second parameter as VerifyRequest or a subclass, not {annotation}")


def _annotation(method: Callable[..., Any], place: int) -> Any:
    parameters = list(inspect.signature(method).parameters)
    if len(parameters) <= place:
        raise ConfigurationError(f"{method.__name__} takes {place + 1} arguments after self")
    hints = get_type_hints(method, include_extras=True)
    return hints.get(parameters[place], Any)


__all__ = ["ResourcesServer", "Seed", "Seeded", "SessionLostError", "lost_verdict"]
