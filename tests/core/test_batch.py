"""The calls of a reply: what becomes of each, and the one message that each gets in the transcript."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.core import outcomes as o
from agentfsm.core import wording
from agentfsm.core.failures import FailureKind
from agentfsm.core.fold import apply
from agentfsm.core.messages import Message, Role, ToolResult
from agentfsm.core.state import CallState, Waiting
from tests.core.builders import a_call, a_reply, a_run, denied, done, failing, failure, move, pending

K = FailureKind
ONE, TWO, THREE = a_call("1"), a_call("2"), a_call("3")


# -- dispatch_tool ------------------------------------------------------------------------------------


def test_results_are_kept_with_their_calls():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO))
    run.batch[1].started = True
    apply(run, o.Ran((done(TWO),)))
    assert run.batch[0].result is None
    assert run.batch[1].result == done(TWO)
    assert run.batch[1].started is False


def test_a_result_that_answers_no_call_is_dropped():
    run = a_run("dispatch_tool", batch=pending(ONE))
    apply(run, o.Ran((done(TWO),)))
    assert run.batch[0].result is None


def test_the_first_failure_of_each_kind_is_the_batchs():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO, THREE))
    apply(run, o.Ran((failing(ONE, text="a"), failing(TWO, text="b"), failing(THREE, "environment_error", "c"))))
    assert run.call_failures == {
        K.tool_error: failure("tool_error", "look: a"),
        K.environment_error: failure("environment_error", "look: c"),
    }


def test_equal_errors_in_a_row_are_counted_whatever_their_spaces():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO, THREE))
    apply(run, o.Ran((failing(ONE, text="no  disk\n"), failing(TWO, text="no disk"))))
    assert (run.error_streak, run.error_key) == (2, ("tool_error", "look", "ValueError", "no disk"))
    apply(run, o.Ran((failing(THREE, text="no ink"),)))
    assert run.error_streak == 1


@pytest.mark.parametrize(
    "other",
    [
        failing(TWO, "environment_error"),
        failing(a_call("2", "listen")),
        failing(TWO, text="else"),
        ToolResult("2", "look", "it broke", "failed", failure("tool_error"), "OtherError"),
    ],
)
def test_another_key_starts_the_count_anew(other):
    calls = (ONE, a_call("2", other.name))
    run = a_run("dispatch_tool", batch=pending(*calls))
    apply(run, o.Ran((failing(ONE), other)))
    assert run.error_streak == 1


def test_a_success_starts_the_count_anew():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO, THREE))
    apply(run, o.Ran((failing(ONE), done(TWO), failing(THREE))))
    assert run.error_streak == 1


@pytest.mark.parametrize(
    ("results", "denials"),
    [
        ((denied(ONE), denied(TWO)), 2),
        ((denied(ONE), done(TWO)), 0),
        ((denied(ONE), failing(TWO)), 0),
        ((denied(ONE), ToolResult("2", "look", "s", "skipped")), 1),
    ],
)
def test_denials_are_counted_in_a_row(results, denials):
    run = a_run("dispatch_tool", batch=pending(ONE, TWO))
    apply(run, o.Ran(results))
    assert run.denials == denials


@pytest.mark.parametrize("ending", ["done", "unable"])
def test_an_ending_is_kept_with_its_value(ending):
    run = a_run("dispatch_tool", batch=pending(ONE))
    apply(run, o.Ran((done(ONE, ending=ending, value={"a": 1}),)))
    assert (run.ending, run.ending_value) == (ending, {"a": 1})


def test_a_question_is_no_result_but_what_the_run_waits_for():
    value = {"question": "Which?", "context": "two", "choices": ["a", "b"]}
    run = a_run("dispatch_tool", batch=pending(ONE))
    apply(run, o.Ran((done(ONE, ending="ask", value=value),)))
    assert run.batch[0].result is None
    assert run.ending == "ask"
    assert run.waiting == Waiting("question", "Which?", "two", ("a", "b"), call_id="1", tool="look")


def test_a_call_that_must_wait_parks_the_run_and_keeps_what_could_not_run():
    waiting = Waiting("approval", "May it?", call_id="2", tool="look")
    run = a_run("dispatch_tool", batch=pending(ONE, TWO))
    apply(run, o.Parked(waiting, (failing(ONE, "unknown_tool"),)))
    assert run.waiting is waiting
    assert run.batch[0].result is not None
    assert run.batch[1].result is None


# -- the batch is closed ------------------------------------------------------------------------------


def closing(*results: ToolResult | None, **fields: Any) -> list[Message]:
    """The tool messages of a batch whose calls have these results, when the run goes on."""
    calls = [a_call(str(i), n=i) for i, _ in enumerate(results, 1)]
    batch = [CallState(c, c.signature, result=r) for c, r in zip(calls, results, strict=True)]
    run = a_run("post_tool", batch=batch, reply=a_reply("", *calls), **fields)
    move(run, "post_tool.otherwise")
    assert run.batch == []
    assert run.call_failures == {}
    return run.messages


def test_every_call_gets_its_one_message_in_the_order_of_the_calls():
    first, second = closing(done(ONE, "a"), failing(TWO, text="b"))
    assert first == Message(Role.TOOL, "a", tool_call_id="1", name="look")
    assert second == Message(Role.TOOL, "b", tool_call_id="2", name="look", is_error=True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cancelled": "stop"}, "cancelled"),
        ({"aborted": failure("aborted")}, "aborted"),
        ({"ending": "done"}, "done"),
        ({"ending": "unable"}, "unable"),
        ({}, ""),
    ],
)
def test_a_call_without_a_result_is_told_why(fields, reason):
    (message,) = closing(None, **fields)
    assert message.content == wording.NOT_RUN[reason]
    assert (message.tool_call_id, message.is_error) == ("1", True)


def test_a_call_of_a_truncated_message_is_told_that():
    run = a_run("recover", batch=pending(ONE), reply=a_reply("", ONE, finish="length"))
    move(run, "recover.otherwise")
    assert run.messages[0].content == wording.NOT_RUN["truncated"]


def test_a_call_that_was_made_before_is_warned_about():
    call = a_call("9", where="here")
    batch = [CallState(call, call.signature, result=done(call, "same"))]
    run = a_run("post_tool", batch=batch, reply=a_reply("", call), recent_calls=[call.signature] * 2)
    move(run, "post_tool.otherwise")
    assert run.messages[0].content == f"same\n{wording.repeat_warning(2)}"


def test_a_call_that_was_made_once_is_not_warned_about():
    call = a_call("9", where="here")
    batch = [CallState(call, call.signature, result=done(call, "same"))]
    run = a_run("post_tool", batch=batch, reply=a_reply("", call), recent_calls=[call.signature])
    move(run, "post_tool.otherwise")
    assert run.messages[0].content == "same"


def test_a_call_whose_arguments_a_person_changed_says_so():
    call = a_call("9")
    batch = [CallState(call, call.signature, result=done(call, "ok"), edited=True)]
    run = a_run("post_tool", batch=batch, reply=a_reply("", call))
    move(run, "post_tool.otherwise")
    assert run.messages[0].content.startswith("ok\n")
    assert "person changed" in run.messages[0].content


def test_the_call_of_an_envelope_is_answered_without_an_id():
    batch = [CallState(ONE, ONE.signature, result=done(ONE))]
    run = a_run("post_tool", batch=batch, reply=a_reply('{"kind": "tool_call"}'), rules={"envelope": True})
    move(run, "post_tool.otherwise")
    assert run.messages == [Message(Role.TOOL, "fine", name="look")]


def test_a_batch_stays_open_while_calls_are_pending_or_a_person_is_asked():
    for transition in ("post_tool.calls_pending", "post_tool.question_asked", "post_tool.tool_error"):
        run = a_run("post_tool", batch=pending(ONE))
        move(run, transition)
        assert len(run.batch) == 1
        assert run.messages == []


def test_messages_of_a_state_of_ones_own_never_stand_between_a_call_and_its_result():
    batch = [CallState(ONE, ONE.signature, result=done(ONE))]
    run = a_run("post_tool", batch=batch, reply=a_reply("", ONE), messages=[Message.assistant("", (ONE,))])
    apply(run, o.Noted(messages=(Message.user("think again"),)))
    assert [c.call for c in run.batch] == [ONE]
    move(run, "post_tool.otherwise")
    assert [m.role for m in run.messages] == [Role.ASSISTANT, Role.TOOL, Role.USER]


def test_messages_that_waited_for_a_batch_stand_in_the_transcript_once():
    run = a_run("post_tool", batch=[CallState(ONE, ONE.signature, result=done(ONE))], reply=a_reply("", ONE))
    apply(run, o.Noted(messages=(Message.user("think again"),)))
    move(run, "post_tool.otherwise")
    run.batch, run.state = [CallState(TWO, TWO.signature, result=done(TWO))], "post_tool"
    move(run, "post_tool.otherwise")
    assert [m.content for m in run.messages].count("think again") == 1
