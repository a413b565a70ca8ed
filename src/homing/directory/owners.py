"""Which worker owns each session: `SessionOwners`, over symbolic links that the workers of one server share.

Not here: the protocol itself (`ownership`), what a record is in the file system (`records`).
"""

from __future__ import annotations

from collections.abc import Callable

from homing.directory.records import FileRecords
from homing.directory.restores import Restores
from homing.rundir import RunDirectory, is_worker_id
from homing.types import SESSION, WorkerId


class SessionOwners(Restores):
    """Which worker currently owns each session, shared by the workers of one server.

    Args:
        socket_dir: The server's run directory.
        routing_id: This worker's ID. Its life is held from here until `aclose` unless `run_directory` holds it already.
        holds: Whether this worker keeps anything of a session; while it does, a release does nothing.
        kind: What its keys are; keys of different kinds never meet (`homing.types.SESSION`, `PATH`).
        drop: Lets go of a session's state here, when the session is given away. Synchronous, and does not raise.
        run_directory: The directory, opened; borrowed. Without it this opens its own, and closes it.

    Raises:
        RunDirectoryError: the run directory cannot be used.
    """

    def __init__(
        self,
        socket_dir: str,
        routing_id: str,
        holds: Callable[[str], bool],
        *,
        kind: str = SESSION,
        drop: Callable[[str], None] | None = None,
        run_directory: RunDirectory | None = None,
    ) -> None:
        if not is_worker_id(routing_id):
            raise ValueError(f"not a worker ID: {routing_id!r}")
        worker_id = WorkerId(routing_id)
        run = run_directory or RunDirectory.open(socket_dir)
        self._own_run = run if run_directory is None else None
        self._life = None
        try:
            # A record that names a worker without a life file names a dead one.
            self._life = None if run.holds_life(worker_id) else run.hold_life(worker_id)
            records = FileRecords(run, worker_id)
        except BaseException:
            self._let_go()
            raise
        super().__init__(records, worker_id, holds, kind=kind, drop=drop)

    async def aclose(self) -> None:
        await super().aclose()
        self._let_go()

    def _let_go(self) -> None:
        if self._life is not None:
            self._life.close()
        if self._own_run is not None:
            self._own_run.close()
