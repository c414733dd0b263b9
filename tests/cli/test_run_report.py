"""The report of a run: the table of transitions, the outcome as text and JSON, and the exit code."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console

from agentfsm import LOOP, Agent, AgentGuardrails, RunResult, tool
from agentfsm.cli.console import CliConsole
from agentfsm.cli.run_report import RunReport, exit_code, print_outcome, report_json, state_style, transition_table
from agentfsm.testing import ScriptedModel, call
from tests.helpers.graphs import renamed


class Town(BaseModel):
    name: str
    people: int


def report_of(agent: Agent, signal: int | None = None) -> RunReport:
    result = agent.run_sync("go")
    return RunReport(result, result.decisions, 1.25, signal)


def shown(report: RunReport) -> tuple[str, str]:
    """The text on stdout and on stderr."""
    out, err = io.StringIO(), io.StringIO()
    print_outcome(
        CliConsole(Console(file=out), Console(file=err, width=200, markup=False), interactive=False, live=False), report
    )
    return out.getvalue(), err.getvalue()


def test_structured_output_is_printed_as_json() -> None:
    report = report_of(Agent(ScriptedModel(['{"name": "Köln", "people": 1}']), output_type=Town))
    out, err = shown(report)
    assert json.loads(out) == {"name": "Köln", "people": 1}
    assert "Köln" in out
    assert err.startswith("\ncompleted  1 model call, 3 transitions, 1.2 s")
    assert exit_code(report) == 0
    assert report_json(report)["output"] == {"name": "Köln", "people": 1}


def test_a_handoff_shows_blockers_and_next_steps() -> None:
    unable = call("return_unable", rationale="no road", blockers=["snow"], suggested_next_steps=["wait for spring"])
    report = report_of(Agent(ScriptedModel([unable]), preset="funnel"))
    out, err = shown(report)
    assert out == ""
    assert err.splitlines()[2:] == ["  no road", "  blocked by: snow", "  next: wait for spring"]
    assert exit_code(report) == 1
    assert report_json(report)["details"]["blockers"] == ["snow"]


def test_a_partial_summary_shows_what_was_learned() -> None:
    report = report_of(
        Agent(ScriptedModel([""] * 9), guardrails=AgentGuardrails(max_iterations=1, on_limit="stop"), preset="standard")
    )
    _, err = shown(report)
    assert err.startswith("\nstopped  ")
    assert "missing a final answer: 1 of 1 model calls are used up" in err
    assert "learned: no_progress" in err
    assert exit_code(report) == 1


def test_a_question_is_shown_with_context_and_choices() -> None:
    asks = call("ask_user", question="Which one?", context="There are two.", choices=["a", "b"])
    report = report_of(Agent(ScriptedModel([asks]), preset="funnel"))
    _, err = shown(report)
    assert err.splitlines()[2:] == ["  question: Which one?", "  There are two.", "  choices: a, b"]
    assert exit_code(report) == 3
    assert report_json(report)["suspension_record"]["question"] == "Which one?"
    report.files["record"] = "wait.json"
    assert "suspension_record" not in report_json(report)


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143)])
def test_an_interrupted_run_exits_with_128_plus_the_signal(signal: int, code: int) -> None:
    assert exit_code(report_of(Agent(ScriptedModel(["hi"])), signal)) == code


def test_an_output_without_a_json_form_is_still_reported() -> None:
    @tool(ends_run=True)
    def finish() -> Any:
        """Finish."""
        return {1, 2}

    report = report_of(Agent(ScriptedModel([call("finish")]), tools=[finish]))
    json.dumps(report_json(report))


def test_counts_are_pluralized() -> None:
    report = report_of(Agent(ScriptedModel(["", "hi"])))
    assert "2 model calls, 1 recovery, 7 transitions, 1.2 s" in shown(report)[1]


# -- the table of transitions ------------------------------------------------------------


def table_lines(result: RunResult, width: int, colors: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colors, color_system="standard" if colors else None)
    console.print(transition_table(result.decisions, result.graph))
    return [line.rstrip() for line in out.getvalue().splitlines()]


RESULT = Agent(ScriptedModel(["", "hello"])).run_sync("hi")


def test_each_transition_is_a_line_with_the_guards_evaluated_before() -> None:
    assert table_lines(RESULT, 100) == [
        "#  from      to        guard that held  evaluated before it, all false",
        "1  pre_step  call_llm  otherwise        8: cancelled, aborted, runaway, iteration_limit, time_limit…",
        "2  call_llm  post_llm  otherwise        5: cancelled, aborted, transient_provider, provider_error, …",
        "3  post_llm  recover   no_progress      6: cancelled, aborted, output_truncated, output_refused, ou…",
        "4  recover   pre_step  otherwise        6: cancelled, aborted, ask_user, handoff, stop, retry_tool",
        "5  pre_step  call_llm  otherwise        8: cancelled, aborted, runaway, iteration_limit, time_limit…",
        "6  call_llm  post_llm  otherwise        5: cancelled, aborted, transient_provider, provider_error, …",
        "7  post_llm  terminal  otherwise        8: cancelled, aborted, output_truncated, output_refused, ou…",
    ]


def test_a_narrow_terminal_loses_only_the_last_column() -> None:
    for line, wide in zip(table_lines(RESULT, 80), table_lines(RESULT, 120), strict=True):
        assert len(line) <= 80
        assert line[:38] == wide[:38]


def test_states_have_the_colors_of_the_diagrams() -> None:
    assert [state_style(LOOP, s) for s in ("call_llm", "recover", "suspended", "terminal")] == [
        "",
        "yellow",
        "cyan",
        "bold",
    ]
    assert "\x1b[33mrecover" in "".join(table_lines(RESULT, 120, colors=True))


def test_recoveries_of_a_renamed_loop_are_counted() -> None:
    agent = Agent(ScriptedModel(["", "fine"]), graph=renamed(LOOP, "my_"))
    assert report_of(agent).recoveries == 1
