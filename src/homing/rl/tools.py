"""A resources server's tools: methods whose annotations say which arguments a call takes.

The invariant: a tool runs only with arguments that are what its annotations say, each by its name.

Not here: how a call arrives (`resources.py` over HTTP, `mcp.py` over MCP).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from homing.errors import ConfigurationError
from homing.rl.errors import invalid
from homing.rl.json_route import validated

RESERVED: Final = frozenset(
    {
        "verify",
        "seed_session",
        "close_session",
        "sandbox_access",
        "aggregate_metrics",
        "reverify_mode",
        "mcp",
        "healthz",
        "docs",
        "redoc",
        "openapi.json",
        "ng-rollout",
    }
)
"""Names that are routes of the server itself."""

_MARK: Final = "_homing_tool"

_MethodT = TypeVar("_MethodT", bound=Callable[..., Awaitable[Any]])


@overload
def tool(method: _MethodT, /) -> _MethodT: ...


@overload
def tool(*, name: str | None = None) -> Callable[[_MethodT], _MethodT]: ...


def tool(method: _MethodT | None = None, /, *, name: str | None = None) -> _MethodT | Callable[[_MethodT], _MethodT]:
    """Make an async method of a `ResourcesServer` a tool: `POST /<name>`, and, if exposed, a tool over MCP.

    The method takes the session's state and then its arguments, each annotated; its docstring is the tool's description.
    What it returns is the reply's JSON. Raise `ToolError` to answer with a sentence instead.

    Example:
        >>> class Counter(ResourcesServer[list[int]]):  # doctest: +SKIP
        ...     @tool
        ...     async def add(self, numbers: list[int], number: int = 1) -> int:
        ...         '''Add a number.'''
        ...         numbers.append(number)
        ...         return sum(numbers)
    """

    def mark(given: _MethodT) -> _MethodT:
        setattr(given, _MARK, name or given.__name__)
        return given

    return mark if method is None else mark(method)


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of a server.

    Attributes:
        arguments: The model of its JSON arguments; its field names are not the arguments' names, its aliases are.
        result: What it returns, as annotated; None if it is not annotated.
    """

    name: str
    description: str
    method: Callable[..., Awaitable[Any]]
    arguments: type[BaseModel]
    result: Any
    _adapter: TypeAdapter[BaseModel]
    _names: tuple[tuple[str, str], ...]

    def from_json(self, raw: bytes) -> dict[str, Any]:
        """The arguments in a JSON body; no body is none.

        Raises:
            InvalidRequestError: they are not what the tool takes; the message names the argument.
        """
        return self._by_name(validated(self._adapter, raw))

    def from_object(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments in a parsed JSON object.

        Raises:
            InvalidRequestError: as `from_json`.
        """
        try:
            found = self._adapter.validate_python(arguments)
        except ValidationError as error:
            raise invalid(error) from error
        return self._by_name(found)

    def schema(self) -> dict[str, Any]:
        """The arguments' JSON schema."""
        return self.arguments.model_json_schema(by_alias=True)

    def _by_name(self, found: BaseModel) -> dict[str, Any]:
        values = found.__dict__
        return {name: values[field] for field, name in self._names}


def tools_of(server: object) -> dict[str, Tool]:
    """A server's tools by name.

    Raises:
        ConfigurationError: one is no async method, has a reserved or doubled name, or an argument without annotation.
    """
    found: dict[str, Tool] = {}
    for attribute in dir(type(server)):
        function = inspect.getattr_static(type(server), attribute)
        name = getattr(function, _MARK, None)
        if name is None:
            continue
        made = _tool(name, attribute, function, getattr(server, attribute))
        if name in found:
            raise ConfigurationError(f"{type(server).__name__} has two tools named {name}: give one another name")
        found[name] = made
    return found


def _tool(name: str, attribute: str, function: Any, method: Callable[..., Awaitable[Any]]) -> Tool:
    where = f"the tool {name} ({attribute})"
    if name in RESERVED or "/" in name or not name:
        raise ConfigurationError(
            f"{where}: that name is a route of the server itself, or no segment of a path; rename it"
        )
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{where} is not async: write `async def {attribute}`")
    hints = get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters:
        raise ConfigurationError(f"{where} takes no state: its first parameter after self is the session's state")
    fields: dict[str, Any] = {}
    names: list[tuple[str, str]] = []
    for number, parameter in enumerate(parameters[1:]):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigurationError(f"{where}: {parameter} is no argument that a call can name; write each out")
        if parameter.name not in hints:
            raise ConfigurationError(f"{where}: annotate {parameter.name}, so that calls can be checked")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Its own name might be one that models use themselves, such as `schema`.
        field = f"argument_{number}"
        fields[field] = (hints[parameter.name], Field(default, alias=parameter.name))
        names.append((field, parameter.name))
    try:
        arguments = create_model(
            f"{name}_arguments", __config__=ConfigDict(extra="forbid", allow_inf_nan=False, title=name), **fields
        )
        adapter: TypeAdapter[BaseModel] = TypeAdapter(arguments)
        arguments.model_json_schema(by_alias=True)
    except Exception as error:
        raise ConfigurationError(f"{where}: its arguments cannot be checked: {error}") from error
    return Tool(
        name=name,
        description=inspect.getdoc(function) or "",
        method=method,
        arguments=arguments,
        result=hints.get("return"),
        _adapter=adapter,
        _names=tuple(names),
    )
