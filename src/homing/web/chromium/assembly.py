"""What a web server with Chromium is put together from, in each worker.

Not here: the parts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

from homing.errors import ConfigurationError
from homing.web.assembly import Assembly
from homing.web.base import PROVIDERS_GROUP, TASK_SETS_GROUP, BrowserProvider, Recordings, TaskSet
from homing.web.chromium.backend import ChromiumBackends, PlaySettings
from homing.web.chromium.binary import check_binary
from homing.web.chromium.driver import check_driver, import_driver
from homing.web.chromium.provider import VIEWPORT, LocalProvider, LocalSettings
from homing.web.chromium.remote import RemoteProvider
from homing.web.recording import FolderRecordings, NoRecordings, RecordingError
from homing.web.registry import found_by_name
from homing.web.runners import OperationGate
from homing.web.settings import WebSettings

_LOCAL: Final = "local_process"
_REMOTE: Final = "remote_cdp"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChromiumAssembly:
    """See `Assemble`. What it names is looked up, and made once, when it is made: what cannot be is told at once, and not by
    each worker.

    Raises:
        ConfigurationError: there is no such task set or provider, or no such setting of it, or it cannot be made.
    """

    tasks: tuple[str, ...]
    provider: str = _LOCAL
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    recordings: str | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        if self.trace and self.recordings is None:
            raise ConfigurationError("web: traces are kept with recordings: give --recordings DIR too")
        task_sets = [_made_task_set(name) for name in self.tasks]
        _provider_maker(self.provider, self.provider_options)(task_sets)

    def check(self) -> None:
        """See `homing.web.registry.checked`.

        Raises:
            ConfigurationError: no browser could be started here, or no recording kept.
        """
        if self.provider in (_LOCAL, _REMOTE):
            check_driver()
        if self.provider == _LOCAL:
            check_binary(self.provider_options.get("executable"))
        if self.recordings is not None:
            try:
                FolderRecordings(self.recordings)
            except RecordingError as error:
                raise ConfigurationError(str(error)) from error

    def __call__(self, settings: WebSettings) -> AbstractAsyncContextManager[Assembly]:
        """Open everything; see `Assemble`."""
        return self._open(settings)

    @asynccontextmanager
    async def _open(self, settings: WebSettings) -> AsyncIterator[Assembly]:
        async with AsyncExitStack() as stack:
            task_sets: dict[str, TaskSet] = {}
            for name in self.tasks:
                task_set = _made_task_set(name)
                stack.push_async_callback(task_set.aclose)
                await task_set.start()
                task_sets[task_set.name] = task_set
            browsers = _provider_maker(self.provider, self.provider_options)(list(task_sets.values()))
            stack.push_async_callback(browsers.aclose)
            recordings: Recordings = NoRecordings() if self.recordings is None else FolderRecordings(self.recordings)
            gate = OperationGate(settings.operations_at_once, settings.wait_seconds)
            yield Assembly(
                ChromiumBackends(task_sets, gate, PlaySettings(trace=self.trace)), browsers, recordings, import_driver
            )


def _made_task_set(name: str) -> TaskSet:
    """One that has not started, and so has nothing to close.

    Raises:
        ConfigurationError: there is none of that name, or it cannot be made.
    """
    make: Callable[[], TaskSet] = found_by_name(TASK_SETS_GROUP, name, "task set")
    return _made(make, f"the task set {name}")


def _made(make: Callable[[], T], what: str) -> T:
    try:
        return make()
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{what} cannot be made: {type(error).__name__}: {error}") from error


def _provider_maker(name: str, options: Mapping[str, Any]) -> Callable[[Sequence[TaskSet]], BrowserProvider]:
    given = dict(options)
    if name == _LOCAL:
        known = {each.name for each in fields(LocalSettings)}
        _check_names(name, given, known)
        for listed in ("viewport", "flags"):
            if isinstance(given.get(listed), list):
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
        return lambda task_sets: RemoteProvider(**given)
    maker: Callable[..., BrowserProvider] = found_by_name(
        PROVIDERS_GROUP,
        name,
        "browser provider",
        {_LOCAL: "homing.web.chromium.provider:LocalProvider", _REMOTE: "homing.web.chromium.remote:RemoteProvider"},
    )

    def added(task_sets: Sequence[TaskSet]) -> BrowserProvider:
        return _made(lambda: maker(**given), f"the browser provider {name}")

    return added


def _check_names(provider: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigurationError(
            f"web: the provider {provider} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
