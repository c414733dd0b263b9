"""Purge, retention and erasure: what goes, what stays and why, and that what went is in no byte of the store."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfsm import (
    Actor,
    Agent,
    Allow,
    Approval,
    ConfigurationError,
    Deny,
    Host,
    MemoryStore,
    RunHeldError,
    Runs,
    SqliteStore,
    tool,
)
from agentfsm.journal.erasure import ErasureQuery
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import KeptRun, RetentionRule, apply_retention, verify_tombstone
from agentfsm.journal.redact import redact
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.sqlite import sqlite_maintenance
from agentfsm.journal.verification import GOOD, TAMPERED
from agentfsm.loop.keys import Keyring
from agentfsm.runtime.host import SystemClock
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.postgres import empty_database

SECRET = b"of the tests"
KEYRING = Keyring(SECRET)
CANARY = "ann-4711@example.org"
DAY_S = 86_400


@tool(requires_approval=True)
def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Opens the same store each time."""
    match request.param:
        case "memory":
            store = MemoryStore()
            return lambda: store
        case "sqlite":
            return lambda: SqliteStore(tmp_path / "runs.db")
        case _:
            from agentfsm import PostgresStore

            url: str = request.getfixturevalue("database")
            empty_database(url)
            return lambda: PostgresStore(url)


def agent(store: Any, *script: Any, clock: Any = None, tools: Any = ()) -> Agent:
    host = Host(store=store, secret=SECRET, clock=clock or FakeClock())
    return Agent(ScriptedModel(list(script)), tools=[remove, *tools], host=host)


async def ids(store: Any, **query: Any) -> list[str]:
    return sorted(info.run_id for info in (await store.find_runs(RunQuery(**query))).runs)


def test_old_runs_are_purged_and_the_others_are_not(make: Any) -> None:
    async def main() -> None:
        async with make() as store:
            clock = FakeClock()
            for number in range(4):
                await agent(store, "ok", clock=clock).run("Go.", run_id=f"r{number}", tags=["x"] if number % 2 else [])
                clock.advance(10 * DAY_S)
            await agent(store, call("remove", path="p"), clock=clock).run("Go.", run_id="waits", tags=["x"])
            runs, now = Runs(store, secret=SECRET), clock.time() + 0.001
            rule = RetentionRule(days=25, tag="x")
            dry = await apply_retention(store, rule, KEYRING, now=now, dry_run=True)
            assert (dry.purged, await ids(store)) == (("r1",), ["r0", "r1", "r2", "r3", "waits"])
            assert (await apply_retention(store, rule, KEYRING, now=now)).purged == ("r1",)
            await store.maintenance.set_hold("r0", Hold("case 7"))
            rest = await apply_retention(store, RetentionRule(days=0), KEYRING, by="cron", reason="spring", now=now)
            assert (sorted(rest.purged), rest.kept) == (["r2", "r3"], (KeptRun("r0", "it is on hold (case 7)"),))
            waits = await runs.purge(["waits", "r0", "nobody"])
            assert [each.reason for each in waits.kept] == [
                "it waits for somebody", "it is on hold (case 7)", "there is no such run",
            ]  # fmt: skip
            assert await ids(store) == ["r0", "waits"]
            tombstones = await store.maintenance.tombstones()
            assert [(each.run_id, each.by, each.reason) for each in tombstones] == [
                ("r1", "", "kept for 25 days"), ("r2", "cron", "spring"), ("r3", "cron", "spring"),
            ]  # fmt: skip
            assert {verify_tombstone(each, KEYRING).code for each in tombstones} == {GOOD}

    asyncio.run(main())


