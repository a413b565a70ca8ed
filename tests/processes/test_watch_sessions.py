"""`homing ps SERVER --sessions` over real servers: each session that is there, and why each of the last ones is not."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from typing import Any

from tests.processes.test_watch import APP, ask, homing, place, start, two_workers, until
from tests.support.running import ROOT, Running, refused, running

from homing.types import session_tag

__all__ = ["place"]

Place = dict[str, str | None]


def sessions(place: Place, server: Running, *more: str) -> dict[str, Any]:
    done = homing("ps", str(server.port), "--sessions", "--json", *more, env=place)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_tag(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["session"]: each for each in found}


def pid_of(server: Running, session: str) -> int:
    return int(json.loads(ask(server.port, "POST", f"/sessions/{session}/step")[1])["pid"])


def test_each_session_is_shown_with_its_owner_and_no_id(place: Place) -> None:
    with two_workers(place) as server:
        made = [start(server.port) for _ in range(9)]
        owners = {session_tag(each): pid_of(server, each) for each in made}
        assert ask(server.port, "DELETE", f"/sessions/{made[0]}")[0] == 200
        shown = sessions(place, server)
        listed = by_tag(shown["sessions"])
        assert {tag: each["pid"] for tag, each in listed.items()} == owners
        states = {tag: each["state"] for tag, each in listed.items()}
        assert states == {tag: "ended" if tag == session_tag(made[0]) else "open" for tag in owners}
        for each in listed.values():
            assert 0 <= each["unused_seconds"] <= each["age_seconds"]
            assert each["serving"] == 0
        assert (shown["ended"], shown["left_out"], shown["silent"]) == ([], 0, [])
        text = homing("ps", str(server.port), "--sessions", env=place).stdout
        assert all(tag in text for tag in owners)
        assert not any(each in text + json.dumps(shown) for each in made)
        few = sessions(place, server, "--limit", "2")
        assert len(few["sessions"]) + few["left_out"] == 9
        assert len(few["sessions"]) <= 4


def test_what_was_shown_of_use_is_what_happened(place: Place) -> None:
    with two_workers(place) as server:
        quiet, used = start(server.port), start(server.port)
        while True:  # the second is used until it is seen to have been, however slow the machine is
            pid_of(server, used)
            listed = by_tag(sessions(place, server)["sessions"])
            before, after = listed[session_tag(quiet)], listed[session_tag(used)]
            if after["unused_seconds"] + 0.5 < before["unused_seconds"]:
                break
        assert before["unused_seconds"] <= before["age_seconds"]


def test_open_sessions_come_first_and_those_used_last_before_the_others_whatever_the_limit(place: Place) -> None:
    with two_workers(place) as server:
        made = [start(server.port) for _ in range(12)]
        owners = {session_tag(each): pid_of(server, each) for each in made}
        ended = {session_tag(each) for each in made[:6]}
        for each in made[:6]:
            assert ask(server.port, "DELETE", f"/sessions/{each}")[0] == 200
        for each in reversed(made[6:]):
            pid_of(server, each)
        used_last = [session_tag(each) for each in made[6:]]
        listed = [each["session"] for each in sessions(place, server)["sessions"]]
        assert (set(listed[:6]), set(listed[6:])) == (set(used_last), ended)
        # Each worker says for how long its own were not used, at its own moment.
        for pid in set(owners.values()):
            assert [tag for tag in listed[:6] if owners[tag] == pid] == [tag for tag in used_last if owners[tag] == pid]
        for limit in (1, 2):
            few = [each["session"] for each in sessions(place, server, "--limit", str(limit))["sessions"]]
            for pid in set(owners.values()):
                of_one = [tag for tag in listed if owners[tag] == pid]
                assert [tag for tag in few if owners[tag] == pid] == of_one[:limit]


def test_a_request_in_flight_is_shown_as_one(place: Place) -> None:
    with two_workers(place) as server:
        session = start(server.port)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/sessions/{session}/events", timeout=60) as reply:
            assert reply.read(5) == b"data:"  # the handler runs, until its client leaves
            [each] = sessions(place, server)["sessions"]
            assert (each["serving"], each["unused_seconds"], each["state"]) == (1, 0, "open")


def test_why_a_session_is_gone_is_told_for_a_while(place: Place) -> None:
    """Idle, and closed: the window of a session that has ended is no longer than the idle time."""
    with running(*APP, "--workers", "2", "--idle", "2", cwd=ROOT, env=place) as server:
        server.wait_for("Application startup complete", 2)
        idle, closed = start(server.port), start(server.port)
        assert ask(server.port, "DELETE", f"/sessions/{closed}")[0] == 200
        shown = until(lambda: sessions(place, server), lambda shown: len(shown["ended"]) == 2)
        ended = by_tag(shown["ended"])
        assert shown["sessions"] == []
        assert ended[session_tag(idle)]["reason"] == "idle"
        assert ended[session_tag(closed)]["reason"] == "closed"
        for each in ended.values():
            assert each["age_seconds"] >= 1.9
            assert each["ago_seconds"] >= 0


def test_a_dead_workers_sessions_are_told_from_what_it_left(place: Place) -> None:
    with two_workers(place) as server:
        made = [start(server.port) for _ in range(8)]
        owners = {session_tag(each): pid_of(server, each) for each in made}
        # Its last words are in its row, which is written once a second.
        victim = owners[session_tag(made[0])]
        os.kill(victim, signal.SIGKILL)
        server.wait_for("Application startup complete", 3)
        lost = {tag for tag, pid in owners.items() if pid == victim}
        shown = until(lambda: sessions(place, server), lambda shown: len(shown["ended"]) == len(lost))
        ended = by_tag(shown["ended"])
        assert set(ended) == lost
        assert {each["reason"] for each in ended.values()} == {"worker exit"}
        assert {each["pid"] for each in ended.values()} == {None}
        assert set(by_tag(shown["sessions"])) == set(owners) - lost
        assert "worker exit" in homing("ps", str(server.port), "--sessions", env=place).stdout


def test_a_worker_that_stands_still_is_named_and_holds_up_nobody(place: Place) -> None:
    with two_workers(place) as server:
        made = [start(server.port) for _ in range(6)]
        owners = {session_tag(each): pid_of(server, each) for each in made}
        still = owners[session_tag(made[0])]
        os.kill(still, signal.SIGSTOP)
        try:
            shown = sessions(place, server)
        finally:
            os.kill(still, signal.SIGCONT)
        assert set(by_tag(shown["sessions"])) == {tag for tag, pid in owners.items() if pid != still}
        assert len(shown["silent"]) == 1


def test_asking_while_requests_come_and_go_loses_none_and_shows_no_session_twice(place: Place) -> None:
    with two_workers(place) as server:
        made = [start(server.port) for _ in range(600)]
        failed: list[int] = []
        over = threading.Event()

        def use() -> None:
            while not over.is_set():
                for each in made[::50]:
                    status, _ = ask(server.port, "POST", f"/sessions/{each}/step")
                    if status != 200:
                        failed.append(status)

        using = threading.Thread(target=use)
        using.start()
        try:
            for _ in range(3):
                listed = [each["session"] for each in sessions(place, server)["sessions"]]
                assert sorted(listed) == sorted(session_tag(each) for each in made)
        finally:
            over.set()
            using.join()
        assert failed == []


def test_sessions_of_which_server_has_to_be_said_where_there_are_two(place: Place) -> None:
    with two_workers(place) as one, two_workers(place) as two:
        code, lines = refused("ps", "--sessions", cwd=ROOT, env=place)
        assert (code, len(lines)) == (2, 1)
        assert all(str(each.port) in lines[0] for each in (one, two))
        assert sessions(place, two)["pid"] == two.process.pid
