"""What the verification of a run costs does not grow with the number of the other runs in its store."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Host, RunQuery, Runs, SqliteStore, StateSpec
from agentfsm.journal.store import Head
from agentfsm.testing import FakeClock, ScriptedModel
from tests.helpers.terminal import run_with_stderr_on_terminal
from tests.journal.test_purge_of_many_runs import SECRET, make_runs, run_command, write_keys

COUNT = 120
READS = ("head", "records", "find_runs", "heads")


class CountedId(str):
    """The id of a run, which counts how often it is compared with another one."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return str.__eq__(self, other)


def fill(path: Path, count: int = COUNT, tags: tuple[str, ...] = ()) -> None:
    async def make() -> None:
        async with SqliteStore(path, synchronous="normal") as store:
            if not tags:
                await make_runs(store, count, range(0))
                return
            host = Host(store=store, secret=SECRET, clock=FakeClock(), monitor="off")
            for number in range(count):
                await Agent(ScriptedModel(["ok"]), host=host).run("Go.", run_id=f"r{number}", tags=tags)

    asyncio.run(make())
    write_keys(path.parent)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each method that reads is called from now on."""
    counts: Counter[str] = Counter()

    def count(name: str, read: Any) -> Any:
        def counting(self: SqliteStore, *given: Any) -> Any:
            counts[name] += 1
            return read(self, *given)

        return counting

    for name in READS:
        monkeypatch.setattr(SqliteStore, name, count(name, getattr(SqliteStore, name)))
    return counts


@pytest.mark.parametrize("words", [("verify",), ("checkpoint", "--key", "key.pem")])
def test_each_journal_is_read_once_and_each_run_costs_four_reads(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "runs.db")
    monkeypatch.chdir(tmp_path)
    counts = counted_reads(monkeypatch)
    assert run_command(*words, "--store", tmp_path / "runs.db").exit_code == 0
    of_store = counts.pop("heads")
    assert of_store <= 3
    assert counts == {"head": 2 * COUNT, "records": COUNT, "find_runs": COUNT}


def test_the_ids_of_all_runs_are_not_compared_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "runs.db")
    heads = SqliteStore.heads

    async def with_counted_ids(self: SqliteStore, *given: Any) -> list[Head]:
        found = await heads(self, *given)
        return [replace(each, run_id=CountedId(each.run_id)) for each in found]

    monkeypatch.setattr(SqliteStore, "heads", with_counted_ids)
    monkeypatch.setattr(CountedId, "compared", 0)
    assert run_command("verify", "--store", tmp_path / "runs.db").exit_code == 0
    assert CountedId.compared <= 10 * COUNT  # each with each would be 120 times 60


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_one_run_is_found_without_looking_at_those_whose_ids_begin_with_its_own(
    tenant: str | None, tmp_path: Path
) -> None:
    def steps(count: int) -> int:
        """How much work the database has with it, in units of 10 instructions of its machine."""
        path = tmp_path / f"{count}.db"
        fill(path, count, () if tenant is None else (f"tenant:{tenant}",))
        counted = 0

        def note() -> int:
            nonlocal counted
            counted += 1
            return 0

        async def find() -> None:
            async with SqliteStore(path) as store:
                runs = Runs(store, secret=SECRET, tenant=tenant)
                await runs.list(RunQuery(exact_id="r1"))
                db: sqlite3.Connection = store._reader._db  # type: ignore[assignment]
                db.set_progress_handler(note, 10)
                assert [info.run_id for info in (await runs.list(RunQuery(exact_id="r1"))).runs] == ["r1"]

        asyncio.run(find())
        return counted

    few, many = steps(12), steps(200)  # of 200, 111 begin with r1
    assert 0 < many <= few + 2


def test_a_terminal_shows_how_far_a_checkpoint_is_and_a_file_gets_the_note_alone(tmp_path: Path) -> None:
    fill(tmp_path / "runs.db", 12)
    words = ["checkpoint", "--key", "key.pem", "--store", "runs.db"]
    printed, shown = run_with_stderr_on_terminal(words, tmp_path, TERM="xterm", AGENTFSM_SECRET=SECRET.decode())
    assert printed.startswith("agentfsm\n12\n")
    assert "\x1b" not in printed
    assert "verifying" in shown


def test_a_run_that_does_not_verify_is_found_among_many(tmp_path: Path) -> None:
    fill(tmp_path / "runs.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as db:
        for (trigger,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {trigger}")
        db.execute("UPDATE run_info SET prompt = 'Pay.' WHERE id = (SELECT id FROM run WHERE run_id = 'r1')")
    db.close()
    told = run_command("verify", "--store", tmp_path / "runs.db").output
    bad = [line for line in told.splitlines() if line.startswith("r1  ")]
    assert len(bad) == 1
    assert "it is listed by another prompt than its records say" in bad[0]
    refused = run_command("checkpoint", "--key", tmp_path / "key.pem", "--store", tmp_path / "runs.db")
    assert refused.exit_code == 1
    assert "\u2014" not in refused.output


def test_a_table_that_all_runs_have_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "runs.db")
    made: Counter[str] = Counter()
    make = StateSpec.__post_init__

    def count(self: StateSpec) -> None:
        made[self.name] += 1
        make(self)

    monkeypatch.setattr(StateSpec, "__post_init__", count)
    assert run_command("verify", "--store", tmp_path / "runs.db").exit_code == 0
    assert max(made.values(), default=0) <= 1
