"""Approvals are bound to what was shown: the arguments, the graph and the record; and each is used once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    Deny,
    Edit,
    Host,
    HumanReplyError,
    JournalError,
    MemoryStore,
    RunEndedError,
    RunResult,
    SqliteStore,
    StaleHumanReplyError,
    UserInputRequested,
    tool,
)
from agentfsm.journal.records import SealedRecord, open_record
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.verification import GOOD, TAMPERED, verify
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.journal_scenarios import reseal, with_own_macs

PAYS = [call("pay", to="Ann", amount=1), call("pay", to="Ann", amount=1000), "paid"]


class Bank:
    """An agent that pays twice, each payment with a person's leave."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.paid: list[tuple[str, int]] = []

    def agent(self, *script: Any) -> Agent:
        @tool(requires_approval=True)
        def pay(to: str, amount: int) -> str:
            """Pay."""
            self.paid.append((to, amount))
            return "paid"

        host = Host(clock=FakeClock(), store=self.store, secret=b"of the tests")
        return Agent(ScriptedModel(script), tools=[pay], host=host)


async def asked(bank: Bank) -> UserInputRequested:
    outcome = (await bank.agent(*PAYS).run("Pay.", run_id="r")).outcome
    assert isinstance(outcome, UserInputRequested)
    return outcome


def of_kind(store: Any, kind: str) -> list[tuple[Any, dict[str, Any]]]:
    return [(r, open_record(r)) for r in asyncio.run(store.records("r")) if f'"kind":"{kind}"' in r.body]


