"""``agentfsm store``: what each of its commands does to a file and to a database, and what it prints."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentfsm import Agent, Deny, Host, SqliteStore, open_store, tool
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.cli.conftest import Cli
from tests.helpers.postgres import empty_database

SECRET = "the secret of these tests"
DATA = Path(__file__).parents[1] / "data"
MAIL = "ann@example.org"


@tool(requires_approval=True)
def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store, which the commands use."""
    found = "runs.db"
    if request.param == "postgres":
        found = str(request.getfixturevalue("database"))
        empty_database(found)
    monkeypatch.setenv("AGENTFSM_STORE", found)
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET)
    return found


def fill(url: str, *, ends: bool = False) -> None:
    """Runs ``old`` (of Ann), ``other`` (which names her) and ``waits``; with ``ends``, the last one is denied."""

    async def run_all() -> None:
        async with open_store(url) as store:
            host = Host(store=store, secret=SECRET.encode(), clock=FakeClock())
            script = ["Hello.", f"Ask {MAIL}.", call("remove", path="p"), "Denied."]
            agent = Agent(ScriptedModel(script), tools=[remove], host=host)
            await agent.run("Hello.", run_id="old", actor="ann", tags=["demo"])
            await agent.run("Whom?", run_id="other", actor="bob")
            await agent.run("Tidy up.", run_id="waits", actor="ann")
            if ends:
                await agent.resume("waits", Deny())
            await store.acquire("abandoned", "a process that died", new=True, keyring=Keyring(SECRET.encode()))

    asyncio.run(run_all())


@pytest.mark.slow
def test_a_store_is_created_and_checked(url: str, cli: Cli) -> None:
    missing = cli("store", "check")
    assert missing.exit_code == (2 if url == "runs.db" else 1)
    assert "there is no store" in missing.output or "agentfsm store init creates it" in missing.output
    assert cli("store", "migrate").exit_code == (2 if url == "runs.db" else 0)
    assert cli("store", "init").exit_code == 0
    fill(url)
    result = cli("store", "check", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["running"], facts["suspended"], facts["finished"], facts["interrupted"]) == (1, 1, 2, 1)
    assert facts["problems"] == []
    assert facts["kind"].startswith(("SQLite", "PostgreSQL"))
    assert "-0.0 s" not in facts.get("clock", "")


def test_runs_are_held_purged_and_verified(url: str, cli: Cli, tmp_path: Path) -> None:
    fill(url)
    assert cli("store", "hold", "old", "--reason", "case 7", "--by", "Ann").stdout == "old  on hold\n"
    assert "old" in cli("store", "holds").stdout
    result = cli("store", "purge", "--days", "1", "--yes", "--by", "cron")
    assert (result.exit_code, result.stdout) == (1, "other  purged\nold  remains: it is on hold (case 7)\n")
    assert cli("store", "unhold", "old").exit_code == 0
    dry = cli("store", "purge", "--days", "1", "--tag", "demo", "--dry-run")
    assert (dry.exit_code, dry.stdout) == (0, "old  would be purged\n")
    assert cli("store", "purge", "--days", "1", "--tag", "demo", stdin="n\n").exit_code == 130
    words = ("--days", "1", "--tag", "demo", "--reason", "the demo is over", "--compact")
    assert cli("store", "purge", *words, stdin="y\n").exit_code == 0
    assert cli("store", "purge", "--abandoned", "--yes").stdout == "abandoned  purged\n"
    assert [line.split()[0] for line in cli("runs").stdout.splitlines()] == ["waits"]
    verified = cli("verify")
    assert verified.exit_code == 4  # one run waits
    assert "(purged)  good (0 records): 2 runs were purged" in verified.stdout
    assert "it was purged at" in cli("verify", "other").stdout
    assert "by cron (kept for 1 days)" in cli("verify", "other").stdout
    assert "(the demo is over)" in cli("verify", "old").stdout
    assert "it was purged under a secret that is not given" in cli("verify", AGENTFSM_SECRET="another one").stdout


