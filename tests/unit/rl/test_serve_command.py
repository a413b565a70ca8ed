"""`homing rl serve`: what cannot work is refused in one line, before anything is served."""

from __future__ import annotations

import pytest

from homing.cli import main

REFUSED = [
    (["CartPole-v1", "--env-kwargs", "{"], "--env-kwargs {: no valid JSON"),
    (["CartPole-v1", "--env-kwargs", "[1]"], "--env-kwargs [1]: write a JSON object"),
    (["CartPole-v1", "--threads", "0"], "--threads"),
    (["CartPole-v1", "--idle", "0"], "--idle"),
    (["CartPole-v1", "--workers", "0"], "0 workers cannot serve anything"),
    ([], "ENV"),
    (["NoSuch-v0", "--port", "0"], "the environment NoSuch-v0 cannot be made"),
    (["CartPole-v1", "--port", "0", "--env-kwargs", '{"no_such": 1}'], "the environment CartPole-v1 cannot be made"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_cannot_work_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rl", "serve", *arguments])
    assert ended.value.code in (2, 3)
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert len([line for line in shown.splitlines() if line.startswith("homing: ")]) == 1
