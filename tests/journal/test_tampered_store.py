"""A store that was tampered with by hand: what ``agentfsm verify`` reports, and that other commands handle it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from agentfsm import Allow, JournalError, SqliteStore
from agentfsm.cli.app import app
from agentfsm.errors import StoreError, StoreFormatError
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.sqlite.sqlite_schema import SCHEMA_VERSION
from agentfsm.loop.keys import Keyring
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.journal_scenarios import finished_run, sample_agent, waiting_run

V_0_1_0 = Path(__file__).parents[1] / "data" / "v0.1.0" / "runs.db"
RECORD = 4  # of the run "whole": a model's reply, with hidden values beside it


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, "first", "whole" and "waits", with a row for each record."""
    path = tmp_path_factory.mktemp("made") / "runs.db"
    store = SqliteStore(path)
    waiting_run(store, "first")
    finished_run(store, "whole")
    waiting_run(store, "waits")
    store.close()
    unpack_rows(path)
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made, tmp_path / "runs.db"))


def forge(path: Path, *statements: str) -> None:
    """Do to the file what its triggers forbid, and put them back."""
    db = sqlite3.connect(path)
    triggers = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        db.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        db.execute(statement)
    if db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'journal'").fetchone():
        for _, create in triggers:
            db.execute(create)
    db.commit()
    db.close()


def run_command(*words: object, secret: str = "") -> Result:
    secret = "of the tests" if words[0] in ("fork", "redact") else secret
    return CliRunner().invoke(app, [str(word) for word in words], env={"AGENTFSM_SECRET": secret})


def found(path: Path, *words: str, code: int = 1, secret: str = "") -> dict[str, tuple[int | None, str]]:
    """Record and reason of each run that is not good."""
    result = run_command("verify", *words, "--json", "--store", path, secret=secret)
    assert result.exit_code == code, result.output
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    return {each["run_id"]: (each["seq"], each["reason"]) for each in reports if each["reason"]}


async def resumed(store: SqliteStore) -> object:
    return await sample_agent(store).resume("waits", Allow())


def at(record: int, run: int = 2) -> str:
    return f"WHERE key = {run << 32 | record}"


def test_an_untouched_store_is_good(path: Path) -> None:
    assert found(path, code=4) == {}


@pytest.mark.parametrize(
    ("run", "status"),
    [("whole", "running"), ("whole", "suspended"), ("waits", "finished"), ("waits", "running"), ("waits", "nonsense")],
)
def test_a_changed_status_in_the_head_is_found(path: Path, run: str, status: str) -> None:
    forge(path, f"UPDATE run SET status = '{status}' WHERE run_id = '{run}'")
    ((which, (_, reason)),) = found(path).items()
    assert which == run
    assert f"the store has the run as {status}" in reason


def test_a_decreased_epoch_is_found(path: Path) -> None:
    forge(path, "UPDATE run SET epoch = 0 WHERE run_id = 'whole'")
    assert "epoch 0" in found(path)["whole"][1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("epoch = epoch + 1", "the row was changed"),
        ("owner = 'somebody'", "the row was changed"),
        ("mac = (SELECT mac FROM run WHERE run_id = 'first')", "the row was changed"),
        ("mac = NULL", "has no MAC"),
    ],
)
def test_a_changed_row_of_a_run_is_found_with_the_secret_and_not_acted_on(path: Path, change: str, words: str) -> None:
    assert found(path, code=4, secret="of the tests") == {}
    forge(path, f"UPDATE run SET {change} WHERE run_id = 'waits'")
    ((run, (_, reason)),) = found(path, secret="of the tests").items()
    assert (run, words in reason) == ("waits", True)
    with SqliteStore(path) as store, pytest.raises(JournalError, match=words):
        asyncio.run(resumed(store))


def test_a_row_that_changes_between_loading_and_acquiring_a_run_is_not_sealed_again(path: Path) -> None:
    keyring = Keyring(b"new", [b"of the tests"])

    async def change_while_held(store: SqliteStore) -> None:
        lease = await store.acquire("waits", "me", keyring=keyring)
        forge(path, "UPDATE run SET owner = 'you' WHERE run_id = 'waits'")
        await store.release(lease)
        with pytest.raises(StoreError, match="somebody without the secret changed its row"):
            await store.acquire("waits", "me", keyring=keyring)

    with SqliteStore(path) as store:
        asyncio.run(change_while_held(store))
    assert "the row was changed" in found(path, secret="new")["waits"][1]


