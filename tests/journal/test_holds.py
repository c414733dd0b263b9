"""Holds are sealed: whoever writes to the store without the secret can neither end nor forge one unseen."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentfsm import ConfigurationError, RunHeldError, SqliteStore
from agentfsm.cli.app import app
from agentfsm.journal.maintenance import Hold, find_changed_holds, signed_hold, why_held
from agentfsm.journal.purge import KeptRun, end_hold, hold_run, purge_runs
from agentfsm.journal.redact import redact
from agentfsm.loop.keys import Keyring
from tests.helpers.journal_scenarios import finished_run

SECRET = b"of the tests"
KEYRING, FOREIGN = Keyring(SECRET), Keyring(b"of somebody else")
CASE = Hold("case 7", "ann", 1000.0)
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a run ``r`` that has ended and is held."""
    with SqliteStore(tmp_path / "runs.db") as store:
        finished_run(store, "r", secret=SECRET)
        asyncio.run(hold_run(store, "r", CASE, KEYRING))
    return tmp_path / "runs.db"


def after(path: Path, statement: str) -> tuple[Any, ...]:
    """Whether the run can be redacted and purged after an edit, and what is found."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(statement)

    async def try_both(store: SqliteStore) -> tuple[Any, ...]:
        changed = find_changed_holds(await store.maintenance.holds(), KEYRING)
        try:
            redacted = await redact(store, "r", "4", KEYRING)
        except RunHeldError as error:
            redacted = str(error)
        return redacted, await purge_runs(store, ["r"], KEYRING), [each.reason for each in changed]

    with SqliteStore(path) as store:
        return asyncio.run(try_both(store))


def test_a_hold_that_somebody_without_the_secret_ends_is_not_ended(path: Path) -> None:
    redacted, purged, found = after(path, "UPDATE hold SET ended = 1")
    assert "on hold (somebody without the secret ended that: agentfsm verify)" in redacted
    assert purged.kept == (KeptRun("r", "it is on hold (somebody without the secret ended that: agentfsm verify)"),)
    assert found == ["its hold was not written with the secret; if it is right, write it again: agentfsm store hold"]


@pytest.mark.parametrize("change", ["mac = x''", "mac = zeroblob(20)", "reason = ''", "held_by = 'bob'", "since = 7"])
def test_a_hold_that_was_changed_holds_and_is_found(path: Path, change: str) -> None:
    redacted, purged, found = after(path, f"UPDATE hold SET {change}")
    assert "on hold" in redacted
    assert purged.purged == ()
    assert len(found) == 1


def test_a_run_whose_hold_was_ended_can_be_redacted_and_purged(path: Path) -> None:
    with SqliteStore(path) as store:
        asyncio.run(end_hold(store, "r", KEYRING, by="eve"))
    redacted, purged, found = after(path, "UPDATE run_info SET status = status")
    assert (redacted > 0, purged.purged, found) == (True, ("r",), [])
    with SqliteStore(path) as store:
        assert asyncio.run(store.maintenance.holds()) == {}


def test_the_seal_is_that_of_one_run_one_state_and_one_secret() -> None:
    ended = Hold("case 7", "eve", 2000.0, ended=True)

    async def scenario(keyring: Keyring) -> Hold:
        store: Any = _Kept()
        await hold_run(store, "r", ended, keyring)
        return store.kept

    sealed, foreign = asyncio.run(scenario(KEYRING)), asyncio.run(scenario(FOREIGN))
    assert why_held("r", sealed, KEYRING) is None
    assert why_held("other", sealed, KEYRING) is not None
    assert why_held("r", foreign, KEYRING) is not None
    assert why_held("r", foreign, Keyring(SECRET, [b"of somebody else"])) is None
    assert why_held("r", ended, KEYRING) is not None
    assert why_held("r", None, KEYRING) is None


class _Kept:
    """A store that keeps the last hold."""

    def __init__(self) -> None:
        self.maintenance, self.kept = self, Hold()

    async def head(self, run_id: str) -> None:
        """No run has been written, under whatever secret."""

    async def set_hold(self, run_id: str, hold: Hold) -> None:
        self.kept = hold


def test_no_run_is_held_or_released_under_another_secret_than_its_own(path: Path) -> None:
    with SqliteStore(path) as store:
        before = asyncio.run(store.maintenance.holds())
        for change in (hold_run(store, "r", Hold("case 8"), FOREIGN), end_hold(store, "r", FOREIGN)):
            with pytest.raises(ConfigurationError, match="run 'r' was written under another secret"):
                asyncio.run(change)
        assert asyncio.run(store.maintenance.holds()) == before
        asyncio.run(end_hold(store, "r", Keyring(b"the new one", [SECRET])))  # one that the secret was replaced by
        assert asyncio.run(store.maintenance.holds())["r"].ended


def test_a_hold_ends_no_earlier_than_it_began(path: Path) -> None:
    with SqliteStore(path) as store:
        asyncio.run(end_hold(store, "r", KEYRING, now=500.0))
        held = asyncio.run(store.maintenance.holds())["r"]
        asyncio.run(end_hold(store, "r", KEYRING, now=500.0))
    assert (held.ended, held.since, held.reason) == (True, 1000.0, "case 7")


def test_a_checkpoint_shows_that_a_hold_was_removed_or_put_back() -> None:
    signed = {"r": signed_hold("r", CASE)}
    later, earlier, other = (Hold("case 7", "ann", at) for at in (2000.0, 500.0, 1000.0))
    assert find_changed_holds({"r": CASE}, None, signed) == find_changed_holds({"r": later}, None, signed) == []
    assert other == CASE
    for now in ({}, {"r": earlier}, {"r": Hold("case 8", "ann", 1000.0)}, {"other": CASE}):
        (damage,) = find_changed_holds(now, None, signed)
        assert "somebody removed it, or put an older one back" in damage.reason


def test_a_hold_of_an_earlier_release_holds_and_verify_asks_to_write_it_again(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "schema5" / "runs.db", tmp_path / "runs.db"))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        (run_id,) = db.execute("SELECT run_id FROM run ORDER BY id").fetchone()
        db.execute("INSERT INTO hold (id, reason, held_by, since) SELECT id, 'case 7', 'ann', 1000000 FROM run LIMIT 1")

    async def holds() -> dict[str, Hold]:
        async with SqliteStore(path) as store:
            read = await store.maintenance.holds()
            await store.maintenance.prepare()
            assert await store.maintenance.holds() == read
            assert await store.maintenance.schema_damage() == []
            return read

    assert asyncio.run(holds()) == {run_id: CASE}

    def command(*words: str) -> str:
        env = {"AGENTFSM_SECRET": SECRET.decode()}
        return CliRunner().invoke(app, [*words, "--store", str(path)], env=env).output

    assert "write it again: agentfsm store hold" in command("verify")
    assert command("store", "hold", run_id, "--reason", "case 7") == f"{run_id}  on hold\n"
    assert "write it again" not in command("verify")
    command("store", "unhold", run_id, "--by", "eve")
    assert command("store", "holds") == ""
    assert "write it again" not in command("verify")
