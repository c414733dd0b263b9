"""``agentfsm resume`` without a run: interrupted runs are resumed, waiting ones listed; and runs of another graph."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentfsm import SqliteStore
from agentfsm.cli.local_store import store_keyring
from agentfsm.journal.store_url import locate_store
from tests.cli.conftest import Cli
from tests.cli.test_run_command import TOOLS
from tests.helpers.fake_model_server import FakeModelServer, fake_model_server, text_output, tool_call_output
from tests.helpers.journal_scenarios import with_own_macs

OPTIONS = ["-m", "some-model", "-t", "tools.py", "--store", "runs.db"]

GRAPHS = '''
from agentfsm import LOOP, Failure, FailureKind, RunState, StateSpec, Transition

def too_long(run: RunState) -> Failure | None:
    """Never here."""
    return None

def no_tools(run: RunState) -> Failure | None:
    """Always here."""
    return Failure(kind=FailureKind.capability_gap, explanation="no tools") if run.batch else None

def reviewing(name):
    return LOOP.with_state(
        StateSpec(name, effect=lambda context: None), [Transition(name, None, "dispatch_tool")],
        entered_by="post_llm.tool_calls",
    )

LONGER = LOOP.with_detector("post_llm", too_long, before="no_progress")
NO_TOOLS = LOOP.with_detector("post_llm", no_tools, before="no_progress")
REVIEW, CHECK = reviewing("review"), reviewing("check")
'''


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "graphs.py").write_text(GRAPHS)
    return tmp_path


def start_run(cli: Cli, folder: Path, *more: str, interrupted: bool = False) -> str:
    """The id of a run that waits for approval, or that was interrupted after the model's reply."""
    with fake_model_server(tool_call_output(("remove", {"path": "old.txt"}))) as server:
        result = cli("run", "tidy", *OPTIONS, "--base-url", server.url, "--json", *more)
    assert result.exit_code == 3, result.stderr
    run_id = str(json.loads(result.stdout)["run_id"])
    if not interrupted:
        return run_id
    store = SqliteStore(folder / "runs.db")
    rows = asyncio.run(store.records(run_id))
    rows = rows[: next(n for n, r in enumerate(rows) if '"transition":"call_llm.otherwise"' in r.body) + 1]
    store.close()
    (folder / "runs.db").unlink()
    for more_files in folder.glob("runs.db-*"):
        more_files.unlink()
    store = SqliteStore(folder / "runs.db")

    async def write_records() -> None:
        keyring = store_keyring(locate_store(store.path))
        assert keyring is not None
        lease = await store.acquire(run_id, "gone", new=True, keyring=keyring)
        await store.append(lease, with_own_macs(rows, keyring), "running")
        await store.release(lease)

    asyncio.run(write_records())
    store.close()
    return run_id


def resume(cli: Cli, *words: str, answer: str = "Done.") -> tuple[Any, FakeModelServer]:
    with fake_model_server(text_output(answer)) as server:
        return cli("resume", *words, *OPTIONS, "--base-url", server.url), server


def test_interrupted_runs_are_resumed_and_waiting_ones_listed(cli: Cli, folder: Path) -> None:
    interrupted_id = start_run(cli, folder, interrupted=True)
    waiting_id = start_run(cli, folder)
    result, server = resume(cli)
    assert result.exit_code == 3  # both wait now
    assert server.requests == []  # a reply in the journal is not requested again
    for run_id in (interrupted_id, waiting_id):
        assert f"run {run_id} waits for a person: approval: May 'remove' run with these arguments?" in result.stderr
        assert f"resume with: agentfsm resume {run_id} allow --to " in result.stderr
    assert f"run {interrupted_id}\n" in result.stderr
    assert "old.txt" in result.stderr


def test_json_output_is_one_document(cli: Cli, folder: Path) -> None:
    interrupted_id = start_run(cli, folder, interrupted=True)
    waiting_id = start_run(cli, folder)
    data = json.loads(resume(cli, "--json", "--quiet")[0].stdout)
    assert [r["run_id"] for r in data["resumed"]] == [interrupted_id]
    assert {w["run_id"] for w in data["waiting"]} == {interrupted_id, waiting_id}
    assert {w["tool"] for w in data["waiting"]} == {"remove"}
    assert data["waiting"][0]["arguments"] == {"path": "old.txt"}
    assert data["left"] == []


