"""What an insider with the file can change: each kind of edit, and what it takes ``agentfsm verify`` to find it.

He has the file and all of this code, but neither the host's secret nor the checkpoint, which is kept elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from agentfsm import Actor, Agent, Allow, Approval, Host, SqliteStore, tool
from agentfsm.cli.app import app
from agentfsm.errors import AgentfsmError
from agentfsm.journal import snapshot
from agentfsm.journal.fork import fork
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.listing import compute_run_info
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import end_hold, hold_run
from agentfsm.journal.redact import redact
from agentfsm.journal.run_info import first_info
from agentfsm.journal.sqlite.sqlite_run_info import write_run_info
from agentfsm.journal.sqlite.sqlite_store import select_records
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import stored_bodies, unpack_rows
from tests.helpers.journal_scenarios import add, finished_run, look, pay, waiting_run

SECRET = b"of the tests"
ANN, BOB = Actor("ann", ("manager",)), Actor("bob", ("manager",))
RUNS = ("first", "whole", "votes", "asks", "redacted", "forked", "last")

EVERY_EDIT = pytest.param(1, marks=pytest.mark.soak)

Needs = Literal["nothing", "secret", "checkpoint", "either"]


@tool(requires_approval=Approval(n=2, roles=("manager",), not_requester=True))
def transfer(amount: int) -> str:
    """Transfer."""
    return "done"


class Row(NamedTuple):
    """A record as the file has it."""

    body: str
    hash: bytes
    hidden: str | None
    mac: bytes | None


class Insider:
    """Changes a store's file without its triggers, and puts them back. It gets a row for each record first.

    Args:
        folder: Has the file, ``runs.db``, and a copy of it from before the last vote, ``before.db``.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.before = folder / "runs.db", folder / "before.db"
        unpack_rows(self.path)
        self.db = sqlite3.connect(self.path, isolation_level=None)

    def relist(self) -> None:
        """List the runs by what their records say now, as an insider does who knows that the two are compared."""
        with contextlib.suppress(sqlite3.Error):  # there are no tables any more
            for run_id, number, status in self.db.execute("SELECT run_id, id, status FROM run").fetchall():
                with contextlib.suppress(AgentfsmError, sqlite3.Error, LookupError, TypeError, ValueError):
                    records = select_records(self.db, run_id, 0) or []
                    try:
                        info = compute_run_info(run_id, records, status)
                    except AgentfsmError:  # what it became cannot be computed, because it was redacted
                        info = replace(first_info(run_id, records[0]), status=status)
                    write_run_info(self.db, number, info)

    def sql(self, *statements: str) -> None:
        triggers = self.db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            self.db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            self.db.execute(statement)
        for _, create in triggers:
            self.db.execute(create)

    def rows(self, run: str) -> list[Row]:
        query = "SELECT body, hash, hidden, mac FROM journal WHERE key >> 32 = ? ORDER BY key"
        return [Row(*row) for row in self.db.execute(query, (RUNS.index(run) + 1,))]

    def write(self, run: str, rows: Sequence[Row], *, number: int = 0, **columns: Any) -> None:
        """Put a run's records and its row into the file as if they had always been there: hashes are made to fit."""
        number, head, made = number or RUNS.index(run) + 1, GENESIS_HASH, list[Any]()
        for seq, row in enumerate(rows, 1):
            body = re.sub(r'"seq":\d+,"t', f'"seq":{seq},"t', row.body)
            if '"kind":"run.resumed"' in body:  # the answer names the hash of its request
                body = re.sub(r'"hash":"\w{64}","seq":\d+', f'"hash":"{head}","seq":{seq - 1}', body)
            head = record_hash(head, body)
            made.append((number << 32 | seq, body, bytes.fromhex(head), row.hidden, row.mac))
        values = {"run_id": run, "seq": len(rows), "hash": bytes.fromhex(head), **columns}
        self.sql(f"DELETE FROM journal WHERE key >> 32 = {number}")
        self.db.executemany("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", made)
        self.db.execute(f"INSERT OR IGNORE INTO run (id, run_id, hash) VALUES ({number}, '{run}', x'00')")
        for column, value in values.items():
            self.db.execute(f"UPDATE run SET {column} = ? WHERE id = {number}", (value,))

    def replace(self, run: str, old: str, new: str) -> None:
        """Change the text of records of a run, and make all hashes fit."""
        rows = self.rows(run)
        changed = [row._replace(body=row.body.replace(old, new)) for row in rows]
        assert changed != rows, old
        self.write(run, changed)

    def insert(self, run: str, place: int, *bodies: str, **columns: Any) -> None:
        """Insert records without MACs of their own: each gets that of the record before it."""
        rows = self.rows(run)
        place = len(rows) if place < 0 else place
        more = [Row(body, b"", None, rows[place - 1].mac) for body in bodies]
        self.write(run, [*rows[:place], *more, *rows[place:]], **columns)