@pytest.mark.parametrize("column", ["mac = NULL", "mac = NULL, epoch = 0", "mac = NULL, owner = 'you'"])
def test_a_mac_that_is_removed_between_loading_and_acquiring_a_run_is_missed(path: Path, column: str) -> None:
    keyring = Keyring(b"of the tests")

    class Slow(SqliteStore):
        """A store whose file is changed after a run was loaded, and before it is acquired."""

        async def acquire(self, *words: Any, **more: Any) -> Any:
            forge(path, f"UPDATE run SET {column} WHERE run_id = 'waits'")
            return await super().acquire(*words, **more)

    with Slow(path) as store, pytest.raises(StoreError, match="somebody without the secret changed its row"):
        asyncio.run(resumed(store))

    async def remove_while_held(store: SqliteStore) -> None:
        lease = await store.acquire("first", "me", keyring=keyring)
        forge(path, "UPDATE run SET mac = NULL WHERE run_id = 'first'")
        await store.release(lease)

    with SqliteStore(path) as store:
        asyncio.run(remove_while_held(store))
    missed = found(path, secret="of the tests")
    assert {run: "has no MAC" in reason or "epoch 0" in reason for run, (_, reason) in missed.items()} == {
        "waits": True,
        "first": True,
    }


FOREIGN_TRIGGERS = [
    "CREATE TRIGGER spy AFTER INSERT ON journal BEGIN UPDATE run SET status = 'finished'; END",
    "CREATE TRIGGER spy AFTER UPDATE ON run BEGIN SELECT RAISE(ABORT, 'no'); END",
    "CREATE TRIGGER journal_keeps_what_it_has_ BEFORE UPDATE OF key ON journal BEGIN SELECT 1; END",
]


@pytest.mark.parametrize("trigger", FOREIGN_TRIGGERS)
def test_a_store_with_a_foreign_trigger_is_not_written(path: Path, trigger: str) -> None:
    forge(path, trigger)
    name = trigger.split()[2]
    with SqliteStore(path) as store:
        with pytest.raises(StoreFormatError, match=f"triggers that agentfsm did not write: {name} on"):
            store.claim()
        with pytest.raises(StoreFormatError, match="DROP TRIGGER"):
            asyncio.run(resumed(store))
    assert f"trigger {name}" in found(path)["(schema)"][1]
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"DROP TRIGGER {name}")
    with SqliteStore(path) as store:
        asyncio.run(resumed(store))


def test_a_trigger_of_ours_that_was_weakened_is_foreign(path: Path) -> None:
    weak = "CREATE TRIGGER journal_loses_nothing BEFORE DELETE ON journal BEGIN SELECT 1; END"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(f"DROP TRIGGER IF EXISTS journal_loses_nothing; {weak};")
    with SqliteStore(path) as store, pytest.raises(StoreFormatError, match="journal_loses_nothing on journal"):
        store.claim()


def test_an_id_that_changed_its_type_hides_no_other_run(path: Path) -> None:
    forge(
        path,
        "UPDATE run SET run_id = CAST(run_id AS BLOB) WHERE run_id = 'whole'",
        "UPDATE journal SET body = replace(body, 'tried', 'trial') WHERE key = (3 << 32 | 2)",
    )
    result = run_command("verify", "--store", path)
    assert result.exit_code == 1
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["good,", "TAMPERED", "TAMPERED", "2)"]
    for words, totals in ((["replay"], 1), (["replay", "--json"], 1), (["runs"], 0), (["runs", "--json"], 0)):
        assert len(run_command(*words, "--store", path).stdout.splitlines()) == 3 + totals, words


def test_a_deleted_run_is_found_by_its_records(path: Path) -> None:
    forge(path, "DELETE FROM run WHERE run_id = 'whole'")
    assert found(path) == {"whole": (None, "the store has its records, and the run is missing")}


def test_a_run_deleted_with_its_records_is_found_by_its_number(path: Path) -> None:
    forge(path, "DELETE FROM run WHERE run_id = 'whole'", "DELETE FROM journal WHERE key >> 32 = 2")
    assert found(path) == {"(run 2)": (None, "it was deleted with its records")}


def test_a_record_before_the_first_is_found(path: Path) -> None:
    forge(path, f"INSERT INTO journal VALUES ({2 << 32}, '{{}}', zeroblob(32), NULL, NULL)")
    assert list(found(path)) == ["(run 2)"]


