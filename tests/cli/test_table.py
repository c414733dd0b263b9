"""The table of a run's transitions."""

from __future__ import annotations

import io

from rich.console import Console

from agentfsm import LOOP, Agent, RunResult
from agentfsm.cli.run_report import state_style, transition_table
from agentfsm.testing import ScriptedModel


def shown(result: RunResult, width: int, colours: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colours, color_system="standard" if colours else None)
    console.print(transition_table(result.decisions, result.graph))
    return [line.rstrip() for line in out.getvalue().splitlines()]


RESULT = Agent(ScriptedModel(["", "hello"])).run_sync("hi")


def test_each_move_is_a_line_with_what_was_asked_before() -> None:
    assert shown(RESULT, 100) == [
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
    for line, wide in zip(shown(RESULT, 80), shown(RESULT, 120), strict=True):
        assert len(line) <= 80
        assert line[:38] == wide[:38]


def test_states_have_the_colours_of_the_pictures() -> None:
    assert [state_style(LOOP, s) for s in ("call_llm", "recover", "suspended", "terminal")] == [
        "",
        "yellow",
        "cyan",
        "bold",
    ]
    assert "\x1b[33mrecover" in "".join(shown(RESULT, 120, colours=True))
