"""Whoever has the file and not the secret can add nothing that is acted on; a run is taken over only explicitly."""

from __future__ import annotations

import asyncio
import hmac
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentfsm import Agent, Allow, Deny, Host, MemoryStore, RunCompleted, SqliteStore, UserInputRequested
from agentfsm.cli.app import app
from agentfsm.errors import JournalError
from agentfsm.journal.adoption import adopt
from agentfsm.journal.fork import fork
from agentfsm.journal.hash_chain import GENESIS_HASH, RecordSealer
from agentfsm.journal.records import SealedRecord, export_lines, is_kind, open_record, read_lines
from agentfsm.journal.redact import redact
from agentfsm.journal.store import Status
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, verify
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.testing import FakeClock, ScriptedModel
from tests.helpers.journal_scenarios import add, finished_run, look, pay, waiting_run, with_own_macs

OURS, THEIRS = Keyring(b"of the tests"), Keyring(b"of somebody else")


def resealed(records: Sequence[SealedRecord], keyring: Keyring | None, first: int = 0) -> list[SealedRecord]:
    """Records as somebody with another secret, or with none, would write them from one on."""
    sealer, made = RecordSealer(None if keyring is None else keyring.current), list(records[:first])
    for record in records[first:]:
        made.append(sealer.seal(record.seq, record.body, made[-1].hash if made else GENESIS_HASH, record.hidden))
    return made


def stored(records: Sequence[SealedRecord], status: Status = "running", keyring: Keyring | None = OURS) -> MemoryStore:
    store = MemoryStore()

    async def put() -> None:
        lease = await store.acquire("sample", "a process that died", new=True, keyring=keyring)
        lease_epoch = open_record(records[-1])["epoch"]
        while lease.epoch < lease_epoch:
            await store.release(lease)
            lease = await store.acquire("sample", "a process that died", keyring=keyring)
        await store.append(lease, records, status)
        await store.release(lease)

    asyncio.run(put())
    return store


def agent(store: Any, *script: Any, **host: Any) -> Agent:
    given = {"secret": b"of the tests", **host}
    return Agent(
        ScriptedModel(script),
        tools=[add, pay, look],
        instructions="Be brief.",
        host=Host(clock=FakeClock(), store=store, **given),
    )


def resume(of: Agent, *reply: Any) -> Any:
    async def wait() -> Any:
        return await of.resume("sample", *reply)

    return asyncio.run(wait())


def approved_records() -> list[SealedRecord]:
    """A journal that ends between an approval and the call that it is about."""
    store, _ = finished_run()
    records = asyncio.run(store.records("sample"))
    (resumed,) = (record.seq for record in records if is_kind(record, "run.resumed"))
    call = next(record.seq for record in records[resumed:] if is_kind(record, "effect.intent"))
    assert open_record(records[call - 1])["name"] == "pay"
    return with_own_macs(records[: call - 1])


def test_the_last_record_of_every_commit_has_the_mac_that_it_should_have():
    store, _ = finished_run()
    key = OURS.current.key(KeyPurpose.record)
    records = asyncio.run(store.records("sample"))
    own = [record for record in records if record.mac != "next"]
    for record in own:
        expected = hmac.digest(key, bytes.fromhex(record.hash), "sha256")[:16].hex()
        assert record.mac == OURS.current.key_id + expected
    assert own[-1] is records[-1]
    assert len(own) == 15  # its commits


def test_with_the_secret_every_changed_mac_is_found():
    store, _ = finished_run()
    records = with_own_macs(asyncio.run(store.records("sample")))
    assert verify("sample", records, asyncio.run(store.head("sample")), keyring=OURS).code == GOOD
    for number, record in enumerate(records):
        flipped = record.mac[:-1] + ("0" if record.mac[-1] != "0" else "1")
        for mac in (flipped, records[number - 1].mac):
            changed = [*records]
            changed[number] = record._replace(mac=mac)
            assert verify("sample", changed).code == GOOD  # nobody without the secret can know
            report = verify("sample", changed, keyring=OURS)
            assert (report.code, report.seq) == (TAMPERED, record.seq)


def test_records_that_somebody_without_the_secret_adds_are_found():
    whole = asyncio.run(finished_run()[0].records("sample"))
    for first in range(1, len(whole)):
        report = verify("sample", resealed(whole, None, first))  # even without the secret
        assert (report.code, report.seq) == (TAMPERED, first + 1)
        report = verify("sample", resealed(whole, THEIRS, first), keyring=OURS)
        assert THEIRS.current.key_id in report.doubt
    assert "no MACs" in verify("sample", resealed(whole, None), keyring=OURS).doubt


