"""A batch of tool calls: the result of each, and its one message in the transcript."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product, takewhile
from typing import Any

import pytest

from agentfsm.loop import outcomes as o
from agentfsm.loop import prompts
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import Message, Role, ToolResult
from agentfsm.loop.reducer import on_outcome
from agentfsm.loop.state import CallState
from tests.helpers.scenarios import (
    denied_result,
    failed_result,
    make_call,
    make_failure,
    make_reply,
    make_run,
    ok_result,
    pending_calls,
    take_transition,
)

K = FailureKind
ONE, TWO, THREE = make_call("1"), make_call("2"), make_call("3")


# -- dispatch_tool ------------------------------------------------------------------------------------


def test_results_are_stored_with_their_calls():
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO))
    run.batch[1].started = True
    on_outcome(run, o.ToolsRan((ok_result(TWO),)))
    assert run.batch[0].result is None
    assert run.batch[1].result == ok_result(TWO)
    assert run.batch[1].started is False


def test_a_result_that_answers_no_call_is_dropped():
    run = make_run("dispatch_tool", batch=pending_calls(ONE))
    on_outcome(run, o.ToolsRan((ok_result(TWO),)))
    assert run.batch[0].result is None


def test_the_first_failure_of_each_kind_is_the_batchs():
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO, THREE))
    on_outcome(
        run,
        o.ToolsRan(
            (failed_result(ONE, text="a"), failed_result(TWO, text="b"), failed_result(THREE, "environment_error", "c"))
        ),
    )
    assert run.call_failures == {
        K.tool_error: make_failure("tool_error", "look: a"),
        K.environment_error: make_failure("environment_error", "look: c"),
    }


def test_equal_errors_of_batches_in_a_row_are_counted_whatever_their_spaces():
    run = make_run("dispatch_tool", batch=pending_calls(ONE))
    on_outcome(run, o.ToolsRan((failed_result(ONE, text="no  disk\n"),)))
    run.batch = pending_calls(TWO, THREE)
    on_outcome(run, o.ToolsRan((failed_result(TWO, text="no disk"),)))
    assert (run.error_streak, run.error_key) == (2, ("tool_error", "look", "ValueError", "no disk"))
    on_outcome(run, o.ToolsRan((failed_result(THREE, text="no ink"),)))
    assert run.error_streak == 1


@pytest.mark.parametrize("together", [True, False], ids=["together", "one after the other"])
def test_equal_errors_of_one_batch_are_one(together):
    run = make_run("dispatch_tool")
    for batch in range(1, 4):
        run.batch = pending_calls(ONE, TWO, THREE)
        results = tuple(failed_result(each) for each in (ONE, TWO, THREE))
        for outcome in [results] if together else [(each,) for each in results]:
            on_outcome(run, o.ToolsRan(outcome))
        assert run.error_streak == batch


@pytest.mark.parametrize(
    "other",
    [
        failed_result(TWO, "environment_error"),
        failed_result(make_call("2", "listen")),
        failed_result(TWO, text="else"),
        ToolResult("2", "look", "it broke", "failed", make_failure("tool_error"), "OtherError"),
    ],
)
def test_a_different_error_resets_the_streak(other):
    calls = (ONE, make_call("2", other.name))
    run = make_run("dispatch_tool", batch=pending_calls(*calls))
    on_outcome(run, o.ToolsRan((failed_result(ONE), other)))
    assert run.error_streak == 1


def test_a_success_resets_the_streak():
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO, THREE))
    on_outcome(run, o.ToolsRan((failed_result(ONE), ok_result(TWO), failed_result(THREE))))
    assert run.error_streak == 1


def equal_errors(batches: Sequence[Sequence[str]], counts: str) -> tuple[str, int]:
    """What failed last, and how often in a row; an empty text is a success.

    The rule: equal errors in a row are counted, once for each batch (or call); a success or another error begins anew.
    """
    results = [(text, number) for number, batch in enumerate(batches) for text in batch]
    last = results[-1][0]
    row = list(takewhile(lambda each: each[0] == last, reversed(results)))
    return last, 0 if not last else len(row) if counts == "calls" else len({number for _, number in row})


@pytest.mark.parametrize("counts", ["batches", "calls"])
def test_equal_errors_in_a_row_are_counted_as_the_rule_says_in_every_order_of_two_errors_and_successes(counts):
    batches = [batch for size in (1, 2, 3) for batch in product(("no disk", "no ink", ""), repeat=size)]
    for sequence in product(batches, batches):
        run = make_run("dispatch_tool", behavior={"breaker_counts": counts})
        for batch in sequence:
            calls = (ONE, TWO, THREE)[: len(batch)]
            run.batch = pending_calls(*calls)
            results = (
                failed_result(each, text=text) if text else ok_result(each)
                for each, text in zip(calls, batch, strict=True)
            )
            on_outcome(run, o.ToolsRan(tuple(results)))
        counted = (run.error_key[3] if run.error_key else "", run.error_streak)
        assert counted == equal_errors(sequence, counts), sequence


@pytest.mark.parametrize(
    ("results", "denials"),
    [
        ((denied_result(ONE), denied_result(TWO)), 2),
        ((denied_result(ONE), ok_result(TWO)), 0),
        ((denied_result(ONE), failed_result(TWO)), 0),
        ((denied_result(ONE), ToolResult("2", "look", "s", "skipped")), 1),
    ],
)
def test_denials_are_counted_in_a_row(results, denials):
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO))
    on_outcome(run, o.ToolsRan(results))
    assert run.denials == denials


@pytest.mark.parametrize("ending", ["done", "unable"])
def test_an_ending_is_stored_with_its_value(ending):
    run = make_run("dispatch_tool", batch=pending_calls(ONE))
    on_outcome(run, o.ToolsRan((ok_result(ONE, ending=ending, value={"a": 1}),)))
    assert (run.ending, run.ending_value) == (ending, {"a": 1})


def test_a_question_is_no_result_but_what_the_run_waits_for():
    value = {"question": "Which?", "context": "two", "choices": ["a", "b"]}
    run = make_run("dispatch_tool", batch=pending_calls(ONE))
    on_outcome(run, o.ToolsRan((ok_result(ONE, ending="ask", value=value),)))
    assert run.batch[0].result is None
    assert run.ending == "ask"
    assert run.pending_request == PendingRequest("question", "Which?", "two", ("a", "b"), call_id="1", tool="look")


def test_a_call_that_must_wait_parks_the_run_and_keeps_what_could_not_run():
    waiting = PendingRequest("approval", "May it?", call_id="2", tool="look")
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO))
    on_outcome(run, o.CallBlocked(waiting, (failed_result(ONE, "unknown_tool"),)))
    assert run.pending_request is waiting
    assert run.batch[0].result is not None
    assert run.batch[1].result is None


# -- the batch is closed ------------------------------------------------------------------------------


def closing(*results: ToolResult | None, **fields: Any) -> list[Message]:
    """The tool messages of a batch whose calls have these results, when the run goes on."""
    calls = [make_call(str(i), n=i) for i, _ in enumerate(results, 1)]
    batch = [CallState(c, c.signature, result=r) for c, r in zip(calls, results, strict=True)]
    run = make_run("post_tool", batch=batch, reply=make_reply("", *calls), **fields)
    take_transition(run, "post_tool.otherwise")
    assert run.batch == []
    assert run.call_failures == {}
    return run.messages


def test_every_call_gets_its_one_message_in_the_order_of_the_calls():
    first, second = closing(ok_result(ONE, "a"), failed_result(TWO, text="b"))
    assert first == Message(Role.TOOL, "a", tool_call_id="1", name="look")
    assert second == Message(Role.TOOL, "b", tool_call_id="2", name="look", is_error=True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cancelled": "stop"}, "cancelled"),
        ({"aborted": make_failure("aborted")}, "aborted"),
        ({"ending": "done"}, "done"),
        ({"ending": "unable"}, "unable"),
        ({}, ""),
    ],
)
def test_a_call_without_a_result_gets_the_reason(fields, reason):
    (message,) = closing(None, **fields)
    assert message.content == prompts.NOT_RUN_TEXTS[reason]
    assert (message.tool_call_id, message.is_error) == ("1", True)


def test_a_call_of_a_truncated_message_gets_that_reason():
    run = make_run("recover", batch=pending_calls(ONE), reply=make_reply("", ONE, finish="length"))
    take_transition(run, "recover.otherwise")
    assert run.messages[0].content == prompts.NOT_RUN_TEXTS["truncated"]


def noted(*results: str, **fields: Any) -> list[str]:
    """What the results of equal calls, each in a batch of its own, say in the transcript."""
    run = make_run(**fields)
    for number, text in enumerate(results):
        call = make_call(str(number), where="here")
        run.state, run.reply = "post_llm", make_reply("", call)
        run.batch = [CallState(call, call.signature)]
        take_transition(run, "post_llm.tool_calls")
        run.state, run.batch[0].result = "post_tool", ok_result(call, text)
        take_transition(run, "post_tool.otherwise")
    return [m.content for m in run.messages]


def test_a_call_that_was_made_before_with_the_same_result_is_warned_about():
    note = prompts.repeated_call_note
    assert noted("same", "same", "same") == ["same", f"same\n{note(2)}", f"same\n{note(3)}"]
    assert noted("one", "two", "one") == ["one", "two", f"one\n{note(2)}"]


def test_a_call_whose_result_differs_each_time_is_not_warned_about():
    assert noted("3 failed", "2 failed", "1 failed") == ["3 failed", "2 failed", "1 failed"]


def test_where_calls_alone_are_counted_the_model_is_not_warned():
    assert noted("same", "same", behavior={"repeats": "calls"}) == ["same", "same"]


def test_where_requests_have_no_addendum_the_model_is_not_warned():
    assert noted("same", "same", behavior={"addendum": False}) == ["same", "same"]


def test_a_run_that_was_stored_before_results_were_compared_goes_on():
    call = make_call("9", where="here")
    batch = [CallState(call, call.signature, result=ok_result(call, "same"))]
    run = make_run("post_tool", batch=batch, reply=make_reply("", call), recent_calls=["a:1", call.signature])
    take_transition(run, "post_tool.otherwise")
    assert run.messages[0].content == "same"
    assert run.recent_results[0] == ""
    assert len(run.recent_results[1]) == 8


def test_a_call_that_was_made_once_is_not_warned_about():
    call = make_call("9", where="here")
    batch = [CallState(call, call.signature, result=ok_result(call, "same"))]
    run = make_run("post_tool", batch=batch, reply=make_reply("", call), recent_calls=[call.signature])
    take_transition(run, "post_tool.otherwise")
    assert run.messages[0].content == "same"


def test_the_result_of_an_edited_call_has_a_note():
    call = make_call("9")
    batch = [CallState(call, call.signature, result=ok_result(call, "ok"), edited=True)]
    run = make_run("post_tool", batch=batch, reply=make_reply("", call))
    take_transition(run, "post_tool.otherwise")
    assert run.messages[0].content.startswith("ok\n")
    assert "person changed" in run.messages[0].content


def test_the_call_of_an_envelope_is_answered_without_an_id():
    batch = [CallState(ONE, ONE.signature, result=ok_result(ONE))]
    run = make_run("post_tool", batch=batch, reply=make_reply('{"kind": "tool_call"}'), behavior={"envelope": True})
    take_transition(run, "post_tool.otherwise")
    assert run.messages == [Message(Role.TOOL, "fine", name="look")]


def test_a_batch_stays_open_while_calls_are_pending_or_wait_for_a_person():
    for transition in ("post_tool.calls_pending", "post_tool.question_asked", "post_tool.tool_error"):
        run = make_run("post_tool", batch=pending_calls(ONE))
        take_transition(run, transition)
        assert len(run.batch) == 1
        assert run.messages == []


def test_messages_of_custom_states_never_come_between_a_call_and_its_result():
    batch = [CallState(ONE, ONE.signature, result=ok_result(ONE))]
    run = make_run("post_tool", batch=batch, reply=make_reply("", ONE), messages=[Message.assistant("", (ONE,))])
    on_outcome(run, o.StateResult(messages=(Message.user("think again"),)))
    assert [c.call for c in run.batch] == [ONE]
    take_transition(run, "post_tool.otherwise")
    assert [m.role for m in run.messages] == [Role.ASSISTANT, Role.TOOL, Role.USER]


def test_messages_that_waited_for_a_batch_stand_in_the_transcript_once():
    run = make_run("post_tool", batch=[CallState(ONE, ONE.signature, result=ok_result(ONE))], reply=make_reply("", ONE))
    on_outcome(run, o.StateResult(messages=(Message.user("think again"),)))
    take_transition(run, "post_tool.otherwise")
    run.batch, run.state = [CallState(TWO, TWO.signature, result=ok_result(TWO))], "post_tool"
    take_transition(run, "post_tool.otherwise")
    assert [m.content for m in run.messages].count("think again") == 1


# -- a large batch --------------------------------------------------------------------------------------


def test_calls_beyond_the_limit_have_their_result_before_anything_is_dispatched():
    run = make_run("call_llm", limits={"max_calls_per_reply": 2})
    on_outcome(run, o.ModelCallSucceeded(make_reply("", ONE, TWO, THREE)))
    assert [c.result is None for c in run.batch] == [True, True, False]
    assert run.batch[2].result.status == "skipped"
    assert run.next_call == 0


def test_the_next_call_is_the_first_without_a_result_in_whatever_order_results_come():
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO, THREE))
    assert run.next_call == 0
    on_outcome(run, o.ToolsRan((ok_result(TWO),)))
    assert run.next_call == 0
    on_outcome(run, o.ToolsRan((ok_result(ONE),)))
    assert run.next_call == 2
    on_outcome(run, o.ToolsRan((ok_result(THREE),)))
    assert run.next_call == 3


def test_a_stored_run_that_knows_nothing_of_its_next_call_finds_it():
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO))
    run.batch[0].result = ok_result(ONE)
    assert (run.first_pending, run.next_call) == (0, 1)
