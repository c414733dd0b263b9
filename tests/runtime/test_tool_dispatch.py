"""The calls of a batch: which run, in which order, and with which result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    AskApproval,
    DefaultPolicy,
    FailureKind,
    Handoff,
    HookContext,
    Message,
    Reply,
    RunResult,
    ToolContext,
    ToolError,
    Usage,
    UserInputRequested,
    hook,
    tool,
)
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.scenarios import (
    check_result,
    look,
    recovered_kinds,
    run_async,
    run_script_with_requests,
    scripted_agent,
    tool_texts,
)

K = FailureKind


# -- the calls of a batch -----------------------------------------------------------------------------


def test_calls_run_one_after_the_other_unless_all_may_run_together():
    running: list[int] = [0, 0]

    def counting(name: str, parallel: bool) -> Any:
        @tool(name=name, parallel=parallel)
        async def work(n: int) -> str:
            running[0] += 1
            running[1] = max(running)
            for _ in range(3):
                await asyncio.sleep(0)
            running[0] -= 1
            return f"{name} {n}"

        return work

    tools = [counting("alone", False), counting("together", True)]
    for names, most in [(["alone"] * 3, 1), (["together"] * 3, 3), (["together", "alone", "together"], 1)]:
        running[:] = [0, 0]
        result, _ = run_script_with_requests([call(name, n=n) for n, name in enumerate(names)], "done", tools=tools)
        assert running == [0, most]
        assert tool_texts(result) == [f"{name} {n}" for n, name in enumerate(names)]


def test_results_are_in_the_order_of_the_calls_whatever_ends_first():
    gates = [asyncio.Event() for _ in range(3)]

    @tool(parallel=True)
    async def work(n: int) -> str:
        if n < 2:
            await gates[n + 1].wait()
        gates[n].set()
        return str(n)

    result, _ = run_script_with_requests([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert tool_texts(result) == ["0", "1", "2"]


def test_which_failure_is_the_batchs_does_not_depend_on_which_came_first():
    @tool(parallel=True)
    async def fail(turns: int) -> str:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise ValueError(f"after {turns}")

    script = [call("fail", turns=n) for n in (9, 0, 4)]
    result, _ = run_script_with_requests(script, "done", tools=[fail])
    (lesson,) = result.run_state.lessons_learned
    assert lesson.explanation == "fail: ValueError: after 9"
    assert result.run_state.error_key is not None
    assert result.run_state.error_key[3] == "ValueError: after 4"  # the last of the batch


def test_one_that_fails_does_not_stop_the_others():
    @tool(parallel=True)
    async def work(n: int) -> str:
        if n == 1:
            raise ValueError("bad one")
        for _ in range(5):
            await asyncio.sleep(0)
        return str(n)

    result, _ = run_script_with_requests([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert tool_texts(result) == ["0", "ValueError: bad one", "2"]
    assert recovered_kinds(result) == ["tool_error"]


def test_one_that_raises_a_cancellation_of_its_own_does_not_stop_the_others_or_run_forever():
    @tool(parallel=True)
    async def work(n: int) -> str:
        if n == 1:
            raise asyncio.CancelledError
        return str(n)

    result, _ = run_script_with_requests([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert [text if "Cancelled" not in text else "x" for text in tool_texts(result)] == ["0", "x", "2"]


def test_each_of_several_has_its_own_time():
    @tool(parallel=True, timeout=0.02)
    async def work(n: int) -> str:
        if n == 1:
            await asyncio.Event().wait()
        return str(n)

    result, _ = run_script_with_requests([call("work", n=n) for n in range(3)], "done", tools=[work])
    assert tool_texts(result) == ["0", "timed out after 0.02 s", "2"]


def test_calls_that_ran_together_leave_no_timer_behind():
    @tool(parallel=True)
    async def work(n: int) -> str:
        return str(n)

    agent, model = scripted_agent([call("work", n=n) for n in range(3)], "done", tools=[work])

    async def scene() -> list[asyncio.TimerHandle]:
        check_result(await agent.run("go"), model)
        loop: Any = asyncio.get_running_loop()
        return [timer for timer in loop._scheduled if not timer.cancelled()]

    assert run_async(scene) == []


def test_five_failing_calls_of_a_batch_are_one_recovery():
    @tool
    def fail(n: int) -> str:
        raise ValueError(f"broken {n}")

    result, _ = run_script_with_requests([call("fail", n=n) for n in range(5)], "done", tools=[fail])
    assert [d.transition.id for d in result.decisions].count("post_tool.tool_error") == 1
    assert result.run_state.lessons_learned[0].explanation == "fail: ValueError: broken 0"


def test_the_first_kind_in_the_order_of_the_table_is_the_batchs_failure():
    @tool
    def fail(kind: str) -> str:
        raise ToolError(f"it is {kind}", kind=kind)

    kinds = ["tool_error", "environment_error", "capability_gap"]
    result, _ = run_script_with_requests([call("fail", kind=k) for k in kinds], tools=[fail])
    assert result.outcome.failure.kind is K.capability_gap
    assert result.outcome.failure.metadata["others"] == {
        "tool_error": "fail: it is tool_error",
        "environment_error": "fail: it is environment_error",
    }


@pytest.mark.parametrize(
    ("kind", "ending"),
    [("ambiguous_input", UserInputRequested), ("capability_gap", Handoff), ("policy_violation", Handoff)],
)
def test_a_failure_that_a_tool_reports_is_acted_on(kind, ending):
    @tool
    def fail() -> str:
        raise ToolError("cannot", kind=kind)

    result, _ = run_script_with_requests([call("fail"), call("look")], tools=[fail, look])
    assert isinstance(result.outcome, ending)
    assert result.run_state.lessons_learned[0].kind.value == kind


def test_the_tool_context_describes_the_call():
    seen: list[ToolContext] = []

    @tool
    async def who(context: ToolContext, n: int) -> str:
        seen.append(context)
        return "me"

    agent, _ = scripted_agent([call("who", n=1), call("who", n=2)], call("who", n=3), "done", tools=[who])

    async def scene() -> RunResult:
        return await agent.run("go", session_id="s", run_id="r")

    check_result(run_async(scene))
    assert [(c.run_id, c.session_id, c.call_id, c.attempt) for c in seen] == [
        ("r", "s", "call_1_1", 1), ("r", "s", "call_1_2", 1), ("r", "s", "call_2_1", 1),
    ]  # fmt: skip
    assert len({c.idempotency_key for c in seen}) == 3


def test_a_retryable_call_is_retried_unchanged_with_the_same_key():
    seen: list[tuple[str, int]] = []

    @tool(idempotent=True, retryable=True)
    def fetch(context: ToolContext) -> str:
        seen.append((context.idempotency_key, context.attempt))
        if len(seen) == 1:
            raise ConnectionError("dropped")
        return "fetched"

    result, requests = run_script_with_requests(call("fetch"), "done", tools=[fetch])
    assert [attempt for _, attempt in seen] == [1, 2]
    assert len({key for key, _ in seen}) == 1
    assert tool_texts(result) == ["fetched"]
    assert len(requests) == 2
    assert "recover.retry_tool" in [d.transition.id for d in result.decisions]


def test_a_call_is_run_again_only_so_often_and_then_the_model_is_told():
    seen: list[int] = []

    @tool(idempotent=True, retryable=True)
    def fetch() -> str:
        seen.append(1)
        raise ConnectionError("dropped")

    result, requests = run_script_with_requests(
        call("fetch"), "done", tools=[fetch], guardrails=AgentGuardrails(max_tool_retries=1)
    )
    assert len(seen) == 2
    assert len(requests) == 2
    assert tool_texts(result) == ["ConnectionError: dropped"]


class Patient(DefaultPolicy):
    """Waits before whatever is tried again."""

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        return 3.0


def test_a_policy_may_back_off_before_a_call_is_run_again():
    clock, seen = FakeClock(), []

    @tool(idempotent=True, retryable=True)
    def fetch() -> str:
        seen.append(clock.monotonic())
        if len(seen) == 1:
            raise ConnectionError("dropped")
        return "fetched"

    result, _ = run_script_with_requests(call("fetch"), "done", tools=[fetch], policy=Patient(), clock=clock)
    assert clock.slept == [3.0]
    assert seen[1] - seen[0] == 3.0
    assert result.ok


def test_a_backoff_that_has_passed_is_not_repeated_after_an_approval():
    clock, seen = FakeClock(), []

    @tool(idempotent=True, retryable=True)
    def fetch() -> str:
        seen.append(1)
        if len(seen) == 1:
            raise ConnectionError("dropped")
        return "fetched"

    @hook("dispatch_tool")
    def ask_the_second_time(context: HookContext) -> AskApproval | None:
        return AskApproval() if seen else None

    agent, model = scripted_agent(
        call("fetch"), "done", tools=[fetch], policy=Patient(), clock=clock, hooks=[ask_the_second_time]
    )

    async def scene() -> RunResult:
        first = check_result(await agent.run("go"), model)
        assert clock.slept == [3.0]
        return check_result(await agent.resume(first.outcome.suspension_record, Allow()), model)

    assert run_async(scene).ok
    assert clock.slept == [3.0]


def test_only_the_calls_that_failed_are_run_again():
    seen: list[int] = []

    @tool(idempotent=True, retryable=True, parallel=True)
    async def fetch(n: int) -> str:
        seen.append(n)
        if n == 1 and seen.count(1) == 1:
            raise ConnectionError("dropped")
        return str(n)

    result, _ = run_script_with_requests([call("fetch", n=n) for n in range(3)], "done", tools=[fetch])
    assert sorted(seen) == [0, 1, 1, 2]
    assert tool_texts(result) == ["0", "1", "2"]


# -- control tools in a batch -------------------------------------------------------------------------


def test_a_batch_that_ends_the_run_runs_nothing_after_the_end():
    script = [call("look", where="a"), call("return_done", output="finished"), call("look", where="b")]
    result, _ = run_script_with_requests(script, tools=[look], preset="funnel")
    assert result.output == "finished"
    assert tool_texts(result)[0] == "seen a"
    assert "ended the run" in tool_texts(result)[2]


def test_return_unable_says_why_and_what_to_do():
    result, _ = run_script_with_requests(
        call("return_unable", rationale="no key", blockers=["key"], suggested_next_steps=["get one"]), preset="funnel"
    )
    assert isinstance(result.outcome, Handoff)
    assert (result.outcome.rationale, result.outcome.blockers) == ("no key", ("key",))
    assert result.outcome.suggested_next_steps == ("get one",)
    assert result.outcome.failure is None


def test_a_question_in_a_batch_waits_and_its_answer_is_its_result():
    script = ([call("look", where="a"), call("ask_user", question="Which?", choices=["x", "y"]), call("look")],)
    agent, model = scripted_agent(*script, call("return_done", output="ok"), tools=[look], preset="funnel")

    async def scene() -> RunResult:
        first = check_result(await agent.run("go"), model)
        assert (first.outcome.question, first.outcome.choices) == ("Which?", ("x", "y"))
        return check_result(await agent.resume(first.outcome.suspension_record, "x"), model)

    result = run_async(scene)
    assert tool_texts(result)[:3] == ["seen a", "x", "Not run: the user was asked a question first."]
    assert result.output == "ok"


# -- how many calls, and for how long -------------------------------------------------------------------


def test_a_reply_runs_at_most_so_many_calls_and_every_other_call_is_told():
    ran: list[int] = []

    @tool
    async def count(n: int) -> str:
        ran.append(n)
        return f"counted {n}"

    limits = AgentGuardrails(max_calls_per_reply=3)
    script = [call("count", n=n) for n in range(5)], "done"
    result, requests = run_script_with_requests(*script, tools=[count], guardrails=limits)
    assert result.output == "done"
    assert ran == [0, 1, 2]
    cut = "Not run: only the first 3 calls of a message are run. Make this call again in your next message."
    assert tool_texts(result) == ["counted 0", "counted 1", "counted 2", cut, cut]
    assert len(requests) == 2
    assert sum(d.transition.id == "post_tool.calls_pending" for d in result.decisions) == 2


def test_parallel_calls_are_cut_off_at_the_same_number():
    ran: list[int] = []

    @tool(parallel=True)
    async def count(n: int) -> str:
        ran.append(n)
        return "counted"

    result, _ = run_script_with_requests([call("count", n=n) for n in range(100)], "done", tools=[count])
    assert result.output == "done"
    assert sorted(ran) == list(range(64))
    assert sum(text.startswith("Not run") for text in tool_texts(result)) == 36


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({"max_execution_time_s": 10}, "time_limit"),
        ({"max_tokens": 10}, "token_limit"),
        ({"max_cost_usd": 1}, "cost_limit"),
    ],
)
def test_a_limit_that_is_reached_between_two_calls_ends_the_batch_and_then_acts(limits, kind):
    """The first call uses up the budget; the second says why it was not run, and ``pre_step`` takes the limit's row."""
    clock, ran = FakeClock(), []

    @tool
    async def greedy(n: int) -> str:
        ran.append(n)
        clock.advance(11)
        return "fine"

    spender = Agent(
        ScriptedModel([Reply(Message.assistant("spent"), usage=Usage(10, 0, cost_usd=1))]),
        guardrails=AgentGuardrails(max_iterations=1),
    )
    if kind == "time_limit":
        first, tools = call("greedy", n=0), [greedy]
    else:
        first, tools = call("spender", task="x"), [greedy, spender.as_tool("spender", "spends")]
    calls = [first, *[call("greedy", n=n) for n in (1, 2)]]
    result, requests = run_script_with_requests(
        calls, "done", clock=clock, tools=tools, guardrails=AgentGuardrails(**limits, on_limit="stop")
    )
    assert result.outcome.failure.kind == kind
    assert len(requests) == 1
    assert ran == ([0] if kind == "time_limit" else [])
    texts = tool_texts(result)
    assert len(texts) == 3
    assert all(text.startswith(f"Not run: {kind} (") for text in texts[1:])
    assert [d.transition.id for d in result.decisions][-3:] == [
        "post_tool.otherwise",
        f"pre_step.{kind}",
        "recover.stop",
    ]


