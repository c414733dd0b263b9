"""What a run is listed by follows from its records, is written with them, and holds no secret."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from agentfsm import (
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    ConfigurationError,
    Host,
    JournalError,
    MemoryStore,
    Run,
    Runs,
    SqliteStore,
    UnknownRunError,
    Usage,
    tool,
)
from agentfsm.journal.fork import fork
from agentfsm.journal.journal_writer import LISTED_EVERY_S
from agentfsm.journal.listing import (
    compute_run_info,
    needs_rebuild,
    rebuild_run_info,
    verify_listed_run,
    verify_listing,
)
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.redact import redact
from agentfsm.journal.run_info import RunInfo, RunQuery, WaitingFor, spent_before
from agentfsm.journal.sqlite import sqlite_run_info, sqlite_schema
from agentfsm.journal.sqlite.sqlite_maintenance import find_row_damage, find_schema_damage
from agentfsm.journal.sqlite.sqlite_run_info import count_run_infos, select_run_infos, write_run_info
from agentfsm.journal.sqlite.sqlite_schema import SCHEMA_VERSION
from agentfsm.journal.verification import GOOD, TAMPERED, verify_stored_run
from agentfsm.loop.canonical_json import decode, encode
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import Message, Reply, ToolCall
from agentfsm.testing import FakeClock, ScriptedModel, call
from agentfsm.testing.store_conformance import finds_runs_by_every_part_of_their_prompt
from tests.benchmarks.listing_benchmark import fill_file
from tests.helpers.journal_scenarios import finished_run, waiting_run

KEYRING = Keyring(b"of the tests")
DATA = Path(__file__).parents[1] / "data"
AnyStore = MemoryStore | SqliteStore


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db")


@tool(requires_approval=Approval(n=1, roles=("boss", "cfo")))
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def answer(text: str, **usage: Any) -> Reply:
    return Reply(Message.assistant(text), usage=Usage(**usage))


def agent(store: AnyStore, *script: Any, clock: FakeClock | None = None, **more: Any) -> Agent:
    host = Host(store=store, secret=b"of the tests", clock=clock or FakeClock(), secrets=["hush-hush-4711"])
    return Agent(ScriptedModel(script), tools=[pay], host=host, **more)


def listed(store: AnyStore, run_id: str = "r") -> RunInfo:
    (info,) = asyncio.run(store.find_runs(RunQuery(run_id=run_id))).runs
    return info


def computed(store: AnyStore, run_id: str = "r") -> RunInfo:
    head = asyncio.run(store.head(run_id))
    assert head is not None
    return compute_run_info(run_id, asyncio.run(store.records(run_id)), head.status)


def finish(run: Run[Any, Any]) -> Any:
    async def wait() -> Any:
        return await run

    return asyncio.run(wait())


def test_a_finished_run_is_listed_by_what_was_asked_by_whom_and_how_it_ended(store: AnyStore) -> None:
    clock = FakeClock()
    mine = agent(store, answer("Paid.", input_tokens=30, output_tokens=12, cost_usd=0.5), clock=clock)
    prompt = f"Pay\n  him {'x' * 300}"
    begun = clock.time()
    given = {"order": 7, "shop": f"north\n{'x' * 300}", "usd": 2.0, "rate": 0.5, "eu": True, "by": None, "lines": [1]}
    finish(
        mine.run(prompt, run_id="r", session_id="chat", actor=Actor("ann", ("boss",)), tags=["b", "a"], metadata=given)
    )
    shown = {"order": "7", "shop": f"north {'x' * 194}", "usd": "2", "rate": "0.5", "eu": "true", "by": "null"}
    expected = RunInfo(
        "r", "finished", None, listed(store).started, listed(store).updated, "completed", f"Pay him {'x' * 192}", "ann",
        "chat", ("b", "a"), "scripted", 0.5, 42, metadata=shown,
    )  # fmt: skip
    assert listed(store) == expected == computed(store)
    assert listed(store).started == pytest.approx(begun, abs=1)
    store.close()


def test_a_waiting_run_is_listed_with_what_it_waits_for_and_then_no_more(store: AnyStore) -> None:
    clock = FakeClock()
    mine = agent(store, call("pay", amount=3), clock=clock, guardrails=AgentGuardrails(validity_s=60))
    finish(mine.run("Pay.", run_id="r"))
    waiting = listed(store)
    assert (waiting.status, waiting.ending) == ("suspended", "")
    assert waiting.waiting_for == WaitingFor("approval", "pay", ("boss", "cfo"))
    assert waiting.updated is not None
    assert waiting.expires == pytest.approx(waiting.updated + 60, abs=0.01)
    assert waiting == computed(store)
    mine = agent(store, "done", clock=clock, guardrails=AgentGuardrails(validity_s=60))
    finish(mine.resume("r", Allow(), by=Actor("bob", ("cfo",))))
    over = listed(store)
    assert (over.status, over.ending, over.waiting_for, over.expires) == ("finished", "completed", None, None)
    assert over == computed(store)
    store.close()


@pytest.mark.parametrize(
    ("usages", "cost"),
    [
        ([{"input_tokens": 5, "unpriced_tokens": 5}], None),
        ([{"input_tokens": 5}], 0.0),
        ([{"input_tokens": 5, "cost_usd": 0.25, "unpriced_tokens": 1}], 0.25),
    ],
)
def test_a_run_is_unpriced_if_no_price_is_known(store: AnyStore, usages: list[dict[str, Any]], cost: float) -> None:
    finish(agent(store, *(answer("ok", **usage) for usage in usages)).run("Go.", run_id="r"))
    assert listed(store).cost_usd == cost
    assert listed(store) == computed(store)
    store.close()


def test_a_cost_that_was_summed_without_rounding_is_that_of_the_records(tmp_path: Path) -> None:
    """As earlier releases did."""
    with SqliteStore(tmp_path / "runs.db") as store:
        paid = Reply(Message.assistant("", (ToolCall("1", "pay", {"amount": "x"}),)), usage=Usage(cost_usd=0.1))
        finish(agent(store, paid, paid, answer("ok", cost_usd=0.1)).run("Go.", run_id="r"))
        assert listed(store).cost_usd == 0.3
    for cost, code in ((0.1 + 0.1 + 0.1, GOOD), (0.31, TAMPERED)):
        with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as db:
            db.execute("UPDATE run_info SET cost_usd = ?", (cost,))
        with SqliteStore(tmp_path / "runs.db") as store:
            assert asyncio.run(verify_listed_run(store, "r")).code == code


def test_no_secret_is_listed(store: AnyStore) -> None:
    given = {"order": "hush-hush-4711"}
    finish(agent(store, "ok").run("Log in with hush-hush-4711 now.", run_id="r", metadata=given))
    assert listed(store).prompt == "Log in with [secret] now."
    assert listed(store).metadata == {"order": "[secret]"}
    assert listed(store) == computed(store)
    store.close()


@pytest.mark.parametrize("bad", ["\ud800", "\0"])
def test_what_no_database_stores_is_kept_in_the_run_and_listed_and_found_as_a_replacement(bad: str, store: Any) -> None:
    given: Any = {"session_id": f"s {bad}", "tags": [f"t {bad}"], "metadata": {f"m {bad}": f"v {bad}"}}
    result = finish(agent(store, "ok").run(f"bad {bad} prompt", run_id="r", actor=f"a {bad}", **given))
    assert result.messages[0].content == f"bad {bad} prompt"
    info = listed(store)
    assert (info.prompt, info.actor, info.session_id, info.tags) == (
        "bad \ufffd prompt",
        "a \ufffd",
        "s \ufffd",
        ("t \ufffd",),
    )
    assert info.metadata == {"m \ufffd": "v \ufffd"}
    for query in (
        RunQuery(text=bad, actor=f"a {bad}", session_id=f"s {bad}"),
        RunQuery(tag=f"t {bad}", metadata={f"m {bad}": f"v {bad}"}),
        RunQuery(any_tag=(f"t {bad}",)),
    ):
        assert asyncio.run(store.count_runs(query)) == 1
    with pytest.raises(UnknownRunError):
        asyncio.run(Runs(store).get(f"r{bad}"))
    assert asyncio.run(verify_stored_run(store, "r", keyring=KEYRING)).code == GOOD


@pytest.mark.parametrize("name", ["Ann  Smith", " ann", "ann\n", "\tann\u00a0b", "a" * 250, "[secret 0 0]"])
def test_a_run_is_found_by_its_requester_its_session_and_its_tags_as_they_were_given(
    name: str, store: AnyStore
) -> None:
    finish(agent(store, "ok").run("go", run_id="r", actor=name, session_id=name, tags=[name], metadata={"k": name}))
    for query in (
        RunQuery(actor=name, session_id=name, tag=name, metadata={"k": name}),
        RunQuery(any_tag=(name,)),
    ):
        assert asyncio.run(store.count_runs(query)) == 1
        assert query.matches(listed(store))
    assert asyncio.run(store.count_runs(RunQuery(actor="  "))) == 0


def test_a_redacted_prompt_is_not_listed_and_is_nowhere_in_the_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    name: Any = {"session_id": "canary 0816", "tags": ["canary 0817"], "metadata": {"canary 0818": "canary 0819"}}
    finish(agent(store, "ok").run("The canary 0815 sings.", run_id="r", **name))
    assert listed(store).prompt == "The canary 0815 sings."
    assert (listed(store).session_id, listed(store).tags) == ("canary 0816", ("canary 0817",))
    assert listed(store).metadata == {"canary 0818": "canary 0819"}
    asyncio.run(redact(store, "r", "1", KEYRING))
    assert (listed(store).prompt, listed(store).session_id, listed(store).tags, listed(store).metadata) == (
        "",
        "",
        (),
        {},
    )
    assert listed(store).ending == "completed"
    assert b"canary 081" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert asyncio.run(verify_stored_run(store, "r", keyring=KEYRING)).code == GOOD
    store.close()


def test_a_fork_and_a_sub_agents_run_are_listed(store: AnyStore) -> None:
    finished_run(store)
    asyncio.run(fork(store, "sample", 6, "other", KEYRING))
    assert listed(store, "other") == computed(store, "other")
    assert listed(store, "other").prompt == "Do it all."
    (first,) = asyncio.run(store.records("other"))[:1]
    earlier = decode(first.body)
    assert spent_before(first) == Usage(**earlier.pop("spent"))
    assert spent_before(first._replace(body=encode(earlier))) == Usage()  # as an earlier release forked it
    helper = Agent(ScriptedModel(["helped"]))
    host = Host(store=store, secret=b"of the tests")
    above = Agent(ScriptedModel([call("h", task="Help."), "ok"]), tools=[helper.as_tool("h", "Helps.")], host=host)
    finish(above.run("Go.", run_id="top", tags=["t"]))
    (below,) = asyncio.run(store.find_runs(RunQuery(parent="top"))).runs
    assert (below.prompt, below.ending) == ("Help.", "completed")
    assert asyncio.run(store.find_runs(RunQuery(parent=""))).runs[0].run_id == "top"
    store.close()


def test_a_run_that_goes_on_is_listed_at_most_once_a_second() -> None:
    clock, written = FakeClock(), list[RunInfo]()

    class Counting(MemoryStore):
        def append(
            self, lease: Any, records: Sequence[Any], status: Any, info: RunInfo | None = None, snapshot: Any = None
        ) -> Any:
            written.extend([info] if info is not None else [])
            return super().append(lease, records, status, info, snapshot)

    @tool
    def work(s: float) -> str:
        """Work for so many seconds."""
        clock.advance(s)
        return f"worked {s}"

    host = Host(store=Counting(), secret=b"s", clock=clock)
    quick = [call("work", s=0.01 * n) for n in range(1, 7)]
    finish(Agent(ScriptedModel([*quick, "ok"]), tools=[work], host=host).run("Go.", run_id="quick"))
    assert [info.status for info in written] == ["running", "finished"]
    written.clear()
    slow = [call("work", s=LISTED_EVERY_S + 0.01 * n) for n in range(3)]
    finish(Agent(ScriptedModel([*slow, "ok"]), tools=[work], host=host).run("Go.", run_id="slow"))
    assert [info.status for info in written] == ["running"] * 4 + ["finished"]


def test_what_a_run_is_listed_by_can_be_rebuilt(store: AnyStore) -> None:
    finished_run(store, "one")
    waiting_run(store, "two")
    before = [listed(store, name) for name in ("one", "two")]

    async def spoil_and_rebuild(name: str) -> None:
        lease = await store.acquire(name, "me", keyring=KEYRING)
        head = await store.head(name)
        assert head is not None
        await store.append(
            lease, (), head.status, RunInfo(name, "running", prompt="wrong", tags=("wrong",), metadata={"wrong": "1"})
        )
        await store.release(lease)
        assert (await store.find_runs(RunQuery(text="wrong"))).runs
        await rebuild_run_info(store, name, KEYRING)

    for name in ("one", "two"):
        asyncio.run(spoil_and_rebuild(name))
        assert asyncio.run(verify_stored_run(store, name, keyring=KEYRING)).code in (GOOD, 4)
    assert [listed(store, name) for name in ("one", "two")] == before
    assert asyncio.run(store.count_runs(RunQuery(tag="wrong"))) == 0
    assert asyncio.run(store.count_runs(RunQuery(metadata={"wrong": 1}))) == 0
    store.close()


@pytest.mark.parametrize(("name", "version", "runs"), [("v0.1.0", 1, 16), ("schema2", 2, 2)])
def test_a_file_of_an_earlier_release_is_listed_at_once_and_in_full_when_it_was_rebuilt(
    tmp_path: Path, name: str, version: int, runs: int
) -> None:
    path = Path(shutil.copy(DATA / name / "runs.db", tmp_path / "runs.db"))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (version,)
    with SqliteStore(path) as store:
        before = asyncio.run(store.find_runs(RunQuery(limit=100))).runs
        statuses = {head.run_id: head.status for head in asyncio.run(store.heads())}
        assert {info.run_id: info.status for info in before} == statuses
        assert len(before) == runs == asyncio.run(store.count_runs(RunQuery()))
        assert {info.started for info in before} == {None}
        store.claim()  # migrates the file
        assert asyncio.run(store.find_runs(RunQuery(limit=100))).runs == before
        for info in before:
            assert asyncio.run(rebuild_run_info(store, info.run_id)) == listed(store, info.run_id)
            assert listed(store, info.run_id).started is not None
        if name == "schema2":
            assert [info.run_id for info in asyncio.run(store.find_runs(RunQuery(tag="demo", actor="ann"))).runs] == [
                "finished"
            ]
    assert find_schema_damage(path) == find_row_damage(path) == []


def test_the_metadata_of_a_file_of_schema_5_is_found_when_it_was_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with SqliteStore(path) as store:
        for run_id in ("old", "older"):
            finish(agent(store, "ok").run("Go.", run_id=run_id, metadata={"order": 7}))
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "DROP TABLE prompt_filter; DROP TABLE snapshot; DROP TABLE run_metadata;"
            "ALTER TABLE run_info DROP COLUMN metadata;"
            "PRAGMA user_version = 5"
        )
        db.executescript(
            "ALTER TABLE hold DROP COLUMN ended; ALTER TABLE hold DROP COLUMN mac; DROP INDEX run_by_status"
        )
    by_order = RunQuery(metadata={"order": 7})
    with SqliteStore(path) as store:
        assert (listed(store, "older").prompt, listed(store, "older").metadata) == ("Go.", None)
        assert asyncio.run(store.count_runs(by_order)) == len(asyncio.run(store.find_runs(by_order)).runs) == 0
        store.claim()  # migrates the file
        assert find_schema_damage(path) == find_row_damage(path) == []
        assert listed(store, "older").metadata is None
        assert asyncio.run(store.count_runs(by_order)) == 0
        report = asyncio.run(verify_listing(store, asyncio.run(verify_stored_run(store, "older", keyring=KEYRING))))
        assert report.code == GOOD
        head = asyncio.run(store.head("older"))
        assert head is not None
        assert asyncio.run(needs_rebuild(store, head))
        asyncio.run(rebuild_run_info(store, "older", KEYRING))
        assert not asyncio.run(needs_rebuild(store, head))
        assert [info.run_id for info in asyncio.run(store.find_runs(by_order)).runs] == ["older"]
        assert listed(store, "older") == computed(store, "older")
    assert find_row_damage(path) == []


def test_a_purged_run_leaves_none_of_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with SqliteStore(path) as store:
        finish(agent(store, "ok").run("Go.", run_id="r", metadata={"canary": "0815"}))
        asyncio.run(Runs(store, secret=b"of the tests").purge(["r"]))
        assert asyncio.run(store.count_runs(RunQuery(metadata={"canary": "0815"}))) == 0
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM run_metadata").fetchone() == (0,)
    assert b"canary" not in b"".join(each.read_bytes() for each in tmp_path.iterdir())


def test_a_changed_type_in_a_listing_is_found(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with SqliteStore(path) as store:
        finish(agent(store, "ok").run("Go.", run_id="r"))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE run_info SET prompt = x'00'")
    assert [report.reason for report in find_row_damage(path)] == ["a value has another type than every release wrote"]


@pytest.mark.parametrize(
    "query",
    [
        {"limit": 0},
        {"metadata": {"a": [1]}},
        {"after": "r1"},
        {"after": "-1"},
        {"after": "9" * 19},
        {"status": "completed"},
        {"ending": "finished"},
        {"since": "2026-01-01"},
        {"until": datetime(2026, 1, 1, tzinfo=UTC)},
        {"tag": ["billing"]},
        {"actor": Actor("ann")},
    ],
)
def test_a_query_that_makes_no_sense_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        RunQuery(**query)


def test_the_runs_of_a_store_without_a_file_are_none(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "none.db") as store:
        assert asyncio.run(store.find_runs(RunQuery())).runs == ()
        assert asyncio.run(store.count_runs(RunQuery())) == 0


def test_an_interrupted_run_has_no_owner(tmp_path: Path) -> None:
    async def main() -> None:
        with SqliteStore(tmp_path / "runs.db") as store:
            lease = await store.acquire("r", "me", new=True)
            assert [info.owner for info in (await store.find_runs(RunQuery())).runs] == ["me"]
            del lease
            assert [info.owner for info in (await store.find_runs(RunQuery())).runs] == [None]

    asyncio.run(main())


@pytest.mark.parametrize("block", [1, 2, 3])
def test_filters_of_prompts_exclude_no_run_that_has_the_text(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_run_info, "_BLOCK", block)
    asyncio.run(finds_runs_by_every_part_of_their_prompt(lambda: SqliteStore(tmp_path / "runs.db")))


def test_a_text_that_no_prompt_has_is_searched_without_reading_the_prompts(tmp_path: Path) -> None:
    fill_file(tmp_path / "runs.db", 2_000)
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        db.set_progress_handler(count, 1)
        for text in ("no such text", "word work", "x", "zq", "契約"):
            steps = 0
            assert select_run_infos(db, RunQuery(text=text), SCHEMA_VERSION) == []
            assert count_run_infos(db, RunQuery(text=text), SCHEMA_VERSION) == 0
            assert 0 < steps < 2_000, text  # not one for each prompt
        steps = 0
        assert len(select_run_infos(db, RunQuery(text="WORD"), SCHEMA_VERSION)) == 51
        assert steps < 10_000  # a text that all have is found among the newest


def fill_with_sentences(path: Path, runs: int) -> list[str]:
    """Create a file with runs whose prompts are taken from the documentation, and return these."""
    pages = sorted((DATA.parents[1] / "docs").glob("*.md"))
    words = " ".join(page.read_text(encoding="utf-8") for page in pages).split()
    prompts = [" ".join(words[n : n + 30])[:200] for n in range(0, 30 * runs, 30)]
    with closing(sqlite_schema.open_writer(path, "normal")) as db:
        for n, prompt in enumerate(prompts, 1):
            db.execute("INSERT INTO run (run_id, hash, status) VALUES (?, ?, 'finished')", (f"run{n}", bytes(32)))
            db.execute("INSERT INTO run_info (id) VALUES (?)", (n,))
            write_run_info(db, n, RunInfo(f"run{n}", "finished", prompt=prompt))
    return prompts


def test_most_filters_exclude_two_letters_that_no_prompt_has(tmp_path: Path) -> None:
    runs = 512
    text = "\n".join(fill_with_sentences(tmp_path / "runs.db", runs)).lower()
    absent = ["".join(each) for each in product(ascii_lowercase, repeat=2) if "".join(each) not in text]
    assert len(absent) > 100
    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        read = [
            max(0, min(last, runs) - max(first, 1) + 1)
            for each in absent
            for first, last in sqlite_run_info._ranges(db, RunQuery(text=each), SCHEMA_VERSION)
        ]
    assert sum(read) < 0.15 * runs * len(absent)


def test_a_filter_that_was_made_in_another_way_excludes_nothing_until_compaction_replaces_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            await Agent(ScriptedModel(["ok"]), host=Host(store=store)).run("Go.", run_id="r")
            with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
                db.execute("UPDATE prompt_filter SET bits = zeroblob(8191)")
                db.commit()
            assert [info.run_id for info in (await store.find_runs(RunQuery(text="go"))).runs] == ["r"]
            await store.maintenance.compact()
            with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
                assert db.execute("SELECT length(bits) FROM prompt_filter").fetchall() == [(8190,)]
            assert [info.run_id for info in (await store.find_runs(RunQuery(text="go"))).runs] == ["r"]

    asyncio.run(main())


def test_a_redacted_prompt_leaves_no_trace_in_a_filter_and_compaction_writes_it_anew(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    def filters() -> list[bytes]:
        with closing(sqlite3.connect(path)) as db:
            return [bits for (bits,) in db.execute("SELECT bits FROM prompt_filter")]

    async def main() -> None:
        async with SqliteStore(path) as store:
            host = Host(store=store, secret=b"of the tests")
            await Agent(ScriptedModel(["ok"]), host=host).run("Go.", run_id="kept")
            without = filters()
            await Agent(ScriptedModel(["ok"]), host=host).run("Call ann-4711@example.org.", run_id="r")
            assert len(filters()) == 1
            assert filters() != without
            await redact(store, "r", "1", keyring=KEYRING)
            assert filters() == []
            await store.maintenance.compact()
            assert filters() == without
            assert await store.maintenance.row_damage() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "forged", ["7", '"all of it"', "[]", '{"input_tokens":"7"}', '{"cost_usd":null}', '{"days":7}']
)
def test_what_a_forged_fork_had_used_cannot_be_read(forged: str) -> None:
    first = SealedRecord(1, f'{{"kind":"run.forked","spent":{forged}}}', "0" * 64)
    with pytest.raises(JournalError, match="what the run had used when it was forked cannot be read"):
        spent_before(first)