@pytest.mark.parametrize("more", [" ", ",", "null", "]", '["00",1]', " tail"])
def test_nothing_can_be_appended_to_hidden_values(path: Path, more: str) -> None:
    forge(path, f"UPDATE journal SET hidden = hidden || '{more}' {at(RECORD)}")
    assert found(path)["whole"][0] == RECORD


@pytest.mark.parametrize(
    ("old", "new"),
    [('"],["', '"]["'), ('"],["', '"},["'), ("[[", "[,["), ("[[", "x["), ("[[", "[[ "), ('",', '", '), ("]]", "]}")],
)
def test_hidden_values_have_only_one_format(path: Path, old: str, new: str) -> None:
    forge(path, f"UPDATE journal SET hidden = replace(hidden, '{old}', '{new}') {at(1)}")
    assert found(path)["whole"][0] == 1


def test_a_missing_value_is_reported_with_its_record(path: Path) -> None:
    forge(path, f"UPDATE journal SET hidden = '[null]' {at(RECORD)}")
    assert found(path)["whole"][0] == RECORD


def test_a_record_that_is_not_text_is_reported_and_hides_no_other_run(path: Path) -> None:
    forge(path, f"UPDATE journal SET body = x'ff00' {at(RECORD)}", "DELETE FROM run WHERE run_id = 'first'")
    assert {run: seq for run, (seq, _) in found(path).items()} == {
        "whole": RECORD,
        "first": None,
        "(run 2)": RECORD,
    }


@pytest.mark.parametrize("column", ["body", "hidden"])
@pytest.mark.parametrize("text", ["{", "[]", "{}", "5", '"x"', "null", "", '{"kind":"transition"}', "[null]"])
@pytest.mark.parametrize("record", [1, RECORD])
def test_every_command_handles_an_invalid_record(path: Path, column: str, text: str, record: int) -> None:
    forge(path, f"UPDATE journal SET {column} = '{text}' {at(record)}")
    assert found(path)["whole"][0] == record
    for words in (["show", "whole"], ["show", "whole", "--json"], ["replay"], ["replay", "--json"], ["runs"]):
        result = run_command(*words, "--store", path)
        assert "internal error" not in result.output
        if words[0] != "show" or column == "body":  # what stands beside a record may be gone, and it is shown so
            assert result.exit_code == (0 if words == ["runs"] else 1), (words, result.output)
    assert len(run_command("replay", "--store", path).stdout.splitlines()) == 3 + 1  # and the totals
    refused = run_command("fork", "whole", "--at", 6, "--store", path)
    assert (refused.exit_code, f"record {record}" in refused.output) == (2, True), refused.output


def test_show_continues_after_an_unreadable_record(path: Path) -> None:
    count = len(run_command("show", "whole", "--store", path).stdout.splitlines()) - 1  # without the sum of its costs
    records = count - 1  # without its line of agentfsm runs
    forge(path, f"UPDATE journal SET body = '{{' {at(RECORD)}")
    result = run_command("show", "whole", "--store", path)
    lines = result.stdout.splitlines()
    assert len(lines) == count
    assert f"record {RECORD} cannot be read" in lines[RECORD]
    assert "agentfsm verify whole" in result.stderr
    as_json = run_command("show", "whole", "--json", "--store", path).stdout.splitlines()
    assert [json.loads(line)["seq"] for line in as_json] == list(range(1, records + 1))


def test_runs_lists_a_run_with_an_unreadable_request(path: Path) -> None:
    asks = f"WHERE key = {3 << 32} + (SELECT seq FROM run WHERE run_id = 'waits')"
    forge(path, f'UPDATE journal SET body = \'{{"kind":"run.suspended"}}\' {asks}')
    result = run_command("runs", "--store", path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["waits", "whole", "first"]
    assert "cannot be read" in lines[0]
    assert "error" in json.loads(run_command("runs", "--json", "--store", path).stdout.splitlines()[0])


@pytest.mark.parametrize(
    ("statement", "words", "code"),
    [
        ("PRAGMA user_version = 99", "schema version 99", 3),
        ("PRAGMA application_id = 7", "another program", 3),
        ("DROP TABLE journal", "no such table", 1),
        ("DROP TABLE run", "no such table", 1),
    ],
)
def test_an_uncheckable_file_is_neither_good_nor_wrong_usage(path: Path, statement: str, words: str, code: int) -> None:
    forge(path, statement)
    result = run_command("verify", "--store", path)
    assert result.exit_code == code
    assert words in result.output


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        (["DROP TRIGGER journal_loses_nothing"], "trigger journal_loses_nothing"),
        (["CREATE TRIGGER more AFTER INSERT ON run BEGIN SELECT 1; END"], "trigger more"),
        (["CREATE TABLE more (x)"], "table more"),
        (["CREATE INDEX more ON run (hash)"], "index more"),
        (["CREATE VIEW more AS SELECT 1"], "view more"),
        (["ALTER TABLE run ADD COLUMN more"], "table run"),
        (["ALTER TABLE run RENAME TO kept", "CREATE VIEW run AS SELECT * FROM kept"], "view run"),
        (["PRAGMA user_version = 0"], "schema version is 0"),
        (["PRAGMA user_version = 1"], "table journal"),
    ],
)
def test_a_changed_schema_is_found(path: Path, statements: list[str], named: str) -> None:
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    for words in ([], ["whole"]):  # also if only one run is verified
        assert named in found(path, *words)["(schema)"][1]


