"""No request ever carries a call without a result, however the run was interrupted."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentfsm import (
    Agent,
    Allow,
    Deny,
    Edit,
    FinishReason,
    Message,
    Reply,
    RunCancelled,
    RunResult,
    ToolCall,
    UserInputRequested,
    tool,
)
from agentfsm.loop.presets import PRESETS
from agentfsm.testing import call
from tests.helpers.provider_rules import check_requests, check_transcript
from tests.helpers.scenarios import (
    Kind,
    check_run,
    dangerous,
    echo,
    explode,
    make_host,
    run_with_replies,
    scripted_model,
    tool_result_texts,
    truncated_reply,
)

# -- no request ever carries an unanswered call ------------------------------------------------------


@tool(parallel=True)
async def slow(text: str) -> str:
    """May run beside others."""
    await asyncio.sleep(0)
    return text


@tool(parallel=True)
async def crash(text: str) -> str:
    """May run beside others, and raises."""
    raise KeyError(text)


UNANSWERED = {
    "truncation": ([truncated_reply(call("echo", "a", text="1"), call("echo", "b", text="2")), "x"], ()),
    "truncation in a row": (
        [truncated_reply(call("echo", "a", text="1")), truncated_reply(call("echo", "b")), "x"],
        (),
    ),
    "a loop": ([[call("echo", text="same")] * 9, call("echo", text="other"), "x"], ("do something else",)),
    "a refusal with calls": ([Reply(Message.assistant("", (call("echo", "a"),)), FinishReason.REFUSAL)], ()),
    "ask_user in a batch": (
        [[call("echo", text="a"), call("ask_user", question="which?"), call("echo", text="b")], "x"],
        ("this one",),
    ),
    "ask_user twice in a batch": ([[call("ask_user", question="1?"), call("ask_user", question="2?")], "x"], ("one",)),
    "return_done in front": ([[call("return_done", output="x"), call("echo", text="b")]], ()),
    "return_unable in front": ([[call("return_unable", rationale="no"), call("echo", text="b")]], ()),
    "a crash in a batch": ([[call("echo", text="a"), call("explode"), call("echo", text="b")], "x"], ()),
    "a crash beside others": ([[call("slow", text="a"), call("crash", text="k"), call("slow", text="b")], "x"], ()),
    "an unknown tool in a batch": ([[call("nonexistent"), call("echo", text="b")], "x"], ()),
    "bad arguments in a batch": ([[call("echo", wrong=1), call("echo", text="b")], "x"], ()),
    "an approval, allowed": ([[call("dangerous", what="it"), call("echo", text="b")], "x"], (Allow(),)),
    "an approval, denied": ([[call("dangerous", what="it"), call("echo", text="b")], "x"], (Deny("no"),)),
    "an approval, edited": ([[call("echo", text="b"), call("dangerous", what="it")], "x"], (Edit({"what": "less"}),)),
    "equal ids from the model": (
        [Reply(Message.assistant("", (call("echo", "same", text="1"), call("echo", "same", text="2")))), "x"],
        (),
    ),
    "no ids from the model": (
        [Reply(Message.assistant("", (ToolCall("", "echo", {"text": "1"}), ToolCall("", "echo", {"text": "2"})))), "x"],
        (),
    ),
}


@pytest.mark.parametrize("preset", ["standard", "funnel", "breaker", "strict"])
@pytest.mark.parametrize("case", UNANSWERED)
def test_no_request_carries_an_unanswered_call(case: str, preset: str) -> None:
    script, replies = UNANSWERED[case]
    if case == "a loop" and preset in ("breaker", "strict"):  # no loop is detected there
        replies = ()
    rules = PRESETS[preset].behavior.model_copy(update={"control_tools": True, "text_is_answer": True})
    model = scripted_model(*script)
    tools = [echo, explode, dangerous, slow, crash]
    agent = Agent(model, tools=tools, preset=replace(PRESETS[preset], behavior=rules), host=make_host())
    result = asyncio.run(run_with_replies(agent, "go", *replies))
    assert not isinstance(result.outcome, UserInputRequested)
    check_run(model, result)
    again = scripted_model("hello again")
    Agent(again, preset="standard").run_sync("and now?", message_history=result.messages)
    check_requests(again.requests)


def test_each_call_of_a_batch_gets_its_result() -> None:
    script, replies = UNANSWERED["ask_user in a batch"]
    model = scripted_model(*script[:1], call("return_done", output="x"))
    result = asyncio.run(
        run_with_replies(Agent(model, tools=[echo], preset="funnel", host=make_host()), "go", *replies)
    )
    first, second, third = tool_result_texts(result.messages)[:3]
    assert (first, second) == ("a", "this one")
    assert "Not run" in third
    assert "question" in third


def test_a_run_that_is_cancelled_in_a_tool_answers_every_call() -> None:
    async def scene() -> RunResult:
        @tool
        async def hang(text: str) -> str:
            """Calls for the end and never returns."""
            run.cancel("enough")
            await asyncio.Event().wait()
            return text

        model = scripted_model([call("echo", text="a"), call("hang", text="b"), call("echo", text="c")])
        run = Agent(model, tools=[echo, hang]).run("go")
        return await run

    result = asyncio.run(scene())
    assert result.outcome == RunCancelled(
        run_id=result.run_state.run_id, seq=result.outcome.seq, time=result.outcome.time, reason="enough"
    )
    check_transcript(result.messages, request=False)
    assert tool_result_texts(result.messages)[0] == "a"
    assert all("cancelled" in text for text in tool_result_texts(result.messages)[1:])


def test_a_run_that_is_cancelled_among_parallel_tools_keeps_what_was_done() -> None:
    async def scene() -> RunResult:
        @tool(parallel=True)
        async def hang(text: str) -> str:
            """Never returns."""
            await asyncio.Event().wait()
            return text

        model = scripted_model([call("slow", text="done"), call("hang", text="b")])
        run = Agent(model, tools=[slow, hang]).run("go")
        async for event in run:
            if type(event).__name__ == "ToolFinished":
                run.cancel("enough")
        return run.result

    result = asyncio.run(scene())
    check_transcript(result.messages, request=False)
    assert tool_result_texts(result.messages)[0] == "done"
    assert "cancelled" in tool_result_texts(result.messages)[1]


def test_a_run_whose_task_is_cancelled_ends_in_order_and_propagates_the_cancellation() -> None:
    async def scene() -> RunResult:
        @tool
        async def hang() -> str:
            """Never returns."""
            await asyncio.Event().wait()
            return ""

        run = Agent(scripted_model([call("hang"), call("hang")]), tools=[hang]).run("go")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await run
        return run.result

    result = asyncio.run(scene())
    assert isinstance(result.outcome, RunCancelled)
    check_transcript(result.messages, request=False)


@pytest.mark.parametrize("how", [ValueError, KeyError, OverflowError, StopAsyncIteration, SystemExit])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_whatever_a_tool_raises_is_its_calls_result(how: type[BaseException], is_async: bool) -> None:
    def plain() -> str:
        """Crashes."""
        raise how("crashed")

    async def awaited() -> str:
        """Crashes."""
        raise how("crashed")

    function = tool(name="crash")(awaited if is_async else plain)
    model = scripted_model([call("crash"), call("echo", text="b")], "x")
    result = Agent(model, tools=[function, echo]).run_sync("go")
    assert result.output == "x"
    assert "crashed" in tool_result_texts(result.messages)[0]
    assert result.run_state.lessons_learned[-1].kind is Kind.tool_error
    check_run(model, result)


def test_a_tool_that_awaits_something_cancelled_fails_without_cancelling_the_run() -> None:
    async def inner() -> str:
        """Awaits a task that somebody has cancelled."""
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task
        return ""

    model = scripted_model(call("inner"), "x")
    result = Agent(model, tools=[inner]).run_sync("go")
    assert result.output == "x"
    assert "CancelledError" in tool_result_texts(result.messages)[0]
    assert result.run_state.lessons_learned[-1].kind is Kind.tool_error


@pytest.mark.parametrize("prompt", ["never mind that", "go on"])
def test_the_transcript_of_a_suspended_run_is_good_as_the_history_of_another(prompt: str) -> None:
    first = Agent(
        scripted_model([call("echo", text="a"), call("dangerous", what="it")]), tools=[echo, dangerous]
    ).run_sync("go")
    assert isinstance(first.outcome, UserInputRequested)
    model = scripted_model("x")
    result = Agent(model).run_sync(prompt, message_history=first.messages)
    check_run(model, result)
    assert len(tool_result_texts(model.requests[0].messages)) == 2
