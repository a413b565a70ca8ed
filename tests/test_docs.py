"""Every snippet of the README and the docs does what the text says: each is run, or the test fails.

A block that starts a server is started for real, with a free port and the modules that the text takes for granted
(`my_server`, `server`), and asked to keep a session together; Python is executed; `make` targets exist.

A page with files in it (a block with a title) is a story: `stories.py` runs it from its first line to its last.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.chromium import require_chromium
from tests.support.running import HOMING, ROOT, running
from tests.support.served import ECOSYSTEM, MAIN
from tests.support.stories import Story, blocks

import homing
from homing.identity import parse_source
from homing.rl.testing import check_resources_server

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
STORIES = [page for page in PAGES if any(block.title for block in blocks(page))]
HEAVY = {"docs/howto/gradio.md", "docs/howto/nicegui.md"}
"""Stories about what only `make setup-ecosystem` installs."""

_CODE = re.compile(r"`([^`\n]+)`")

MY_SERVER = '''
import json
import secrets

counts = {}


async def app(scope, receive, send):
    """Counts the requests of each session it is asked about, in memory.

    A session is named by a header, or made by POST /sessions and then named by the path.
    """
    if scope["type"] != "http":
        raise RuntimeError("HTTP only")
    method, path = scope["method"], scope["path"]
    status, answer = 200, {}
    if (method, path) == ("POST", "/sessions"):
        answer["id"] = secrets.token_hex(8)
        counts[answer["id"]] = 0
    elif path.startswith("/sessions/") and path.split("/")[2] not in counts:
        status = 404
    else:
        named = path.split("/")[2] if path.startswith("/sessions/") else dict(scope["headers"]).get(b"x-session", b"")
        counts[named] = counts.get(named, 0) + 1
        answer["count"] = counts.pop(named) if method == "DELETE" else counts[named]
    body = json.dumps(answer).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
'''

MCP_SERVER = """
from mcp.server import MCPServer

mcp = MCPServer("docs")


@mcp.tool()
def hello() -> str:
    return "hello"
