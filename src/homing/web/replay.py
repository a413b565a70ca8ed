"""Recordings as people look at them: one page per session, one picture per run.

The page is one file: no script, nothing loaded from elsewhere, whatever a session's pages said is text in it.

Not here: what is recorded (`recording.py`).
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from homing.errors import ConfigurationError
from homing.types import session_tag
from homing.web.recording import EVENTS_FILE, SESSION_FILE, TRACE_FILE

_TAG: Final = re.compile(r"[0-9a-f]{12}(-\d+)?")
_PICTURE: Final = re.compile(r"step-(\d{4,})\.(jpg|png)")
_TILE: Final = (200, 132)
_LABEL: Final = 30
_MAX_TILES: Final = 400


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording that has been read.

    Attributes:
        pictures: The page after each step, by the step's number; 0 is the seed's.
    """

    tag: str
    folder: Path
    task: dict[str, Any]
    events: list[dict[str, Any]]
    pictures: dict[int, Path] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """The verdict's, or the last step's; None: there is none, which is not 0."""
        for event in reversed(self.events):
            if "verdict" in event:
                return float(event["verdict"]["reward"])
            if event.get("terminated"):
                return float(event.get("reward", 0.0))
        return None

    @property
    def has_trace(self) -> bool:
        """Whether Playwright's viewer has something to open."""
        path = self.folder / TRACE_FILE
        return path.is_file() and not path.is_symlink() and path.stat().st_size > 0

    @property
    def failure(self) -> str | None:
        """Why it ended before its time."""
        return next((event["error_kind"] for event in reversed(self.events) if event["kind"] == "failure"), None)

    @property
    def name(self) -> str:
        task = f"{self.task.get('benchmark', '?')}/{self.task.get('task_id', '?')}"
        return f"{task} seed {self.task.get('seed', 0)}"


def find_recording(root: Path, session: str) -> Recorded:
    """The last recording of a session, named by its ID or its tag.

    Raises:
        ConfigurationError: there is none.
    """
    names = [session] if _TAG.fullmatch(session) else []
    names.append(session_tag(session))
    for name in names:
        found = sorted(
            (path for path in root.glob(f"{name}*") if path.is_dir() and _TAG.fullmatch(path.name)),
            key=lambda path: len(path.name),
        )
        if found:
            return read_recording(found[-1])
    raise ConfigurationError(f"no recording of that session in {root}: give its ID, or the name of its folder there")


def recordings_below(root: Path) -> Iterator[Recorded]:
    """Every recording of a run, in the order of their names."""
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir() and _TAG.fullmatch(folder.name):
            yield read_recording(folder)


def read_recording(folder: Path) -> Recorded:
    """Read one; a line that was not written to its end is left out."""
    try:
        task = json.loads((folder / SESSION_FILE).read_text("utf-8")).get("task", {})
    except (OSError, ValueError):
        task = {}
    events = []
    try:
        lines = (folder / EVENTS_FILE).read_text("utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    pictures = {}
    for path in folder.iterdir():
        named = _PICTURE.fullmatch(path.name)
        # An empty one could not be written.
        if named and not path.is_symlink() and path.stat().st_size:
            pictures[int(named[1])] = path
    return Recorded(folder.name, folder, task, events, pictures)


def replay_page(recorded: Recorded) -> str:
    """The session as one HTML page: every event with its action, picture, reward, error and times."""
    rows = []
    step = 0
    for event in recorded.events:
        if event["kind"] == "step":
            step += 1
        picture = recorded.pictures.get(step) if event["kind"] in ("seed", "reset", "step") else None
        rows.append(_row(event, picture))
    reward = recorded.reward
    summary = [
        ("reward", "none" if reward is None else f"{reward:g}"),
        ("steps", str(step)),
        ("ended by", recorded.failure or "its close"),
        ("session", recorded.tag),
    ]
    if recorded.has_trace:
        summary.append(("trace", f"{TRACE_FILE}, beside this recording: playwright show-trace {TRACE_FILE}"))
    goal = next((event["observation"].get("goal") for event in recorded.events if event.get("observation")), None) or ()
    return _PAGE.format(
        title=_text(recorded.name),
        goal=_text(" ".join(goal)),
        summary="".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in summary),
        rows="\n".join(rows),
    )


