"""Human in the loop: hooks, approval before a call that fails closed, and the replies a human may give."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest

from agentfsm import AbortRun, Allow, AskApproval, Deny, Edit, HookContext, RunResult, SkipCall, State, hook, tool
from agentfsm.errors import ConfigurationError, GraphError, HumanReplyError, SuspensionRecordError, ToolDefinitionError
from agentfsm.loop.events import (
    Event,
    RunAborted,
    RunCompleted,
    RunWarning,
    ToolFinished,
    ToolStarted,
    UserInputRequested,
)
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.human_input import GiveUp, HumanReply, ItDidNotRun, ItRan, to_human_reply
from agentfsm.runtime.hooks import DenyCall, Hook, observer
from agentfsm.testing import call
from tests.helpers.scenarios import check_result, run_async, run_script, scripted_agent, transcript_of

ran: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_ran():
    ran.clear()


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    ran.append(where)
    return f"seen {where}"


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    ran.append(f"paid {amount}")
    return "paid"


STATES = [State.PRE_STEP, State.CALL_LLM, State.POST_LLM, State.DISPATCH_TOOL, State.POST_TOOL]
ONE_CALL = (call("look", where="here"), "done")


# -- hooks: where and when ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("state", [*STATES, State.TERMINAL])
def test_a_hook_runs_whenever_the_run_reaches_its_state(state, is_async):
    seen: list[tuple[str, str | None]] = []

    def now(context: HookContext) -> None:
        seen.append((context.state, context.call.name if context.call else None))

    async def soon(context: HookContext) -> None:
        await asyncio.sleep(0)
        now(context)

    run_script(*ONE_CALL, tools=[look], hooks=[hook(state)(soon if is_async else now)])
    times = 2 if state in (State.PRE_STEP, State.CALL_LLM, State.POST_LLM) else 1
    assert seen == [(state, "look" if state is State.DISPATCH_TOOL else None)] * times


def test_a_hook_at_recover_runs_when_the_run_recovers():
    seen: list[str] = []
    run_script(call("nothing"), "done", hooks=[hook("recover")(lambda c: seen.append(c.run.failure.kind.value))])
    assert seen == ["unknown_tool"]


def test_a_hook_at_the_end_sees_how_it_ended():
    seen: list[tuple[str, Any]] = []
    run_script("the answer", hooks=[hook("terminal")(lambda c: seen.append((c.run.state, c.run.answer)))])
    assert seen == [("terminal", "the answer")]


def test_a_hook_at_suspended_runs_when_the_run_is_suspended():
    seen: list[tuple[str, str]] = []
    result = run_script(
        call("pay", amount=1),
        tools=[pay],
        hooks=[hook("suspended")(lambda c: seen.append((c.state, c.run.pending_request.kind)))],
    )
    assert isinstance(result.outcome, UserInputRequested)
    assert seen == [("suspended", "approval")]


def test_hooks_at_one_state_run_in_order():
    seen: list[int] = []
    hooks = [hook("pre_step")(lambda c, n=n: seen.append(n)) for n in range(3)]
    run_script("done", hooks=hooks)
    assert seen == [0, 1, 2]


def test_a_once_hook_runs_once_a_run():
    seen: list[str] = []
    once = hook("pre_step", once=True)(lambda c: seen.append(c.run.run_id))
    agent, _ = scripted_agent(*ONE_CALL, *ONE_CALL, tools=[look], hooks=[once])

    async def scene() -> None:
        await agent.run("go", run_id="a")
        await agent.run("go", run_id="b")

    run_async(scene)
    assert seen == ["a", "b"]


def test_a_hook_at_dispatch_tool_runs_forevery_call_and_sees_what_the_tool_will_get():
    seen: list[tuple[str, Any, Mapping[str, Any]]] = []

    @tool
    def add(a: int, b: int = 5) -> int:
        return a + b

    def watch(context: HookContext) -> None:
        assert context.tool is add
        seen.append((context.call.id, context.call.arguments, context.arguments))

    run_script([call("add", a="1"), call("add", a=2)], "done", tools=[add], hooks=[hook("dispatch_tool")(watch)])
    assert seen == [("call_1_1", {"a": "1"}, {"a": 1, "b": 5}), ("call_1_2", {"a": 2}, {"a": 2, "b": 5})]


def test_a_call_that_cannot_run_runs_no_hook():
    seen: list[str] = []
    run_script(
        call("look", whither=1), call("nothing"), "done", tools=[look], hooks=[hook("dispatch_tool")(seen.append)]
    )
    assert seen == []


# -- hooks: verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_open", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_hook_may_abort_the_run_at_any_state(state, fail_open):
    stop = hook(state, fail_open=fail_open)(lambda c: AbortRun("enough"))
    result = run_script(*ONE_CALL, tools=[look], hooks=[stop])
    assert isinstance(result.outcome, RunAborted)
    assert result.outcome.failure.kind is FailureKind.aborted
    assert result.outcome.failure.explanation == "hook <lambda> aborted the run: enough"
    assert result.decisions[-1].transition.id == f"{state}.aborted"
    assert (ran == []) is (state is not State.POST_TOOL)


def test_a_hook_may_skip_a_call_and_its_result_says_why():
    result = run_script(*ONE_CALL, tools=[look], hooks=[hook("dispatch_tool")(lambda c: SkipCall("not today"))])
    assert ran == []
    assert ("tool", "Not run: not today") in transcript_of(result)
    assert result.ok


def test_a_hook_may_deny_a_call_and_three_in_a_row_are_a_policy_violation():
    deny = hook("dispatch_tool")(lambda c: DenyCall("never"))
    result = run_script(*[call("look", where=str(n)) for n in range(3)], tools=[look], hooks=[deny])
    assert ran == []
    assert transcript_of(result).count(("tool", "Denied: never")) == 3
    assert result.outcome.failure.kind is FailureKind.policy_violation
    assert result.decisions[-1].transition.id == "recover.handoff"


def test_a_hook_that_aborts_in_a_batch_leaves_no_call_unanswered():
    def second(context: HookContext) -> AbortRun | None:
        return AbortRun("stop") if context.call.arguments["where"] == "b" else None

    result = run_script([call("look", where=w) for w in "abc"], tools=[look], hooks=[hook("dispatch_tool")(second)])
    assert ran == ["a"]
    assert [text for role, text in transcript_of(result) if role == "tool"] == [
        "seen a",
        "Interrupted: the run was aborted before this call had a result.",
        "Interrupted: the run was aborted before this call had a result.",
    ]


@pytest.mark.parametrize("verdict", [False, True, "no", 0, {"deny": True}, SkipCall])
def test_an_invalid_hook_decision_counts_as_an_exception(verdict):
    result = run_script(*ONE_CALL, tools=[look], hooks=[hook("dispatch_tool", fail_open=False)(lambda c: verdict)])
    assert ran == []
    assert result.outcome.failure.kind is FailureKind.aborted
    assert "is not a valid hook decision for a call" in result.outcome.failure.explanation


@pytest.mark.parametrize("verdict", [SkipCall("x"), AskApproval("x"), DenyCall("x")])
def test_a_call_decision_at_another_state_counts_as_an_exception(verdict):
    result = run_script("done", hooks=[hook("pre_step", fail_open=False)(lambda c: verdict)])
    assert result.outcome.failure.kind is FailureKind.aborted


# -- hooks: failing -----------------------------------------------------------------------------------


def failing(context: HookContext) -> None:
    raise ValueError("out of order")


async def failing_later(context: HookContext) -> None:
    await asyncio.sleep(0)
    raise ValueError("out of order")


async def cancelling_itself(context: HookContext) -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


@pytest.mark.parametrize("function", [failing, failing_later])
@pytest.mark.parametrize("state", STATES)
def test_a_hook_that_fails_open_is_a_warning_and_the_run_continues(state, function, caplog):
    warned: list[str] = []
    watch = observer(lambda e: warned.append(e.text) if isinstance(e, RunWarning) else None)
    with caplog.at_level(logging.WARNING, "agentfsm"):
        result = run_script(*ONE_CALL, tools=[look], hooks=[hook(state)(function), watch])
    assert result.ok
    assert ran == ["here"]
    assert warned[0] == f"hook {function.__name__} raised ValueError: out of order"
    assert f"hook {function.__name__} raised ValueError" in caplog.text
    assert "out of order" not in caplog.text  # what an exception says may be anything


@pytest.mark.parametrize("function", [failing, failing_later])
@pytest.mark.parametrize("state", STATES)
def test_a_hook_that_fails_closed_aborts_the_run(state, function):
    result = run_script(*ONE_CALL, tools=[look], hooks=[hook(state, fail_open=False)(function)])
    assert isinstance(result.outcome, RunAborted)
    assert result.outcome.failure.explanation == f"hook {function.__name__} raised ValueError: out of order"
    assert result.outcome.failure.metadata == {"error_class": "ValueError"}
    assert result.outcome.reason == f"hook {function.__name__} raised ValueError: out of order"


@pytest.mark.parametrize("fail_open", [False, True])
def test_a_stray_cancellation_is_a_failure_of_the_hook(fail_open):
    result = run_script("done", hooks=[hook("pre_step", fail_open=fail_open)(cancelling_itself)])
    assert result.ok is fail_open


@pytest.mark.parametrize("stop", [lambda c: AbortRun("late"), failing, failing_later])
@pytest.mark.parametrize("fail_open", [False, True])
def test_every_hook_at_the_end_runs_even_if_another_aborts_and_the_ending_is_unchanged(stop, fail_open):
    seen: list[str] = []
    hooks = [hook("terminal", fail_open=fail_open)(stop), hook("terminal")(lambda c: seen.append("second"))]
    result = run_script("done", hooks=hooks)
    assert seen == ["second"]
    assert isinstance(result.outcome, RunCompleted)


@pytest.mark.parametrize(
    "script",
    [
        ("text",),
        (ValueError("model broke"),),
        (call("nothing"),) * 3,
        (),
    ],
)
def test_the_hooks_at_the_end_run_however_a_run_ends(script):
    seen: list[str] = []
    run_script(*script, hooks=[hook("terminal")(lambda c: seen.append(c.state))])
    assert seen == ["terminal"]


# -- hooks: what is refused ---------------------------------------------------------------------------


def test_a_hook_at_an_unknown_state_is_refused():
    with pytest.raises(GraphError, match="nowhere"):
        scripted_agent(hooks=[hook("nowhere")(failing)])


def test_a_value_that_is_not_a_hook_is_refused():
    with pytest.raises(ConfigurationError, match="a hook must be made with"):
        scripted_agent(hooks=[failing])  # type: ignore[list-item]


def test_a_hook_says_what_it_is():
    made = hook("pre_step", fail_open=False, once=True)(failing)
    assert made == Hook("pre_step", failing, fail_open=False, once=True, name="failing")


# -- approval -----------------------------------------------------------------------------------------


def ask(script: tuple[Any, ...], *answers: Any, **parts: Any) -> tuple[list[UserInputRequested], RunResult]:
    """A run in which a person gives some answers, and what it asked."""
    agent, model = scripted_agent(*script, **parts)

    async def scene() -> tuple[list[UserInputRequested], RunResult]:
        result = check_result(await agent.run("go"), model)
        asked = []
        for answer in answers:
            assert isinstance(result.outcome, UserInputRequested), result.outcome
            asked.append(result.outcome)
            result = check_result(await agent.resume(result.outcome.suspension_record.to_json(), answer), model)
        return asked, result

    return run_async(scene)


PAYING = (call("pay", amount=3), "done")


def test_a_call_that_needs_approval_waits_for_it_and_then_runs():
    (asked,), result = ask(PAYING, Allow(), tools=[pay])
    assert (asked.kind, asked.tool, asked.arguments) == ("approval", "pay", {"amount": 3})
    assert "pay" in asked.question
    assert ran == ["paid 3"]
    assert result.output == "done"


async def perhaps(arguments: Any) -> bool:
    return False


def test_of_two_hooks_that_ask_the_one_with_a_question_is_used():
    def asking(question: str) -> Hook:
        return Hook("dispatch_tool", lambda seen: AskApproval(question))

    for questions in (["Is it safe?", ""], ["", "Is it safe?"]):
        (asked,), _ = ask(ONE_CALL, Allow(), tools=[look], hooks=[asking(q) for q in questions])
        assert asked.question == "Is it safe?"


def test_a_rule_with_a_default_gets_the_arguments_alone():
    """Binding a value as a default is how a lambda in a loop keeps it; it is not a place for the context."""
    rules = [lambda arguments, limit=limit: arguments["n"] > limit for limit in (1, 100)]

    def spend(n: int) -> str:
        return f"spent {n}"

    asked = [tool(requires_approval=rule)(spend) for rule in rules]
    assert [each.approval_takes_context for each in asked] == [False, False]


@pytest.mark.parametrize("rule", [perhaps, "yes", None, 1])
def test_an_invalid_requires_approval_is_refused_when_the_tool_is_made(rule):
    with pytest.raises(ToolDefinitionError, match="requires_approval must be True, False, an Approval or"):
        tool(requires_approval=rule)(look)


def test_a_call_that_is_denied_has_the_reason_as_its_result_and_is_no_failure():
    _, result = ask(PAYING, Deny("too dear"), tools=[pay])
    assert ran == []
    assert ("tool", "Denied by the user: too dear") in transcript_of(result)
    assert result.ok
    assert result.run_state.lessons_learned == []


def test_a_call_may_run_with_other_arguments_and_the_model_is_told():
    _, result = ask(PAYING, Edit({"amount": 1}), tools=[pay])
    assert ran == ["paid 1"]
    (told,) = [text for role, text in transcript_of(result) if role == "tool"]
    assert told.startswith("paid\n")
    assert "person changed the arguments" in told


@pytest.mark.parametrize("arguments", [{"amount": "lots"}, {}, {"amount": 1, "to": "Eve"}])
def test_an_edit_that_is_not_valid_is_refused_and_the_run_waits_on(arguments):
    agent, model = scripted_agent(*PAYING, tools=[pay])

    async def scene() -> RunResult:
        record = (await agent.run("go")).outcome.suspension_record
        with pytest.raises(HumanReplyError, match=r"'pay'.*still waits"):
            await agent.resume(record, Edit(arguments)).load()
        assert (ran, len(model.requests)) == ([], 1)
        return await agent.resume(record, Edit({"amount": 1}))

    assert run_async(scene).ok
    assert ran == ["paid 1"]


def test_three_denials_in_a_row_are_a_policy_violation():
    script = [call("pay", amount=n) for n in range(3)]
    _, result = ask(tuple(script), Deny(), Deny(), Deny(), tools=[pay])
    assert result.outcome.failure.kind is FailureKind.policy_violation
    assert result.decisions[-1].transition.id == "recover.handoff"


def test_a_call_that_ran_in_between_starts_the_count_anew():
    script = (call("pay", amount=1), call("pay", amount=2), call("look"), call("pay", amount=3), "done")
    _, result = ask(script, Deny(), Deny(), Deny(), tools=[pay, look])
    assert result.ok


def test_whether_approval_is_needed_may_depend_on_the_checked_arguments():
    @tool(requires_approval=lambda arguments: arguments["amount"] > 10)
    def give(amount: int) -> str:
        ran.append(str(amount))
        return "given"

    _, result = ask((call("give", amount="9"), "done"), tools=[give])
    assert ran == ["9"]
    assert result.ok
    (asked,), _ = ask((call("give", amount="11"), "done"), Allow(), tools=[give])
    assert asked.arguments == {"amount": "11"}


@pytest.mark.parametrize("answer", [ValueError("broken"), KeyError("amount")])
def test_an_approval_function_that_raises_fails_closed(answer):
    def gate(arguments: Mapping[str, Any]) -> bool:
        raise answer

    @tool(requires_approval=gate)
    def give(amount: int) -> str:
        ran.append("given")
        return "given"

    result = run_script(call("give", amount=1), tools=[give])
    assert ran == []
    assert result.outcome.failure.kind is FailureKind.aborted
    assert result.outcome.reason == f"requires_approval of 'give' raised {type(answer).__name__}: {answer}"


def test_a_hook_may_ask_for_approval_with_its_own_question():
    gate = hook("dispatch_tool")(lambda c: AskApproval("Really look?"))
    (asked,), result = ask(ONE_CALL, Allow(), tools=[look], hooks=[gate])
    assert (asked.kind, asked.question, asked.tool) == ("approval", "Really look?", "look")
    assert ran == ["here"]
    assert result.ok


def test_in_a_batch_each_call_needs_its_own_approval_in_turn():
    script = ([call("pay", amount=1), call("look", where="x"), call("pay", amount=2)], "done")
    asked, result = ask(script, Deny("no"), Allow(), tools=[pay, look])
    assert [a.arguments for a in asked] == [{"amount": 1}, {"amount": 2}]
    assert ran == ["x", "paid 2"]
    assert [text for role, text in transcript_of(result) if role == "tool"] == [
        "Denied by the user: no",
        "seen x",
        "paid",
    ]


def test_in_a_parallel_batch_nothing_runs_before_all_are_decided():
    @tool(requires_approval=True, parallel=True)
    async def send(to: str) -> str:
        ran.append(to)
        return f"sent {to}"

    @tool(parallel=True)
    async def note(what: str) -> str:
        ran.append(what)
        return f"noted {what}"

    script = ([call("note", what="n"), call("send", to="a"), call("send", to="b")], "done")
    asked, result = ask(script, Allow(), Deny("not b"), tools=[send, note])
    assert [a.arguments for a in asked] == [{"to": "a"}, {"to": "b"}]
    assert sorted(ran) == ["a", "n"]
    assert [text for role, text in transcript_of(result) if role == "tool"] == [
        "noted n", "sent a", "Denied by the user: not b",
    ]  # fmt: skip


def test_a_question_for_a_human_starts_nothing():
    events: list[Event] = []
    _, result = ask(PAYING, tools=[pay], hooks=[observer(events.append)])
    assert isinstance(result.outcome, UserInputRequested)
    assert not [e for e in events if isinstance(e, (ToolStarted, ToolFinished))]


def test_a_decision_that_is_made_is_an_event_as_any_result():
    events: list[Event] = []
    ask(PAYING, Deny("no"), tools=[pay], hooks=[observer(events.append)])
    (finished,) = [e for e in events if isinstance(e, ToolFinished)]
    assert finished.result.status == "denied"


# -- the replies a human may give ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("go on", HumanReply("text", "go on")),
        ("", HumanReply("text", "")),
        (Allow(), HumanReply("allow")),
        (Deny(), HumanReply("deny", "")),
        (Deny("too dear"), HumanReply("deny", "too dear")),
        (Edit({"a": 1}), HumanReply("edit", arguments={"a": 1})),
        (Edit(), HumanReply("edit")),
        (ItRan("42"), HumanReply("ran", "42")),
        (ItRan(), HumanReply("ran", "done")),
        (ItDidNotRun(), HumanReply("did_not_run")),
        (GiveUp(), HumanReply("give_up")),
    ],
)
def test_a_reply_is_stored_as_plain_data(answer, kept):
    assert to_human_reply(answer) == kept


@pytest.mark.parametrize("answer", [None, True, 3, b"yes", ["yes"], Allow, Deny(None), ItRan(42)])
def test_an_invalid_reply_is_refused_with_the_valid_ones(answer):
    with pytest.raises(HumanReplyError, match=r"Allow\(\)") as caught:
        to_human_reply(answer)
    assert isinstance(caught.value, SuspensionRecordError)


@pytest.mark.parametrize("arguments", [{"a": math.nan}, {"a": {1, 2}}, {"a": object()}])
def test_edited_arguments_are_json(arguments):
    with pytest.raises(HumanReplyError, match="not a JSON object"):
        to_human_reply(Edit(arguments))


def test_edited_arguments_are_copied():
    arguments = {"a": [1]}
    kept = to_human_reply(Edit(arguments))
    arguments["a"].append(2)
    assert kept.arguments == {"a": [1]}