def test_a_store_of_an_earlier_release_has_its_own_schema_and_one_that_was_migrated_too(tmp_path: Path) -> None:
    path = Path(shutil.copy(V_0_1_0, tmp_path / "runs.db"))
    assert "(schema)" not in run_command("verify", "--store", path).stdout
    with SqliteStore(path) as store:
        finished_run(store, "new")
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    db.execute("ANALYZE")  # statistics of the user's are no change
    db.commit()
    db.close()
    assert "(schema)" not in run_command("verify", "--store", path).stdout


def test_a_file_that_is_not_a_database_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "runs.db").write_text("This is a letter, and no database at all.\n" * 40)
    result = run_command("verify", "--store", tmp_path / "runs.db")
    assert result.exit_code == 3
    assert "is not a SQLite database" in result.stderr


def test_an_empty_store_is_reported(tmp_path: Path) -> None:
    (tmp_path / "runs.db").touch()
    for words in (["verify"], ["runs"]):
        result = run_command(*words, "--store", tmp_path / "runs.db")
        assert (result.exit_code, result.stdout) == (0, "")
        assert "there is no run" in result.stderr
    unchecked = run_command("verify", "--store", tmp_path / "runs.db").stderr
    assert "without a checkpoint: whether records or runs were cut off" in unchecked


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def replaced(path: Path) -> None:
    path.unlink()
    with SqliteStore(path) as store:
        store.claim()


def without_tables(path: Path) -> None:
    forge(path, "DROP TABLE journal", "DROP TABLE run")


@pytest.mark.parametrize("clear", [emptied, replaced, without_tables])
def test_a_store_that_has_lost_everything_is_not_good(
    path: Path, tmp_path: Path, clear: Callable[[Path], None]
) -> None:
    private = ed25519.Ed25519PrivateKey.generate()
    key, public, note = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "note"
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    note.write_text(run_command("checkpoint", "--key", key, "--store", path).stdout, "utf-8")
    clear(path)
    assert {"first", "whole", "waits"} <= found(path, "--checkpoint", str(note), "--key", str(public)).keys()
    assert run_command("checkpoint", "--key", key, "--store", path).exit_code == 1
    with_secret = run_command("verify", "--store", path, secret="of the tests")
    assert with_secret.exit_code == (1 if clear is without_tables else 3)
    assert "only a checkpoint can tell whether there was one" in with_secret.stdout
    without = run_command("verify", "--store", path)
    assert without.exit_code == (1 if clear is without_tables else 0)
    assert "there is no run in" in without.stderr
    assert "no suspended run" in run_command("runs", "--status", "suspended", "--store", tmp_path / "runs.db").stderr


# -- an exported journal ------------------------------------------------------------------------------


@pytest.fixture
def export(path: Path) -> list[str]:
    return run_command("export", "whole", "--store", path).stdout.splitlines(keepends=True)


def of_file(tmp_path: Path, content: bytes, *words: object) -> Result:
    file = tmp_path / "run.jsonl"
    file.write_bytes(content)
    return run_command("verify", "--file", file, *words)


def test_an_invalid_line_is_tampering_and_an_invalid_file_is_not(tmp_path: Path, export: list[str]) -> None:
    for content in (b"", b"Dear Ann,\n", b"\x1f\x8b\x08\xff\xfe" * 9, b"\xef\xbb\xbf" + "".join(export).encode()):
        result = of_file(tmp_path, content)
        assert result.exit_code == 3, result.output
        assert "not a line of an exported journal" in result.stderr
    for line in ("", "{}", export[3][:-9], "# a remark"):
        result = of_file(tmp_path, "".join([*export[:3], line + "\n", *export[4:]]).encode())
        assert (result.exit_code, "record 4" in result.stdout) == (1, True), result.output


