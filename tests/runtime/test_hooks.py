"""Hooks at states and at effects: an effect means every state that has it, whatever its name is."""

from __future__ import annotations

import asyncio

import pytest

from agentfsm import LOOP, Agent, Allow, AskApproval, Host, MemoryStore, hook, tool
from agentfsm.loop.messages import ToolCall
from agentfsm.loop.outcomes import CALL_MODEL, RUN_CALLS
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import Graph
from agentfsm.runtime.hooks import HookContext
from agentfsm.testing import ScriptedModel, call
from tests.helpers.graphs import renamed

GRAPHS = {"": LOOP, "my_": renamed(LOOP, "my_")}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("prefix", GRAPHS)
def test_a_hook_at_an_effect_runs_in_each_state_that_has_it(prefix: str) -> None:
    seen: list[tuple[str, str]] = []

    @hook(CALL_MODEL)
    def before_model(context: HookContext) -> None:
        seen.append((context.state, ""))

    @hook(RUN_CALLS)
    def before_call(context: HookContext) -> None:
        seen.append((context.state, context.call.name if context.call is not None else ""))

    model = ScriptedModel([[call("add", a=1, b=2)], "3"])
    Agent(model, tools=[add], hooks=[before_model, before_call], graph=GRAPHS[prefix]).run_sync("1 + 2?")
    assert seen == [(f"{prefix}call_llm", ""), (f"{prefix}dispatch_tool", "add"), (f"{prefix}call_llm", "")]


def test_a_hook_at_an_effect_that_no_state_has_never_runs() -> None:
    @hook(EffectSpec("elsewhere"), fail_open=False)
    def never(context: HookContext) -> None:
        raise AssertionError(context.state)

    assert Agent(ScriptedModel(["fine"]), hooks=[never]).run_sync("go").ok


@pytest.mark.parametrize("prefix", GRAPHS)
def test_a_hook_of_calls_that_runs_once_does_not_run_again_after_a_resume(prefix: str) -> None:
    """The call before the wait has left the state; a second process resumes the run."""
    seen: list[str] = []

    @hook(RUN_CALLS, once=True)
    def first(context: HookContext) -> None:
        seen.append(context.state)

    @hook(RUN_CALLS)
    def ask(context: HookContext) -> AskApproval | None:
        return AskApproval() if context.arguments["a"] == 2 else None

    store = MemoryStore()

    def agent(*script: ToolCall | str) -> Agent:
        hooks, host = [first, ask], Host(store=store)
        return Agent(ScriptedModel(script), tools=[add], hooks=hooks, graph=GRAPHS[prefix], host=host)

    async def run() -> bool:
        await agent(call("add", a=1, b=2), call("add", a=2, b=2)).run("go", run_id="r")
        return (await agent("4").resume("r", Allow())).ok

    assert asyncio.run(run())
    assert seen == [f"{prefix}dispatch_tool"]


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=["loop", "renamed"])
def test_the_diagram_shows_hooks_of_effects_at_their_states(graph: Graph) -> None:
    @hook(RUN_CALLS)
    def budget_of_calls(context: HookContext) -> None: ...

    assert "budget_of_calls" in Agent(ScriptedModel(), hooks=[budget_of_calls], graph=graph).diagram("svg")
