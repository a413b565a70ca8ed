"""A route that takes JSON and gives JSON: its body is read within a limit, validated once, and errors name the field.

FastAPI describes it (OpenAPI) like any route; only its handler is our own, which skips what such a route does not need.

Not here: what the routes do.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from homing.errors import ReplyError
from homing.rl.errors import BodyTooLargeError, InvalidRequestError, RlError, invalid
from homing.routing.answers import ERROR_HEADER
from homing.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES: Final = 2**20

_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")

Handler = Callable[[Request], Awaitable[Response]]


class ErrorField(BaseModel):
    """One field of the body that cannot be used."""

    field: str
    problem: str


class ErrorContent(BaseModel):
    """What went wrong, for programs (`code`) and for people (`detail`)."""

    code: str
    detail: str
    fields: list[ErrorField] = []


class ErrorBody(BaseModel):
    """The body of every error reply; its code is also in the header `homing-error`."""

    error: ErrorContent


class JsonRoute(APIRoute):
    """A route whose endpoint is only described by its signature, and served by its attribute `serve`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """The endpoint's own handler."""
        serve: Handler = self.endpoint.serve  # type: ignore[attr-defined]  # set by `add_json_route`
        return serve


def _answering(name: str, serve: Handler) -> Handler:
    """`serve`, with every error as a reply."""

    async def handler(request: Request) -> Response:
        try:
            return await serve(request)
        except ReplyError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except Exception:
            # Caught here, and not by the server, so that the caller gets the same whether it was forwarded or not.
            logger.exception("%s failed", name)
            detail = f"{name} failed; the server's log says why."
            return _error_response(500, "internal_error", detail, (), {})

    return handler


class FastRoutes:
    """Serves some routes at once, past the session cookie and the app's own routing: those that need neither.

    Which session such a request is of, the router has found already; it makes none, and its reply sets no cookie.
    """

    def __init__(self, app: ASGIApp, routes: Mapping[str, Handler]) -> None:
        self.app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            handler = self._routes.get(scope["path"])
            if handler is not None:
                response = await handler(Request(scope, receive))
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


def add_json_route(
    app: FastAPI,
    path: str,
    serve: Handler,
    *,
    name: str,
    body: Any = None,
    reply: Any = None,
    summary: str | None = None,
    description: str | None = None,
    errors: dict[int, str] | None = None,
    methods: tuple[str, ...] = ("POST",),
    tags: tuple[str, ...] = (),
) -> Handler:
    """Add a route that `serve` handles, described by the types of its body and reply.

    Args:
        errors: Which statuses it answers errors with, and when.

    Returns:
        What handles it, with every error as a reply; for `FastRoutes`.
    """
    handler = _answering(name, serve)

    async def endpoint(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("described, never called")

    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
        for name in _PLACEHOLDER.findall(path)
    ]
    if body is not None:
        default: Any = inspect.Parameter.empty
        with contextlib.suppress(ValidationError):
            # No body is an empty object.
            TypeAdapter(body).validate_python({})
            default = None
        parameters.append(
            inspect.Parameter("body", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=body, default=default)
        )
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    endpoint.__name__ = name
    endpoint.__doc__ = description
    endpoint.serve = handler  # type: ignore[attr-defined]
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": when} for status, when in (errors or {}).items()
    }
    app.router.add_api_route(
        path,
        endpoint,
        methods=list(methods),
        response_model=reply,
        summary=summary,
        description=description,
        responses=responses,
        operation_id=name,
        route_class_override=JsonRoute,
        tags=list(tags),
    )
    return handler


def add_error_replies(app: FastAPI, lists: Callable[[], str]) -> None:
    """Answer every error of the app in one shape.

    Args:
        lists: Says what there is, for a path that is not.
    """

    async def reply_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ReplyError)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"There is no such route. {lists()}"
        return _error_response(error.status_code, code, detail, (), dict(error.headers or {}))

    app.add_exception_handler(ReplyError, reply_error)
    app.add_exception_handler(HTTPException, http_error)


def error_response(error: ReplyError) -> Response:
    """The reply for an error: `{"error": {"code", "detail", "fields"}}`."""
    headers = {} if error.retry_after_seconds is None else {"retry-after": str(error.retry_after_seconds)}
    fields = error.fields if isinstance(error, RlError) else ()
    return _error_response(error.status, error.code, error.detail, fields, headers)


def _error_response(status: int, code: str, detail: str, fields: Any, headers: dict[str, str]) -> Response:
    content = {"code": code, "detail": detail}
    if fields:
        content["fields"] = fields
    return json_response({"error": content}, status=status, headers={**headers, ERROR_HEADER.decode(): code})


async def read_body(request: Request, limit: int = DEFAULT_MAX_BODY_BYTES) -> bytes:
    """The whole body.

    Raises:
        BodyTooLargeError: it is over the limit; no more of it is read.
        ClientDisconnect: the client left before it was complete.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    receive = request.receive
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise _too_large(limit)
        return body
    parts, length = [body], len(body)
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        length += len(message.get("body", b""))
        if length > limit:
            raise _too_large(limit)
        parts.append(message.get("body", b""))
    return b"".join(parts)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is over this server's limit of {limit} bytes.")


def validated(adapter: TypeAdapter[Any], raw: bytes) -> Any:
    """A body as its type.

    Raises:
        InvalidRequestError: it is no JSON, or not of that type; the message names the field.
    """
    refuse_odd_numbers(raw)
    try:
        return adapter.validate_json(raw or b"{}")
    except ValidationError as error:
        raise invalid(error) from error


def refuse_odd_numbers(raw: bytes) -> None:
    """Refuse NaN and infinities, which are no JSON (RFC 8259, 6), wherever they are: parsers let them through.

    Raises:
        InvalidRequestError: there is one.
    """
    if b"NaN" in raw or b"Infinity" in raw:  # or a string that says so
        json_object(raw)


def json_object(raw: bytes) -> dict[str, Any]:
    """A body that may be any JSON object; none is an empty one.

    Raises:
        InvalidRequestError: it is no JSON object.
    """
    try:
        found = from_json(raw or b"{}", allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body: no valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise InvalidRequestError("the body: a JSON object is expected")
    return found


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply; models, dataclasses, dates and the like as pydantic writes them, NaN and infinities as null."""
    body = to_json(content, inf_nan_mode="null", exclude_none=False)
    return Response(body, status, headers, media_type="application/json")