def test_a_limit_that_the_graph_does_not_act_on_skips_no_call():
    clock = FakeClock()

    @tool
    async def slow(n: int) -> str:
        clock.advance(11)
        return f"slow {n}"

    graph = LOOP.without("pre_step.time_limit")
    limits = AgentGuardrails(max_execution_time_s=10)
    result, _ = run_script_with_requests(
        [call("slow", n=n) for n in range(3)], "done", clock=clock, tools=[slow], graph=graph, guardrails=limits
    )
    assert result.output == "done"
    assert tool_texts(result) == ["slow 0", "slow 1", "slow 2"]


def test_a_limit_without_a_row_does_not_hide_another_that_has_one():
    """Both budgets are used up after the first call, and the graph acts on the cost alone."""
    ran: list[int] = []

    @tool
    async def work(n: int) -> str:
        ran.append(n)
        return "fine"

    calls = tuple(call("work", n=n) for n in range(5))
    model = ScriptedModel([Reply(Message.assistant("", calls), usage=Usage(60, 0, cost_usd=2))])
    limits = AgentGuardrails(max_tokens=50, max_cost_usd=1, on_limit="stop")
    agent = Agent(model, tools=[work], graph=LOOP.without("pre_step.token_limit"), guardrails=limits)
    result = agent.run_sync("go")
    assert result.outcome.failure.kind == "cost_limit"
    assert ran == [0]
    assert [text.startswith("Not run: cost_limit (") for text in tool_texts(result)] == [False] + [True] * 4


