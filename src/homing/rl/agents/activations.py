"""The activations that run at this worker, each for as long as somebody waits for it.

The invariant: an activation whose caller is gone, or whose session is closed, is cancelled, and nothing of its session is cleaned up
before it has ended. What came of it is noted in the step in which it ends, so that a close sees either all of it or none.

Not here: what one is (`activation.py`), and sessions (`server.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from homing.rl.agents.activation import Activation
from homing.rl.disconnect import client_left, end_tasks
from homing.rl.episode_protocol import ACTIVATION_HEADER
from homing.rl.errors import ConflictError, InvalidRequestError


class Activations:
    """Runs activations.

    Args:
        respond: The agent: gives an activation's response.
    """

    def __init__(self, respond: Callable[[Activation], Awaitable[dict[str, Any]]]) -> None:
        self._respond = respond
        self._running: set[Activation] = set()

    def __repr__(self) -> str:
        return f"<Activations: {len(self._running)} running>"

    async def run(self, activation: Activation, request: Request) -> dict[str, Any]:
        """Run it, and give its response.

        Raises:
            ClientDisconnect: its caller left first.
            ConflictError: its session was closed meanwhile.
            Exception: what the agent raised.
        """
        running = activation.task = asyncio.create_task(self._activate(activation), name="homing agent activation")
        leaving = asyncio.create_task(client_left(request), name="homing agent client")
        self._running.add(activation)
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not await cut_off(activation) or running.cancelled():
                if leaving.done():
                    raise ClientDisconnect
                raise ConflictError("the session was closed while the activation ran")
            return running.result()
        finally:
            self._running.discard(activation)
            ended = await end_tasks([running, leaving])
            # A task that was cancelled before it began has not done so itself.
            if ended and activation.session is not None and activation.session.activation is activation:
                activation.session.activation = None

    def stop(self, rollout_id: str, reason: str) -> bool:
        """Ask those of a rollout to stop; whether any was not asked before."""
        running = [each for each in self._running if each.rollout_id == rollout_id]
        stopped = [each.stop(reason) for each in running]
        return any(stopped)

    async def _activate(self, activation: Activation) -> dict[str, Any]:
        session = activation.session
        try:
            response = await self._respond(activation)
        except BaseException:
            if session is not None:
                session.partial_response = activation.response(incomplete="cut_off")
            raise
        else:
            if session is not None:
                session.responses.append(response)
            return response
        finally:
            if session is not None:
                session.activation = None


async def cut_off(activation: Activation) -> bool:
    """Cancel an activation and wait until it has ended; False if it goes on all the same."""
    return activation.task is None or await end_tasks([activation.task])


def activation_index(request: Request, following: int) -> int:
    """Which activation of its session a request is: the following one, if it does not say.

    Raises:
        InvalidRequestError: what it says is no index.
        ConflictError: there are activations to come before that one.
    """
    text = request.headers.get(ACTIVATION_HEADER)
    if text is None:
        return following
    if not text.isdecimal() or not int(text) >= 1:
        raise InvalidRequestError(f"{ACTIVATION_HEADER} is the activation's index in its session, from 1 on")
    if int(text) > following:
        raise ConflictError(f"{ACTIVATION_HEADER} is {text}, and the session's next activation is {following}")
    return int(text)
