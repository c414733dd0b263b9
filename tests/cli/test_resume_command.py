"""``agentfsm resume``: a suspended run is resumed in another process, once, with the same secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_run_command import SECRET, TOOLS
from tests.helpers.fake_model_server import (
    FakeModelServer,
    ModelOutput,
    fake_model_server,
    text_output,
    tool_call_output,
)
from tests.helpers.terminal import TerminalProcess, run_without_terminal

ENVIRONMENT = {"AGENTFSM_SECRET": SECRET}


@pytest.fixture
def agent(cli: Cli, tmp_path: Path) -> list[str]:
    """The options of the agent; ``wait.json`` holds a run that waits for approval."""
    (tmp_path / "tools.py").write_text(TOOLS)
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        options = ["-m", "some-model", "--base-url", server.url, "-t", "tools.py"]
        assert cli("run", "tidy", *options, "--no-store", "--record", "wait.json", **ENVIRONMENT).exit_code == 3
    return options


def resumed(cli: Cli, agent: list[str], *words: str, **environment: str) -> tuple[int, str, str, FakeModelServer]:
    """The result of ``resume wait.json``, and the model server it used."""
    with fake_model_server(text_output("Done.")) as server:
        options = [server.url if word.startswith("http") else word for word in agent]
        result = cli("resume", "wait.json", *words, *options, **(ENVIRONMENT | environment))
    return result.exit_code, result.stdout, result.stderr, server


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        ("allow", "removed old.txt"),
        ("deny too dear", "Denied by the user: too dear"),
        ('{"path": "new.txt"}', "removed new.txt\n[Note: a person changed the arguments of this call.]"),
    ],
)
def test_the_reply_decides_what_happens_to_the_call(cli: Cli, agent: list[str], reply: str, result: str) -> None:
    code, out, err, server = resumed(cli, agent, reply)
    assert (code, out) == (0, "Done.\n")
    assert server.requests[0]["messages"][-1]["content"] == result
    assert "suspended      dispatch_tool  approval_decided" in err


def test_a_record_can_be_used_once(cli: Cli, agent: list[str]) -> None:
    assert resumed(cli, agent, "allow")[0] == 0
    code, _, err, server = resumed(cli, agent, "allow")
    assert code == 2
    assert "was already resumed" in err
    assert server.requests == []


@pytest.mark.slow
def test_another_process_resumes_the_record_and_a_third_cannot(agent: list[str], tmp_path: Path) -> None:
    with fake_model_server(text_output("Done.")) as server:
        options = [server.url if word.startswith("http") else word for word in agent]
        words = ["resume", "wait.json", "allow", *options]
        first = run_without_terminal(words, tmp_path, **ENVIRONMENT)
        second = run_without_terminal(words, tmp_path, **ENVIRONMENT)
    assert (first.returncode, first.stdout) == (0, "Done.\n")
    assert second.returncode == 2
    assert "was already resumed" in second.stderr


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["allow"], {"AGENTFSM_SECRET": ""}, "needs the variable AGENTFSM_SECRET"),
        (["allow"], {"AGENTFSM_SECRET": "another"}, "signed with another secret"),
        (["perhaps"], {}, "'perhaps' is not a valid reply"),
        (["allow", "--preset", "strict"], {}, "belongs to graph"),
        ([], {}, "there is no terminal to ask at"),
        (["allow", "--dismiss", "no"], {}, "not both"),
    ],
)
def test_a_refused_reply_leaves_the_record_usable(
    cli: Cli, agent: list[str], words: list[str], environment: dict[str, str], message: str
) -> None:
    code, out, err, _ = resumed(cli, agent, *words, **environment)
    assert (code, out) == (2, "")
    assert message in err
    assert resumed(cli, agent, "allow")[:2] == (0, "Done.\n")


def test_an_edited_or_malformed_record_is_refused(cli: Cli, agent: list[str], tmp_path: Path) -> None:
    record = json.loads((tmp_path / "wait.json").read_text())
    (tmp_path / "wait.json").write_text(json.dumps(record | {"tool": "add"}))
    assert "signature does not match" in resumed(cli, agent, "allow")[2]
    (tmp_path / "wait.json").write_text("{}")
    assert "this is not a suspension record" in resumed(cli, agent, "allow")[2]
    (tmp_path / "wait.json").write_bytes(b"\xff\xfe")
    code, _, err, _ = resumed(cli, agent, "allow")
    assert code == 2
    assert "this is not a suspension record" in err


def test_a_record_can_be_dismissed(cli: Cli, agent: list[str]) -> None:
    code, _, err, server = resumed(cli, agent, "--dismiss", "no longer needed")
    assert code == 1
    assert "cancelled" in err
    assert "no longer needed" in err
    assert server.requests == []


def test_at_a_terminal_the_user_is_asked(agent: list[str], tmp_path: Path) -> None:
    with fake_model_server(text_output("Done.")) as server:
        options = [server.url if word.startswith("http") else word for word in agent]
        with TerminalProcess(["resume", "wait.json", *options], tmp_path, ENVIRONMENT) as terminal:
            terminal.expect("May 'remove' run with these arguments?")
            terminal.expect("old.txt")
            terminal.type("deny")
            terminal.type("keep it")
            terminal.expect("Done.")
            assert terminal.wait() == 0
    assert server.requests[0]["messages"][-1]["content"] == "Denied by the user: keep it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-run"], "no-such-run"),
        (["no-such-run", "--no-store"], "there are no runs without a store"),
        (["none.json", "allow"], "none.json"),
    ],
)
def test_an_unknown_run_is_reported(cli: Cli, words: list[str], message: str) -> None:
    result = cli("resume", *words, "-m", "ollama:x", **ENVIRONMENT)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_stored_run_asks_the_user_at_the_terminal(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"})), text_output("Done.")) as server:
        options = ["-m", "some-model", "--base-url", server.url, "-t", "tools.py"]
        assert cli("run", "tidy", *options).exit_code == 3
        run_id = cli("runs").stdout.split()[0]
        with TerminalProcess(["resume", run_id, *options], tmp_path) as terminal:
            terminal.expect("May 'remove' run with these arguments?")
            terminal.type("a")
            terminal.expect("Done.")
            assert terminal.wait() == 0


def test_a_stored_run_can_be_dismissed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        options = ["-m", "some-model", "--base-url", server.url, "-t", "tools.py"]
        cli("run", "tidy", *options)
        run_id = cli("runs").stdout.split()[0]
        result = cli("resume", run_id, "--dismiss", "never mind", "--by", "Ann", *options)
    assert result.exit_code == 1
    assert "never mind (by Ann, claimed, not verified)" in result.stderr
    assert "never mind (by Ann, claimed, not verified)" in cli("export", run_id).stdout
    assert cli("runs").stdout.split()[1] == "finished"


# -- limits ---------------------------------------------------------------------------------------------


def adding(server: FakeModelServer) -> ModelOutput:
    return tool_call_output(("add", {"a": len(server.requests), "b": 1}))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("words", [["--extend", "model_calls=2"], ["model_calls=2"]])
def test_a_limit_is_extended_by_the_named_amount(cli: Cli, tmp_path: Path, words: list[str], stored: bool) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with fake_model_server(lambda _: adding(server)) as server:
        options = ["-m", "some-model", "--base-url", server.url, "-t", "tools.py", "--max-iterations", "3"]
        record = [] if stored else ["--no-store", "--record", "limit.json"]
        first = cli("run", "add", *options, *record, **ENVIRONMENT)
        assert first.exit_code == 3
        assert "3 of 3 model calls are used up, and a reply grants 3 by default" in first.stderr
        assert "valid replies: how to continue, or tokens=5000" in first.stderr
        run = first.stderr.partition("agentfsm resume ")[2].split()[0]
        assert cli("resume", run, "--extend", "model_calls=9", *options, **ENVIRONMENT).exit_code in (1, 2)
        assert cli("resume", run, "--extend", "tokens=9", *options, **ENVIRONMENT).exit_code in (1, 2)
        assert len(server.requests) == 3
        assert cli("resume", run, *words, *options, **ENVIRONMENT).exit_code == 3
        assert len(server.requests) == 5


def test_what_the_model_is_told_when_a_limit_is_extended(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with fake_model_server(lambda _: adding(server)) as server:
        options = ["-m", "some-model", "--base-url", server.url, "-t", "tools.py", "--max-iterations", "1"]
        run = cli("run", "add", *options, **ENVIRONMENT).stderr.partition("agentfsm resume ")[2].split()[0]
        cli("resume", run, "be brief", "--extend", "model_calls=1", *options, **ENVIRONMENT)
    assert server.requests[-1]["messages"][-1] == {"role": "user", "content": "be brief"}
    shown = cli("show", run).stdout
    assert "extend model_calls=1 be brief" in shown


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--extend", "tokens=5"], "--extend is for a single run"),
        (["--dismiss", "no longer needed"], "--dismiss is for a single run"),
        (["--to", "9b2f6c1e0d4a"], "--to is for a single run"),
        (["r1", "--extend", "tokens=5", "--dismiss", "no"], "not both"),
    ],
)
def test_what_is_for_a_single_run_needs_one_and_dismissing_takes_no_reply(
    cli: Cli, words: list[str], error: str
) -> None:
    result = cli("resume", *words, "-m", "some-model")
    assert result.exit_code == 2
    assert error in result.stderr
