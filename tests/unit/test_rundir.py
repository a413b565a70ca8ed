"""Run directories: where they are, who shares them, when they go, and which workers are alive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_disk import fill, small_memory_disk

from homing.errors import DirectoryError, RunDirectoryError
from homing.rundir import (
    SESSION_SOCKET_DIR_ENV,
    RunDirectory,
    boot_id,
    check_run_directory,
    close_after_fork,
    create_session_socket_dir,
    is_worker_id,
    leave_run_directory,
    new_worker_id,
    remove_run_directory,
    run_directory_bases,
    siblings_directory,
    worker_socket_path,
)
from homing.rundir.leftovers import begin_in
from homing.rundir.lives import DEAD_LIVES_KEPT
from homing.rundir.processes import process_name
from homing.rundir.siblings import GRANIAN_WORKER
from homing.types import WorkerId


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place for run directories that this user has, as far as homing sees."""
    path = tempfile.mkdtemp(prefix="homing-base-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", path)
    monkeypatch.delenv(SESSION_SOCKET_DIR_ENV, raising=False)
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def path(base: Path) -> str:
    return create_session_socket_dir()


@pytest.fixture
def run(path: str) -> Iterator[RunDirectory]:
    with RunDirectory.open(path) as run:
        yield run


# --- IDs and paths ---


def test_worker_ids_are_new_each_time() -> None:
    ids = {new_worker_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(map(is_worker_id, ids))


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n", "0" * 32 + "/../x", None, 7, "٠" * 32]
)
def test_nothing_else_is_a_worker_id(text: object) -> None:
    assert not is_worker_id(text)


def test_the_boot_id_is_one_for_all_processes() -> None:
    other = subprocess.run(
        [sys.executable, "-c", "from homing.rundir import boot_id; print(boot_id())"], check=True, capture_output=True
    )
    assert other.stdout.decode().strip() == boot_id()
    assert len(boot_id()) == 32


def test_a_socket_path_is_as_long_as_one_can_be_bound_to_and_no_longer(base: Path) -> None:
    worker_id = new_worker_id()
    fits = str(base) + "/" + "x" * (107 - len(str(base)) - len(f"//{worker_id}.sock"))
    os.mkdir(fits)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(worker_socket_path(fits, worker_id))
    with pytest.raises(RunDirectoryError, match="108 bytes, and the limit is 107") as caught:
        worker_socket_path(fits + "x", worker_id)
    assert fits + "x" in str(caught.value)


# --- making, checking, removing ---


def test_a_new_directory_is_private_and_new_each_time(base: Path) -> None:
    first, second = create_session_socket_dir(), create_session_socket_dir()
    assert first != second
    assert Path(first).parent == base
    assert Path(first).name.startswith(f"homing-{os.getpid()}-")
    check_run_directory(first)
    remove_run_directory(first)
    remove_run_directory(first)
    assert os.listdir(base) == [Path(second).name]


def test_a_directory_that_others_could_use_is_refused(base: Path) -> None:
    good = base / "good"
    good.mkdir(mode=0o700)
    link, file, missing = base / "link", base / "file", base / "missing"
    link.symlink_to(good)
    file.touch()
    for bad, why in ((link, "symbolic link"), (file, "not a directory"), (missing, "cannot be used")):
        with pytest.raises(RunDirectoryError, match=why):
            check_run_directory(str(bad))
        with pytest.raises(RunDirectoryError):
            RunDirectory.open(str(bad))
    for mode in (0o755, 0o770, 0o701, 0o500):
        good.chmod(mode)
        with pytest.raises(RunDirectoryError, match="must be 0700"):
            check_run_directory(str(good))
    good.chmod(0o700)
    check_run_directory(str(good))
    if os.geteuid() == 0:
        os.chown(good, 1, -1)
        with pytest.raises(RunDirectoryError, match="belongs to user 1"):
            check_run_directory(str(good))


