"""The result of a run: one of six endings, each with what a caller needs."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm import tool
from agentfsm.loop.events import Handoff, PartialRunSummary, RunAborted, RunCancelled, RunCompleted
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import Message, Usage
from agentfsm.loop.state import RunState
from agentfsm.runtime.result import ending_event
from agentfsm.testing import call
from tests.helpers.scenarios import run_script

BROKEN = Failure(kind="tool_error", explanation="it broke")
STOPPED = Failure(kind="aborted", explanation="a hook said so")
LESSON = Failure(kind="unknown_tool", explanation="no such tool")


def ended(how: str, **fields: Any) -> tuple[type, dict[str, Any]]:
    return ending_event(RunState("r", state="terminal", ended=how, **fields))


def test_the_repr_of_a_result_is_one_line():
    text = repr(run_script("It is 42."))
    assert text.startswith("RunResult(output='It is 42.', outcome=RunCompleted(")
    assert len(text) < 200


def test_a_suspended_run_shows_its_question_and_not_its_whole_conversation():
    text = repr(run_script(call("ask_user", question="Which one?"), preset="funnel", prompt="a long story"))
    assert "question='Which one?'" in text
    assert "a long story" not in text


def test_an_answer_completes_the_run():
    assert ended("completed", answer="42") == (RunCompleted, {"output": "42"})


def test_return_done_completes_the_run_whatever_failed_before():
    assert ended("completed", ending="done", ending_value={"a": 1}, failure=BROKEN) == (
        RunCompleted,
        {"output": {"a": 1}},
    )


def test_return_unable_hands_the_task_back():
    value = {"rationale": "no key", "blockers": ["key"], "suggested_next_steps": ["get one"]}
    assert ended("handed_off", ending="unable", ending_value=value) == (
        Handoff,
        {"rationale": "no key", "blockers": ("key",), "suggested_next_steps": ("get one",)},
    )
    assert ended("handed_off", ending="unable")[1] == {"rationale": "", "blockers": (), "suggested_next_steps": ()}


@pytest.mark.parametrize(("blockers", "wanted"), [(("disk",), ("disk",)), ((), ("it broke",))])
def test_a_handoff_always_names_a_blocker(blockers, wanted):
    failure = BROKEN.model_copy(update={"blockers": blockers})
    kind, fields = ended("handed_off", failure=failure)
    assert kind is Handoff
    assert (fields["rationale"], fields["blockers"], fields["failure"]) == ("it broke", wanted, failure)


def test_a_run_that_stopped_says_what_is_missing_and_what_it_learned():
    kind, fields = ended("partial", failure=BROKEN, lessons_learned=[LESSON, BROKEN])
    assert kind is PartialRunSummary
    assert fields["missing"] == "a final answer: it broke"
    assert fields["learned_facts"] == ("unknown_tool: no such tool", "tool_error: it broke")
    assert fields["next_step_plan"]
    assert fields["failure"] is BROKEN


def test_an_aborted_run_says_why_whatever_it_had_answered():
    kind, fields = ended("aborted", aborted=STOPPED, failure=BROKEN, ending="done", answer="x")
    assert (kind, fields) == (RunAborted, {"reason": "a hook said so", "failure": STOPPED})


@pytest.mark.parametrize("how", ["handed_off", "partial", "cancelled", "aborted"])
def test_only_a_row_that_completes_a_run_makes_it_a_success(how):
    kind, _ = ended(how, ending="done", answer="42", ending_value="42")
    assert kind is not RunCompleted


@pytest.mark.parametrize("how", ["completed", "handed_off", "partial", "cancelled", "aborted"])
def test_every_ending_has_its_event_even_where_nothing_says_why(how):
    kind, fields = ended(how)
    assert kind(run_id="r", seq=1, time=0.0, **fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cancelled": "stop"}, "stop"),
        ({"cancelled": "", "answer": "x"}, ""),
        ({"cancelled": "stop", "aborted": STOPPED}, "stop"),
        ({"expired": True}, "the request expired without a reply"),
    ],
)
def test_a_cancelled_or_expired_run_says_why(fields, reason):
    assert ended("cancelled", **fields) == (RunCancelled, {"reason": reason})


def test_a_result_has_the_output_of_its_run():
    result = run_script("the answer", instructions="be good")
    assert (result.output, result.ok, result.state) == ("the answer", True, "terminal")
    assert result.messages == [Message.system("be good"), Message.user("go"), Message.assistant("the answer")]
    assert result.usage == Usage()
    result.messages.clear()
    assert len(result.messages) == 3


def test_a_result_without_an_answer_is_not_ok():
    result = run_script(ValueError("broken"))
    assert (result.output, result.ok) == (None, False)


def test_a_run_that_recovered_is_a_success():
    assert run_script(call("nothing"), "done").ok


def test_an_output_that_is_json_may_be_changed_and_the_run_keeps_its_own():
    @tool(ends_run=True)
    def report() -> dict[str, list[int]]:
        """Report."""
        return {"totals": [1]}

    result = run_script(call("report"), tools=[report])
    result.output["totals"].append(2)
    assert result.output == {"totals": [1, 2]}
    assert result.run_state.ending_value == {"totals": [1]}
