"""Gymnasium environments as a server: each session has an environment of its own, in the memory of one worker.

`/reset` begins a session, or its next episode; `/step` takes a step. The step that ends an episode ends the session too,
unless the request says that a close follows: then the environment, and its random numbers, wait for the next reset. `/batch`
does both for many sessions of one worker at once.

The invariant: a session's environment is the one that its first reset made, until the session ends. A session whose
environment is not here is said to be lost, and never begins anew by a step. So is one whose thread an environment does not
give back.

Not here: routing, spaces (`spaces.py`), threads (`lanes.py`), and the client's side (`client.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

import homing
from homing.errors import ConfigurationError, NotHereError, ReplyError
from homing.rl.errors import EnvironmentHungError, InvalidRequestError, SessionLostError
from homing.rl.gymnasium_protocol import (
    MAX_BATCH_ITEMS,
    BatchReply,
    BatchRequest,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
)
from homing.rl.hosted import MAX_SEED, EnvKind, EnvMaker, HostedEnv, Outcome, maker
from homing.rl.json_route import DEFAULT_MAX_BODY_BYTES, add_json_route, json_response, read_body, validated
from homing.rl.lanes import Lane, Lanes
from homing.rl.packing import JSON, MSGPACK, asks_for_binary, is_binary, pack, unpack
from homing.rl.protocol import Aggregate, AggregateRequest, aggregate, close_follows
from homing.rl.session_server import SessionServer
from homing.rl.sessions import Session
from homing.rl.spaces import decode_member
from homing.routing import SESSION_ID_SCOPE_KEY
from homing.tasks import ended

logger = logging.getLogger(__name__)

DEFAULT_THREADS: Final = 4
DEFAULT_IDLE_SECONDS: Final = 86_400.0
DEFAULT_STEP_TIMEOUT_SECONDS: Final = 600.0
"""As long as clients wait by themselves (`client.py`)."""
STOP_SECONDS: Final = 10.0
"""How long a step or close may take once the server stops."""
GYMNASIUM_MAX_BODY_BYTES: Final = 16 * DEFAULT_MAX_BODY_BYTES
"""A batch carries many actions."""

_AGGREGATE: Final[TypeAdapter[AggregateRequest]] = TypeAdapter(AggregateRequest)

_NO_SESSION: Final = "There is no environment here for this session: reset it first."


@dataclass(slots=True)
class Hosted:
    """A session's environment, and the thread it lives on."""

    env: HostedEnv
    lane: Lane
    used_at: float


@dataclass(frozen=True, slots=True)
class _Asked:
    """One item of a batch that can be done: where it stands, what to do, and what to leave once it is done."""

    place: int
    session: Session[Hosted]
    work: tuple[Any, ...]


