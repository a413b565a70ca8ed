"""The task set `miniwob`: the pages of the `miniwob` package (MIT), served on loopback.

A task is `{"benchmark": "miniwob", "task_id": "click-button", "seed": 0}`. The seed makes the variation, the page says
the goal, the reward and when it is done. The reward is 1.0 for a success and 0.0 for a failure, with the page's own,
which may lie between, as `raw_reward` in `info`; the time that a page gives an episode is made long enough for any agent.

The package itself is never imported: it needs Selenium, and only its pages are used.

Source: the package's `html/core/core.js`.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from homing.errors import ConfigurationError
from homing.web.base import Page, Progress
from homing.web.errors import InvalidTaskError
from homing.web.models import Task, VerifierResult
from homing.web.pages import StaticPages

VIEWPORT: Final = (500, 320)
"""Room for a task's 160 by 210 pixels and for the menus that open beside them."""

_EPISODE_MILLISECONDS: Final = 1_000_000
_READY_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05

# The display of reward and time is hidden: it would differ from one look to the next. When a task ends its page would
# be covered, and a click on the cover would begin another one: it stays as it is instead.
# Pictures that a task puts into its page are fetched before it starts: else the first look would depend on when they come.
_BEGIN: Final = """async ([seed, milliseconds, mode]) => {
  const urls = new Set();
  for (const sheet of document.styleSheets) {
    for (const rule of sheet.cssRules) {
      for (const found of rule.cssText.matchAll(/url\\("?([^")]+)"?\\)/g)) {
        urls.add(new URL(found[1], sheet.href || document.baseURI).href);
      }
    }
  }
  core.pictures = [...urls].map((url) => Object.assign(new Image(), { src: url }));
  await Promise.race([
    Promise.allSettled(core.pictures.map((picture) => picture.decode())),
    new Promise((done) => setTimeout(done, 2000)),
  ]);
  core.EPISODE_MAX_TIME = milliseconds;
  if (core.setDataMode) core.setDataMode(mode);
  Math.seedrandom(seed);
  core.startEpisodeReal();
  core.startEpisode = () => {};
  for (const id of ['reward-display', 'click-canvas']) {
    const shown = document.getElementById(id);
    if (shown) shown.style.display = 'none';
  }
}"""
_READY: Final = """() => {
  if (!WOB_TASK_READY) return null;
  const said = core.getUtterance();
  return typeof said === 'string' ? said : said.utterance;
}"""
_PROGRESS: Final = """() => typeof WOB_DONE_GLOBAL === 'undefined' ? null :
  [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_REASON]"""


class MiniwobTasks:
    """See `TaskSet`. Owns the server of its pages.

    Args:
        folder: The package's `html`; None: the installed one's.
    """

    name = "miniwob"
    viewport = VIEWPORT

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or _installed_pages()
        self._pages = StaticPages(self._folder)
        self._ids = tuple(sorted(path.stem for path in (self._folder / "miniwob").glob("*.html")))

    async def start(self) -> None:
        """See `TaskSet.start`."""
        await self._pages.start()

    async def aclose(self) -> None:
        """See `TaskSet.aclose`."""
        await self._pages.aclose()

    def task_ids(self) -> Sequence[str]:
        """See `TaskSet.task_ids`: the pages' names, in alphabetical order."""
        return self._ids

    def check(self, task: Task) -> Task:
        """See `TaskSet.check`.

        Raises:
            InvalidTaskError: no such page, or fields that a page does not have.
        """
        if task.task_id not in self._ids:
            raise InvalidTaskError(f"miniwob has no such task; it has {len(self._ids)}, such as {self._ids[0]}")
        if task.start_urls:
            raise InvalidTaskError("a miniwob task has a page of its own: start_urls cannot be given")
        if task.task_kwargs.keys() - {"mode"} or task.task_kwargs.get("mode", "train") not in ("train", "test"):
            raise InvalidTaskError("task_kwargs of a miniwob task has mode, which is train or test, and nothing else")
        completed: dict[str, Any] = {}
        if task.seed is None:
            completed["seed"] = 0
        if task.runtime_profile is None:
            completed["runtime_profile"] = "viewport={}x{}".format(*VIEWPORT)
        if not task.sites:
            # Every session has its own copy of the page: nothing is shared.
            completed["mutation_class"] = "session_only"
        return task.model_copy(update=completed)

    def origins(self) -> Sequence[str]:
        """See `TaskSet.origins`."""
        return (self._pages.origin,)

    async def begin(self, page: Page, task: Task) -> tuple[str, ...]:
        """See `TaskSet.begin`.

        Raises:
            ValueError: the page does not get ready.
        """
        await page.goto(f"{self._pages.origin}/miniwob/{task.task_id}.html")
        await page.evaluate(_BEGIN, [str(task.seed), _EPISODE_MILLISECONDS, task.task_kwargs.get("mode", "train")])
        loop = asyncio.get_running_loop()
        until = loop.time() + _READY_SECONDS
        while (goal := await page.evaluate(_READY)) is None:
            if loop.time() > until:
                raise ValueError(f"the task's page is not ready after {_READY_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)
        return (str(goal),)

    async def progress(self, page: Page, task: Task) -> Progress:
        """See `TaskSet.progress`."""
        said = await page.evaluate(_PROGRESS)
        if said is None:
            # The page was left: what it would have said is gone with it.
            return Progress(info={"page": "left"})
        done, raw, reason = said
        if not done:
            return Progress(reward=0.0)
        return Progress(
            reward=1.0 if raw > 0 else 0.0, done=True, info={"raw_reward": float(raw), "reason": reason or ""}
        )

    async def evaluate(self, page: Page, task: Task, final_answer: str | None) -> VerifierResult:
        """See `TaskSet.evaluate`: what the page says; a task that is not done has failed."""
        progress = await self.progress(page, task)
        raw = float(progress.info.get("raw_reward", 0.0))
        return VerifierResult(
            reward=progress.reward or 0.0,
            raw_score=raw,
            task_success=progress.done and raw > 0,
            evidence=("the page says done" if progress.done else "the page does not say done",),
            verifier_version="miniwob-page-1",
        )


def _installed_pages() -> Path:
    spec = importlib.util.find_spec("miniwob")
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "html"
        if (folder / "core" / "core.js").is_file():
            return folder
    raise ConfigurationError("the task set miniwob needs its pages: pip install 'homing[web]'")
