"""The command itself: help, version, completion, and errors that are one line and an exit code."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentfsm
from agentfsm import Agent, Host, SqliteStore
from agentfsm.cli.app import app
from agentfsm.testing import ScriptedModel
from tests.cli.conftest import Cli
from tests.helpers.terminal import clean_environment, run_without_terminal

FIRST = ["demo", "run", "resume", "diagram"]


def test_without_a_word_it_shows_its_help(cli: Cli) -> None:
    result = cli()
    assert result.exit_code == 0
    assert result.stdout == cli("--help").stdout
    assert "Exit codes" in result.stdout


@pytest.mark.parametrize("command", sorted(app.commands))
def test_every_command_has_help_with_examples(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.exit_code == 0
    _, _, examples = result.stdout.partition("Examples:\n")
    assert f"  agentfsm {command}" in examples
    assert cli(command, "-h").stdout == result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    assert app.commands[command].short_help


def test_the_commands_stand_in_the_order_in_which_a_newcomer_needs_them(cli: Cli) -> None:
    _, _, listed = cli("--help").stdout.partition("Commands:\n")
    assert [line.split()[0] for line in listed.splitlines()[: len(FIRST)]] == FIRST


def test_the_version_is_that_of_the_package(cli: Cli) -> None:
    assert cli("--version").stdout == f"agentfsm {agentfsm.__version__}\n"


@pytest.mark.parametrize(
    "words", [("frob",), ("demo", "--frob"), ("run",), ("completion", "csh"), ("demo", "/no/where")]
)
def test_wrong_usage_exits_with_2_and_says_what_is_right(cli: Cli, words: tuple[str, ...]) -> None:
    result = cli(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: agentfsm" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "hi", "--model", "no-such-model"), "no provider is known"),
        (("run", "hi", "--model", "openai:gpt-5-mini"), "OPENAI_API_KEY"),
        (("run", "hi", "--model", "ollama:x", "--tools", "none.py"), "there is no file 'none.py'"),
        (("run", "hi", "--model", "ollama:x", "--max-time", "0"), "max_execution_time_s"),
        (("run", "hi", "--model", "ollama:x", "--base-url", "somewhere"), "base_url"),
        (("run", "hi", "--model", "ollama:x", "--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY"),
        (("run", "hi", "--model", "ollama:x", "--graph", "nowhere"), "MODULE:GRAPH"),
        (("run", "hi", "--model", "ollama:x", "--diagram", "run.doc"), "'run.doc'"),
        (("run", "hi", "--model", "ollama:x", "--diagram", "run.scxml"), "cannot show a run"),
        (("run", "hi", "--model", "ollama:x", "--record", "wait.json"), "AGENTFSM_SECRET"),
        (("diagram", "nowhere:GRAPH"), "no module 'nowhere'"),
    ],
)
def test_an_error_of_the_setup_is_one_line_on_stderr_and_exits_with_2(
    cli: Cli, words: tuple[str, ...], said: str
) -> None:
    result = cli(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("agentfsm: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_a_bug_is_one_line_too_and_a_variable_shows_where_it_is(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("this should\nnot be")

    monkeypatch.setattr("agentfsm.cli.diagram_command.render", broken)
    result = cli("diagram")
    assert result.exit_code == 70
    assert result.stderr == (
        "agentfsm: internal error: RuntimeError: this should not be (AGENTFSM_TRACEBACK=1 shows where)\n"
    )
    assert isinstance(cli("diagram", AGENTFSM_TRACEBACK="1").exception, RuntimeError)


def test_a_file_that_cannot_be_written_is_an_error_of_the_setup(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = cli("diagram", "--output", "file/loop.svg")
    assert result.exit_code == 2
    assert result.stderr.startswith("agentfsm: ")
    assert result.stderr.count("\n") == 1


# -- as a process ---------------------------------------------------------------------------------------


def test_without_the_extra_it_says_how_to_get_it(tmp_path: Path) -> None:
    """click and rich are hidden by modules of that name that cannot be imported."""
    for name in ("click", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    path = os.pathsep.join([str(tmp_path), str(Path(agentfsm.__file__).parents[1])])
    done = run_without_terminal(["--version"], tmp_path, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "agentfsm: the command line needs an optional package: pip install 'agentfsm[cli]'\n"


def test_a_module_of_ours_that_is_missing_is_not_blamed_on_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agentfsm.cli.app", None)
    with pytest.raises(ModuleNotFoundError):
        agentfsm.cli.main(["--version"])


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m agentfsm diagram --format svg | head -c 1"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_one_that_the_shell_reads(cli: Cli, shell: str, tmp_path: Path) -> None:
    script = cli("completion", shell).stdout
    assert "_AGENTFSM_COMPLETE" in script
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed, so nobody can read its script")
    (tmp_path / "script").write_text(script)
    assert subprocess.run([program, "-n", str(tmp_path / "script")], check=False).returncode == 0


def test_a_shell_that_asks_gets_the_runs_of_the_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    for run_id in ("abc1", "abd2"):
        agent = Agent(ScriptedModel(["Hello."]), host=Host(store=store))
        asyncio.run(_done(agent, run_id))
    store.close()

    def offered(words: str, **more: str) -> list[str]:
        place = str(len(words.split(" ")) - 1)
        asked = {"_AGENTFSM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": place}
        return run_without_terminal([], tmp_path, **asked, **more).stdout.splitlines()

    for words in ("show", "verify", "replay", "export", "fork", "redact", "resume"):
        assert offered(f"agentfsm {words} --store runs.db ab") == ["plain,abc1", "plain,abd2"]
    assert offered("agentfsm show abc", AGENTFSM_STORE="runs.db") == ["plain,abc1"]
    assert offered("agentfsm show --store none.db ab") == [""]
    assert not (tmp_path / "none.db").exists()


async def _done(agent: Agent, run_id: str) -> None:
    assert (await agent.run("Hi.", run_id=run_id)).ok


def test_a_shell_that_asks_gets_commands_and_options(tmp_path: Path) -> None:
    def offered(words: str) -> str:
        place = str(len(words.split(" ")) - 1)
        answer = run_without_terminal(
            [], tmp_path, _AGENTFSM_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=place
        )
        return answer.stdout

    assert "plain,resume" in offered("agentfsm re")
    assert "plain,--max-iterations" in offered("agentfsm run --max-")
    assert "plain,strict" in offered("agentfsm run --preset st")
