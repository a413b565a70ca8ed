"""A web session as a `gymnasium.Env`, with the keys that BrowserGym's observations have.

    env = homing.web.Env("http://127.0.0.1:8000", {"benchmark": "miniwob", "task_id": "click-button"})
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("click('e12')")

A failure of the server or the browser is a `WebCallError`, never a reward. After one the next `reset` begins a new
session.

Not here: the asyncio client (`client.py`).
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import httpx
import numpy as np
from gymnasium.spaces import Space

from homing.web.client import BROKEN, CALL_SECONDS, WebCallError, answer_of, bearer, identity
from homing.web.models import Observation, SeedReply, StepResult

_MAX_INDEX: Final = 2**31 - 1


class Text(Space[str]):
    """Any text."""

    def __init__(self) -> None:
        super().__init__(shape=(), dtype=None)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """An action that does nothing, which is all that can be said without a page."""
        return "noop()"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text)

    __hash__ = None  # type: ignore[assignment]  # as gymnasium's own spaces


class Anything(Space[Any]):
    """Whatever JSON has, or None."""

    def __init__(self) -> None:
        super().__init__(shape=(), dtype=None)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return None

    def contains(self, x: Any) -> bool:
        return True

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    __hash__ = None  # type: ignore[assignment]  # as gymnasium's own spaces


class Env(gymnasium.Env[dict[str, Any], str]):
    """One task on a web server. Owns its session and its connection: `close` ends both.

    Args:
        url: The server's.
        task: As the server takes it: `benchmark`, `task_id`, and what the task set knows beside them.
        screenshot: Observations have the page's picture, `uint8, (height, width, 3)`; else that is empty.
        token: The server's bearer token.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium declares it as an instance's

    def __init__(
        self, url: str, task: Mapping[str, Any], *, screenshot: bool = False, token: str | None = None
    ) -> None:
        self._task = dict(task)
        if screenshot:
            profile = self._task.get("observation_profile") or ""
            self._task["observation_profile"] = ",".join(filter(None, [profile, "screenshot"]))
        self._client = httpx.Client(base_url=url, timeout=CALL_SECONDS, headers=bearer(token), trust_env=False)
        self._is_live = False
        self._identity: dict[str, str] = {}
        self._steps = 0
        self._picture: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self.render_mode = "rgb_array" if screenshot else None
        self.action_space = Text()
        self.observation_space = gymnasium.spaces.Dict(
            {
                "chat_messages": Anything(),
                "goal": Text(),
                "goal_object": Anything(),
                "open_pages_urls": Anything(),
                "open_pages_titles": Anything(),
                "active_page_index": gymnasium.spaces.Box(0, _MAX_INDEX, (1,), np.int64),
                "url": Text(),
                "screenshot": Anything(),
                "dom_object": Anything(),
                "axtree_object": Anything(),
                "axtree_txt": Text(),
                "extra_element_properties": Anything(),
                "focused_element_bid": Text(),
                "last_action": Text(),
                "last_action_error": Text(),
                "elapsed_time": gymnasium.spaces.Box(0, np.inf, (1,), np.float64),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the task: the first time in a new session, later in the same one.

        Args:
            seed: The task's variation; None: as before.
            options: Fields of the task to change.

        Raises:
            WebCallError: the server refused.
        """
        super().reset(seed=seed)
        self._task |= options or {}
        if seed is not None:
            self._task["seed"] = seed
        if self._is_live:
            try:
                return self._begun(self._call("/reset", {"task": self._task}))
            except WebCallError as error:
                self._is_live = False
                if not error.retryable:
                    raise
                self._client.cookies.clear()
        self._identity = identity()
        return self._begun(self._call("/seed_session", {**self._identity, "task": self._task}))

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Do one action: a call as text, or JSON's object.

        Raises:
            WebCallError: the server, the browser or the action failed; it says which.
        """
        self._steps += 1
        try:
            body = {"operation_id": f"step-{self._steps}", "action": action}
            result = StepResult.model_validate(self._call("/step", body))
        except WebCallError as error:
            self._is_live = (
                self._is_live and error.status < 500 and error.error_kind not in ("session_lost", "session_gone")
            )
            raise
        observation = self._shown(result.observation)
        info = {**result.info, "execution_ok": result.execution_ok, "observation_id": result.observation.observation_id}
        return observation, result.reward or 0.0, result.terminated, result.truncated, info

    def render(self) -> Any:
        """The last observation's picture; None if there is none."""
        return self._picture

    def close(self) -> None:
        """End the session. Safe to call twice."""
        if self._is_live:
            self._is_live = False
            # If it is not reached, the server closes the session when it has been idle.
            with contextlib.suppress(WebCallError, httpx.HTTPError):
                self._call("/close", self._identity)
        self._client.close()

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self._client.post(path, json=dict(body))
        except BROKEN:
            # Steps are numbered, and the session is named by us: it is done once, however often it is sent.
            response = self._client.post(path, json=dict(body))
        return answer_of(response)

    def _begun(self, answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        reply = SeedReply.model_validate(answer)
        self._is_live = True
        info = {**reply.info, "session_id": reply.session_id, "observation_id": reply.observation.observation_id}
        return self._shown(reply.observation), info

    def _shown(self, seen: Observation) -> dict[str, Any]:
        self._picture = _picture(seen)
        goal = "\n".join(seen.goal)
        return {
            "chat_messages": (),
            "goal": goal,
            "goal_object": tuple({"type": "text", "text": text} for text in seen.goal),
            "open_pages_urls": tuple(tab.url for tab in seen.tabs),
            "open_pages_titles": tuple(tab.title for tab in seen.tabs),
            "active_page_index": np.asarray([seen.active_tab], np.int64),
            "url": seen.url,
            "screenshot": self._picture if self._picture is not None else np.zeros((0, 0, 3), np.uint8),
            "dom_object": seen.dom,
            "axtree_object": None,
            "axtree_txt": seen.axtree,
            "extra_element_properties": {},
            "focused_element_bid": seen.focused_ref or "",
            "last_action": seen.last_action,
            "last_action_error": seen.last_action_error,
            "elapsed_time": np.asarray([seen.elapsed_seconds], np.float64),
        }


def _picture(seen: Observation) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    if seen.screenshot is None or seen.screenshot.data_url is None:
        return None
    from PIL import Image

    data = base64.b64decode(seen.screenshot.data_url.partition(",")[2])
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"), np.uint8)
