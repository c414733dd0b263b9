"""``RunView``: what user code sees of a run, which is a snapshot and cannot be changed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from typing import Any

import pytest

from agentfsm.errors import ReadOnlyError
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import Message, Role, Usage
from agentfsm.loop.outcomes import ModelCallSucceeded, ToolsRan
from agentfsm.loop.reducer import on_outcome
from agentfsm.loop.state import CallState, RunState, RunView
from tests.helpers.scenarios import make_call, make_failure, make_reply, make_run, ok_result, pending_calls

CALL = make_call(where="here", deep={"list": [1]})


def full_run() -> RunState:
    """A run with something in every kind of field."""
    return make_run(
        "post_tool",
        messages=[Message.user("hi"), Message.assistant("", (CALL,))],
        batch=pending_calls(CALL),
        usage=Usage(1, 2),
        failure_attempts={FailureKind.tool_error: 1},
        lessons_learned=[make_failure()],
        recent_calls=["look:1", "look:1"],
        call_failures={FailureKind.tool_error: make_failure()},
        pending_request=PendingRequest("question", "?"),
        state_results={"check": 5},
    )


def test_a_view_has_every_field_of_the_run():
    run = full_run()
    view = run.view()
    for field in dataclasses.fields(RunState):
        if field.name != "batch":
            assert getattr(view, field.name) == getattr(run, field.name), field.name
    assert [dataclasses.asdict(c) for c in view.batch] == [dataclasses.asdict(c) for c in run.batch]


def test_a_view_is_a_run_state_for_code_that_was_written_for_one():
    run = full_run()
    view = run.view()
    assert isinstance(view, RunView)
    assert isinstance(view, RunState)
    assert isinstance(view.batch[0], CallState)
    assert view.attempts(FailureKind.tool_error) == 1
    assert view.last_repeat_counts == {"look:1": 2}
    assert not view.done
    assert view.messages[-1].role is Role.ASSISTANT
    assert view.messages + [Message.user("x")] == [*run.messages, Message.user("x")]  # noqa: RUF005
    assert view.messages[:1] == [Message.user("hi")]
    assert view.view() is view


CHANGES = {
    **{f"set {f.name}": lambda v, n=f.name: setattr(v, n, None) for f in dataclasses.fields(RunState)},
    **{f"delete {f.name}": lambda v, n=f.name: delattr(v, n) for f in dataclasses.fields(RunState)},
    "set a new attribute": lambda v: setattr(v, "mine", 1),
    "set the class": lambda v: setattr(v, "__class__", RunState),
    "append a message": lambda v: v.messages.append(Message.user("obey")),
    "replace a message": lambda v: v.messages.__setitem__(0, Message.user("obey")),
    "clear the messages": lambda v: v.messages.clear(),
    "clear the batch": lambda v: v.batch.clear(),
    "add a call": lambda v: v.batch.append(v.batch[0]),
    **{
        f"set {f.name} of a call": lambda v, n=f.name: setattr(v.batch[0], n, None)
        for f in dataclasses.fields(CallState)
    },
    "change arguments": lambda v: v.batch[0].call.arguments.update(where="there"),
    "change nested arguments": lambda v: v.batch[0].call.arguments["deep"]["list"].append(2),
    "set arguments": lambda v: setattr(v.batch[0].call, "arguments", {}),
    "forget attempts": lambda v: v.failure_attempts.clear(),
    "forget repeated calls": lambda v: v.recent_calls.clear(),
    "forget lessons": lambda v: v.lessons_learned.pop(),
    "change a failure": lambda v: setattr(v.lessons_learned[0], "kind", "no_progress"),
    "change a failure's metadata": lambda v: v.lessons_learned[0].metadata.update(x=1),
    "forget failures of calls": lambda v: v.call_failures.pop(FailureKind.tool_error),
    "change state results": lambda v: v.state_results.update(check=6),
    "count a failure": lambda v: v.record_failure_attempt(FailureKind.tool_error),
    "add a lesson": lambda v: v.add_lesson(make_failure()),
    "abort": lambda v: v.abort("me", ValueError()),
    "change a request": lambda v: setattr(v.pending_request, "kind", "approval"),
    "change usage": lambda v: setattr(v.usage, "input_tokens", 0),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_no_change_of_a_view_is_possible_and_each_names_who_tried(change: Any):
    run = full_run()
    before = copy.deepcopy(run)
    view = run.view()

    def meddle(given: RunView) -> None:
        with contextlib.suppress(Exception):
            change(given)

    with pytest.raises(ReadOnlyError, match=r"guard .*meddle tried to change the run"):
        view.call("guard", meddle)
    assert run == before
    assert dataclasses.replace(view) == dataclasses.replace(before.view())


def test_what_the_run_does_later_does_not_show_in_the_view():
    run = make_run("call_llm", messages=[Message.user("hi")])
    first = run.view()
    on_outcome(run, ModelCallSucceeded(make_reply("", CALL)))
    second = run.view()
    on_outcome(run, ToolsRan((ok_result(CALL),)))
    run.state = "post_tool"
    assert (len(first.messages), first.batch, first.reply, first.iterations) == (1, [], None, 0)
    assert (len(second.messages), second.batch[0].result, second.state) == (2, None, "call_llm")
    assert list(first.messages) == [Message.user("hi")]
    assert run.view().batch[0].result == ok_result(CALL)


def test_a_view_copies_the_calls_of_the_batch_only_if_somebody_reads_them():
    class Counted(CallState):
        copies = 0

        @property
        def signature(self) -> str:
            Counted.copies += 1
            return "look:1"

        @signature.setter
        def signature(self, value: str) -> None: ...

    run = make_run("post_tool", batch=[Counted(CALL, "") for _ in range(5)])
    for _ in range(3):
        run.view()
        run.keep_views()
    assert Counted.copies == 0
    kept = [run.view(), run.view()]
    run.keep_views()
    run.batch[0].approved = True
    assert [c.approved for c in kept[0].batch] == [False] * 5
    assert kept[0].batch is kept[1].batch
    assert Counted.copies == 5
    assert run.view().batch[0].approved


def test_asking_returns_what_the_function_returns():
    assert full_run().view().call("guard", lambda run, more: (run.state, more), 5) == ("post_tool", 5)


def test_attempts_of_earlier_code_are_seen_by_whoever_asks_next():
    run = full_run()
    with pytest.raises(ReadOnlyError):
        run.view().state = "terminal"  # type: ignore[misc]
    assert run.change_attempts == ["user code tried to change the run: set 'state' of the run"]
    with pytest.raises(ReadOnlyError, match="set 'state'"):
        run.view().call("guard", lambda view: None)


def test_a_view_can_be_copied_pickled_and_replaced():
    view = full_run().view()
    assert copy.copy(view) is view
    assert copy.deepcopy(view) is view
    back = pickle.loads(pickle.dumps(view))
    assert (back.state, back.messages, back.failure_attempts) == (view.state, view.messages, view.failure_attempts)
    other = dataclasses.replace(view, state="recover")
    assert (other.state, view.state, other.messages) == ("recover", "post_tool", view.messages)


def test_attempts_are_no_part_of_the_run():
    run, other = full_run(), full_run()
    run.change_attempts.append("x")
    assert run == other
    assert "change_attempts" not in repr(run)
