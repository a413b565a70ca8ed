"""`homing web demo`, with each way of coming by a Chromium.

Where there is to be none, the system's is hidden in a mount namespace of the command's own, which needs root.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.chromium import require_chromium
from tests.support.running import HOMING, ROOT, environment

DEMO = (*HOMING, "web", "demo", "--episodes", "2", "--workers", "1", "--json")
DEBIAN = "/usr/lib/chromium"
# The real one goes on elsewhere, for what the test lets be installed.
HIDE = f'mkdir -p "$REAL" && mount --bind {DEBIAN} "$REAL" && mount -t tmpfs none {DEBIAN} && PATH="$BIN" exec "$@"'
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def without_chromium(tmp_path: Path) -> dict[str, str]:
    """The environment of a command that finds none, and may install one into `BIN`."""
    require_chromium()
    shell = shutil.which("sh")
    assert shell is not None
    if (
        not os.path.isdir(DEBIAN)
        or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs root, mount namespaces and Debian's chromium-headless-shell")
    (tmp_path / "bin").mkdir()
    for name in ("sh", "env"):
        (tmp_path / "bin" / name).symlink_to(os.path.realpath(shutil.which(name) or shell))
    return environment(
        BIN=str(tmp_path / "bin"),
        REAL=str(tmp_path / "real"),
        HOME=str(tmp_path),
        PLAYWRIGHT_BROWSERS_PATH=str(tmp_path / "browsers"),
        # Nobody listens there.
        PLAYWRIGHT_DOWNLOAD_HOST="http://127.0.0.1:1",
    )


def demo(settings: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", HIDE, "sh", *DEMO, "--recordings", str(folder)],
        cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def assert_played(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert all(each["reward"] is not None for each in json.loads(done.stdout)["episodes"]), done.stdout


def script(real: str) -> str:
    return f'#!/bin/sh\nexec "{real}/chromium-headless-shell" "$@"\n'


@contextmanager
def downloads(real: str) -> Iterator[tuple[str, list[str]]]:
    """A place that Playwright downloads from, and what it asked there."""
    asked: list[str] = []
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        info = zipfile.ZipInfo("chrome-headless-shell-linux64/chrome-headless-shell")
        info.external_attr = 0o755 << 16
        archive.writestr(info, script(real))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            found = "chrome-headless-shell" in self.path
            self.send_response(200 if found else 404)
            self.send_header("content-length", str(len(packed.getvalue()) if found else 0))
            self.end_headers()
            if found:
                self.wfile.write(packed.getvalue())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_it_plays_and_shows(tmp_path: Path) -> None:
    require_chromium()
    done = subprocess.run(
        [*DEMO, "--workers", "2", "--episodes", "4", "--recordings", str(tmp_path)],
        cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert_played(done)
    told = json.loads(done.stdout)
    assert len(told["episodes"]) == 4
    assert Path(told["contact_sheet"]).read_bytes().startswith(b"\x89PNG")


def test_who_names_a_chromium_that_is_none_is_told_in_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--recordings", str(tmp_path)],
        cwd=ROOT, env=environment(HOMING_CHROMIUM="/nowhere/chromium"), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "HOMING_CHROMIUM" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_without_one_playwrights_is_downloaded(without_chromium: dict[str, str], tmp_path: Path) -> None:
    with downloads(without_chromium["REAL"]) as (address, asked):
        done = demo({**without_chromium, "PLAYWRIGHT_DOWNLOAD_HOST": address}, tmp_path / "recordings")
    assert any("chrome-headless-shell" in path for path in asked)
    assert "downloading" in done.stderr
    assert_played(done)


@pytest.mark.long
def test_where_that_fails_root_on_debian_installs_the_package(without_chromium: dict[str, str], tmp_path: Path) -> None:
    # What apt-get would do, at the place where its package would put it: the path.
    bin_folder = Path(without_chromium["BIN"])
    (bin_folder / "chromium").write_text(script(without_chromium["REAL"]))
    apt = bin_folder / "apt-get"
    apt.write_text(
        f'#!/bin/sh\necho "$@" >>"{tmp_path}/asked"\n'
        f'case "$1" in install) exec /bin/mv "{bin_folder}/chromium" "{bin_folder}/chromium-headless-shell";; esac\n'
    )
    apt.chmod(0o755)
    (bin_folder / "chromium").chmod(0o644)  # not there yet: what cannot be run is no Chromium
    apt.write_text(apt.read_text().replace("exec /bin/mv", f'/bin/chmod 755 "{bin_folder}/chromium"; exec /bin/mv'))
    done = demo(without_chromium, tmp_path / "recordings")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["update", "install"]
    assert asked[1].endswith("chromium-headless-shell")
    assert_played(done)


@pytest.mark.long
def test_where_nothing_helps_a_line_says_what_to_install(without_chromium: dict[str, str], tmp_path: Path) -> None:
    done = demo(without_chromium, tmp_path / "recordings")
    assert done.returncode == 1
    assert "apt-get install chromium-headless-shell" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
