"""What a run withholds from its journal, it withholds from what its events tell a browser."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from typing import Any

import pytest
from pydantic import SecretStr

from agentfsm import (
    Agent,
    Allow,
    Edit,
    Event,
    Host,
    MemoryStore,
    RunError,
    TextDelta,
    ToolCallDelta,
    ToolContext,
    ToolStarted,
    tool,
)
from agentfsm.testing import ScriptedModel, call

PIN = "tr0ub4dor&3"


@tool(secret=["pin"])
def unlock(door: str, pin: str) -> str:
    """Unlock a door."""
    return f"{door} opened with {pin}"


async def events_of(run: Any) -> list[Event]:
    return [event async for event in run]


def texts(events: list[Event]) -> str:
    return json.dumps([event.to_dict() for event in events])


def run(*, script: Any, tools: Any = (), host: Host | None = None) -> list[Event]:
    return asyncio.run(events_of(Agent(ScriptedModel(script), tools=tools, host=host).run("Go.")))


def test_secret_arguments_are_withheld_wherever_they_occur():
    events = run(script=[call("unlock", door="A", pin=PIN), f"Your pin is {PIN}, by the way."], tools=[unlock])
    shown = texts(events)
    assert PIN not in shown
    assert '"arguments": {"door": "A", "pin": "[withheld]"}' in shown
    assert '"content": "A opened with [withheld]"' in shown
    assert '"output": "Your pin is [withheld], by the way."' in shown
    started = next(event for event in events if isinstance(event, ToolStarted))
    assert started.call.arguments["pin"] == PIN  # the program itself has it


def test_secrets_of_the_host_and_of_the_environment_are_withheld(monkeypatch):
    monkeypatch.setenv("SHOP_API_KEY", "k3y-of-the-shop-1234")
    host = Host(secrets=[SecretStr("hunter2-hunter2")])
    shown = texts(run(script=["It is k3y-of-the-shop-1234 or hunter2-hunter2."], host=host))
    assert '"output": "It is [withheld] or [withheld]."' in shown


def test_a_journals_placeholder_is_withheld_too_as_a_browser_could_compare_it():
    shown = texts(run(script=["See [secret 0123456789abcdef0123456789abcdef]."]))
    assert '"output": "See [withheld]."' in shown


def test_what_a_tool_says_about_its_progress_is_withheld_also_in_a_sub_agent(monkeypatch):
    monkeypatch.setenv("SHOP_API_KEY", "k3y-of-the-shop-1234")

    @tool
    def sync(context: ToolContext[Any]) -> str:
        """Sync."""
        context.progress("using k3y-of-the-shop-1234 now")
        return "synced"

    told = '"message": "using [withheld] now"'
    assert told in texts(run(script=[call("sync"), "Done."], tools=[sync]))
    helper = Agent(ScriptedModel([call("sync"), "Done."]), tools=[sync]).as_tool("helper", "Helps.")
    shown = texts(run(script=[call("helper", task="Go."), "Done."], tools=[helper]))
    assert told in shown
    assert "k3y-of-the-shop" not in shown


def test_names_and_ids_are_never_withheld(monkeypatch):
    monkeypatch.setenv("ODD_TOKEN", "post_llm.otherwise")
    shown = texts(run(script=["Fine."]))
    assert '"transition": "post_llm.otherwise"' in shown


def test_arguments_that_stream_are_left_out_for_a_tool_with_secret_ones():
    event = events_with(ToolCallDelta, [unlock], name="unlock")
    assert event.to_dict()["arguments"] == ""
    assert events_with(ToolCallDelta, [unlock], name="other").to_dict()["arguments"] == '{"pin": "tr'


def events_with(kind: Any, tools: Any, name: str) -> Event:
    first = run(script=["Fine."], tools=tools)[0]
    return kind(run_id="r", seq=1, time=0.0, secrets=first.secrets, index=0, name=name, arguments='{"pin": "tr')


def test_arguments_that_a_person_gave_are_withheld():
    @tool(secret=["pin"], requires_approval=True)
    def open_safe(pin: str) -> str:
        """Open the safe."""
        return f"opened with {pin}"

    host = Host(store=MemoryStore(), secret=b"k")
    agent = Agent(ScriptedModel([call("open_safe", pin="0000"), "Done."]), tools=[open_safe], host=host)
    waiting = agent.run_sync("Go.")
    events = asyncio.run(events_of(agent.resume(waiting.outcome.run_id, Edit({"pin": PIN}))))
    assert PIN not in texts([waiting.outcome, *events])
    assert waiting.outcome.to_dict()["arguments"] == {"pin": "[withheld]"}
    assert '"content": "opened with [withheld]"' in texts(events)


def test_a_run_that_another_process_resumes_withholds_the_same():
    host = Host(store=MemoryStore(), secret=b"k")

    @tool(requires_approval=True)
    def nod() -> str:
        """Nod."""
        return f"nodded at {PIN}"

    script = [[call("unlock", door="A", pin=PIN), call("nod")], f"It was {PIN}."]
    agent = Agent(ScriptedModel(script), tools=[unlock, nod], host=host)
    waiting = agent.run_sync("Go.")
    other = Agent(ScriptedModel(script[1:]), tools=[unlock, nod], host=host)
    events = asyncio.run(events_of(other.resume(waiting.outcome.run_id, Allow())))
    assert PIN not in texts(events)


def test_an_event_that_is_copied_still_withholds_and_one_that_is_pickled_refuses():
    events = run(script=[call("unlock", door="A", pin=PIN), "Done."], tools=[unlock])
    started = next(event for event in events if isinstance(event, ToolStarted))
    assert copy.deepcopy(started).to_dict() == started.to_dict()
    sent = pickle.loads(pickle.dumps(started))
    assert sent == started
    with pytest.raises(RunError, match=r"send event.to_dict\(\), not the event"):
        sent.to_dict()
    assert TextDelta(run_id="r", seq=1, time=0.0, text="made by hand").to_dict()["text"] == "made by hand"
