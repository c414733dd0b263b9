"""The command group: help, version, completion, lazy imports, and errors as one line and an exit code."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import agentfsm
from agentfsm import Agent, Host, HumanReplyError, Runs, SqliteStore, open_store, tool
from agentfsm.cli.app import COMMANDS, app
from agentfsm.testing import ScriptedModel, call
from agentfsm.workers import open_waker
from tests.cli.conftest import Cli
from tests.helpers.terminal import TerminalProcess, clean_environment, run_without_terminal

FIRST = ["demo", "run", "resume", "diagram"]


def test_no_arguments_show_the_help(cli: Cli) -> None:
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


@pytest.mark.parametrize("name", sorted(app.commands))
def test_the_examples_of_a_command_have_options_that_it_has(cli: Cli, name: str) -> None:
    command = app.commands[name]
    lines = cli(name, "--help").stdout.partition("Examples:\n")[2].splitlines()
    for line in lines:
        words = shlex.split(line.strip().partition("    ")[0])
        if words[:2] == ["agentfsm", name]:
            command.make_parser(click.Context(command, **command.context_settings)).parse_args(words[2:])


def test_commands_are_listed_in_the_order_a_new_user_needs_them(cli: Cli) -> None:
    _, _, listed = cli("--help").stdout.partition("Commands:\n")
    assert [line.split()[0] for line in listed.splitlines()[: len(FIRST)]] == FIRST


def test_version_is_the_package_version(cli: Cli) -> None:
    assert cli("--version").stdout == f"agentfsm {agentfsm.__version__}\n"


@pytest.mark.parametrize(
    "words", [("frob",), ("demo", "--frob"), ("run",), ("completion", "csh"), ("demo", "/no/where")]
)
def test_wrong_usage_exits_with_2_and_shows_the_usage(cli: Cli, words: tuple[str, ...]) -> None:
    result = cli(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: agentfsm" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_a_configuration_error_is_one_line_on_stderr_and_exits_with_2(
    cli: Cli, words: tuple[str, ...], message: str
) -> None:
    result = cli(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("agentfsm: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_an_internal_error_is_one_line_and_a_variable_enables_the_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("this should\nnot be")

    monkeypatch.setattr("agentfsm.cli.diagram_command.render", broken)
    result = cli("diagram")
    assert result.exit_code == 70
    assert result.stderr == (
        "agentfsm: internal error: RuntimeError: this should not be (AGENTFSM_TRACEBACK=1 shows where)\n"
    )
    assert isinstance(cli("diagram", AGENTFSM_TRACEBACK="1").exception, RuntimeError)


HOSTILE = "\x1b]0;pwn\x07\x9b2J \u202eevil \u200b hunter2-hunter2"
SHOWN = r"\x1b]0;pwn\x07\x9b2J \u202eevil \u200b **********"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HumanReplyError(HOSTILE), f"agentfsm: {SHOWN}"),
        (RuntimeError(HOSTILE), f"agentfsm: internal error: RuntimeError: {SHOWN} (AGENTFSM_TRACEBACK=1 shows where)"),
        (OSError(5, HOSTILE, HOSTILE), f"agentfsm: {SHOWN}: {SHOWN}"),
        (click.UsageError(HOSTILE), f"Error: {SHOWN}"),
    ],
)
def test_an_error_controls_no_terminal_and_has_no_secret_of_the_environment(
    error: Exception, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("agentfsm.cli.diagram_command.render", broken)
    assert cli("diagram", DB_PASSWORD="hunter2-hunter2").stderr.splitlines()[-1] == said


APP = """
from agentfsm import Agent
from agentfsm.testing import ScriptedModel

def deps(context):
    raise LookupError(context.metadata["text"])

