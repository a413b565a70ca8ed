"""The command line as a user reads it; errors as lines, without a server."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import click
import pytest
import uvicorn
from uvicorn.main import main as uvicorn_command

import homing
from homing.cli import main
from homing.cli.run import run
from homing.runtime.parameters import WORKER_HEALTHCHECK_SECONDS


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exited:
        main(list(arguments))
    said = capsys.readouterr()
    assert isinstance(exited.value.code, int)
    return exited.value.code, said.out, said.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "--version") == (0, f"homing {homing.__version__}\n", "")


def test_the_version_of_run_is_homings_and_uvicorns(capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"homing {homing.__version__}, uvicorn {uvicorn.__version__}\n"
    assert outcome(capsys, "run", "--version") == (0, expected, "")
    assert "versions of homing and uvicorn" in outcome(capsys, "run", "--help")[1]


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: homing")
    assert "\n  run " in out
    assert "\n  demo " in out


def test_run_takes_every_option_of_the_installed_uvicorn() -> None:
    ours = {option for parameter in run.params for option in parameter.opts}
    theirs = {option for parameter in uvicorn_command.params for option in parameter.opts}
    assert theirs <= ours


def test_no_option_of_homings_hides_one_of_uvicorns() -> None:
    declared = [option for parameter in run.params for option in [*parameter.opts, *parameter.secondary_opts]]
    assert sorted(declared) == sorted(set(declared))
    names = [parameter.name for parameter in run.params]
    assert sorted(names) == sorted(set(names))


def test_help_shows_homings_options_first_and_apart(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "run", "--help")
    assert code == 0
    sessions, server = out.index("\nSessions:"), out.index("\nServer (as for uvicorn):")
    assert sessions < out.index("  --session SPEC") < out.index("  --run-dir DIR") < server < out.index("  --host ")
    assert "signed-cookie:NAME:KEY" in out
    assert "Traceback" not in out


def test_a_long_step_does_not_end_a_worker_by_default() -> None:
    by_name = {parameter.name: parameter for parameter in run.params}
    assert by_name["timeout_worker_healthcheck"].default == WORKER_HEALTHCHECK_SECONDS == 30
    assert {p.name: p for p in uvicorn_command.params}["timeout_worker_healthcheck"].default == 5


TWO = ("--workers", "2", "--session", "cookie:a")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["run"], "Missing argument 'APP'"),
        (["run", "a:b", "--nonsense"], "No such option '--nonsense'"),
        (["run", "a:b", "--workers", "many"], "'many' is not a valid integer"),
        (["run", "a:b", "--workers", "0"], "0 workers cannot serve anything: use --workers 1 or more"),
        (["run", "a:b", "--workers", "-3"], "-3 workers cannot serve anything: use --workers 1 or more"),
        (["run", "a:b", "--workers", "2", "--preset", "nonsense"], "preset 'nonsense': no such preset: write one of: "),
        (["run", "a:b", "--workers", "2", "--session", "nonsense"], "nonsense"),
        (["run", "a:b", "--workers", "2", "--session", "cookie:"], "cookie:"),
        (["run", "a:b", "--workers", "2", "--session", "signed-cookie:session:sid"], "--secret-env"),
        (["run", "a:b", "--session", "signed-cookie:session:sid"], "secret: add --secret-env VAR"),
        (["run", "a:b", "--session", "body:session_hash"], "source 'body:session_hash': it has no route: write"),
        (["run", "a:b", "--session", "cookie:a", "--secret-env", "HOMING_NO_SUCH"], "HOMING_NO_SUCH: that environment"),
        (["run", "a:b", "--workers", "2", "--session", "cookie:a", "--start", "nonsense"], "nonsense"),
        (["run", "a:b", "--workers", "2", "--session", "cookie:a", "--idle", "0"], "greater than 0"),
        (["run", "a:b", "--workers", "2", "--session", "cookie:a", "--gone", "200"], "400 to 599"),
        (["run", "a:b", "--workers", "2", "--unowned", "perhaps"], "'perhaps' is not one of 'adopt', 'refuse'"),
        (["run", "a:b", "--workers", "2", "--no-sessions", "--session", "cookie:a"], "--no-sessions leaves nothing"),
        (["run", "a:b", "--no-sessions", "--session", "cookie:a"], "use either --no-sessions or --session"),
        (["run", "a:b", "--no-sessions", "--start", "POST /a", "--scatter"], "--no-sessions or --start, --scatter"),
        (["run", "a:b", "--workers", "2", "--session", "cookie:a", "--start", "PSOT /a"], "did you mean POST?"),
        (["run", "a:b", "--workers", "2", "--session", "cookie:a", "--start", "POST"], "the path is missing"),
        (["run", "a:b", "--workers", "2", "--learn", "body:id@/sessions"], "add where requests name it, such as"),
        (["run", "a:b", "--workers", "2", "--reload"], "--reload ends every session on each change"),
        (["run", "a:b", "--workers", "2", "--fd", "3"], "--fd works with --workers 1 only"),
        (["run", "a:b", "--workers", "2", "--lifespan", "off"], "--lifespan off"),
        (["run", "a:b", "--run-dir", ""], "--run-dir is empty: name a directory, or leave it out"),
        (["run", "a:b", "--drain-timeout", "nan"], "--drain-timeout nan: use a number of seconds"),
        (["run", "a:b", "--drain-timeout", "inf"], "--drain-timeout inf: use a number of seconds"),
        (["run", "a:b", "--workers", "2", "--timeout-worker-healthcheck", "0"], "--timeout-worker-healthcheck 0: no"),
        (["run", "a:b", "--loop", "trio"], "--loop trio: homing needs an asyncio event loop"),
        (["run", "a:b", "--http2"], "--http2 needs --http zttp"),
        (["run", "a:b", "--port", "70000"], "--port 70000: use a number from 1 to 65535"),
        (["run", "a:b", "--backlog", "99999999999"], "--backlog 99999999999: use a number of connections from 0"),
        (["run", "a:b", "--backlog", "-5"], "--backlog -5: use a number of connections from 0"),
        (["run", "a:b", *TWO, "--max-sessions", "0"], "the limit of sessions is 0: use 1 to 1000000000"),
        (
            ["run", "a:b", *TWO, "--max-sessions", "9" * 26],
            "the limit of sessions is 99999999999999999999999999: use 1 to",
        ),
        (["run", "a:b", *TWO, "--max-sessions-per-worker", "0"], "the limit of sessions per worker is 0: use 1 to"),
        (["run", "a:b", "--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["run", "a:b", "--header", "nonsense"], "--header nonsense: write it as Name:Value"),
        (["run", "shop.py"], "write package.module:name, such as shop:app"),
        (["run", "src/shop.py"], "write package.module:name, such as src.shop:app"),
        (["demo", "--workers", "0"], "0 is not in the range"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("homing: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "said"), [("0", "0 workers cannot"), ("two", "WEB_CONCURRENCY is 'two'")])
def test_web_concurrency_is_checked_as_workers_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", text)
    code, _, err = outcome(capsys, "run", "a:b", "--session", "cookie:a")
    assert code == 2
    assert said in err


def test_homings_options_are_not_read_from_uvicorns_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVICORN_PRESET", "nonsense")
    monkeypatch.setenv("UVICORN_PORT", "70000")
    _, _, err = outcome(capsys, "run", "a:b")
    assert "nonsense" not in err
    assert "--port 70000" in err


@click.command()
def greet() -> None:
    """Say hello."""
    click.echo("hello")


def test_an_installed_package_adds_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = __name__
    added = [
        EntryPoint("greet", f"{here}:greet", "homing.commands"),
        EntryPoint("broken", "homing_no_such_module:command", "homing.commands"),
        EntryPoint("odd", f"{here}:outcome", "homing.commands"),
    ]
    monkeypatch.setitem(__import__("sys").modules, here, __import__("sys").modules[here])
    monkeypatch.setattr("homing.cli.commands.entry_points", lambda group: added if group == "homing.commands" else [])
    assert outcome(capsys, "greet") == (0, "hello\n", "")
    code, _, err = outcome(capsys, "broken")
    assert (code, err.count("\n")) == (1, 1)
    assert "homing broken cannot be loaded from homing_no_such_module:command" in err
    assert "is no click command" in outcome(capsys, "odd")[2]
