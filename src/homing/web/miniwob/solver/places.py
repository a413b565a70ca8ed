"""Tasks with calendars and journeys."""

from __future__ import annotations

import re
from datetime import date
from typing import Final

from homing.web.miniwob.solver.agent import Agent, GaveUpError, solves
from homing.web.miniwob.solver.scene import Node, Scene

_MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


@solves("choose-date", "choose-date-easy", "choose-date-medium", "choose-date-nodelay")
async def choose_date(agent: Agent) -> None:
    month, day, year = (int(part) for part in agent.match(r"(\d+)/(\d+)/(\d+)"))
    await agent.click(agent.scene.one("textbox"))
    await _pick(agent, date(year, month, day))
    await agent.press_button()


async def _pick(agent: Agent, wanted: date) -> None:
    """Choose a day in the calendar that has opened."""
    for _ in range(40):
        shown = await agent.wait_until(lambda scene: _month_shown(scene.everything))
        distance = (wanted.year - shown[1]) * 12 + wanted.month - 1 - shown[0]
        if distance == 0:
            break
        name = "Next" if distance > 0 else "Prev"
        await agent.click(agent.scene.one("link|generic", name))
    await agent.click(agent.scene.one("link", str(wanted.day)))


def _month_shown(nodes: list[Node]) -> tuple[int, int] | None:
    months = [_MONTHS.index(node.name) for node in nodes if node.name in _MONTHS]
    years = [int(node.name) for node in nodes if re.fullmatch(r"20\d\d|19\d\d", node.name)]
    if not months:
        for node in nodes:
            found = re.fullmatch(r"(\w+)\s+(\d{4})", node.name)
            if found and found[1] in _MONTHS:
                return _MONTHS.index(found[1]), int(found[2])
    return (months[0], years[0]) if months and years else None


@solves("daily-calendar")
async def daily_calendar(agent: Agent) -> None:
    length, name, start, end = agent.match(
        r'Create an? ([\d.]+ (?:hours?|mins?)) event named "(.*)",? between (\d+[AP]M) and (\d+[AP]M)'
    )
    number, unit = length.split()
    halves = round(float(number) * (2 if unit.startswith("hour") else 1 / 30))
    await _scroll_to(agent, start)
    row = _hour_row(agent, start)
    assert row.box is not None
    step = row.box.height / 2
    busy = [
        node.box for node in agent.scene.nodes if node.box and node.box.width > 60 and node.name and node.box.x > 25
    ]
    x = row.box.x + row.box.width * 0.7
    first = _half(start)
    for offset in range(_half(end) - first - halves + 1):
        top = row.box.y + offset * (row.box.height + 1) / 2
        bottom = top + halves * (row.box.height + 1) / 2
        if all(box.bottom <= top + 3 or box.y >= bottom - 3 for box in busy):
            break
    else:
        raise GaveUpError("no room between these hours")
    await agent.drag((x, top + step / 2), (x, bottom - step / 2))
    field = await agent.wait_until(lambda scene: scene.one("textbox"))
    await agent.fill(field, name)
    await agent.press_button("Create")


def _half(hour: str) -> int:
    number = int(hour[:-2]) % 12 + (12 if hour.endswith("PM") else 0)
    return number * 2


def _hour_row(agent: Agent, hour: str) -> Node:
    label = agent.scene.one("text", hour.lower())
    assert label.parent is not None
    return label.parent


async def _scroll_to(agent: Agent, hour: str) -> None:
    label = agent.scene.one("text", hour.lower())
    assert label.box is not None
    await agent.act("scroll", ref=label.ref, delta_y=label.box.y - 60)


@solves("book-flight", "book-flight-nodelay")
async def book_flight(agent: Agent) -> None:
    kind, start, end, day = agent.match(r"Book the (\w+) one-way flight from: (.*) to: (.*) on ([\d/]+)")
    for label, place in (("From:", start), ("To:", end)):
        field = agent.scene.one("textbox", label)
        await agent.fill(field, "")
        await agent.act("focus", ref=agent.scene.one("textbox", label).ref)
        code = re.search(r"\(([A-Z]{3})\)", place)
        await agent.act("keyboard_type", text=code[1] if code else place)
        await agent.click(await _suggested(agent, place))
    month, number, year = (int(part) for part in day.split("/"))
    await agent.click(agent.scene.all("textbox")[2])
    await _pick(agent, date(year, month, number))
    await agent.press_button("Search")
    buttons = await agent.wait_until(
        lambda scene: scene.all("button", where=lambda node: "$" in node.name or node.name.startswith("Book"))
    )
    flights = []
    for button in buttons:
        price = int(re.sub(r"\D", "", button.name) or 0)
        flights.append((price, _duration(button), button))
    chosen = min(flights, key=lambda flight: flight[0] if kind == "cheapest" else flight[1])
    await agent.click(chosen[2])


async def _suggested(agent: Agent, place: str) -> Node:
    def find(scene: Scene) -> Node | None:
        return _suggestion(scene.everything, place)

    found: Node = await agent.wait_until(find)
    return found


def _suggestion(nodes: list[Node], place: str) -> Node | None:
    city = place.split(" (", maxsplit=1)[0]
    found = [
        node
        for node in nodes
        if city in node.name and node.role not in ("textbox", "status") and node.box and node.box.y > 50
    ]
    return found[0] if found else None


def _duration(button: Node) -> int:
    """Minutes, as the flight that the button books says."""
    node = button.parent
    while node is not None:
        for each in node.below():
            found = re.fullmatch(r"(\d+)h (\d+)m", each.name)
            if found:
                return int(found[1]) * 60 + int(found[2])
        node = node.parent
    raise GaveUpError("the flight does not say how long it takes")