@pytest.mark.parametrize("what", ["missing", "relative", "too open", "too long", "a file"])
def test_an_unusable_candidate_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    candidate = base / ("x" * 80 if what == "too long" else "candidate")
    match what:
        case "too open":
            candidate.mkdir()
            candidate.chmod(0o777)
        case "too long":
            candidate.mkdir(mode=0o700)
        case "a file":
            candidate.touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "candidate" if what == "relative" else str(candidate))
    made = create_session_socket_dir()
    try:
        assert Path(made).parent != candidate
        check_run_directory(made)
    finally:
        remove_run_directory(made)


def test_no_temp_directory_is_needed_where_another_candidate_is_usable(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root is read-only."""

    def none_is_writable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_writable)
    assert Path(create_session_socket_dir()).parent == base
    assert next(run_directory_bases()) == str(base)
    assert set(run_directory_bases()) <= {str(base), "/dev/shm"}


def test_a_candidate_without_room_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="h-", dir=base.parent) as parent,  # short enough for sockets
        small_memory_disk(Path(parent, "s"), 256) as small,
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(small))
        first = create_session_socket_dir()
        assert Path(first).parent == small
        fill(small)
        second = create_session_socket_dir()
        try:
            assert Path(second).parent != small
            assert set(os.listdir(small)) == {Path(first).name, "filling"}
        finally:
            remove_run_directory(second)


def test_an_explicit_directory_is_made_or_refused_but_never_passed_over(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SESSION_SOCKET_DIR_ENV, str(base / "named"))
    assert create_session_socket_dir() == siblings_directory("any") == str(base / "named")
    assert create_session_socket_dir(str(base / "option")) == str(base / "option")  # --run-dir wins
    check_run_directory(str(base / "option"))
    (base / "named").chmod(0o755)
    for refused in (str(base / "named"), str(base / "no parent" / "x"), str(base / ("x" * 80))):
        monkeypatch.setenv(SESSION_SOCKET_DIR_ENV, refused)
        with pytest.raises(RunDirectoryError):
            create_session_socket_dir()
        with pytest.raises(RunDirectoryError):
            siblings_directory("any")


@pytest.fixture
def gone() -> int:
    """The ID of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _leftover(base: Path, name: str) -> Path:
    path = base / name
    path.mkdir(mode=0o700)
    (path / "session-owners").mkdir()
    (path / "session-owners" / "record").symlink_to("nowhere")
    return path


def test_directories_of_dead_servers_are_removed_with_all_in_them(base: Path, gone: int) -> None:
    stale = _leftover(base, f"homing-{gone}-abc_1")
    with socket.socket(socket.AF_UNIX) as listener:  # a killed worker leaves its socket's file
        listener.bind(str(stale / "x.sock"))
    create_session_socket_dir()
    assert not stale.exists()


@pytest.mark.parametrize("why", ["process lives", "socket accepts", "backlog full", "held", "too open", "other name"])
def test_what_may_be_in_use_or_is_not_ours_is_not_removed(base: Path, gone: int, why: str) -> None:
    pid = os.getpid() if why == "process lives" else gone
    path = _leftover(base, "homing-cache" if why == "other name" else f"homing-{pid}-abc")
    with contextlib.ExitStack() as stack:
        match why:
            case "socket accepts" | "backlog full":
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(path / "x.sock"))
                listener.listen(0)
                if why == "backlog full":
                    stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path / "x.sock"))
            case "held":
                stack.enter_context(RunDirectory.open(str(path)))
            case "too open":
                path.chmod(0o755)
        create_session_socket_dir()
        assert (path / "session-owners" / "record").is_symlink()


@pytest.mark.parametrize("alive", [True, False])
def test_a_supervisors_lock_tells_whether_its_server_is_dead_whoever_has_its_number(
    base: Path, gone: int, alive: bool
) -> None:
    """Process 1 of a container is always there."""
    directories = [_leftover(base, f"homing-{pid}-abc") for pid in (os.getpid(), 1, gone)]
    with contextlib.ExitStack() as stack:
        for path in directories:
            (path / "server.lock").touch()
            if alive:
                stack.enter_context(open_locked(path / "server.lock"))
        remove_run_directory(create_session_socket_dir())
        assert [path.exists() for path in directories] == [alive] * 3


