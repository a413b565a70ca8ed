"""The live page: what it reads over real servers, who may read it, and what people see of it in a real browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import urllib.request
from typing import Any

import pytest
from tests.processes.test_watch import APP, ask, place, start, two_workers, until
from tests.support.chromium import require_chromium
from tests.support.running import ROOT, Running, refused

from homing.types import session_tag

__all__ = ["place"]

Place = dict[str, str | None]
OPTION = ("--dashboard-port", "0")


def port_of(server: Running) -> int:
    return int(server.wait_for(r"dashboard on http://127\.0\.0\.1:(\d+)/$")[0][1])


def get(server: Running, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)) as connection:
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as reply:
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()


def data(server: Running) -> dict[str, Any]:
    status, headers, body = get(server, "/data")
    assert (status, headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = json.loads(body)
    return found


def shown(found: dict[str, Any]) -> dict[str, list[Any]]:
    """The cells by their sessions' tags, of all workers."""
    cells = [cell for worker in found["workers"] for cell in worker["sessions"]]
    assert len({cell[0] for cell in cells}) == len(cells)
    return {cell[0]: cell for cell in cells}


def test_the_page_reads_what_the_workers_have_and_no_id(place: Place) -> None:
    with two_workers(place, *OPTION) as server:
        made = [start(server.port) for _ in range(12)]
        for each in made:
            assert ask(server.port, "POST", f"/sessions/{each}/step")[0] == 200
        ask(server.port, "DELETE", f"/sessions/{made[0]}")
        ask(server.port, "POST", "/sessions/unknown/step")
        found = until(lambda: data(server), lambda found: found["totals"]["gone"] and found["totals"]["requests"] == 25)
        assert set(shown(found)) == {session_tag(each) for each in made}
        assert [cell[4] for cell in shown(found).values()].count(1) == 1
        assert (found["totals"]["sessions"], found["server"]["workers_wanted"]) == (11, 2)
        assert {worker["pid"] for worker in found["workers"]} == set(server.workers())
        assert not [each for each in made if each in json.dumps(found)]
        # What came was seen to come: the rates of the steps, times their lengths, are what was counted.
        found = until(lambda: data(server), lambda found: any(step[3] for step in found["history"]))
        assert any(step[1] for step in found["history"])
        assert max(step[4] for step in found["history"]) <= 12


def test_a_dead_worker_leaves_the_page_and_one_that_stands_still_is_silent(place: Place) -> None:
    with two_workers(place, *OPTION) as server:
        made = [start(server.port) for _ in range(8)]
        first, second = server.workers()
        until(lambda: data(server), lambda found: len(found["workers"]) == 2)
        os.kill(first, signal.SIGSTOP)
        try:
            found = until(lambda: data(server), lambda found: any(each["silent"] for each in found["workers"]))
            assert [each["pid"] for each in found["workers"] if each["silent"]] == [first]
        finally:
            os.kill(first, signal.SIGCONT)
        os.kill(second, signal.SIGKILL)
        server.wait_for("Application startup complete", 3)
        found = until(
            lambda: data(server),
            lambda found: len(found["workers"]) == 2 and not any(each["silent"] for each in found["workers"]),
        )
        assert second not in {each["pid"] for each in found["workers"]}
        assert found["exited"] == 1
        assert set(shown(found)) < {session_tag(each) for each in made}


@pytest.mark.parametrize("host", ["localhost:{}", "127.0.0.1:{}", "[::1]:{}", "LOCALHOST", "127.0.0.1:9"])
def test_names_of_this_machine_are_answered(place: Place, host: str, shared: Running) -> None:
    status, headers, _ = get(shared, "/", host=host.format(port_of(shared)))
    assert status == 200
    assert "access-control-allow-origin" not in headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    "host",
    ["evil.example:{}", "localhost.evil.example", "127.0.0.1.evil.example:{}", "0.0.0.0:{}", "", "localhost:{}/x"],
)
@pytest.mark.parametrize("path", ["/", "/data"])
def test_any_other_name_that_leads_here_is_refused(host: str, path: str, shared: Running) -> None:
    status, _, body = get(shared, path, host=host.format(port_of(shared)), origin="http://evil.example")
    assert status == 421
    assert b"workers" not in body


def test_two_hosts_or_none_are_refused(shared: Running) -> None:
    for head in (b"GET /data HTTP/1.0\r\n\r\n", b"GET /data HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port_of(shared)), timeout=30) as raw:
            raw.sendall(head)
            assert raw.recv(64).startswith(b"HTTP/1.1 421")


def test_nothing_else_is_served_and_nothing_can_be_done(shared: Running) -> None:
    assert get(shared, "/../../etc/passwd", host="localhost")[0] == 404
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port_of(shared), timeout=30)) as connection:
        connection.request("POST", "/data", body=b"{}")
        assert connection.getresponse().status == 501


