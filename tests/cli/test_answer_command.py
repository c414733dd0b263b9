"""``agentfsm answer`` and ``cancel``: what waits is answered without its agent, and acted on by whoever has it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Host, SqliteStore, tool
from agentfsm.cli import answer_command
from agentfsm.testing import ScriptedModel, call
from tests.cli.conftest import Cli
from tests.cli.test_resume_all import resume, start_run
from tests.cli.test_run_command import TOOLS


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


STORE = ("--store", "runs.db")


def test_an_answer_is_kept_until_resume_acts_on_it(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    result = cli("answer", run_id[:8], "allow", "--by", "Ann", *STORE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"run {run_id} was answered: it waits for the next process that has its agent\n"
    again = cli("answer", run_id, "deny no", *STORE)
    assert again.exit_code == 2
    assert "was answered already by Ann, claimed, not verified" in again.stderr
    done, _ = resume(cli, answer="Removed.")
    assert (done.exit_code, done.stdout) == (0, "Removed.\n")
    assert "allow by Ann, claimed, not verified" in cli("show", run_id, *STORE).stdout
    assert "good" in cli("verify", *STORE).stdout


def test_what_nobody_has_acted_on_is_shown_with_the_run_to_who_has_the_secret(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    cli("answer", run_id, "deny not today", "--by", "Ann", *STORE)
    cli("cancel", run_id, *STORE)
    said = [
        "answered (deny) by Ann, claimed, not verified: it waits for a process that has the agent",
        "cancelled: it waits for a process that has the agent",
    ]
    for words in (("runs",), ("show", run_id)):
        assert cli(*words, *STORE).stdout.splitlines()[0].endswith("  ".join(said))
        assert "it waits for a process" not in cli(*words, *STORE, AGENTFSM_SECRET="another one").stdout
    assert json.loads(cli("runs", "--json", *STORE).stdout)["sent"] == said
    resume(cli)
    assert json.loads(cli("runs", "--json", *STORE).stdout)["sent"] == []


def test_resume_says_why_an_answer_is_refused_and_nothing_does_once_the_run_goes_on(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_command, "ACTED_ON_WITHIN_S", 0)
    run_id = start_run(cli, folder)
    assert cli("answer", run_id, '{"path": 3}', "--by", "Ann", *STORE).exit_code == 0
    refused = "the last answer (edit) by Ann, claimed, not verified was refused: "
    for _ in range(2):
        result, server = resume(cli)
        assert (result.exit_code, server.requests) == (3, [])  # it waits for a person
        assert f"run {run_id}: {refused}" in result.stderr
        assert "waits for another agent" not in result.stderr
    for words in (("runs",), ("show", run_id)):
        assert refused in cli(*words, *STORE).stdout.splitlines()[0]
    done, _ = resume(cli, run_id, "deny no", answer="I did not.")
    assert done.stdout == "I did not.\n"
    for words in (("runs",), ("show", run_id)):
        assert refused not in cli(*words, *STORE).stdout


def test_resume_takes_the_beginning_of_an_id_as_every_command_does(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    done, _ = resume(cli, run_id[:8], "allow", answer="Removed.")
    assert (done.exit_code, done.stdout) == (0, "Removed.\n")
    unknown, _ = resume(cli, "nobody", "allow")
    assert unknown.exit_code == 2
    assert "there is no run 'nobody'" in unknown.stderr


def test_resume_of_one_run_acts_on_its_answer(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    assert cli("answer", run_id, "deny not today", *STORE).exit_code == 0
    done, _ = resume(cli, run_id, answer="I did not.")
    assert done.stdout == "I did not.\n"
    assert 'deny "not today"' in cli("show", run_id, *STORE).stdout or "not today" in cli("show", run_id, *STORE).stdout


def test_a_run_is_cancelled_by_the_next_process_that_has_its_agent(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    result = cli("cancel", run_id, "--reason", "too late", "--json", *STORE)
    assert json.loads(result.stdout) == {"run_id": run_id, "kind": "cancel", "owner": None}
    resume(cli)
    listed = cli("runs", *STORE).stdout
    assert "finished" in listed
    assert "cancelled" in listed
    assert "has ended" in cli("cancel", run_id, *STORE).stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["answer", "RUN", "perhaps"], "is not a valid reply; reply with allow, deny"),
        (["answer", "RUN", "allow", "--to", "0" * 64], "now waits for a reply to record"),
        (["answer", "RUN", "allow", "--role", "boss"], "give both"),
        (["answer", "RUN"], "there is no terminal to ask at"),
        (["answer", "RUN", "--extend", "tokens=5"], "waits for an answer of kind 'approval'"),
        (["answer", "nobody", "allow"], "there is no run 'nobody'"),
        (["cancel", "nobody"], "there is no run 'nobody'"),
    ],
)
def test_what_does_not_fit_is_refused(cli: Cli, folder: Path, words: list[str], error: str) -> None:
    run_id = start_run(cli, folder)
    result = cli(*(run_id if word == "RUN" else word for word in words), *STORE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in " ".join(result.stderr.split())


def test_without_the_secret_nothing_is_sent(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    (folder / "runs.db.key").unlink()
    assert "there is no secret" in cli("answer", run_id, "allow", *STORE).stderr
    assert "not sealed under this secret" in cli("cancel", run_id, *STORE, AGENTFSM_SECRET="another").stderr


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE signal SET body = replace(body, 'answer', 'cancel')",
        "UPDATE signal SET mac = x'00'",
        "UPDATE signal SET id = 'another'",
        "UPDATE signal SET run_id = 'another'",
        "INSERT INTO signal (id, run_id, body, mac) SELECT 'copy', run_id, body, mac FROM signal",
    ],
)
def test_verify_finds_a_signal_that_nobody_with_the_secret_sent(cli: Cli, folder: Path, change: str) -> None:
    run_id = start_run(cli, folder)
    cli("answer", run_id, "allow", *STORE)
    assert cli("verify", *STORE).exit_code == 4  # good, open
    with contextlib.closing(sqlite3.connect(folder / "runs.db", isolation_level=None)) as db:
        db.execute(change)
    db.close()
    result = cli("verify", *STORE)
    assert result.exit_code == 1
    assert "somebody without the secret wrote the signal" in result.stdout


def test_a_text_is_redacted_from_an_answer_that_waits(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    cli("answer", run_id, "deny because ann@example.org said so", *STORE)
    result = cli("redact", "--text", "ann@example.org", "--yes", *STORE)
    assert result.exit_code == 0
    assert "a signal that waits" in result.stdout
    assert "1 value deleted" in result.stdout
    for file in folder.glob("runs.db*"):
        assert b"ann@example.org" not in file.read_bytes()
    assert cli("answer", run_id, "deny", *STORE).exit_code == 0  # the run still waits


def test_an_edit_is_reported_once_it_is_taken_though_the_run_goes_on(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process takes it while the command looks whether one has, and works on until the command has ended."""
    monkeypatch.setattr(answer_command, "ACTED_ON_WITHIN_S", 60)
    answered, paid = threading.Event(), []

    @tool(requires_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append((amount, answered.wait(20)))
        return "paid"

    def agent(*script: Any) -> Agent[None, str]:
        return Agent(ScriptedModel(script), tools=[pay], host=Host(store=SqliteStore("runs.db"), secret=b"vault"))

    async def ask() -> None:
        asking = agent(call("pay", amount=300))
        await asking.run("Pay.", run_id="bill")
        await asking.config.host.store.aclose()

    async def take_and_go_on() -> None:
        taking = agent("Paid.")
        while (run := await taking.next_run("bill")) is None:
            await asyncio.sleep(0)
        assert (await run).output == "Paid."

    asyncio.run(ask())
    worker = threading.Thread(target=asyncio.run, args=(take_and_go_on(),))
    worker.start()
    found = cli("answer", "bill", '{"amount": 3}', *STORE, AGENTFSM_SECRET="vault")
    answered.set()
    worker.join()
    assert (found.exit_code, found.stderr) == (0, "")
    assert paid == [(3, True)]
