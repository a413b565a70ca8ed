"""The tasks of `homing rl demo`, and the resources server that judges them: add up numbers with a tool that keeps the sum.

A session's sum is in the memory of the worker that seeded it, so a call that reached another worker would add to another
sum, and the verdict would be wrong.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from homing.rl.demo.model import OFF_BY_ONE
from homing.rl.protocol import TaskId, VerifyRequest
from homing.rl.resources import ResourcesServer
from homing.rl.rollouts.tasks import task_line
from homing.rl.tools import tool

_ANSWER: Final = re.compile(r"The total is (-?\d+)\.")

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "name": "add",
        "description": "Add a number to the sum.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    {
        "type": "function",
        "name": "total",
        "description": "The sum so far.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        "strict": True,
    },
]


class SumTask(BaseModel):
    """A task's fields: the numbers to add up."""

    numbers: list[int]


class SumVerify(VerifyRequest):
    """The same, beside what the agent answered."""

    numbers: list[int]


@dataclass
class Sum:
    """A session's state: what was added, in order."""

    added: list[int] = field(default_factory=list)


class SumServer(ResourcesServer[Sum]):
    """Adds up. The reward is 1 for an answer that names the sum of exactly the task's numbers."""

    async def seed(self, seed: SumTask) -> Sum:
        return Sum()

    @tool
    async def add(self, state: Sum, number: int) -> dict[str, int]:
        """Add a number to the sum."""
        state.added.append(number)
        return {"count": len(state.added)}

    @tool
    async def total(self, state: Sum) -> dict[str, int]:
        """The sum so far."""
        return {"total": sum(state.added)}

    async def verify(self, state: Sum, request: SumVerify) -> float:
        said = _ANSWER.search(str(request.response.get("output")))
        right = state.added == request.numbers and said is not None and int(said[1]) == sum(request.numbers)
        return float(right)


def demo_task(number: int, seed: int = 0) -> tuple[str, dict[str, Any], float]:
    """The ID, the input and the right reward of a task; one in five asks for a wrong answer."""
    chosen = random.Random(seed * 1_000_003 + number)  # noqa: S311 - any numbers will do
    numbers = [chosen.randint(1, 99) for _ in range(chosen.randint(1, 4))]
    wrong = number % 5 == 4
    asked = f"Add the numbers {', '.join(map(str, numbers))} one by one, and say the total."
    if wrong:
        asked += f" {OFF_BY_ONE}"
    params = {"input": [{"role": "user", "content": asked}], "tools": TOOLS}
    return str(number), {"numbers": numbers, "responses_create_params": params}, float(not wrong)


def demo_task_line(number: int) -> str:
    """The task as a line of a file of tasks."""
    task_id, task_input, _ = demo_task(number)
    return task_line(TaskId(taskset="demo", task_id=task_id), task_input)
