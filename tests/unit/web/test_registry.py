"""Task sets and browser providers that an installed package adds, found by the entry points that it declares."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from homing.errors import ConfigurationError
from homing.web.chromium.assembly import ChromiumAssembly
from homing.web.chromium.provider import LocalProvider
from homing.web.settings import WebSettings

MODULE = """
from homing.errors import ConfigurationError


class Shop:
    name = "shop"
    viewport = None
    started = []

    async def start(self): self.started.append("start")
    async def aclose(self): self.started.append("end")
    def task_ids(self): return ["buy"]
    def check(self, task): return task
    def origins(self): return ()


class Browsers:
    name = "far"
    renewable = False

    def __init__(self, region): self.region = region
    async def start(self): pass
    async def aclose(self): Shop.started.append(f"end of {self.region}")
    def health(self): return {}


class Unmade:
    def __init__(self): raise ConfigurationError("the shop needs its stock: pip install stock")


class Failing:
    def __init__(self): raise OSError("no shelf")
"""
ENTRIES = """[homing.task_sets]
unmade = added_by_a_package:Unmade
failing = added_by_a_package:Failing
shop = added_by_a_package:Shop
broken = added_by_a_package.nothing:Shop
[homing.browser_providers]
far = added_by_a_package:Browsers
local_process = added_by_a_package:Browsers
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package beside the installed ones."""
    (tmp_path / "added_by_a_package.py").write_text(MODULE)
    facts = tmp_path / "added-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    sys.modules.pop("added_by_a_package", None)


def test_a_packages_task_set_and_provider_are_used_with_their_settings() -> None:
    assembly = ChromiumAssembly(("miniwob", "shop"), provider="far", provider_options={"region": "north"})

    async def main() -> list[str]:
        async with assembly(WebSettings()) as parts:
            assert parts.browsers.name == "far"
        from added_by_a_package import Shop  # type: ignore[import-not-found]

        found: list[str] = Shop.started
        return found

    assert asyncio.run(main()) == ["start", "end of north", "end"]


def test_what_is_built_in_wins() -> None:
    async def main() -> None:
        async with ChromiumAssembly(("shop",))(WebSettings()) as parts:
            assert isinstance(parts.browsers, LocalProvider)

    asyncio.run(main())


def test_a_name_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="broken, failing, miniwob, shop, unmade"):
        ChromiumAssembly(("nothing",))
    with pytest.raises(ConfigurationError, match="far, local_process, remote_cdp"):
        ChromiumAssembly(("shop",), provider="near")
    with pytest.raises(ConfigurationError, match="needs more than is installed"):
        ChromiumAssembly(("broken",))


def test_what_cannot_be_made_is_told_at_once_and_not_in_each_worker() -> None:
    with pytest.raises(ConfigurationError, match=r"^the shop needs its stock: pip install stock$"):
        ChromiumAssembly(("unmade",))
    with pytest.raises(ConfigurationError, match=r"the task set failing cannot be made: OSError: no shelf"):
        ChromiumAssembly(("failing",))
    with pytest.raises(ConfigurationError, match=r"the browser provider far cannot be made: TypeError: .*'zone'"):
        ChromiumAssembly(("shop",), provider="far", provider_options={"zone": "north"})
