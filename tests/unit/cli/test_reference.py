"""`docs/reference/options.md` says the same as the command line's own declarations, and as `homing.sticky`."""

from __future__ import annotations

import inspect
import re

import click
from tests.support.running import ROOT

import homing
from homing.cli.run import run
from homing.errors import ReplyError
from homing.types import SESSION, key_digest, session_tag

PAGE = ROOT / "docs" / "reference" / "options.md"


def row(option: click.Option) -> str:
    """The line of the table for one option, made from its declaration."""
    metavar = option.metavar or ("adopt|refuse" if isinstance(option.type, click.Choice) else "")
    text, _, default = (option.help or "").removesuffix("]").partition(" [default: ")
    if not default:
        is_number = isinstance(option.default, int | float) and not option.is_flag
        default = f"{option.default:.10g}" if is_number else "–"
    keyword = f"`{option.name}`" if option.name in inspect.signature(homing.sticky).parameters else "–"
    name = f"{option.opts[0]} {metavar}".strip().replace("|", "\\|")
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
    shown = re.findall(r"^\| (?!`--).* \| (\d{3})(?:, [^|]*)? \| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(shown) == sorted((str(error.status), error.code) for error in replies())


def test_the_tag_of_a_session_is_computed_as_the_page_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, str] = {}
    exec(code, scope)
    assert scope["tag"] == session_tag("alice") == key_digest(SESSION, "alice")[:12]


def replies() -> list[type[ReplyError]]:
    """Every class of reply with a code of its own; those of the rooms above have pages of theirs."""
    found, waiting = [], [ReplyError]
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if each is not ReplyError and "code" in vars(each) and each.__module__ == ReplyError.__module__:
            found.append(each)
    return found
