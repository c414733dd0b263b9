"""Runs killed anywhere and resumed: the same end, no acknowledged record lost, no effect repeated too often."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.child_process import run_helper
from tests.helpers.crash_injection import with_resolved_doubts, without_detours
from tests.helpers.journal_scenarios import CHANGES
from tests.helpers.postgres import shared_server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")


EVERY_POINT = pytest.param(1, marks=pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [12, EVERY_POINT])
def test_a_run_that_is_killed_at_any_point_comes_to_the_same_end(step, counted):
    told = run_helper("crash_injection", "matrix", str(step))
    where, doubts = told["where"], told["doubts"]
    assert told["points"] == sum(where.values()) >= 1000 // step
    assert len(where) >= 12
    assert told["kills"]["fork"] >= 80 // step
    moved = sum(told["kills"][scenario] for scenario in CHANGES)
    assert min(told["kills"][scenario] for scenario in CHANGES) >= 50 // step
    assert moved == sum(told["changed"].values())  # each of these runs tells of its new graph once
    assert told["from snapshots"] >= told["points"] / 2
    cut_off = told["changed"]["effect.intent"] + told["changed"].get("transition", 0)  # in an effect, or before one
    assert told["changed"].keys() <= {"run.suspended", "effect.intent", "transition"}
    assert min(told["changed"]["run.suspended"], cut_off) >= 40 // step
    assert doubts["after beside_once"] == where["after beside_once"] >= 1  # what cannot be known is asked about
    assert doubts["after careful"] == where["after careful"] >= 1
    assert sum(doubts.values()) >= 5
    assert not {"before again", "after again", "before the model", "after the model"} & doubts.keys()
    counted(
        f"killed with SIGKILL at {told['points']} points of {len(where)} kinds in {len(told['kills'])} scenarios; "
        f"{sum(doubts.values())} calls in doubt; {moved} of them in runs that go on under another graph, "
        f"{told['changed']['effect.intent']} of which were cut off in front of that; loaded from a snapshot "
        f"{told['from snapshots']} times"
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_run_on_a_server_that_is_killed_at_any_point_comes_to_the_same_end(counted):
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with shared_server() as url:
        told = run_helper("crash_injection", "matrix", "1", url)
    where, doubts = told["where"], told["doubts"]
    assert told["points"] == sum(where.values()) >= 400
    assert {"before a commit", "after a commit", "in a transaction", "acknowledged"} < where.keys()
    assert told["from snapshots"] >= told["points"] / 2
    assert doubts["after beside_once"] == where["after beside_once"] >= 1  # what cannot be known is asked about
    assert doubts["after careful"] == where["after careful"] >= 1
    assert not {"before again", "after again", "before the model", "after the model"} & doubts.keys()
    counted(
        f"on PostgreSQL: killed with SIGKILL at {told['points']} points of {len(where)} kinds in "
        f"{len(told['kills'])} scenarios; {sum(doubts.values())} calls in doubt; loaded from a snapshot "
        f"{told['from snapshots']} times"
    )


@pytest.mark.timeout(3600)
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(3, 5), pytest.param(0, 100, marks=pytest.mark.soak)])
def test_a_run_on_a_server_that_is_killed_again_and_again_comes_to_the_same_end(seed, count, counted):
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with shared_server() as url:
        told = run_helper("crash_injection", "histories", str(seed), str(count), url)
    assert told["kills"] >= count
    assert told["most"] == 5 or count < 100
    assert told["from snapshots"] >= count / 2
    counted(
        f"on PostgreSQL: {count} random histories, seed {seed}: {told['kills']} kills ({told['outside']} from "
        f"outside), up to {told['most']} in one, {told['doubts']} calls in doubt; loaded from a snapshot "
        f"{told['from snapshots']} times"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [6, EVERY_POINT])
def test_starting_interpreters_shows_nothing_that_forking_hides(step, counted):
    kills = run_helper("crash_injection", "fresh", str(step))["kills"]
    assert kills >= 12 // step
    counted(f"killed from outside, in interpreters of their own: {kills} points")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "count"), [(3, 20), *(pytest.param(seed, 1000, marks=pytest.mark.soak) for seed in range(4))]
)
def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end(seed, count, counted):
    told = run_helper("crash_injection", "histories", str(seed), str(count))
    assert told["kills"] >= count
    assert told["most"] == 5
    assert told["from snapshots"] >= count / 2
    assert told["outside"] >= count / 2
    assert told["backwards"] > 0  # the clock was set back, and order stayed
    counted(
        f"{count} random histories, seed {seed}: {told['kills']} kills ({told['outside']} from outside), up to "
        f"{told['most']} in one, {told['doubts']} calls in doubt, the clock set back {told['backwards']} times; "
        f"loaded from a snapshot {told['from snapshots']} times"
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [10, pytest.param(500, marks=pytest.mark.soak)])
def test_one_of_four_processes_that_resume_a_run_gets_it(rounds, counted):
    told = run_helper("store_contention", "race", str(rounds))
    won, others = told["told"].pop("RunResult"), told["told"]
    assert won == rounds
    assert sum(others.values()) == 3 * rounds
    assert others.keys() <= {"StoreLockedError", "StaleLease", "RunError", "RunEndedError"}, told["why"]
    counted(f"four processes raced for one run {rounds} times: one won each time, the others were told {others}")


@pytest.mark.slow
def test_the_run_of_a_frozen_owner_is_not_acquired_and_continues_when_it_thaws():
    told = run_helper("store_contention", "frozen")
    assert f"process {told['child']}" in told["owner"]
    assert f"process {told['child']}" in told["refused"]
    assert (told["left"], told["code"], told["finished"], told["doubts"]) == (0, 0, True, 0)


@pytest.mark.slow
def test_a_frozen_owner_whose_lock_was_removed_is_fenced():
    told = run_helper("store_contention", "fenced")
    assert told == {"fenced": ["run 'run' is finished"], "doubts": 1, "finished": True}


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, EVERY_POINT])
def test_a_file_size_limit_is_a_clear_error_and_the_run_can_be_resumed(step, counted):
    told = run_helper("store_contention", "file-limit", str(step))["told"]
    assert sum(told.values()) >= 10 // step
    counted(f"no room for a file: {sum(told.values())} times")


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, EVERY_POINT])
def test_a_full_disk_is_a_clear_error_and_the_run_can_be_resumed(step, counted):
    if sys.platform != "linux":
        pytest.skip("small file systems are mounted on Linux only")
    told = run_helper("store_contention", "small-disk", str(step))
    if "skipped" in told:
        pytest.skip(told["skipped"])
    assert told["told"].pop("there was room") == 1  # the last one: every place before it was tried
    assert told["told"].keys() == {"StoreFullError"}
    assert told["told"]["StoreFullError"] >= 10 // step
    counted(f"no room on a disk: {told['told']['StoreFullError']} times")


BATCH = "call_llm.otherwise post_llm.tool_calls dispatch_tool.otherwise post_tool.calls_pending dispatch_tool.otherwise"
END = "post_tool.otherwise pre_step.otherwise"


@pytest.mark.parametrize(
    ("settled", "left"),
    [
        (set(), f"{BATCH} {END}"),
        ({"1.0"}, f"call_llm.otherwise post_llm.tool_calls dispatch_tool.otherwise {END}"),
        ({"1.1"}, f"{BATCH} {END}"),  # the last one: nothing is left to go on with
        ({"2.0"}, f"{BATCH} {END}"),
    ],
)
def test_the_comparison_ignores_one_visit_for_each_result_that_a_human_gave(settled, left):
    assert with_resolved_doubts(f"{BATCH} {END}".split(), settled) == left.split()


def test_the_comparison_ignores_no_other_detours():
    doubt = ["dispatch_tool.in_doubt", "suspended.doubt_settled"]
    assert without_detours(["a", *doubt, "b", *doubt, *doubt]) == ["a", "b"]
    with pytest.raises(AssertionError):
        without_detours(["a", "suspended.doubt_settled"])
    assert without_detours([*doubt, "dispatch_tool.in_doubt"]) == [
        "dispatch_tool.in_doubt"
    ]  # which the other side has not