class GymnasiumServer(SessionServer[Hosted]):
    """Serves a Gymnasium environment: `homing rl serve CartPole-v1 --workers 4` without code, or this in a module of yours.

    Args:
        environment: A registered ID (`CartPole-v1`, or `module:Env-v0`, whose module is imported first), or a function
            that makes an environment.
        env_kwargs: For `gymnasium.make`.
        threads: How many threads environments run on, in each worker. Each environment stays on one of them.
        idle_seconds: An environment that nobody uses for so long is closed.
        step_timeout_seconds: A step, reset or close that takes longer is taken for one that never ends: it is answered 504
            `environment_hung`, its thread is given up, and the sessions whose environments live on that thread are lost.

    The other arguments are those of every RL server (`RlServer`).

    Raises:
        ConfigurationError: the environment cannot be made, or one of its spaces cannot be served; the message names it.
    """

    session_starts: ClassVar[tuple[str, ...]] = ("POST /reset",)

    def __init__(
        self,
        environment: str | EnvMaker,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        threads: int = DEFAULT_THREADS,
        idle_seconds: float = DEFAULT_IDLE_SECONDS,
        step_timeout_seconds: float = DEFAULT_STEP_TIMEOUT_SECONDS,
        max_body_bytes: int = GYMNASIUM_MAX_BODY_BYTES,
        **settings: Any,
    ) -> None:
        if threads < 1:
            raise ConfigurationError(f"threads is {threads}: environments need 1 or more")
        if not idle_seconds > 0:
            raise ConfigurationError(f"idle_seconds is {idle_seconds}: give a positive number of seconds")
        if not 0 < step_timeout_seconds < float("inf"):
            raise ConfigurationError(
                f"step_timeout_seconds is {step_timeout_seconds}: give a positive, finite number of seconds"
            )
        name, make = maker(environment, env_kwargs)
        settings.setdefault("name", "".join(each if each.isalnum() else "_" for each in name))
        super().__init__(max_body_bytes=max_body_bytes, **settings)
        self.env_kind = EnvKind(name, make)
        self._threads = threads
        self._idle_seconds = idle_seconds
        self._step_timeout_seconds = step_timeout_seconds
        self._lanes: Lanes | None = None

    # --- the server ---

    def lists(self) -> str:
        return "POST /reset, /step, /batch and /close_session, and GET /spaces are."

    async def aggregate_metrics(self, asked: AggregateRequest) -> BaseModel | Mapping[str, Any]:
        """What a list of verdicts comes to. Keeps nothing."""
        return aggregate(asked.verify_responses)

    async def release(self, state: Hosted) -> None:
        """Close the environment, on its own thread. One whose thread was given up is out of reach."""
        if not state.lane.given_up:
            await state.lane.run(state.env.close)
            self._open_lanes.give_back(state.lane)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        lanes = self._lanes = Lanes(self._threads, self._step_timeout_seconds)
        watch = asyncio.create_task(lanes.watch(self._lose_all_of), name="homing watches environments")
        try:
            async with super().serving():
                try:
                    yield
                finally:
                    lanes.act_seconds = min(lanes.act_seconds, STOP_SECONDS)
        finally:
            watch.cancel()
            await ended([watch])
            await lanes.aclose()

    async def sweep(self) -> None:
        """Also end the sessions that nobody has used for too long."""
        now = self.clock.monotonic()
        for session in self.sessions:
            if not session.in_use and now - session.state.used_at > self._idle_seconds:
                self.drop_session(session.id)
                self.router.lifetimes.ended(session.id)
        await super().sweep()

    def _lose_all_of(self, lane: Lane, where: str) -> None:
        """An environment hangs: no environment of its thread can be used, moved or closed any more."""
        lost = [session for session in self.sessions if session.state.lane is lane]
        for session in lost:
            self.sessions.remove(session.id)
            self.router.lifetimes.ended(session.id)
        logger.error(
            "an environment of %s has not ended a step, reset or close within %g s: its thread is given up, and the %d "
            "sessions on it are lost. It is here:\n%s",
            self.env_kind.name,
            self._open_lanes.act_seconds,
            len(lost),
            where,
        )

    @property
    def _open_lanes(self) -> Lanes:
        assert self._lanes is not None, "environments are made while the server serves"
        return self._lanes

    def add_routes(self, app: FastAPI) -> None:
        too_large, malformed = "the body is over the limit", "the body is malformed, or the action outside its space"
        lost, failed = "the session has no environment here: reset it", "the environment raised"
        add_json_route(
            app,
            "/reset",
            self._answer_reset,
            name="reset",
            body=ResetRequest,
            reply=ResetReply,
            summary="Begin an episode; the first one of a session makes its environment",
            errors={409: "the session is being closed", 413: too_large, 422: malformed, 500: failed},
        )
        self.fast_routes["/step"] = add_json_route(
            app,
            "/step",
            self._answer_step,
            name="step",
            body=StepRequest,
            reply=StepReply,
            summary="Take a step. The one that ends the episode ends the session, unless the request says a close follows",
            errors={404: lost, 409: "the episode is over: reset it", 413: too_large, 422: malformed, 500: failed},
        )
        self.fast_routes["/batch"] = add_json_route(
            app,
            "/batch",
            self._answer_batch,
            name="batch",
            body=BatchRequest,
            reply=BatchReply,
            summary="Steps and resets of many sessions of one worker, which x-ng-session-owner names",
            errors={413: too_large, 422: malformed},
        )
        add_json_route(
            app,
            "/close_session",
            self._answer_close,
            name="close_session",
            reply=dict[str, Any],
            summary="End the cookie's session and close its environment; succeeds again",
            errors={503: "the environment could not be closed, or is in use: send it again"},
        )
        add_json_route(
            app,
            "/spaces",
            self._answer_spaces,
            name="spaces",
            reply=dict[str, Any],
            methods=("GET",),
            summary="The environment's spaces and metadata, and the workers that live",
        )
        add_json_route(
            app,
            "/aggregate_metrics",
            self._answer_aggregate,
            name="aggregate_metrics",
            body=AggregateRequest,
            reply=Aggregate,
            summary="What a list of verdicts comes to; needs no session",
            errors={413: too_large, 422: malformed},
        )

    # --- handlers ---

    async def _answer_reset(self, request: Request) -> Response:
        body = await self._read(request)
        seed, options = _reset_arguments(body, "")
        binary = asks_for_binary(request.headers.get("accept"))
        session_id: str = request.scope[SESSION_ID_SCOPE_KEY]
        async with self.sessions.changing(session_id):
            session = self.sessions.get(session_id)
            if session is not None:
                with session as hosted:
                    outcome = await self._do(hosted, hosted.env.reset, seed, options, binary)
            else:
                hosted, outcome = await self._begin(seed, options, binary)
                self.sessions.open(session_id, hosted)
        return _reply(outcome.content | {"session_id": session_id}, binary, self.owner_headers())

    async def _begin(self, seed: int | None, options: dict[str, Any] | None, binary: bool) -> tuple[Hosted, Outcome]:
        """Make an environment and reset it. If that fails, nothing of it is left."""
        lane = self._open_lanes.take()
        try:
            return await lane.run(self._made, lane, seed, options, binary)
        except BaseException:
            self._open_lanes.give_back(lane)
            raise

    def _made(
        self, lane: Lane, seed: int | None, options: dict[str, Any] | None, binary: bool
    ) -> tuple[Hosted, Outcome]:
        env = HostedEnv(self.env_kind)
        try:
            outcome = env.reset(seed, options, binary)
        except BaseException:
            with contextlib.suppress(Exception):
                env.close()
            raise
        return Hosted(env, lane, self.clock.monotonic()), outcome

    async def _answer_step(self, request: Request) -> Response:
        session = self.sessions.get(request.scope.get(SESSION_ID_SCOPE_KEY))
        if session is None:
            raise SessionLostError(_NO_SESSION)
        body = await self._read(request)
        action, then_reset = self._step_arguments(body, "")
        binary = asks_for_binary(request.headers.get("accept"))
        with session as hosted:
            outcome = await self._do(hosted, hosted.env.step, action, then_reset, binary)
        if outcome.over and not close_follows(request.headers.getlist):
            homing.end(request.scope)
            await self.end_session(session)
        return _reply(outcome.content, binary, self.owner_headers())

    async def _answer_batch(self, request: Request) -> Response:
        body = await self._read(request)
        items = body.get("items")
        if not isinstance(items, list) or len(items) > MAX_BATCH_ITEMS:
            raise InvalidRequestError.about("items", f"a list of at most {MAX_BATCH_ITEMS} is expected")
        binary = asks_for_binary(request.headers.get("accept"))
        answers: list[Any] = [None] * len(items)
        with contextlib.ExitStack() as serving:
            asked: dict[Lane, list[_Asked]] = {}
            for place, item in enumerate(items):
                try:
                    each = self._asked(request, place, item, serving, binary)
                except ReplyError as error:
                    answers[place] = _item_error(error)
                else:
                    asked.setdefault(each.session.state.lane, []).append(each)
            for done in await asyncio.gather(*(_done(lane, each, binary) for lane, each in asked.items())):
                for place, answer in done:
                    answers[place] = answer
        return _reply({"items": answers}, binary)

    def _asked(self, request: Request, place: int, item: Any, serving: contextlib.ExitStack, binary: bool) -> _Asked:
        """Take an item in: look at its session's record, and count this request as one of the session's.

        Raises:
            ReplyError: it cannot be done; nothing of it ran.
        """
        inside = f"items.{place}"
        if not isinstance(item, dict) or not isinstance(item.get("session_id"), str):
            raise InvalidRequestError.about(f"{inside}.session_id", "a string is expected")
        session_id: str = item["session_id"]
        session = self.sessions.get(session_id)
        if session is None:
            raise NotHereError
        counted: AbstractContextManager[None] = homing.serving(request.scope, session_id)
        serving.enter_context(counted)
        if "reset" in item:
            reset = item["reset"]
            if not isinstance(reset, dict):
                raise InvalidRequestError.about(f"{inside}.reset", "an object is expected")
            arguments: tuple[Any, ...] = (*_reset_arguments(reset, f"{inside}.reset"), binary)
            hosted: Hosted = serving.enter_context(session)
            work = (hosted.env.reset, *arguments)
        else:
            arguments = (*self._step_arguments(item, inside), binary)
            hosted = serving.enter_context(session)
            work = (hosted.env.step, *arguments)
        hosted.used_at = self.clock.monotonic()
        return _Asked(place, session, work)

    async def _answer_alive(self, request: Request) -> Response:
        given_up = 0 if self._lanes is None else self._lanes.given_up
        told = {"status": "ok", "server": self.name, "worker": self.worker_id}
        return json_response({**told, "environments": len(self.sessions), "threads_given_up": given_up})

    async def _answer_close(self, request: Request) -> Response:
        session_id = request.scope[SESSION_ID_SCOPE_KEY]
        async with self.sessions.changing(session_id):
            await self.sessions.end(session_id)
        return json_response({"closed": True})

    async def _answer_spaces(self, request: Request) -> Response:
        worker = self.router.worker
        # In a thread, since it lists the run directory.
        workers = [] if worker is None else sorted([worker.id, *await asyncio.to_thread(worker.others_to_start_at)])
        content = {**self.env_kind.description, "workers": workers}
        return _reply(content, asks_for_binary(request.headers.get("accept")))

    async def _answer_aggregate(self, request: Request) -> Response:
        asked: AggregateRequest = validated(_AGGREGATE, await read_body(request, self.max_body_bytes))
        return json_response(await self.aggregate_metrics(asked))

    # --- what they have in common ---

    async def _read(self, request: Request) -> dict[str, Any]:
        raw = await read_body(request, self.max_body_bytes)
        return unpack(raw, binary=is_binary(request.headers.get("content-type")))

    def _step_arguments(self, body: dict[str, Any], inside: str) -> tuple[Any, bool]:
        field = f"{inside}.action" if inside else "action"
        if "action" not in body:
            raise InvalidRequestError.about(field, "missing")
        then_reset = body.get("then_reset", False)
        if not isinstance(then_reset, bool):
            raise InvalidRequestError.about(
                f"{inside}.then_reset" if inside else "then_reset", "true or false is expected"
            )
        return decode_member(self.env_kind.action, body["action"], inside=field), then_reset

    async def _do(self, hosted: Hosted, work: Any, *arguments: Any) -> Outcome:
        hosted.used_at = self.clock.monotonic()
        outcome: Outcome = await hosted.lane.run(work, *arguments)
        return outcome


