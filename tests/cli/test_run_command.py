"""``agentfsm run``: answers on stdout, everything else on stderr, and an exit code for every outcome."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path

import pytest

from agentfsm.journal.sqlite.store_file import FileLock
from tests.cli.conftest import Cli
from tests.helpers.fake_model_server import JsonBody, ModelOutput, fake_model_server, text_output, tool_call_output
from tests.helpers.terminal import TerminalProcess, run_without_terminal

TOOLS = '''
from agentfsm import tool

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@tool(requires_approval=True)
def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"

tools = [add, remove]
'''
SECRET = "a long random text, for tests"


@pytest.fixture(autouse=True)
def _tools(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)


def test_only_the_answer_goes_to_stdout(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("add", {"a": 2, "b": 3})), text_output("It is 5.")) as server:
        result = cli("run", "2 + 3?", "--model", "some-model", "--base-url", server.url, "--tools", "tools.py")
    assert result.exit_code == 0
    assert result.stdout == "It is 5.\n"
    assert "add(a=2, b=3)" in result.stderr
    assert "post_llm       dispatch_tool  tool_calls" in result.stderr
    assert "completed  2 model calls, 8 transitions, 30 tokens" in result.stderr
    asked, told = server.requests
    assert asked["messages"] == [{"role": "user", "content": "2 + 3?"}]
    assert told["messages"][-1]["content"] == "5"


def test_quiet_prints_only_the_answer(cli: Cli) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        result = cli("run", "hi", "-m", "some-model", "--base-url", server.url, "-q")
    assert (result.stdout, result.stderr) == ("Hello.\n", "")


@pytest.mark.parametrize("flags", [("-q",), ("-q", "--no-store")])
def test_a_quiet_run_that_fails_says_why(cli: Cli, flags: tuple[str, ...]) -> None:
    with fake_model_server(401) as server:
        result = cli("run", "hi", "-m", "some-model", "--base-url", server.url, *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("agentfsm: handed off: ")
    assert "401" in line


def test_a_quiet_run_that_waits_says_for_what_and_how_to_answer(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        result = cli("run", "hi", "-m", "some-model", "--base-url", server.url, "-t", "tools.py", "-q")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "agentfsm: suspended: approval: May 'remove' run" in result.stderr
    assert "resume with: agentfsm resume" in result.stderr


def test_show_says_where_no_price_is_known(cli: Cli) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        cli("run", "hi", "-m", "some-model", "--base-url", server.url)
    shown = cli("show", cli("runs").stdout.split()[0]).stdout
    assert shown.splitlines()[-1] == "10 tokens in, 5 out, unpriced"
    assert "(10 tokens in, 5 out, unpriced)" in shown
    assert "USD" not in shown


def test_the_prompt_can_come_from_stdin(cli: Cli) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        cli(
            "run", "-", "-m", "some-model", "--base-url", server.url, "--instructions", "Be brief.", stdin="from a pipe"
        )
    assert server.requests[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "from a pipe"},
    ]


@pytest.mark.parametrize("prompt", ["", "  ", "-"])
def test_an_empty_prompt_is_wrong_usage(cli: Cli, prompt: str) -> None:
    result = cli("run", prompt, "-m", "ollama:x")
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_the_model_can_come_from_the_environment(cli: Cli) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        result = cli("run", "hi", AGENTFSM_MODEL="openai:tiny", OPENAI_BASE_URL=server.url, OPENAI_API_KEY="sk-test")
    assert result.stdout == "Hello.\n"
    assert server.requests[0]["model"] == "tiny"


def test_the_key_for_a_base_url_comes_from_a_variable_and_is_never_shown(cli: Cli) -> None:
    keys: list[str] = []
    with fake_model_server(401) as server:
        result = cli(
            *("run", "hi", "-m", "some-model", "--base-url", server.url, "--api-key-env", "MY_KEY", "--json"),
            MY_KEY="sk-canary-0123456789",
        )
    assert result.exit_code == 1
    assert keys == []
    assert "canary" not in result.output
    assert json.loads(result.stdout)["outcome"] == "Handoff"


def test_json_contains_the_outcome_and_every_transition_with_its_guards(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("add", {"a": 2, "b": "x"})), text_output("Five.")) as server:
        result = cli("run", "2 + 3?", "-m", "some-model", "--base-url", server.url, "-t", "tools.py", "--json")
    data = json.loads(result.stdout)
    assert (data["outcome"], data["ok"], data["output"], data["state"]) == ("RunCompleted", True, "Five.", "terminal")
    assert (data["model_calls"], data["recoveries"], data["usage"]["total_tokens"]) == (2, 1, 30)
    moves = [(m["from"], m["guard"], m["to"]) for m in data["transitions"]]
    assert moves[:6] == [
        ("pre_step", "otherwise", "call_llm"),
        ("call_llm", "otherwise", "post_llm"),
        ("post_llm", "tool_calls", "dispatch_tool"),
        ("dispatch_tool", "otherwise", "post_tool"),
        ("post_tool", "invalid_arguments", "recover"),
        ("recover", "otherwise", "pre_step"),
    ]
    failed = data["transitions"][4]
    assert failed["tried"][0] == {"guard": "cancelled", "answer": False}
    assert failed["tried"][-1] == {"guard": "invalid_arguments", "answer": True}
    assert failed["found"]["kind"] == "invalid_arguments"


def test_a_handoff_exits_with_1_and_shows_the_reason(cli: Cli) -> None:
    with fake_model_server(404) as server:
        result = cli("run", "hi", "-m", "some-model", "--base-url", server.url)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "handed off" in result.stderr
    assert "not now" in result.stderr


def test_a_missing_server_is_reported_as_unreachable(cli: Cli) -> None:
    with fake_model_server(text_output("gone")) as server:
        pass
    result = cli("run", "hi", "-m", "some-model", "--base-url", server.url, "--preset", "strict")
    assert result.exit_code == 1
    assert "is base_url right?" in result.stderr


def test_limits_are_enforced(cli: Cli) -> None:
    def more(body: JsonBody) -> ModelOutput:
        return tool_call_output(("add", {"a": len(server.requests), "b": 1}))

    with fake_model_server(more) as server:
        cli("run", "hi", "-m", "some-model", "--base-url", server.url, "-t", "tools.py", "--max-iterations", "3")
    assert len(server.requests) == 3


def test_a_user_defined_graph_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "graphs.py").write_text(
        "from agentfsm import LOOP, Failure, FailureKind\n"
        "def too_polite(run):\n"
        "    if run.reply and 'please' in run.reply.message.content:\n"
        "        return Failure(kind=FailureKind.output_refused, explanation='too polite')\n"
        "MINE = LOOP.with_detector('post_llm', too_polite, before='no_progress')\n"
    )
    with fake_model_server(text_output("Yes, please.")) as server:
        result = cli("run", "hi", "-m", "some-model", "--base-url", server.url, "--graph", "graphs.py:MINE")
    assert result.exit_code == 1
    assert "too_polite" in result.stderr


def test_the_diagram_of_the_run_is_written(cli: Cli, tmp_path: Path) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        result = cli("run", "hi", "-m", "some-model", "--base-url", server.url, "--diagram", "out/run.md")
    assert "picture: out/run.md" in result.stderr
    assert "call_llm" in (tmp_path / "out" / "run.md").read_text()


# -- suspended ------------------------------------------------------------------------------------------


def suspend(cli: Cli, url: str, *words: str, **environment: str) -> tuple[int, str, str]:
    """A run that waits for the approval to remove a file."""
    result = cli("run", "tidy up", "-m", "some-model", "--base-url", url, "-t", "tools.py", *words, **environment)
    return result.exit_code, result.stdout, result.stderr


def test_without_a_terminal_a_question_suspends_the_run_and_saves_its_record(cli: Cli, tmp_path: Path) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"})), text_output("Done.")) as server:
        code, out, err = suspend(cli, server.url, "--record", "wait.json", AGENTFSM_SECRET=SECRET)
        assert code == 3
        assert out == ""
        assert "suspended" in err
        assert "approval: May 'remove' run with these arguments?" in err
        assert 'remove {"path": "old.txt"}' in err
        (command,) = [line.strip() for line in err.splitlines() if "agentfsm resume" in line]
        assert command == (
            f"resume with: agentfsm resume wait.json allow --model some-model --base-url {server.url} --tools tools.py"
        )
        assert (tmp_path / "wait.json").stat().st_mode & 0o077 == 0
        words = command.removeprefix("resume with: agentfsm ").split()
        result = cli(*words, AGENTFSM_SECRET=SECRET)
        assert (result.exit_code, result.stdout) == (0, "Done.\n")
        assert server.requests[-1]["messages"][-1]["content"] == "removed old.txt"


def test_without_file_and_store_the_record_goes_to_stdout(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        code, out, err = suspend(cli, server.url, "--no-store", AGENTFSM_SECRET=SECRET)
        assert code == 3
        assert json.loads(out)["tool"] == "remove"
        assert "resume RECORD.json allow" in err
        code, out, _ = suspend(cli, server.url, "--json", "--no-store", AGENTFSM_SECRET=SECRET)
        data = json.loads(out)
        assert (data["outcome"], data["details"]["kind"]) == ("UserInputRequested", "approval")
        assert data["suspension_record"]["tool"] == "remove"


def test_without_store_and_secret_the_run_cannot_be_resumed(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        code, out, err = suspend(cli, server.url, "--no-store")
    assert (code, out) == (3, "")
    assert "this run cannot be resumed" in err


def test_a_run_resumes_from_its_store_without_record_and_secret(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"})), text_output("Done.")) as server:
        code, _, err = suspend(cli, server.url)
        assert code == 3
        (command,) = [line.strip() for line in err.splitlines() if "agentfsm resume" in line]
        words = command.removeprefix("resume with: agentfsm ").split()
        (listed,) = cli("runs").stdout.splitlines()
        assert listed.split()[:2] == [words[1], "suspended"]
        result = cli(*words)
        assert (result.exit_code, result.stdout) == (0, "Done.\n")
        assert cli("runs").stdout.split()[1] == "finished"
        again = cli(*words)
        assert again.exit_code == 2
        assert "has ended" in again.stderr


def test_a_locked_store_is_skipped_unless_it_was_named(cli: Cli, tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "named.db-lock")
    lock.acquire()
    default = tmp_path / ".local" / "share" / "agentfsm"
    default.mkdir(parents=True)
    other = FileLock(default / "agentfsm.db-lock")
    other.acquire()
    try:
        with fake_model_server(text_output("Hello.")) as server:
            words = ("run", "hi", "-m", "some-model", "--base-url", server.url)
            result = cli(*words)
            assert (result.exit_code, result.stdout) == (0, "Hello.\n")
            assert f"this run is not stored: agentfsm.db is in use by process {os.getpid()}" in result.stderr
            named = cli(*words, "--store", "named.db")
            assert named.exit_code == 2
            assert f"named.db is in use by process {os.getpid()}" in named.stderr
            assert cli("resume", "some-id", "-m", "some-model", "--base-url", server.url).exit_code == 2
    finally:
        lock.release()
        other.release()


def test_an_unwritable_store_is_skipped_unless_it_was_named(cli: Cli, tmp_path: Path) -> None:
    default = tmp_path / ".local" / "share" / "agentfsm"
    (default / "agentfsm.db-lock").mkdir(parents=True)  # in place of the lock file: not even root can write it
    (tmp_path / "named.db-lock").mkdir()
    with fake_model_server(text_output("Hello."), text_output("Hello.")) as server:
        words = ("run", "hi", "-m", "some-model", "--base-url", server.url)
        result = cli(*words)
        assert (result.exit_code, result.stdout) == (0, "Hello.\n")
        (line,) = [line for line in result.stderr.splitlines() if "is not stored" in line]
        assert "agentfsm.db-lock cannot be written" in line
        named = cli(*words, "--store", "named.db")
        assert named.exit_code == 2
        assert "named.db-lock cannot be written" in named.stderr
        assert named.stdout == ""
        assert cli("resume", "some-id", "-m", "some-model", "--base-url", server.url).exit_code == 2


def test_the_store_is_private_and_no_store_creates_none(cli: Cli, tmp_path: Path) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        words = ("run", "hi", "-m", "some-model", "--base-url", server.url)
        cli(*words, "--no-store")
        assert not (tmp_path / ".local").exists()
        result = cli(*words)
    folder = tmp_path / ".local" / "share" / "agentfsm"
    assert folder.stat().st_mode & 0o077 == 0
    assert f"run: {cli('runs').stdout.split()[0]}" in result.stderr


def test_a_missing_folder_is_reported_before_the_first_model_call(cli: Cli) -> None:
    with fake_model_server(text_output("Hello.")) as server:
        code, _, err = suspend(cli, server.url, "--record", "no/where/wait.json", AGENTFSM_SECRET=SECRET)
        assert code == 2
        assert "there is no folder 'no/where'" in err
        assert server.requests == []


# -- as a process ---------------------------------------------------------------------------------------


def test_at_a_terminal_the_user_is_asked_and_the_run_continues(tmp_path: Path) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"})), text_output("Done.")) as server:
        words = ["run", "tidy", "-m", "some-model", "--base-url", server.url, "-t", "tools.py"]
        with TerminalProcess(words, tmp_path) as terminal:
            terminal.expect("May 'remove' run with these arguments?")
            terminal.type("e")
            terminal.expect("New arguments as JSON")
            terminal.type('{"path": "older.txt"}')
            terminal.expect("Done.")
            assert terminal.wait() == 0
    assert server.requests[-1]["messages"][-1]["content"].startswith("removed older.txt")


@pytest.mark.slow
def test_ctrl_c_at_an_approval_leaves_the_run_waiting_and_says_how_to_answer(tmp_path: Path) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"})), text_output("Done.")) as server:
        options = ("-m", "some-model", "--base-url", server.url, "-t", "tools.py")
        with TerminalProcess(["run", "Tidy up.", *options], tmp_path) as terminal:
            terminal.expect("[a]llow, [d]eny or [e]dit?")
            terminal.interrupt("suspended")
            terminal.expect("resume with: agentfsm resume")
            assert terminal.wait() == 130
        (listed,) = run_without_terminal(["runs"], tmp_path).stdout.splitlines()
        run_id, status = listed.split()[:2]
        assert status == "suspended"
        done = run_without_terminal(["resume", run_id, "allow", *options], tmp_path)
    assert (done.returncode, done.stdout) == (0, "Done.\n")


def test_ctrl_c_cancels_a_run_that_waits_for_its_model(tmp_path: Path) -> None:
    with fake_model_server(hang=True) as server:
        words = ["run", "hi", "-m", "some-model", "--base-url", server.url]
        with TerminalProcess(words, tmp_path) as terminal:
            terminal.expect("waiting for")
            assert server.asked.wait(30)
            terminal.type("\x03", end="")
            terminal.expect("cancelled")
            terminal.expect("interrupted (SIGINT)")
            terminal.expect("it was in state call_llm")
            assert terminal.wait() == 130
    assert "Traceback" not in terminal.text


def test_sigterm_cancels_the_run(tmp_path: Path) -> None:
    with fake_model_server(hang=True) as server:
        words = ["run", "hi", "-m", "some-model", "--base-url", server.url, "--json"]
        with TerminalProcess(words, tmp_path) as terminal:
            assert server.asked.wait(30)
            terminal.process.terminate()
            assert terminal.wait() == 143
    assert '"outcome": "RunCancelled"' in terminal.text


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_store(tmp_path: Path) -> None:
    with (
        fake_model_server(tool_call_output(("add", {"a": 2, "b": 3})), text_output("Five.")) as good,
        fake_model_server(hang=True) as bad,
    ):
        first = ["run", "2 + 3?", "-m", "some-model", "--base-url", bad.url, "-t", "tools.py"]
        with TerminalProcess(first, tmp_path) as terminal:
            assert bad.asked.wait(30)
            terminal.process.kill()
            terminal.wait()
        (listed,) = run_without_terminal(["runs"], tmp_path).stdout.splitlines()
        run_id, status = listed.split()[:2]
        assert status == "running"
        words = ["resume", run_id, "-m", "some-model", "--base-url", good.url, "-t", "tools.py"]
        done = run_without_terminal(words, tmp_path)
    assert (done.returncode, done.stdout) == (0, "Five.\n")
    assert good.requests[0]["messages"] == [{"role": "user", "content": "2 + 3?"}]


@pytest.mark.slow
def test_ctrl_c_cancels_a_tool_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import threading\n"
        "def wait() -> str:\n"
        "    'Wait.'\n"
        "    print('at it', flush=True)\n"
        "    threading.Event().wait()\n"
    )
    with fake_model_server(tool_call_output(("wait", {}))) as server:
        words = ["run", "hi", "-m", "some-model", "--base-url", server.url, "-t", "slow.py"]
        with TerminalProcess(words, tmp_path) as terminal:
            terminal.expect("at it")
            terminal.type("\x03", end="")
            terminal.expect("it was in state dispatch_tool")
            assert terminal.wait() == 130


@pytest.mark.slow
def test_the_answer_goes_through_a_pipe_unchanged(tmp_path: Path) -> None:
    with fake_model_server(text_output("tab\there \x1b[1m grüße")) as server:
        done = run_without_terminal(["run", "hi", "-m", "some-model", "--base-url", server.url], tmp_path)
    assert done.stdout == "tab\there \x1b[1m grüße\n"
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_a_locale_without_arrows_gets_question_marks(tmp_path: Path) -> None:
    with fake_model_server(text_output("→ grüße")) as server:
        words = ["run", "hi", "-m", "some-model", "--base-url", server.url]
        done = run_without_terminal(words, tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "? gr??e\n")


def test_show_cannot_send_control_characters_to_the_terminal(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "\x1b[2J\u202eold.txt"}))) as server:
        suspend(cli, server.url)
    shown = cli("show", cli("runs").stdout.split()[0]).stdout
    assert "post_llm.tool_calls -> dispatch_tool" in shown
    assert "\x1b" not in shown


def test_images_and_files_of_the_command_line_follow_the_prompt_in_their_order(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "lamp.gif").write_bytes(b"GIF89a...")
    (tmp_path / "page.gif").write_bytes(b"GIF87a...")
    (tmp_path / "prices.csv").write_text("lamp,20")
    files = ["--file", "prices.csv", "--file", "page.gif", "--image", "lamp.gif"]
    with fake_model_server(text_output("Yes.")) as server:
        result = cli("run", "Is it paid?", "-m", "some-model", "--base-url", server.url, *files)
    assert (result.exit_code, result.stdout) == (0, "Yes.\n")
    (message,) = server.requests[0]["messages"]
    first, lamp, table, page = message["content"]
    assert (first["text"], lamp["type"], page["type"]) == ("Is it paid?", "image_url", "image_url")
    assert "lamp,20" in table["text"]
    assert lamp["image_url"]["url"].endswith(base64.b64encode(b"GIF89a...").decode())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--image", "notes.bin"], "Invalid value for --image: notes.bin: the file is not an image that models accept"),
        (["--file", "notes.bin"], "Invalid value for --file: notes.bin: the file is neither a PDF nor a text"),
        (["--file", "missing.pdf"], "does not exist"),
    ],
)
def test_a_file_that_no_model_takes_is_refused_before_the_model_is_called(
    cli: Cli, tmp_path: Path, words: list[str], why: str
) -> None:
    (tmp_path / "notes.bin").write_bytes(b"\xff\xfe\x00")
    result = cli("run", "hi", "-m", "ollama:m", *words)
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())


def test_a_prompt_is_missing_without_a_session(cli: Cli) -> None:
    result = cli("run", "-m", "ollama:m")
    assert result.exit_code == 2
    assert "Missing argument 'PROMPT'" in result.stderr


def test_a_session_goes_on_from_command_to_command(cli: Cli) -> None:
    with fake_model_server(text_output("Hello Ann."), text_output("Ann."), text_output("As I said: Ann.")) as server:
        agent = ("-m", "some-model", "--base-url", server.url, "--session", "ann 42", "-q")
        said = [cli("run", *prompt, *agent).stdout for prompt in (["I am Ann."], ["Who am I?"], [])]
    assert said == ["Hello Ann.\n", "Ann.\n", "As I said: Ann.\n"]
    texts = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert texts[1] == ["I am Ann.", "Hello Ann.", "Who am I?"]
    assert texts[2][:4] == [*texts[1], "Ann."]
    assert len(cli("runs", "--session", "ann 42", "--json").stdout.splitlines()) == 3


def test_a_session_that_waits_names_the_commands_that_go_on_with_it(cli: Cli) -> None:
    with fake_model_server(tool_call_output(("remove", {"path": "a"})), text_output("Removed.")) as server:
        agent = ("-m", "some-model", "--base-url", server.url, "-t", "tools.py")
        assert cli("run", "Remove a.", *agent, "--session", "s").exit_code == 3
        refused = cli("run", "And b.", *agent, "--session", "s")
        assert refused.exit_code == 2
        (run_id,) = set(re.findall(r"agentfsm resume (\w+)", refused.stderr))
        assert "remove" in refused.stderr
        assert cli("resume", run_id, "allow", *agent).stdout == "Removed.\n"


def test_a_session_needs_a_store(cli: Cli) -> None:
    result = cli("run", "hi", "-m", "ollama:m", "--session", "s", "--no-store")
    assert result.exit_code == 2
    assert "leave --no-store out" in result.stderr
