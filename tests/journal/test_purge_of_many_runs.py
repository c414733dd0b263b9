"""Most runs of a large store are purged: what remains verifies, also with an older checkpoint, and holds remain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from agentfsm import Agent, Host, SqliteStore
from agentfsm.cli.app import app
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import RetentionRule, apply_retention, hold_run
from agentfsm.loop.keys import Keyring
from agentfsm.testing import FakeClock, ScriptedModel

SECRET = b"of the tests"
KEYRING = Keyring(SECRET)
AT_ONCE = 100


def run_command(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"AGENTFSM_SECRET": SECRET.decode()})


async def make_runs(store: SqliteStore, count: int, held: range) -> None:
    """Runs of which every tenth is new, and some of the old ones are on hold."""
    host = Host(store=store, secret=SECRET, clock=FakeClock(), monitor="off")
    for first in range(0, count, AT_ONCE):
        await asyncio.gather(
            *(
                Agent(ScriptedModel(["ok"]), host=host).run(
                    "Go.", run_id=f"r{number}", tags=["old" if number % 10 else "new"]
                )
                for number in range(first, min(first + AT_ONCE, count))
            )
        )
    for number in held:
        await hold_run(store, f"r{number}", Hold(f"case {number}", by="Eve"), KEYRING)


def write_keys(folder: Path) -> None:
    secret_key = ed25519.Ed25519PrivateKey.generate()
    pem = secret_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    public = secret_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.soak)])
def test_nine_of_ten_runs_are_purged_and_the_rest_is_intact(
    count: int, tmp_path: Path, counted: Callable[[str], None]
) -> None:
    path, log = tmp_path / "runs.db", tmp_path / "log"
    held = range(1, count, count // 50)
    took: dict[str, float] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        done = work()
        took[what] = time.perf_counter() - begun
        return done

    async def purge() -> tuple[int, list[str]]:
        async with SqliteStore(path, synchronous="normal") as store:
            report = await apply_retention(store, RetentionRule(days=1, tag="old"), KEYRING)
            return len(report.purged), [f"{run.run_id}: {run.reason}" for run in report.kept]

    async def make() -> None:
        async with SqliteStore(path, synchronous="normal") as store:
            await make_runs(store, count, held)

    async def left() -> tuple[int, int, set[str]]:
        async with SqliteStore(path) as store:
            maintenance = store.maintenance
            heads, tombstones = await store.heads(), await maintenance.tombstones()
            return len(heads), len(tombstones), set(await maintenance.holds())

    timed("made", lambda: asyncio.run(make()))
    write_keys(tmp_path)
    note = timed(
        "signed", lambda: run_command("checkpoint", "--key", tmp_path / "key.pem", "--log", log, "--store", path)
    )
    assert note.exit_code == 0, note.output
    (tmp_path / "note").write_text(note.stdout)
    verify = ("verify", "--checkpoint", tmp_path / "note", "--key", tmp_path / "public.pem", "--log", log)
    kept = {number for number in held if number % 10}
    purged, reasons = timed("purged", lambda: asyncio.run(purge()))
    assert purged == count - count // 10 - len(kept)
    assert sorted(reasons) == sorted(f"r{number}: it is on hold (case {number})" for number in kept)
    assert asyncio.run(left()) == (count // 10 + len(kept), purged, {f"r{number}" for number in held})
    size = path.stat().st_size
    assert timed("compacted", lambda: run_command("store", "compact", "--store", path)).exit_code == 0
    assert path.stat().st_size < size / 2
    checked = timed("verified", lambda: run_command(*verify, "--store", path))
    assert checked.exit_code == 0, checked.output[-2000:]
    with contextlib.closing(
        sqlite3.connect(path, isolation_level=None)
    ) as db:  # a thief takes a run that is not purged, and one of the tombstones
        for (trigger,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {trigger}")
        (number,) = db.execute("SELECT id FROM run WHERE run_id = 'r0'").fetchone()
        db.execute(f"DELETE FROM journal WHERE key >> 32 = {number}")
        for table in ("hold", "run_tag", "run_metadata", "run_info", "run"):
            db.execute(f"DELETE FROM {table} WHERE id = {number}")
        db.execute("DELETE FROM tombstone WHERE run_id = 'r2'")
    db.close()
    stolen = run_command(*verify, "--json", "--store", path)
    assert stolen.exit_code == 1
    bad = {report["run_id"] for report in map(json.loads, stolen.stdout.splitlines()) if report["reason"]}
    assert {"r0", "r2"} <= bad
    counted(
        f"of {count:,} runs {purged:,} were purged: "
        + ", ".join(f"{what} in {seconds:.1f} s" for what, seconds in took.items())
    )