def at(run: str, seq: int) -> str:
    return f"WHERE key = {RUNS.index(run) + 1} << 32 | {seq}"


def update(run: str, seq: int, change: str) -> str:
    return f"UPDATE journal SET {change} {at(run, seq)}"


def row(run: str, change: str) -> str:
    return f"UPDATE run SET {change} WHERE run_id = '{run}'"


def move(old: int, new: int) -> tuple[str, ...]:
    """Statements that give a run another number."""
    return (
        f"UPDATE run SET id = {new} WHERE id = {old}",
        f"UPDATE journal SET key = {new} << 32 | (key & 4294967295) WHERE key >> 32 = {old}",
    )


def swap_numbers(insider: Insider) -> None:
    insider.sql(*move(1, 9), *move(7, 1), *move(9, 7))


def cut(insider: Insider) -> None:
    insider.write("whole", insider.rows("whole")[:31], status="running")


def cut_within_a_commit(insider: Insider) -> None:
    insider.write("whole", insider.rows("whole")[:30], status="running")


def forge_answer(insider: Insider) -> None:
    *_, resumed, answered = insider.rows("whole")[:37]
    reply = re.sub(r'"reply":\{.*?\}\}\}', '"reply":{"kind":"allow"}}}', answered.body)
    resumed_body = re.sub(r'"salt":\{[^}]*\},', "", resumed.body)
    insider.insert("first", -1, resumed_body, reply, status="running", epoch=2)


def forge_redaction(insider: Insider) -> None:
    body = '{"epoch":2,"field":"4","kind":"redaction","of":4,"places":[0],"seq":51,"ts":1000002000}'
    insider.insert("whole", -1, body)
    insider.sql(update("whole", 4, "hidden = '[null]'"))


def add_vote(run: str, number: int) -> Callable[[Insider], None]:
    """The vote on the run "votes" is appended to a run."""

    def edit(insider: Insider) -> None:
        votes = insider.rows("votes")
        (start,) = (n for n, each in enumerate(votes) if '"kind":"run.resumed"' in each.body)
        vote = [each._replace(body=each.body.replace('"epoch":2', f'"epoch":{number}')) for each in votes[start:]]
        insider.write(run, [*insider.rows(run), *vote], epoch=number)

    return edit


def copy_run(insider: Insider) -> None:
    rows = insider.rows("whole")
    first = rows[0]._replace(body=rows[0].body.replace('"run":"whole"', '"run":"copy"'))
    insider.write("copy", [first, *rows[1:]], number=8, status="finished", epoch=2)


def forge_run(secret: bytes | None) -> Callable[[Insider], None]:
    """A whole run that somebody with another secret, or with none, made with this package."""

    def edit(insider: Insider) -> None:
        with SqliteStore(insider.path) as store:
            finished_run(store, "forged", secret=secret or b"x")
        if secret is None:
            insider.sql(
                "UPDATE journal SET mac = NULL WHERE key >> 32 = 8", "UPDATE run SET mac = NULL WHERE run_id = 'forged'"
            )

    return edit


def rename(insider: Insider) -> None:
    insider.replace("last", '"run":"last"', '"run":"next"')
    insider.sql(row("last", "run_id = 'next'"))


