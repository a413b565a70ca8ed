"""A scripted solver of MiniWoB: plays by observations and actions alone.

It shows that the tasks can be done through the public surface, and gives the demonstration something to do. It knows how
each kind of task is done; it does not know any task's answer, runs no script in the page, and asks for no verdict.
"""

from __future__ import annotations

import contextlib

from homing.web.miniwob.solver import clicking, drawing, mail, places, reading, typing
from homing.web.miniwob.solver.agent import SOLVERS, Agent, GaveUpError, Session, TaskOverError
from homing.web.models import Observation

OBSERVATION_PROFILE = "layout"
"""What a session has to be seeded with for the solver."""

__all__ = ["OBSERVATION_PROFILE", "Agent", "Session", "solvable", "solve"]

_MODULES = (clicking, drawing, mail, places, reading, typing)


def solvable() -> list[str]:
    """The tasks that it has a way for."""
    return sorted(SOLVERS)


async def solve(session: Session, task_id: str, observation: Observation) -> Agent:
    """Play a task to its end, or as far as the solver knows.

    Args:
        observation: The seed's.
    """
    agent = Agent(session, observation)
    with contextlib.suppress(TaskOverError, GaveUpError, LookupError, ValueError, AssertionError):
        await SOLVERS[task_id](agent)
    return agent
