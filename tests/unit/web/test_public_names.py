from __future__ import annotations

import subprocess
import sys

import pytest

import homing.web


def test_every_public_name_is_there_and_has_a_place() -> None:
    assert set(homing.web.__all__) == set(homing.web._MODULES) == set(dir(homing.web))
    for name in homing.web.__all__:
        assert getattr(homing.web, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = homing.web.nothing


def test_a_client_imports_no_browser_and_a_server_no_gymnasium() -> None:
    looks = (
        ("homing.web.WebSession", ("playwright", "gymnasium", "fastapi")),
        ("homing.web.WebServer", ("playwright", "gymnasium", "PIL")),
    )
    for name, modules in looks:
        script = f"import sys, homing.web; {name}; print([each for each in {modules!r} if each in sys.modules])"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "[]", name