"""


def snippets(language: str) -> Iterator[tuple[str, str]]:
    """Every block of that language that stands for itself."""
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            if block.language == language and not block.title and (language != "sh" or page not in STORIES):
                yield f"{page.relative_to(ROOT)}#{number}", block.text


def commands() -> Iterator[tuple[str, list[str]]]:
    for name, text in snippets("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield name, words


COMMANDS = list(commands())
HOWTO = ("gunicorn", "hypercorn", "granian", "nginx", "haproxy", "several-machines")
"""Pages whose commands and configurations are run by `tests/test_howto.py`."""
_RUN_THERE = tuple(f"docs/howto/{name}.md#" for name in HOWTO)
SERVERS = sorted(
    {tuple(words[2:]) for name, words in COMMANDS if words[:2] == ["homing", "run"] and not name.startswith(_RUN_THERE)}
)
MODULES = {match[1]: text for _, text in snippets("python") if (match := re.match(r"# (\w+\.py)\n", text)) is not None}
"""Python that the text shows as a module: its name, and what is in it."""


def test_every_snippet_is_of_a_kind_that_is_run_here() -> None:
    for page in PAGES:
        there = f"{page.relative_to(ROOT)}#" in _RUN_THERE
        languages = {block.language for block in blocks(page)}
        # Without a language it is a drawing.
        known = {"sh", "python", ""} | ({"text"} if page in STORIES else set())
        assert languages <= known | ({"nginx", "haproxy"} if there else set()), f"{page}: add a way to run it"
    for name, words in COMMANDS:
        if name.startswith(_RUN_THERE):
            continue
        served = words[:3] in (["homing", "rl", "serve"], ["homing", "web", "serve"])
        known = words[:2] == ["homing", "run"] or served or words[0] == "make"
        assert known, f"{name}: {words}: add a way to run it"
    assert len(SERVERS) >= 3


def test_the_make_targets_of_the_text_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    texts = [page.read_text() for page in PAGES]
    targets = {words[1] for _, words in COMMANDS if words[0] == "make"}
    targets |= {match[1] for text in texts for match in re.finditer(r"`make ([\w-]+)", text)}
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=name,
            marks=[pytest.mark.timeout(600), *([pytest.mark.ecosystem] if name in HEAVY else [])],
        )
        for page in STORIES
        for name in [str(page.relative_to(ROOT))]
    ],
)
def test_a_page_with_files_in_it_goes_as_it_says(page: Path, tmp_path: Path) -> None:
    programs = ECOSYSTEM if str(page.relative_to(ROOT)) in HEAVY else MAIN
    with Story(tmp_path, programs) as story:
        for block in blocks(page):
            story.tell(block)
    assert story.commands, "nothing of it was run"


@pytest.mark.parametrize("arguments", SERVERS, ids=" ".join)
def test_a_server_of_the_text_starts_and_keeps_a_session_together(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "my_server.py").write_text(MY_SERVER)
    (tmp_path / "server.py").write_text(MCP_SERVER)
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    with running(*arguments, cwd=tmp_path) as server:
        server.wait_for(r"Application startup complete", count=int(arguments[arguments.index("--workers") + 1]))
        if "path:/sessions/{session}" in arguments:
            _see_made_sessions_kept(server.port)
        elif arguments[0] == "my_server:app":
            seen = [_ask(server.port, "GET", "/", "one")["count"] for _ in range(12)]
            assert seen == list(range(1, 13))
        elif arguments[0] == "counter_server:server":
            check_resources_server(f"http://127.0.0.1:{server.port}", task_data={"start": 3})
        assert server.stop() == 0, server.log


@pytest.mark.parametrize(
    "words", [words for _, words in COMMANDS if words[:3] == ["homing", "rl", "serve"]], ids=" ".join
)
def test_an_environment_of_the_text_is_served_and_its_clients_do_what_the_text_says(
    words: list[str], tmp_path: Path
) -> None:
    clients: dict[str, Any] = {}
    for name, text in snippets("python"):
        if name.startswith("docs/howto/gymnasium.md"):
            exec(compile(text, name, "exec"), clients)
    with running(*words[3:], cwd=tmp_path, command=(*HOMING, *words[1:3])) as server:
        server.wait_for("all 4 workers are ready")
        url = f"http://127.0.0.1:{server.port}"
        assert clients["steps"](url)[0] == 8
        assert clients["play"](url) >= 0
        assert server.stop() == 0, server.log


@pytest.mark.parametrize(
    "words", [words for _, words in COMMANDS if words[:3] == ["homing", "web", "serve"]], ids=" ".join
)
def test_web_sessions_of_the_text_are_served_and_their_client_does_what_the_text_says(
    words: list[str], tmp_path: Path
) -> None:
    require_chromium()
    client: dict[str, Any] = {}
    for name, text in snippets("python"):
        if name.startswith("docs/howto/web-sessions.md") and "def play" in text:
            exec(compile(text, name, "exec"), client)
    with running(*words[3:], cwd=tmp_path, command=(*HOMING, *words[1:3])) as server:
        server.wait_for("all 2 workers are ready")
        assert client["play"](f"http://127.0.0.1:{server.port}") > 0
        assert server.stop() == 0, server.log


def _see_made_sessions_kept(port: int) -> None:
    """Sessions that the app made are found by their paths until they end, and are then gone."""
    made = [_ask(port, "POST", "/sessions")["id"] for _ in range(6)]
    for expected in (1, 2, 3):
        assert [_ask(port, "POST", f"/sessions/{each}/step")["count"] for each in made] == [expected] * len(made)
    assert [_ask(port, "DELETE", f"/sessions/{each}")["count"] for each in made] == [4] * len(made)
    assert _ask(port, "GET", "/sessions/never-made", status=410)["error"]["code"] == "session_gone"


def _ask(port: int, method: str, path: str, session: str = "", *, status: int = 200) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers={"x-session": session} if session else {})
        response = connection.getresponse()
        assert response.status == status
        found: dict[str, Any] = json.loads(response.read())
        return found
    finally:
        connection.close()


@pytest.mark.parametrize(("name", "text"), list(snippets("python")))
def test_the_python_of_the_text_runs(name: str, text: str) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("it is only wrapped here")

    scope: dict[str, object] = {"app": app}
    exec(compile(text, name, "exec"), scope)
    if "homing.sticky" in text:
        assert isinstance(scope["app"], homing.SessionRoutingMiddleware)


def test_the_table_of_sources_says_the_same_in_both_columns() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if "`--session " in line and "|" in line]
    assert len(rows) == 7
    for row in rows:
        option, code = itertools.islice(_CODE.findall(row), 2)
        spec = shlex.split(option)[1]
        in_code = eval(code.replace("secret=…", "secret='secret'"), {"homing": homing})
        source = parse_source(spec, secret="secret")
        assert source == in_code
        assert source.learns is row.rstrip(" |").endswith("learned")


def test_the_helper_for_test_suites_serves_and_raises_with_the_log_where_nothing_can_be_served(tmp_path: Path) -> None:
    (tmp_path / "my_server.py").write_text(MY_SERVER)
    [text] = [text for name, text in snippets("python") if name.startswith("docs/howto/scatter.md")]
    helper: dict[str, Any] = {}
    exec(compile(text, "docs/howto/scatter.md", "exec"), helper)
    options = ("--app-dir", str(tmp_path), "--session", "header:x-session")
    server, url = helper["start"]("my_server:app", *options)
    try:
        port = int(url.rpartition(":")[2])
        assert [_ask(port, "GET", "/", "one")["count"] for _ in range(4)] == [1, 2, 3, 4]
    finally:
        server.terminate()
        server.communicate(timeout=60)
    with pytest.raises(RuntimeError, match=r"exit code 3:\n(.*\n)*homing: cannot load my_server:none"):
        helper["start"]("my_server:none", *options)


def test_every_extra_that_is_named_exists_and_is_in_the_readmes_table() -> None:
    declared = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("| extra | for |") :].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == declared
    texts = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "changelog.d").glob("*.md")]
    named = {match[1] for path in texts for match in re.finditer(r"(?:homing|\.)\[(\w+)\]['`)]", path.read_text())}
    assert {"rl", "web", "metrics"} <= named <= set(declared)


def test_the_shape_of_made_ids_in_paths_is_shown_and_run() -> None:
    shown = ("--session", "path:/sessions/{session}", "--learn", "body:id@/sessions")
    shown += ("--start", "POST /sessions", "--end", "DELETE /sessions/{id}")
    assert any(server[-len(shown) :] == shown for server in SERVERS)


def test_every_link_between_pages_leads_to_a_page() -> None:
    """`make docs` looks at anchors too."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.relative_to(ROOT)}: {target}"