def test_the_batch_of_the_last_turn_has_the_time_of_that_turn():
    clock = FakeClock()

    @tool
    async def slow(n: int) -> str:
        clock.advance(4)
        return f"slow {n}"

    def late(messages: Any) -> Any:
        clock.advance(11)
        return call("slow", n=0)

    limits = AgentGuardrails(max_execution_time_s=10, finalize_grace_s=10, on_limit="stop")
    result, _ = run_script_with_requests(
        late, [call("slow", n=n) for n in range(1, 4)], clock=clock, tools=[slow], guardrails=limits
    )
    assert result.outcome.failure.kind is K.time_limit
    assert tool_texts(result)[:2] == ["slow 0", "slow 1"]
    assert tool_texts(result)[3].startswith("Not run: time_limit")


def test_calls_of_which_the_first_ones_may_run_together_still_run_one_by_one_until_the_last_that_may_not():
    running, most = 0, []

    def counting(name: str, parallel: bool) -> Any:
        @tool(name=name, parallel=parallel)
        async def work(n: int) -> str:
            nonlocal running
            running += 1
            most.append(running)
            await asyncio.sleep(0)
            running -= 1
            return f"{name} {n}"

        return work

    tools = [counting("alone", False), counting("together", True)]
    names = ["together", "together", "alone", "together", "together"]
    result, _ = run_script_with_requests([call(name, n=n) for n, name in enumerate(names)], "done", tools=tools)
    assert tool_texts(result) == [f"{name} {n}" for n, name in enumerate(names)]
    assert most == [1, 1, 1, 1, 2]


