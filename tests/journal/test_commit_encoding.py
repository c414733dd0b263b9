"""The records of a commit as one row: they come back as they were, an edit of a row is found, and a row is small."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, AgentGuardrails, Allow, Host, SqliteStore, Store, StoreError, open_store, tool
from agentfsm.journal.commit_encoding import (
    DICTIONARY,
    MAX_BODY_BYTES,
    JournalRow,
    decode_rows,
    encode_commit,
    replace_hidden,
)
from agentfsm.journal.hash_chain import (
    GENESIS_HASH,
    HashChainVerifier,
    InvalidRecordError,
    RecordSealer,
    commitment,
    record_hash,
)
from agentfsm.journal.records import VOUCHED_BY_NEXT, SealedRecord
from agentfsm.journal.redact import redact
from agentfsm.journal.sqlite.sqlite_schema import SCHEMA_VERSION
from agentfsm.journal.verification import GOOD, OPEN, verify_stored_run
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import commits
from tests.helpers.journal_scenarios import finished_run, sample_agent

DATA = Path(__file__).parents[1] / "data"
KEYRING = Keyring(b"of the tests")


def written(bodies: Sequence[tuple[str, str]], keyring: Keyring | None = KEYRING, after: int = 0) -> list[SealedRecord]:
    """The records of one commit, from bodies with hidden values."""
    texts = [(body.replace("SEQ", str(seq)), hidden) for seq, (body, hidden) in enumerate(bodies, after + 1)]
    return RecordSealer(None if keyring is None else keyring.current).seal_commit(after + 1, texts, GENESIS_HASH)


def hiding(*values: Any, kind: str = "note", salts: int = 16) -> tuple[str, str]:
    """A body that commits to values, and the values; None for a redacted one."""
    places, hidden = list[str](), list[str]()
    for place, value in enumerate(values):
        salt, text = os.urandom(salts), json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        places.append(f'{{"#":[{place},"{commitment(salt, text)}"]}}')
        hidden.append("null" if value is None else f'["{salt.hex()}",{text}]')
    return f'{{"kind":"{kind}","of":[{",".join(places)}],"seq":SEQ,"ts":1}}', f"[{','.join(hidden)}]"


IN_CAPITALS = hiding("a")


@tool
def repeat(text: str) -> str:
    """Repeat a text."""
    return text


@pytest.fixture(scope="module")
def run_commits() -> list[list[SealedRecord]]:
    """The commits of a run with everything in it."""
    store, _ = finished_run()
    return list(commits(asyncio.run(store.records("sample"))))


VALUES = st.none() | st.text(max_size=20) | st.integers() | st.lists(st.text(max_size=5), max_size=3)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PLAIN = st.tuples(TEXTS | TEXTS.map(lambda text: f'{{"seq":SEQ,"x":"{text}"}}'), st.just("") | TEXTS)
HIDING = st.lists(VALUES, min_size=1, max_size=4).map(lambda values: hiding(*values))
SHORT_SALT = VALUES.map(lambda value: hiding(value, salts=1))
RECORDS = st.lists(PLAIN | HIDING | HIDING | SHORT_SALT, min_size=1, max_size=6)


@given(RECORDS, st.booleans(), st.integers(0, 3), st.integers(0, 12))
def test_whatever_records_are_written_come_back_as_they_were(
    bodies: list[tuple[str, str]], has_macs: bool, before: int, after: int
) -> None:
    first = written([("x", "")] * before)
    more = written(bodies, KEYRING if has_macs else None, before)
    chained, previous = list[SealedRecord](), first[-1].hash if first else GENESIS_HASH
    for record in more:
        previous = record_hash(previous, record.body)
        chained.append(record._replace(hash=previous))
    rows = [*encode_commit(first), *encode_commit(chained)]
    assert decode_rows(rows, GENESIS_HASH) == [*first, *chained]
    wanted = [row for row in rows if row.seq > after]
    known = [row.hash for row in rows if row.seq <= after]
    found = decode_rows(wanted, known[-1] if known else GENESIS_HASH, after)
    assert found == [record for record in [*first, *chained] if record.seq > after]


@given(st.lists(HIDING, min_size=1, max_size=5))
def test_records_as_this_package_writes_them_are_one_row(bodies: list[tuple[str, str]]) -> None:
    (row,) = encode_commit(written(bodies))
    assert isinstance(row.body, bytes)


def test_each_commit_of_a_run_is_one_row_with_one_mac(run_commits: list[list[SealedRecord]]) -> None:
    previous = GENESIS_HASH
    for commit in run_commits:
        (row,) = encode_commit(commit)
        assert decode_rows([row], previous) == commit
        assert (row.seq, row.hash, row.mac) == (commit[-1].seq, commit[-1].hash, commit[-1].mac)
        assert [record.mac for record in commit[:-1]] == [VOUCHED_BY_NEXT] * (len(commit) - 1)
        previous = row.hash
    assert max(map(len, run_commits)) > 3


@pytest.mark.parametrize(
    ("bodies", "why"),
    [
        ([('{"seq":SEQ,"x":"\n"}', "")], "a character that no JSON has"),
        ([('{"seq":SEQ,"x":"\1"}', "")], "the mark of a number"),
        ([('{"x":1}', "")], "no number"),
        ([hiding("a", salts=8)], "a salt of another length"),
        ([(hiding("a")[0], hiding("b")[1])], "a value that it does not commit to"),
        ([(hiding("a")[0], "")], "no value"),
        ([('{"seq":SEQ}', '[["00","a"]]')], "no commitment"),
        ([(IN_CAPITALS[0], f"{IN_CAPITALS[1][:35].upper()}{IN_CAPITALS[1][35:]}")], "another notation of the salt"),
        ([(f'{{"seq":SEQ,"x":"{"ab" * (MAX_BODY_BYTES // 2)}"}}', "")], "too much"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_other_records_are_rows_of_their_own(bodies: list[tuple[str, str]], why: str) -> None:
    records = written([*bodies, ('{"seq":SEQ}', "")])
    rows = encode_commit(records)
    assert [(row.seq, row.body, row.mac) for row in rows] == [
        (1, records[0].body, ""),
        (2, '{"seq":2}', records[1].mac),
    ]
    assert decode_rows(rows, GENESIS_HASH) == records


def test_a_record_with_a_mac_of_its_own_among_others_keeps_it() -> None:
    records = written([("{SEQ}", ""), ('{"seq":SEQ}', "")])
    own = RecordSealer(KEYRING.current).seal(1, records[0].body, GENESIS_HASH)
    rows = encode_commit([own, records[1]])
    assert len(rows) == 2
    assert decode_rows(rows, GENESIS_HASH) == [own, records[1]]


def passes(records: Sequence[SealedRecord], previous: str, seq: int) -> bool:
    chain = HashChainVerifier()
    chain.hash = previous
    try:
        for expected, record in enumerate(records, seq):
            chain.verify_record(record, expected)
    except (InvalidRecordError, ValueError, KeyError):
        return False
    return True


def test_every_changed_bit_of_a_row_is_found_unless_the_records_are_the_same(
    run_commits: list[list[SealedRecord]],
) -> None:
    before, commit = run_commits[1][-1].hash, run_commits[2]
    (row,) = encode_commit(commit)
    assert isinstance(row.body, bytes)
    assert isinstance(row.hidden, bytes)
    without_effect = 0
    for column, data in (("body", row.body), ("hidden", row.hidden)):
        for place in range(len(data)):
            for bit in range(8):
                changed = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
                found = decode_rows([row._replace(**{column: changed})], before)
                without_effect += found == commit
                assert found == commit or not passes(found, before, commit[0].seq), (column, place, bit)
    assert without_effect < 20  # such as bits after the end of the compressed data


@pytest.mark.parametrize("column", ["body", "hidden"])
def test_what_is_cut_off_or_added_is_found(run_commits: list[list[SealedRecord]], column: str) -> None:
    before, commit = run_commits[1][-1].hash, run_commits[2]
    (row,) = encode_commit(commit)
    data = getattr(row, column)
    for changed in (data[:-1], data[:1], b"", None, data + b"\0", data + data, data.hex(), 7, b"\2" + data[1:]):
        found = decode_rows([row._replace(**{column: changed})], before)
        assert not passes(found, before, commit[0].seq), changed


def test_a_row_that_cannot_be_read_does_not_hide_the_others(run_commits: list[list[SealedRecord]]) -> None:
    rows = [row for commit in run_commits for row in encode_commit(commit)]
    rows[2] = rows[2]._replace(body=b"\7")
    records = decode_rows(rows, GENESIS_HASH)
    first = run_commits[2][0].seq
    assert [(each.seq, each.body) for each in records[first - 1 : first]] == [(first, "")]
    assert records[first:] == [record for commit in run_commits[3:] for record in commit]


def test_a_row_that_would_become_gigabytes_is_not_read() -> None:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -12, 5, zdict=DICTIONARY)
    packed = b"\1" + b"".join(compressor.compress(bytes(1 << 20)) for _ in range(64)) + compressor.flush()
    assert len(packed) < MAX_BODY_BYTES / 100
    assert [record.body for record in decode_rows([JournalRow(1, packed, GENESIS_HASH)], GENESIS_HASH)] == [""]


# -- redaction ----------------------------------------------------------------------------------------------


def test_a_redacted_value_is_in_no_byte_of_its_row_and_the_others_stay() -> None:
    records = written([hiding("the first secret", "kept"), hiding("the second", None), ('{"seq":SEQ}', "")])
    (row,) = encode_commit(records)
    kept = json.loads(records[0].hidden)[1]
    hidden = f"[null,{json.dumps(kept, separators=(',', ':'))}]"
    (after,) = [row._replace(hidden=replace_hidden(row, 1, hidden))]
    assert decode_rows([after], GENESIS_HASH) == [records[0]._replace(hidden=hidden), *records[1:]]
    salt = bytes.fromhex(json.loads(records[0].hidden)[0][0])
    assert isinstance(after.hidden, bytes)
    assert not any(each in after.hidden for each in (b"the first secret", salt))
    assert b"kept" in after.hidden
    gone = replace_hidden(after, 2, "[null,null]")
    assert decode_rows([after._replace(hidden=gone)], GENESIS_HASH)[1] == records[1]._replace(hidden="[null,null]")


def test_a_value_that_stands_twice_is_stored_once_and_stays_where_it_was_not_redacted() -> None:
    long = "x1y2" * 50
    records = written([hiding(long), hiding("other", long), hiding(long)])
    (row,) = encode_commit(records)
    assert isinstance(row.hidden, bytes)
    assert row.hidden.count(long.encode()) == 1
    once = replace_hidden(row, 1, "[null]")
    assert decode_rows([row._replace(hidden=once)], GENESIS_HASH) == [
        records[0]._replace(hidden="[null]"),
        *records[1:],
    ]
    row = row._replace(hidden=once)
    for seq, hidden in ((2, "[null,null]"), (3, "[null]")):
        row = row._replace(hidden=replace_hidden(row, seq, hidden))
    assert isinstance(row.hidden, bytes)
    assert long.encode() not in row.hidden


@pytest.mark.parametrize("hidden", ["", "[]", "[null,null]", '[["00","b"]]', "x"])
def test_hidden_values_that_are_not_those_of_the_record_are_refused(hidden: str) -> None:
    (row,) = encode_commit(written([hiding("a")]))
    with pytest.raises(StoreError, match="cannot be redacted"):
        replace_hidden(row, 1, hidden)
    with pytest.raises(StoreError, match="cannot be redacted"):
        replace_hidden(row._replace(body=b"\7"), 1, "[null]")


def test_a_single_record_keeps_what_it_is_given() -> None:
    assert replace_hidden(JournalRow(1, "{}", GENESIS_HASH), 1, "[null]") == "[null]"


# -- the dictionary -----------------------------------------------------------------------------------------


DIGEST_OF_1 = "43877fb7eea1649cdd4f8ea7810a53711aad650d63e238c129e8dc02937622d2"


def test_the_dictionary_never_changes() -> None:
    """Rows of stores name it by its number; a better one gets another number."""
    assert sha256(DICTIONARY).hexdigest() == DIGEST_OF_1


def test_the_dictionary_is_small_and_has_no_value_of_anybody() -> None:
    text = DICTIONARY.decode()
    assert len(DICTIONARY) <= (1 << 12) - 262  # how far the compression looks back
    assert set("".join(re.findall(r"[0-9a-f]{16,}", text))) <= {
        "0",
        "1",
    }  # no salt, digest or id, but verdicts of guards
    assert set(re.findall(r'"(?:name|tool|call_id|id)":"([^"]*)', text)) <= {"", "a", "call_1"}


# -- stores -------------------------------------------------------------------------------------------------


def test_a_file_of_schema_5_is_read_as_it_was_and_goes_on_with_rows_of_commits(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "schema5" / "runs.db", tmp_path / "runs.db"))

    def rows() -> list[tuple[str, str]]:
        with closing(sqlite3.connect(path)) as db:
            return db.execute("SELECT typeof(body), hex(body) FROM journal WHERE key >> 32 = 2 ORDER BY key").fetchall()

    async def go_on() -> None:
        async with SqliteStore(path) as store:
            old = await store.records("waits")
            for run_id, code in (("finished", GOOD), ("waits", OPEN)):
                assert (await verify_stored_run(store, run_id, keyring=KEYRING)).code == code
            assert (await sample_agent(store, ["done"]).resume("waits", Allow())).ok
            await redact(store, "waits", "1.messages.0.content", KEYRING)
            await redact(store, "waits", f"{len(old) + 4}.out.content", KEYRING)
            new = await store.records("waits")
            assert new[1 : len(old)] == old[1:]
            assert await store.records("waits", after=len(old) + 2) == new[len(old) + 2 :]
            assert (await verify_stored_run(store, "waits", keyring=KEYRING)).code == GOOD
            assert await store.maintenance.schema_damage() == await store.maintenance.row_damage() == []

    before = rows()
    asyncio.run(go_on())
    after = rows()
    assert after[: len(before)] == before
    assert {kind for kind, _ in before} == {"text"}
    assert {kind for kind, _ in after[len(before) :]} == {"blob"}
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


ROW_BYTES = 20
"""What SQLite adds to a row: its key, its length, the types of its columns, and its place on the page."""


async def repeat_texts(store: Store, chars: int, steps: int) -> int:
    """Run an agent whose tool repeats a text at each step; returns the size of the text of a step."""
    text = "".join(chr(97 + n * n % 26) for n in range(chars))
    script = [call("repeat", text=f"{n} {text}") for n in range(steps)]
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests")
    limits = AgentGuardrails(max_iterations=steps + 1, max_steps=200)
    await Agent(ScriptedModel([*script, "done"]), tools=[repeat], guardrails=limits, host=host).run("go")
    return len(json.dumps({"text": f"1 {text}"}) + f"1 {text}")


@pytest.mark.parametrize(("chars", "ratio"), [(130, 2.5), (2500, 1.2)])
def test_a_step_takes_at_most_so_many_times_the_text_of_its_arguments_and_results(
    tmp_path: Path, chars: int, ratio: float
) -> None:
    steps = 20
    with SqliteStore(tmp_path / "runs.db") as store:
        text = asyncio.run(repeat_texts(store, chars, steps))
    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        sums = "total(length(body) + ifnull(length(hidden), 0) + length(hash) + length(mac)), count(*)"
        content, rows = db.execute(f"SELECT {sums} FROM journal WHERE key & 4294967295 > 3").fetchone()
    assert rows == 2 * steps + 1
    assert (content + ROW_BYTES * rows) / steps <= ratio * text


POINTER_BYTES, INDEX_BYTES = 4, 21
"""What a PostgreSQL server keeps of a row besides the row itself: on its page, and in the index by run and number."""


def test_on_a_server_a_step_takes_so_much_too_and_a_little_for_the_index(database: str) -> None:
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
    steps = 20

    async def live() -> int:
        async with open_store(database) as store:
            return await repeat_texts(store, 130, steps)

    text = asyncio.run(live())
    with psycopg.connect(database) as db:
        sums = f"sum(pg_column_size(journal) + {POINTER_BYTES}), count(*)"
        content, rows = db.execute(f"SELECT {sums} FROM agentfsm.journal WHERE seq > 3").fetchone()
    assert rows == 2 * steps + 1
    assert (content + INDEX_BYTES * rows) / steps <= 2.5 * text


def test_an_argument_that_waits_for_approval_is_stored_once(tmp_path: Path) -> None:
    note = "a note that is long enough to be found" * 20
    with SqliteStore(tmp_path / "runs.db") as store:
        agent = sample_agent(store, [call("pay", to=note, amount=1.0)])

        async def live() -> Any:
            return await agent.run("Pay.", run_id="r")

        asyncio.run(live())
        records = asyncio.run(store.records("r"))
    assert sum(record.hidden.count(note) for record in records) == 3  # the reply, the request, and its record
    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        hidden = b"".join(each for (each,) in db.execute("SELECT hidden FROM journal WHERE hidden IS NOT NULL"))
    assert hidden.count(note.encode()) == 1