def test_a_port_in_use_and_one_worker_are_refused(place: Place, shared: Running) -> None:
    taken = ("--dashboard-port", str(port_of(shared)))
    code, lines = refused("run", *APP, "--workers", "2", "--port", "0", *taken, cwd=ROOT, env=place)
    assert code == 3
    assert taken[1] in lines[-1]
    code, lines = refused("run", *APP, *OPTION, cwd=ROOT, env=place)
    assert (code, len(lines)) == (2, 1)
    assert "--workers 2" in lines[0]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("run", numbered=True)
    folder.chmod(0o700)
    with two_workers({"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}, *OPTION) as server:
        yield server


def test_people_see_the_workers_and_their_sessions_come_and_go(place: Place) -> None:
    binary = require_chromium()
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)
    with two_workers(place, *OPTION) as server, sync_playwright() as playwright:
        made = [start(server.port) for _ in range(7)]
        browser = playwright.chromium.launch(executable_path=binary.path)
        try:
            page = browser.new_page(color_scheme="dark")
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            asked: set[str] = set()
            page.on("request", lambda request: asked.add(request.url.split("/", 3)[2]))
            page.goto(f"http://127.0.0.1:{port_of(server)}/")
            expect(page.get_by_role("status")).to_have_text("live")
            expect(page.get_by_role("article")).to_have_count(2)
            expect(page.locator(".cells .cell")).to_have_count(7)
            expect(page.locator("#sessions")).to_have_text("7")
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.emulate_media(color_scheme="light")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
            # What colours say is said in words as well.
            names = [page.locator(".cells").nth(number).get_attribute("aria-label") or "" for number in (0, 1)]
            assert sum(int(name.split()[0]) for name in names) == 7
            cell = page.locator(f".cell[title^='session {session_tag(made[0])}:']")
            expect(cell).to_have_count(1)

            # Coloured by age and by use: what is older, and what was used longer ago, differs from what is new.
            younger = start(server.port)
            expect(page.locator(f".cell[title^='session {session_tag(younger)}:']")).to_have_count(1)
            differs = """([older, younger]) => {
                const [a, b] = [older, younger].map(tag => document.querySelector(`.cell[title^='session ${tag}:']`));
                const of = (cell, name) => Number(cell.style.getPropertyValue(name));
                const colours = [a, b].map(cell => getComputedStyle(cell).backgroundColor);
                return of(a, "--hue") > of(b, "--hue") && of(a, "--shown") < of(b, "--shown") && colours[0] !== colours[1];
            }"""
            page.wait_for_function(differs, arg=[session_tag(made[1]), session_tag(younger)])
            events = f"http://127.0.0.1:{server.port}/sessions/{made[1]}/events"
            with urllib.request.urlopen(events, timeout=60) as reply:
                assert reply.read(5) == b"data:"
                expect(page.locator(".cells .cell.busy")).to_have_count(1)
                expect(page.locator("#serving")).to_have_text("1")
            expect(page.locator(".cells .cell.busy")).to_have_count(0)
            assert ask(server.port, "DELETE", f"/sessions/{younger}")[0] == 200
            expect(page.locator(".cells .cell.ended")).to_have_count(1)
            expect(page.locator("#sessions")).to_have_text("7")

            assert ask(server.port, "DELETE", f"/sessions/{made[0]}")[0] == 200
            expect(page.locator(".cells .cell.ended")).to_have_count(2)
            made.append(start(server.port))
            expect(page.locator(".cells .cell")).to_have_count(9)
            assert ask(server.port, "POST", "/sessions/unknown/step")[0] == 410
            expect(page.locator("#gone")).to_have_text("1")
            expect(page.locator("#gone")).to_have_class("bad")
            # Over time: the charts have a step for each second that the page's server has seen.
            expect(page.locator("#throughput .stroke").last).to_have_attribute("d", re.compile("^M.*L"))
            expect(page.locator("#lost .bars")).to_have_attribute("d", re.compile("^M"))
            assert not [each for each in made if each in page.content()]
            assert (said, len(asked)) == ([], 1)  # no error, no warning of the policy's, and nobody else was asked

            assert server.stop() == 0
            expect(page.get_by_role("status")).to_have_text("the server does not answer")
        finally:
            browser.close()
