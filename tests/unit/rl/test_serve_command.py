"""`homing rl serve`: what cannot work is refused in one line, before anything is served."""

from __future__ import annotations

import pytest
from tests.support.without import homing_without

from homing.cli import main

REFUSED = [
    (["CartPole-v1", "--env-kwargs", "{"], "--env-kwargs {: no valid JSON"),
    (["CartPole-v1", "--env-kwargs", "[1]"], "--env-kwargs [1]: write a JSON object"),
    (["CartPole-v1", "--threads", "0"], "--threads"),
    (["CartPole-v1", "--idle", "0"], "--idle"),
    (["CartPole-v1", "--workers", "0"], "0 workers cannot serve anything"),
    ([], "ENV"),
]


UNMADE = [
    ("NoSuch-v0", (), "Environment `NoSuch` doesn't exist."),
    ("CartPole-v99", (), "Environment version `v99` for environment `CartPole` doesn't exist."),
    ("no_such_module:Maze-v0", (), "ModuleNotFoundError: No module named 'no_such_module'"),
    ("CartPole-v1", ("--env-kwargs", '{"no_such": 1}'), "TypeError: "),
]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(("environment", "options", "why"), UNMADE, ids=[each[0] for each in UNMADE])
def test_an_environment_that_cannot_be_made_is_what_the_line_begins_with(
    environment: str, options: tuple[str, ...], why: str, workers: str
) -> None:
    done = homing_without((), "rl", "serve", environment, "--port", "0", "--workers", workers, *options)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("homing: ")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"homing: cannot make the environment {environment}: {why}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_cannot_work_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rl", "serve", *arguments])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert len([line for line in shown.splitlines() if line.startswith("homing: ")]) == 1
