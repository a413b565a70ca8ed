"""What a user installs: the wheel in an environment of its own, and a fresh clone with `make`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from tests.support.running import ROOT

SETUP = ROOT / "scripts" / "setup.sh"


def run(*command: str | Path, cwd: Path, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS")
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that git has, as they are now, in a place of their own."""
    target = tmp_path / "clone"
    target.mkdir()
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def with_path(tmp_path: Path, *programs: str) -> str:
    """A PATH with the basic tools and these programs only."""
    found = tmp_path / "bin"
    found.mkdir()
    for name in ("sh", "dirname", "rm", "cat", *programs):
        (found / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name} here"))
    return str(found)


def test_set_up_without_a_recent_python_is_one_line(tmp_path: Path, clone: Path) -> None:
    done = run("sh", SETUP.relative_to(ROOT), cwd=clone, PATH=with_path(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def test_set_up_without_venv_is_one_line(tmp_path: Path, clone: Path) -> None:
    path = with_path(tmp_path)
    python = Path(path) / "python3"
    # Debian's python3 without python3-venv: everything works but ensurepip.
    python.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run("sh", SETUP.relative_to(ROOT), cwd=clone, PATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "apt-get install python3-venv" in done.stderr


def test_no_package_index_is_named_in_the_tree() -> None:
    for name in (
        "scripts/setup.sh",
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "requirements-dev.txt",
        ".ci/run",
    ):
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert "index-url" not in text, name


@pytest.mark.long
@pytest.mark.timeout(900)
def test_make_demo_works_in_a_fresh_clone_and_setting_up_again_does_nothing(clone: Path) -> None:
    done = run("make", "demo", cwd=clone, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "homing run --workers 4" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    again = run("sh", "scripts/setup.sh", "demo", cwd=clone, timeout=10)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_works_from_the_wheel_alone(tmp_path: Path) -> None:
    built = run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--wheel-dir", tmp_path / "dist", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("homing-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    done = run(tmp_path / "env" / "bin" / "homing", "demo", "--json", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    plain, routed = json.loads(done.stdout)
    assert routed["right"] == routed["calls"] == 4000
    assert plain["wrong"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_rl_demo_works_from_the_wheel_with_its_extra_within_two_minutes(tmp_path: Path) -> None:
    built = run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--wheel-dir", tmp_path / "dist", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("homing-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    alone = run(python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    refused = run(tmp_path / "env" / "bin" / "homing", "rl", "demo", cwd=tmp_path, timeout=60)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "pip install 'homing[rl]'" in refused.stderr
    installed = run(python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", f"{wheel}[rl]", cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    done = run(tmp_path / "env" / "bin" / "homing", "rl", "demo", "--json", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdicts_right"], found["valid"], found["masked"]) == (200, 200, 0)