def test_runs_are_held_and_purged_by_the_beginnings_of_their_ids(url: str, cli: Cli) -> None:
    fill(url)
    assert cli("store", "hold", "ol", "oth").stdout == "old  on hold\nother  on hold\n"
    assert cli("store", "unhold", "ol").stdout == "old  not on hold\n"
    purged = cli("store", "purge", "ol", "oth", "--yes")
    assert (purged.exit_code, purged.stdout) == (1, "old  purged\nother  remains: it is on hold\n")
    for command in ("hold", "unhold", "purge"):
        unknown = cli("store", command, "nobody", "waits")
        assert (unknown.exit_code, unknown.stdout) == (2, "")
        assert "there is no run 'nobody'" in unknown.output
    again = cli("store", "purge", "old", "--yes")  # as a list of ids that is purged a second time
    assert (again.exit_code, again.stdout) == (1, "old  remains: there is no such run\n")


def test_no_run_is_held_under_another_secret_than_its_own(url: str, cli: Cli) -> None:
    fill(url)
    for command in ("hold", "unhold"):
        refused = cli("store", command, "old", AGENTFSM_SECRET="that of another store, long enough")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "run 'old' was written under another secret" in refused.stderr
    other_secret = "the secret of another program on the same store"

    async def run_other() -> None:
        async with open_store(url) as store:
            host = Host(store=store, secret=other_secret.encode())
            await Agent(ScriptedModel(["Hello."]), host=host).run("Hello.", run_id="theirs")

    asyncio.run(run_other())
    refused = cli("store", "hold", "old", "theirs")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert cli("store", "holds").stdout == ""  # nothing half done
    assert cli("verify", "old").exit_code == 0
    assert cli("store", "hold", "old", "--by", "Ann").exit_code == 0


def test_waiting_for_no_number_of_seconds_is_not_waiting(cli: Cli) -> None:
    assert cli("store", "init", "--wait", "nan", "--store", "postgresql://127.0.0.1:1/nothing").exit_code == 2


def test_the_beginning_of_several_ids_names_no_run_to_hold_or_purge(url: str, cli: Cli) -> None:
    fill(url)
    for command in ("hold", "purge"):
        result = cli("store", command, "o")
        assert result.exit_code == 2
        assert "several runs begin with 'o': " in result.output
    assert cli("store", "holds").stdout == ""


def test_a_persons_data_is_erased_and_what_remains_is_said(url: str, cli: Cli) -> None:
    fill(url, ends=False)
    person = ("store", "erase", "--actor", "ann", "--text", MAIL)
    dry = cli(*person, "--dry-run")
    assert dry.stdout.splitlines() == [
        "old  would be purged",
        "other  4.out.replied.reply.message.content  would be deleted",
        "remains: waits  it waits for somebody",
    ]
    assert cli(*person, stdin="n\n").exit_code == 130
    result = cli(*person, "--yes", "--json", "--by", "the officer")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["purged"], [each["run_id"] for each in report["deleted"]]) == (["old"], ["other"])
    assert (report["kept"], report["remaining"], report["files"]) == (
        [{"run_id": "waits", "reason": "it waits for somebody"}], [], [],
    )  # fmt: skip
    assert cli("verify").exit_code == 4