def restore(*tables: str) -> Callable[[Insider], None]:
    """In these tables, the run "votes" as it was before its last vote, with the MACs of that time."""

    def edit(insider: Insider) -> None:
        places = {table: "key >> 32 = 3" if table == "journal" else "id = 3" for table in tables}
        insider.sql(*(f"DELETE FROM {table} WHERE {place}" for table, place in places.items()))
        insider.db.execute("ATTACH ? AS before", (str(insider.before),))
        for table, place in places.items():
            insider.db.execute(f"INSERT INTO main.{table} SELECT * FROM before.{table} WHERE {place}")

    return edit


def restore_hold(insider: Insider) -> None:
    insider.db.execute("ATTACH ? AS before", (str(insider.before),))
    insider.sql("DELETE FROM hold WHERE id = 7", "INSERT INTO main.hold SELECT * FROM before.hold WHERE id = 7")


def restore_file(insider: Insider) -> None:
    insider.db.close()
    shutil.copy(insider.before, insider.path)


def empty_file(insider: Insider) -> None:
    insider.db.close()
    insider.path.write_bytes(b"")


def new_file(insider: Insider) -> None:
    insider.db.close()
    insider.path.unlink()
    with SqliteStore(insider.path) as store:
        store.claim()


def same_runs_of_another(insider: Insider) -> None:
    insider.db.close()
    insider.path.unlink()
    make_runs(insider.path, insider.path.with_name("other.db"), b"of a forger")


def rehash_all(insider: Insider) -> None:
    parent = insider.rows("whole")[5].hash.hex()
    for run in RUNS:
        changed = [each.body.replace('"ts":1', '"ts":2') for each in insider.rows(run)]
        forked = [body.replace(parent, insider.rows("whole")[5].hash.hex()) for body in changed]
        insider.write(run, [each._replace(body=body) for each, body in zip(insider.rows(run), forked, strict=True)])


def with_schema(*statements: str) -> Callable[[Insider], None]:
    """Statements without anything put back after them."""

    def edit(insider: Insider) -> None:
        for statement in statements:
            insider.db.execute(statement)

    return edit


def rehashed(run: str, old: str, new: str) -> Callable[[Insider], None]:
    return lambda insider: insider.replace(run, old, new)


def sql(*statements: str) -> Callable[[Insider], None]:
    return lambda insider: insider.sql(*statements)


LISTINGS = {
    "the listed prompt": "prompt = 'Do nothing.'",
    "the listed requester": "actor = 'bob'",
    "the listed session": "session = 's2'",
    "the listed tags": "tags = '[\"keep\"]'",
    "the listed metadata": 'metadata = \'{"order": "8"}\'',
    "the listed model": "model = 'another'",
    "the listed cost": "cost_usd = 0.5",
    "the listed tokens": "tokens = 1",
    "the listed start": "started = started - 1",
    "the listed end": "updated = updated + 86400000",
    "the listed ending": "ending = 'handed_off'",
    "the listed parent": "parent = 'first'",
}

