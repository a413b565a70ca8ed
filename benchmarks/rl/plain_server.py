"""What one writes without homing: FastAPI, the environments in a dict by the session cookie's ID, one worker.

uvicorn benchmarks.rl.plain_server:app        BENCH_MILLISECONDS is the environment's work per step
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from benchmarks.rl.env import Work
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel
from starlette.middleware.sessions import SessionMiddleware

app = FastAPI()
app.add_middleware(SessionMiddleware, secret_key="benchmark")
environments: dict[str, Work] = {}
MILLISECONDS = float(os.environ.get("BENCH_MILLISECONDS", "0"))


class Reset(BaseModel):
    seed: int | None = None
    options: dict[str, Any] | None = None


class ResetReply(BaseModel):
    observation: list[float]
    info: dict[str, Any]
    session_id: str


class Step(BaseModel):
    action: int


class StepReply(BaseModel):
    observation: list[float]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/reset")
async def reset(body: Reset, request: Request) -> ResetReply:
    session_id = request.session.setdefault("session_id", uuid.uuid4().hex)
    env = environments.setdefault(session_id, Work(MILLISECONDS))
    observation, info = env.reset(seed=body.seed, options=body.options)
    return ResetReply(observation=observation.tolist(), info=info, session_id=session_id)


def _step(env: Work, action: int) -> StepReply:
    if not env.action_space.contains(action):
        raise HTTPException(422, "action: outside the space")
    observation, reward, terminated, truncated, info = env.step(action)
    return StepReply(
        observation=observation.tolist(), reward=reward, terminated=terminated, truncated=truncated, info=info
    )


if os.environ.get("BENCH_THREADS"):
    # As FastAPI's manual advises for work that would hold up the event loop: a plain function, on its thread pool.
    @app.post("/step")
    def step_on_a_thread(body: Step, request: Request) -> StepReply:
        return _step(environments[request.session["session_id"]], body.action)

else:

    @app.post("/step")
    async def step(body: Step, request: Request) -> StepReply:
        return _step(environments[request.session["session_id"]], body.action)