@pytest.fixture(params=["memory", "sqlite"])
def bank(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db")
    yield Bank(store)
    store.close()


def test_a_reply_is_bound_to_its_request(bank):
    async def scene() -> RunResult:
        first = await asked(bank)
        assert first.digest == (await bank.store.head("r")).hash
        second = (await bank.agent(*PAYS[1:]).resume("r", Allow(), to=first.digest, by="ann@example.org")).outcome
        assert second.digest not in ("", first.digest)
        return await bank.agent("paid").resume("r", Edit({"to": "Ann", "amount": 10}), to=second.digest[:12])

    result = asyncio.run(scene())
    assert bank.paid == [("Ann", 1), ("Ann", 10)]
    waits = of_kind(bank.store, "run.suspended")
    resumed = [body["to"] for _, body in of_kind(bank.store, "run.resumed")]
    assert resumed == [{"seq": row.seq, "hash": row.hash} for row, _ in waits]
    answers = [
        body["out"]["answered"]["reply"] for _, body in of_kind(bank.store, "transition") if "answered" in body["out"]
    ]
    assert answers == [
        {"kind": "allow", "by": "ann@example.org"},
        {"kind": "edit", "arguments": {"to": "Ann", "amount": 10}},
    ]
    assert "ann@example.org" not in "".join(
        r.body for r in asyncio.run(bank.store.records("r"))
    )  # it may be redacted, as any text
    assert verify("r", asyncio.run(bank.store.records("r")), asyncio.run(bank.store.head("r"))).code == GOOD
    assert rehydrate(asyncio.run(bank.store.records("r"))).run.messages == result.messages


def test_a_reply_to_other_arguments_is_refused_and_nothing_runs(bank):
    async def scene() -> None:
        first = await asked(bank)
        await bank.agent(*PAYS[1:]).resume("r", Allow(), to=first.digest)
        before = await bank.store.records("r")
        for late in (Allow(), Edit({"to": "Bob", "amount": 5}), Deny("no")):
            with pytest.raises(StaleHumanReplyError, match=r"pay.*1000") as caught:
                await bank.agent().resume("r", late, to=first.digest).load()
            assert first.digest[:12] in str(caught.value)
        assert await bank.store.records("r") == before

    asyncio.run(scene())
    assert bank.paid == [("Ann", 1)]


@pytest.mark.parametrize("to", ["0" * 64, "0" * 12, "x", "abc"])
def test_a_reply_to_another_record_is_refused(bank, to):
    async def scene() -> None:
        await asked(bank)
        with pytest.raises(StaleHumanReplyError):
            await bank.agent().resume("r", Allow(), to=to).load()

    asyncio.run(scene())
    assert bank.paid == []


def test_a_digest_prefix_that_is_too_short_is_refused():
    bank = Bank(MemoryStore())

    async def scene() -> None:
        first = await asked(bank)
        with pytest.raises(StaleHumanReplyError, match="12"):
            await bank.agent().resume("r", Allow(), to=first.digest[:11]).load()

    asyncio.run(scene())


def test_a_reply_is_used_once(bank):
    async def scene() -> None:
        first = await asked(bank)
        await bank.agent("enough").resume("r", Allow(), to=first.digest)
        with pytest.raises(RunEndedError, match="has ended"):
            await bank.agent().resume("r", Allow(), to=first.digest).load()

    asyncio.run(scene())
    assert bank.paid == [("Ann", 1)]


def test_a_suspension_record_is_bound_too_and_a_digest_is_checked():
    bank = Bank(MemoryStore())

    async def scene() -> None:
        first = await asked(bank)
        with pytest.raises(StaleHumanReplyError):
            await bank.agent().resume(first.suspension_record, Allow(), to="0" * 64).load()
        await bank.agent("enough").resume(first.suspension_record, Allow(), to=first.digest, by="ann")

    asyncio.run(scene())
    assert bank.paid == [("Ann", 1)]


def test_without_a_store_there_is_no_record_to_reply_to_but_the_replier_is_recorded():
    bank = Bank(None)

    async def scene() -> RunResult:
        first = await asked(bank)
        assert first.digest == ""
        with pytest.raises(HumanReplyError, match="not in a store"):
            await bank.agent().resume(first.suspension_record, Allow(), to="0" * 64).load()
        return await bank.agent("enough").resume(first.suspension_record, Allow(), by="ann")

    result = asyncio.run(scene())
    (answer,) = [r.data["out"]["answered"] for r in result.journal if "answered" in r.data.get("out", ())]
    assert answer == {"reply": {"kind": "allow", "by": "ann"}}


def test_a_reply_to_an_interrupted_run_is_a_clear_error():
    store = MemoryStore()
    bank = Bank(store)

    async def scene() -> None:
        await asked(bank)
        rows = with_own_macs((await store.records("r"))[:-1])
        other = MemoryStore()
        lease = await other.acquire("r", "gone", new=True, keyring=Keyring(b"of the tests"))
        await other.append(lease, rows, "running")
        await other.release(lease)
        with pytest.raises(HumanReplyError, match="asks nothing"):
            await Bank(other).agent().resume("r", Allow(), to=(await store.head("r")).hash).load()

    asyncio.run(scene())


def test_arguments_that_were_changed_in_the_store_are_not_shown_for_approval(tmp_path):
    import sqlite3

    path = tmp_path / "runs.db"
    bank = Bank(SqliteStore(path))
    asyncio.run(asked(bank))
    bank.store.close()
    unpack_rows(path)
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER journal_keeps_what_it_has")
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
        columns = [c[1] for c in db.execute(f"PRAGMA table_info({table})")]
        for column in set(columns) & {"body", "hidden", "data"}:
            db.execute(f"UPDATE {table} SET {column} = replace({column}, '\"Ann\"', '\"Eve\"')")
    db.commit()
    db.close()
    again = Bank(SqliteStore(path))
    with pytest.raises(JournalError, match="hidden value"):
        asyncio.run(again.agent().resume("r", Allow()).load())
    again.store.close()


def answered() -> tuple[list[SealedRecord], int]:
    """The journal of a run that asked and was answered, and the place of the record that says so."""
    bank = Bank(MemoryStore())

    async def scene() -> None:
        await asked(bank)
        await bank.agent("enough").resume("r", Allow())

    asyncio.run(scene())
    rows = asyncio.run(bank.store.records("r"))
    return rows, next(n for n, r in enumerate(rows) if '"kind":"run.resumed"' in r.body)


@pytest.mark.parametrize(
    ("field", "words"), [("seq", "not the request"), ("hash", "not the request"), ("again", "has a reply already")]
)
def test_verify_finds_a_reply_to_another_record_despite_valid_hashes(field, words):
    rows, at = answered()
    to = json.loads(rows[at].body)["to"]
    if field == "again":
        twice = rows[at]._replace(seq=at + 2, body=rows[at].body.replace(f'"seq":{at + 1},', f'"seq":{at + 2},'))
        forged = reseal([*rows[: at + 1], twice], at + 1)
        at += 1
    else:
        other = {"seq": f'"seq":{to["seq"] - 1}}}', "hash": f'"hash":"{"0" * 64}"'}[field]
        old = {"seq": f'"seq":{to["seq"]}}}', "hash": f'"hash":"{to["hash"]}"'}[field]
        assert old in rows[at].body
        edited = rows[at]._replace(body=rows[at].body.replace(old, other))
        forged = reseal([*rows[:at], edited, *rows[at + 1 :]], at)
    report = verify("r", forged)
    assert (report.code, report.seq) == (TAMPERED, at + 1)
    assert words in report.reason


def test_verify_finds_a_reply_without_a_request_despite_valid_hashes():
    rows, at = answered()
    to = json.loads(rows[at].body)["to"]
    words = f',"to":{{"hash":"{to["hash"]}","seq":{to["seq"]}}}'
    assert words in rows[at].body
    edited = rows[at]._replace(body=rows[at].body.replace(words, ""))
    report = verify("r", reseal([*rows[:at], edited, *rows[at + 1 :]], at))
    assert (report.code, report.seq) == (TAMPERED, at + 2)
    assert "no record says that there was a request" in report.reason
