"""Planned restarts: the replacement of a worker serves before the worker is asked to leave, one worker at a time.

The invariant: a restart whose replacement cannot start stops there, and the workers that run go on.

Not here: who asks (`control.py`, and the supervisor's signals), and how a worker leaves (`leaving.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from homing.runtime.control import Asker, Progress
from homing.runtime.process import Worker
from homing.runtime.slot import Slot
from homing.runtime.worker_lines import exit_text, say_replaced, why_it_failed

logger = logging.getLogger(__name__)


class Restarts:
    """The restarts of one server's workers that are due or under way.

    Args:
        slots, retiring: The supervisor's places, and its workers that leave. Borrowed.
        start: Starts a worker for a place. Raises OSError.
        retire: Asks a worker to leave.
    """

    def __init__(
        self,
        slots: list[Slot],
        retiring: list[Worker],
        *,
        start: Callable[[Slot], Worker],
        retire: Callable[[Worker], None],
    ) -> None:
        self._slots = slots
        self._retiring = retiring
        self._start = start
        self._retire = retire
        self._due: list[Worker] = []
        """Workers, not slots: one that has died meanwhile is not to be taken for the one that serves in its place."""
        self._all = False

    def __repr__(self) -> str:
        return f"<Restarts: {len(self._due)} due>"

    def begin_all(self) -> None:
        """Begin a rolling restart.

        Asked for again meanwhile, the replacements that have started already have their turn too: what they serve may have
        changed since.
        """
        newest = (slot.replacement or slot.worker for slot in self._slots)
        self._due += [worker for worker in newest if worker is not None and worker not in self._due]
        self._all = bool(self._due)

    def begin(self, worker: Worker, asker: Asker) -> None:
        """Begin the restart of one worker, and say to `asker` how it goes on."""
        worker.asking.append(asker)
        asker.tell(Progress("waiting"))
        if worker not in self._due:
            self._due.append(worker)

    def go_on(self) -> None:
        """Do what can be done now. Does not wait."""
        if not self._due:
            return
        old = self._due[0]
        slot = next((each for each in self._slots if each.worker is old), None)
        if slot is None:
            # It has died or left meanwhile, or SIGTTOU took it away. What serves in its place began after this was asked for.
            self._restarted()
            return
        if any(worker.told_to_leave for worker in self._retiring):
            return  # one at a time: memory for one more worker, not for twice as many
        if slot.replacement is None:
            try:
                slot.replacement = self._start(slot)
            except OSError as error:
                self._stop(error)
                return
            old.tell(Progress("starting", slot.replacement.pid))
            return
        new = slot.replacement
        if new.ready:
            slot.worker, slot.replacement = new, None
            say_replaced(old.pid, new.pid)
            old.replaced_by = new.pid
            old.tell(Progress("draining", new.pid))
            self._retire(old)
            self._restarted()
        elif new.exit_code is not None:
            new.listen()
            slot.replacement = None
            self._stop(new)
            new.close()

    def _restarted(self) -> None:
        """The first of the workers to restart is done with."""
        self._due.pop(0)
        if not self._due and self._all:
            self._all = False
            fields = {"event": "server_restarted", "workers": len(self._slots)}
            logger.info("all %d workers were restarted", len(self._slots), extra=fields)

    def _stop(self, failed: Worker | OSError) -> None:
        line, fields = why_it_failed(failed)
        text = "the restart stops, and the workers that run go on: a new worker could not start: %s"
        logger.error(text, line, extra=fields)
        for each in self._due:
            each.tell(Progress("failed", why=f"a new worker could not start: {line}"))
        self._due.clear()
        self._all = False


def end_of(worker: Worker) -> Progress:
    """What to say of a worker that was to drain, and has exited."""
    if worker.left is None:
        why = (
            f"worker [{worker.pid}] exited before it had drained ({exit_text(worker.exit_code)}); its sessions are gone"
        )
        return Progress("failed", worker.replaced_by, why=why)
    return Progress("drained", worker.replaced_by, sessions=worker.left)
