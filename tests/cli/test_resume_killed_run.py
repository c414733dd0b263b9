"""``agentfsm run`` killed in the middle of a tool call: what the store holds, and how the run resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfsm.journal.sqlite.store_file import FileLock
from tests.cli.conftest import Cli
from tests.helpers.fake_model_server import fake_model_server, text_output, tool_call_output
from tests.helpers.terminal import COMMAND, clean_environment, run_without_terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")

TOOLS = '''
import os
import threading
from pathlib import Path

from agentfsm import ToolContext, tool

def effect(context: ToolContext) -> str:
    with Path("effects").open("a") as file:
        file.write(context.idempotency_key + "\\n")
    if "HANG" in os.environ:
        print("in the middle", flush=True)
        threading.Event().wait()
    return "paid"

@tool(idempotent=True)
def pay_once_per_key(context: ToolContext) -> str:
    """Pay; the bank knows the key."""
    return effect(context)

@tool
def pay(context: ToolContext) -> str:
    """Pay."""
    return effect(context)

tools = [pay, pay_once_per_key]
'''


def killed_in(tool: str, url: str, folder: Path) -> str:
    """The id of a run that was killed while a tool ran."""
    (folder / "tools.py").write_text(TOOLS)
    output_file = folder / "stderr"
    with (
        output_file.open("w") as stderr,
        subprocess.Popen(
            [*COMMAND, "run", "pay", *options(url)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=folder,
            env=clean_environment(folder, HANG="1"),
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        process.kill()
    (listed,) = run_without_terminal(["runs", "--store", "runs.db", "--json"], folder).stdout.splitlines()
    head = json.loads(listed)
    assert (head["status"], head["owner"]) == ("running", None)
    assert output_file.read_text().splitlines()[0] == f"run {head['run_id']}"
    return str(head["run_id"])


def options(url: str) -> list[str]:
    return ["-m", "some-model", "--base-url", url, "-t", "tools.py", "--store", "runs.db"]


def effects(folder: Path) -> list[str]:
    return (folder / "effects").read_text().splitlines()


@pytest.mark.slow
def test_an_idempotent_tool_runs_again_with_the_same_key(tmp_path: Path) -> None:
    with fake_model_server(tool_call_output(("pay_once_per_key", {})), text_output("Paid.")) as server:
        run_id = killed_in("pay_once_per_key", server.url, tmp_path)
        done = run_without_terminal(["resume", run_id, *options(server.url)], tmp_path)
    assert (done.returncode, done.stdout) == (0, "Paid.\n"), done.stderr
    first, second = effects(tmp_path)
    assert first == second
    assert len(server.requests) == 2  # a reply in the journal is not requested again
    assert server.requests[-1]["messages"][-1]["content"] == "paid"
    assert run_without_terminal(["verify", run_id, "--store", "runs.db"], tmp_path).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "times", "result"), [("ran paid by hand", 1, "paid by hand"), ("did-not-run", 2, "paid")]
)
def test_any_other_tool_is_in_doubt_until_a_person_replies(tmp_path: Path, reply: str, times: int, result: str) -> None:
    with fake_model_server(tool_call_output(("pay", {})), text_output("Paid.")) as server:
        run_id = killed_in("pay", server.url, tmp_path)
        asked = run_without_terminal(["resume", run_id, *options(server.url)], tmp_path)
        assert asked.returncode == 3
        assert "in_doubt" in asked.stderr
        assert f"agentfsm resume {run_id} 'YOUR ANSWER' " in asked.stderr  # no reply is suggested for a call in doubt
        assert 'valid replies: ran, "ran RESULT", did-not-run, or give-up' in asked.stderr
        pasted = run_without_terminal(["resume", run_id, "YOUR ANSWER", *options(server.url)], tmp_path)
        assert (pasted.returncode, len(effects(tmp_path))) == (2, 1)
        assert len(effects(tmp_path)) == 1
        assert len(server.requests) == 1
        done = run_without_terminal(["resume", run_id, reply, *options(server.url)], tmp_path)
    assert (done.returncode, done.stdout) == (0, "Paid.\n"), done.stderr
    assert len(effects(tmp_path)) == times
    assert server.requests[-1]["messages"][-1]["content"].partition("\n")[0] == result
    assert run_without_terminal(["verify", run_id, "--store", "runs.db"], tmp_path).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pay", "pay_once_per_key"])
def test_a_missing_tools_option_does_not_use_up_the_call(tmp_path: Path, tool: str) -> None:
    with fake_model_server(tool_call_output((tool, {})), text_output("Paid.")) as server:
        run_id = killed_in(tool, server.url, tmp_path)
        words = options(server.url)
        bare = [word for word in words if word not in ("-t", "tools.py")]
        before = run_without_terminal(["export", run_id, "--store", "runs.db"], tmp_path).stdout
        for which, code in ([run_id], 2), ([], 1):
            refused = run_without_terminal(["resume", *which, *bare], tmp_path)
            assert refused.returncode == code, refused.stderr
            assert f"{tool!r}, which is not loaded" in refused.stderr
        if tool == "pay":
            assert run_without_terminal(["resume", run_id, *words], tmp_path).returncode == 3
            before = run_without_terminal(["export", run_id, "--store", "runs.db"], tmp_path).stdout
            refused = run_without_terminal(["resume", run_id, "did-not-run", *bare], tmp_path)
            assert refused.returncode == 2
        assert run_without_terminal(["export", run_id, "--store", "runs.db"], tmp_path).stdout == before
        reply = ["did-not-run"] if tool == "pay" else []
        assert run_without_terminal(["resume", run_id, *reply, *words], tmp_path).stdout == "Paid.\n"


@pytest.mark.slow
def test_an_interrupted_run_refuses_a_reply_and_is_unchanged(tmp_path: Path) -> None:
    with fake_model_server(tool_call_output(("pay_once_per_key", {})), text_output("Paid.")) as server:
        run_id = killed_in("pay_once_per_key", server.url, tmp_path)
        refused = run_without_terminal(["resume", run_id, "ran", *options(server.url)], tmp_path)
        assert refused.returncode == 2
        assert "resume it without a reply" in refused.stderr
        assert len(effects(tmp_path)) == 1
        assert run_without_terminal(["resume", run_id, *options(server.url)], tmp_path).returncode == 0


def test_a_store_named_in_the_environment_must_be_usable(cli: Cli, tmp_path: Path) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        words = ("run", "hi", "-m", "some-model", "--base-url", server.url)
        assert cli(*words, AGENTFSM_STORE="mine.db").exit_code == 0
        (listed,) = cli("runs", AGENTFSM_STORE="mine.db").stdout.splitlines()
        assert listed.split()[1] == "finished"
        assert cli("runs", "--store", "mine.db").stdout.splitlines() == [listed]
        lock = FileLock(tmp_path / "other.db-lock")
        lock.acquire()
        try:
            refused = cli(*words, AGENTFSM_STORE="other.db")
        finally:
            lock.release()
    assert refused.exit_code == 2
    assert "other.db" in refused.stderr
    assert f"process {os.getpid()} on " in refused.stderr
    assert len(server.requests) == 1
