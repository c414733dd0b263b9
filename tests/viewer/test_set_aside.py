"""Runs that workers have set aside, in the list of runs and on their own pages."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentfsm.viewer
import agentfsm.viewer.viewer_context
from agentfsm import Agent, open_store
from agentfsm.testing import ScriptedModel
from tests.helpers.browser import elsewhere, has_text, site_page
from tests.helpers.journal_scenarios import finished_run, waiting_run
from tests.helpers.set_aside_runs import cut_off_often, put_back, set_aside
from tests.helpers.viewer_server import served

pytest.importorskip("dbos", reason="dbos is not installed")
pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42), reason="DBOS needs SQLite 3.42 or newer"
)

START_OF_2100 = 4_102_444_800.0


def asked(site: str, question: str) -> Any:
    with urllib.request.urlopen(f"{site}/api/{question}", timeout=60) as answer:  # our own server
        return json.load(answer)


def listed(site: str) -> dict[str, Any]:
    return {run["id"]: run["aside"] for run in asked(site, "runs")["runs"]}


@pytest.fixture
def queues_asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The runs of which the viewer asks the queues, each time that it does; it asks whenever a page does."""
    found: list[set[str]] = []
    find_set_aside = agentfsm.viewer.viewer_context.find_set_aside

    async def listening(queues: Any, heads: Any) -> Any:
        found.append({head.run_id for head in heads})
        return await find_set_aside(queues, heads)

    monkeypatch.setattr("agentfsm.viewer.viewer_context.find_set_aside", listening)
    monkeypatch.setattr("agentfsm.viewer.viewer_context.ASIDE_S", 0.0)
    return found


def test_the_list_and_the_page_of_a_run_say_why_until_it_is_put_back(
    tmp_path: Path, queues_asked: list[set[str]]
) -> None:
    set_aside(tmp_path, "r")
    set_aside(tmp_path, "later", until=START_OF_2100)
    with served(agentfsm.viewer.app(open_store(tmp_path / "runs.db"))) as site:
        expected = {"reason": "it kills its workers", "until": None}
        assert listed(site) == {"later": expected | {"until": START_OF_2100}, "r": expected}
        assert asked(site, "run?run=r")["run"]["aside"] == expected
        put_back(tmp_path, "r")
        assert listed(site)["r"] is None
        assert asked(site, "run?run=r")["run"]["aside"] is None
    assert queues_asked == [{"r", "later"}, {"r"}, {"r", "later"}, {"r"}]


def test_the_queues_are_asked_about_runs_only_that_a_worker_should_be_working_on(
    tmp_path: Path, queues_asked: list[set[str]]
) -> None:
    store = open_store(tmp_path / "runs.db")
    finished_run(store, "whole")
    waiting_run(store, "waits")
    asyncio.run(store.aclose())
    with served(agentfsm.viewer.app(open_store(tmp_path / "runs.db"))) as site:
        assert listed(site) == {"waits": None, "whole": None}
        asked(site, "run?run=waits")
        assert queues_asked == []
    asyncio.run(cut_off_often(tmp_path, Agent(ScriptedModel(["Hello."])), "cut off"))
    with served(agentfsm.viewer.app(open_store(tmp_path / "runs.db"))) as site:
        assert listed(site) == {"cut off": None, "waits": None, "whole": None}
        assert queues_asked == [{"cut off"}]
    assert not (tmp_path / "runs.db.queue").exists()


def test_within_some_seconds_the_queues_are_asked_once_about_a_run(
    tmp_path: Path, queues_asked: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.viewer.viewer_context.ASIDE_S", 3600.0)
    set_aside(tmp_path, "r")
    with served(agentfsm.viewer.app(open_store(tmp_path / "runs.db"))) as site:
        for _ in range(3):
            assert listed(site)["r"]
            assert asked(site, "run?run=r")["run"]["aside"]
    assert queues_asked == [{"r"}]


@pytest.fixture
def unclosed() -> Iterator[None]:
    """For a database that DBOS cannot use: it does not close its connection, which goes with the error in the log."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.usefixtures("unclosed")
def test_without_the_extra_and_with_queues_that_cannot_be_read_runs_are_shown_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_aside(tmp_path, "r")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "dbos", None)
        without.delitem(sys.modules, "agentfsm.workers.dbos_waker")
        with served(agentfsm.viewer.app(open_store(tmp_path / "runs.db"))) as site:
            assert listed(site) == {"r": None}
    assert caplog.messages == []
    (tmp_path / "runs.db.queue").write_bytes(b"not a database" * 1000)
    with served(agentfsm.viewer.app(open_store(tmp_path / "runs.db"))) as site:
        assert listed(site) == {"r": None}
    ours = [each.message.partition(": ")[0] for each in caplog.records if each.name.startswith("agentfsm")]
    assert ours == ["it is not known which runs are set aside"]  # DBOS may log it, too
    caplog.clear()


@pytest.mark.slow
def test_the_pages_show_it_live(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfsm.viewer.viewer_context.ASIDE_S", 0.0)
    elsewhere(lambda: set_aside(tmp_path, "<b>r</b>"))
    elsewhere(lambda: set_aside(tmp_path, "later", until=START_OF_2100))
    store = elsewhere(lambda: open_store(tmp_path / "runs.db"))
    with served(agentfsm.viewer.app(store)) as site, site_page(browser, site) as (page, events):
        page.goto("/run?id=%3Cb%3Er%3C/b%3E")
        about = page.locator(".about")
        has_text(about, "set aside")
        has_text(about, "it kills its workers; to try it again: agentfsm worker --put-back <b>r</b>")
        page.goto("/")
        row = page.locator("tr").filter(has_text="<b>r</b>")
        has_text(row, "set aside: it kills its workers; to try it again: agentfsm worker --put-back <b>r</b>")
        has_text(page.locator("tr[data-run=later]"), "it kills its workers; it is tried again at 2100-01-01 00:00:00")
        elsewhere(lambda: put_back(tmp_path, "<b>r</b>"))
        has_text(row, "interrupted")
        page.goto("/run?id=%3Cb%3Er%3C/b%3E")
        has_text(about, "interrupted")
        assert events == []