@pytest.mark.parametrize("ahead_s", [-100 * DAY_S, 100 * DAY_S])
def test_nothing_is_purged_by_its_age_where_the_clock_differs_from_the_servers(
    ahead_s: int, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentfsm import PostgresStore

    empty_database(database)
    now = time.time

    async def scenario() -> None:
        async with PostgresStore(database) as store:
            await agent(store, "Hello.", clock=SystemClock()).run("Hi.", run_id="new")
            monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
            with pytest.raises(ConfigurationError, match=r"^clock: .* s from the one here: set the wrong one"):
                await Runs(store, secret=SECRET).purge(RetentionRule(days=90))
            monkeypatch.undo()
            assert (await Runs(store, secret=SECRET).purge(RetentionRule(days=90))).purged == ()
            assert await ids(store) == ["new"]

    asyncio.run(scenario())


def test_a_run_goes_with_those_that_it_called_or_not_at_all(make: Any) -> None:
    async def main() -> None:
        async with make() as store:
            for number in (1, 2):
                helper = Agent(ScriptedModel(["helped"])).as_tool("helper", "Helps.")
                await agent(store, call("helper", task="Help."), "ok", tools=[helper]).run("Go.", run_id=f"top{number}")
            (below,) = await ids(store, parent="top2")
            await store.maintenance.set_hold(below, Hold())
            report = await Runs(store, secret=SECRET).purge(["top1", "top2"])
            assert len(report.purged) == 2
            assert report.kept == (KeptRun("top2", f"{below}, which it called, remains: it is on hold"),)
            assert await ids(store) == sorted(["top2", below])

    asyncio.run(main())


def test_a_session_whose_runs_were_purged_goes_on_without_reading_every_tombstone(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with make() as store:
            first, second = [await agent(store, "ok").session("s").run("Go.") for _ in range(2)]
            purged = [first.run_state.run_id, second.run_state.run_id]
            assert (await Runs(store, secret=SECRET).purge(purged)).purged == tuple(purged)
            monkeypatch.setattr(type(store.maintenance), "tombstones", None)
            again = await agent(store, "again").session("s").run("Go.")
            assert again.output == "again"
            assert again.run_state.run_id not in purged

    asyncio.run(main())


@pytest.mark.parametrize("query", [sqlite_maintenance._IS_PURGED, sqlite_maintenance._TOMBSTONES_OF_ID])
def test_what_remains_of_one_purged_run_is_found_by_an_index(query: str, tmp_path: Path) -> None:
    asyncio.run(SqliteStore(tmp_path / "runs.db").maintenance.prepare())
    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        plan = db.execute(f"EXPLAIN QUERY PLAN {query}", ("r",)).fetchall()
    assert any("USING INDEX tombstone_by_run_id" in row[-1] for row in plan)


def test_a_held_run_is_not_redacted(make: Any) -> None:
    async def main() -> None:
        async with make() as store:
            await agent(store, "It is bob@example.org.").run("Go.", run_id="r")
            await store.maintenance.set_hold("r", Hold("case 7"))
            with pytest.raises(RunHeldError, match="case 7"):
                await redact(store, "r", "4", KEYRING)
            report = await Runs(store, secret=SECRET).redact_text("bob@example.org")
            assert [each.reason for each in report.remaining] == [
                "run 'r' is on hold (case 7): end that with agentfsm store unhold"
            ]
            head = await store.head("r")
            assert (await Runs(store, secret=SECRET).verify("r")).code == GOOD  # nothing half done
            assert await store.head("r") == head

    asyncio.run(main())


def bytes_with(folder: Path, text: str) -> list[str]:
    """The files with a text."""
    return [each.name for each in folder.rglob("*") if each.is_file() and text.encode() in each.read_bytes()]


def test_a_persons_data_is_in_no_byte_of_the_store_afterwards(make: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with make() as store:
            await agent(store, "ok").run(f"I am {CANARY}.", run_id="own", actor=CANARY, tags=[CANARY])
            await agent(store, f"Ask {CANARY}.").run("Whom?", run_id="other", actor="bob")
            await agent(store, call("remove", path="p")).run("Go.", run_id="waits", actor=CANARY)
            await agent(store, "ok").run(f"Tell {CANARY}.", run_id="held", actor="eve")
            await store.maintenance.set_hold("held", Hold("case 7"))
            runs, person = Runs(store, secret=SECRET), ErasureQuery(actor=CANARY, text=CANARY)
            dry = await runs.erase(person, dry_run=True)
            assert (dry.purged, await ids(store)) == (("own",), ["held", "other", "own", "waits"])
            assert {each.run_id for each in dry.deleted} == {"other", "held"}
            report = await runs.erase(person, by="the officer")
            assert report.purged == ("own",)
            assert report.kept == (KeptRun("waits", "it waits for somebody"),)
            assert {each.run_id for each in report.deleted} == {"other"}
            assert {(each.run_id, each.field) for each in report.remaining if each.place is None} == {
                ("waits", "requester.id")
            }
            assert {each.run_id for each in report.remaining if each.place is not None} == {"held"}
            for run_id in ("other", "waits"):
                assert (await runs.verify(run_id)).code != TAMPERED
            await store.maintenance.set_hold("held", None)
            await agent(store, "ok").resume("waits", Deny())
            last = await runs.erase(person)
            assert (last.purged, last.kept, last.remaining) == (("waits",), (), ())
            if type(store).__name__ == "PostgresStore":
                folder = await store.maintenance._session().read(_data_folder, "")
                await store.maintenance._session().write(lambda db, _: db.execute("CHECKPOINT"))
                assert (Path(folder) / "base").is_dir()
                assert bytes_with(Path(folder) / "base", CANARY) == []
        assert bytes_with(tmp_path, CANARY) == []

    asyncio.run(main())


@pytest.mark.parametrize("ends", [True, False])
def test_rows_that_a_transaction_may_still_read_are_waited_for_and_otherwise_reported(
    ends: bool, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    from agentfsm import PostgresStore
    from agentfsm.journal.postgres import postgres_maintenance

    empty_database(database)

    async def main() -> None:
        async with PostgresStore(database) as store:
            await agent(store, "ok").run("Go.", run_id="own", actor=CANARY)
            folder = await store.maintenance._session().read(_data_folder, "")
            runs, person = Runs(store, secret=SECRET), ErasureQuery(actor=CANARY)
            with psycopg.connect(database) as reader:
                reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                reader.execute("SELECT")

                async def waited(seconds: float) -> None:
                    if ends:
                        reader.rollback()

                monkeypatch.setattr(postgres_maintenance, "asyncio", SimpleNamespace(sleep=waited))
                report = await runs.erase(person)
                assert report.purged == ("own",)
                assert ("a transaction that began before has not ended" in report.elsewhere) is not ends
                if not ends:
                    reader.rollback()
                    monkeypatch.undo()  # the server may be busy with a transaction of its own
                    assert "transaction" not in await store.maintenance.compact()
            await store.maintenance._session().write(lambda db, _: db.execute("CHECKPOINT"))
            assert bytes_with(Path(folder) / "base", CANARY) == []

    asyncio.run(main())


def test_what_others_runs_say_of_an_actor_whose_data_is_erased_is_deleted_or_reported(make: Any) -> None:
    async def main() -> None:
        ann, bob = Actor("ann", ("boss",)), Actor("bob", ("boss",))

        @tool(requires_approval=Approval(2))
        def pay(amount: int) -> str:
            """Pay."""
            return "paid"

        async with make() as store:

            def payer(*script: Any) -> Agent:
                return Agent(ScriptedModel(list(script)), tools=[pay], host=Host(store=store, secret=SECRET))

            for run_id in ("voted", "stopped", "waits", "sent"):
                await payer(call("pay", amount=5)).run("Pay.", run_id=run_id, actor=bob)
            await agent(store, "ok").run("I ask.", run_id="own", actor=ann)
            await agent(store, "ok").run("I ASK.", run_id="shouted", actor="ANN")
            await agent(store, "annoyed: cannot plan").run("Whom?", run_id="other", actor="eve")
            for run_id in ("voted", "waits"):
                await payer().resume(run_id, Allow(), by=Actor(" Ann"))
            await payer("Paid.").resume("voted", Allow(), by=bob)
            runs = Runs(store, secret=SECRET)
            await runs.cancel("stopped", "no money", by=ann)
            for run in await payer().unfinished_runs():
                await run
            await runs.approve("sent", by=ann)
            person = ErasureQuery(actor="ann")
            dry = await runs.erase(person, dry_run=True)
            done = await runs.erase(person, by="the officer")
            for report in (dry, done):
                assert report.purged == ("own",)
                assert [(each.run_id, each.field) for each in report.deleted] == [("stopped", "out.cancelled.reason")]
                assert {(each.run_id, each.field.rpartition("waiting.")[2]) for each in report.remaining} == {
                    ("voted", "out.answered.reply.actor.id"),
                    ("waits", "out.answered.reply.actor.id"),
                    ("waits", "quorum.votes.0.id"),
                    ("voted", "quorum.votes.0.id"),
                    ("sent", "signal"),
                    ("shouted", "requester.id"),
                }
                assert all(each.reason for each in report.remaining)
            for run_id in ("voted", "stopped", "waits", "sent"):
                assert (await runs.verify(run_id)).code != TAMPERED

    asyncio.run(main())


async def _data_folder(db: Any) -> str:
    return str((await (await db.execute("SHOW data_directory")).fetchone())[0])


@pytest.mark.parametrize("name", ["Ann  Smith", "ann\n", "a" * 200])
def test_runs_are_erased_and_purged_by_names_that_are_not_listed_as_they_are(name: str, make: Any) -> None:
    async def main() -> None:
        async with make() as store:
            await agent(store, "ok").run("go", run_id="r1", actor=name)
            await agent(store, "ok").run("go", run_id="r2", session_id=name, tags=[name])
            await agent(store, "ok").run("go", run_id="r3", actor="bob", tags=["a"])
            runs = Runs(store, secret=SECRET)
            assert (await runs.erase(ErasureQuery(actor=name))).purged == ("r1",)
            assert (await runs.purge(RetentionRule(days=0, tag=name, session_id=name))).purged == ("r2",)
            assert await ids(store) == ["r3"]

    asyncio.run(main())


def test_the_forks_of_a_persons_runs_are_erased_with_them(make: Any) -> None:
    async def main() -> None:
        async with make() as store:
            await agent(store, "ok").run("I am Ann.", run_id="own", actor="ann")
            runs = Runs(store, secret=SECRET)
            assert await runs.fork("own", 2, "fork") == "fork"
            assert await runs.fork("fork", 1, "again") == "again"
            for run_id in ("fork", "again"):
                assert (await runs.get(run_id)).info.actor == "ann"
                await agent(store, "ok").resume(run_id)
                assert (await runs.verify(run_id)).code == GOOD
            report = await runs.erase(ErasureQuery(actor="ann"))
            assert (set(report.purged), report.remaining) == ({"own", "fork", "again"}, ())

    asyncio.run(main())


@pytest.mark.parametrize("name", ["actor", "session_id", "tag"])
def test_nothing_is_deleted_by_what_is_longer_than_the_list_shows(name: str) -> None:
    for kind in (ErasureQuery, RetentionRule):
        if hasattr(kind, name):
            with pytest.raises(ConfigurationError, match=f"{name} is too long"):
                kind(**{name: "a" * 201}, **({"days": 0} if kind is RetentionRule else {}))


def test_an_erasure_needs_something_to_look_for() -> None:
    with pytest.raises(ConfigurationError, match="an actor, a session, a tag or a text"):
        ErasureQuery()
    with pytest.raises(ConfigurationError, match="0 days or more"):
        RetentionRule(days=-1)


# -- evidence -----------------------------------------------------------------------------------------


def test_a_run_that_was_tampered_with_stays_and_a_changed_listing_has_none_purged(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def main() -> None:
        async with SqliteStore(path) as store:
            await agent(store, "ok").run("Go.", run_id="changed", tags=["keep"])
            await agent(store, "ok").run("Go.", run_id="tampered", tags=["old"])
        unpack_rows(path)
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE run_info SET tags = '[\"old\"]' WHERE id = 1")
            db.execute("INSERT INTO run_tag (tag, id) VALUES ('old', 1)")
            db.execute("UPDATE journal SET hidden = NULL WHERE key = (2 << 32 | 4)")
        async with SqliteStore(path) as store:
            runs = Runs(store, secret=SECRET)
            report = await runs.purge(RetentionRule(days=0, tag="old"))
            assert report.purged == ()
            assert {each.run_id: each.reason.split(",")[0].split(":")[0] for each in report.kept} == {
                "changed": "its entry in the list differs from its records",
                "tampered": "it does not verify",
            }
            assert (await runs.verify("changed")).reason.startswith("it is listed by another tags")

    asyncio.run(main())


@pytest.mark.parametrize("forged", ["top", "other", "empty"])
def test_a_run_that_is_only_listed_as_called_is_not_purged_with_its_caller(tmp_path: Path, forged: str) -> None:
    path = tmp_path / "runs.db"

    async def main() -> None:
        async with SqliteStore(path) as store:
            await agent(store, "ok").run("Go.", run_id="top")
            await agent(store, "ok").run("Keep this.", run_id="other")
            await store.release(await store.acquire("empty", "me", new=True, keyring=KEYRING))
        with closing(sqlite3.connect(path)) as db, db:
            changed = "UPDATE run_info SET parent = 'top' WHERE id = (SELECT id FROM run WHERE run_id = ?)"
            assert db.execute(changed, (forged,)).rowcount == 1
        async with SqliteStore(path) as store:
            report = await Runs(store, secret=SECRET).purge(["top"])
            (kept,) = report.kept
            assert (report.purged, kept.run_id) == ((), "top")
            assert kept.reason.startswith(
                f"{forged}, which is listed as called by it, remains: its entry in the list differs"
            )
            assert {head.run_id for head in await store.heads()} == {"top", "other", "empty"}
            assert await store.maintenance.tombstones() == []

    asyncio.run(main())


def test_a_fork_is_not_purged_with_its_source_whatever_it_is_listed_by(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def main() -> None:
        async with SqliteStore(path) as store:
            await agent(store, "ok").run("Go.", run_id="top")
            fork_id = await Runs(store, secret=SECRET).fork("top", 2)
            await agent(store, "again").resume(fork_id)
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE run_info SET parent = 'top' WHERE id = 2")
        async with SqliteStore(path) as store:
            report = await Runs(store, secret=SECRET).purge(["top"])
            assert (report.purged, [each.run_id for each in report.kept]) == ((), ["top"])

    asyncio.run(main())


def test_a_session_goes_on_after_its_newest_run_or_all_of_it_was_purged(make: Any) -> None:
    async def main() -> None:
        async with make() as store:
            runs, session = Runs(store, secret=SECRET), agent(store, "a", "b", "c", "d").session("ann")
            first, second = await session.run("1"), await session.run("2")
            assert (await runs.purge([second.run_id])).purged == (second.run_id,)
            third = await session.run("3")
            assert [each.content for each in third.run_state.messages] == ["1", "a", "3", "c"]
            await runs.purge([first.run_id, third.run_id])
            fourth = await session.run("4")
            assert [each.content for each in fourth.run_state.messages] == ["4", "d"]
            assert len({each.run_id for each in (first, second, third, fourth)}) == 4
            assert (await runs.verify(fourth.run_id)).code == GOOD

    asyncio.run(main())


def test_a_tombstone_is_told_from_a_theft(tmp_path: Path) -> None:
    async def main() -> None:
        store = MemoryStore()
        await agent(store, "ok").run("Go.", run_id="r")
        hashes = {record.seq: record.hash for record in await store.records("r")}
        last = max(hashes)
        await Runs(store, secret=SECRET).purge(["r"])
        (tombstone,) = await store.maintenance.tombstones()
        assert verify_tombstone(tombstone, KEYRING, {2: hashes[2], last: hashes[last]}).code == GOOD
        assert verify_tombstone(tombstone, KEYRING, {last: hashes[2]}).code == TAMPERED
        assert verify_tombstone(tombstone, KEYRING, {last + 1: hashes[2]}).code == TAMPERED
        assert verify_tombstone(tombstone, Keyring(b"another")).doubt
        forged = replace(tombstone, mac=KEYRING.current.key_id + "0" * 32)
        assert verify_tombstone(forged, KEYRING).code == TAMPERED

    asyncio.run(main())
