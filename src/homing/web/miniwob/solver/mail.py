"""The inbox tasks: find an email, then delete, mark, answer or pass it on."""

from __future__ import annotations

import re
from typing import Final

from homing.web.miniwob.solver.agent import Agent, GaveUpError, solves
from homing.web.miniwob.solver.scene import Node

_DELETE: Final = r"delete|trash|remove|get rid"
_STAR: Final = r"star|important|mark|flag"
_FORWARD: Final = r"forward|send|pass|give|share|to see|resend|relay"
_REPLY: Final = r"reply|respond|answer|write back|tell|text"


@solves(
    "email-inbox",
    "email-inbox-delete",
    "email-inbox-forward",
    "email-inbox-forward-nl",
    "email-inbox-forward-nl-turk",
    "email-inbox-important",
    "email-inbox-nl-turk",
    "email-inbox-noscroll",
    "email-inbox-reply",
    "email-inbox-star-reply",
)
async def handle_email(agent: Agent) -> None:
    senders = _senders(agent)
    named = sorted(
        (agent.goal.find(name), name) for name in senders if re.search(rf"\b{re.escape(name)}\b", agent.goal)
    )
    if not named:
        raise GaveUpError("the goal names no sender")
    goal = agent.goal
    quoted = agent.quoted()
    lower = re.sub(r'"[^"]*"', "", goal).lower()
    if quoted or re.search(r"\b(reply|respond|answer|write)\b", lower):
        await _reply(agent, named[0][1], quoted[-1] if quoted else _said(goal))
    elif re.search(rf"\b(?:{_DELETE})", lower):
        await agent.click(_icon(agent, named[0][1], "delete"))
    elif re.search(rf"\b(?:{_STAR})", lower):
        await agent.click(_icon(agent, named[0][1], "star"))
    else:
        await _forward(agent, *_from_and_to(agent, [name for _, name in named]))


def _senders(agent: Agent) -> dict[str, Node]:
    """By name: the bold line that each email begins with."""
    rows: dict[str, Node] = {}
    for star in agent.scene.all("generic", where=lambda node: node.get("image").startswith("star")):
        row = star.parent
        if row is not None:
            name = next((node for node in row.below() if node.name), None)
            if name is not None:
                rows.setdefault(name.name, row)
    return rows


def _icon(agent: Agent, sender: str, image: str) -> Node:
    row = _senders(agent)[sender]
    return next(node for node in row.below() if node.get("image").startswith(image))


async def _open(agent: Agent, sender: str) -> None:
    row = _senders(agent)[sender]
    await agent.click(next(node for node in row.below() if node.name == sender))


def _said(goal: str) -> str:
    found = re.search(r"(?:with the text|saying|say|text|with|tell (?:him|her|them))[: ]+(.*)$", goal)
    if found is None:
        raise GaveUpError("the goal does not say what to write")
    return found[1].strip()


async def _reply(agent: Agent, sender: str, text: str) -> None:
    await _open(agent, sender)
    reply = agent.scene.one(where=lambda node: node.get("image").startswith("reply"))
    await agent.click(reply)
    await agent.fill(agent.scene.all("textbox")[-1], text)
    await agent.click(agent.scene.one(where=lambda node: node.get("image").startswith("send")))


def _from_and_to(agent: Agent, named: list[str]) -> tuple[str, str]:
    """Who sent it, and to whom it goes, of a goal in anybody's words."""
    goal = agent.goal.rstrip(".!? ")
    people = {each.removesuffix("'s") for each in re.findall(r"\b[A-Z][a-zA-Z'-]+\b", goal)}
    for sender in named:
        others = [each for each in people if each != sender]
        for other in others:
            forms = (
                rf"(?:to|with|give|send|let|show|that|email)\s+{other}\b",
                rf"\b{other}\b.*(?:wants|needs|should)",
                rf"(?:forward|send|give|pass|resend|share)\s+{other}\b",
            )
            is_from = re.search(rf"(?:from|by|of)\s+{re.escape(sender)}\b|\b{re.escape(sender)}('s)?\b", goal)
            if is_from and any(re.search(form, goal, re.IGNORECASE) for form in forms):
                # A name after "to" is the one it goes to, even where it also sent an email.
                if re.search(rf"(?:from|by)\s+{other}\b|\b{other}'s\b", goal) and len(named) > 1:
                    continue
                return sender, other
    raise GaveUpError("the goal does not say to whom")


async def _forward(agent: Agent, sender: str, to: str) -> None:
    await _open(agent, sender)
    await agent.click(agent.scene.one(where=lambda node: node.get("image").startswith("forward")))
    await agent.fill(agent.scene.all("textbox")[0], to)
    await agent.click(agent.scene.one(where=lambda node: node.get("image").startswith("send")))
