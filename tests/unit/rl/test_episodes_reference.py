"""The reference of agents, episodes and rollouts names what there is."""

from __future__ import annotations

import dataclasses
import re

import click
import pytest
from tests.support.rl_agents import EchoAgent
from tests.support.running import ROOT

from homing.rl import EnvironmentServer
from homing.rl.demo.command import demo
from homing.rl.episode_protocol import (
    AgentCapabilities,
    AgentCloseReply,
    AgentSeedRequest,
    EpisodeFailure,
    ToolAccess,
)
from homing.rl.rollouts.command import rollouts
from homing.rl.rollouts.results import ResultLine
from homing.rl.rollouts.summary import Summary

PAGE = (ROOT / "docs" / "reference" / "episodes.md").read_text()


def section(title: str) -> str:
    """The text below a heading of second level."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_route_has_its_row() -> None:
    servers = {
        "Agent server": EchoAgent().app,
        "Environment server": EnvironmentServer(resources_url="http://a", agent_url="http://b").app,
    }
    for title, app in servers.items():
        rows = set(re.findall(r"`(GET|POST) (\S+)`", section(title)))
        served = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
        assert rows == served


@pytest.mark.parametrize(("command", "title"), [(rollouts, "`homing rl rollouts`"), (demo, "`homing rl demo`")])
def test_every_option_has_its_row_with_its_default(command: click.Command, title: str) -> None:
    rows = {
        match[1]: match[2].strip()
        for match in re.finditer(r"^\| `(--[a-z-]+)[^`]*` \|.*\| ([^|]*) \|$", section(title), re.MULTILINE)
    }
    options = {
        option.opts[0]: option for option in command.params if isinstance(option, click.Option) and not option.is_eager
    }
    assert set(rows) == set(options)
    for name, option in options.items():
        shown = "–" if option.required or option.is_flag else f"{option.default:g}"
        assert rows[name] == shown, name


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Agent server", [*AgentCapabilities.model_fields, *AgentSeedRequest.model_fields]),
        ("Agent server", [*AgentCloseReply.model_fields, *ToolAccess.model_fields]),
        ("Environment server", list(EpisodeFailure.model_fields)),
        ("`homing rl rollouts`", list(ResultLine.model_fields)),
        ("`homing rl rollouts`", [field.name for field in dataclasses.fields(Summary)]),
    ],
)
def test_every_field_is_named(title: str, names: list[str]) -> None:
    text = section(title)
    for name in names:
        assert re.search(rf'[`"]{name}[`"]', text), name
