"""Where do one server's private sockets and owner records live, and which of its workers are alive?

A *run directory* is 0700, ours, and not a link. It holds, flat and small:

    <worker ID>.sock       the private socket of a worker
    <worker ID>.conn       where a worker is given connections
    <worker ID>.life       locked exclusively by that worker while it lives
    <worker ID>.stopping   marks that workers set for each other; also `.draining`, `.drained`
    control.sock           where the supervisor is asked to drain a worker
    page, server.json      what workers and supervisor say of themselves
    board, permits         what workers tell each other to place new sessions, and the limit of these
    server.lock            held by the supervisor while its server runs
    owners.lock            held while a dead worker's owner record is changed
    .<worker ID>.<n>       a link that is about to be renamed over an owner record
    first-app              which app's keys are of the plain kind, where several apps share the directory
    begun-by               which launcher's server the directory belongs to, where that is not homing's own
    session-owners/        the owner records, up to a million: never list it on the event loop

Invariant: *dead* is proved, not guessed. A worker locks `<worker ID>.life` before that name exists, and keeps the lock
until it exits, so a shared lock on it succeeds, or the file is missing, if and only if the worker is dead.

Everything that proves a worker alive is closed in a forked child, which would otherwise keep a dead parent alive.

Not here: what an owner record says (`homing.directory`), what a private socket carries (`homing.forwarding`).
"""

from homing.rundir.checks import cannot_be_made, check_run_directory
from homing.rundir.files import allocate
from homing.rundir.forks import close_after_fork, run_in_forked_child
from homing.rundir.leftovers import SERVER_LOCK, check_may_be_emptied, empty
from homing.rundir.lives import Life, RunDirectory
from homing.rundir.names import (
    BOARD_NAME,
    CONTROL_SOCKET,
    EPISODES_DIR,
    LINK_PREFIX,
    MAX_SOCKET_PATH_BYTES,
    NEW_DESCRIPTION,
    PAGE_NAME,
    PERMITS_NAME,
    SERVER_DESCRIPTION,
    SESSION_OWNERS_DIR,
    SESSION_SOCKET_DIR_ENV,
    SITES_DIR,
    boot_id,
    is_worker_id,
    new_worker_id,
    worker_handoff_path,
    worker_socket_path,
)
from homing.rundir.places import (
    create_session_socket_dir,
    named_run_directory,
    remove_run_directory,
    run_directory_bases,
    use_run_directory,
)
from homing.rundir.processes import namespaces
from homing.rundir.siblings import leave_run_directory, made_by_launcher, siblings_directory

__all__ = [
    "BOARD_NAME",
    "CONTROL_SOCKET",
    "EPISODES_DIR",
    "LINK_PREFIX",
    "MAX_SOCKET_PATH_BYTES",
    "NEW_DESCRIPTION",
    "PAGE_NAME",
    "PERMITS_NAME",
    "SERVER_DESCRIPTION",
    "SERVER_LOCK",
    "SESSION_OWNERS_DIR",
    "SESSION_SOCKET_DIR_ENV",
    "SITES_DIR",
    "Life",
    "RunDirectory",
    "allocate",
    "boot_id",
    "cannot_be_made",
    "check_may_be_emptied",
    "check_run_directory",
    "close_after_fork",
    "create_session_socket_dir",
    "empty",
    "is_worker_id",
    "leave_run_directory",
    "made_by_launcher",
    "named_run_directory",
    "namespaces",
    "new_worker_id",
    "remove_run_directory",
    "run_directory_bases",
    "run_in_forked_child",
    "siblings_directory",
    "use_run_directory",
    "worker_handoff_path",
    "worker_socket_path",
]