def test_invalid_utf8_is_reported_with_its_record(tmp_path: Path, export: list[str]) -> None:
    content = (
        "".join(export[:3]).encode()
        + export[3].encode().replace(b"transition", b"trans\xfftion")
        + b"".join(line.encode() for line in export[4:])
    )
    result = of_file(tmp_path, content)
    assert (result.exit_code, "TAMPERED" in result.stdout, "record 4" in result.stdout) == (1, True, True)


def test_file_takes_no_run_id(tmp_path: Path, export: list[str]) -> None:
    result = of_file(tmp_path, "".join(export).encode(), "another")
    assert result.exit_code == 2
    assert "--file" in result.stderr


def test_a_run_id_is_printed_on_one_line(path: Path) -> None:
    for bad in ("", " ", "a\nb", "\x1b[2J"):
        assert run_command("fork", "whole", "--at", 3, "--as", bad, "--store", path).exit_code == 2
    forge(path, "UPDATE run SET run_id = 'a' || char(10) || char(27) || 'b' WHERE run_id = 'whole'")
    for words, totals in ((["runs"], 0), (["verify"], 0), (["replay"], 1)):
        shown = run_command(*words, "--store", path).stdout
        assert "\x1b" not in shown
        assert len(shown.splitlines()) == 3 + totals


def test_replay_as_json(path: Path) -> None:
    lines = [json.loads(line) for line in run_command("replay", "--json", "--store", path).stdout.splitlines()]
    *reports, totals = lines
    assert [(each["run_id"], each["same"], each["divergences"]) for each in reports] == [
        ("first", True, []), ("whole", True, []), ("waits", True, []),
    ]  # fmt: skip
    assert totals["totals"]["end_differently"] == 0
    result = run_command("replay", "whole", "--json", "--guardrails", '{"max_iterations": 1}', "--store", path)
    (elsewhere,) = [json.loads(line) for line in result.stdout.splitlines()][:1]
    assert result.exit_code == 1
    assert elsewhere["divergences"][0]["instead"] == "pre_step.iteration_limit -> recover"


def test_a_field_without_a_number_is_wrong_usage(path: Path) -> None:
    for field in ("²", "x", "0", "99", ""):
        assert run_command("redact", "whole", field, "--store", path).exit_code == 2


def test_show_prints_the_calls_of_the_model(path: Path) -> None:
    shown = run_command("show", "whole", "--store", path).stdout
    assert 'add {"a": 1, "b": 2}' in shown
    assert "all done" in shown


# -- what else a store can tell -----------------------------------------------------------------------


def test_a_fork_with_another_parent_hash_is_found(path: Path) -> None:
    run_command("fork", "whole", "--at", 6, "--as", "forked", "--store", path)
    assert "forked" not in found(path, code=4)
    store = SqliteStore(path)
    (first, *_), others = asyncio.run(store.records("forked")), asyncio.run(store.records("first"))
    store.close()
    unpack_rows(path)
    parent = json.loads(first.body)["parent"]
    body = first.body.replace(parent["hash"], others[5].hash)
    forged = record_hash(GENESIS_HASH, body)
    forge(
        path,
        f"UPDATE journal SET body = '{body.replace(chr(39), chr(39) * 2)}', hash = x'{forged}' {at(1, 4)}",
        f"UPDATE run SET hash = x'{forged}' WHERE run_id = 'forked'",
    )
    assert found(path, "forked") == {
        "forked": (1, "it was forked from record 6 of run whole, and that record has another hash")
    }
    db = sqlite3.connect(path)
    db.execute("DELETE FROM run WHERE run_id = 'whole'")  # a parent that is elsewhere proves nothing
    db.commit()
    db.close()
    assert found(path, "forked", code=4) == {}


def test_redact_warns_if_another_program_still_reads_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfsm.journal.sqlite.sqlite_schema.BUSY_TIMEOUT_S", 0.05)
    forge(path, "PRAGMA journal_mode = WAL")
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM journal").fetchone()
    result = run_command("redact", "whole", "4", "--store", path)
    assert (result.exit_code, result.stdout) == (0, "1 value deleted\n")
    assert "another program has the store open" in result.stderr
    reader.execute("COMMIT")
    reader.close()
    result = run_command("redact", "whole", "1", "--store", path)
    assert (result.exit_code, result.stderr) == (0, "")