def test_a_launchers_directory_goes_though_another_process_has_its_number(base: Path) -> None:
    code = "from homing.rundir import siblings_directory; print(siblings_directory('a'))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    left = Path(done.stdout.strip()).rename(base / f"homing-{os.getpid()}-abc")
    own = Path(siblings_directory("b"))
    assert (left.exists(), own.exists()) == (False, True)
    remove_run_directory(create_session_socket_dir())
    assert own.exists()


def test_a_name_of_a_process_that_is_none_decides_nothing(base: Path, gone: int) -> None:
    path = base / f"homing-{gone}-abc"
    path.mkdir(mode=0o700)
    (path / "begun-by").symlink_to(process_name(os.getpid(), "self").replace(f" {os.getpid()} ", " one "))
    remove_run_directory(create_session_socket_dir())
    assert not path.exists()


def test_a_fork_of_a_worker_is_not_in_the_workers_run_directory() -> None:
    code = (
        "import os; from homing.rundir import named_run_directory, use_run_directory\n"
        "use_run_directory('/of-the-worker'); assert named_run_directory() == '/of-the-worker'\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(named_run_directory() is not None)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_directory_that_was_just_made_is_left_alone_though_its_process_is_not_seen(base: Path, gone: int) -> None:
    """Its server may be of another PID namespace, and about to hold it."""
    path = base / f"homing-{gone}-abc"
    path.mkdir(mode=0o700)
    remove_run_directory(create_session_socket_dir())
    assert path.exists()
    os.utime(path, (0, 0))
    remove_run_directory(create_session_socket_dir())
    assert not path.exists()


def test_links_to_directories_elsewhere_go_once_their_server_is_dead(base: Path, tmp_path: Path) -> None:
    living, dead, user = tmp_path / "living", tmp_path / "dead", base / "homing-at-home"
    for path in (living, dead, user):
        path.mkdir()
        (path / "server.lock").touch()
    for number, target in enumerate((living, dead, tmp_path / "gone")):
        (base / f"homing-at-{number}").symlink_to(target)
    with open_locked(living / "server.lock"):
        remove_run_directory(create_session_socket_dir())
    assert set(os.listdir(base)) == {"homing-at-0", "homing-at-home"}
    assert dead.exists()


def test_a_directory_is_made_0700_whatever_the_umask(base: Path) -> None:
    before = os.umask(0o777)
    try:
        check_run_directory(create_session_socket_dir())
        check_run_directory(create_session_socket_dir(str(base / "named")))
    finally:
        os.umask(before)


# --- siblings ---


def _siblings(settings: str, pipe: Connection, *_: socket.socket) -> None:
    pipe.send(siblings_directory(settings))


def _of_children(
    method: str,
    *sockets: socket.socket | None,
    settings: str = "a",
    name: str | None = None,
    target: Any = _siblings,
) -> list[str]:
    """What children of this process find, each handed one of `sockets`."""
    context: Any = multiprocessing.get_context(method)
    children = []
    for each in sockets:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (settings, theirs, *(() if each is None else (each,)))
        child = context.Process(target=target, args=arguments, name=name)
        child.start()
        theirs.close()
        children.append((child, ours))
    found = []
    for child, ours in children:
        found.append(ours.recv())
        child.join()
        child.close()
        ours.close()
    return found


def _of_fork() -> str:
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writes, siblings_directory("a").encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        path = file.read()
    os.waitpid(pid, 0)
    return path


@pytest.fixture
def bound(base: Path) -> Iterator[list[socket.socket]]:
    """Sockets as launchers hand them down: listening, or bound only, and one of a path."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket() as not_yet,
        socket.socket(socket.AF_UNIX) as of_path,
    ):
        not_yet.bind(("127.0.0.1", 0))
        of_path.bind(str(base / "public"))
        yield [listening, not_yet, of_path]


def test_workers_that_one_launcher_spawned_share_a_directory_by_their_sockets_and_settings(
    base: Path, bound: list[socket.socket]
) -> None:
    first, *others = _of_children("spawn", *bound, *bound)
    assert [first, *others[:2]] == others[2:]
    (other,) = _of_children("spawn", bound[0], settings="b")
    assert len({first, *others, other}) == 4
    assert Path(first).name.startswith(f"homing-{os.getpid()}-")
    check_run_directory(first)


def _siblings_of_app(settings: str, pipe: Connection, *_: socket.socket) -> None:
    """A worker whose app listens at an address of its own, and has connections."""
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()):
        _siblings(settings, pipe)


def test_what_an_app_listens_at_itself_makes_no_difference(base: Path, bound: list[socket.socket]) -> None:
    first = _of_children("spawn", bound[0])
    assert first == _of_children("spawn", bound[0], target=_siblings_of_app)


def test_workers_that_a_launcher_forked_share_a_directory(base: Path, bound: list[socket.socket]) -> None:
    first, second = _of_fork(), _of_fork()
    assert first == second
    assert Path(first).name.startswith(f"homing-{os.getpid()}-")
    bound[0].close()
    assert _of_fork() != first  # of another server: what it listens at is not what the others do


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_servers_that_one_program_started_in_child_processes_never_meet(
    base: Path, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # It listens itself, which a forked child inherits.
    with socket.create_server(("127.0.0.1", 0)):
        first, second = _of_children(method, None, None)
    assert first != second
    # What a forked child logs goes where pytest has it.
    assert (
        method == "fork"
        or capfd.readouterr().err.count("name a directory for all of them with HOMING_SESSION_SOCKET_DIR") == 2
    )


def test_forked_servers_of_a_program_that_listens_nowhere_never_meet(base: Path) -> None:
    # In a program of its own: this one may hold sockets of other tests.
    code = "from tests.unit.test_rundir import _of_fork; print(_of_fork(), _of_fork())"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    first, second = done.stdout.split()
    assert first != second


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_workers_of_granian_meet_although_each_binds_its_own_socket(base: Path, method: str) -> None:
    first, second = _of_children(method, None, None, name=GRANIAN_WORKER)
    assert first == second


def test_servers_that_one_shell_or_program_started_never_meet(base: Path) -> None:
    code = "from homing.rundir import siblings_directory; print(siblings_directory('a'))"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, check=True, capture_output=True).stdout for _ in range(2)]
    shell = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "{code}"; {sys.executable} -c "{code}"'], check=True, capture_output=True
    )
    # An app may import what gunicorn's workers are made of without being one of them.
    imports = [sys.executable, "-c", f"import gunicorn.arbiter; {code}"]
    runs += [subprocess.run(imports, check=True, capture_output=True).stdout for _ in range(2)]
    found = [*runs, *shell.stdout.splitlines()]
    assert len(set(found)) == 6


def test_a_launchers_directory_goes_with_its_last_worker_if_the_launcher_has_gone(base: Path, gone: int) -> None:
    left, held = _leftover(base, f"homing-{gone}-abc"), _leftover(base, f"homing-{gone}-def")
    living, own = _leftover(base, f"homing-{os.getppid()}-abc"), _leftover(base, f"homing-{os.getpid()}-abc")
    with RunDirectory.open(str(held)):
        for path in (left, held, living, own):
            leave_run_directory(str(path))
        assert {path for path in (left, held, living, own) if path.exists()} == {held, living}


# --- an explicit directory that was used before ---


def _first_worker_of(path: Path, launcher: str) -> None:
    begin_in(str(path), launcher)
    with RunDirectory.open(str(path)) as run:
        run.hold_life(new_worker_id())
        records = path / "session-owners"
        records.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (records / launcher).symlink_to("nowhere")
        run.tell_apart("app of " + launcher)
        begin_in(str(path), "another, while it is in use")


def test_an_explicit_directory_is_emptied_by_the_first_worker_of_another_launchers_server(base: Path) -> None:
    path = base / "named"
    path.mkdir(mode=0o700)
    (path / "users.own").touch()
    _first_worker_of(path, "one")
    _first_worker_of(path, "one")  # all its workers had died; what they owned stays gone
    assert [entry.name for entry in (path / "session-owners").iterdir()] == ["one"]
    _first_worker_of(path, "two")
    assert [entry.name for entry in (path / "session-owners").iterdir()] == ["two"]
    kinds = Counter(entry.suffix for entry in path.iterdir())
    assert kinds == {".own": 1, ".life": 1, "": 3}, list(path.iterdir())


def test_a_directory_that_a_supervisor_has_is_not_emptied_by_a_worker(base: Path) -> None:
    path = base / "named"
    path.mkdir(mode=0o700)
    (path / "server.json").touch()
    (path / "server.lock").touch()
    with open_locked(path / "server.lock"):
        begin_in(str(path), "one")
        assert (path / "server.json").exists()
    begin_in(str(path), "one")
    assert not (path / "server.json").exists()


def test_the_first_worker_has_a_directory_to_itself_while_it_empties_it(base: Path) -> None:
    path = base / "named"
    path.mkdir(mode=0o700)
    with open_locked(path) as fd:
        timer = threading.Timer(0.05, fcntl.flock, (fd, fcntl.LOCK_UN))
        timer.start()
        with RunDirectory.open(str(path)):  # waits for it
            timer.join()


@contextlib.contextmanager
def open_locked(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def test_the_files_of_dead_workers_go_and_their_newest_lives_stay(path: str, run: RunDirectory) -> None:
    dead = [new_worker_id() for _ in range(DEAD_LIVES_KEPT + 3)]
    for number, each in enumerate(dead):
        run.hold_life(each).close()
        os.utime(os.path.join(path, f"{each}.life"), (number, number))
        run.mark(each, "drained")
    alive = new_worker_id()
    run.hold_life(alive)
    run.mark(alive, "stopping")
    Path(path, "x.sock").touch()
    run.tidy()
    kept = {f"{each}.life" for each in (*dead[3:], alive)}
    assert set(os.listdir(path)) == {*kept, f"{alive}.stopping", "x.sock"}
    assert all(map(run.is_dead, dead))


def test_apps_in_one_directory_are_told_apart_and_workers_of_one_are_not(path: str, run: RunDirectory) -> None:
    with RunDirectory.open(path) as other:
        assert run.tell_apart("one") == other.tell_apart("one") == ""
        second = run.tell_apart("two" * 1000)
        assert second == other.tell_apart("two" * 1000) != ""
        assert other.tell_apart("three") not in ("", second)
        for number, app in enumerate(("", second)):
            run.hold_life(WorkerId(f"{number:032}"), app)
            assert other.app_of(WorkerId(f"{number:032}")) == app
        assert other.app_of(new_worker_id()) is None


# --- the directory, held open ---


def test_a_directory_is_held_with_a_shared_lock_while_it_is_open(path: str) -> None:
    first, second = RunDirectory.open(path), RunDirectory.open(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        for run in (first, second):
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            run.close()
            run.close()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(RunDirectoryError, match="being removed"):
            RunDirectory.open(path)
    finally:
        os.close(fd)


def test_a_directory_that_was_removed_or_replaced_is_not_intact(path: str, run: RunDirectory) -> None:
    assert run.intact()
    os.rename(path, path + "-moved")
    assert not run.intact()
    os.mkdir(path, 0o700)
    assert not run.intact()
    with pytest.raises(DirectoryError):
        run.is_dead(new_worker_id())  # a missing life file proves nothing there
    os.rmdir(path)
    os.rename(path + "-moved", path)
    assert run.intact()


def test_a_worker_lives_while_its_life_is_held_and_is_dead_for_good_afterwards(path: str, run: RunDirectory) -> None:
    worker_id = new_worker_id()
    with RunDirectory.open(path) as other:
        assert other.is_dead(worker_id)  # it has never lived
        life = run.hold_life(worker_id)
        assert run.holds_life(worker_id)
        assert not other.holds_life(worker_id)
        for seen in (run, other):
            assert not seen.is_dead(worker_id)
            assert seen.live_workers() == [worker_id]
        for seen in (run, other):
            with pytest.raises(RunDirectoryError):
                seen.hold_life(worker_id)
        assert not other.is_dead(worker_id)
        life.close()
        life.close()
        assert other.is_dead(worker_id)
        assert other.live_workers() == []
        with pytest.raises(RunDirectoryError):
            run.hold_life(worker_id)
        os.unlink(os.path.join(path, f"{worker_id}.life"))
        assert other.is_dead(worker_id)
    assert not [name for name in os.listdir(path) if name.startswith(".")]


def test_a_life_file_is_never_there_unlocked_while_its_worker_lives(path: str, run: RunDirectory) -> None:
    """At the very moment at which it is linked under its name, it is locked already."""
    worker_id = new_worker_id()
    locked: list[bool] = []

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        # A hook stays for good, so it looks at this worker's file only.
        if event == "os.link" and arguments[1] == f"{worker_id}.life":
            fd = os.open(os.path.join(path, str(arguments[0])), os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                locked.append(False)
            except BlockingIOError:
                locked.append(True)
            finally:
                os.close(fd)

    sys.addaudithook(audit)
    run.hold_life(worker_id).close()
    assert locked == [True]


def test_closing_the_directory_ends_the_lives_held_through_it(path: str, run: RunDirectory) -> None:
    worker_id = new_worker_id()
    with RunDirectory.open(path) as holder:
        holder.hold_life(worker_id)
        assert repr(holder) == f"<RunDirectory {path}: 1 lives held>"
    assert run.is_dead(worker_id)
    assert repr(holder) == f"<RunDirectory {path}: closed>"


def test_two_who_test_a_third_do_not_take_each_other_for_its_life(path: str, run: RunDirectory) -> None:
    worker_id = new_worker_id()
    run.hold_life(worker_id).close()
    fd = os.open(os.path.join(path, f"{worker_id}.life"), os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert run.is_dead(worker_id)
    finally:
        os.close(fd)


def test_what_is_no_life_file_proves_no_life_and_is_never_waited_for(path: str, run: RunDirectory) -> None:
    worker_id = new_worker_id()
    os.mkfifo(os.path.join(path, f"{worker_id}.life"))
    assert run.is_dead(worker_id)
    linked = new_worker_id()
    os.symlink(f"{worker_id}.life", os.path.join(path, f"{linked}.life"))
    with pytest.raises(DirectoryError):
        run.is_dead(linked)


@pytest.mark.parametrize("text", ["../x", "0" * 32 + "\n", ""])
def test_only_worker_ids_name_files(run: RunDirectory, text: str) -> None:
    for use in (run.is_dead, run.hold_life):
        with pytest.raises(ValueError, match="worker ID"):
            use(text)  # type: ignore[arg-type]  # a WorkerId that is none, as a bug would make it


def test_workers_mark_themselves_for_all_to_see(path: str, run: RunDirectory) -> None:
    one, two = new_worker_id(), new_worker_id()
    with RunDirectory.open(path) as other:
        run.mark(one, "stopping")
        other.mark(two, "stopping")
        run.mark(one, "drained")
        run.mark(one, "drained")
        assert other.marks("stopping") == {one, two}
        assert other.marks("drained") == {one}
        with pytest.raises(ValueError, match="stopping"):
            run.mark(one, "../x")


def test_a_closed_directory_is_an_error_and_not_the_current_one(path: str) -> None:
    run = RunDirectory.open(path)
    run.close()
    for use in (lambda: run.is_dead(new_worker_id()), run.live_workers, lambda: run.mark(new_worker_id(), "stopping")):
        with pytest.raises(DirectoryError):
            use()


def test_what_is_registered_is_closed_in_a_forked_child_and_open_in_its_parent() -> None:
    (reads, writes), (kept, other) = os.pipe(), os.pipe()
    listener, closed_before = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    undo = [close_after_fork(thing) for thing in (reads, listener, closed_before)]
    close_after_fork(kept)()  # and undone
    closed_before.close()
    pid = os.fork()
    if pid == 0:
        os._exit(sum(1 << n for n, fd in enumerate((reads, listener.fileno(), kept)) if _is_open(fd)))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0b100
    for forget in (*undo, *undo):
        forget()
    assert all(map(_is_open, (reads, listener.fileno(), kept)))
    listener.close()
    for fd in (reads, writes, kept, other):
        os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
