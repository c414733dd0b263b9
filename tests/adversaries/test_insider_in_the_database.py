"""An insider with all rights in a PostgreSQL database, but without the host's secret, has a payment made.

A run waits for its second vote. After each attack a host does what a worker does: it goes on with whatever has
something to do, and Bob, who has voted, votes again. Nothing may be paid.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentfsm import Actor, Agent, AgentfsmError, Allow, Approval, Deny, Host, Runs, tool
from agentfsm.journal.commit_encoding import decode_rows
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.signals import Signal, seal_signal, signal_id
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call
from tests.helpers.journal_rows import as_single
from tests.helpers.postgres import empty_database

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from agentfsm.journal.postgres import PostgresStore  # noqa: E402  # needs psycopg
from agentfsm.journal.postgres.postgres_rows import INSERT_ROWS, SELECT_ROWS, row_columns, rows_of  # noqa: E402

SECRET, HIS = b"of the host, 32 bytes at the least", b"of the insider, 32 bytes at the least"
ANN, BOB, CY = (Actor(name, ("manager",)) for name in ("ann", "bob", "cy"))
PAID: list[int] = []


@tool(requires_approval=Approval(n=2, roles=("manager",), not_requester=True))
def pay(amount: int) -> str:
    """Pay."""
    PAID.append(amount)
    return "paid"


@pytest.fixture
def url(database: str) -> str:
    empty_database(database)
    PAID.clear()
    return database


def an_agent(store: Any, *script: Any, secret: bytes = SECRET) -> Agent[Any, Any]:
    return Agent(ScriptedModel(list(script)), tools=[pay], host=Host(store=store, secret=secret))


class Insider:
    """What he does to the run ``r``, of which he can read everything."""

    def __init__(self, url: str) -> None:
        self.db = psycopg.connect(url, autocommit=True)
        self.db.execute("SET session_replication_role = replica")  # no trigger of ours keeps him from anything
        (self.number,) = self.one("SELECT id FROM agentfsm.run WHERE run_id = 'r'")

    def __enter__(self) -> Insider:
        self.unpack_rows()
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def unpack_rows(self) -> None:
        """One row for each record: he has this package, and can read the rows of commits."""
        for (number,) in self.db.execute("SELECT id FROM agentfsm.run").fetchall():
            records = decode_rows(rows_of(self.db.execute(SELECT_ROWS, (number, 0)).fetchall()), GENESIS_HASH)
            self.db.execute("DELETE FROM agentfsm.journal WHERE run = %s", (number,))
            self.db.execute(INSERT_ROWS, row_columns([(number, row) for each in records for row in as_single(each)]))

    def one(self, query: str, *values: Any) -> Any:
        return self.db.execute(query, values).fetchone()

    def sql(self, *statements: str) -> None:
        for each in statements:
            self.db.execute(each.replace("RUN", str(self.number)))  # type: ignore[arg-type]  # his own words

    def last(self) -> tuple[int, str, Any]:
        return self.one("SELECT seq, body, hidden FROM agentfsm.journal WHERE run = %s ORDER BY seq DESC", self.number)

    def append(self, body: dict[str, Any], mac: bytes | None) -> None:
        """A record with a hash that fits, and the row of the run that goes with it."""
        seq, last, _ = self.last()
        (head,) = self.one("SELECT hash FROM agentfsm.journal WHERE run = %s AND seq = %s", self.number, seq)
        text = json.dumps({**body, "seq": seq + 1, "epoch": json.loads(last)["epoch"]}, sort_keys=True)
        digest = bytes.fromhex(record_hash(bytes(head).hex(), text))
        self.db.execute(
            "INSERT INTO agentfsm.journal (run, seq, body, hash, mac) VALUES (%s, %s, %s, %s, %s)",
            (self.number, seq + 1, text, digest, mac),
        )
        self.db.execute("UPDATE agentfsm.run SET seq = %s, hash = %s WHERE id = %s", (seq + 1, digest, self.number))

    def vote(self, actor: Actor, secret: bytes, request_of: str = "r") -> None:
        """A signal with a vote, sealed under a secret that he has."""
        seq, digest = self.request()
        made = Signal(
            signal_id(request_of, "answer", digest, actor.id), request_of, "answer", (seq, digest), 1.0, actor,
            HumanReply("allow"),
        )  # fmt: skip
        sealed = seal_signal(made, Keyring(secret))
        self.db.execute(
            "INSERT INTO agentfsm.signal (id, run_id, body, mac) VALUES (%s, %s, %s, %s)",
            (sealed.id, sealed.run_id, sealed.body, bytes.fromhex(sealed.mac)),
        )

    def request(self) -> tuple[int, str]:
        seq, _, _ = self.last()
        (digest,) = self.one("SELECT hash FROM agentfsm.journal WHERE run = %s AND seq = %s", self.number, seq)
        return seq, bytes(digest).hex()


ANSWER = {"kind": "run.resumed", "from": "approval", "ts": 1}


def rewritten(old: str, new: str) -> Callable[[Insider], None]:
    def attack(insider: Insider) -> None:
        changed = insider.db.execute(
            "UPDATE agentfsm.journal SET body = replace(body, %s, %s) WHERE body LIKE %s", (old, new, f"%{old}%")
        )
        assert changed.rowcount

    return attack


def sql(*statements: str) -> Callable[[Insider], None]:
    return lambda insider: insider.sql(*statements)


ATTACKS: dict[str, Callable[[Insider], None]] = {
    "a record without a MAC": lambda insider: insider.append(ANSWER, None),
    "a record with a MAC of his own": lambda insider: insider.append(ANSWER, b"\1" * 16),
    "one vote is enough": rewritten('"n":2', '"n":1'),
    "no pin of what is approved": rewritten('"approvals"', '"approvale"'),
    "the requester may approve": rewritten('"not_requester":true', '"not_requester":false'),
    "status running": sql("UPDATE agentfsm.run SET status = 'running' WHERE id = RUN"),
    "an epoch of the past": sql("UPDATE agentfsm.run SET epoch = epoch - 1 WHERE id = RUN"),
    "no MAC anywhere": sql("UPDATE agentfsm.journal SET mac = NULL", "UPDATE agentfsm.run SET mac = NULL"),
    "the last record is gone": sql(
        "DELETE FROM agentfsm.journal WHERE run = RUN AND seq = (SELECT seq FROM agentfsm.run WHERE id = RUN)",
        "UPDATE agentfsm.run SET status = 'running', seq = seq - 1, hash = (SELECT hash FROM agentfsm.journal WHERE "
        "run = RUN ORDER BY seq DESC LIMIT 1) WHERE id = RUN",
    ),
    "a vote under his own secret": lambda insider: insider.vote(CY, HIS),
    "a vote that was meant for another run": sql(
        "UPDATE agentfsm.signal SET run_id = 'r' WHERE run_id = 'other'",
        'UPDATE agentfsm.signal SET body = replace(body, \'"run":"other"\', \'"run":"r"\')',
    ),
    "the vote that was acted on, once more": lambda insider: insider.vote(BOB, HIS),
    "a rule that writes another body": sql(
        "CREATE FUNCTION agentfsm.his() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.body := replace(NEW.body, '\"deny\"', '\"allow\"'); RETURN NEW; END $$",
        "CREATE TRIGGER a_his BEFORE INSERT ON agentfsm.journal FOR EACH ROW EXECUTE FUNCTION agentfsm.his()",
        "ALTER TABLE agentfsm.journal ENABLE ALWAYS TRIGGER a_his",
    ),
    "a view in place of the records": sql(
        "ALTER TABLE agentfsm.journal RENAME TO records",
        "CREATE VIEW agentfsm.journal AS SELECT run, seq, replace(body, '\"n\":2', '\"n\":1') AS body, hash, hidden, "
        "mac FROM agentfsm.records",
    ),
    "waking everybody": sql("NOTIFY agentfsm, 'r'", "NOTIFY agentfsm_signal, 'r'"),
    "nothing": lambda insider: None,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_in_the_database_makes_a_call_run(name: str, url: str) -> None:
    async def begin() -> None:
        async with PostgresStore(url) as store:
            for run_id in ("r", "other"):
                await an_agent(store, call("pay", amount=5)).run("Pay.", run_id=run_id, actor=ANN)
                await an_agent(store).resume(run_id, Allow(), by=BOB)
            await Runs(store, secret=SECRET).answer("other", Allow(), by=CY)

    async def carry_on() -> None:
        async with PostgresStore(url) as store:
            agent = an_agent(store, "Done.")
            for run_id in ("r",):
                if (run := await agent.next_run(run_id)) is not None:
                    await run
            await agent.resume("r", Allow(), by=BOB)

    async def decide() -> None:
        async with PostgresStore(url) as store:
            await an_agent(store, "Done.").resume("r", Deny("no"), by=CY)

    asyncio.run(begin())
    with Insider(url) as insider:
        ATTACKS[name](insider)
        for work in (carry_on, decide, carry_on):
            try:
                asyncio.run(work())
            except (AgentfsmError, psycopg.Error):
                assert PAID == []
    assert PAID == []


def test_an_untouched_run_pays_after_its_second_vote(url: str) -> None:
    """Without this, a host that refuses every database would stand every attack."""

    async def scenario() -> None:
        async with PostgresStore(url) as store:
            await an_agent(store, call("pay", amount=5)).run("Pay.", run_id="r", actor=ANN)
            await an_agent(store).resume("r", Allow(), by=BOB)
            await an_agent(store, "Done.").resume("r", Allow(), by=CY)

    asyncio.run(scenario())
    assert PAID == [5]


def test_the_attacks_are_counted(counted: Callable[[str], None]) -> None:
    counted(f"an insider in the database: {len(ATTACKS) - 1} attacks, 0 succeeded")
