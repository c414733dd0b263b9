"""``agentfsm resume --by --role``, ``runs`` and ``show``: votes on a call, as the command line claims them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli
from tests.helpers.fake_model_server import fake_model_server, text_output, tool_call_output
from tests.helpers.terminal import TerminalProcess

TOOLS = '''
from agentfsm import Approval, tool

@tool(requires_approval=Approval(n=2, roles=("manager",)))
def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"
'''


def test_two_people_approve_a_call_on_the_command_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    options = ["--store", "runs.db", "-m", "some-model", "-t", "tools.py"]
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        assert cli("run", "tidy", *options, "--base-url", server.url).exit_code == 3
    run_id = json.loads(cli("runs", "--store", "runs.db", "--json").stdout)["run_id"]

    def resume(*words: str) -> tuple[int, str, str]:
        with fake_model_server(text_output("Done.")) as server:
            result = cli("resume", run_id, "allow", *words, *options, "--base-url", server.url)
        return result.exit_code, result.stdout, result.stderr

    code, _, err = resume("--by", "ann")
    assert code == 2
    assert "(manager) may answer" in err
    assert resume("--role", "manager")[0] == 2
    assert resume("--by", "ann", "--role", "manager")[0] == 3
    listed = cli("runs", "--store", "runs.db").stdout
    assert "1 of 2 approvals: ann (manager), claimed, not verified, by one of (manager)" in listed
    assert json.loads(cli("runs", "--store", "runs.db", "--json").stdout)["quorum"]["votes"][0]["id"] == "ann"
    assert resume("--by", "bob", "--role", "manager")[:2] == (0, "Done.\n")
    assert "allow by bob (manager), claimed, not verified" in cli("show", run_id, "--store", "runs.db").stdout
    verified = cli("verify", run_id, "--store", "runs.db")
    assert verified.exit_code == 0
    assert "claimed, not verified: ann, bob" in verified.stdout


def test_resume_without_a_reply_escalates_a_request_that_is_due(cli: Cli, tmp_path: Path) -> None:
    rule = 'Approval(roles=("manager",), escalate_to=("director",), escalate_after_s=1e-9)'
    (tmp_path / "tools.py").write_text(TOOLS.replace('Approval(n=2, roles=("manager",))', rule))
    options = ["--store", "runs.db", "-m", "some-model", "-t", "tools.py"]
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        assert cli("run", "tidy", *options, "--base-url", server.url).exit_code == 3
    run_id = json.loads(cli("runs", "--store", "runs.db", "--json").stdout)["run_id"]
    with fake_model_server(text_output("Done.")) as server:
        assert cli("resume", run_id, *options, "--base-url", server.url).exit_code == 3
        assert json.loads(cli("runs", "--store", "runs.db", "--json").stdout)["quorum"]["escalated"]
        asked_again = cli("resume", run_id, *options, "--base-url", server.url)
        assert (asked_again.exit_code, "there is no terminal" in asked_again.stderr) == (2, True)
        answer = ("allow", "--by", "eve", "--role", "director")
        assert cli("resume", run_id, *answer, *options, "--base-url", server.url).exit_code == 0


def test_the_printed_command_says_that_people_must_be_named_and_what_they_may_reply(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    options = ["--store", "runs.db", "-m", "some-model", "-t", "tools.py"]
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        suspended = cli("run", "tidy", *options, "--base-url", server.url).stderr
    with fake_model_server(text_output("Done.")) as server:
        listed = cli("resume", *options, "--base-url", server.url).stderr
    for shown in (suspended, listed):
        assert "0 of 2 approvals, by one of (manager)" in shown
        assert "allow --to" in shown
        assert "--by NAME --role manager" in shown
        assert 'valid replies: allow, deny, or "deny REASON"\n' in shown  # several approve the same arguments


def test_who_starts_a_run_on_the_command_line_is_its_requester(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS.replace('n=2, roles=("manager",)', "not_requester=True"))
    options = ["--store", "runs.db", "-m", "some-model", "-t", "tools.py"]
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        assert cli("run", "tidy", "--actor", "ann", *options, "--base-url", server.url).exit_code == 3
    listed = json.loads(cli("runs", "--store", "runs.db", "--json").stdout)
    assert listed["quorum"]["requester"]["id"] == "ann"
    part = listed["run_id"][:6]  # the beginning of an id is enough
    with fake_model_server(text_output("Done.")) as server:
        by_ann = cli("resume", part, "allow", "--by", "ann", *options, "--base-url", server.url)
        assert (by_ann.exit_code, "'ann' requested it" in by_ann.stderr) == (2, True)
        by_nobody = cli("resume", part, "allow", *options, "--base-url", server.url)
        assert (by_nobody.exit_code, "say who you are with --by" in by_nobody.stderr) == (2, True)
        assert cli("resume", part, "allow", "--by", "bob", *options, "--base-url", server.url).exit_code == 0


def test_in_a_session_too_who_starts_a_run_is_its_requester(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    options = ["--store", "runs.db", "-m", "some-model", "-t", "tools.py", "--session", "s1"]
    with fake_model_server(text_output("Hello.")) as server:
        assert cli("run", "hello", "--actor", "ann", *options, "--base-url", server.url).exit_code == 0
    assert len(cli("runs", "--store", "runs.db", "--actor", "ann").stdout.splitlines()) == 1
    assert cli("runs", "--store", "runs.db", "--actor", "bob").stdout == ""


def test_an_answer_that_does_not_say_who_gives_it_is_refused_before_it_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    options = ["--store", "runs.db", "-m", "some-model", "-t", "tools.py"]
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        assert cli("run", "tidy", *options, "--base-url", server.url).exit_code == 3
    run_id = json.loads(cli("runs", "--store", "runs.db", "--json").stdout)["run_id"]
    for reply in ([], ["allow"]):
        refused = cli("answer", run_id, *reply, "--store", "runs.db")
        assert (refused.exit_code, "say who you are with --by" in refused.stderr) == (2, True)
    assert cli("answer", run_id, "allow", "--by", "ann", "--role", "manager", "--store", "runs.db").exit_code == 0


def test_at_a_terminal_nobody_is_asked_for_an_approval_that_would_not_count(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        words = ["run", "tidy", "-m", "some-model", "--base-url", server.url, "-t", "tools.py"]
        with TerminalProcess(words, tmp_path) as terminal:
            terminal.expect("0 of 2 approvals, by one of (manager)")
            terminal.expect("--by NAME --role manager")
            assert terminal.wait() == 3
