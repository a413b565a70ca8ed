"""The page that a server's workers share: whole rows or none, whoever reads while they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.running import environment
from tests.support.small_disk import fill, small_memory_disk

from homing.errors import RunDirectoryError
from homing.rundir import PAGE_NAME
from homing.watch import Figures, open_row, read_rows
from homing.watch.figures import decode_figures, encode_figures
from homing.watch.page import MAX_ROWS, ROW_BYTES


def test_no_page_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(str(tmp_path)) == []


def test_each_start_has_a_row_of_its_own_that_outlives_it(tmp_path: Path) -> None:
    with open_row(str(tmp_path)) as one, open_row(str(tmp_path)) as two:
        assert (one.number, two.number) == (0, 1)
        assert read_rows(str(tmp_path)) == []  # nothing said yet
        assert two.write(b"two")
        assert one.write(b"one")
        assert read_rows(str(tmp_path)) == [b"one", b"two"]
        assert one.write(b"a longer one")
        assert one.write(b"1")
    with open_row(str(tmp_path)) as three:
        assert three.number == 2
        assert three.write(b"three")
    assert read_rows(str(tmp_path)) == [b"1", b"two", b"three"]
    assert not one.write(b"closed")
    assert os.stat(tmp_path / PAGE_NAME).st_mode & 0o777 == 0o600


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with open_row(str(tmp_path)) as row:
        assert row.write(b"x" * (ROW_BYTES - 8))
        assert not row.write(b"x" * (ROW_BYTES - 7))
        assert read_rows(str(tmp_path)) == [b"x" * (ROW_BYTES - 8)]


def test_a_damaged_row_is_left_out(tmp_path: Path) -> None:
    with open_row(str(tmp_path)) as one, open_row(str(tmp_path)) as two:
        one.write(b"one")
        two.write(b"two")
    with open(tmp_path / PAGE_NAME, "r+b") as file:
        file.seek(9)
        file.write(b"?")
    assert read_rows(str(tmp_path)) == [b"two"]


def test_a_full_page_and_one_that_is_a_link_are_refused(tmp_path: Path) -> None:
    os.truncate(_created(tmp_path / PAGE_NAME), MAX_ROWS * ROW_BYTES)
    with pytest.raises(RunDirectoryError, match="rows"):
        open_row(str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / PAGE_NAME).symlink_to(tmp_path / PAGE_NAME)
    with pytest.raises(RunDirectoryError):
        open_row(str(tmp_path / "other"))
    with pytest.raises(RunDirectoryError):
        read_rows(str(tmp_path / "other"))


def _created(path: Path) -> Path:
    path.touch(0o600)
    return path


WRITER = """
import sys
from homing.watch import open_row
with open_row(sys.argv[1]) as row:
    for number in range(int(sys.argv[2])):
        # Every whole row is one letter, of a length that changes.
        row.write(b"%c" % (97 + number % 26) * (10 + number * 37 % 4000))
"""


def test_a_reader_never_sees_half_a_row(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "60000"]) as writer:
        seen = set()
        while writer.poll() is None:
            for row in read_rows(str(tmp_path)):
                assert len(set(row)) == 1, row
                seen.add(row)
        assert writer.returncode == 0
    assert len(seen) > 1


def test_figures_go_through_a_row_as_they_are() -> None:
    figures = Figures("a" * 32, 12, 1.5, 0.5, 2.5, sessions=7, ended=2, served=9, answers={"session_gone": 3})
    assert decode_figures(encode_figures(figures)) == figures
    assert figures.open_sessions == 5
    assert decode_figures(b"\xff\x00 no figures") is None


def test_a_full_file_system_is_an_error_as_the_row_is_opened_and_no_signal_later(tmp_path: Path) -> None:
    # A process of its own: what goes wrong here is the end of it.
    code = (
        "import sys\n"
        "from homing.errors import RunDirectoryError\n"
        "from homing.watch import open_row\n"
        "try:\n"
        "    open_row(sys.argv[1]).write(b'x')\n"
        "except RunDirectoryError as error:\n"
        "    print(error)\n"
    )
    with small_memory_disk(tmp_path / "small", 64) as place:
        fill(place)
        done = subprocess.run(
            [sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=False, env=environment()
        )
    assert (done.returncode, done.stdout.rpartition(": ")[2]) == (0, "No space left on device\n"), done