def test_failed_calls_that_are_run_again_keep_their_order_and_the_others_their_results():
    seen: list[int] = []

    @tool(idempotent=True, retryable=True)
    async def flaky(n: int) -> str:
        seen.append(n)
        if n % 2 and seen.count(n) == 1:
            raise OSError("not now")
        return f"fine {n}"

    clock = FakeClock()
    calls = [call("flaky", n=n) for n in range(4)]
    result, _ = run_script_with_requests(calls, "done", clock=clock, tools=[flaky])
    assert result.output == "done"
    assert seen == [0, 1, 2, 3, 1, 3]
    assert tool_texts(result) == [f"fine {n}" for n in range(4)]


# -- long results -------------------------------------------------------------------------------------

DIGITS = "0123456789"
CUT = (
    "01234\n[... 90 of 100 characters left out: the result is too long. Ask for less at a time if you need them. ...]\n"
    "56789"
)


@tool(max_result_chars=10)
def read(times: int) -> str:
    """Read."""
    return DIGITS * times


def test_of_a_long_result_the_model_gets_the_beginning_the_end_and_how_much_is_left_out():
    result, requests = run_script_with_requests([call("read", times=10), call("read", times=1)], "done", tools=[read])
    assert tool_texts(result) == [CUT, DIGITS]
    assert [m.content for m in requests[1].messages if m.role == "tool"] == [CUT, DIGITS]