@pytest.mark.parametrize("forger", [None, THEIRS], ids=["no secret", "another secret"])
@pytest.mark.parametrize("first", [0, 1], ids=["the whole journal", "its end"])
def test_a_forged_approval_is_not_acted_on(forger: Keyring | None, first: int):
    records = approved_records()
    (suspended,) = (record.seq for record in records if is_kind(record, "run.suspended"))
    forged = resealed(records, forger, first * suspended)
    store = stored(forged)
    with pytest.raises(JournalError):
        resume(agent(store, "paid"))
    assert asyncio.run(agent(store, "paid").unfinished_runs()) == []
    with pytest.raises(JournalError):
        asyncio.run(fork(store, "sample", 3, "other", OURS))
    with pytest.raises(JournalError):
        asyncio.run(redact(store, "sample", "1", OURS))
    assert asyncio.run(store.records("sample")) == forged


def test_an_approval_that_the_host_recorded_is_acted_on():
    result = resume(agent(stored(approved_records()), "done"))
    assert isinstance(result.outcome, RunCompleted)
    assert any("paid 2.0 to Bob" in message.content for message in result.messages)


def test_an_adopted_run_asks_again_for_what_was_approved():
    store = stored(resealed(approved_records(), None))
    assert asyncio.run(adopt(store, "sample", OURS, by="Ann"))
    assert (
        verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample")), keyring=OURS).doubt
        == ""
    )
    asked = resume(agent(store, "done"))
    assert isinstance(asked.outcome, UserInputRequested)
    assert (asked.outcome.kind, asked.outcome.tool) == ("approval", "pay")
    result = resume(agent(store, "done"), Deny("no"))
    assert not any("paid 2.0" in message.content for message in result.messages)
    assert (
        verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample")), keyring=OURS).code
        == GOOD
    )


def test_an_adopted_run_that_waits_still_waits():
    store = stored(resealed(asyncio.run(waiting_run()[0].records("sample")), THEIRS), "suspended")
    with pytest.raises(JournalError, match=THEIRS.current.key_id):
        asyncio.run(agent(store).resume("sample", Allow()).load())
    assert asyncio.run(adopt(store, "sample", OURS))
    assert (
        verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample")), keyring=OURS).code
        == OPEN
    )
    assert isinstance(resume(agent(store, "done"), Allow()).outcome, RunCompleted)


def test_what_was_tampered_with_is_not_adopted():
    records = approved_records()
    store = stored([records[0]._replace(body=records[0].body.replace("sample", "simple")), *records[1:]])
    with pytest.raises(JournalError, match=r"record 1: its hash"):
        asyncio.run(adopt(store, "sample", OURS))


def test_a_replaced_secret_still_resumes_what_the_old_one_sealed():
    store, _ = waiting_run()
    new = {"secret": b"new", "old_secrets": [b"of the tests"]}
    assert isinstance(resume(agent(store, "done", **new), Allow()).outcome, RunCompleted)
    records, head = asyncio.run(store.records("sample")), asyncio.run(store.head("sample"))
    assert {record.mac[:8] for record in records} == {Keyring(b"new").current.key_id, OURS.current.key_id, "next"}
    assert verify("sample", records, head, keyring=Keyring(b"new", [b"of the tests"])).doubt == ""
    for one in (OURS, Keyring(b"new")):
        assert "under another secret" in verify("sample", records, head, keyring=one).doubt


def test_an_export_has_the_macs():
    records = asyncio.run(finished_run()[0].records("sample"))
    lines = list(export_lines(records))
    line = re.compile(r'\{"hash":"\w{64}","hidden":\[.*\],"mac":"(?:\w{40}|next)","record":\{.*\}\}\n')
    assert all(line.fullmatch(each) for each in lines)
    assert read_lines(lines) == records
    assert read_lines(export_lines(resealed(records, None))) == resealed(records, None)


def command(*words: object, secret: str = "") -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"AGENTFSM_SECRET": secret})


def test_commands_adopt_and_verify_with_a_key_file_that_only_its_owner_can_read(tmp_path: Path):
    path, key = tmp_path / "runs.db", tmp_path / "runs.db.key"
    with SqliteStore(path) as store:
        waiting_run(store)
    without = command("verify", "--store", path)
    assert without.exit_code == OPEN
    assert re.fullmatch(
        r"agentfsm: not checked:\n  without the secret \(.*\): who wrote the records.*\n  without a checkpoint: .*\n",
        without.stderr,
    )
    assert command("verify", "--store", path, secret="of the tests").exit_code == OPEN
    other = command("verify", "--store", path, secret="another")
    assert (other.exit_code, "under another secret" in other.stdout) == (3, True)
    assert "there is no secret" in command("redact", "sample", "1", "--store", path).stderr
    assert not key.exists()
    assert command("adopt", "--store", path, "--by", "Ann").stdout == "sample  adopted\n"
    assert command("adopt", "sample", "--store", path).stdout == "sample  was sealed already\n"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = key.read_text().strip()
    assert re.fullmatch(r"[0-9a-f]{64}", secret)
    verified = command("verify", "--store", path)
    assert (verified.exit_code, "without the secret" in verified.stderr) == (OPEN, False)
    assert secret not in verified.output
    key.write_text("\n")
    assert "is empty" in command("verify", "--store", path).stderr