shop = Agent(ScriptedModel(["Hello."]), deps_factory=deps)
"""
AT_A_TERMINAL = [
    ("export", "r"),
    ("show", "r"),
    ("show", "r", "--json"),
    ("runs",),
    ("answer", "r", "allow", "--to", "0" * 12),
]


@pytest.mark.slow
def test_what_is_logged_and_exported_at_a_terminal_does_not_control_it(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    text = "\x1b]0;pwn\x07\x9b2J\u202eevil\u200b"
    environment = {"AGENTFSM_STORE": "runs.db", "AGENTFSM_SECRET": "long enough to be the secret of a host"}

    @tool(requires_approval=True)
    def pay(note: str) -> str:
        """Pay."""
        return note

    async def prepare() -> None:
        secret = environment["AGENTFSM_SECRET"].encode()
        waker = open_waker(tmp_path / "runs.db")
        async with open_store(tmp_path / "runs.db") as store:
            await Runs(store, secret=secret, waker=waker).submit("shop", "Hello.", metadata={"text": text})
            asks = Agent(ScriptedModel([call("pay", note=text)]), tools=[pay], host=Host(store=store, secret=secret))
            await asks.run(text, run_id="r", tags=[text])
        await waker.aclose()

    asyncio.run(prepare())
    for words in AT_A_TERMINAL:
        with TerminalProcess(words, tmp_path, environment) as command:
            command.wait()
        assert "evil" in command.raw, words
        assert not any(each in command.raw for each in ("\x1b]", "\x07", "\x9b", "\u202e", "\u200b")), words
    with TerminalProcess(("worker", "shop:shop"), tmp_path, environment) as command:
        command.expect("is set aside: RunError: deps_factory")
        command.process.terminate()
        command.wait()
    assert not any(each in command.raw for each in ("\x1b]", "\x07", "\x9b", "\u202e", "\u200b"))


def test_an_unwritable_file_is_a_configuration_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = cli("diagram", "--output", "file/loop.svg")
    assert result.exit_code == 2
    assert result.stderr.startswith("agentfsm: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_entry_names_the_module_that_defines_the_command(name: str) -> None:
    command = app.commands[name]
    assert command.name == name
    assert command.callback is not None
    assert command.callback.__module__ == f"agentfsm.cli.{COMMANDS[name].module}"


def test_a_mistyped_command_is_answered_with_a_suggestion(cli: Cli) -> None:
    result = cli("verifi")
    assert result.exit_code == 2
    assert "verify" in result.stderr


# -- as a process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "command", "said"),
    [
        (["click", "rich"], "--version", "the command line needs an optional package: pip install 'agentfsm[cli]'"),
        (["rich"], "runs", "the command line needs an optional package: pip install 'agentfsm[cli]'"),
        (["pytest"], "mutate", "agentfsm mutate needs an optional package: pip install 'agentfsm[testing]'"),
    ],
)
def test_a_missing_extra_prints_how_to_install_it(missing: list[str], command: str, said: str, tmp_path: Path) -> None:
    """Modules that cannot be imported hide the real ones. Other extras bring click along, without rich."""
    for name in missing:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    path = os.pathsep.join([str(tmp_path), str(Path(agentfsm.__file__).parents[1])])
    done = run_without_terminal([command], tmp_path, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"agentfsm: {said}\n"


def test_a_missing_module_of_this_package_is_not_reported_as_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agentfsm.cli.app", None)
    with pytest.raises(ModuleNotFoundError):
        agentfsm.cli.main(["--version"])


def test_a_closed_pipe_causes_no_traceback(tmp_path: Path) -> None:
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
def test_the_completion_script_is_valid_for_its_shell(cli: Cli, shell: str, tmp_path: Path) -> None:
    script = cli("completion", shell).stdout
    assert "_AGENTFSM_COMPLETE" in script
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed, so nobody can read its script")
    (tmp_path / "script").write_text(script)
    assert subprocess.run([program, "-n", str(tmp_path / "script")], check=False).returncode == 0


@pytest.mark.slow
def test_completion_offers_the_runs_of_the_store(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_completion_offers_commands_and_options(tmp_path: Path) -> None:
    def offered(words: str) -> str:
        place = str(len(words.split(" ")) - 1)
        answer = run_without_terminal(
            [], tmp_path, _AGENTFSM_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=place
        )
        return answer.stdout

    assert "plain,resume" in offered("agentfsm re")
    assert "plain,--max-iterations" in offered("agentfsm run --max-")
    assert "plain,strict" in offered("agentfsm run --preset st")


def imported_modules(tmp_path: Path, *words: str, **environment: str) -> set[str]:
    """The modules of the package that a command line imports, in a process of its own."""
    code = (
        "import atexit, json, sys\n"
        "ours = lambda: [name for name in sys.modules if name.split('.')[0] == 'agentfsm']\n"
        "atexit.register(lambda: print(json.dumps(ours()), file=sys.stderr))\n"
        "from agentfsm.cli import main\n"
        f"sys.exit(main({list(words)!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(tmp_path) | environment,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


COMMAND_MODULES = {f"agentfsm.cli.{entry.module}" for entry in COMMANDS.values()} - {"agentfsm.cli.app"}


def test_verify_imports_fewer_than_60_modules_and_no_other_command(tmp_path: Path) -> None:
    modules = imported_modules(tmp_path, "verify", "--help")
    assert len(modules) < 60
    assert modules & COMMAND_MODULES == {"agentfsm.cli.verify_command"}
    assert "agentfsm.agent" not in modules


@pytest.mark.parametrize("words", [(), ("--help",), ("--version",), ("completion", "bash")])
def test_help_version_and_completion_import_no_command(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert not imported_modules(tmp_path, *words) & COMMAND_MODULES


def test_drawing_a_graph_imports_no_agent(tmp_path: Path) -> None:
    assert "agentfsm.agent" not in imported_modules(tmp_path, "diagram", "--format", "text", "-o", "x.txt")


ERRORS = {
    "answer": "r yes --store none.db",
    "cancel": "r --store none.db",
    "check": "none:GRAPH",
    "demo": "file.txt",
    "diff": "none:A none:B",
    "eval": "none.jsonl --model none:m --agent none:AGENT",
    "mutate": "none:GRAPH",
    "redact": "r --text card --store none.db",
    "replay": "r --store none.db",
    "resume": "r --model none:m --store none.db",
    "run": "hello --model none:m",
    "runs": "--store none.db",
    "show": "r --store none.db",
    "store check": "--store none.db",
    "store erase": "--actor ann --store none.db",
    "verify": "r --store none.db",
}
"""Calls that cannot do what they are asked to, by command. What ``doctor`` finds is its output."""


def test_errors_are_text_on_stderr_also_with_json(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("no folder")
    commands = {name: app.commands[name] for name in app.commands}
    groups = {name: each.commands for name, each in commands.items() if isinstance(each, click.Group)}
    commands |= {f"{name} {part}": each for name, parts in groups.items() for part, each in parts.items()}
    with_json = {name for name, each in commands.items() if any("--json" in option.opts for option in each.params)}
    assert with_json == {*ERRORS, "doctor"}
    for name, arguments in ERRORS.items():
        result = cli(*name.split(), *arguments.split(), "--json")
        assert (name, result.exit_code, result.stdout) == (name, 2, "")
        lines = [line for line in result.stderr.splitlines() if line]
        assert lines[-1].startswith(("agentfsm: ", "Error: ")), name
