"""What an insider with the file can change is found in a PostgreSQL database, too: the same edits, row for row."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from agentfsm import Actor, Agent, Allow, Host
from agentfsm.agent.resume import load_run
from agentfsm.journal.load import LoadedRun
from agentfsm.testing import FakeClock, ScriptedModel
from tests.helpers.journal_scenarios import sample_agent
from tests.helpers.postgres import empty_database
from tests.journal.test_insider_edits import (
    EDITS,
    HARMLESS,
    LISTINGS,
    SECRET,
    WAYS,
    Insider,
    Needs,
    change_snapshots,
    command,
    made,
    transfer,
)
from tests.journal.test_snapshots import comparable, config_of

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from agentfsm.journal.postgres import PostgresStore  # noqa: E402  # needs psycopg
from agentfsm.journal.postgres.postgres_schema import MIGRATIONS, SCHEMA_VERSION  # noqa: E402  # needs psycopg

__all__ = ["made"]

OF_A_FILE = {
    "a trigger dropped", "a trigger added", "a table replaced by a view", "a table added", "the schema version",
    "the application id", "all tables dropped", "a tag added by which a run is found",
    "metadata added by which a run is found",
}  # fmt: skip
"""What concerns a file, or tables that a server has not: its tags and metadata are found by the listing itself."""

REFUSED = {"the type of a hash", "the type of a hold's time"}
"""What the types of the server's columns refuse."""

OTHERWISE: dict[str, Needs] = {
    "the number of a run": "either",  # a server leaves numbers out: nothing follows from one that is missing
    "a run deleted with its records": "checkpoint",
    "the type of a hold's reason": "either",  # a column has one type: it is another text, and another MAC
    "the type of a hold's MAC": "secret",
    "the type of what a snapshot says": "secret",
    "the type of a snapshot's MAC": "secret",
}
"""What it takes on a server where that differs."""

TABLES = ("run", "journal", "run_info", "hold", "tombstone", "signal", "snapshot")
ARRAYS = ("tags", "waiting_roles")


@pytest.fixture
def url(database: str) -> str:
    """A database with empty tables."""
    empty_database(database)
    with psycopg.connect(database) as db:
        db.execute("CREATE SCHEMA agentfsm; CREATE TABLE agentfsm.version (number integer NOT NULL)")
        db.execute(" ".join(MIGRATIONS))
        db.execute(f"INSERT INTO agentfsm.version VALUES ({SCHEMA_VERSION})")
    return database


def copy_rows(path: Path, url: str) -> None:
    """Write the rows of a file into the tables of a database, in place of theirs, as somebody with all rights does."""
    with psycopg.connect(url) as db, sqlite3.connect(path) as file:
        file.row_factory = sqlite3.Row
        db.execute("SET session_replication_role = replica")
        for table in TABLES:
            db.execute(f"DELETE FROM agentfsm.{table}")
        for table in TABLES:
            for row in file.execute(f"SELECT * FROM {table}").fetchall() if has(file, table) else ():
                insert(db, table, dict(row))
        db.execute("DELETE FROM agentfsm.run_prompt")  # which says again what run_info does
        db.execute("INSERT INTO agentfsm.run_prompt SELECT id, prompt FROM agentfsm.run_info")
    file.close()


def has(file: sqlite3.Connection, table: str) -> bool:
    return file.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).fetchone() is not None


def insert(db: Any, table: str, values: dict[str, Any]) -> None:
    if table == "journal":
        key = values.pop("key")
        values |= {"run": key >> 32, "seq": key & 0xFFFFFFFF}
        for text, packed in (("body", "records"), ("hidden", "hidden_values")):  # of a record, or of a commit
            if isinstance(values[text], bytes):
                values |= {packed: values[text], text: None}
    if table == "run_info":
        del values["status"]
        values |= {name: json.loads(values[name] or "[]") for name in ARRAYS}
    if table == "hold":
        values["ended"] = bool(values["ended"])
    names, places = ", ".join(values), ", ".join(["%s"] * len(values))
    overriding = "OVERRIDING SYSTEM VALUE " if table in ("run", "signal") else ""
    db.execute(f"INSERT INTO agentfsm.{table} ({names}) {overriding}VALUES ({places})", tuple(values.values()))


