"""Snapshots that are forged or outdated, and records forged around one: nobody can use them to change a run."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Allow,
    JournalError,
    MemoryStore,
    RunEndedError,
    SqliteStore,
    UnknownRunError,
    UserInputRequested,
)
from agentfsm.agent.resume import load_run
from agentfsm.journal import snapshot as snapshots
from agentfsm.journal.hash_chain import GENESIS_HASH, RecordSealer
from agentfsm.journal.listing import verify_listed_run
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.redact import redact_text
from agentfsm.journal.store import SealedSnapshot
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED
from agentfsm.loop.keys import KeyPurpose, Keyring
from agentfsm.testing import RecordingModel, ScriptedModel, call
from tests.helpers.snapshot_runs import (
    CANARY,
    KEYS,
    MANAGERS,
    NEWEST,
    Recording,
    agent_on,
    comparable,
    config_of,
    counting_payments,
    interrupted,
    is_loaded_from_snapshot,
    long_script,
    rows_of,
    suspended_in,
)


def change(path: Path, statement: str, *values: Any) -> None:
    db = sqlite3.connect(path)
    db.execute(statement, values)
    db.commit()
    db.close()


async def loads_as_without(path: Path) -> bool:
    """Whether a run is loaded from its snapshot; it is the same run either way."""
    async with SqliteStore(path) as store:
        config = config_of(agent_on(store, ()))
        lazy, whole = await load_run(config, "r", lazily=True), await load_run(config, "r")
        assert comparable(lazy) == comparable(whole)
        assert lazy.resume_point.base is not None
        return bool(lazy.resume_point.base.unread)


async def report(path: Path) -> tuple[int, str]:
    async with SqliteStore(path) as store:
        found = await verify_listed_run(store, "r", keyring=KEYS)
        return found.code, found.reason


EDITS = {
    "limits": (
        "UPDATE snapshot SET content = replace(content, '\"max_iterations\":1000', '\"max_iterations\":9')",
        "",
    ),
    "approval": ("UPDATE snapshot SET content = replace(content, '\"approved\":false', '\"approved\":true')", ""),
    "seal": ("UPDATE snapshot SET mac = x'00112233445566778899aabbccddeeff00112233'", ""),
    "no seal": ("UPDATE snapshot SET mac = x''", ""),
    "no text": ("UPDATE snapshot SET content = ''", ""),
    "bytes": ("UPDATE snapshot SET content = x'ff00ff'", ""),
    "another run's": (
        "UPDATE snapshot SET content = (SELECT content FROM snapshot WHERE id = 2), mac = (SELECT mac FROM snapshot"
        " WHERE id = 2) WHERE id = 1",
        "",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.usefixtures("snapshots_often")
def test_an_edited_snapshot_is_not_used_and_verify_reports_it(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scene() -> None:
        await suspended_in(path)
        await suspended_in(path, "other")
        assert await loads_as_without(path)
        assert (await report(path))[0] == OPEN
        before = rows_of(path, "SELECT * FROM snapshot WHERE id = 1")
        change(path, EDITS[edit][0])
        assert rows_of(path, "SELECT * FROM snapshot WHERE id = 1") != before
        assert not await loads_as_without(path)
        code, reason = await report(path)
        assert code == TAMPERED
        assert "its snapshot" in reason
        async with SqliteStore(path) as store:
            assert (await agent_on(store, ["Done."]).resume("r", Allow())).output == "Done."
        assert (await report(path))[0] == GOOD

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_snapshot_may_be_deleted_or_be_an_older_one(tmp_path: Path) -> None:
    async def scene() -> None:
        store = Recording()
        await interrupted(store, 12)
        made = [snapshot for *_, snapshot in store.log if snapshot is not None]
        assert len(made) > 5
        newest = await load_run(config_of(agent_on(store, ())), "r", lazily=True)
        for each in (None, *made):
            store._runs["r"].snapshot = each  # pyright: ignore[reportPrivateUsage]
            loaded = await load_run(config_of(agent_on(store, ())), "r", lazily=True)
            assert comparable(loaded) == comparable(newest)
            assert (await verify_listed_run(store, "r", keyring=KEYS)).code == OPEN

    asyncio.run(scene())


@pytest.mark.parametrize(("name", "value"), [("installed_release", lambda: "99.0"), ("FORMAT", 0)])
@pytest.mark.usefixtures("snapshots_often")
def test_a_snapshot_of_another_release_or_version_is_not_used(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        store = Recording()
        await interrupted(store, 12)
        monkeypatch.setattr(snapshots, name, value)
        assert not await is_loaded_from_snapshot(agent_on(store, ()))
        assert (await verify_listed_run(store, "r", keyring=KEYS)).code == OPEN

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_snapshot_of_a_history_that_was_cut_off_is_not_used() -> None:
    async def scene() -> None:
        store = Recording()
        await interrupted(store, 12)
        rest = await store.after_a_kill(len(store.log) - 8, with_snapshots=True)
        rest._runs["r"].snapshot = await store.snapshot("r")  # pyright: ignore[reportPrivateUsage]
        assert not await is_loaded_from_snapshot(agent_on(rest, ()))
        found = await verify_listed_run(rest, "r", keyring=KEYS)
        assert (found.code, "that of other records" in found.reason) == (TAMPERED, True)

    asyncio.run(scene())


async def two_histories() -> list[MemoryStore]:
    """Two copies of a store with a run that went on in each of them, to other places, and waits after as many steps."""
    start = Recording()
    await interrupted(start, 1)
    copies = [await start.after_a_kill(3, with_snapshots=False) for _ in range(2)]
    for name, store in zip(("place", "hall"), copies, strict=True):
        script = [*(call("look", at=f"{name} {n}") for n in range(12)), call("pay", amount=1)]
        assert isinstance((await agent_on(store, script).resume("r")).outcome, UserInputRequested)
    return copies


@pytest.mark.usefixtures("snapshots_often")
def test_a_snapshot_of_another_history_of_the_run_is_not_used_and_verify_reports_it() -> None:
    async def scene() -> None:
        ours, theirs = await two_histories()
        theirs._runs["r"].snapshot = await ours.snapshot("r")  # pyright: ignore[reportPrivateUsage]
        assert not await is_loaded_from_snapshot(agent_on(theirs, ()))
        found = await verify_listed_run(theirs, "r", keyring=KEYS)
        assert (found.code, "that of other records" in found.reason) == (TAMPERED, True)

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_does_not_go_on_with_earlier_records_of_another_of_its_histories() -> None:
    async def scene() -> None:
        ours, theirs = await two_histories()
        ours._runs["r"].records[:] = await theirs.records("r")  # pyright: ignore[reportPrivateUsage]
        model = RecordingModel(ScriptedModel(["Done."]))
        with pytest.raises(JournalError, match="is not that of its snapshot"):
            await agent_on(ours, (), model=model).resume("r", Allow())
        assert not any("hall" in message.content for request in model.requests for message in request.messages)

    asyncio.run(scene())


def with_later_time(record: SealedRecord) -> str:
    return record.body.replace('"ts":', '"ts":1')


def chained(records: Sequence[SealedRecord], previous: str, sealer: RecordSealer) -> list[SealedRecord]:
    """Records with hashes and MACs as if they had been written after another one."""
    return sealer.seal_commit(records[0].seq, [(with_later_time(each), each.hidden) for each in records], previous)


def renumbered(record: SealedRecord, seq: int) -> SealedRecord:
    return record._replace(seq=seq, body=record.body.replace(f'"seq":{record.seq},', f'"seq":{seq},'))


OTHERS = Keyring(b"another secret, and long enough")


TAILS: dict[str, Callable[[list[SealedRecord], str], list[SealedRecord]]] = {
    "changed": lambda tail, _: [tail[0]._replace(body=with_later_time(tail[0])), *tail[1:]],
    "rewritten, with the MACs of before": lambda tail, previous: [
        new._replace(mac=old.mac) for old, new in zip(tail, chained(tail, previous, RecordSealer(None)), strict=True)
    ],
    "rewritten without MACs": lambda tail, previous: chained(tail, previous, RecordSealer(None)),
    "rewritten under another secret": lambda tail, previous: chained(tail, previous, RecordSealer(OTHERS.current)),
    "with a step left out, by somebody with the secret": lambda tail, previous: chained(
        [renumbered(each, tail[0].seq + place) for place, each in enumerate([*tail[:3], *tail[4:]])],
        previous,
        RecordSealer(KEYS.current),
    ),
    "cut off": lambda tail, _: tail[:-8],
    "gone": lambda tail, _: [],
}
"""What somebody does with the records after a snapshot."""


@pytest.mark.parametrize("edit", TAILS)
@pytest.mark.usefixtures("snapshots_often")
def test_nothing_is_done_in_a_run_whose_records_after_its_snapshot_were_changed(edit: str) -> None:
    async def scene() -> None:
        store = Recording()
        await interrupted(store, 12)
        kept = store._runs["r"]  # pyright: ignore[reportPrivateUsage]
        kept.snapshot = next(made for *_, made in reversed(store.log[:-8]) if made is not None)
        seq = json.loads(kept.snapshot.content)["seq"]
        assert len(kept.records) - seq > 15
        assert await is_loaded_from_snapshot(agent_on(store, ()))
        kept.records[seq:] = tail = TAILS[edit](kept.records[seq:], kept.records[seq - 1].hash)
        if "rewritten" in edit or "left out" in edit:
            kept.head = replace(kept.head, seq=tail[-1].seq, hash=tail[-1].hash)
        with counting_payments() as paid, pytest.raises(JournalError, match="cannot be resumed: "):
            await agent_on(store, ["Done."]).resume("r", Allow())
        assert not paid

    asyncio.run(scene())


def in_epoch_2(record: SealedRecord) -> SealedRecord:
    return record._replace(body=record.body.replace('"epoch":3', '"epoch":2'))


VOTES: dict[str, Callable[[list[SealedRecord]], list[SealedRecord]]] = {
    "one of the two that are needed": lambda after: [after[0], in_epoch_2(renumbered(after[4], after[1].seq))],
    "by somebody without the role": lambda after: [
        after[0],
        after[1]._replace(body=after[1].body.replace('"roles":["manager"]', '"roles":["clerk"]')),
    ],
}
"""What somebody with the secret makes of two replies, each of which was recorded with its vote, and the request between
the two."""


@pytest.mark.parametrize("votes", VOTES)
@pytest.mark.usefixtures("snapshots_often")
def test_votes_after_a_snapshot_are_held_against_the_rule_of_the_request_before_it(votes: str) -> None:
    async def scene() -> None:
        store = MemoryStore()
        await agent_on(store, [*long_script(12)[:-1], call("wire", amount=1)]).run("Go.", run_id="r")
        kept = store._runs["r"]  # pyright: ignore[reportPrivateUsage]
        asked, snapshot = kept.head, kept.snapshot
        assert snapshot is not None
        assert json.loads(snapshot.content)["seq"] == asked.seq
        for manager in MANAGERS:
            await agent_on(store, ["Done."]).resume("r", Allow(), by=manager)
        after = kept.records[asked.seq :]

        def cut_off_after(records: Sequence[SealedRecord]) -> None:
            tail = chained(records, asked.hash, RecordSealer(KEYS.current))
            kept.records[asked.seq :], kept.snapshot = tail, snapshot
            kept.head = replace(asked, seq=tail[-1].seq, hash=tail[-1].hash, epoch=2, status="running", owner=None)

        cut_off_after(after[:2])
        assert await is_loaded_from_snapshot(agent_on(store, ()))
        cut_off_after(VOTES[votes](after))
        with pytest.raises(JournalError, match="cannot be resumed: record"):
            await agent_on(store, ["Done."]).resume("r")

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_run_does_not_go_on_from_its_snapshot_if_its_row_says_something_else_than_its_records() -> None:
    async def scene() -> None:
        whole = Recording()
        await interrupted(whole, 12)
        for changed in ({"seq": 1, "hash": GENESIS_HASH}, {"status": "suspended"}, {"epoch": 0}):
            newest = max(number for number, (*_, made) in enumerate(whole.log[:-1], 1) if made is not None)
            store = await whole.after_a_kill(newest, with_snapshots=True)
            assert await is_loaded_from_snapshot(agent_on(store, ()))
            kept = store._runs["r"]  # pyright: ignore[reportPrivateUsage]
            kept.head = replace(kept.head, **changed)  # which seals it: as somebody with the secret might
            with pytest.raises(JournalError, match="cannot be resumed: record"):
                await agent_on(store, ["Done."]).resume("r")

    asyncio.run(scene())


@pytest.mark.parametrize("edit", ["epoch = epoch + 1", "mac = NULL", "status = 'running'", "seq = seq + 1"])
@pytest.mark.usefixtures("snapshots_often")
def test_nothing_is_done_in_a_run_with_a_snapshot_whose_row_was_changed(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scene() -> None:
        await suspended_in(path)
        assert await loads_as_without(path)
        change(path, f"UPDATE run SET {edit}")
        async with SqliteStore(path) as store:
            with counting_payments() as paid, pytest.raises(JournalError, match="cannot be resumed: record"):
                await agent_on(store, ["Done."]).resume("r", Allow())
            assert not paid

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_snapshot_whose_journal_is_gone_is_not_used() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 3)
        assert await store.snapshot("r") is not None
        store._runs["r"].records.clear()  # pyright: ignore[reportPrivateUsage]  # as somebody with all rights might
        with pytest.raises(UnknownRunError):
            await agent_on(store, ["Done."]).resume("r", Allow())

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_a_finished_run_does_not_go_on_from_a_snapshot_that_somebody_puts_back() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12)
        before = await store.snapshot("r")
        await agent_on(store, ["Done."]).resume("r", Allow())
        store._runs["r"].snapshot = before  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(RunEndedError, match="has ended"):
            await agent_on(store, ["Done again."]).resume("r")

    asyncio.run(scene())


@pytest.mark.usefixtures("snapshots_often")
def test_verify_compares_what_a_snapshot_says_with_the_records_whoever_sealed_it() -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12)
        sealed = await store.snapshot("r")
        assert sealed is not None
        edits: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({}, {"counters": {"steps": 1}}),
            ({}, {"granted_tokens": 5}),
            ({}, {"withheld": ["x"]}),
            ({"attempts": {"12.1": 2}}, {}),
            ({"visited": ["pre_step"]}, {}),
            ({"asked": []}, {}),
            ({"epoch": 2}, {}),
            ({"suspension": None}, {}),
        ]
        for about, state in edits:
            data = json.loads(sealed.content)
            data |= about
            data["state"] |= state
            text = json.dumps(data)
            mac = KEYS.current.seal(KeyPurpose.snapshot, text.encode())
            store._runs["r"].snapshot = SealedSnapshot(text, mac)  # pyright: ignore[reportPrivateUsage]
            found = await verify_listed_run(store, "r", keyring=KEYS)
            assert (found.code, found.reason) == (TAMPERED, "its snapshot differs from its records")
        data = json.loads(sealed.content)
        text = json.dumps(data | {"count": data["count"] + 1})
        mac = KEYS.current.seal(KeyPurpose.snapshot, text.encode())
        store._runs["r"].snapshot = SealedSnapshot(text, mac)  # pyright: ignore[reportPrivateUsage]
        assert "another number of messages" in (await verify_listed_run(store, "r", keyring=KEYS)).reason

    asyncio.run(scene())


@pytest.mark.parametrize("history", [None, NEWEST], ids=["all", "newest"])
@pytest.mark.usefixtures("snapshots_often")
def test_an_older_record_that_was_edited_is_noticed_before_anything_made_of_it_is_sent(
    history: Any, tmp_path: Path
) -> None:
    path = tmp_path / "runs.db"

    async def scene() -> None:
        async with SqliteStore(path) as store:
            await interrupted(store, 12, history=history)
        db = sqlite3.connect(path)
        (hidden,) = db.execute("SELECT hidden FROM journal WHERE instr(hidden, 'seen place 3')").fetchone()
        db.execute("UPDATE journal SET hidden = ? WHERE hidden = ?", (hidden.replace(b"place 3", b"place 7"), hidden))
        db.commit()
        db.close()
        model = RecordingModel(ScriptedModel(["Done."]))
        async with SqliteStore(path) as store:
            with pytest.raises(JournalError, match="cannot be continued: record"):
                await agent_on(store, (), model=model, history=history).resume("r", Allow())
            head = await store.head("r")
            assert head is not None
            assert head.status == "running"
        assert not any("place 7" in message.content for request in model.requests for message in request.messages)
        assert (await report(path))[0] == TAMPERED

    asyncio.run(scene())


FORGERIES: dict[str, Callable[[SealedRecord], SealedRecord]] = {
    "body": lambda record: record._replace(body=with_later_time(record)),
    "body and hash": lambda record: chained([record], GENESIS_HASH, RecordSealer(None))[0],
    "hidden value": lambda record: record._replace(hidden=record.hidden.replace("Go.", "No.")),
    "no hidden value": lambda record: record._replace(
        hidden=f"[{','.join('null' for _ in json.loads(record.hidden))}]"
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.usefixtures("snapshots_often")
def test_nothing_is_done_in_a_run_with_a_forged_first_record(forgery: str) -> None:
    async def scene() -> None:
        store = MemoryStore()
        await interrupted(store, 12)
        records = store._runs["r"].records  # pyright: ignore[reportPrivateUsage]
        forged = FORGERIES[forgery](records[0])
        assert forged != records[0]
        records[0] = forged
        with counting_payments() as paid, pytest.raises(JournalError, match="cannot be resumed: record"):
            await agent_on(store, ["Done."]).resume("r", Allow())
        assert not paid

    asyncio.run(scene())


@pytest.mark.parametrize("where", ["prompt", "call"])
@pytest.mark.usefixtures("snapshots_often")
def test_a_snapshot_from_before_a_redaction_that_somebody_puts_back_is_not_used_and_verify_reports_it(
    where: str,
) -> None:
    async def scene() -> None:
        store = MemoryStore()
        script = [*long_script(8)[:-1], call("look", at=CANARY if where == "call" else "home"), call("pay", amount=1)]
        await agent_on(store, script).run(f"I am {CANARY}." if where == "prompt" else "Go.", run_id="r")
        before = await store.snapshot("r")
        await redact_text(store, CANARY, KEYS)
        assert (await verify_listed_run(store, "r", keyring=KEYS)).code == OPEN
        store._runs["r"].snapshot = before  # pyright: ignore[reportPrivateUsage]
        with counting_payments() as paid, pytest.raises(JournalError, match="was redacted"):
            await agent_on(store, ["Done."]).resume("r", Allow())
        assert not paid
        found = await verify_listed_run(store, "r", keyring=KEYS)
        assert (found.code, found.reason) == (
            TAMPERED,
            "its snapshot is from before a redaction; the run does not use it",
        )

    asyncio.run(scene())
