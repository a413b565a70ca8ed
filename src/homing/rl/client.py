"""Clients of a Gymnasium server: `RemoteEnv` is one environment, `RemoteVectorEnv` many.

They ask for msgpack, so observations arrive as they were, bit for bit. The invariant: a step is sent once. If its reply is
lost, or its session is, that is raised, never hidden behind a new episode.

Not here: connections (`connections.py`), and the server (`gymnasium.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from homing.identity import SESSION_OWNER_HEADER
from homing.rl.connections import Ask, Connections, Reply
from homing.rl.errors import InvalidRequestError, RemoteError
from homing.rl.packing import MSGPACK, pack, unpack
from homing.rl.protocol import CLOSE_FOLLOWS
from homing.rl.spaces import Codec, codec_for, space_from

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS: Final = 600.0
DEFAULT_CONNECTIONS: Final = 32
MAX_BATCH: Final = 1024
"""Sessions in one batch request, at most."""

_HEADERS: Final = {"content-type": MSGPACK, "accept": MSGPACK, **CLOSE_FOLLOWS}
_GONE: Final = 410


def _described(connections: Connections) -> dict[str, Any]:
    (reply,) = connections.each([Ask("/spaces", None, {"accept": MSGPACK})])
    return _content(reply)


class _Environment:
    """What a server says about its environment."""

    def __init__(self, connections: Connections) -> None:
        described = _described(connections)
        self.observation: Codec = codec_for(space_from(described["observation_space"]))
        self.action: Codec = codec_for(space_from(described["action_space"]))
        # Nothing can be rendered from here, so there are no modes to offer.
        self.metadata: dict[str, Any] = {**described["metadata"], "render_modes": []}
        self.name: str = described["environment"]
        self.nondeterministic = bool(described["nondeterministic"])
        self.workers: list[str] = described["workers"]


class _RemoteSession:
    """One session of the server: its cookie, its ID, and its worker: that its last reset named, or where it shall begin."""

    __slots__ = ("cookies", "owner", "session_id")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.cookies: dict[str, str] = {}
        self.session_id: str | None = None
        self.owner: str | None = None

    @property
    def may_be_gone(self) -> bool:
        """A request of it reaches one worker or none."""
        return bool(self.cookies) or self.owner is not None

    def headers(self) -> dict[str, str]:
        if not self.cookies:
            return _HEADERS if self.owner is None else {**_HEADERS, SESSION_OWNER_HEADER: self.owner}
        return {**_HEADERS, "cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}

    def ask(self, path: str, content: dict[str, Any]) -> Ask:
        return Ask(path, pack(content, binary=True), self.headers())

    def was_reset(self, reply: Reply, content: dict[str, Any]) -> None:
        self.cookies |= reply.cookies()
        self.session_id = content["session_id"]
        self.owner = reply.headers.get(SESSION_OWNER_HEADER)


def _content(reply: Reply) -> dict[str, Any]:
    """A reply's content.

    Raises:
        RemoteError: the reply is an error, or none of a Gymnasium server's.
    """
    binary = (reply.headers.get("content-type") or "").startswith(MSGPACK)
    try:
        content = unpack(reply.body, binary=binary)
    except InvalidRequestError as error:
        raise RemoteError(
            f"answered {reply.status} with something else than {MSGPACK}", status=reply.status, code=None
        ) from error
    if reply.status != 200:
        told = content.get("error")
        detail = told.get("detail") if isinstance(told, dict) else None
        raise RemoteError(
            f"answered {reply.status}: {detail or 'no reason given'}",
            status=reply.status,
            code=reply.headers.get("homing-error"),
        )
    return content


class RemoteEnv(gymnasium.Env[Any, Any]):
    """An environment of a Gymnasium server, as if it were here.

    Its session begins with the first `reset` and ends with `close`. If the server loses it (its worker died), the next
    `step` raises `RemoteError`, and the next `reset` begins a new one.

    Args:
        url: Where the server is.
        timeout_seconds: How long a reset or step may take.

    Raises:
        RemoteError: the server cannot be reached, or is no Gymnasium server.
    """

    def __init__(self, url: str, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        self._connections = Connections(url, 1, timeout_seconds)
        try:
            self._remote = _Environment(self._connections)
        except BaseException:
            self._connections.close()
            raise
        self._session = _RemoteSession()
        self.observation_space = self._remote.observation.space
        self.action_space = self._remote.action.space
        self.metadata = self._remote.metadata
        # What makes this very client again, for wrappers and checks that want to.
        self.spec = EnvSpec(
            "homing/Remote-v0",
            f"{__name__}:RemoteEnv",
            kwargs={"url": url, "timeout_seconds": timeout_seconds},
            nondeterministic=self._remote.nondeterministic,
            disable_env_checker=True,
            order_enforce=False,
        )

    def __repr__(self) -> str:
        return f"<RemoteEnv {self._remote.name}>"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: observation and info, as the environment gave them.

        Raises:
            RemoteError: it could not.
        """
        super().reset(seed=seed)
        asked = {"seed": seed, "options": options}
        try:
            reply = self._ask("/reset", asked)
            content = _content(reply)
        except RemoteError as error:
            if error.status != _GONE or not self._session.cookies:
                raise
            logger.warning("the session of %r is gone, and a new one begins", self)
            self._session.forget()
            reply = self._ask("/reset", asked)
            content = _content(reply)
        self._session.was_reset(reply, content)
        return self._remote.observation.decode(content["observation"], inside="observation"), content["info"]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step: observation, reward, terminated, truncated and info.

        Raises:
            RemoteError: the session is lost, the action is none, the episode is over, or there was no reply.
            ValueError: the action is not of the action space's shape or type.
        """
        encoded = self._remote.action.encode(action, binary=True)
        content = _content(self._ask("/step", {"action": encoded}))
        return (
            self._remote.observation.decode(content["observation"], inside="observation"),
            content["reward"],
            content["terminated"],
            content["truncated"],
            content["info"],
        )

    def close(self) -> None:
        """End the session. Safe to call twice; a server that is gone has no session to end."""
        if self._session.cookies:
            with contextlib.suppress(RemoteError):
                self._ask("/close_session", {})
            self._session.forget()
        self._connections.close()

    def _ask(self, path: str, content: dict[str, Any]) -> Reply:
        connection = self._connections.one("")
        connection.send(self._session.ask(path, content))
        return connection.receive()


class RemoteVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """Many environments of a Gymnasium server, stepped at once: one request per worker steps all of that worker's.

    Since a step takes as long as the busiest worker's part of it, the sessions are dealt out evenly to the workers. The server
    finds each session's worker; what a batch says is not there is asked for by itself.

    Args:
        url: Where the server is.
        num_envs: How many environments.
        autoreset_mode: When an environment whose episode is over begins the next: with the next step, with the same step, or
            only when it is reset.
        connections: How many requests may be under way at once.
        batch: Whether to use the server's batch route.
        timeout_seconds: How long a request may take.

    Raises:
        RemoteError: the server cannot be reached, or is no Gymnasium server.
    """

    def __init__(
        self,
        url: str,
        num_envs: int,
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        connections: int = DEFAULT_CONNECTIONS,
        batch: bool = True,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__()
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: 1 or more are needed")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._connections = Connections(url, connections, timeout_seconds)
        try:
            self._remote = _Environment(self._connections)
        except BaseException:
            self._connections.close()
            raise
        self._batch = batch
        self._workers = self._remote.workers
        self._sessions = [_RemoteSession() for _ in range(num_envs)]
        self.num_envs = num_envs
        self.metadata = {**self._remote.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self._remote.observation.space
        self.single_action_space = self._remote.action.space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations: list[Any] = [None] * num_envs
        self._over = np.zeros(num_envs, dtype=np.bool_)

    def __repr__(self) -> str:
        return f"<RemoteVectorEnv {self._remote.name}: {self.num_envs}>"

    # --- gymnasium's VectorEnv ---

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every environment, or in those of `options["reset_mask"]`.

        Args:
            seed: One for the first, which the others count on from; or one for each.

        Raises:
            RemoteError: one could not begin.
            ValueError, TypeError: seeds or mask are not of the right length or type.
        """
        seeds = self._seeds(seed)
        options = None if options is None else dict(options)
        mask = (
            np.ones(self.num_envs, dtype=np.bool_) if options is None else self._mask(options.pop("reset_mask", None))
        )
        chosen = [int(place) for place in np.flatnonzero(mask)]
        asked = {place: {"reset": {"seed": seeds[place], "options": options}} for place in chosen}
        infos: dict[str, Any] = {}
        for place, content in self._done(asked).items():
            self._observations[place] = self._decoded(content["observation"])
            infos = self._add_info(infos, content["info"], place)
        self._over[mask] = False
        return self._observed(), infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Take a step in every environment: observations, rewards (float64), terminated, truncated, infos; each of shape
        (num_envs,) or of the batched space.

        Raises:
            RemoteError: a session is lost, or a request was not answered.
            ValueError: there are too few actions, or an action is not of the space; or an episode is over and autoreset is
                disabled.
        """
        given = list(iterate(self.action_space, actions))
        if len(given) != self.num_envs:
            raise ValueError(f"{len(given)} actions for {self.num_envs} environments")
        if self.autoreset_mode is AutoresetMode.DISABLED and self._over.any():
            raise ValueError(f"the episodes of environments {np.flatnonzero(self._over).tolist()} are over: reset them")
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        encode = self._remote.action.encode
        asked: dict[int, dict[str, Any]] = {}
        for place, action in enumerate(given):
            if self._over[place] and not same_step:
                asked[place] = {"reset": {}}
            elif same_step:
                asked[place] = {"action": encode(action, binary=True), "then_reset": True}
            else:
                asked[place] = {"action": encode(action, binary=True)}
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations, truncations = np.zeros((2, self.num_envs), dtype=np.bool_)
        infos: dict[str, Any] = {}
        for place, content in sorted(self._done(asked).items()):
            self._observations[place] = self._decoded(content["observation"])
            if "reward" in content:
                rewards[place] = content["reward"]
                terminations[place], truncations[place] = content["terminated"], content["truncated"]
            if "final_observation" in content:
                final = {"final_obs": self._decoded(content["final_observation"]), "final_info": content["final_info"]}
                infos = self._add_info(infos, final, place)
            infos = self._add_info(infos, content["info"], place)
        self._over = terminations | truncations
        return self._observed(), rewards, terminations, truncations, infos

    def close_extras(self, **settings: Any) -> None:
        """End all sessions. Those of a server that is gone have no end to wait for."""
        asks = [session.ask("/close_session", {}) for session in self._sessions if session.cookies]
        with contextlib.suppress(RemoteError):
            for _ in self._connections.each(asks):
                pass
        for session in self._sessions:
            session.forget()
        self._connections.close()

    # --- requests ---

    def _done(self, asked: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Do what is asked of each environment, by its place: in batches where the worker is known, else one by one."""
        done: dict[int, dict[str, Any]] = {}
        alone: list[int] = []
        batches: dict[str, list[int]] = {}
        for place in asked:
            owner = self._sessions[place].owner
            if self._batch and self._sessions[place].session_id is not None:
                batches.setdefault(owner or "", []).append(place)
            else:
                alone.append(place)
        parts = [
            (owner, places[first : first + MAX_BATCH])
            for owner, places in batches.items()
            for first in range(0, len(places), MAX_BATCH)
        ]
        # All are under way at once; each worker's go over one connection, one after another.
        by_owner: dict[str, list[list[int]]] = {}
        for owner, places in parts:
            by_owner.setdefault(owner, []).append(places)
        while by_owner:
            sent: list[tuple[str, list[int]]] = []
            try:
                for owner in list(by_owner)[: self._connections.size]:
                    places = by_owner[owner].pop(0)
                    if not by_owner[owner]:
                        del by_owner[owner]
                    self._connections.one(owner).send(self._batch_ask(owner, places, asked))
                    sent.append((owner, places))
                while sent:
                    owner, places = sent[0]
                    reply = self._connections.one(owner).receive()
                    sent.pop(0)
                    alone += self._take(reply, places, done)
            finally:
                for owner, _ in sent:
                    self._connections.one(owner).close()
        return done | dict(self._one_by_one(alone, asked))

    def _batch_ask(self, owner: str, places: list[int], asked: dict[int, dict[str, Any]]) -> Ask:
        items = [{"session_id": self._sessions[place].session_id, **asked[place]} for place in places]
        headers = {**_HEADERS, SESSION_OWNER_HEADER: owner} if owner else _HEADERS
        return Ask("/batch", pack({"items": items}, binary=True), headers)

    def _take(self, reply: Reply, places: list[int], done: dict[int, dict[str, Any]]) -> list[int]:
        """Take in a batch's reply; return the places whose sessions were not there, where nothing ran."""
        if reply.status == _GONE:
            return places  # the worker is: each session says by itself what became of it
        elsewhere: list[int] = []
        for place, item in zip(places, _content(reply)["items"], strict=True):
            error = item.get("error")
            if error is None:
                done[place] = item
            elif error["code"] == "not_here":
                elsewhere.append(place)
            else:
                raise RemoteError(f"environment {place}: {error['detail']}", status=error["status"], code=error["code"])
        return elsewhere

    def _one_by_one(self, places: list[int], asked: dict[int, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        """Ask for each by its own session's cookie."""
        self._deal_out(places)
        asks = [self._single_ask(place, asked[place]) for place in places]
        done: list[tuple[int, dict[str, Any]]] = []
        for place, reply in zip(places, self._connections.each(asks), strict=True):
            reset = "reset" in asked[place]
            try:
                content = _content(reply)
            except RemoteError as error:
                if not reset or error.status != _GONE or not self._sessions[place].may_be_gone:
                    raise RemoteError(f"environment {place}: {error}", status=error.status, code=error.code) from error
                content, reply = self._begun_anew(place, asked[place])  # noqa: PLW2901
            if reset:
                self._sessions[place].was_reset(reply, content)
            else:
                self._sessions[place].owner = reply.headers.get(SESSION_OWNER_HEADER)
            done.append((place, content))
        return done

    def _begun_anew(self, place: int, asked: dict[str, Any]) -> tuple[dict[str, Any], Reply]:
        """Begin a new session: the worker of the old one is gone, or the one that a new one was dealt out to."""
        session = self._sessions[place]
        if session.cookies:
            logger.warning("the session of environment %d of %r is gone, and a new one begins", place, self)
        if session.owner in self._workers:
            self._workers = _described(self._connections)["workers"]
        session.forget()
        self._deal_out([place])
        connection = self._connections.one("a new session")
        connection.send(self._single_ask(place, asked))
        reply = connection.receive()
        return _content(reply), reply

    def _deal_out(self, places: list[int]) -> None:
        """Give each of those that have no session yet the worker with the fewest of ours."""
        new = [place for place in places if not self._sessions[place].cookies]
        if not new or not self._workers:
            return
        held = Counter(session.owner for session in self._sessions if session.cookies)
        for place in new:
            worker = min(self._workers, key=held.__getitem__)
            held[worker] += 1
            self._sessions[place].owner = worker

    def _single_ask(self, place: int, asked: dict[str, Any]) -> Ask:
        session = self._sessions[place]
        return session.ask("/reset", asked["reset"]) if "reset" in asked else session.ask("/step", asked)

    # --- values ---

    def _decoded(self, content: Any) -> Any:
        return self._remote.observation.decode(content, inside="observation")

    def _observed(self) -> Any:
        empty: Any = create_empty_array(self.single_observation_space, n=self.num_envs, fn=np.zeros)
        return concatenate(self.single_observation_space, self._observations, empty)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + place for place in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"{len(seed)} seeds for {self.num_envs} environments")
        return [None if each is None else int(each) for each in seed]

    def _mask(self, mask: Any) -> NDArray[np.bool_]:
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise TypeError(f"options['reset_mask'] has to be a numpy array of bool of shape ({self.num_envs},)")
        if not mask.any():
            raise ValueError("options['reset_mask'] resets nothing")
        found: NDArray[np.bool_] = mask
        return found
