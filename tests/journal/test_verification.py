"""Verification: our verifier and the stand-alone one detect every change of a journal."""

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from agentfsm import MemoryStore, SqliteStore
from agentfsm.errors import JournalError, StaleLease, UnknownRunError
from agentfsm.journal.records import SealedRecord, export_lines, read_lines
from agentfsm.journal.redact import redact
from agentfsm.journal.store import Head
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, verify
from agentfsm.loop.keys import Keyring
from tests.helpers.journal_scenarios import finished_run, reseal, sample_agent, waiting_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "verify_journal.py"

KEYRING = Keyring(b"of the tests")


def independent(rows: list[SealedRecord]) -> str | None:
    spec = importlib.util.spec_from_file_location("verify_journal", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.verify(list(export_lines(rows)))


@pytest.fixture(scope="module")
def whole() -> list[SealedRecord]:
    store, _ = finished_run()
    return asyncio.run(store.records("sample"))


def head_of(rows: list[SealedRecord]) -> Head:
    return Head("sample", 2, None, len(rows), rows[-1].hash, "finished")


def found(rows: list[SealedRecord], head: Head | None = None) -> int:
    """The record that our verifier names; the independent one finds what does not need the head too."""
    report = verify("sample", rows, head)
    assert report.code == TAMPERED, report
    assert report.run_id == "sample"
    assert report.reason
    if head is None:
        assert independent(rows) is not None, report
    return report.seq


def test_an_untouched_journal_is_good(whole):
    report = verify("sample", whole, head_of(whole))
    assert (report.code, report.records, report.open) == (GOOD, len(whole), ())
    assert independent(whole) is None


def test_a_waiting_run_is_good_and_open():
    store, _ = waiting_run()
    report = verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample")))
    assert (report.code, report.open) == (OPEN, ("waits for a human reply (approval)",))


@pytest.mark.slow
def test_every_edit_of_a_body_is_found_at_its_record(whole):
    for place, row in enumerate(whole):
        for at in range(0, len(row.body), max(1, len(row.body) // 7)):
            body = row.body[:at] + chr(ord(row.body[at]) ^ 1) + row.body[at + 1 :]
            assert found([*whole[:place], row._replace(body=body), *whole[place + 1 :]]) == place + 1


def test_an_edit_with_a_recomputed_hash_is_found_at_the_next_record(whole):
    for place in range(len(whole) - 1):
        edited = whole[place]._replace(body=whole[place].body.replace('"ts":1', '"ts":2'))
        forged = reseal([*whole[:place], edited], place)
        assert found([*forged, *whole[place + 1 :]]) == place + 2
    last = whole[-1]._replace(body=whole[-1].body.replace('"ts":1', '"ts":2'))
    forged = reseal([*whole[:-1], last], len(whole) - 1)
    assert found(forged, head_of(whole)) == len(whole)  # the store's own note does not fit


@pytest.mark.slow
def test_every_deletion_swap_and_insertion_is_found(whole):
    for place in range(len(whole) - 1):
        assert found([*whole[:place], *whole[place + 1 :]]) == place + 1
        renumbered = [r._replace(seq=n) for n, r in enumerate([*whole[:place], *whole[place + 1 :]], 1)]
        assert found(renumbered) == place + 1
        swapped = [*whole[:place], whole[place + 1], whole[place], *whole[place + 2 :]]
        assert found(swapped) == place + 1
        assert found([r._replace(seq=n) for n, r in enumerate(swapped, 1)]) == place + 1
        twice = [*whole[: place + 1], whole[place], *whole[place + 1 :]]
        assert found([r._replace(seq=n) for n, r in enumerate(twice, 1)]) == place + 2


def test_a_changed_hash_is_found_at_its_record(whole):
    for place, row in enumerate(whole):
        forged = row._replace(hash=("0" if row.hash[0] != "0" else "1") + row.hash[1:])
        assert found([*whole[:place], forged, *whole[place + 1 :]]) == place + 1


def test_truncation_is_found_with_the_head_or_a_checkpoint(whole):
    for length in range(1, len(whole)):
        cut = whole[:length]
        assert found(cut, head_of(whole)) == length
        sealed = {len(whole): whole[-1].hash}
        report = verify("sample", cut, head_of(cut), sealed)
        assert report.code == TAMPERED
        assert "was truncated" in report.reason


def test_a_rewritten_journal_is_found_with_a_checkpoint(whole):
    place = max(n for n, r in enumerate(whole) if '"name":"scripted"' in r.body)  # behind the person's answer
    edited = whole[place]._replace(body=whole[place].body.replace('"name":"scripted"', '"name":"another"'))
    forged = reseal([*whole[:place], edited, *whole[place + 1 :]], place)
    assert verify("sample", forged, head_of(forged)).code == GOOD  # nothing inside can tell
    report = verify("sample", forged, head_of(forged), {len(whole): whole[-1].hash})
    assert (report.code, report.seq) == (TAMPERED, len(whole))
    assert "was rewritten" in report.reason


def rewritten(whole: list[SealedRecord], kind: str, old: str, new: str, nth: int = 0) -> tuple[list[SealedRecord], int]:
    places = [n for n, r in enumerate(whole) if f'"kind":"{kind}"' in r.body and re.search(old, r.body)]
    place = places[nth]
    edited = whole[place]._replace(body=re.sub(old, new, whole[place].body))
    return reseal([*whole[:place], edited, *whole[place + 1 :]], place), place + 1


@pytest.mark.parametrize(
    ("kind", "old", "new", "words"),
    [
        (
            "transition",
            '"transition":"pre_step.otherwise"',
            '"transition":"pre_step.nobody"',
            "is not a row of the pinned",
        ),
        ("transition", '"to":"call_llm"', '"to":"terminal"', "leads to 'call_llm'"),
        ("transition", '"tried":"0', '"tried":"1', "needs the guards"),
        ("transition", '"transition":"post_llm.tool_calls"', '"transition":"pre_step.otherwise"', "is not possible in"),
        ("run.created", '"approval_required"', '"approval_forgotten"', "does not match its fingerprint"),
        ("run.created", '"run":"sample"', '"run":"another"', "belongs to run 'another'"),
        ("effect.intent", '"eid":"1.0"', '"eid":"9.9"', "no record says that it was started"),
        ("effect.result", '"eid":"1.0"', '"eid":"9.9"', "no record says that it was started"),
        ("run.finished", '"kind":"run.finished"', '"kind":"run.suspended"', "not a waiting state"),
        ("run.resumed", '"epoch":2', '"epoch":0', "in epoch 0"),
        ("transition", '"epoch":1', '"epoch":7', "in epoch 7"),
        ("effect.intent", '"kind":"effect.intent"', '"kind":"effect.wish"', "unknown kind of record"),
    ],
)
def test_an_illegal_history_is_found_despite_valid_hashes(whole, kind, old, new, words):
    forged, _ = rewritten(whole, kind, old, new)
    report = verify("sample", forged, head_of(forged))
    assert report.code == TAMPERED
    assert words in report.reason


def test_a_missing_transition_is_found_despite_valid_hashes(whole):
    moves = [n for n, r in enumerate(whole) if '"kind":"transition"' in r.body]
    for place in moves[:-1]:
        rest = [
            r._replace(seq=r.seq - 1, body=r.body.replace(f'"seq":{r.seq}', f'"seq":{r.seq - 1}'))
            for r in whole[place + 1 :]
        ]
        forged = reseal([*whole[:place], *rest], place)
        assert found(forged)


def test_a_changed_or_missing_hidden_value_is_found(whole):
    for place, row in enumerate(whole):
        if not row.hidden:
            assert found_at(whole, place, '[["00","x"]]') == place + 1
            continue
        hidden_values = json.loads(row.hidden)
        for n, (salt, value) in enumerate(hidden_values):
            changed = [*hidden_values[:n], [salt, "other" if value != "other" else "x"], *hidden_values[n + 1 :]]
            assert found_at(whole, place, json.dumps(changed, separators=(",", ":"))) == place + 1
            gone = [*hidden_values[:n], None, *hidden_values[n + 1 :]]
            assert found_at(whole, place, json.dumps(gone, separators=(",", ":"), ensure_ascii=False)) == place + 1
        assert verify("sample", [*whole[:place], row._replace(hidden=""), *whole[place + 1 :]]).seq == place + 1


def found_at(whole: list[SealedRecord], place: int, hidden: str) -> int:
    report = verify("sample", [*whole[:place], whole[place]._replace(hidden=hidden), *whole[place + 1 :]])
    assert report.code == TAMPERED
    return report.seq


# -- redaction ----------------------------------------------------------------------------------------


def field_with(store, text: str) -> str:
    for row in asyncio.run(store.records("sample")):
        if text in row.hidden:
            return str(row.seq)
    raise AssertionError(text)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("state", ["finished", "waiting"])
def test_a_redacted_value_is_gone_and_the_journal_is_good(tmp_path, kind, state):
    store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "runs.db")
    finished_run(store) if state == "finished" else waiting_run(store)
    before = asyncio.run(store.head("sample")).status
    field = field_with(store, "contents of a")
    assert asyncio.run(redact(store, "sample", field + ".out.content", KEYRING, by="the officer")) == 1
    rows = asyncio.run(store.records("sample"))
    assert not any("contents of a" in r.body + r.hidden for r in rows[: int(field)])
    assert json.loads(rows[-1].body)["by"] == "the officer"
    report = verify("sample", rows, asyncio.run(store.head("sample")))
    assert report.code == (GOOD if state == "finished" else OPEN)
    assert independent(rows) is None
    assert (asyncio.run(store.head("sample")).status, asyncio.run(store.head("sample")).owner) == (before, None)
    with pytest.raises(JournalError, match="has no hidden value"):
        asyncio.run(redact(store, "sample", field + ".out.content", KEYRING))
    if kind == "sqlite" and state == "finished":  # at once: the store is not closed yet
        left = b"".join(p.read_bytes() for p in tmp_path.iterdir())
        assert b"contents of none" not in left
        assert left.count(b"contents of a") == 0
    store.close()


def test_an_interrupted_redaction_is_reported(whole):
    forged = [*whole]
    body = f'{{"epoch":3,"field":"1","kind":"redaction","of":1,"places":[0],"seq":{len(whole) + 1},"ts":1}}'
    forged = reseal([*whole, SealedRecord(len(whole) + 1, body, "", mac="00" * 20)], len(whole))
    report = verify("sample", forged)
    assert report.code == OPEN
    assert "still there" in report.open[0]


def test_a_redaction_of_nothing_changes_nothing():
    store, _ = finished_run()
    rows = list(asyncio.run(store.records("sample")))
    for field, error in (("0", UnknownRunError), ("x", UnknownRunError), ("99999", UnknownRunError)):
        with pytest.raises(error):
            asyncio.run(redact(store, "sample", field, KEYRING))
    for field in ("1.nothing", "2", "2.out.checked", f"{len(rows)}.ending"):
        with pytest.raises(JournalError):
            asyncio.run(redact(store, "sample", field, KEYRING))
    with pytest.raises(UnknownRunError):
        asyncio.run(redact(store, "nobody", "1", KEYRING))
    assert asyncio.run(store.records("sample")) == rows


def test_a_run_in_progress_cannot_be_redacted():
    store, _ = waiting_run()

    async def try_it():
        held = await store.acquire("sample", "somebody", keyring=KEYRING)
        with pytest.raises(StaleLease, match="somebody"):
            await redact(store, "sample", "1", KEYRING)
        del held

    asyncio.run(try_it())


def test_a_redacted_run_cannot_be_resumed():
    store, _ = waiting_run()
    asyncio.run(redact(store, "sample", "1", KEYRING))
    agent = sample_agent(store)
    with pytest.raises(JournalError, match=r"record 1 .*redacted"):
        asyncio.run(agent.resume("sample", "x").load())


# -- export -------------------------------------------------------------------------------------------


def test_an_export_round_trips(whole):
    lines = list(export_lines(whole))
    assert read_lines(lines) == whole
    assert [json.loads(line)["record"]["seq"] for line in lines] == list(range(1, len(whole) + 1))


@pytest.mark.parametrize("line", ["", "{}", '{"hash":"00","hidden":[],"record":{}', '{"hash":"00","hidden":x}'])
def test_an_invalid_export_is_refused(line):
    with pytest.raises(JournalError, match="line 1"):
        read_lines([line])


def test_the_stand_alone_verifier_is_short_and_needs_only_the_standard_library():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 130
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.M)) <= sys.stdlib_module_names