def verified(folder: Path, url: str, *, secret: bool, checkpoint: bool) -> Result:
    words = ("--checkpoint", folder / "note", "--key", folder / "public.pem") if checkpoint else ()
    log = ("--log", folder / "runs.db.log") if checkpoint else ()
    return command("verify", "--store", url, *words, *log, secret=SECRET.decode() if secret else "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.soak)])
def test_on_a_server_with_the_secret_and_a_checkpoint_every_edit_is_found(
    step: int, made: Path, tmp_path: Path, url: str, counted: Callable[[str], None]
) -> None:
    assert OF_A_FILE | REFUSED | OTHERWISE.keys() <= {name for name, _, _ in EDITS}
    of_rows = len(EDITS) - len(OF_A_FILE)
    words = f"Of the {of_rows} that concern\n  no file but rows, a PostgreSQL server refuses {len(REFUSED)}"
    assert words in (Path(__file__).parents[2] / "SECURITY.md").read_text("utf-8")
    found: Counter[tuple[bool, bool]] = Counter()
    wrong, refused, tried = list[str](), set[str](), 0
    copy_rows(made / "runs.db", url)
    for secret, checkpoint in WAYS:
        untouched = verified(made, url, secret=secret, checkpoint=checkpoint)
        assert untouched.exit_code == 4, untouched.output
    for number, (name, needs, edit) in enumerate(EDITS[::step]):
        if name in OF_A_FILE:
            continue
        folder = Path(shutil.copytree(made, tmp_path / str(number)))
        insider = Insider(folder)
        edit(insider)
        if name not in LISTINGS:
            insider.relist()
        insider.db.close()
        try:
            copy_rows(folder / "runs.db", url)
        except (psycopg.Error, sqlite3.Error, TypeError, json.JSONDecodeError):
            refused.add(name)
            continue
        tried += 1
        needed = OTHERWISE.get(name, needs)
        for secret, checkpoint in WAYS:
            result = verified(folder, url, secret=secret, checkpoint=checkpoint)
            seen = result.exit_code in (1, 3)
            found[secret, checkpoint] += seen
            by = {"nothing": True, "secret": secret, "checkpoint": checkpoint, "either": secret or checkpoint}[needed]
            if seen != by:
                wrong.append(f"{name} with {secret=}, {checkpoint=}: exit code {result.exit_code}")
        shutil.rmtree(folder)
    assert wrong == []
    assert refused == REFUSED & {name for name, _, _ in EDITS[::step]}
    assert found[True, True] == tried
    counted(
        f"on PostgreSQL: {tried} kinds of edit by an insider: {found[True, True]} found with the secret and a "
        f"checkpoint, {found[True, False]} with the secret, {found[False, True]} with a checkpoint, "
        f"{found[False, False]} with neither; {len(refused)} more are refused by the types of the columns"
    )


@pytest.mark.slow
@pytest.mark.parametrize("edit", HARMLESS)
def test_on_a_server_what_is_done_to_snapshots_without_being_found_makes_no_difference(
    edit: str, made: Path, tmp_path: Path, url: str
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "edited"))
    change_snapshots(folder, HARMLESS[edit])
    copy_rows(folder / "runs.db", url)
    for secret, checkpoint in WAYS:
        assert verified(folder, url, secret=secret, checkpoint=checkpoint).exit_code == 4

    async def vote() -> str:
        async with PostgresStore(url) as store:
            host = Host(clock=FakeClock(), store=store, secret=SECRET)
            agent = Agent(ScriptedModel(["done"]), tools=[transfer], host=host)
            return (await agent.resume("votes", Allow(), by=Actor("cy", ("manager",)))).output

    assert asyncio.run(vote()) == "done"
    assert verified(folder, url, secret=True, checkpoint=False).exit_code == 4


@pytest.mark.slow
def test_on_a_server_no_edit_of_a_snapshot_changes_the_run_that_goes_on(made: Path, tmp_path: Path, url: str) -> None:
    edits = [(name, edit) for name, _, edit in EDITS if "snapshot" in name]
    assert len(edits) == 10

    async def loaded() -> LoadedRun:
        async with PostgresStore(url) as store:
            return await load_run(config_of(sample_agent(store)), "first", lazily=True)

    copy_rows(made / "runs.db", url)
    untouched = asyncio.run(loaded())
    assert untouched.resume_point.base is not None
    assert untouched.resume_point.base.unread
    for number, (name, edit) in enumerate(edits):
        folder = Path(shutil.copytree(made, tmp_path / str(number)))
        insider = Insider(folder)
        edit(insider)
        insider.db.close()
        copy_rows(folder / "runs.db", url)
        assert comparable(asyncio.run(loaded())) == comparable(untouched), name
