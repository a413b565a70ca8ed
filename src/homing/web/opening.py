"""A manager with all that it stands on, opened for as long as a worker serves.

The invariant: what is opened is closed in reverse order, the sessions before their browsers, sites and pages. What dead
workers of any earlier server have left is ended first.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from homing.rundir import SITES_DIR
from homing.web.assembly import Assemble, SiteRule
from homing.web.manager import WebSessionManager
from homing.web.processes import end_orphans
from homing.web.settings import WebSettings


@asynccontextmanager
async def open_manager(
    assemble: Assemble,
    settings: WebSettings,
    sites: SiteRule,
    run_directory: str | None,
    on_gone: Callable[[str], None],
) -> AsyncIterator[WebSessionManager]:
    """This worker's manager, started; stopped at the end, within `stop_seconds`.

    Args:
        run_directory: The server's, where its workers share the locks of sites; None: this worker is the only one.
        on_gone: See `WebSessionManager`.
    """
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(end_orphans)
        parts = await stack.enter_async_context(assemble(settings))
        if run_directory is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="homing-sites-"))
        else:
            folder = os.path.join(run_directory, SITES_DIR)
        manager = WebSessionManager(
            settings,
            parts.backends,
            site_pool=sites.pool(folder),
            browser_session_provider=parts.browsers,
            recordings=parts.recordings,
            prepare_runtime=parts.prepare,
            on_gone=on_gone,
        )
        yield await stack.enter_async_context(manager)
