"""What a web server with Chromium is put together from, in each worker.

Not here: the parts.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final

from homing.errors import ConfigurationError
from homing.web.assembly import Assembly
from homing.web.base import PROVIDERS_GROUP, TASK_SETS_GROUP, BrowserProvider, Recordings, TaskSet
from homing.web.chromium.backend import ChromiumBackends, PlaySettings
from homing.web.chromium.provider import VIEWPORT, LocalProvider, LocalSettings
from homing.web.chromium.remote import RemoteProvider
from homing.web.recording import FolderRecordings, NoRecordings
from homing.web.registry import found_by_name
from homing.web.runners import OperationGate
from homing.web.settings import WebSettings

_LOCAL: Final = "local_process"
_REMOTE: Final = "remote_cdp"


@dataclass(frozen=True, slots=True)
class ChromiumAssembly:
    """See `Assemble`. What it names is looked up when it is made, so that a wrong name is told at once.

    Raises:
        ConfigurationError: there is no such task set or provider, or no such setting of it.
    """

    tasks: tuple[str, ...]
    provider: str = _LOCAL
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    recordings: str | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        if self.trace and self.recordings is None:
            raise ConfigurationError("web: traces are kept with recordings: give --recordings DIR too")
        for name in self.tasks:
            _task_set_maker(name)
        _provider_maker(self.provider, self.provider_options)

    def __call__(self, settings: WebSettings) -> AbstractAsyncContextManager[Assembly]:
        """Open everything; see `Assemble`."""
        return self._open(settings)

    @asynccontextmanager
    async def _open(self, settings: WebSettings) -> AsyncIterator[Assembly]:
        async with AsyncExitStack() as stack:
            task_sets: dict[str, TaskSet] = {}
            for name in self.tasks:
                task_set: TaskSet = _task_set_maker(name)()
                stack.push_async_callback(task_set.aclose)
                await task_set.start()
                task_sets[task_set.name] = task_set
            browsers = _provider_maker(self.provider, self.provider_options)(list(task_sets.values()))
            stack.push_async_callback(browsers.aclose)
            recordings: Recordings = NoRecordings() if self.recordings is None else FolderRecordings(self.recordings)
            gate = OperationGate(settings.operations_at_once, settings.wait_seconds)
            yield Assembly(
                ChromiumBackends(task_sets, gate, PlaySettings(trace=self.trace)), browsers, recordings, _import_driver
            )


def _import_driver() -> None:
    """Half a second of importing, which must not be the event loop's."""
    importlib.import_module("playwright.async_api")


def _task_set_maker(name: str) -> Callable[[], TaskSet]:
    maker: Callable[[], TaskSet] = found_by_name(TASK_SETS_GROUP, name, "task set")
    return maker


def _provider_maker(name: str, options: Mapping[str, Any]) -> Callable[[Sequence[TaskSet]], BrowserProvider]:
    given = dict(options)
    if name == _LOCAL:
        known = {each.name for each in fields(LocalSettings)}
        _check_names(name, given, known)
        for listed in ("viewport", "flags"):
            if listed in given:
                given[listed] = tuple(given[listed])
        sized = "viewport" in given
        settings = LocalSettings(**given)

        def local(task_sets: Sequence[TaskSet]) -> BrowserProvider:
            chosen = settings
            if not sized:
                sizes = {each.viewport for each in task_sets}
                # One size for all: contexts are made ready in it.
                size = sizes.pop() if len(sizes) == 1 else None
                chosen = LocalSettings(**{**given, "viewport": size or VIEWPORT})
            return LocalProvider(chosen, origins=lambda: [origin for each in task_sets for origin in each.origins()])

        return local
    if name == _REMOTE:
        _check_names(name, given, {"endpoint", "viewport"})
        if "endpoint" not in given:
            raise ConfigurationError("web: the provider remote_cdp needs endpoint=URL")
        RemoteProvider(**given)  # what it cannot be is said now
        return lambda task_sets: RemoteProvider(**given)
    maker = found_by_name(
        PROVIDERS_GROUP,
        name,
        "browser provider",
        {_LOCAL: "homing.web.chromium.provider:LocalProvider", _REMOTE: "homing.web.chromium.remote:RemoteProvider"},
    )

    def added(task_sets: Sequence[TaskSet]) -> BrowserProvider:
        made: BrowserProvider = maker(**given)
        return made

    return added


def _check_names(provider: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigurationError(
            f"web: the provider {provider} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
