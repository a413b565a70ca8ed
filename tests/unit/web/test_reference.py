"""`docs/reference/web-server.md` says what the code does: its kinds, statuses, settings and routes."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from tests.support.running import ROOT

from homing.errors import ConfigurationError
from homing.web import errors
from homing.web.assembly import SiteRule
from homing.web.errors import ERROR_KINDS, WebError
from homing.web.registry import assembly, parse_settings
from homing.web.replies import _ROUTER_KINDS
from homing.web.settings import WebSettings, settings_from

PAGE = (ROOT / "docs/reference/web-server.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]


def names_in(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def kinds_of(base: type[WebError]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for each in [base, *base.__subclasses__()]:
        found.setdefault(each.error_kind, set()).add(each.status)
        if each is not base:
            for kind, statuses in kinds_of(each).items():
                found.setdefault(kind, set()).update(statuses)
    return found


def test_every_kind_has_a_row_with_its_status_and_no_row_is_of_no_kind() -> None:
    rows = {
        name: {int(status) for status in re.findall(r"\d{3}", row[1])}
        for row in ROWS
        if len(row) == 4 and row[0] != "`error_kind`" and not row[0].startswith("-")
        for name in names_in(row[0])
    }
    assert set(rows) == ERROR_KINDS
    raised = kinds_of(WebError)
    assert set(raised) <= ERROR_KINDS
    for kind, statuses in raised.items():
        assert statuses <= rows[kind] | {500}, kind
    assert set(_ROUTER_KINDS.values()) <= ERROR_KINDS
    assert errors.SessionLostError.retryable


def test_every_setting_has_a_row_with_its_default() -> None:
    defaults = {each.name: getattr(WebSettings(), each.name) for each in fields(WebSettings)}
    shown: dict[str, str] = {}
    for row in ROWS:
        if len(row) == 3 and names_in(row[0]) and set(names_in(row[0])) <= set(defaults):
            values = [value.strip() for value in row[1].split(",")]
            shown |= dict(zip(names_in(row[0]), values, strict=True))
    assert set(shown) == set(defaults)
    for name, value in shown.items():
        if name not in ("operations_at_once", "allowed_benchmarks"):
            assert float(value) == defaults[name], name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"idle_seconds": 0}, "above 0"),
        ({"idle_seconds": float("nan")}, "above 0"),
        ({"idle_seconds": "10"}, "number"),
        ({"max_sessions": 1.5}, "whole number"),
        ({"max_sessions": True}, "whole number"),
        ({"nothing": 1}, "no such setting"),
        ({"heartbeat_seconds": 900.0}, "below lease_seconds"),
        ({"allowed_benchmarks": 5}, "names of benchmarks"),
        ({"allowed_benchmarks": [5]}, "names of benchmarks"),
        ({"allowed_benchmarks": ""}, "names of benchmarks"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_a_line(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        settings_from(given)


@pytest.mark.parametrize("given", ["miniwob, shop", ["miniwob", "shop"], frozenset({"miniwob", "shop"})])
def test_allowed_benchmarks_are_whole_names_however_they_are_given(given: object) -> None:
    # As a text they would allow every benchmark whose name is a part of it.
    assert settings_from({"allowed_benchmarks": given}).allowed_benchmarks == {"miniwob", "shop"}


@pytest.mark.parametrize("text", ["locked:2", "limited", "limited:0", "limited:x", "", "mine"])
def test_a_rule_for_sites_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="unmanaged, locked, or limited:N"):
        SiteRule.parse(text)


def test_settings_on_the_command_line_are_json_or_text() -> None:
    assert parse_settings(["a=1", 'b={"c": 2}', "d=text", "e=x=y"]) == {"a": 1, "b": {"c": 2}, "d": "text", "e": "x=y"}
    for bad in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(ConfigurationError):
            parse_settings(bad)


def test_an_assembly_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="there are: chromium"):
        assembly(["x"], provider="p", provider_options={}, recordings=None, name="none")
