"""The stand-alone verifier: what it detects with only the standard library."""

from __future__ import annotations

import asyncio
import base64
import hmac
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from agentfsm import Allow, Migration
from agentfsm.journal.checkpoint import CheckpointLog, write_checkpoint
from agentfsm.journal.hash_chain import record_hash
from agentfsm.journal.records import SealedRecord, export_lines
from agentfsm.journal.store import Head
from agentfsm.journal.verification import GOOD, TAMPERED, verify
from agentfsm.loop.keys import Keyring
from agentfsm.loop.presets import PRESETS
from tests.helpers.journal_scenarios import finished_run, reseal, sample_agent, waiting_run
from tests.journal.test_migration import LONGER, LOOP, NO_ADDING, go_on

DATE = datetime(2026, 11, 23, tzinfo=UTC)
EXAMPLE = Path(__file__).parents[2] / "examples" / "verify_journal.py"


def independent(rows: list[SealedRecord], note: str = "", log: str = "", secrets: Sequence[bytes] = ()) -> str | None:
    spec = importlib.util.spec_from_file_location("verify_journal", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str | None = module.verify(list(export_lines(rows)), note, log, secrets)
    return found


@pytest.fixture(scope="module")
def whole() -> list[SealedRecord]:
    return asyncio.run(finished_run()[0].records("sample"))


@pytest.fixture(scope="module")
def migrated() -> list[SealedRecord]:
    store, _ = waiting_run()
    go_on(store, LONGER, [Migration(LOOP)], Allow())
    return asyncio.run(store.records("sample"))


def forged(rows: list[SealedRecord], kind: str, old: str, new: str) -> tuple[list[SealedRecord], int]:
    """Rows with one changed and every hash made to fit, the answers' too."""
    place = next(n for n, r in enumerate(rows) if f'"kind":"{kind}"' in r.body and re.search(old, r.body))
    rows = [*rows[:place], rows[place]._replace(body=re.sub(old, new, rows[place].body, count=1)), *rows[place + 1 :]]
    for n in range(place, len(rows)):
        body = json.loads(rows[n].body)
        if n > place and body["kind"] == "run.resumed" and "to" in body:
            at = body["to"]["seq"] - 1
            rows[n] = rows[n]._replace(body=rows[n].body.replace(body["to"]["hash"], rows[at].hash))
        rows = reseal(rows[: n + 1], n) + rows[n + 1 :]
    return rows, place + 1


@pytest.mark.parametrize(
    ("kind", "old", "new", "words"),
    [
        ("effect.result", '"eid":"1.0"', '"eid":"9.9"', "was not started"),
        ("effect.intent", '"eid":"1.0"', '"eid":"9.9"', "was not started"),
        ("transition", '"results":\\["1.0"\\]', '"results":["7.7"]', "a result is missing"),
        ("transition", '"epoch":1', '"epoch":0', "wrong epoch"),
        ("transition", '"epoch":1', '"epoch":9', "wrong epoch"),
        ("effect.intent", '"epoch":1', '"epoch":9', "wrong epoch"),
        ("run.finished", '"epoch":2', '"epoch":9', "wrong epoch"),
        ("run.resumed", '"epoch":2', '"epoch":0', "wrong epoch"),
        ("run.resumed", '"seq":(\\d+)\\}', '"seq":1}', "to another request"),
        ("transition", '"tried":"0', '"tried":"1', "is not allowed"),
        ("transition", '"to":"call_llm"', '"to":"terminal"', "is not allowed"),
        ("run.created", '"approval_required"', '"approval_forgotten"', "graph was changed"),
    ],
)
def test_an_illegal_history_is_found_despite_valid_hashes(whole, kind, old, new, words):
    rows, at = forged(whole, kind, old, new)
    assert verify("sample", rows).code == TAMPERED
    run_example = independent(rows)
    assert run_example is not None
    assert words in run_example
    assert int(re.findall(r"\d+", run_example)[0]) >= at


def test_recomputing_hashes_alone_hides_nothing(whole):
    rows, _ = forged(whole, "effect.intent", '"name":"scripted"', '"name":"another"')
    assert independent(rows) is None  # nothing inside can tell; a checkpoint can
    assert verify("sample", rows).code != TAMPERED


def test_a_record_after_the_end_is_found(whole):
    last = whole[-1]
    more = last._replace(seq=len(whole) + 1, body=re.sub(r'"seq":\d+', f'"seq":{len(whole) + 1}', last.body))
    rows = reseal([*whole, more], len(whole))
    assert "the run had finished" in str(independent(rows))


def test_a_line_with_another_format_is_found(whole):
    spaced = [whole[0]._replace(body=whole[0].body.replace('"kind":', '"kind": ')), *whole[1:]]
    assert "not formatted like" in str(independent(spaced))
    twice = [whole[0]._replace(body=whole[0].body.replace('"kind":', '"kind":"x","kind":')), *whole[1:]]
    assert "not formatted like" in str(independent(twice))


def test_a_migrated_run_is_verified_with_each_of_its_graphs(migrated):
    assert independent(migrated) is None
    rows, at = forged(migrated, "run.migrated", LOOP.fingerprint, "0" * 64)
    assert independent(rows) == f"record {at}: the run was on another graph"
    rows, _ = forged(migrated, "run.migrated", '"to":"suspended"', '"to":"pre_step"')
    assert "is not allowed in pre_step" in str(independent(rows))
    vouched, _ = waiting_run()
    go_on(vouched, NO_ADDING, [Migration(LOOP, vouched=True)], Allow())
    assert independent(asyncio.run(vouched.records("sample"))) is None


def test_a_checkpoint_finds_truncated_and_rewritten_journals(whole, tmp_path):
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    before = Head("sample", 1, None, 5, whole[4].hash, "running")
    log = CheckpointLog().extended([before, replace(before, run_id="another")])
    log = log.extended([replace(before, seq=len(whole), hash=whole[-1].hash)], {"sample": (1_000, "0" * 64)})
    assert log.text.endswith(f'hold 1000 {"0" * 64} "sample"\n')
    note = write_checkpoint(log, key.read_bytes(), DATE)
    assert independent(whole, note, log.text) is None
    assert independent(whole, note, f"{log.text}7 00 what came later\n") is None
    assert "was truncated" in str(independent(whole[:-1], note, log.text))
    rows, _ = forged(whole, "effect.intent", '"name":"scripted"', '"name":"another"')
    assert "or rewritten" in str(independent(rows, note, log.text))
    entries = log.text.splitlines(keepends=True)
    for other in ("", "".join(entries[:-1]), log.text.replace('"sample"', '"simple"'), "".join(reversed(entries))):
        assert independent(whole, note, other) == "the log does not begin with the entries that the checkpoint signed"
    others = CheckpointLog().extended([replace(before, run_id="another")])
    found = independent(whole, write_checkpoint(others, key.read_bytes(), DATE), others.text)
    assert str(found).startswith("record 0: the checkpoint has another one")  # not this run


def mac_by_hand(secret: bytes, digest: str) -> str:
    """The seal of a record, by the HKDF of another package."""

    def derive(info: bytes, length: int) -> bytes:
        return HKDF(SHA256(), length, b"agentfsm", info).derive(secret)

    mac = hmac.new(derive(b"journal record", 32), bytes.fromhex(digest), "sha256").digest()
    return derive(b"key id", 4).hex() + mac[:16].hex()


def sealed_by_hand(rows: list[SealedRecord], secret: bytes, first: int = 0) -> list[SealedRecord]:
    """Records sealed under a secret; those that leave that to the next one stay so."""
    return [
        *rows[:first],
        *(row if row.mac == "next" else row._replace(mac=mac_by_hand(secret, row.hash)) for row in rows[first:]),
    ]


def test_with_the_secret_it_finds_who_did_not_have_it(whole):
    mine = [b"of the tests"]
    assert sealed_by_hand(whole, mine[0]) == whole
    assert independent(whole, secrets=mine) is None
    each = [row._replace(mac=mac_by_hand(mine[0], row.hash)) for row in whole]  # as earlier releases wrote them
    assert independent(each, secrets=mine) is None
    assert verify("sample", each, keyring=Keyring(mine[0])).code == GOOD
    assert independent(sealed_by_hand(whole, b"new", 7), secrets=[b"new", *mine]) is None  # the secret was replaced
    without = [row._replace(mac="") for row in whole]
    changed, at = forged(whole, "effect.intent", '"name":"scripted"', '"name":"another"')
    cases = [
        (changed, f"record {at}: its MAC does not match"),
        ([*whole[:6], *without[6:]], "record 7: it has no MAC"),
        ([*without[:6], *whole[6:]], "record 7: it has a MAC, and"),
        (without, "record 1: it was not sealed under a secret that was given"),
        (sealed_by_hand(whole, b"of a forger"), "record 3: it was not sealed"),
        (sealed_by_hand(whole, b"of a forger", len(whole) - 1), f"record {len(whole)}: it was not sealed"),
        ([whole[0]._replace(mac=whole[2].mac), *whole[1:]], "record 1: its MAC does not match"),
    ]
    for rows, words in cases:
        assert str(independent(rows, secrets=mine)).startswith(words)
    for rows in (whole[:4], whole[:49]):  # cut off within a commit
        assert "whose MAC vouches for it, is missing" in str(independent(rows))
        assert "whose MAC vouches for it, is missing" in verify("sample", rows).reason
    assert independent(without) is None  # nothing can tell without the secret
    assert independent(sealed_by_hand(whole, b"of a forger")) is None


def test_a_run_that_was_adopted_is_vouched_for(whole):
    body = f'{{"epoch":9,"kind":"run.adopted","seq":{len(whole) + 1},"ts":1}}'
    adopted = SealedRecord(len(whole) + 1, body, record_hash(whole[-1].hash, body))
    for before in ([row._replace(mac="") for row in whole], sealed_by_hand(whole, b"that is lost")):
        rows = sealed_by_hand([*before, adopted], b"new", len(before))
        assert independent(rows, secrets=[b"new"]) is None
        assert verify("sample", rows, keyring=Keyring(b"new")).code == GOOD


@pytest.mark.parametrize("changed", ['[null,"other"]', '["","other"]', '["00","other",1]', '"other"', "7", "true"])
def test_a_hidden_value_without_its_salt_is_found(whole, changed):
    place = next(n for n, row in enumerate(whole) if row.hidden)
    values = json.loads(whole[place].hidden)
    hidden = json.dumps([json.loads(changed), *values[1:]], separators=(",", ":"), ensure_ascii=False)
    rows = [*whole[:place], whole[place]._replace(hidden=hidden), *whole[place + 1 :]]
    assert str(independent(rows)).startswith(f"record {place + 1}: ")


def test_an_added_hidden_value_is_found(whole):
    for place, more in ((0, '["00",1]'), (0, "null"), (2, '["00",1]')):
        hidden = whole[place].hidden
        added = f"{hidden[:-1]},{more}]" if hidden else f"[{more}]"
        rows = [*whole[:place], whole[place]._replace(hidden=added), *whole[place + 1 :]]
        assert "hidden value is missing or added" in str(independent(rows))


def test_it_is_a_command(whole, tmp_path):
    file, note, log = tmp_path / "run.jsonl", tmp_path / "note", tmp_path / "log"
    file.write_text("".join(export_lines(whole)), encoding="utf-8")
    log.write_text(f'{len(whole)} {"0" * 64} "sample"\n', encoding="utf-8")
    root = base64.b64encode(sha256(b"\0" + log.read_bytes()[:-1]).digest()).decode()
    note.write_text(f"x\n1\n{root}\n\n\u2014 x y\n", encoding="utf-8")

    def run_example(*words: Any, secret: str = "", unchecked: int = 2) -> tuple[int, str]:
        environment = {**os.environ, "AGENTFSM_SECRET": secret}
        command = [sys.executable, EXAMPLE, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.stderr.count("not checked without") == unchecked, done.stderr
        return done.returncode, done.stdout

    assert run_example(file) == (0, "good\n")
    assert run_example(file, secret="of the tests", unchecked=1) == (0, "good\n")
    assert run_example(file, secret="another\nof the tests", unchecked=1) == (0, "good\n")
    assert run_example(file, secret="another", unchecked=1)[0] == 1
    assert run_example(unchecked=0) == (1, "")  # it says how it is used
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(export_lines(whole[:47])), encoding="utf-8")
    code, printed = run_example(cut)
    assert (code, "has not finished" in printed) == (0, True)
    cut.write_bytes("".join(export_lines(whole)).encode().replace(b"scripted", b"scr\xffpted", 1))
    code, printed = run_example(cut)
    assert (code, printed.startswith("record 3: ")) == (1, True)
    code, printed = run_example(file, note, log, unchecked=1)
    assert code == 1
    assert "the checkpoint has another one" in printed


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_kind_of_run_is_good(preset):
    import asyncio

    from agentfsm import MemoryStore

    store = MemoryStore()

    async def live() -> None:
        await sample_agent(store, preset=preset).run("Do it all.", run_id="sample")

    asyncio.run(live())
    assert independent(asyncio.run(store.records("sample"))) is None
