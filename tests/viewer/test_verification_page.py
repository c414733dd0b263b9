"""Verification in a real browser: intact, changed and unreadable journals, the store, and what was not checked."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import Agent, Host, Runs, SqliteStore
from agentfsm.journal.checkpoint import SignedHeads
from agentfsm.journal.maintenance import Hold, signed_hold
from agentfsm.journal.purge import hold_run
from agentfsm.journal.signals import SealedSignal
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel
from tests.helpers.browser import elsewhere, has_text, site_page
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.viewer_server import served

SECRET = b"0123456789abcdef0123456789abcdef"


def three_runs(file: Path) -> dict[str, dict[int, str]]:
    """Three finished runs, of which one was changed in the file afterwards; and what a checkpoint would have signed."""
    signed: dict[str, dict[int, str]] = {}

    async def write() -> None:
        async with SqliteStore(file) as store:
            for name in ("good", "changed", "also-good"):
                agent = Agent(ScriptedModel(["fine"]), host=Host(store=store, secret=SECRET))
                await agent.run("How?", run_id=name)
            for head in await store.heads():
                signed[head.run_id] = {head.seq: head.hash}

    asyncio.run(write())
    unpack_rows(file)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
        triggers = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            database.execute(f'DROP TRIGGER "{name}"')
        database.execute(
            "UPDATE journal SET body = replace(body, 'post_llm.otherwise', 'post_llm.tool_calls') "
            "WHERE key >> 32 = (SELECT id FROM run WHERE run_id = 'changed')"
        )
        for _, sql in triggers:
            database.execute(sql)
    database.close()
    return signed


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[int, str]]]:
    file = tmp_path_factory.mktemp("verification") / "runs.db"
    return file, elsewhere(lambda: three_runs(file))


@pytest.fixture(scope="module")
def site(stored: tuple[Path, dict[str, dict[int, str]]]) -> Iterator[str]:
    file, signed = stored
    checkpoint = SignedHeads(datetime(2026, 10, 5, 12, 30, tzinfo=UTC), {**signed, "stolen": {3: "0" * 64}})
    store = SqliteStore(file)
    with served(agentfsm.viewer.app(store, secret=SECRET, checkpoint=checkpoint)) as address:
        yield address
    elsewhere(lambda: asyncio.run(store.aclose()))


def test_each_run_has_a_badge_and_those_that_were_changed_come_first(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/verification")
        has_text(page.locator("div[aria-live] [role=status]"), "3 runs: ")
        rows = page.locator("div[aria-live] tbody tr")
        has_text(rows.nth(0), "tampered")
        assert "changed" in rows.nth(0).locator("a").first.get_attribute("href")
        has_text(rows.nth(1), "intact")
        has_text(rows.nth(2), "intact")
        assert events == []


@pytest.mark.slow
def test_the_store_and_what_was_not_checked_are_told(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/verification")
        store = page.get_by_role("region", name="The store")
        has_text(store, "stolen")
        has_text(store, "the checkpoint has it, and the store does not")
        has_text(store, "since the checkpoint, which is of 2026-10-05 12:30:00 UTC")
        assert "without the secret" not in store.inner_text()
        assert events == []


def test_the_badge_of_a_run_that_is_listed_by_what_its_records_do_not_say_is_that_of_a_changed_one(
    browser: Any, tmp_path: Path
) -> None:
    async def write() -> None:
        async with SqliteStore(tmp_path / "runs.db") as store:
            await Agent(ScriptedModel(["fine"]), host=Host(store=store, secret=SECRET)).run("How?", run_id="mine")

    elsewhere(lambda: asyncio.run(write()))
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as database:
        database.execute("UPDATE run_info SET prompt = 'Why?'")
    database.close()
    store = SqliteStore(tmp_path / "runs.db")
    with (
        served(agentfsm.viewer.app(store, secret=SECRET)) as site,
        site_page(browser, site) as (page, _),
    ):
        page.goto("/verification")
        has_text(page.locator("div[aria-live] tbody tr"), "it is listed by another prompt than its records say")
        answer = page.request.get("/api/verification/run?run=mine").json()
        assert answer["verdict"] == "tampered"
    elsewhere(lambda: asyncio.run(store.aclose()))


def test_without_secret_and_checkpoint_it_says_what_that_leaves_open(
    browser: Any, stored: tuple[Path, dict[str, dict[int, str]]]
) -> None:
    store = SqliteStore(stored[0])
    with served(agentfsm.viewer.app(store)) as site, site_page(browser, site) as (page, events):
        page.goto("/verification")
        region = page.get_by_role("region", name="The store")
        has_text(region, "without the secret")
        has_text(region, "without a checkpoint")
        answer = page.request.get("/api/verification/run?run=good").json()
        assert answer["verdict"] == "intact"
        assert len(answer["keys"]) == 1
        assert events == []
    elsewhere(lambda: asyncio.run(store.aclose()))


def test_the_store_names_holds_signals_and_purges_that_somebody_else_wrote(browser: Any, tmp_path: Path) -> None:
    file, keyring = tmp_path / "runs.db", Keyring(SECRET)

    async def write() -> SignedHeads:
        async with SqliteStore(file) as store:
            for name in ("held", "purged", "freed"):
                await Agent(ScriptedModel(["fine"]), host=Host(store=store, secret=SECRET)).run("How?", run_id=name)
            for name in ("held", "freed"):
                await hold_run(store, name, Hold("case 7", "ann", 1000.0), keyring)
            hashes = {head.run_id: {head.seq: head.hash} for head in await store.heads()}
            holds = {run_id: signed_hold(run_id, hold) for run_id, hold in (await store.maintenance.holds()).items()}
            await Runs(store, secret=SECRET).purge(["purged"], by="ann")
            await store.signals.send(SealedSignal("s1", "held", "{}", "0" * 40))
            return SignedHeads(datetime(2026, 10, 5, 12, 30, tzinfo=UTC), hashes, holds)

    signed = elsewhere(lambda: asyncio.run(write()))

    def problems() -> dict[str, str]:
        store = SqliteStore(file)
        with (
            served(agentfsm.viewer.app(store, secret=SECRET, checkpoint=signed)) as site,
            site_page(browser, site) as (page, _),
        ):
            page.goto("/verification")
            found = page.request.get("/api/verification/store").json()["problems"]
        elsewhere(lambda: asyncio.run(store.aclose()))
        return {each["where"]: each["reason"] for each in found}

    assert list(problems()) == ["held"]  # the purge is no theft
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("UPDATE hold SET reason = 'none' WHERE id = (SELECT id FROM run WHERE run_id = 'held')")
        database.execute("DELETE FROM hold WHERE id = (SELECT id FROM run WHERE run_id = 'freed')")
        database.execute("DELETE FROM signal")
        database.execute("UPDATE tombstone SET content = replace(content, 'ann', 'bob')")
    database.close()
    found = problems()
    assert set(found) == {"held", "freed", "purged"}
    assert "hold is gone" in found["freed"]
    assert "tombstone was not written with the secret" in found["purged"]