def test_a_listing_that_somebody_changed_is_found_and_rebuilt(url: str, cli: Cli) -> None:
    fill(url)
    change = "UPDATE {}run_info SET prompt = 'Another.', ending = 'aborted' WHERE id = 1"
    if url == "runs.db":
        with closing(sqlite3.connect(url)) as db, db:
            db.execute(change.format(""))
    else:
        import psycopg

        with psycopg.connect(url, autocommit=True) as server:
            server.execute(change.format("agentfsm."))  # type: ignore[arg-type]  # no user's text
    result = cli("verify")
    assert result.exit_code == 1
    assert "old  TAMPERED (6 records): it is listed by another prompt and ending than its records say" in result.stdout
    assert cli("store", "rebuild").stdout == "old  listed again\n"
    assert cli("verify").exit_code == 4
    assert cli("store", "rebuild").stdout == ""


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE run_info SET status = 'running'",
        "UPDATE run_info SET tags = '[\"wrong\"]' WHERE id = 1",
        "UPDATE run_info SET tags = 'nonsense' WHERE id = 1",
        'UPDATE run_info SET metadata = \'{"wrong": "1"}\' WHERE id = 1',
        "UPDATE run_tag SET tag = 'wrong' WHERE tag = 'kept'",
        "UPDATE run_metadata SET value = 'wrong' WHERE id = 1",
        "DELETE FROM run_tag; DELETE FROM run_metadata",
        "INSERT INTO run_tag (tag, id) VALUES ('wrong', 1); INSERT INTO run_metadata VALUES ('wrong', '1', 1)",
        "UPDATE run_info SET tags = '[\"wrong\"]', metadata = NULL; DELETE FROM run_tag WHERE tag = 'kept'",
        "UPDATE prompt_filter SET bits = zeroblob(8190)",
        "UPDATE run_info SET prompt = 'Wrong.' WHERE id = 1",
    ],
)
def test_a_changed_index_of_prompts_tags_or_metadata_is_found_and_rebuilt(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setenv("AGENTFSM_STORE", "runs.db")
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET)
    with SqliteStore(tmp_path / "runs.db") as store:
        agent = Agent(ScriptedModel(["ok"]), host=Host(store=store, secret=SECRET.encode()))
        agent.run_sync("Go.", run_id="one", tags=["billing", "kept"], metadata={"order": 7})
    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        db.executescript(change)
    assert cli("verify").exit_code == 1
    rebuilt = cli("store", "rebuild")
    assert rebuilt.stdout.startswith("one  "), rebuilt.output
    assert cli("verify").exit_code == 0
    assert cli("store", "rebuild").stdout == ""
    finds_one = {("--text", "go."), ("--tag", "billing"), ("--tag", "kept"), ("--metadata", "order=7")}
    finds_none = {("--tag", "wrong"), ("--tag", "other"), ("--metadata", "wrong=1")}
    for search in finds_one | finds_none:
        assert len(cli("runs", *search, "--json").stdout.splitlines()) == (search in finds_one), search


