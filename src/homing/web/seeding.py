"""How a session comes to be: its site, its browser, its backend, its runner, in this order, and its task begun.

The invariant: what is acquired is in the books in the same step, whoever still waits for it (`Session.acquire`).

Not here: whether there is room for it (`manager.py`), and how it is let go of (`session.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from homing.web.base import (
    BackendFactory,
    BackendSpec,
    BrowserHandle,
    BrowserProvider,
    BrowserSpec,
    PrepareRuntime,
    RecordedEvent,
    Runner,
    SiteLease,
    SitePool,
)
from homing.web.errors import CapacityError, WebError
from homing.web.ledger import Kind
from homing.web.models import SeedReply
from homing.web.operations import EndsOnFailure
from homing.web.session import Reason, Session, release_browser
from homing.web.settings import WebSettings
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)


class Seeding:
    """Seeds the sessions of one manager. Borrows everything.

    Args:
        end: Ends a session, with the reason.
        last_provider_error: For `health`.
    """

    def __init__(
        self,
        settings: WebSettings,
        factory: BackendFactory,
        sites: SitePool,
        provider: BrowserProvider,
        tasks: Tasks,
        end: Callable[[Session, Reason], None],
        *,
        runner: Runner | None,
        prepare: PrepareRuntime | None,
    ) -> None:
        self._settings = settings
        self._factory = factory
        self._sites = sites
        self._provider = provider
        self._tasks = tasks
        self._end = end
        self._runner = runner
        self._prepare = prepare
        self._prepared: asyncio.Task[None] | None = None
        self.last_provider_error = ""

    async def seed(self, session: Session) -> None:
        """Acquire what the session needs, begin its task, publish it. Failing or cancelled, it ends the session.

        Raises:
            WebError: what became of it.
        """
        with EndsOnFailure(session, self._end, always=True):
            await self._runtime_prepared()
            site = await self._site(session)
            browser = await self._browser(session)
            assert session.recording is not None
            spec = BackendSpec(session.id, session.task, browser, session.recording, self._settings.operation_seconds)
            # No await from here to the books: both are made without I/O.
            session.site, session.browser = site, browser
            session.backend = backend = self._factory.backend(spec)
            backend_entry = session.hold(Kind.BACKEND, partial(self._close_backend, session))
            if self._runner is None:
                session.runner = runner = self._factory.runner(session.id)
                session.hold(Kind.RUNNER, runner.aclose, needs=(backend_entry,))
            else:
                session.runner = self._runner
            assert session.runner is not None
            ran = await session.runner.run(backend.reset, session.task, timeout_seconds=self._settings.reset_seconds)
            observation, info = ran.value
            session.note(
                RecordedEvent(
                    "seed",
                    session.age(),
                    waited_seconds=ran.waited_seconds,
                    ran_seconds=ran.ran_seconds,
                    observation=observation,
                )
            )
            session.publish(observation, info)

    async def _runtime_prepared(self) -> None:
        """Run `prepare_runtime` and the provider's start, once; a failure is the next seed's to try again."""
        if self._prepared is None or (
            self._prepared.done() and (self._prepared.cancelled() or self._prepared.exception() is not None)
        ):
            self._prepared = self._tasks.spawn(self._prepare_runtime(), "prepare runtime")
        await asyncio.wait((self._prepared,), timeout=self._settings.acquire_seconds)
        if not self._prepared.done():
            raise CapacityError("the browser supply is not ready yet; try again")
        if self._prepared.cancelled():
            raise CapacityError("the server stops")
        error = self._prepared.exception()
        if error is not None:
            self.last_provider_error = str(error)
            logger.warning("no browser can be had: %s", error)
            if isinstance(error, WebError):
                raise error
            raise CapacityError("no browser can be had; the server's log says why") from error

    async def _prepare_runtime(self) -> None:
        if self._prepare is not None:
            await asyncio.to_thread(self._prepare)
            self._prepare = None  # once is enough, also if the provider has to be started again
        await self._tasks.bounded(self._provider.start(), self._settings.acquire_seconds, "start browser provider")

    async def _site(self, session: Session) -> SiteLease:
        try:
            site, _ = await session.acquire(
                Kind.SITE,
                lambda: self._sites.acquire(session.id, session.task),
                lambda lease: self._release_site(session, lease),
                seconds=self._settings.site_wait_seconds,
                stop_when_given_up=True,
            )
        except TimeoutError as error:
            raise CapacityError("the task's sites are taken; try again") from error
        except WebError:
            raise
        except Exception as error:
            logger.exception("no site for session %s", session.tag)
            raise CapacityError("no site could be had; the server's log says why") from error
        return site

    async def _release_site(self, session: Session, lease: SiteLease) -> None:
        await self._sites.release(lease, healthy=session.healthy)

    async def _browser(self, session: Session) -> BrowserHandle:
        spec = BrowserSpec(session.id, session.task, self._settings.lease_seconds)
        try:
            browser, _ = await session.acquire(
                Kind.BROWSER,
                lambda: self._provider.acquire(spec),
                lambda handle: release_browser(self._provider, handle),
                seconds=self._settings.acquire_seconds,
                stop_when_given_up=False,
            )
        except TimeoutError as error:
            self.last_provider_error = str(error)
            raise CapacityError("no browser could be had in time; try again") from error
        except WebError:
            raise
        except Exception as error:
            self.last_provider_error = f"{type(error).__name__}: {error}"
            logger.warning("no browser for session %s: %s", session.tag, self.last_provider_error)
            raise CapacityError("no browser could be had; the server's log says why") from error
        return browser

    async def _close_backend(self, session: Session) -> None:
        assert session.backend is not None
        if session.runner is None:
            # Its runner could not be made, so nothing ever ran on it: any thread may close it.
            closed = session.backend.close()
            if closed is not None:
                await closed
            return
        await session.runner.run(session.backend.close, timeout_seconds=self._settings.close_seconds)


def seed_reply(session: Session) -> SeedReply:
    """What the session was seeded with, or last reset to."""
    assert session.seeded is not None
    observation, info = session.seeded
    told = dict(info)
    if session.site is not None:
        told["site"] = {
            "lease_id": session.site.lease_id,
            "isolated": session.site.isolated,
            "metadata": dict(session.site.metadata),
        }
    if session.browser is not None:
        told["browser"] = {
            "lease_id": session.browser.lease_id,
            "provider": session.browser.provider,
            "transport": session.browser.transport,
        }
    return SeedReply(
        session_id=session.id,
        task_id=session.task.task_id,
        status=session.wire_status,
        observation=observation,
        info=told,
    )
