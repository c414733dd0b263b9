"""``agentfsm resume --by --role``, ``runs`` and ``show``: votes on a call, as the command line claims them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli
from tests.helpers.fake_model_server import fake_model_server, text_output, tool_call_output

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
