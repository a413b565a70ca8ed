"""A scripted agent in a session: it looks at observations and asks for actions, as any agent does.

A session is whatever takes an action and answers with a step result: an HTTP client, or a backend in this process.

Not here: what it does in which task (`clicking.py` and the others), which register with `solves`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeAlias

from homing.web.miniwob.solver.scene import Box, Node, Scene
from homing.web.models import Observation, StepResult

MAX_STEPS: Final = 120
_WAIT_SECONDS: Final = 6.0
_COVERED_ATTEMPTS: Final = 8


class Session(Protocol):
    """What the agent plays in."""

    async def step(self, action: dict[str, Any]) -> StepResult: ...


class TaskOverError(Exception):
    """The task has ended, well or not: there is nothing more to do."""


class GaveUpError(Exception):
    """The agent does not know what to do."""


class Agent:
    """Plays one task. Borrows the session."""

    def __init__(self, session: Session, observation: Observation) -> None:
        self._session = session
        self.goal = observation.goal[0] if observation.goal else ""
        self.observation = observation
        self.scene = Scene(observation)
        self.result: StepResult | None = None
        self.steps = 0
        self.places: dict[str, Box | None] = {}

    @property
    def reward(self) -> float:
        """The last step's."""
        return 0.0 if self.result is None else (self.result.reward or 0.0)

    async def act(self, action: str, **arguments: object) -> Scene:
        """Do an action; what there is to see then.

        Raises:
            TaskOverError: the task has ended with it.
            GaveUpError: too many steps.
        """
        if self.steps >= MAX_STEPS:
            raise GaveUpError(f"{MAX_STEPS} steps")
        self.steps += 1
        self.result = await self._session.step({"action": action, **arguments})
        self.observation = self.result.observation
        self.scene = Scene(self.observation)
        if self.result.terminated or self.result.truncated:
            raise TaskOverError
        return self.scene

    async def click(self, node: Node) -> Scene:
        """Click on it; while something covers it, look again a few times, since menus and calendars fade away."""
        scene = await self.act("click", ref=node.ref)
        for _ in range(_COVERED_ATTEMPTS):
            if "covered" not in self.observation.last_action_error:
                return scene
            await self.act("noop", milliseconds=100)
            scene = await self.act("click", ref=node.ref)
        if "covered" in self.observation.last_action_error and node.box is not None:
            return await self.point(*node.middle)
        return scene

    async def hover_and_click(self, node: Node) -> Scene:
        """Point at it first: its picture is another one then, and has to be there to be clicked on."""
        await self.act("hover", ref=node.ref)
        await self.act("noop", milliseconds=50)
        return await self.click(node)

    async def press_button(self, name: str = "Submit") -> Scene:
        """Click on the button of this name, in whatever case."""
        wanted = name.lower()
        found = self.scene.all("button", where=lambda node: node.name.lower() == wanted)
        return await self.click(
            found[0] if found else self.scene.one("generic|tab", where=lambda node: node.name.lower() == wanted)
        )

    async def point(self, x: float, y: float) -> Scene:
        """Click at a place."""
        return await self.act("mouse_click", x=x, y=y)

    async def fill(self, node: Node, value: str) -> Scene:
        """Write into a field in place of what is in it."""
        return await self.act("fill", ref=node.ref, value=value)

    async def drag(self, start: tuple[float, float], end: tuple[float, float]) -> Scene:
        """Drag from one place to another."""
        return await self.act("mouse_drag_and_drop", from_x=start[0], from_y=start[1], to_x=end[0], to_y=end[1])

    async def wait_until(self, is_there: Callable[[Scene], Any], seconds: float = _WAIT_SECONDS) -> Any:
        """Look until something is there; what it is.

        Raises:
            GaveUpError: it did not come.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            try:
                found = is_there(self.scene)
            except LookupError:
                found = None
            if found:
                return found
            if loop.time() > until:
                raise GaveUpError("what was waited for did not come")
            await self.act("noop", milliseconds=60)

    async def appears(self, role: str, name: str) -> Node:
        """Look until there is such a node."""

        def find(scene: Scene) -> Node:
            return scene.one(role, name)

        found: Node = await self.wait_until(find)
        return found

    def quoted(self) -> list[str]:
        """What the goal has between quotes."""
        return re.findall(r'"([^"]*)"', self.goal)

    def match(self, pattern: str) -> tuple[str, ...]:
        """The groups of a pattern in the goal.

        Raises:
            GaveUpError: the goal is not of that form.
        """
        found = re.search(pattern, self.goal)
        if found is None:
            raise GaveUpError(f"the goal is not of the form {pattern}")
        return tuple(group or "" for group in found.groups())


Solver: TypeAlias = Callable[[Agent], Awaitable[None]]

SOLVERS: Final[dict[str, Solver]] = {}
"""By task ID."""


def solves(*task_ids: str) -> Callable[[Solver], Solver]:
    """The decorated function plays these tasks."""

    def register(solver: Solver) -> Solver:
        for task_id in task_ids:
            SOLVERS[task_id] = solver
        return solver

    return register


ORDINALS: Final = {"1st": 0, "2nd": 1, "3rd": 2}


def ordinal(text: str) -> int:
    """`3rd` → 2."""
    return int(re.sub(r"\D", "", text)) - 1
