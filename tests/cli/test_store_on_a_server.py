"""Every command on a PostgreSQL server: what it prints, where its secret is kept, and what was tampered with."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentfsm import Agent, Host, open_store, tool
from agentfsm.cli.app import COMMANDS
from agentfsm.testing import ScriptedModel, call
from tests.cli.conftest import Cli
from tests.cli.test_run_command import TOOLS
from tests.helpers.fake_model_server import fake_model_server, text_output, tool_call_output
from tests.helpers.postgres import empty_database

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

SECRET = "the secret of every process here, and no other"
MAIL = "ann@example.org"


@tool(requires_approval=True)
def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"


@pytest.fixture
def url(database: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with a run that ended and one that waits; the commands use it."""
    empty_database(database)
    monkeypatch.setenv("AGENTFSM_STORE", database)
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET)

    async def fill() -> None:
        async with open_store(database) as store:
            model = ScriptedModel([f"Hello, {MAIL}.", call("remove", path="old.txt")])
            agent = Agent(model, tools=[remove], host=Host(store=store, secret=SECRET.encode()))
            await agent.run("Say hello.", run_id="whole", tags=["demo"])
            await agent.run("Tidy up.", run_id="waits")

    asyncio.run(fill())
    return database


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(statement)


READING: dict[tuple[str, ...], str] = {
    ("runs",): "whole  finished  ",
    ("runs", "--tag", "demo", "--json"): '"run_id": "whole"',
    ("show", "whole"): "run.created",
    ("export", "whole"): '"kind":"run.created"',
    ("report", "whole", "--markdown"): "whole",
    ("verify",): "whole  good",
    ("verify", "whole", "--proof"): "inside the model of its proofs",
    ("replay", "whole"): "the same",
    ("diagram", "--run", "whole"): "call_llm",
    ("diff", "whole", "standard"): "",
    ("doctor", "--offline"): "2 runs, 1 waiting for a person",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_command_that_reads(words: tuple[str, ...], cli: Cli, url: str) -> None:
    result = cli(*words)
    assert result.exit_code in ((4,) if words == ("verify",) else (0,)), result.output
    assert READING[words] in result.output


def test_every_command_with_a_store_is_tried_here() -> None:
    tried = {words[0] for words in READING} | {"fork", "adopt", "redact", "checkpoint", "run", "resume"}
    elsewhere = {"submit", "worker", "view", "link", "answer", "cancel", "store"}  # each in a file of its own
    without_store = {"demo", "check", "paths", "mutate", "eval", "completion"}
    assert set(COMMANDS) - without_store - elsewhere == tried


def test_a_run_of_the_command_line_is_stored_and_answered_there(cli: Cli, url: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    options = ["-m", "some-model", "-t", "tools.py"]
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        result = cli("run", "tidy", *options, "--base-url", server.url, "--json")
    assert result.exit_code == 3, result.stderr
    run_id = str(json.loads(result.stdout)["run_id"])
    with fake_model_server(text_output("Done.")) as server:
        result = cli("resume", run_id, "allow", "--by", "Ann", *options, "--base-url", server.url)
    assert (result.exit_code, result.stdout.strip()) == (0, "Done."), result.stderr
    assert f"{run_id}  good" in cli("verify").stdout


def test_a_fork_an_adoption_and_a_redaction(cli: Cli, url: str) -> None:
    assert cli("fork", "whole", "--at", "2", "--as", "again").stdout == "again\n"
    assert cli("adopt", "whole").stdout == "whole  was sealed already\n"
    found = cli("redact", "--text", MAIL, "--dry-run")
    assert "whole 4.out.replied.reply.message.content" in found.stdout
    assert "whole" in cli("redact", "--text", MAIL, "--yes").stdout
    assert "not found" in cli("redact", "--text", MAIL, "--dry-run").stdout
    assert "whole  good" in cli("verify").stdout


def test_a_checkpoint_of_a_server_finds_a_run_that_was_deleted(cli: Cli, url: str, tmp_path: Path) -> None:
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", "key.pem"], cwd=tmp_path, check=True)
    subprocess.run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "public.pem"], cwd=tmp_path, check=True)
    note = cli("checkpoint", "--key", "key.pem")
    assert note.exit_code == 0, note.output
    (tmp_path / "note").write_text(note.stdout, encoding="utf-8")
    checked = ("verify", "--checkpoint", "note", "--key", "public.pem")
    assert cli(*checked).exit_code == 4  # good; one run waits
    execute(
        url,
        "ALTER TABLE agentfsm.journal DISABLE TRIGGER USER; DELETE FROM agentfsm.run_info;"
        " DELETE FROM agentfsm.run_prompt; DELETE FROM agentfsm.journal WHERE run = 1;"
        " DELETE FROM agentfsm.run WHERE id = 1; ALTER TABLE agentfsm.journal ENABLE TRIGGER USER",
    )
    assert cli("verify").exit_code == 4  # nothing else shows it
    result = cli(*checked)
    assert result.exit_code == 1
    assert "whole  TAMPERED (0 records): the checkpoint has it, and the store does not" in result.stdout


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DROP TRIGGER journal_loses_nothing ON agentfsm.journal", "trigger journal_loses_nothing"),
        ("ALTER TABLE agentfsm.journal DISABLE TRIGGER USER", "trigger journal_keeps_what_it_has on journal"),
        (
            "CREATE OR REPLACE FUNCTION agentfsm.refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RETURN NEW; END $$",
            "trigger journal_keeps_what_it_has on journal",
        ),
        ("CREATE RULE nothing AS ON UPDATE TO agentfsm.run DO INSTEAD NOTHING", "rule nothing on run"),
        ("ALTER TABLE agentfsm.run ENABLE ROW LEVEL SECURITY", "table run"),
        (
            "ALTER TABLE agentfsm.run_info RENAME TO kept;"
            " CREATE VIEW agentfsm.run_info AS SELECT * FROM agentfsm.kept WHERE false",
            "table run_info",
        ),
        (
            "ALTER TABLE agentfsm.journal DROP CONSTRAINT journal_run_fkey; DELETE FROM agentfsm.run_info;"
            " DELETE FROM agentfsm.run_prompt;"
            " DELETE FROM agentfsm.run WHERE run_id = 'whole'",
            "the store has its records, and the run is missing",
        ),
        (
            "INSERT INTO agentfsm.journal (run, seq, hash) SELECT run, 0, hash FROM agentfsm.journal LIMIT 1",
            "it has a record before its first",
        ),
    ],
)
def test_what_the_owner_of_the_database_changed_is_found(statement: str, reason: str, cli: Cli, url: str) -> None:
    assert cli("verify").exit_code == 4
    execute(url, statement)
    result = cli("verify")
    assert result.exit_code == 1
    assert reason in result.stdout


