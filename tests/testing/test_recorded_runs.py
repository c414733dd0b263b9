"""Recorded runs: a run that says, asks or counts something else fails, and the file is written only when asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentfsm import Agent, Allow, ConfigurationError, Deny, tool
from agentfsm.testing import ModelTurn, Scenario, ScriptedModel, Simulator, call
from agentfsm.testing.recorded_runs import RecordedRuns, RunRecorder, run_lines

pytest_plugins = ["pytester"]

TESTS = """
from agentfsm import Agent
from agentfsm.testing import ScriptedModel, Simulator, Scenario, ModelTurn

def test_answers(fsm_record):
    for answer in ["Yes.", "No."]:
        fsm_record(Simulator(Agent(ScriptedModel())).run_sync(Scenario([ModelTurn(answer)])))
"""


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


def lines(scenario: Scenario, instructions: str = "Be brief.") -> list[str]:
    return run_lines(Simulator(Agent(ScriptedModel(), tools=[pay], instructions=instructions)).run_sync(scenario))


PAID = Scenario([ModelTurn(call("pay", amount=7), tokens=3), ModelTurn("Done.")], human_replies=[Deny("too much")])


def test_a_run_is_the_same_every_time_and_says_what_was_asked_answered_and_counted() -> None:
    found = lines(PAID)
    assert found == lines(PAID)
    assert found[0] == "move: pre_step.otherwise -> call_llm"
    assert 'request 1: system: "Be brief."' in found
    assert 'request 2: tool pay error: "Denied by the user: too much"' in found
    assert [line for line in found if line.startswith("request 2: ") and "as before" in line] == [
        "request 2: 2 messages as before; tools: pay; at most None tokens"
    ]
    assert [line.split(" ")[1] for line in found if line.startswith("outcome: ")] == [
        "UserInputRequested",
        "RunCompleted",
    ]
    assert "counter: iterations 2" in found


def test_each_difference_shows() -> None:
    before = lines(PAID)
    assert lines(PAID, "Be long.") != before
    assert lines(Scenario(PAID.model_turns, human_replies=[Deny("no")])) != before
    assert lines(Scenario([ModelTurn(call("pay", amount=7), tokens=4), *PAID.model_turns[1:]])) != before
    assert lines(PAID.with_crashes()) == before  # denied: no tool starts


def test_a_crash_in_a_tool_that_may_not_run_twice_asks_a_person() -> None:
    allowed = Scenario(PAID.model_turns, human_replies=[Allow()])
    assert not any("in_doubt" in line for line in lines(allowed))
    assert "move: dispatch_tool.in_doubt -> suspended" in lines(allowed.with_crashes())


def test_what_decides_how_a_run_goes_on_is_recorded_wherever_it_waits_or_ends() -> None:
    """Denials and equal errors in a row, and attempts, are no counters of the table."""
    failed = [ValueError("no money")] * 2
    calls = [ModelTurn(call("pay", amount=n)) for n in (1, 2)]
    found = lines(Scenario(calls, failed, human_replies=[Allow(), Deny("no")]))
    assert [line for line in found if line.startswith("counted: ")] == [
        'counted: {"attempts": {}, "denials": 0, "error": null}',
        'counted: {"attempts": {"tool_error": 1}, "denials": 0, "error": '
        '["tool_error", "pay", "ValueError", "ValueError: no money", 1]}',
        'counted: {"attempts": {"tool_error": 1}, "denials": 1, "error": '
        '["tool_error", "pay", "ValueError", "ValueError: no money", 1]}',
    ]


@pytest.mark.slow
def test_the_file_is_written_on_request_and_compared_otherwise(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_app=TESTS)
    options = ("-p", "no:cacheprovider", "-n0")
    missing = pytester.runpytest_subprocess(*options)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        ["*run 1 of test_answers is not recorded; write test_app.runs.json with pytest --fsm-*"]
    )
    pytester.runpytest_subprocess(*options, "--fsm-record").assert_outcomes(passed=1)
    file = pytester.path / "test_app.runs.json"
    written = file.read_text()
    assert len(json.loads(written)["test_answers"]) == 2
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=1)

    pytester.makepyfile(test_app=TESTS.replace("No.", "Never."))
    changed = pytester.runpytest_subprocess(*options)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*-outcome: RunCompleted*No.*", "*+outcome: RunCompleted*Never.*"])
    pytester.makepyfile(test_app=TESTS.replace(', "No."', ""))
    pytester.runpytest_subprocess(*options).stdout.fnmatch_lines(["*made 1 runs, and 2 are recorded*"])
    assert file.read_text() == written


@pytest.mark.slow
def test_several_workers_may_not_write_the_file(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_app=TESTS)
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n1", "--fsm-record")
    found.stdout.fnmatch_lines(["*run pytest without xdist (-n0)*"])
    assert not (pytester.path / "test_app.runs.json").exists()


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text("[1]")
    with pytest.raises(ConfigurationError, match="does not hold recorded runs"):
        RecordedRuns.read(file)


def test_a_difference_is_reported_once() -> None:
    result = Simulator(Agent(ScriptedModel())).run_sync(Scenario())
    recorder = RunRecorder("test", RecordedRuns({"test": [["other"], ["other"]]}), "write it", record=False)
    with pytest.raises(AssertionError, match="run 1 of test differs"):
        recorder(result)
    recorder.finish()
