"""What a run would have done under a preset, in words that need no knowledge of the table."""

from __future__ import annotations

import pytest

from agentfsm.journal.replay import Divergence
from agentfsm.loop.presets import PRESETS
from agentfsm.viewer.replay_words import in_plain_words


@pytest.mark.parametrize(
    ("recorded", "instead", "expected"),
    [
        pytest.param(
            "post_tool.tool_error -> recover",
            "post_tool.otherwise -> pre_step",
            "In move 5 the run was in post_tool (judge the batch). The guard tool_error (“A tool raised, returned a "
            "failure, or timed out”) held, so it went to recover (ask the policy, back off). But strict has no such "
            "row: no guard would have held, so it would have gone to pre_step (check budgets).",
            id="a row that the preset does not have",
        ),
        pytest.param(
            "pre_step.iteration_limit -> recover",
            "pre_step.otherwise -> call_llm",
            "In move 5 the run was in pre_step (check budgets). The guard iteration_limit (“max_iterations model calls "
            "were made”) held, so it went to recover (ask the policy, back off). But under strict that guard would "
            "have said no, and no guard would have held, so it would have gone to call_llm (call the model).",
            id="a guard that says no",
        ),
        pytest.param(
            "post_llm.tool_calls -> dispatch_tool",
            "post_llm.output_malformed -> recover",
            "In move 5 the run was in post_llm (read the reply). The guard tool_calls (“The reply calls tools”) held, "
            "so it went to dispatch_tool (run the next call). But under strict the guard output_malformed "
            "(“The envelope or the structured output cannot be parsed or is not valid”), which is asked before it, "
            "would have held, so it would have gone to recover (ask the policy, back off).",
            id="a guard that is asked before",
        ),
        pytest.param(
            "mine.odd -> other",
            "no transition of 'mine' is possible",
            "Under strict, move 5 would have been another: no transition of 'mine' is possible.",
            id="no row at all",
        ),
        pytest.param(
            "mine.odd -> other",
            "mine.even -> other",
            "In move 5 the run was in mine. The guard odd held, so it went to other. But strict has no such row: the "
            "guard even would have held, so it would have gone to other.",
            id="states and guards of somebody's own",
        ),
    ],
)
def test_the_first_difference_is_told_in_plain_words(recorded: str, instead: str, expected: str) -> None:
    assert in_plain_words(Divergence(9, recorded, instead), 5, "strict", PRESETS["strict"].graph) == expected