# -- the secret, and messages -------------------------------------------------------------------------


def test_without_a_variable_the_secret_of_a_server_is_in_the_data_folder(
    cli: Cli, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTFSM_SECRET")
    words = ("run", "hello", "-m", "some-model", "--base-url")
    with fake_model_server(text_output("Hello."), text_output("Hello.")) as server:
        refused = cli(*words, server.url)
        assert refused.exit_code == 2
        assert "has runs, and there is no secret here: set AGENTFSM_SECRET" in refused.stderr
        empty_database(url)
        assert cli(*words, server.url).exit_code == 0
        assert cli(*words, server.url).exit_code == 0
    (key,) = tmp_path.rglob("*.key")
    assert key.stat().st_mode & 0o077 == 0
    assert cli("verify").exit_code == 0
    key.write_text("another one")
    assert cli("verify").exit_code == 3


@pytest.mark.parametrize(
    "words", [("submit", "scale", "Go."), ("worker", "tests.helpers.scale_app:scale")], ids=" ".join
)
def test_no_new_secret_is_made_for_a_server_whose_runs_another_one_sealed(
    words: tuple[str, ...], url: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dbos", reason="dbos is not installed")
    monkeypatch.delenv("AGENTFSM_SECRET")
    refused = cli(*words)
    assert refused.exit_code == 2
    assert "has runs, and there is no secret here: set AGENTFSM_SECRET" in refused.stderr
    assert not list(tmp_path.rglob("*.key"))


@pytest.mark.parametrize("words", [("runs",), ("verify",), ("show", "whole"), ("doctor", "--offline")], ids=" ".join)
def test_no_message_has_the_password(words: tuple[str, ...], cli: Cli) -> None:
    result = cli(*words, AGENTFSM_STORE="postgresql://ann:hunter2@127.0.0.1:1/shop")
    assert result.exit_code in (1, 2, 3)
    assert "127.0.0.1" in result.output
    assert "hunter2" not in result.output


def test_doctor_says_which_rights_a_role_lacks(cli: Cli, url: str) -> None:
    role = f"reader_{uuid.uuid4().hex[:8]}"
    execute(url, f"CREATE ROLE {role} LOGIN")
    execute(url, f"GRANT USAGE ON SCHEMA agentfsm TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA agentfsm TO {role}")
    assert "problem" not in cli("doctor", "--offline").output
    result = cli("doctor", "--offline", "--store", url.replace("postgres:@", f"{role}@"))
    assert result.exit_code == 1
    assert "the role lacks DELETE, INSERT, UPDATE on hold, journal" in " ".join(result.output.split())


def test_the_command_that_resumes_a_run_names_the_store_without_its_password(
    cli: Cli, url: str, tmp_path: Path
) -> None:
    with_password = url.replace("postgres:@", "postgres:hunter2@")
    (tmp_path / "tools.py").write_text(TOOLS)
    options = ["-m", "some-model", "-t", "tools.py", "--store", with_password]
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        result = cli("run", "tidy", *options, "--base-url", server.url)
    assert result.exit_code == 3
    assert "agentfsm resume" in result.stderr
    assert "--store postgresql://" in result.stderr
    assert "hunter2" not in result.output


@pytest.mark.slow
def test_completion_offers_the_runs_of_a_server(cli: Cli, url: str) -> None:
    result = cli(_AGENTFSM_COMPLETE="bash_complete", COMP_WORDS="agentfsm show w", COMP_CWORD="2")
    assert result.stdout.splitlines() == ["plain,whole", "plain,waits"]


@pytest.mark.parametrize(
    ("prepare", "advice"),
    [
        ("SELECT", "agentfsm store init creates it"),
        ("ALTER DATABASE {} SET default_transaction_read_only = on", "connect to the primary server"),
        ("REVOKE CREATE ON DATABASE {} FROM agent_role", "this role may not create it"),
        ("CREATE SCHEMA agentfsm; GRANT USAGE ON SCHEMA agentfsm TO agent_role", "this role may not create it"),
        ("LATIN1", "does not store text as UTF-8: create one that does"),
    ],
)
def test_the_check_of_an_empty_database_says_what_creates_the_tables_or_why_nothing_can(
    prepare: str, advice: str, cli: Cli, database: str
) -> None:
    name, role = f"t{uuid.uuid4().hex[:12]}", f"agent_role_{uuid.uuid4().hex[:8]}"
    kind = "ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'" if prepare == "LATIN1" else ""
    execute(database, f"CREATE DATABASE {name} {kind}")
    empty = urlsplit(database)._replace(path=f"/{name}").geturl()
    execute(empty, f"CREATE ROLE {role} LOGIN")
    execute(empty, f"GRANT CREATE ON DATABASE {name} TO {role}")
    if prepare != "LATIN1":
        execute(empty, prepare.format(name).replace("agent_role", role))
    url = empty.replace("postgres:@", f"{role}@")
    checked = cli("store", "check", "--json", "--store", url)
    assert checked.exit_code == 1, checked.output
    (problem,) = json.loads(checked.stdout)["problems"]
    assert advice in problem
    created = cli("store", "init", "--store", url)
    assert (created.exit_code == 0) == ("init creates it" in problem), created.output
    execute(database, f"DROP DATABASE {name} WITH (FORCE)")


def test_the_check_of_a_store_says_that_its_server_takes_no_changes(cli: Cli, url: str) -> None:
    read_only = f"{url}&options=-c%20default_transaction_read_only%3Don"
    checked = cli("store", "check", "--json", "--store", read_only)
    assert checked.exit_code == 1, checked.output
    (problem,) = json.loads(checked.stdout)["problems"]
    assert "read-only: connect to the primary one" in problem
