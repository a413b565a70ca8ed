"""Task sets, browser providers and assemblies by name: those that are built in, and those that packages add.

Entry points: `homing.task_sets` and `homing.browser_providers` (see `base.py`), and `homing.web_assemblies`, name → a
callable that takes the task sets' names and the keywords of `assembly`, and gives an `Assemble`. Built-in names win.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from homing.errors import ConfigurationError
from homing.web.assembly import Assemble

ASSEMBLIES_GROUP: Final = "homing.web_assemblies"

_BUILT_IN: Final = {"chromium": "homing.web.chromium.assembly:ChromiumAssembly"}


def found_by_name(group: str, name: str, what: str, built_in: Mapping[str, str] | None = None) -> Any:
    """What an entry point of the group, or a built-in place (`module:attribute`), stands for.

    Raises:
        ConfigurationError: there is none of that name, or it cannot be imported; the message lists those there are.
    """
    places = dict(built_in or {})
    added: dict[str, EntryPoint] = {each.name: each for each in entry_points(group=group)}
    try:
        if name in places:
            module, _, attribute = places[name].partition(":")
            return getattr(import_module(module), attribute)
        if name in added:
            return added[name].load()
    except ImportError as error:
        raise ConfigurationError(
            f"{what} {name} needs more than is installed ({error}): pip install 'homing[web]'"
        ) from error
    there = ", ".join(sorted({*places, *added})) or "none"
    raise ConfigurationError(f"there is no {what} {name!r}; there are: {there}")


def assembly(
    tasks: Sequence[str],
    *,
    provider: str,
    provider_options: Mapping[str, Any],
    recordings: str | None,
    trace: bool = False,
    name: str = "chromium",
) -> Assemble:
    """What opens a worker's backends, browsers and recordings.

    Args:
        tasks: Names of task sets.
        provider, provider_options: The browser provider, and its own settings.
        recordings: The folder; None: nothing is kept.
        trace: Every session is traced. An assembly that is not asked for it need not know of it.

    Raises:
        ConfigurationError: one of them is unknown, or cannot be as it is set.
    """
    make = found_by_name(ASSEMBLIES_GROUP, name, "assembly", _BUILT_IN)
    made: Assemble = make(
        tuple(tasks),
        provider=provider,
        provider_options=dict(provider_options),
        recordings=recordings,
        **({"trace": True} if trace else {}),
    )
    return made


def checked(assemble: Assemble) -> Assemble:
    """An assembly that has looked whether it could be opened on this machine: for a command, before it serves, so that what is
    missing is told once, and not by each worker or each seed. One that has a method `check` is asked; it raises a
    `ConfigurationError`, and opens nothing.

    Raises:
        ConfigurationError: it could not be opened.
    """
    check = getattr(assemble, "check", None)
    if callable(check):
        check()
    return assemble


def parse_settings(given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts as a mapping; a value that is JSON is read as such, any other is a text.

    Raises:
        ConfigurationError: one has no `=`, or comes twice.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigurationError(f"{text!r}: write NAME=VALUE")
        if name in found:
            raise ConfigurationError(f"{name} is set twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
