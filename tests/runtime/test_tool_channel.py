"""A tool that says how far it is, and one that asks a person in the middle of its work, also across a restart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    Allow,
    BlankHumanReplyError,
    Event,
    GraphError,
    Host,
    HumanReplyError,
    MemoryStore,
    RunCompleted,
    SubagentEvent,
    SuspensionToolError,
    Tool,
    ToolContext,
    ToolDefinitionError,
    ToolError,
    ToolFinished,
    ToolProgress,
    UserInputRequested,
    observer,
    tool,
)
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import verify_stored_run
from agentfsm.testing import ScriptedModel, call
from tests.helpers.read_now import read_now


async def events_of(run: Any) -> list[Event]:
    return [event async for event in run]


def collect(run: Any) -> list[Event]:
    return asyncio.run(events_of(run))


def said(events: list[Event]) -> list[tuple[str, str, str, float | None]]:
    return [(e.call_id, e.name, e.message, e.fraction) for e in events if isinstance(e, ToolProgress)]


def tool_results(result: Any) -> list[str]:
    return [message.content for message in result.messages if message.role == "tool"]


# -- progress -------------------------------------------------------------------------------------------------


def test_what_a_tool_says_about_its_progress_is_an_event():
    @tool
    async def copy(context: ToolContext) -> str:
        """Copy."""
        context.progress("copying", 0.5)
        await asyncio.sleep(0)
        return "copied"

    events = collect(Agent(ScriptedModel([call("copy", "c1"), "Done."]), tools=[copy]).run("Go."))
    assert said(events) == [("c1", "copy", "copying", 0.5)]
    kinds = [type(event).__name__ for event in events]
    assert kinds.index("ToolStarted") < kinds.index("ToolProgress") < kinds.index("ToolFinished")


def test_of_much_in_a_short_time_the_last_is_sent():
    @tool
    async def count(context: ToolContext) -> str:
        """Count."""
        for number in range(10_000):
            context.progress(f"{number}", number / 10_000)
        return "counted"

    events = collect(Agent(ScriptedModel([call("count", "c1"), "Done."]), tools=[count]).run("Go."))
    assert said(events) == [("c1", "count", "9999", 0.9999)]


def test_a_plain_function_in_its_thread_may_say_it_too():
    @tool
    def copy(context: ToolContext) -> str:
        """Copy."""
        context.progress("copying")
        return "copied"

    events = collect(Agent(ScriptedModel([call("copy", "c1"), "Done."]), tools=[copy]).run("Go."))
    assert said(events) == [("c1", "copy", "copying", None)]


def test_what_an_abandoned_tool_says_is_not_heard():
    kept: list[ToolContext] = []

    @tool
    async def forget(context: ToolContext) -> str:
        """Forget."""
        kept.append(context)
        return "gone"

    async def main() -> list[Event]:
        events: list[Event] = []
        async for event in Agent(ScriptedModel([call("forget"), "Done."]), tools=[forget]).run("Go."):
            events.append(event)
            if isinstance(event, ToolFinished):
                kept[0].progress("late")
        return events

    assert said(asyncio.run(main())) == []


def test_nobody_who_listens_means_no_event_and_a_bad_fraction_is_refused_all_the_same():
    @tool
    async def copy(context: ToolContext, fraction: float) -> str:
        """Copy."""
        context.progress("copying", fraction)
        return "copied"

    script = [call("copy", fraction=0.5), call("copy", fraction=1.5), "Done."]
    result = Agent(ScriptedModel(script), tools=[copy]).run_sync("Go.")
    assert tool_results(result) == ["copied", "ValueError: fraction must be from 0 to 1 (how much is done), not 1.5"]
    assert result.outcome.seq == 1


def test_progress_is_not_journaled_and_that_of_a_sub_agent_is_passed_on():
    @tool
    async def copy(context: ToolContext) -> str:
        """Copy."""
        context.progress("copying")
        return "copied"

    host = Host(store=MemoryStore(), secret=b"k")
    desk = Agent(ScriptedModel([call("copy"), "Copied."]), tools=[copy])
    run = Agent(ScriptedModel([call("desk", task="Go."), "Done."]), tools=[desk.as_tool("desk", "-")], host=host).run(
        ""
    )
    events = collect(run)
    assert [e.event.message for e in events if isinstance(e, SubagentEvent) and isinstance(e.event, ToolProgress)] == [
        "copying"
    ]
    rows = [row for head in read_now(host.store.heads()) for row in read_now(host.store.records(head.run_id))]
    assert not any("copying" in row.body + row.hidden for row in rows)


def test_a_context_that_no_run_has_made_says_nothing_and_asks_nobody():
    context = ToolContext("r", "s", "c", "k", 1)
    context.progress("alone")
    with pytest.raises(ToolError, match="only a tool that a run has called can ask a person"):
        asyncio.run(context.ask("Which?"))


# -- questions ------------------------------------------------------------------------------------------------

LOG: list[str] = []


@tool(asks=True)
async def transfer(context: ToolContext, amount: int) -> str:
    """Transfer money."""
    LOG.append(f"start {context.attempt} {context.idempotency_key.rpartition(':')[2]}")
    account = await context.ask("From which account?", context="You have two.", choices=["A", "B"])
    LOG.append(f"account {account}")
    if amount > 100:
        why = await context.ask(f"Why so much ({amount})?")
        LOG.append(f"why {why}")
    return f"{amount} from {account}"


@pytest.fixture(autouse=True)
def _empty_log() -> None:
    LOG.clear()


def agent(script: list[Any], *tools: Any, store: Any = None, **options: Any) -> Agent:
    return Agent(
        ScriptedModel(script), tools=list(tools), host=Host(store=store, secret=b"k", monitor="raise"), **options
    )


@pytest.mark.parametrize("stored", [True, False])
def test_a_tool_asks_twice_and_goes_on_with_the_answers(stored):
    store = MemoryStore() if stored else None
    mine = agent([call("transfer", "c1", amount=500), "Done."], transfer, store=store)
    first = mine.run_sync("Transfer 500.")
    asked = first.outcome
    assert isinstance(asked, UserInputRequested)
    assert (asked.kind, asked.question, asked.context, asked.choices, asked.tool, asked.asker) == (
        "question", "From which account?", "You have two.", ("A", "B"), "transfer", "transfer",
    )  # fmt: skip
    second = mine.resume_sync(asked.run_id if stored else asked.suspension_record, "B")
    assert second.outcome.question == "Why so much (500)?"
    last = mine.resume_sync(asked.run_id if stored else second.outcome.suspension_record, "A car.")
    assert last.output == "Done."
    assert tool_results(last) == ["500 from B"]
    keys = {line.split()[2] for line in LOG if line.startswith("start")}
    assert len(keys) == 1  # each attempt has the same idempotency key
    assert [line for line in LOG if not line.startswith("start")] == ["account B", "account B", "why A car."]


def test_the_journal_of_it_is_verified_and_replayed():
    store = MemoryStore()
    mine = agent([call("transfer", amount=5), "Done."], transfer, store=store)
    run_id = mine.run_sync("Go.").run_id
    mine.resume_sync(run_id, "A")
    assert read_now(verify_stored_run(store, run_id, keyring=mine.config.host.keyring)).code == 0
    again = replay(read_now(store.records(run_id)), mine.graph)
    assert (again.divergences, again.unknown) == ((), "")


@pytest.mark.slow
def test_it_goes_on_in_another_process(tmp_path):
    program = textwrap.dedent("""
        import sys
        from agentfsm import Agent, Host, SqliteStore, ToolContext, tool
        from agentfsm.testing import ScriptedModel, call

        @tool(asks=True)
        async def book(context: ToolContext) -> str:
            "Book."
            day = await context.ask("Which day?")
            seat = await context.ask("Which seat?")
            return f"{day} {seat}"

        folder, reply = sys.argv[1:]
        host = Host(store=SqliteStore(folder + "/runs.db"), secret=b"k")
        agent = Agent(ScriptedModel(["Done."] if reply else [call("book")]), tools=[book], host=host)
        result = agent.resume_sync("r1", reply) if reply else agent.run_sync("Go.", run_id="r1")
        print(getattr(result.outcome, "question", [m.content for m in result.messages if m.role == "tool"]))
    """)

    def process(reply: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), reply], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert [process(""), process("Monday"), process("12A")] == ["Which day?", "Which seat?", "['Monday 12A']"]


def test_the_run_waits_where_the_table_says_so():
    mine = agent([call("transfer", amount=5), "Done."], transfer, store=MemoryStore())
    waiting = mine.run_sync("Go.")
    assert [str(decision) for decision in waiting.decisions][-2:] == [
        "dispatch_tool.otherwise -> post_tool",
        "post_tool.question_asked -> suspended",
    ]
    done = mine.resume_sync(waiting.run_id, "A")
    assert str(done.decisions[0]) == "suspended.approval_decided -> dispatch_tool"


def test_a_graph_without_the_row_is_refused_with_the_tool_named():
    with pytest.raises(GraphError, match="'transfer' may lead to 'question_asked'"):
        Agent(ScriptedModel(), tools=[transfer], graph=LOOP.without("post_tool.question_asked"))


@pytest.mark.parametrize(("reply", "error"), [("  ", BlankHumanReplyError), (Allow(), HumanReplyError)])
def test_a_reply_that_is_no_answer_is_refused_and_the_run_still_waits(reply, error):
    mine = agent([call("transfer", amount=5), "Done."], transfer, store=MemoryStore())
    run_id = mine.run_sync("Go.").run_id
    with pytest.raises(error):
        mine.resume_sync(run_id, reply)
    assert mine.resume_sync(run_id, "A").output == "Done."


def test_the_answer_is_bound_to_the_tool_that_asked():
    store = MemoryStore()
    run_id = agent([call("transfer", amount=5)], transfer, store=store).run_sync("Go.").run_id

    @tool(name="transfer", asks=True)
    async def other(context: ToolContext, amount: int) -> str:
        """Transfer money elsewhere."""
        return await context.ask("From which account?")

    with pytest.raises(SuspensionToolError, match="is another"):
        agent(["Done."], other, store=store).resume_sync(run_id, "A")
    with pytest.raises(SuspensionToolError, match="does not have"):
        agent(["Done."], store=store).resume_sync(run_id, "A")


def test_a_tool_that_asks_something_else_than_before_fails_and_says_what():
    @tool(asks=True)
    async def fickle(context: ToolContext) -> str:
        """Ask."""
        return await context.ask(f"Question {context.attempt}?")

    mine = agent([call("fickle"), "Done."], fickle, store=MemoryStore())
    run_id = mine.run_sync("Go.").run_id
    (text,) = tool_results(mine.resume_sync(run_id, "yes"))
    assert "called again with a person's answer to 'Question 1?', and asked 'Question 2?' instead" in text


def test_calls_of_one_reply_ask_one_after_the_other():
    @tool(asks=True, parallel=True)
    async def name(context: ToolContext, of: str) -> str:
        """Ask for a name."""
        return await context.ask(f"The name of {of}?")

    script = [[call("name", "c1", of="a"), call("name", "c2", of="b")], "Done."]
    mine = agent(script, name, store=MemoryStore())
    first = mine.run_sync("Go.")
    second = mine.resume_sync(first.run_id, "Ann")
    assert (first.outcome.question, second.outcome.question) == ("The name of a?", "The name of b?")
    assert tool_results(mine.resume_sync(first.run_id, "Bob")) == ["Ann", "Bob"]


@pytest.mark.parametrize("how", ["swallows", "gathers", "groups"])
def test_however_the_tool_treats_the_wait_it_waits(how):
    @tool(asks=True)
    async def careless(context: ToolContext) -> str:
        """Ask."""
        if how == "swallows":
            try:
                return await context.ask("Which?")
            except BaseException:
                return "never mind"
        if how == "gathers":
            return (await asyncio.gather(context.ask("Which?")))[0]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(context.ask("Which?"))
            await (asyncio.Event().wait() if context.attempt == 1 else task)
        return task.result()

    mine = agent([call("careless"), "Done."], careless, store=MemoryStore())
    waiting = mine.run_sync("Go.")
    assert isinstance(waiting.outcome, UserInputRequested)
    assert tool_results(mine.resume_sync(waiting.run_id, "this")) == ["this"]


def test_what_is_cleaned_up_on_the_way_out_is_cleaned_up_each_time():
    closed: list[int] = []

    @tool(asks=True)
    async def careful(context: ToolContext) -> str:
        """Ask."""
        try:
            return await context.ask("Which?")
        except Exception:
            return "no exception"
        finally:
            closed.append(context.attempt)

    mine = agent([call("careful"), "Done."], careful, store=MemoryStore())
    run_id = mine.run_sync("Go.").run_id
    assert tool_results(mine.resume_sync(run_id, "this")) == ["this"]
    assert closed == [1, 2]


def test_a_sub_agents_tool_asks_through_its_caller():
    desk = Agent(ScriptedModel([call("transfer", amount=5), "Transferred."]), tools=[transfer])
    mine = agent([call("desk", task="Go."), "Done."], desk.as_tool("desk", "-"), store=MemoryStore())
    waiting = mine.run_sync("Go.")
    assert (waiting.outcome.question, waiting.outcome.asker) == ("From which account?", "desk/transfer")
    assert mine.resume_sync(waiting.run_id, "A").output == "Done."
    assert LOG[-1] == "account A"


def test_a_call_that_needs_approval_is_approved_once_and_then_asks():
    @tool(asks=True, requires_approval=True)
    async def pay(context: ToolContext) -> str:
        """Pay."""
        return await context.ask("From which account?")

    mine = agent([call("pay"), "Done."], pay, store=MemoryStore())
    first = mine.run_sync("Go.")
    second = mine.resume_sync(first.run_id, Allow())
    assert (first.outcome.kind, second.outcome.kind) == ("approval", "question")
    assert tool_results(mine.resume_sync(first.run_id, "A")) == ["A"]


def test_a_secret_in_an_answer_is_not_journaled(monkeypatch):
    monkeypatch.setenv("BANK_TOKEN", "b4nk-t0ken-1234567")
    store = MemoryStore()
    mine = agent([call("transfer", amount=500), "Done."], transfer, store=store)
    run_id = mine.run_sync("Go.").run_id
    mine.resume_sync(run_id, "b4nk-t0ken-1234567")
    mine.resume_sync(run_id, "Because.")
    assert "account b4nk-t0ken-1234567" in LOG
    rows = read_now(store.records(run_id))
    assert not any("b4nk-t0ken" in row.body + row.hidden for row in rows)


async def silent(question: str) -> str:
    return question


def with_context(context: ToolContext, question: str) -> str:
    return question


@pytest.mark.parametrize("function", [silent, with_context])
def test_a_tool_that_could_not_ask_is_refused_when_it_is_made(function):
    with pytest.raises(ToolDefinitionError, match="must be an async function with a ToolContext"):
        tool(asks=True)(function)
    schema = {"type": "object", "properties": {"question": {}}, "required": ["question"]}
    with pytest.raises(ToolDefinitionError, match="must be an async function with a ToolContext"):
        Tool.from_schema("ask", "", schema, function, asks=True)


def test_a_tool_that_does_not_say_that_it_asks_fails_and_the_error_says_what_to_write():
    @tool
    async def sly(context: ToolContext) -> str:
        """Ask."""
        return await context.ask("Which?")

    result = agent([call("sly"), "Done."], sly).run_sync("Go.")
    assert tool_results(result) == ["'sly' asks a person, and does not say so: make it with @tool(asks=True)"]


def test_an_observer_is_told_of_both_starts_and_of_one_end():
    seen: list[str] = []
    note = observer(lambda event: seen.append(type(event).__name__))
    mine = agent([call("transfer", amount=5), "Done."], transfer, store=MemoryStore(), hooks=[note])
    run_id = mine.run_sync("Go.").run_id
    assert isinstance(mine.resume_sync(run_id, "A").outcome, RunCompleted)
    assert (seen.count("ToolStarted"), seen.count("ToolFinished")) == (2, 1)
