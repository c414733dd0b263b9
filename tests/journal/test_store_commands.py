"""The commands that read a store: what they print, and their exit codes."""

import asyncio
import contextlib
import json
import re
import shlex
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Host,
    ModelError,
    ProviderError,
    SqliteStore,
    StateSpec,
    Transition,
    deny,
    permissions,
    tool,
)
from agentfsm.cli.app import app
from agentfsm.cli.user_code import load_tools
from agentfsm.journal.checkpoint import read_checkpoint
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.journal_scenarios import finished_run, waiting_run
from tests.helpers.scenarios import await_run
from tests.helpers.witness import is_extension

EXAMPLE = Path(__file__).parents[2] / "examples" / "verify_journal.py"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret under which the runs of these tests were sealed."""
    monkeypatch.setenv("AGENTFSM_SECRET", "of the tests")


@pytest.fixture
def path(tmp_path):
    store = SqliteStore(tmp_path / "runs.db")
    finished_run(store, "whole")
    waiting_run(store, "waits")
    store.close()
    return tmp_path / "runs.db"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def command(*args, code=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.output


def forge(path, text, values=()):
    db = sqlite3.connect(path)
    triggers = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        db.execute(f"DROP TRIGGER {name}")
    db.execute(text, values)
    for _, create in triggers:
        db.execute(create)
    db.commit()
    db.close()


def test_runs(path):
    lines = command("runs", "--store", path).splitlines()
    assert [line.split()[:2] for line in lines] == [["waits", "suspended"], ["whole", "finished"]]  # the newest first
    only = command("runs", "--store", path, "--status", "suspended", "--json")
    assert json.loads(only)["run_id"] == "waits"


def test_runs_are_searched_and_a_list_that_is_cut_off_goes_on(tmp_path):
    path = tmp_path / "runs.db"
    with SqliteStore(path) as store:
        agent = Agent(ScriptedModel(["4.50", "12", "done"]), host=Host(store=store, clock=FakeClock(1_760_000_000)))
        agent.run_sync(
            "What is tea?", run_id="tea", tags=["shop"], actor="ann", session_id="s1", metadata={"order": 7, "eu": True}
        )
        agent.run_sync("What is a cup?", run_id="cup", tags=["shop"], actor="bob", metadata={"order": 7})
        agent.run_sync("Go.", run_id="go")

    def found(*options, code=0):
        printed = command("runs", "--store", path, *options, code=code)
        return [line.split()[0] for line in printed.splitlines() if not line.startswith("agentfsm:")]

    assert found() == ["go", "cup", "tea"]
    assert found("--tag", "shop") == ["cup", "tea"]
    assert found("--metadata", "order=7") == ["cup", "tea"]
    assert found("--metadata", "order=7", "--metadata", "eu=true") == ["tea"]
    assert "write NAME=VALUE" in command("runs", "--store", path, "--metadata", "order", code=2)
    assert found("--actor", "ann") == found("--session", "s1") == found("--text", "TEA") == ["tea"]
    assert found("--ending", "completed", "--status", "finished") == ["go", "cup", "tea"]
    assert found("--ending", "partial") == found("--model", "x") == found("--role", "x") == []
    assert found("--since", "2025-10-09") == ["go", "cup", "tea"]  # 1,760,000,000 s since the epoch is that day
    assert found("--since", "2025-10-10") == found("--until", "2025-10-09") == []
    first = command("runs", "--store", path, "--limit", "2").splitlines()
    assert [line.split()[0] for line in first[:2]] == ["go", "cup"]
    assert found("--limit", "2", "--after", first[2].split("--after ")[1]) == ["tea"]
    assert command("runs", "--store", path, "--tag", "shop", "--limit", "1").splitlines()[0] == (
        'cup  finished   2025-10-09 08:53:20  0.0 s  0.0000 USD  "What is a cup?"  completed'
    )
    listed = json.loads(command("runs", "--store", path, "--actor", "ann", "--json"))
    assert (listed["prompt"], listed["tags"], listed["ending"], listed["seq"] > 5) == (
        "What is tea?", ["shop"], "completed", True,
    )  # fmt: skip


def test_a_request_that_has_expired_is_marked_and_the_command_that_is_proposed_ends_its_run(tmp_path):
    (tmp_path / "tools.py").write_text(
        "from agentfsm import tool\n\n\n"
        "@tool(requires_approval=True)\ndef pay() -> str:\n    'Pay.'\n    return 'paid'\n"
    )
    path, (pay,) = tmp_path / "runs.db", load_tools(tmp_path / "tools.py")
    with SqliteStore(path) as store:
        for run_id, limits in ("late", AgentGuardrails(validity_s=60)), ("open", AgentGuardrails()):
            host = Host(store=store, clock=FakeClock())  # of long ago
            agent = Agent(ScriptedModel([call("pay")]), tools=[pay], host=host, guardrails=limits)
            asyncio.run(await_run(agent.run("Pay.", run_id=run_id)))
    waiting, late = command("runs", "--store", path).splitlines()
    assert "suspended" in late
    assert "expired" in late
    assert "expired" not in waiting
    as_json = [json.loads(line) for line in command("runs", "--store", path, "--json").splitlines()]
    assert [(each["expired"], each["expires_at"] is None) for each in as_json] == [(False, True), (True, False)]
    options = ["-m", "ollama:x", "-t", str(tmp_path / "tools.py"), "--store", str(path)]
    shown = command("resume", *options, code=3)
    (ends,) = [line for line in shown.splitlines() if "has expired" in line]
    (allows,) = [line for line in shown.splitlines() if "resume with: agentfsm resume open allow" in line]
    assert "agentfsm" in allows
    assert "expired without a reply" in command("resume", "late", "allow", *options, code=2)
    assert "expired without a reply" in command(*shlex.split(ends.partition(": agentfsm ")[2]), code=1)
    (_, late) = command("runs", "--store", path).splitlines()
    assert late.split()[:2] == ["late", "finished"]


def test_show_says_what_the_effect_of_a_state_has_called(tmp_path):
    async def review(context):
        with contextlib.suppress(ModelError):
            await context.ask_model("Is it good?", model=ScriptedModel([ProviderError("gone")]))
        await context.ask_model("Is it bad?")
        await context.call_tool("add", {"a": 1, "b": 2})

    graph = LOOP.with_state(
        StateSpec("review", effect=review),
        [Transition("review", None, "terminal", ends="completed")],
        entered_by="post_llm.otherwise",
    )
    db = SqliteStore(tmp_path / "runs.db")
    agent = Agent(ScriptedModel(["draft", "no"]), tools=[tool(idempotent=True)(add)], graph=graph, host=Host(store=db))

    async def main():
        await agent.run("go", run_id="one")

    asyncio.run(main())
    db.close()
    text = command("show", "one", "--store", tmp_path / "runs.db")
    for line in (
        "effect review:1:1 of scripted starts: Is it good?",
        "effect review:1:1: failed: gone",
        "effect review:1:2: reply: no",
        'effect review:1:3 of add starts: {"a": 1, "b": 2}',
        "effect review:1:3 of add: done: 3",
    ):
        assert line in text


def test_show(path):
    text = command("show", "whole", "--store", path)
    listed = command("runs", "--store", path).splitlines()
    assert text.splitlines()[0] == next(line for line in listed if line.startswith("whole "))
    assert command("show", "who", "--store", path) == text  # the beginning of an id is enough
    assert "post_llm.tool_calls -> dispatch_tool" in text
    assert "not: cancelled, aborted, output_truncated" in text
    assert "transient_provider: busy" in text
    assert "action: retry" in text
    assert "effect 1.0 of add: done: 3" in text
    data = [json.loads(line) for line in command("show", "whole", "--store", path, "--json").splitlines()]
    assert [d["seq"] for d in data] == list(range(1, len(data) + 1))


def test_show_says_which_guard_raised(tmp_path):
    def faulty(run):
        raise OSError("no disk")

    with SqliteStore(tmp_path / "runs.db") as db:
        graph = LOOP.with_detector("call_llm", faulty, before="otherwise")
        Agent(ScriptedModel(["x"]), graph=graph, host=Host(store=db)).run_sync("go", run_id="one")
    text = command("show", "one", "--store", tmp_path / "runs.db")
    (line,) = (each for each in text.splitlines() if "call_llm.aborted ->" in each)
    assert "  raised: faulty" in line
    assert "faulty" not in line.partition("not: ")[2].partition("  ")[0]


def test_verify(path):
    assert command("verify", "whole", "--store", path).startswith("whole  good (")
    assert "waits for a human reply (approval)" in command("verify", "--store", path, code=4)
    unpack_rows(path)
    forge(path, "UPDATE journal SET body = replace(body, 'scripted', 'another')")
    text = command("verify", "--store", path, code=1)
    assert "whole  TAMPERED" in text
    assert "record 3: its hash does not match" in text


def test_a_missing_run_or_store_is_wrong_usage(path):
    command("verify", "nobody", "--store", path, code=2)
    command("verify", "--store", path.with_name("none.db"), code=2)


def test_export_and_verify_of_the_export(path, tmp_path):
    out = tmp_path / "run.jsonl"
    out.write_text(command("export", "whole", "--store", path), encoding="utf-8")
    assert command("verify", "--file", out).startswith("whole  good")
    out.write_text(out.read_text().replace("scripted", "another"), encoding="utf-8")
    command("verify", "--file", out, code=1)


def test_an_export_with_every_kind_of_line_break_in_it(tmp_path):
    import asyncio

    from tests.helpers.journal_scenarios import sample_agent

    breaks = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g\rh\ni"
    store = SqliteStore(tmp_path / "runs.db")

    async def live():
        return await sample_agent(store, [breaks]).run(breaks, run_id="r")

    asyncio.run(live())
    store.close()
    out = tmp_path / "run.jsonl"
    out.write_bytes(command("export", "r", "--store", tmp_path / "runs.db").encode())
    assert command("verify", "--file", out).startswith("r  good")
    done = subprocess.run([sys.executable, EXAMPLE, out], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("good\n", 0)


def test_a_checkpoint_finds_truncated_and_deleted_runs(path, tmp_path):
    key, public, note = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "note"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    note.write_text(command("checkpoint", "--key", key, "--store", path), encoding="utf-8")
    with_note = ("verify", "--checkpoint", note, "--key", public, "--store", path)
    command(*with_note, code=4)
    forge(path, "DELETE FROM run WHERE run_id = 'waits'")
    assert "the checkpoint has it" in command(*with_note, code=1)
    command("verify", "--checkpoint", note, "--store", path, code=2)


@pytest.fixture
def signed(path, tmp_path):
    """A checkpoint of the store, as arguments of ``agentfsm verify``."""
    key, public, note = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "note"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    note.write_text(command("checkpoint", "--key", key, "--store", path), encoding="utf-8")
    return "verify", "--checkpoint", note, "--key", public, "--store", path


def test_the_secret_and_a_checkpoint_find_a_run_that_was_forged_from_its_first_record(path, signed):
    assert "not checked:\n  since the checkpoint, which is of 20" in command(*signed, code=4)
    with SqliteStore(path) as store:
        finished_run(store, "forged", secret=b"of a forger")
    command("verify", "forged", "--store", path, code=3)  # it may be from before a secret was lost
    assert "it was written after the checkpoint, and its records were sealed under another" in command(*signed, code=1)


def test_each_checkpoint_extends_the_one_before_it_and_has_one_size(path, signed, tmp_path):
    older, newer, proof, log = tmp_path / "note", tmp_path / "newer", tmp_path / "proof", path.with_name("runs.db.log")
    assert (stat.S_IMODE(log.stat().st_mode), len(log.read_text().splitlines())) == (0o600, 2)
    sign = ("checkpoint", "--key", tmp_path / "key.pem", "--store", path)
    assert command(*sign).splitlines()[1] == "2"  # nothing changed
    with SqliteStore(path) as store:
        finished_run(store, "later")
    log.write_bytes(log.read_bytes() + b"7 ab")  # another process was killed when it wrote this
    newer.write_text(command(*sign, "--after", older, "--proof", proof), encoding="utf-8")
    assert newer.read_text().splitlines()[1] == "3"
    assert [line.split()[2] for line in log.read_text().splitlines()] == ['"whole"', '"waits"', '"later"']
    assert len(newer.read_bytes()) == len(older.read_bytes())
    old, new = (read_checkpoint(note.read_text(), (tmp_path / "public.pem").read_bytes()) for note in (older, newer))
    assert is_extension(new, old, proof.read_text())
    assert not is_extension(old, new, proof.read_text())
    command(*signed, code=4)  # the older one is as good as it was
    command(*sign, "--proof", proof, code=2)


def test_a_log_that_was_changed_is_found_and_not_signed_again(path, signed, tmp_path):
    log, sign = path.with_name("runs.db.log"), ("checkpoint", "--key", tmp_path / "key.pem", "--store", path)
    first, second = (whole := log.read_text()).splitlines(keepends=True)
    for text in (first, second + first, whole.replace('"waits"', '"later"'), "", whole[:-1]):
        log.write_text(text)
        assert "(log)  TAMPERED" in command(*signed, code=1)
        assert "does not begin with" in command(*sign, "--after", tmp_path / "note", code=1)
    log.write_text(re.sub("[0-9a-f]{64}", "0" * 64, whole))
    assert "not signed" in command(*sign, code=1)  # what it says of the runs is wrong
    log.write_text(f"{whole}x\n")
    assert "is not a line of a checkpoint log" in command(*signed, code=3)
    log.unlink()
    assert "give it with --log" in command(*signed, code=3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(whole)
    command(*signed, "--log", elsewhere, code=4)


def test_a_store_that_does_not_verify_gets_no_checkpoint(path, signed, tmp_path, monkeypatch):
    sign = ("checkpoint", "--key", tmp_path / "key.pem", "--store", path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("AGENTFSM_SECRET", "another")
        assert "'whole': its records were sealed under another secret" in command(*sign, code=3)
    forge(path, "UPDATE run SET status = 'running' WHERE run_id = 'whole'")
    refused = command(*sign, code=1)
    assert refused.startswith("agentfsm: not signed, because the store does not verify: run 'whole': the store has")
    assert "\u2014" not in refused


def test_an_invalid_checkpoint_is_unverifiable(path, tmp_path):
    for name in ("key", "other"):
        key = tmp_path / name
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", key.with_suffix(".pub")], check=True)
    note, public = tmp_path / "note", tmp_path / "key.pub"
    note.write_text(command("checkpoint", "--key", tmp_path / "key", "--store", path), encoding="utf-8")
    verify = ("verify", "whole", "--store", path, "--checkpoint")
    command(*verify, note, "--key", public)
    assert "no valid signature of this key" in command(*verify, note, "--key", tmp_path / "other.pub", code=3)
    assert "not a public key" in command(*verify, note, "--key", note, code=3)
    changed = tmp_path / "changed"
    good = note.read_bytes()
    for content in (
        b"",
        b"hello",
        good.replace(b"date 2", b"date \xff"),
        good.replace(b"date 2", b"date 3"),
        path.read_bytes(),
    ):
        changed.write_bytes(content)
        assert "cannot be verified" in command(*verify, changed, "--key", public, code=3)


def test_a_checkpoint_without_the_exported_run_is_unverifiable(path, tmp_path):
    key, public, note, out = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "note", tmp_path / "run.jsonl"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    note.write_text(command("checkpoint", "--key", key, "--store", path), encoding="utf-8")
    store = SqliteStore(path)
    finished_run(store, "later")
    store.close()
    with_note = ("verify", "--file", out, "--checkpoint", note, "--key", public, "--log", f"{path}.log")
    out.write_text(command("export", "whole", "--store", path), encoding="utf-8")
    assert "needs --log" in command(*with_note[:-2], code=2)
    assert command(*with_note).startswith("whole  good")
    out.write_text(command("export", "later", "--store", path), encoding="utf-8")
    assert "the checkpoint does not have this run" in command(*with_note, code=3)
    command("verify", "--store", path, "--checkpoint", note, "--key", public, code=4)


def test_replay(path):
    text = command("replay", "--store", path)
    assert text.count("the same") == 2
    limits = command("replay", "whole", "--guardrails", '{"max_iterations": 1}', "--store", path, code=1)
    assert "pre_step.iteration_limit -> recover instead of pre_step.otherwise -> call_llm" in limits
    strict = command("replay", "whole", "--policy", "strict", "--store", path, code=1)
    assert "recover.handoff -> terminal" in strict
    command("replay", "--guardrails", "[]", "--store", path, code=2)
    command("replay", "--guardrails", '{"max_iterations": 0}', "--store", path, code=2)


def test_show_says_why_a_call_was_not_run(tmp_path):
    policy = permissions(deny("add", where={"a": 9}, reason="not nine"), otherwise="allow")
    model = ScriptedModel([call("add", a=9, b=1), [call("add", a=1, b=2), call("subtract", a=1)], "Done."])
    with SqliteStore(tmp_path / "runs.db") as db:
        Agent(model, tools=[add], hooks=[policy], host=Host(store=db)).run_sync("go", run_id="one")
    shown = command("show", "one", "--store", tmp_path / "runs.db").splitlines()
    denied, ran, unknown = (line for line in shown if "dispatch_tool.otherwise ->" in line)
    assert "  add: Denied: not nine  not: " in denied
    assert "add" not in ran
    assert "  subtract: There is no tool named 'subtract'." in unknown
    command("redact", "one", next(line.split()[0] for line in shown if line is denied), "--store", tmp_path / "runs.db")
    assert "not nine" not in command("show", "one", "--store", tmp_path / "runs.db")


def test_fork_and_redact(path):
    assert command("fork", "waits", "--at", 3, "--as", "other", "--store", path) == "other\n"
    assert "other" in command("runs", "--store", path)
    command("fork", "waits", "--at", 999, "--store", path, code=2)
    assert command("redact", "whole", "1", "--by", "me", "--store", path) == "4 values deleted\n"
    command("redact", "whole", "1", "--store", path, code=2)
    assert "(redacted)" in command("show", "whole", "--store", path)
    command("verify", "whole", "--store", path)


@pytest.mark.parametrize("option", [("--dry-run",), ("--tag", "x"), ("--session", "s"), ("--run", "waits")])
def test_what_narrows_the_search_for_a_text_does_not_let_a_field_be_deleted(path, option):
    text = command("redact", "whole", "1", *option, "--store", path, code=2)
    assert f"{option[0]} goes with --text" in text
    assert "(redacted)" not in command("show", "whole", "--store", path)


def test_what_works_on_single_runs_takes_the_beginning_of_an_id(path):
    assert command("verify", "wh", "--store", path).startswith("whole  good (")
    assert command("replay", "wh", "--store", path).startswith("whole  ")
    assert command("fork", "wa", "--at", 3, "--as", "other", "--store", path) == "other\n"
    assert command("redact", "wh", "1", "--store", path) == "4 values deleted\n"
    assert "several runs begin with 'w'" in command("verify", "w", "--store", path, code=2)


def test_a_run_of_a_checkpoint_that_is_gone_is_not_taken_for_one_whose_id_begins_the_same(path, signed):
    with SqliteStore(path) as store:
        finished_run(store, "waits-too")
    forge(path, "DELETE FROM run WHERE run_id = 'waits'")
    text = command(*signed, code=1)
    assert "waits  TAMPERED (0 records): the checkpoint has it, and the store does not" in text
    assert "waits-too  good (" in text


def test_a_run_that_cannot_be_replayed_does_not_hide_the_others(path):
    command("redact", "whole", "1", "--store", path)
    lines = command("replay", "--store", path, code=1).splitlines()
    assert lines[0].startswith("whole  cannot be replayed: record 1")
    assert lines[1].startswith("waits  ")
    assert lines[1].endswith("the same")
    shown = command("show", "whole", "--store", path)
    assert "object at" not in shown


def test_show_prints_a_request_and_its_reply(path):
    shown = command("show", "waits", "--store", path)
    asks = next(line for line in shown.splitlines() if "waits for a person" in line)
    assert 'pay {"amount": 1.0, "to": "Ann"}' in asks
    assert "(--to " in asks
    whole = command("show", "whole", "--store", path)
    assert "resumed (approval), in reply to record" in whole
    assert 'edit {"amount": 2.0, "to": "Bob"}' in whole
