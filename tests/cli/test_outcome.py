"""How each ending is told, as JSON and as an exit code."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console

from agentfsm import Agent, AgentGuardrails, tool
from agentfsm.cli.console import CliConsole
from agentfsm.cli.run_report import RunReport, exit_code, print_outcome, report_json
from agentfsm.testing import ScriptedModel, call


class Town(BaseModel):
    name: str
    people: int


def story(agent: Agent, signal: int | None = None) -> RunReport:
    result = agent.run_sync("go")
    return RunReport(result, result.decisions, 1.25, signal)


def shown(told: RunReport) -> tuple[str, str]:
    """What goes to stdout and what to stderr."""
    out, err = io.StringIO(), io.StringIO()
    print_outcome(
        CliConsole(Console(file=out), Console(file=err, width=200, markup=False), interactive=False, live=False), told
    )
    return out.getvalue(), err.getvalue()


def test_an_answer_of_a_type_is_printed_as_json() -> None:
    told = story(Agent(ScriptedModel(['{"name": "Köln", "people": 1}']), output_type=Town))
    out, err = shown(told)
    assert json.loads(out) == {"name": "Köln", "people": 1}
    assert "Köln" in out
    assert err.startswith("\ncompleted  1 model call, 3 transitions, 1.2 s")
    assert exit_code(told) == 0
    assert report_json(told)["output"] == {"name": "Köln", "people": 1}


def test_a_handoff_says_what_blocks_and_what_comes_next() -> None:
    unable = call("return_unable", rationale="no road", blockers=["snow"], suggested_next_steps=["wait for spring"])
    told = story(Agent(ScriptedModel([unable]), preset="funnel"))
    out, err = shown(told)
    assert out == ""
    assert err.splitlines()[2:] == ["  no road", "  blocked by: snow", "  next: wait for spring"]
    assert exit_code(told) == 1
    assert report_json(told)["details"]["blockers"] == ["snow"]


def test_a_partial_summary_says_what_was_learned() -> None:
    told = story(
        Agent(ScriptedModel([""] * 9), guardrails=AgentGuardrails(max_iterations=1, on_limit="stop"), preset="standard")
    )
    _, err = shown(told)
    assert err.startswith("\nstopped  ")
    assert "missing a final answer: 1 of 1 model calls are used up" in err
    assert "learned: no_progress" in err
    assert exit_code(told) == 1


def test_a_question_says_what_it_is() -> None:
    asks = call("ask_user", question="Which one?", context="There are two.", choices=["a", "b"])
    told = story(Agent(ScriptedModel([asks]), preset="funnel"))
    _, err = shown(told)
    assert err.splitlines()[2:] == ["  question: Which one?", "  There are two.", "  choices: a, b"]
    assert exit_code(told) == 3
    assert report_json(told)["suspension_record"]["question"] == "Which one?"
    told.files["record"] = "wait.json"
    assert "suspension_record" not in report_json(told)


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143)])
def test_an_interrupted_run_exits_as_shells_expect(signal: int, code: int) -> None:
    assert exit_code(story(Agent(ScriptedModel(["hi"])), signal)) == code


def test_an_output_that_json_cannot_say_is_said_in_words() -> None:
    @tool(ends_run=True)
    def finish() -> Any:
        """Finish."""
        return {1, 2}

    told = story(Agent(ScriptedModel([call("finish")]), tools=[finish]))
    json.dumps(report_json(told))


def test_counts_are_in_plain_english() -> None:
    told = story(Agent(ScriptedModel(["", "hi"])))
    assert "2 model calls, 1 recovery, 7 transitions, 1.2 s" in shown(told)[1]
