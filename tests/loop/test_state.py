"""``RunState``: attempts, lessons, repeats, and what aborted the run."""

from __future__ import annotations

import pytest

from agentfsm.loop.failures import FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.state import MAX_LESSONS, RunState
from tests.helpers.scenarios import make_failure, make_run


def test_a_new_run_is_in_pre_step_and_empty():
    run = RunState("r")
    assert (run.state, run.done, run.steps, run.model_calls) == ("pre_step", False, 0, 0)
    assert run.guardrails == AgentGuardrails()
    assert (run.messages, run.batch, run.lessons_learned, run.failure_attempts) == ([], [], [], {})


def test_two_runs_share_nothing():
    one, other = RunState("1"), RunState("2")
    one.messages.append(None)  # type: ignore[arg-type]
    one.failure_attempts[FailureKind.aborted] = 1
    assert other.messages == []
    assert other.failure_attempts == {}


def test_a_run_is_done_in_terminal_alone():
    assert make_run("terminal", ended="partial").done
    assert not make_run("suspended").done


def test_attempts_are_counted_by_kind():
    run = make_run()
    for kind in ("tool_error", "tool_error", "no_progress"):
        run.record_failure_attempt(FailureKind(kind))
    assert [run.attempts(FailureKind(k)) for k in ("tool_error", "no_progress", "time_limit")] == [2, 1, 0]


def test_repeats_are_counted_by_signature():
    assert make_run(recent_calls=["a", "b", "a"]).last_repeat_counts == {"a": 2, "b": 1}
    assert make_run().last_repeat_counts == {}


def test_there_are_never_more_than_five_lessons():
    run = make_run()
    for kind in FailureKind:
        run.add_lesson(make_failure(kind.value))
        assert len(run.lessons_learned) <= MAX_LESSONS == 5
        assert run.lessons_learned[-1].kind is kind


@pytest.mark.parametrize(
    ("error", "words"),
    [(ValueError("bad"), "ValueError: bad"), (KeyError("k"), "KeyError: 'k'"), (RuntimeError(), "RuntimeError")],
)
def test_what_aborts_a_run_is_named(error, words):
    run = make_run()
    run.abort("post_llm.mine", error)
    assert run.aborted.kind is FailureKind.aborted
    assert run.aborted.explanation == f"post_llm.mine raised {words}"
    assert run.aborted.metadata == {"by": "post_llm.mine", "error_class": type(error).__name__}
    run.abort("another", ValueError("later"))
    assert "post_llm.mine" in run.aborted.explanation


def test_five_kinds_of_lessons_are_kept_and_the_oldest_is_dropped():
    run = make_run()
    kinds = ["tool_error", "unknown_tool", "no_progress", "output_malformed", "environment_error", "time_limit"]
    for kind in kinds:
        run.add_lesson(make_failure(kind))
    assert [x.kind for x in run.lessons_learned] == kinds[1:]


def test_the_newest_lesson_of_a_kind_replaces_the_older_one():
    run = make_run()
    for kind, text in [("tool_error", "old"), ("no_progress", "x"), ("tool_error", "new")]:
        run.add_lesson(make_failure(kind, text))
    assert [x.explanation for x in run.lessons_learned] == ["x", "new"]