EDITS: list[tuple[str, Needs, Callable[[Insider], None]]] = [
    # -- columns of the journal
    ("a body", "nothing", sql(update("whole", 4, "body = replace(body, 'tool_calls', 'tool_cells')"))),
    ("a body, and all hashes made to fit", "either", rehashed("last", '"name":"scripted"', '"name":"another"')),
    ("the type of a body", "nothing", sql(update("whole", 2, "body = CAST(body AS BLOB)"))),
    ("a hash", "nothing", sql(update("whole", 4, "hash = zeroblob(32)"))),
    ("the last hash, and the one of the run", "nothing", sql(
        update("whole", 50, "hash = zeroblob(32)"), row("whole", "hash = zeroblob(32)"))),
    ("the type of a hash", "nothing", sql(update("whole", 4, "hash = CAST(hash AS TEXT)"))),
    ("a hidden value", "nothing", sql(update("whole", 4, "hidden = replace(hidden, ':2', ':3')"))),
    ("the salt of a hidden value", "nothing", sql(update("whole", 4, "hidden = replace(hidden, '[[\"', '[[\"00')"))),
    ("hidden values removed", "nothing", sql(update("whole", 4, "hidden = NULL"))),
    ("a hidden value removed as if redacted", "nothing", sql(update("whole", 4, "hidden = '[null]'"))),
    ("a hidden value added", "nothing", sql(update("whole", 2, "hidden = '[[\"00\",1]]'"))),
    ("a MAC", "secret", sql(update("whole", 6, "mac = CAST(substr(mac, 1, 19) || x'00' AS BLOB)"))),
    ("a MAC shortened", "secret", sql(update("whole", 6, "mac = CAST(substr(mac, 1, 19) AS BLOB)"))),
    ("a MAC of another record", "secret", sql(
        update("whole", 6, f"mac = (SELECT mac FROM journal {at('whole', 3)})"))),
    ("the MAC of another record, in place of a mark that the next one has it", "secret", sql(
        update("whole", 4, f"mac = (SELECT mac FROM journal {at('whole', 6)})"))),
    ("the key id of a MAC", "secret", sql(update("whole", 6, "mac = CAST(x'00000000' || substr(mac, 5) AS BLOB)"))),
    ("one MAC removed", "nothing", sql(update("whole", 6, "mac = NULL"))),
    ("a mark that the next record has the MAC removed", "nothing", sql(update("whole", 4, "mac = NULL"))),
    ("all MACs of a run removed", "secret", sql(
        "UPDATE journal SET mac = NULL WHERE key >> 32 = 2", row("whole", "mac = NULL"))),
    ("all MACs removed", "secret", sql("UPDATE journal SET mac = NULL", "UPDATE run SET mac = NULL")),
    ("the number of a record", "nothing", sql(update("whole", 50, "key = key + 7"))),
    # -- records
    ("two records exchanged", "nothing", sql(
        update("whole", 8, "key = -1"), update("whole", 9, "key = key - 1"),
        "UPDATE journal SET key = 2 << 32 | 9 WHERE key = -1")),
    ("a record deleted", "nothing", sql(f"DELETE FROM journal {at('whole', 9)}")),
    ("a record deleted, and all hashes made to fit", "either", lambda i: i.write(
        "whole", [each for n, each in enumerate(i.rows("whole"), 1) if n != 11])),
    ("the first record deleted", "nothing", sql(f"DELETE FROM journal {at('whole', 1)}")),
    ("a record before the first", "nothing", sql(
        "INSERT INTO journal VALUES (2 << 32, '{}', zeroblob(32), NULL, NULL)")),
    ("the last record deleted", "nothing", sql(f"DELETE FROM journal {at('whole', 50)}")),
    ("a tail cut off, and the run's row made to fit", "either", cut),
    ("a tail cut off within a commit, and the run's row made to fit", "nothing", cut_within_a_commit),
    ("a record repeated", "nothing", sql(
        f"INSERT INTO journal SELECT key + 1, body, hash, hidden, mac FROM journal {at('whole', 50)}")),
    ("a record inserted, and all hashes made to fit", "either", lambda i: i.insert(
        "whole", 9, '{"epoch":1,"kind":"checkpoint","seq":10,"ts":1000000000}')),
    ("a record moved from another run", "nothing", sql(
        f"DELETE FROM journal {at('last', 4)}", f"UPDATE journal SET key = 7 << 32 | 4 {at('whole', 4)}")),
    ("records of two runs exchanged", "nothing", sql(row("whole", "run_id = 'x'"), row("last", "run_id = 'whole'"),
        row("x", "run_id = 'last'"))),
    # -- what was granted
    ("an answer forged", "secret", forge_answer),
    ("an answer changed", "either", rehashed("whole", '"kind":"edit"', '"kind":"allow"')),
    ("the arguments that were approved", "nothing", sql(update("whole", 37, "hidden = replace(hidden, 'Bob', 'Eve')"))),
    ("the request that an answer is for", "nothing", sql(update("whole", 36, "body = replace(body, ':35}', ':34}')"))),
    ("a redaction forged", "secret", forge_redaction),
    ("a redaction removed", "nothing", lambda i: i.write("redacted", i.rows("redacted")[:-1])),
    ("who asked for a redaction", "either", rehashed("redacted", '"by":"ann"', '"by":"bob"')),
    ("a vote moved from another run", "secret", add_vote("asks", 2)),
    ("a vote counted twice", "nothing", add_vote("votes", 3)),
    ("the voter", "either", rehashed("votes", '"id":"bob"', '"id":"cy"')),
    ("the role of a voter", "nothing", rehashed("votes", '{"id":"bob","roles":["manager"]}',
        '{"id":"bob","roles":["clerk"]}')),
    ("the requester", "either", rehashed("asks", '"id":"ann"', '"id":"cy"')),
    ("the number of approvals that are needed", "either", rehashed("asks", '"n":2', '"n":1')),
    ("the limits of a run", "either", rehashed("first", '"max_iterations":', '"max_iterations":9')),
    ("the session of a run", "either", rehashed("first", '"run":"first"', '"run":"first","session":"another"')),
    ("the pinned graph", "nothing", rehashed("first", "approval_required", "approval_forgotten")),
    ("the parent of a fork", "nothing", rehashed("forked", '"seq":6', '"seq":7')),
    ("the times of a run", "either", rehashed("last", '"ts":10', '"ts":11')),
    # -- columns of the runs
    ("the epoch raised", "secret", sql(row("first", "epoch = epoch + 1"))),
    ("the epoch lowered", "nothing", sql(row("whole", "epoch = 0"))),
    ("the owner", "secret", sql(row("first", "owner = 'process 1 on another'"))),
    ("the status", "nothing", sql(row("first", "status = 'running'"))),
    ("the length of a run", "nothing", sql(row("first", "seq = seq - 1"))),
    ("the last hash of a run", "nothing", sql(row("first", "hash = zeroblob(32)"))),
    ("the MAC of a run's row", "secret", sql(row("first", "mac = zeroblob(20)"))),
    ("the MAC of a run's row removed", "secret", sql(row("first", "mac = NULL"))),
    ("the MAC of another run's row", "secret", sql(row("first", "mac = (SELECT mac FROM run WHERE run_id = 'asks')"))),
    ("the type of a run id", "nothing", sql(row("first", "run_id = CAST(run_id AS BLOB)"))),
    ("the number of a run", "nothing", sql(*move(7, 9))),
    ("the numbers of two runs exchanged", "either", swap_numbers),
    ("the id of a run", "nothing", sql(row("last", "run_id = 'next'"))),
    ("a run renamed, and all hashes made to fit", "either", rename),
    # -- columns by which runs are listed
    *((name, "nothing", sql(f"UPDATE run_info SET {change} WHERE id = 2")) for name, change in LISTINGS.items()),
    ("a tag added by which a run is found", "nothing", sql("INSERT INTO run_tag (tag, id) VALUES ('keep', 2)")),
    ("metadata added by which a run is found", "nothing", sql(
        "INSERT INTO run_metadata (name, value, id) VALUES ('order', '8', 2)")),
    # -- holds
    ("a hold removed", "checkpoint", sql("DELETE FROM hold WHERE id = 2")),
    ("a hold that was ended removed", "checkpoint", sql("DELETE FROM hold WHERE id = 7")),
    ("a hold ended", "either", sql("UPDATE hold SET ended = 1 WHERE id = 2")),
    ("a hold that was ended put back", "either", sql("UPDATE hold SET ended = 0 WHERE id = 7")),
    ("the reason of a hold", "either", sql("UPDATE hold SET reason = 'case 8' WHERE id = 2")),
    ("who holds a run", "either", sql("UPDATE hold SET held_by = 'bob' WHERE id = 2")),
    ("the time of a hold", "secret", sql("UPDATE hold SET since = since + 1 WHERE id = 2")),
    ("the MAC of a hold removed", "secret", sql("UPDATE hold SET mac = x'' WHERE id = 2")),
    ("the MAC of another hold", "secret", sql(
        "UPDATE hold SET mac = (SELECT mac FROM hold WHERE id = 7) WHERE id = 2")),
    ("a hold moved to another run", "either", sql("UPDATE hold SET id = 1 WHERE id = 2")),
    ("a hold added", "secret", sql(
        "INSERT INTO hold SELECT 1, reason, held_by, since, ended, mac FROM hold WHERE id = 2")),
    ("a hold put back to an older state, MAC and all", "checkpoint", restore_hold),
    ("the type of a hold's reason", "nothing", sql("UPDATE hold SET reason = CAST(reason AS BLOB) WHERE id = 2")),
    ("the type of a hold's time", "nothing", sql("UPDATE hold SET since = 'never' WHERE id = 2")),
    ("the type of a hold's MAC", "nothing", sql("UPDATE hold SET mac = hex(mac) WHERE id = 2")),
    # -- snapshots
    ("what a snapshot says", "secret", sql(
        "UPDATE snapshot SET content = replace(content, '\"approved\":false', '\"approved\":true') WHERE id = 1")),
    ("a snapshot emptied", "secret", sql("UPDATE snapshot SET content = '' WHERE id = 1")),
    ("the MAC of a snapshot", "secret", sql("UPDATE snapshot SET mac = zeroblob(20) WHERE id = 1")),
    ("the MAC of a snapshot removed", "secret", sql("UPDATE snapshot SET mac = x'' WHERE id = 1")),
    ("the MAC of another snapshot", "secret", sql(
        "UPDATE snapshot SET mac = (SELECT mac FROM snapshot WHERE id = 4) WHERE id = 1")),
    ("the snapshots of two runs exchanged, MACs and all", "secret", sql(
        "UPDATE snapshot SET id = 9 WHERE id = 1", "UPDATE snapshot SET id = 1 WHERE id = 4",
        "UPDATE snapshot SET id = 4 WHERE id = 9")),
    ("a snapshot copied to another run, MAC and all", "secret", sql(
        "INSERT INTO snapshot SELECT 2, content, mac FROM snapshot WHERE id = 1")),
    ("a run put back to an older state, MACs and all, without its snapshot", "either", restore("journal", "run")),
    ("the type of what a snapshot says", "nothing", sql(
        "UPDATE snapshot SET content = CAST(content AS BLOB) WHERE id = 1")),
    ("the type of a snapshot's MAC", "nothing", sql("UPDATE snapshot SET mac = hex(mac) WHERE id = 1")),
    # -- whole runs
    ("a run deleted", "nothing", sql("DELETE FROM run WHERE run_id = 'whole'")),
    ("a run deleted with its records", "nothing", sql(
        "DELETE FROM run WHERE run_id = 'asks'", "DELETE FROM journal WHERE key >> 32 = 4")),
    ("the newest run deleted with its records", "checkpoint", sql(
        "DELETE FROM run WHERE run_id = 'last'", "DELETE FROM journal WHERE key >> 32 = 7")),
    ("a run copied under another id", "secret", copy_run),
    ("a run forged under another secret", "secret", forge_run(b"of a forger")),
    ("a run forged without MACs", "secret", forge_run(None)),
    ("a run put back to an older state, MACs and all", "checkpoint", restore("journal", "run", "snapshot")),
    # -- the file
    ("a trigger dropped", "nothing", with_schema("DROP TRIGGER journal_loses_nothing")),
    ("a trigger added", "nothing", with_schema("CREATE TRIGGER more AFTER INSERT ON run BEGIN SELECT 1; END")),
    ("a table replaced by a view", "nothing", with_schema(
        "ALTER TABLE run RENAME TO kept", "CREATE VIEW run AS SELECT * FROM kept")),
    ("a table added", "nothing", with_schema("CREATE TABLE more (x)")),
    ("the schema version", "nothing", with_schema("PRAGMA user_version = 1")),
    ("the application id", "nothing", with_schema("PRAGMA application_id = 7")),
    ("all tables dropped", "nothing", with_schema("DROP TABLE journal", "DROP TABLE run")),
    ("the file emptied", "either", empty_file),
    ("the file replaced by a new store", "either", new_file),
    ("the file put back to an older state", "checkpoint", restore_file),
    ("every run rewritten, and all hashes made to fit", "either", rehash_all),
    ("every run made again under another secret", "either", same_runs_of_another),
]  # fmt: skip


