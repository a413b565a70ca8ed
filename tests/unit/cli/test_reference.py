"""`docs/reference/` says the same as the command line's own declarations, as `homing.sticky`, and as the code's answers,
sources and presets."""

from __future__ import annotations

import inspect
import pkgutil
import re
from types import ModuleType

import click
import pytest
from tests.support.running import ROOT

import homing
import homing.rl
from homing.cli.commands import INTERRUPTED_EXIT_CODE, OUTPUT_EXIT_CODE, STARTUP_EXIT_CODE, USAGE_EXIT_CODE
from homing.cli.ps import SERVER_COLUMNS, WORKER_COLUMNS
from homing.cli.run import run
from homing.errors import ReplyError
from homing.identity import PRESETS, parse_source
from homing.types import SESSION, key_digest, session_tag

REFERENCE = ROOT / "docs" / "reference"
PAGE = REFERENCE / "options.md"


def row(option: click.Option) -> str:
    """The line of the table for one option, made from its declaration."""
    metavar = option.metavar or ("/".join(option.type.choices) if isinstance(option.type, click.Choice) else "")
    text, _, default = (option.help or "").removesuffix("]").partition(" [default: ")
    if not default:
        is_number = isinstance(option.default, int | float) and not option.is_flag
        is_choice = isinstance(option.type, click.Choice) and isinstance(option.default, str)
        default = f"{option.default:.10g}" if is_number else str(option.default) if is_choice else "–"
    keyword = f"`{option.name}`" if option.name in inspect.signature(homing.sticky).parameters else "–"
    name = f"{option.opts[0]} {metavar}".strip()
    return f"| `{name}` | {text} | {default} | {keyword} |"


def declared() -> list[str]:
    return [
        row(parameter)
        for parameter in run.params
        if isinstance(parameter, click.Option) and not getattr(parameter, "allow_from_autoenv", True)
    ]


def test_the_table_of_options_is_the_declaration() -> None:
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    assert shown == declared(), "\n" + "\n".join(declared())


def test_every_setting_of_sticky_is_in_the_table() -> None:
    settings = set(inspect.signature(homing.sticky).parameters) - {"app"}
    assert settings == {match[1] for line in declared() if (match := re.search(r"\| `(\w+)` \|$", line))}


def test_the_table_of_answers_has_each_code_with_its_status() -> None:
    shown = re.findall(
        r"^\| (?!`--).* \| (\d{3})(?:, [^|]*)? \| `(\w+)` \|$", (REFERENCE / "answers.md").read_text(), re.MULTILINE
    )
    assert sorted(shown) == sorted((str(error.status), error.code) for error in replies())


def test_the_tag_of_a_session_is_computed_as_the_page_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, str] = {}
    exec(code, scope)
    assert scope["tag"] == session_tag("alice") == key_digest(SESSION, "alice")[:12]


def test_the_table_of_exit_codes_has_those_there_are() -> None:
    shown = re.findall(r"^\| (\d+) \| ", PAGE.read_text(), re.MULTILINE)
    assert list(map(int, shown)) == [
        0,
        OUTPUT_EXIT_CODE,
        USAGE_EXIT_CODE,
        STARTUP_EXIT_CODE,
        INTERRUPTED_EXIT_CODE,
    ]


def test_every_column_of_ps_and_top_is_explained() -> None:
    page = (ROOT / "docs" / "howto" / "observe.md").read_text()
    table = page[page.index("| column | of | says |") :].partition("\n\n")[0]
    shown = dict(re.findall(r"^\| `([\w ]+)` \| (\w+) \|", table, re.MULTILINE))
    of = {(True, True): "both", (True, False): "server", (False, True): "worker"}
    names = {*SERVER_COLUMNS, *WORKER_COLUMNS}
    assert shown == {name: of[name in SERVER_COLUMNS, name in WORKER_COLUMNS] for name in names}


def replies() -> list[type[ReplyError]]:
    """Every class of reply with a code of its own; those of the rooms above have pages of theirs."""
    found, waiting = [], [ReplyError]
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if each is not ReplyError and "code" in vars(each) and each.__module__ == ReplyError.__module__:
            found.append(each)
    return found


def test_the_table_of_sources_says_the_same_in_every_column() -> None:
    rows = re.findall(
        r"^\| `([\w-]+:[^`]+)` \| `([^`]+)` \| [^|]+ \| ([^|]+) \|$",
        (REFERENCE / "sources.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 7
    for spec, in_code, learned in rows:
        source = parse_source(spec, secret="SECRET")
        assert source == eval(in_code, {"homing": homing})
        assert source.learns is (learned != "–")


def test_the_table_of_presets_is_what_they_are() -> None:
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (REFERENCE / "presets.md").read_text().splitlines()
        if line.startswith("|")
    ]
    names = [cell.strip("`") for cell in table[0][1:]]
    assert names == ["mcp", "engineio", "gradio"]
    assert sorted(names) == sorted(PRESETS)
    rows = {row[0]: dict(zip(names, row[1:], strict=True)) for row in table[2:]}
    for name in names:
        preset = PRESETS[name]
        assert rows["*gone*"][name].startswith(f"{preset.gone_status}")
        assert ("before" in rows["asked"][name]) is preset.first
        assert (rows["nobody owns it"][name] == "*gone*") is (preset.unowned == "refuse")
        assert (rows["ended by"][name] != "–") is bool(preset.ends or preset.method_ends)
        assert rows["kept without a request for"][name].startswith("`--idle`") is (preset.idle_seconds is None)


@pytest.mark.parametrize(("page", "package"), [("api.md", homing), ("api-rl.md", homing.rl)])
def test_the_api_page_has_every_public_name_once(page: str, package: ModuleType) -> None:
    """Where a public name is also a module's, the page gives the path to what the name stands for."""
    shown = re.findall(r"^::: (homing\.[\w.]+)$", (REFERENCE / page).read_text(), re.MULTILINE)
    for path in shown:
        assert pkgutil.resolve_name(path) is getattr(package, path.rpartition(".")[2]), path
    assert sorted(path.rpartition(".")[2] for path in shown) == sorted(package.__all__)