def contact_sheet(recordings: Sequence[Recorded], *, columns: int = 8) -> bytes:
    """The last picture of each session, side by side, as a PNG: green is a reward above 0, red is 0, grey is none.

    Raises:
        ConfigurationError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise ConfigurationError("the contact sheet needs Pillow: pip install 'homing[web]'") from error
    shown = list(recordings)[:_MAX_TILES]
    columns = max(1, min(columns, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    width, height = _TILE[0] + 8, _TILE[1] + _LABEL + 8
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, recorded in enumerate(shown):
        x, y = index % columns * width + 4, index // columns * height + 4
        reward = recorded.reward
        color = "#999999" if reward is None else "#1a7f37" if reward > 0 else "#b42318"
        draw.rectangle((x - 2, y - 2, x + _TILE[0] + 1, y + _TILE[1] + _LABEL + 1), outline=color, width=2)
        last = recorded.pictures.get(max(recorded.pictures, default=-1))
        if last is not None:
            try:
                with Image.open(last) as picture:
                    picture.thumbnail(_TILE)
                    sheet.paste(picture.convert("RGB"), (x, y))
            except OSError:
                draw.text((x + 4, y + 4), "no picture", fill="#666666")
        draw.text((x + 4, y + _TILE[1] + 2), recorded.task.get("task_id", recorded.tag)[:32], fill="black")
        said = recorded.failure or ("no reward" if reward is None else f"reward {reward:g}")
        draw.text((x + 4, y + _TILE[1] + 15), said[:32], fill=color)
    stream = io.BytesIO()
    sheet.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _row(event: dict[str, Any], picture: Path | None) -> str:
    observation = event.get("observation") or {}
    facts = []
    if "reward" in event:
        facts.append(f"reward {event['reward']:g}")
    if event.get("terminated"):
        facts.append("terminated")
    if "verdict" in event:
        verdict = event["verdict"]
        facts.append(
            f"verdict {verdict['reward']:g}{'' if verdict.get('valid_sample', True) else ', not to be trained on'}"
        )
    timing = f"at {event['at']:.2f} s, ran {event['ran'] * 1000:.0f} ms, waited {event['waited'] * 1000:.0f} ms"
    parts = [f"<h2>{_text(event['kind'])} <small>{_text(timing)}</small></h2>"]
    if "action" in event:
        action = (
            event["action"] if isinstance(event["action"], str) else json.dumps(event["action"], ensure_ascii=False)
        )
        parts.append(f"<p><code>{_text(action)}</code></p>")
    if facts:
        parts.append(f"<p class=facts>{_text(', '.join(facts))}</p>")
    error = event.get("error") or observation.get("last_action_error")
    if error:
        kind = f"{event['error_kind']}: " if event.get("error_kind") else ""
        parts.append(f"<p class=error>{_text(kind + error)}</p>")
    if observation.get("dialog"):
        dialog = observation["dialog"]
        parts.append(f"<p>{_text(dialog['kind'])} {_text(str(dialog.get('handled')))}: {_text(dialog['message'])}</p>")
    parts.extend(
        f"<p>download {_text(download['name'])}: {_text(download['status'])}</p>"
        for download in observation.get("downloads", ())
    )
    if observation.get("url"):
        parts.append(f"<p class=url>{_text(observation['url'])}</p>")
    if observation.get("axtree"):
        parts.append(
            f"<details><summary>what was to be seen</summary><pre>{_text(observation['axtree'])}</pre></details>"
        )
    image = ""
    if picture is not None:
        try:
            kind = "png" if picture.suffix == ".png" else "jpeg"
            data = base64.b64encode(picture.read_bytes()).decode()
            image = f'<img alt="" src="data:image/{kind};base64,{data}">'
        except OSError:
            image = "<p>the picture cannot be read</p>"
    return f"<section><div>{''.join(parts)}</div><div>{image}</div></section>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1f2328; }}
h1 {{ font-size: 1.4rem; margin: 0; }} h2 {{ font-size: 1rem; margin: 0; }} small {{ font-weight: normal; color: #59636e; }}
dl {{ display: flex; gap: .4rem; flex-wrap: wrap; }} dt {{ color: #59636e; }} dd {{ margin: 0 1.2rem 0 0; font-weight: 600; }}
section {{ display: grid; grid-template-columns: 1fr auto; gap: 1rem; border-top: 1px solid #d1d9e0; padding: .8rem 0; }}
section > div {{ min-width: 0; }} img {{ border: 1px solid #d1d9e0; max-width: 32rem; }}
p {{ margin: .3rem 0; }} code, pre {{ font: 13px/1.35 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
.facts {{ color: #1a7f37; }} .error {{ color: #b42318; }} .url {{ color: #59636e; overflow-wrap: anywhere; }}
</style></head>
<body><h1>{title}</h1><p>{goal}</p><dl>{summary}</dl>
{rows}
</body></html>
"""
