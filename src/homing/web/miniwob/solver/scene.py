"""An observation's text, read back into nodes: what a scripted agent looks things up in.

Only what any agent is given is used: the text, with its boxes and colours (observation profile `layout`).

Not here: what to do about it (the solver's other modules).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from homing.web.models import Observation

_LINE: Final = re.compile(r'^( *)\[(e\d+)\] (\S+)(?: ("(?:[^"\\]|\\.)*"))?(.*)$')
_ATTRIBUTE: Final = re.compile(r'([a-z]+)(?:=("(?:[^"\\]|\\.)*"|\S+))?')

QUERY_HEIGHT: Final = 50
"""MiniWoB's pages have the goal in their first 50 pixels."""


@dataclass(frozen=True, slots=True)
class Box:
    """Where a node is in the window, CSS pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


@dataclass(eq=False, slots=True)
class Node:
    """One line of an observation.

    Attributes:
        name: What it is called or says.
        states: `checked`, `value=…`, `fill=…` and so on; those without a value are empty.
    """

    ref: str
    role: str
    name: str
    states: dict[str, str]
    depth: int
    box: Box | None = None
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    def __contains__(self, state: str) -> bool:
        return state in self.states

    def get(self, state: str, default: str = "") -> str:
        """A state's value."""
        return self.states.get(state, default)

    @property
    def value(self) -> str:
        return self.states.get("value", "")

    @property
    def middle(self) -> tuple[float, float]:
        """Where to point.

        Raises:
            LookupError: it has no place.
        """
        if self.box is None:
            raise LookupError(f"{self.role} {self.name!r} has no box")
        return self.box.middle

    def below(self) -> Iterator[Node]:
        """Its descendants, in order."""
        for child in self.children:
            yield child
            yield from child.below()

    def color(self, state: str = "background") -> tuple[int, int, int] | None:
        """A colour of it, red, green and blue from 0 to 255."""
        found = re.match(r"rgba?\((\d+),(\d+),(\d+)", self.states.get(state, ""))
        return (int(found[1]), int(found[2]), int(found[3])) if found else None


class Scene:
    """What there is to see of a task: its nodes, those that say the goal apart."""

    def __init__(self, observation: Observation) -> None:
        scroll = observation.metadata.get("scroll") or [0, 0]
        self.everything = _nodes(observation.axtree)
        self.nodes = [node for node in self.everything if not _is_query(node, scroll[1])]
        self.query = [node for node in self.everything if node not in self.nodes]
        self.focused = observation.focused_ref

    def all(
        self, role: str | None = None, name: str | None = None, where: Callable[[Node], bool] | None = None
    ) -> list[Node]:
        """The nodes that fit, in order; a role may name several, with `|` between."""
        roles = None if role is None else role.split("|")
        return [
            node
            for node in self.nodes
            if (roles is None or node.role in roles)
            and (name is None or node.name == name)
            and (where is None or where(node))
        ]

    def one(
        self, role: str | None = None, name: str | None = None, where: Callable[[Node], bool] | None = None
    ) -> Node:
        """The first that fits.

        Raises:
            LookupError: there is none.
        """
        found = self.all(role, name, where)
        if not found:
            raise LookupError(f"no {role or 'node'} {name or ''}")
        return found[0]

    def after(self, node: Node, role: str) -> Node:
        """The first node of a role after another."""
        roles = role.split("|")
        for each in self.nodes[self.nodes.index(node) + 1 :]:
            if each.role in roles:
                return each
        raise LookupError(f"no {role} after {node.name!r}")


def _nodes(text: str) -> list[Node]:
    nodes: list[Node] = []
    path: list[Node] = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        depth = len(found[1]) // 2
        name = str(json.loads(found[4])) if found[4] else ""
        states = {}
        for attribute in _ATTRIBUTE.finditer(found[5]):
            value = attribute[2] or ""
            states[attribute[1]] = str(json.loads(value)) if value.startswith('"') else value
        node = Node(found[2], found[3], name, states, depth)
        box = states.get("box")
        if box is not None:
            node.box = Box(*(float(part) for part in box.split(",")))
        while path and path[-1].depth >= depth:
            path.pop()
        if path:
            node.parent = path[-1]
            path[-1].children.append(node)
        path.append(node)
        nodes.append(node)
    return nodes


def _is_query(node: Node, scrolled: float) -> bool:
    if node.box is None:
        return False
    return node.box.bottom + scrolled <= QUERY_HEIGHT and node.box.width > 0
