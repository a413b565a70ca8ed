"""A client of a web server: sessions over HTTP, from asyncio.

An error reply is a `WebCallError` with its kind; no failure comes back as a reward. A call whose connection broke is sent
again once: every call may be, since the client names its session itself and numbers its steps.

Not here: the gymnasium environment (`environment.py`), which is synchronous.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

import httpx

from homing.errors import HomingError
from homing.web.models import ArtifactRef, Observation, SeedReply, StepResult, VerifierResult

CALL_SECONDS: Final = 330.0
"""A seed may wait for a site and for a browser."""


class WebCallError(HomingError):
    """A call was answered with an error.

    Attributes:
        status: The HTTP status.
        error_kind: One of a closed set; `http_error` where the reply has none.
        retryable: The same call, or a new session, may succeed.
    """

    def __init__(self, status: int, error_kind: str, detail: str, *, retryable: bool) -> None:
        super().__init__(f"{status} {error_kind}: {detail}")
        self.status = status
        self.error_kind = error_kind
        self.retryable = retryable


class WebSession:
    """One session on a server. Owns its connection and its cookie; ends with `aclose`.

    Args:
        url: The server's.
        token: The server's bearer token, if it asks for one.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, timeout=CALL_SECONDS, headers=bearer(token), trust_env=False, follow_redirects=False
        )
        self._identity = identity()
        self._steps = 0
        self.session_id: str | None = None
        self.observation: Observation | None = None
        self.artifacts: tuple[ArtifactRef, ...] = ()

    async def seed(self, task: Mapping[str, Any]) -> Observation:
        """Begin the task.

        Raises:
            WebCallError: it was refused.
            httpx.HTTPError: there was no answer.
        """
        reply = SeedReply.model_validate(await self._call("/seed_session", {**self._identity, "task": dict(task)}))
        self.session_id = reply.session_id
        self.observation = reply.observation
        return reply.observation

    async def step(self, action: Mapping[str, Any] | str) -> StepResult:
        """Do one action."""
        self._steps += 1
        body = {"operation_id": f"step-{self._steps}", "action": action}
        result = StepResult.model_validate(await self._call("/step", body))
        self.observation = result.observation
        return result

    async def evaluate(self, final_answer: str | None = None) -> VerifierResult:
        """The verdict: the same one, however often it is asked for."""
        reply = await self._call("/evaluate", {"final_answer": final_answer})
        return VerifierResult.model_validate(reply["result"])

    async def close(self) -> None:
        """End the session."""
        if self.session_id is not None:
            reply = await self._call("/close", self._identity)
            self.artifacts = tuple(ArtifactRef.model_validate(each) for each in reply.get("recording_artifacts", ()))
            self.session_id = None

    async def aclose(self) -> None:
        """Let go of the connection. Safe to call twice."""
        await self._client.aclose()

    async def __aenter__(self) -> WebSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        finally:
            await self.aclose()

    async def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post(path, json=body)
        except BROKEN:
            response = await self._client.post(path, json=body)
        return answer_of(response)


BROKEN: Final = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ConnectError)
"""The connection broke, as one does that was idle and is closed by the server at the same moment."""


def identity() -> dict[str, str]:
    """A new session's name and secret, which make its seed and its close safe to send again."""
    return {"_ng_session_id": secrets.token_hex(16), "_ng_session_close_token": secrets.token_urlsafe(32)}


def bearer(token: str | None) -> dict[str, str]:
    """The headers that show a token."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """The reply's JSON.

    Raises:
        WebCallError: it is an error.
    """
    try:
        answer = response.json()
    except ValueError:
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    if response.is_success:
        return answer
    raise WebCallError(
        response.status_code,
        str(answer.get("error_kind", "http_error")),
        str(answer.get("detail", response.reason_phrase)),
        retryable=bool(answer.get("retryable", response.status_code >= 500)),
    )
