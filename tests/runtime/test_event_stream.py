"""The numbers of a run's events across suspensions and crashes, and the events of sub-agents among them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    Event,
    Host,
    MemoryStore,
    Message,
    ModelReplied,
    ModelRequest,
    Reply,
    RunCompleted,
    RunResumed,
    RunStarted,
    SubagentEvent,
    TextDelta,
    ToolFinished,
    ToolStarted,
    UserInputRequested,
    ask_user,
    observer,
    tool,
)
from agentfsm.loop.model import StreamChunk, TextChunk
from agentfsm.testing import ScriptedModel, call


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


async def events_of(run: Any) -> list[Event]:
    return [event async for event in run]


def collect(run: Any) -> list[Event]:
    return asyncio.run(events_of(run))


def numbers(events: list[Event]) -> list[int]:
    return [event.seq for event in events]


# -- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
def test_numbers_go_on_after_each_suspension(stored):
    host = Host(store=MemoryStore() if stored else None, secret=b"k")
    script = [call("pay", amount=1), call("pay", amount=2), "Done."]
    agent = Agent(ScriptedModel(script), tools=[pay], host=host)
    events = collect(agent.run("Pay."))
    for _ in range(2):
        asked = events[-1]
        assert isinstance(asked, UserInputRequested)
        again = collect(agent.resume(asked.run_id if stored else asked.suspension_record, Allow()))
        assert isinstance(again[0], RunResumed)
        events += again
    assert isinstance(events[-1], RunCompleted)
    assert numbers(events) == list(range(1, len(events) + 1))


def test_numbers_go_on_in_another_process(tmp_path):
    program = textwrap.dedent("""
        import asyncio, sys
        from agentfsm import Agent, Allow, Host, SqliteStore, tool
        from agentfsm.testing import ScriptedModel, call

        @tool(requires_approval=True)
        def pay(amount: int) -> str:
            "Pay."
            return f"paid {amount}"

        async def main(folder, first):
            host = Host(store=SqliteStore(folder + "/runs.db"), secret=b"k")
            script = [call("pay", amount=1), "Done."] if first else ["Done."]
            agent = Agent(ScriptedModel(script), tools=[pay], host=host)
            run = agent.run("Pay.", run_id="r1") if first else agent.resume("r1", Allow())
            print(*[event.seq async for event in run])

        asyncio.run(main(sys.argv[1], sys.argv[2] == "first"))
    """)
    parts = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), which], capture_output=True, text=True, check=True
        ).stdout.split()
        for which in ("first", "second")
    ]
    seen = [int(number) for part in parts for number in part]
    assert len(parts[1]) > 3
    assert seen == list(range(1, len(seen) + 1))


def test_after_a_crash_numbers_are_greater_than_all_before(tmp_path):
    program = textwrap.dedent("""
        import asyncio, os, sys
        from agentfsm import Agent, Host, SqliteStore, observer, tool
        from agentfsm.testing import ScriptedModel, call

        first = sys.argv[2] == "first"

        @tool(idempotent=True)
        async def work() -> str:
            "Work."
            if first:
                os._exit(0)
            return "worked"

        @observer
        def show(event):
            print(event.seq, type(event).__name__, flush=True)

        async def main():
            host = Host(store=SqliteStore(sys.argv[1] + "/runs.db"), secret=b"k")
            script = [call("work"), "Done."] if first else ["Done."]
            agent = Agent(ScriptedModel(script), tools=[work], hooks=[show], host=host)
            (run,) = [agent.run("Go.")] if first else await agent.unfinished_runs()
            await run

        asyncio.run(main())
    """)
    lines = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), which], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for which in ("first", "second")
    ]
    assert [part[-1].split()[1] for part in lines] == ["ToolStarted", "RunCompleted"]
    seen = [int(line.split()[0]) for part in lines for line in part]
    assert seen == sorted(set(seen))
    assert seen[-1] < 2**53  # a number of JavaScript


def test_a_process_that_dies_before_it_writes_has_used_up_its_numbers():
    """It has sent ``RunResumed`` to somebody, and nothing in the store says so but the epoch."""
    store = MemoryStore()
    agent = Agent(ScriptedModel([call("pay", amount=1), "Done."]), tools=[pay], host=Host(store=store, secret=b"k"))
    asked = collect(agent.run("Pay."))[-1]

    async def acquire_and_die() -> None:
        head = await store.head(asked.run_id)
        lease = await store.acquire(asked.run_id, "somebody", new=False, keyring=agent.config.host.keyring)
        assert lease.epoch == head.epoch + 1
        await store.release(lease)

    asyncio.run(acquire_and_die())
    events = collect(agent.resume(asked.run_id, Allow()))
    assert events[0].seq > asked.seq + 1_000_000


def test_the_number_of_the_question_is_in_the_store_before_anybody_sees_the_question():
    store = MemoryStore()
    agent = Agent(ScriptedModel([call("pay", amount=1)]), tools=[pay], host=Host(store=store, secret=b"k"))
    run = agent.run("Pay.")
    asked = collect(run)[-1]
    last = run.journal[-1]
    assert (last.kind, last.data["events"]) == ("run.suspended", asked.seq)


# -- sub-agents -----------------------------------------------------------------------------------------------


class Speaking:
    """A model that streams its replies word by word."""

    name = "speaking"

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def reply(self, request: ModelRequest) -> Reply:
        return Reply(Message.assistant(self.texts.pop(0)))

    async def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
        text = self.texts.pop(0)
        for word in text.split(" "):
            yield TextChunk(word)
        yield Reply(Message.assistant(text))


def nested() -> Agent:
    reader = Agent(Speaking("a b"))
    desk = Agent(ScriptedModel([call("reader", "c7", task="Read."), "Read it."]), tools=[reader.as_tool("reader", "-")])
    return Agent(ScriptedModel([call("desk", "c1", task="Go."), "All done."]), tools=[desk.as_tool("desk", "-")])


def test_events_of_sub_agents_come_marked_among_those_of_the_run():
    events = collect(nested().run("Hi."))
    assert numbers(events) == list(range(1, len(events) + 1))
    assert {event.run_id for event in events} == {events[0].run_id}
    inner = [event for event in events if isinstance(event, SubagentEvent)]
    assert {(event.path, event.tools) for event in inner} == {(("c1",), ("desk",)), (("c1", "c7"), ("desk", "reader"))}
    assert not any(isinstance(event.event, SubagentEvent) for event in inner)
    deep = [event.event for event in inner if len(event.path) == 2]
    assert isinstance(deep[0], RunStarted)
    assert deep[0].prompt == "Read."
    assert [event.text for event in deep if isinstance(event, TextDelta)] == ["a", "b"]
    assert isinstance(deep[-1], RunCompleted)
    assert numbers(deep) == list(range(1, len(deep) + 1))  # each run has its own numbers, too


def test_whoever_looks_for_the_events_of_the_run_itself_sees_those_alone():
    events = collect(nested().run("Hi."))
    own = [type(event) for event in events if not isinstance(event, SubagentEvent)]
    assert [kind for kind in own if kind in (RunStarted, ToolStarted, ToolFinished, RunCompleted)] == [
        RunStarted, ToolStarted, ToolFinished, RunCompleted,
    ]  # fmt: skip
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["All done."]
    calls = [i for i, event in enumerate(events) if isinstance(event, (ToolStarted, ToolFinished))]
    assert all(calls[0] < i < calls[1] for i, event in enumerate(events) if isinstance(event, SubagentEvent))


def test_observers_see_them_too_and_the_last_event_of_a_run_is_its_own():
    seen: list[Event] = []
    top = nested()
    agent = Agent(top.model, tools=list(top.config.tools.values()), hooks=[observer(seen.append)])
    agent.run_sync("Hi.")
    assert any(isinstance(event, SubagentEvent) and isinstance(event.event, TextDelta) for event in seen)
    assert isinstance(seen[-1], RunCompleted)
    assert seen[-1].output == "All done."


def test_when_nobody_listens_sub_agents_make_no_events_and_do_not_stream():
    class Silent(Speaking):
        async def stream(self, request: ModelRequest) -> AsyncIterator[StreamChunk | Reply]:
            raise AssertionError("streamed")
            yield

    desk = Agent(Silent("a b"))
    agent = Agent(ScriptedModel([call("desk", task="Go."), "Done."]), tools=[desk.as_tool("desk", "-")])
    assert agent.run_sync("Hi.").outcome.seq == 1


def test_a_sub_agent_that_asks_goes_on_among_the_events_of_its_caller():
    desk = Agent(ScriptedModel([call("ask_user", question="Which?"), "That one."]), tools=[ask_user])
    host = Host(store=MemoryStore(), secret=b"k")
    agent = Agent(ScriptedModel([call("desk", task="Go."), "Done."]), tools=[desk.as_tool("desk", "-")], host=host)
    events = collect(agent.run("Hi."))
    asked = events[-1]
    assert isinstance(asked, UserInputRequested)
    assert (asked.question, asked.asker) == ("Which?", "desk")
    again = collect(agent.resume(asked.run_id, "this"))
    both = [*events, *again]
    assert numbers(both) == list(range(1, len(both) + 1))
    inner = [event.event for event in both if isinstance(event, SubagentEvent)]
    assert numbers(inner) == list(range(1, len(inner) + 1))
    assert [type(event) for event in inner if isinstance(event, (UserInputRequested, RunResumed, RunCompleted))] == [
        UserInputRequested, RunResumed, RunCompleted,
    ]  # fmt: skip


def test_sub_agents_that_run_together_can_be_told_apart():
    def desk(name: str) -> Any:
        return Agent(Speaking(f"{name} 1")).as_tool(name, "-", parallel=True)

    script = [[call("left", "c1", task="Go."), call("right", "c2", task="Go.")], "Done."]
    agent = Agent(ScriptedModel(script), tools=[desk("left"), desk("right")])
    said: dict[str, list[str]] = {"c1": [], "c2": []}
    for event in collect(agent.run("Hi.")):
        match event:
            case SubagentEvent(path=(call_id,), event=TextDelta(text=text)):
                said[call_id].append(text)
    assert said == {"c1": ["left", "1"], "c2": ["right", "1"]}


def test_the_secrets_of_both_are_withheld():
    @tool(secret=["pin"])
    def unlock(pin: str) -> str:
        """Unlock."""
        return f"used {pin}"

    desk = Agent(ScriptedModel([call("unlock", pin="tr0ub4dor&3"), "It took tr0ub4dor&3."]), tools=[unlock])
    agent = Agent(ScriptedModel([call("desk", task="Go."), "Done."]), tools=[desk.as_tool("desk", "-")])
    inner = [event for event in collect(agent.run("Hi.")) if isinstance(event, SubagentEvent)]
    assert "tr0ub4dor" not in str([event.to_dict() for event in inner])
    replied = [event.to_dict()["event"] for event in inner if isinstance(event.event, ModelReplied)]
    assert replied[1]["message"]["content"] == "It took [withheld]."