async def _done(lane: Lane, asked: list[_Asked], binary: bool) -> list[tuple[int, Any]]:
    """Do the items of one thread. If it is given up, they are lost, whatever each came to, and those of other threads stand."""
    try:
        return await lane.run(_all_of, lane, asked, binary)
    except EnvironmentHungError as error:
        return [(each.place, _item_error(error)) for each in asked]


def _all_of(lane: Lane, asked: list[_Asked], binary: bool) -> list[tuple[int, Any]]:
    """On the thread: do the items, and pack what they gave there too."""
    done: list[tuple[int, Any]] = []
    for each in asked:
        lane.next_act()
        work, *arguments = each.work
        try:
            content = work(*arguments).content
        except ReplyError as error:
            content = _item_error(error)
        done.append((each.place, msgspec.Raw(pack(content, binary=True)) if binary else content))
    return done


def _item_error(error: ReplyError) -> dict[str, Any]:
    return {"error": {"code": error.code, "detail": error.detail, "status": error.status}}


def _reset_arguments(body: dict[str, Any], inside: str) -> tuple[int | None, dict[str, Any] | None]:
    """Seed and options of a reset.

    Raises:
        InvalidRequestError: one is of another type.
    """
    prefix = f"{inside}." if inside else ""
    seed, options = body.get("seed"), body.get("options")
    if isinstance(seed, float) and seed.is_integer():
        seed = int(seed)  # JSON knows one kind of number
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED):
        raise InvalidRequestError.about(f"{prefix}seed", f"an integer from 0 to {MAX_SEED} is expected, or null")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequestError.about(f"{prefix}options", "an object is expected, or null")
    return seed, options


def _reply(content: dict[str, Any], binary: bool, headers: Mapping[str, str] | None = None) -> Response:
    media_type = MSGPACK if binary else JSON
    return Response(pack(content, binary=binary), headers=headers, media_type=media_type)
