"""The seeds' public names: each has a row in `docs/reference/seeds.md`, and each row is true of the code and the tests."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs/reference/seeds.md"
NAMES = TESTS / "contract/seed_names.txt"

_SECTION = re.compile(r"## `(\d{3})_…`")
_SIGNATURE = re.compile(r"([\w.]+)(?:\(([^)]*)\))?")


@dataclass(frozen=True)
class Row:
    """One row of the table. `here` and `test` are None where the row has none."""

    seed: str
    names: tuple[str, ...]
    signatures: tuple[str, ...]
    here: str | None
    test: str | None
    reason: str


def expand(signature: str) -> list[str]:
    """`f(a, b)` as `f`, `f(a)`, `f(b)`; `f(…, b)` as `f(b)`."""
    found = _SIGNATURE.fullmatch(signature)
    assert found is not None, f"{signature!r} is no signature"
    parameters = [each.strip() for each in (found[2] or "").split(",") if each.strip()]
    alone = [] if "…" in parameters else [found[1]]
    return alone + [f"{found[1]}({each})" for each in parameters if each != "…"]


def rows_in(text: str) -> list[Row]:
    rows: list[Row] = []
    seed = ""
    for line in text.splitlines():
        if section := _SECTION.match(line):
            seed = section[1]
        elif line.startswith("| `"):
            first, here, test, reason = (cell.strip() for cell in line.strip("|").split("|"))
            signatures = re.findall("`([^`]+)`", first)
            rows.append(
                Row(
                    seed,
                    tuple(name for each in signatures for name in expand(each)),
                    tuple(signatures),
                    None if here == "—" else here.strip("`"),
                    None if test == "—" else test.strip("`"),
                    reason,
                )
            )
    return rows


def names_in(text: str) -> list[tuple[str, str]]:
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(seed, name) for seed, name in lines]


ROWS = rows_in(TABLE.read_text("utf-8"))
KEPT = [row for row in ROWS if row.here is not None]


def target_of(row: Row) -> tuple[str, str]:
    """Module and signature that a row leads to."""
    assert row.here is not None
    module, _, signature = row.here.partition(":")
    return module, signature or row.signatures[0]


def named(row: Row) -> str:
    return f"{row.seed} {row.signatures[0]}"


def found_in(module: str, qualified: str) -> Any:
    """What a dotted name stands for; a field of a dataclass for itself."""
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        fields = {each.name: each for each in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else {}
        found = fields[part] if part in fields else getattr(found, part)
    return found


def tail(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def differs(row: Row) -> bool:
    """Whether the row's last name, or a parameter, is another than the seed's."""
    if row.here is None:
        return True
    here = expand(target_of(row)[1])
    elsewhere = row.here != "homing" and not row.here.startswith("homing:")
    return elsewhere or [tail(each) for each in here] != [tail(each) for each in row.names]


@cache
def functions_in(path: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, functions))


def test_every_name_of_the_seeds_has_a_row_and_every_row_a_name() -> None:
    listed = names_in(NAMES.read_text("utf-8"))
    in_table = [(row.seed, name) for row in ROWS for name in row.names]
    assert len(listed) == len(set(listed)) > 200
    assert len(in_table) == len(set(in_table)), "a name has two rows"
    assert set(listed) - set(in_table) == set(), "names without a row"
    assert set(in_table) - set(listed) == set(), "rows without a name"


@pytest.mark.parametrize("row", KEPT, ids=named)
def test_a_row_leads_to_something_that_can_be_imported(row: Row) -> None:
    module, signature = target_of(row)
    name, *parameters = (each for each in expand(signature.replace("…, ", "")))
    target = found_in(module, name)
    wanted = [each.split("(")[1].rstrip(")") for each in parameters]
    if wanted:
        taken = [each for each in inspect.signature(target).parameters if each != "self"]
        assert set(wanted) <= set(taken)
        # Callers that pass them by position pass the same.
        assert row.reason or taken[: len(wanted)] == wanted


@pytest.mark.parametrize("row", KEPT, ids=named)
def test_a_public_name_is_one_of_the_package(row: Row) -> None:
    import homing

    module, signature = target_of(row)
    if module == "homing":
        assert _SIGNATURE.fullmatch(signature)[1].split(".")[0] in homing.__all__  # type: ignore[index]


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_row_gives_the_reason_for_a_difference(row: Row) -> None:
    assert row.reason or not differs(row)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_row_names_a_test_that_exists(row: Row) -> None:
    assert row.test is not None
    path, _, function = row.test.partition("::")
    assert function in functions_in(TESTS / path)


def test_importing_the_names_imports_no_framework() -> None:
    program = """
import sys
from homing import install_session_routing, sticky
loaded = {name.split(".")[0] for name in sys.modules} & {"starlette", "fastapi", "aiohttp"}
sys.exit(f"imported {loaded}" if loaded else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- that the checks above would fail ---

SECTION = "## `001_…`: a\n"


def test_a_row_without_a_reason_for_a_difference_is_seen() -> None:
    lines = [
        "| `LOG` | — | — |  |",
        "| `LOG` | `homing.routing.worker:logger` | — |  |",
        "| `LOG` | `homing:SESSION_OWNERS_DIR` | — |  |",
        "| `f(a)` | `homing:f(b)` | — |  |",
        "| `f(a, b)` | `homing:f(a)` | — |  |",
    ]
    assert all(differs(row) for line in lines for row in rows_in(SECTION + line))
    assert not differs(rows_in(SECTION + "| `f(a)` | `homing` | — |  |")[0])


def test_a_row_that_leads_nowhere_is_seen() -> None:
    for here in ("homing:nothing", "homing.nothing:worker_id", "homing:SessionOwners.claim"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            test_a_row_leads_to_something_that_can_be_imported(rows_in(SECTION + f"| `LOG` | `{here}` | — |  |")[0])
    with pytest.raises(AssertionError):
        test_a_row_leads_to_something_that_can_be_imported(
            rows_in(SECTION + "| `f` | `homing:worker_socket_path(socket)` | — |  |")[0]
        )


def test_a_row_whose_test_does_not_exist_is_seen() -> None:
    row = rows_in(SECTION + "| `LOG` | — | `contract/test_seed_names.py::test_nothing` | why |")[0]
    with pytest.raises(AssertionError):
        test_a_row_names_a_test_that_exists(row)