def test_an_unreadable_run_is_skipped_and_the_others_are_listed(cli: Cli, folder: Path) -> None:
    bad, good = start_run(cli, folder), start_run(cli, folder)
    db = sqlite3.connect(folder / "runs.db")
    db.execute("DROP TRIGGER journal_keeps_what_it_has")
    asks = "SELECT id << 32 | seq FROM run WHERE run_id = ?"
    db.execute(f'UPDATE journal SET body = \'{{"kind":"run.suspended"}}\' WHERE key = ({asks})', (bad,))
    db.commit()
    db.close()
    result, _ = resume(cli, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [each["run_id"] for each in told["waiting"]] == [good]
    assert [each["run_id"] for each in told["left"]] == [bad]


def test_an_approval_is_not_used_up_if_the_tool_is_not_loaded(cli: Cli, folder: Path) -> None:
    first, second = start_run(cli, folder), start_run(cli, folder)
    with fake_model_server(text_output("Done.")) as server:
        bare = ["-m", "some-model", "--store", "runs.db", "--base-url", server.url]
        for reply in ("allow", '{"path": "new.txt"}'):
            refused = cli("resume", first, reply, *bare)
            assert (refused.exit_code, refused.stdout) == (2, "")
            assert "the tool 'remove', which this agent does not have" in refused.stderr
            assert "--tools" in refused.stderr
        assert not server.requests
        assert cli("resume", second, "deny", *bare).exit_code == 0  # a denied call needs no tool
    result, server = resume(cli, first, "allow")
    assert result.exit_code == 0
    assert server.requests[-1]["messages"][-1]["content"] == "removed old.txt"


def test_a_store_without_interrupted_runs_is_reported(cli: Cli, folder: Path) -> None:
    waiting_id = start_run(cli, folder)
    resume(cli, waiting_id, "deny")
    result, server = resume(cli)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no run of this store was interrupted" in result.stderr
    assert server.requests == []


def test_a_run_of_another_graph_is_skipped_and_named(cli: Cli, folder: Path) -> None:
    interrupted_id = start_run(
        cli, folder, "--graph", "graphs.py:NO_TOOLS", "--graph", "agentfsm.loop.transition_table:LOOP", interrupted=True
    )
    result, _ = resume(cli, "--graph", "graphs.py:LONGER")
    assert result.exit_code == 1
    assert f"run {interrupted_id} was not resumed:" in result.stderr
    assert "--migrate" in result.stderr
    taken, _ = resume(cli, "--graph", "graphs.py:LONGER", "--migrate")
    assert taken.exit_code == 3
    assert "waits for a person" in taken.stderr


@pytest.mark.parametrize("words", [["--record", "x.json"], ["--diagram", "x.svg"], ["--skip-path-check"]])
def test_options_for_a_single_run_need_its_id(cli: Cli, folder: Path, words: list[str]) -> None:
    start_run(cli, folder)
    result, _ = resume(cli, *words)
    assert result.exit_code == 2
    assert "name it" in result.stderr


# -- another graph ------------------------------------------------------------------------------------


def test_a_run_is_migrated_if_its_path_is_the_same(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    refused, _ = resume(cli, run_id, "allow", "--graph", "graphs.py:LONGER")
    assert refused.exit_code == 2
    assert "--migrate" in refused.stderr
    taken, _ = resume(cli, run_id, "allow", "--graph", "graphs.py:LONGER", "--migrate", "--by", "Ann")
    assert (taken.exit_code, taken.stdout) == (0, "Done.\n"), taken.stderr
    shown = cli("show", run_id, "--store", "runs.db").stdout
    assert "run.migrated to graph" in shown
    assert "path replayed" in shown
    assert "by Ann" in shown
    assert cli("verify", run_id, "--store", "runs.db").exit_code == 0
    assert cli("replay", run_id, "--graph", "graphs.py:LONGER", "--store", "runs.db").exit_code == 0


def test_a_run_with_another_path_needs_skip_path_check(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    refused, _ = resume(cli, run_id, "allow", "--graph", "graphs.py:NO_TOOLS", "--migrate")
    assert refused.exit_code == 2
    assert "--skip-path-check" in refused.stderr
    taken, _ = resume(cli, run_id, "deny", "--graph", "graphs.py:NO_TOOLS", "--skip-path-check")
    assert taken.exit_code == 0, taken.stderr
    assert "path check skipped" in cli("show", run_id, "--store", "runs.db").stdout
    replayed = cli("replay", run_id, "--graph", "graphs.py:NO_TOOLS", "--store", "runs.db")
    assert replayed.exit_code == 0
    assert "from record" in replayed.stdout


def test_renamed_states_are_given_by_option(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder, "--graph", "graphs.py:REVIEW")
    graph = ["--graph", "graphs.py:CHECK"]
    assert resume(cli, run_id, "allow", "--migrate", *graph)[0].exit_code == 2
    for wrong in ("review", "=x", "review=", "review.otherwise=check", "review=nowhere", "nowhere=check"):
        refused, _ = resume(cli, run_id, "allow", "--rename", wrong, *graph)
        assert refused.exit_code == 2, wrong
        assert "Traceback" not in refused.stderr
    taken, _ = resume(cli, run_id, "allow", "--rename", "review=check", *graph)
    assert (taken.exit_code, taken.stdout) == (0, "Done.\n"), taken.stderr


# -- replies bound to a request -----------------------------------------------------------------------------


def test_the_resume_hint_is_bound_to_the_request(cli: Cli, folder: Path) -> None:
    run_id = start_run(cli, folder)
    digest = json.loads(cli("runs", "--store", "runs.db", "--json").stdout)["hash"]
    refused, _ = resume(cli, run_id, "allow", "--to", "0" * 12)
    assert refused.exit_code == 2
    assert "the reply is to record" in refused.stderr
    done, _ = resume(cli, run_id, "allow", "--to", digest[:12])
    assert done.exit_code == 0


def test_runs_shows_what_a_run_waits_for(cli: Cli, folder: Path) -> None:
    start_run(cli, folder)
    assert "approval: May 'remove' run" in cli("runs", "--store", "runs.db").stdout


@pytest.mark.parametrize("words", [[], ["no-such-run"]])
def test_a_missing_store_is_not_created(cli: Cli, tmp_path: Path, words: list[str]) -> None:
    result = cli("resume", *words, "-m", "some-model", "--base-url", "http://127.0.0.1:9/v1", "--store", "typo.db")
    assert result.exit_code == 2
    assert "there is no store at typo.db" in result.stderr
    assert list(tmp_path.iterdir()) == []
    kept_nowhere = cli("resume", *words, "-m", "some-model", "--base-url", "http://127.0.0.1:9/v1", "--no-store")
    assert kept_nowhere.exit_code == 2
    assert "there are no runs without a store" in kept_nowhere.stderr