HARMLESS: dict[str, Callable[[Insider], None]] = {
    "all snapshots deleted": sql("DELETE FROM snapshot"),
    "a snapshot put back to an older one of the run, MAC and all": restore("snapshot"),
}
"""What nobody finds, because it makes no difference."""


def make_runs(path: Path, before: Path, secret: bytes) -> None:
    """The runs of ``RUNS``, and a copy of the file from before the vote, which is the last thing that happens.

    Those that wait have a snapshot, also the one of the vote, before and after it.
    """
    with mock.patch.multiple(snapshot, EVERY_RECORDS=1, WAITING_RECORDS=1):
        _make_runs(path, before, secret)


def _make_runs(path: Path, before: Path, secret: bytes) -> None:
    keyring = Keyring(secret)

    async def scene(store: SqliteStore) -> None:
        def agent() -> Agent:
            host = Host(clock=FakeClock(), store=store, secret=secret)
            return Agent(ScriptedModel([call("transfer", amount=5)]), tools=[transfer], host=host)

        for run_id in ("votes", "asks"):
            await agent().run("Pay.", run_id=run_id, actor=ANN)

    async def rest(store: SqliteStore) -> None:
        await redact(store, "redacted", "4", keyring, by="ann")
        await fork(store, "whole", 6, "forked", keyring)

    async def hold(store: SqliteStore) -> None:
        await hold_run(store, "whole", Hold("case 7", "ann", 1000.0), keyring)
        await hold_run(store, "last", Hold("case 7", "ann", 1000.0), keyring)

    async def vote(store: SqliteStore) -> None:
        await end_hold(store, "last", keyring, by="ann", now=2000.0)
        host = Host(clock=FakeClock(), store=store, secret=secret)
        await Agent(ScriptedModel([]), tools=[transfer], host=host).resume("votes", Allow(), by=BOB)

    with SqliteStore(path) as store:
        waiting_run_of(store, "first", secret)
        finished_run(store, "whole", secret=secret)
        asyncio.run(scene(store))
        finished_run(store, "redacted", secret=secret)
        asyncio.run(rest(store))
        finished_run(store, "last", secret=secret)
        asyncio.run(hold(store))
    shutil.copy(path, before)
    with SqliteStore(path) as store:
        asyncio.run(vote(store))