def fill_and_change(database: str, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Make a server's database the store of the commands, with runs, and have its owner change something."""
    import psycopg

    empty_database(database)
    monkeypatch.setenv("AGENTFSM_STORE", database)
    monkeypatch.setenv("AGENTFSM_SECRET", SECRET)
    fill(database)
    with psycopg.connect(database, autocommit=True) as server:
        server.execute(change)  # type: ignore[arg-type]  # no user's text


@pytest.mark.parametrize(
    "change",
    ["DELETE FROM agentfsm.run_prompt", "UPDATE agentfsm.run_prompt SET prompt = 'Wrong.' WHERE prompt = 'Hello.'"],
)
def test_a_run_on_a_server_that_is_not_found_by_its_prompt_is_reported_and_found_again(
    cli: Cli, database: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    fill_and_change(database, monkeypatch, change)
    assert "it is not found by the prompt that it is listed by" in cli("verify").stdout
    assert "old  found again by its prompt, tags and metadata\n" in cli("store", "rebuild").stdout
    assert cli("verify").exit_code == 4
    assert cli("store", "rebuild").stdout == ""


@pytest.mark.parametrize("change", ["tags = '{wrong}'", 'metadata = \'{"wrong": "1"}\'', "metadata = NULL"])
def test_changed_tags_or_metadata_on_a_server_are_found_and_rebuilt(
    cli: Cli, database: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    fill_and_change(database, monkeypatch, f"UPDATE agentfsm.run_info SET {change} WHERE prompt = 'Hello.'")
    assert cli("store", "rebuild").stdout == "old  listed again\n"
    assert cli("verify").exit_code == 4
    assert [len(cli("runs", "--tag", tag, "--json").stdout.splitlines()) for tag in ("demo", "wrong")] == [1, 0]
    assert cli("runs", "--metadata", "wrong=1", "--json").stdout == ""


def test_the_store_of_an_earlier_release_is_migrated_and_listed(cli: Cli, tmp_path: Path) -> None:
    shutil.copy(DATA / "schema2" / "runs.db", tmp_path / "runs.db")
    assert "version 2; agentfsm store migrate makes it" in cli("store", "check", "--store", "runs.db").stdout
    result = cli("store", "migrate", "--store", "runs.db", AGENTFSM_SECRET="of the tests")
    assert result.exit_code == 0, result.output
    assert "finished  listed again" in result.stdout
    assert "finished  finished" in cli("runs", "--tag", "demo", "--store", "runs.db").stdout


def test_a_role_needs_only_what_the_printed_sql_grants(database: str, cli: Cli) -> None:
    import psycopg

    empty_database(database)
    sql = cli("store", "init", "--sql").stdout
    grants = sql[sql.index("-- GRANT USAGE") :].replace("-- ", "").replace("agent_role", "plain")
    with psycopg.connect(database, autocommit=True) as db:
        if db.execute("SELECT FROM pg_roles WHERE rolname = 'plain'").fetchone() is None:
            db.execute("CREATE ROLE plain LOGIN")
        db.execute(sql)  # type: ignore[call-overload]  # the command's own text
    plain = database.replace("postgres:@", "plain@")
    denied = cli("store", "check", "--store", plain)
    assert denied.exit_code == 2
    assert "SELECT, INSERT, UPDATE and DELETE" in denied.output
    with psycopg.connect(database, autocommit=True) as db:
        db.execute(grants.replace("SELECT, INSERT, UPDATE, DELETE", "SELECT"))  # type: ignore[call-overload]
        tables = "hold, journal, owner, run, run_info, run_prompt, signal, snapshot, tombstone"
        checked = cli("store", "check", "--store", plain)
        assert f"the role lacks DELETE, INSERT, UPDATE on {tables}: let" in checked.output
        db.execute(grants)  # type: ignore[call-overload]  # the command's own text
    assert cli("store", "check", "--store", plain).exit_code == 0
    fill(plain)
    result = cli("store", "purge", "old", "--yes", "--store", plain, AGENTFSM_SECRET=SECRET)
    assert result.stdout == "old  purged\n", result.output
    compacted = cli("store", "compact", "--store", plain)
    assert compacted.exit_code == 2
    assert "only the role that owns the tables" in compacted.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("store", "purge", "--yes"), "give RUNs, --days or --abandoned"),
        (("store", "purge", "r", "--days", "1"), "give RUNs, --days or --abandoned"),
        (("store", "purge", "r", "--tag", "x", "--yes"), "--tag and --session say which of the runs of --days"),
        (("store", "purge", "--abandoned", "--session", "s", "--yes"), "--tag and --session say which"),
        (("store", "erase"), "an actor, a session, a tag or a text"),
        (("store", "init", "--store", "mysql://host/db"), "no store for mysql"),
        (("store", "init", "--store", "postgresql://ann:pw@127.0.0.1:1/x", "--wait", "0.1"), "127.0.0.1"),
        (("store", "compact", "--store", "other.db"), "there is no store at other.db"),
    ],
)
def test_what_cannot_be_done_is_said(words: tuple[str, ...], said: str, cli: Cli) -> None:
    cli("store", "init", "--store", "runs.db")
    result = cli(*words, AGENTFSM_STORE="runs.db", AGENTFSM_SECRET=SECRET)
    assert result.exit_code == 2
    assert said in result.output