def test_the_guardrails_limit_the_results_of_tools_that_have_no_limit_of_their_own():
    @tool
    def look(times: int) -> str:
        return DIGITS * times

    def results(**options: Any) -> list[str]:
        calls = [call("look", times=10), call("read", times=10), call("look", times=20_001)]
        return tool_texts(run_script_with_requests(calls, "done", tools=[look, read], **options)[0])

    short, of_tool, long = results(guardrails=AgentGuardrails(max_tool_result_chars=12))
    assert (short[:30], of_tool) == ("012345\n[... 88 of 100 characte", CUT)
    assert (long[:40], long[-7:]) == ("012345\n[... 199,998 of 200,010 character", "\n456789")
    short, of_tool, long = results()
    assert (short, of_tool) == (DIGITS * 10, CUT)
    assert long.startswith(DIGITS * 10_000 + "\n[... 10 of 200,010 characters left out: ")
    assert results(guardrails=AgentGuardrails(max_tool_result_chars=None)) == [DIGITS * 10, CUT, DIGITS * 20_001]


def test_a_long_error_is_cut_in_the_result_and_in_the_lesson():
    @tool(max_result_chars=20)
    def fail() -> str:
        raise ToolError(DIGITS * 10)

    result, requests = run_script_with_requests(call("fail"), "done", tools=[fail])
    (text,) = tool_texts(result)
    assert text.startswith("0123456789\n[... 80 of 100 characters left out")
    (lesson,) = result.run_state.lessons_learned
    assert lesson.explanation.startswith("fail: 0123\n[... 86 of 106 characters left out")
    assert DIGITS * 2 not in str(requests)


def test_long_blockers_of_an_error_are_cut_though_its_message_is_short():
    @tool(max_result_chars=20)
    def fail() -> str:
        raise ToolError("no", blockers=[DIGITS * 10, "door"])

    result, requests = run_script_with_requests(call("fail"), "done", tools=[fail])
    (lesson,) = result.run_state.lessons_learned
    assert lesson.explanation == "fail: no"
    assert lesson.blockers[0].startswith("0123456789\n[... 80 of 100 characters left out")
    assert lesson.blockers[1:] == ("door",)
    assert DIGITS * 2 not in str(requests)


def test_the_output_of_a_tool_that_ends_the_run_is_whole():
    @tool(max_result_chars=10, ends_run=True)
    def finish() -> str:
        return DIGITS * 10

    result, _ = run_script_with_requests(call("finish"), tools=[finish])
    assert (result.output, tool_texts(result)) == (DIGITS * 10, [CUT])


def test_the_answer_of_a_sub_agent_is_cut_like_any_result():
    expert = Agent(ScriptedModel([DIGITS * 10])).as_tool("expert", "Knows.")
    guardrails = AgentGuardrails(max_tool_result_chars=10)
    result, _ = run_script_with_requests(call("expert", task="?"), "done", tools=[expert], guardrails=guardrails)
    assert tool_texts(result) == [CUT]