def waiting_run_of(store: SqliteStore, run_id: str, secret: bytes) -> None:
    if secret == SECRET:
        waiting_run(store, run_id)
    else:
        finished_run(store, run_id, secret=secret)


def command(*words: object, secret: str = "") -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"AGENTFSM_SECRET": secret})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the store, an older copy, a checkpoint with its log, and the public key."""
    folder = tmp_path_factory.mktemp("made")
    make_runs(folder / "runs.db", folder / "before.db", SECRET)
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(private)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)
    signed = command("checkpoint", "--key", folder / "key.pem", "--store", folder / "runs.db", secret=SECRET.decode())
    assert signed.exit_code == 0, signed.output
    (folder / "note").write_text(signed.stdout, "utf-8")
    return folder


def verified(folder: Path, *, secret: bool, checkpoint: bool) -> Result:
    words = ("--checkpoint", folder / "note", "--key", folder / "public.pem") if checkpoint else ()
    return command("verify", "--store", folder / "runs.db", *words, secret=SECRET.decode() if secret else "")


WAYS = [(secret, checkpoint) for secret in (True, False) for checkpoint in (True, False)]


def test_an_untouched_store_is_good_in_every_way(made: Path) -> None:
    assert json.loads(command("verify", "--json", "--store", made / "runs.db").stdout.splitlines()[2])["open"]
    for secret, checkpoint in WAYS:
        assert verified(made, secret=secret, checkpoint=checkpoint).exit_code == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [6, EVERY_EDIT])
def test_with_the_secret_and_a_checkpoint_every_edit_is_found(
    step: int, made: Path, tmp_path: Path, counted: Callable[[str], None]
) -> None:
    assert len({name for name, _, _ in EDITS}) == len(EDITS) >= 60
    assert f"Of {len(EDITS)} kinds of edit" in (Path(__file__).parents[2] / "SECURITY.md").read_text("utf-8")
    found: Counter[tuple[bool, bool]] = Counter()
    wrong: list[str] = []
    chosen = EDITS[::step]
    for number, (name, needs, edit) in enumerate(chosen):
        folder = Path(shutil.copytree(made, tmp_path / str(number)))
        insider = Insider(folder)
        edit(insider)
        if name not in LISTINGS:
            insider.relist()
        insider.db.close()
        for secret, checkpoint in WAYS:
            result = verified(folder, secret=secret, checkpoint=checkpoint)
            seen = result.exit_code in (1, 3)
            found[secret, checkpoint] += seen
            by = {"nothing": True, "secret": secret, "checkpoint": checkpoint, "either": secret or checkpoint}[needs]
            if seen != by:
                wrong.append(f"{name} with {secret=}, {checkpoint=}: {result.output}")
            if not secret:
                assert "without the secret" in result.stderr
                assert "who wrote the records, the answers and the redactions" in result.stderr
            if not checkpoint:
                assert "whether records or runs were cut off" in result.stderr
        shutil.rmtree(folder)
    assert wrong == []
    counted(
        f"{len(chosen)} kinds of edit by an insider: {found[True, True]} found with the secret and a checkpoint, "
        f"{found[True, False]} with the secret, {found[False, True]} with a checkpoint, "
        f"{found[False, False]} with neither"
    )
    assert found[True, True] == len(chosen)


def test_what_is_done_to_snapshots_without_being_found_makes_no_difference(made: Path, tmp_path: Path) -> None:
    def after(edit: Callable[[Insider], None] | None) -> tuple[Any, ...]:
        folder = Path(shutil.copytree(made, tmp_path / "edited"))
        if edit is not None:
            change_snapshots(folder, edit)
        for secret, checkpoint in WAYS:
            assert verified(folder, secret=secret, checkpoint=checkpoint).exit_code == 4
        with SqliteStore(folder / "runs.db") as store:
            host = Host(clock=FakeClock(), store=store, secret=SECRET)
            agent = Agent(ScriptedModel(["done"]), tools=[transfer], host=host)
            result = agent.resume_sync("votes", Allow(), by=Actor("cy", ("manager",)))
        shutil.rmtree(folder)
        return result.output, result.messages, [(each.kind, each.data.get("transition")) for each in result.journal]

    untouched = after(None)
    assert untouched[0] == "done"
    assert [after(edit) == untouched for edit in HARMLESS.values()] == [True, True]


def change_snapshots(folder: Path, edit: Callable[[Insider], None]) -> None:
    """Change a file with an edit that changes its snapshots."""
    insider = Insider(folder)
    before = insider.db.execute("SELECT * FROM snapshot").fetchall()
    edit(insider)
    assert insider.db.execute("SELECT * FROM snapshot").fetchall() != before
    insider.db.close()


def paid_after(folder: Path) -> int:
    """How many payments a host with the secret makes if it goes on with everything, and a second person approves."""
    path = folder / "runs.db"

    async def go_on(store: SqliteStore) -> None:
        host = Host(clock=FakeClock(), store=store, secret=SECRET)
        agent = Agent(ScriptedModel(["done"] * 20), tools=[add, pay, look, transfer], host=host)
        for run in await agent.unfinished_runs():
            await run
        await agent.resume("asks", Allow(), by=Actor("cy", ("manager",)))

    before = payments(path)
    with contextlib.suppress(AgentfsmError), SqliteStore(path) as store:
        asyncio.run(go_on(store))
    return payments(path) - before


def payments(path: Path) -> int:
    names = ("pay", "transfer")
    with contextlib.closing(sqlite3.connect(path)) as db:
        try:
            bodies = stored_bodies(db)
        except sqlite3.Error:  # there is no table, or no store
            return 0
    return sum('"kind":"effect.intent"' in body and f'"name":"{name}"' in body for body in bodies for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, EVERY_EDIT])
def test_no_edit_is_acted_on(step: int, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def paid(edit: Callable[[Insider], None]) -> int:
        folder = Path(shutil.copytree(made, tmp_path / "edited"))
        insider = Insider(folder)
        edit(insider)
        insider.db.close()
        try:
            return paid_after(folder)
        finally:
            shutil.rmtree(folder)

    by_name = {name: edit for name, _, edit in EDITS}
    assert [name for name, edit in [*by_name.items()][::step] if paid(edit)] == []
    monkeypatch.setattr("agentfsm.journal.load.require_authentic", lambda report, action: None)
    assert paid(by_name["an answer forged"]) == 0  # the row of the run is checked once more when it is acquired
    monkeypatch.setattr("agentfsm.journal.sqlite.sqlite_store.is_changed", lambda row, seal, keyring: False)
    assert paid(by_name["an answer forged"]) == 1  # it would be, if it were not checked who wrote it
    assert paid(by_name["a vote moved from another run"]) == 1
