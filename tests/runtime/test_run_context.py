"""``RunContext`` and dependencies: who gets what a run was given, and what is refused."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from agentfsm import (
    LOOP,
    Actor,
    Agent,
    Allow,
    HookContext,
    Host,
    MemoryStore,
    MissingDepsError,
    ModelRequest,
    Reply,
    RunCancelled,
    RunContext,
    RunError,
    SqliteStore,
    State,
    StateContext,
    StateSpec,
    ToolContext,
    ToolDefinitionError,
    Transition,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.testing import ScriptedModel, call


@dataclass
class Desk:
    name: str


FRONT = Desk("front")


def show(context: ToolContext[Desk]) -> str:
    """Show the run."""
    return f"{context.deps.name} {context.actor} {context.tags} {dict(context.metadata)} {context.attempt}"


def test_a_tool_gets_what_its_run_was_given():
    agent = Agent(ScriptedModel([call("show"), "ok"]), tools=[show], deps_type=Desk)
    result = agent.run_sync("go", deps=FRONT, actor=Actor("kim"), tags=["a", "b", "a"], metadata={"tenant": 7})
    shown = [m.content for m in result.messages if m.role == "tool"]
    assert shown == ["front kim, claimed, not verified ('a', 'b') {'tenant': 7} 1"]


def test_a_tool_may_ask_for_the_context_of_the_run_alone():
    def name(context: RunContext[Desk]) -> str:
        """Name the desk."""
        return context.deps.name

    agent = Agent(ScriptedModel([call("name"), "ok"]), tools=[name], deps_type=Desk)
    result = agent.run_sync("go", deps=FRONT)
    assert [m.content for m in result.messages if m.role == "tool"] == ["front"]


def test_a_typed_context_must_be_the_first_parameter_as_any_other():
    def late(order: str, context: ToolContext[Desk]) -> str:
        """Late."""
        return order

    with pytest.raises(ToolDefinitionError, match="must be the first parameter"):
        Agent(ScriptedModel(), tools=[late])


def test_hooks_approvals_and_own_states_get_the_dependencies():
    seen: list[Any] = []

    @hook("pre_step")
    def at_start(context: Any) -> None:
        seen.append(("hook", context.deps, context.actor))

    def needs_approval(arguments: dict[str, Any], context: Any) -> bool:
        seen.append(("approval", context.deps, context.run.tags))
        return False

    @tool(requires_approval=needs_approval)
    def pay(usd: int) -> str:
        """Pay."""
        return "paid"

    def look(context: StateContext[Desk]) -> None:
        seen.append(("state", context.deps, context.run.metadata))

    graph = LOOP.with_state(
        StateSpec("look", "look", effect=look),
        [Transition("look", None, State.TERMINAL, ends="completed")],
        entered_by="post_llm.otherwise",
    )
    model = ScriptedModel([call("pay", usd=1), "ok"])
    agent = Agent(model, tools=[pay], hooks=[at_start], graph=graph, deps_type=Desk)
    agent.run_sync("go", deps=FRONT, actor="kim", tags=("x",), metadata={"n": 1})
    assert [each[0] for each in seen] == ["hook", "approval", "hook", "state"]
    assert all(each[1] is FRONT for each in seen)
    assert [each[2] for each in seen] == [Actor("kim"), ("x",), Actor("kim"), {"n": 1}]


def test_every_context_says_what_the_run_was_given():
    seen: list[tuple[Any, ...]] = []

    def note(context: Any) -> None:
        seen.append((context.run_id, context.session_id, context.actor, context.tags, context.metadata))

    def needs_approval(arguments: dict[str, Any], context: HookContext) -> bool:
        note(context)
        return False

    @tool(requires_approval=needs_approval)
    def pay(context: ToolContext, usd: int) -> str:
        """Pay."""
        note(context)
        return "paid"

    graph = LOOP.with_state(
        StateSpec("look", "look", effect=note),
        [Transition("look", None, State.TERMINAL, ends="completed")],
        entered_by="post_llm.otherwise",
    )
    model = ScriptedModel([call("pay", usd=1), "ok"])
    agent = Agent(model, tools=[pay], hooks=[hook("pre_step")(note)], graph=graph)
    assert agent.run_sync("go", run_id="r", session_id="s", actor="kim", tags=("x",), metadata={"n": 1}).ok
    assert seen == [("r", "s", Actor("kim"), ("x",), {"n": 1})] * 5  # hook, approval, tool, hook, state


def test_a_run_shows_its_dependencies_but_its_representations_do_not():
    run = Agent(ScriptedModel(["ok"]), deps_type=Desk).run("go", deps=Desk("secret"))
    assert run.deps == Desk("secret")
    assert "secret" not in repr(run)
    assert "secret" not in repr(RunContext("r", "", deps=run.deps))
    assert "secret" not in repr(RunContext("r", "", tags=("secret",), metadata={"a": "secret"}))
    assert Agent(ScriptedModel(["ok"])).run("go").deps is None


def test_dependencies_of_another_type_are_refused():
    agent = Agent(ScriptedModel(["ok"]), deps_type=Desk)
    with pytest.raises(RunError, match=r"must be a Desk \(deps_type\), not str"):
        agent.run("go", deps="front")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"are a Desk \(deps_type\), and the run has none: agent.run\(prompt, deps="):
        agent.run("go")


class Named(Protocol):
    name: str


@pytest.mark.parametrize(("deps_type", "deps"), [(Named, FRONT), (dict[str, int], {"a": 1}), (object, "anything")])
def test_a_type_that_cannot_be_checked_whole_is_checked_as_far_as_possible(deps_type: Any, deps: Any):
    agent: Agent[Any, str] = Agent(ScriptedModel(["ok"]), deps_type=deps_type)
    assert agent.run_sync("go", deps=deps).ok
    if deps_type is not object:
        with pytest.raises(RunError, match="the run has none"):
            agent.run("go")


# -- a run that is resumed ------------------------------------------------------------------------------------


@tool(requires_approval=True)
def pay(context: ToolContext[Desk], usd: int) -> str:
    """Pay."""
    return f"{context.deps.name} paid {usd} for {context.metadata['tenant']}, {context.tags[0]}"


def payer(host: Host, *script: Any) -> Agent[Desk, str]:
    return Agent(ScriptedModel(list(script) or [call("pay", usd=1), "ok"]), tools=[pay], deps_type=Desk, host=host)


GIVEN: dict[str, Any] = {"deps": FRONT, "tags": ["t"], "metadata": {"tenant": "acme"}}


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_with_dependencies_is_resumed_with_them_and_not_without(stored: bool, tmp_path: Any):
    host = Host(store=SqliteStore(tmp_path / "runs.db")) if stored else Host()
    waiting = payer(host).run_sync("go", **GIVEN)
    request = waiting.outcome
    assert isinstance(request, UserInputRequested)
    record: Any = waiting.run_id if stored else request.suspension_record.to_json()
    agent = payer(host, "ok")
    with pytest.raises(MissingDepsError, match=r"give them again with agent.resume\(..., deps=...\), or give the"):
        asyncio.run(agent.resume(record, Allow()).load())
    with pytest.raises(RunError, match="not int"):
        asyncio.run(agent.resume(record, Allow(), deps=3).load())  # type: ignore[arg-type]
    result = agent.resume_sync(record, Allow(), deps=Desk("back"))
    assert [m.content for m in result.messages if m.role == "tool"] == ["back paid 1 for acme, t"]


def test_a_run_that_waits_is_dismissed_without_its_dependencies():
    agent = payer(Host())
    waiting = agent.run_sync("go", **GIVEN)
    request = waiting.outcome
    assert isinstance(request, UserInputRequested)

    async def dismiss() -> Any:
        return await agent.dismiss(request.suspension_record, "not needed")

    assert isinstance(asyncio.run(dismiss()).outcome, RunCancelled)


# -- sub-agents -----------------------------------------------------------------------------------------------


def caller(sub: Agent[Any, Any], deps_type: Any, **config: Any) -> Agent[Any, str]:
    model = ScriptedModel([call("ask", task="show"), "ok"])
    return Agent(model, tools=[sub.as_tool("ask", "Asks.")], deps_type=deps_type, **config)


def test_a_sub_agent_that_declares_their_type_gets_the_dependencies_of_its_caller():
    seen: list[str] = []

    @hook("pre_step")
    def watch(context: Any) -> None:
        seen.extend(m.content for m in context.run.messages if m.role == "tool")

    sub = Agent(ScriptedModel([call("show"), "done"]), tools=[show], deps_type=Desk, hooks=[watch])
    result = caller(sub, Desk).run_sync("go", deps=FRONT, actor="kim", tags=["t"], metadata={"n": 1})
    assert result.output == "ok"
    assert seen == ["front kim, claimed, not verified ('t',) {'n': 1} 1"]


def test_a_sub_agent_that_declares_none_gets_none():
    seen: list[Any] = []

    @hook("pre_step")
    def watch(context: Any) -> None:
        seen.append(context.deps)

    sub = Agent(ScriptedModel(["done"]), hooks=[watch])
    assert caller(sub, Desk).run_sync("go", deps=FRONT).ok
    assert seen == [None]


def test_a_call_of_a_sub_agent_fails_if_the_caller_has_not_what_it_declares():
    sub = Agent(ScriptedModel(["done"]), deps_type=Desk)
    model = ScriptedModel([call("ask", task="show"), "ok"])
    agent: Agent[Any, str] = Agent(model, tools=[sub.as_tool("ask", "Asks.")])
    result = agent.run_sync("go", deps="front")
    assert "must be a Desk (deps_type), not str" in next(m.content for m in result.messages if m.role == "tool")


def test_one_reply_resumes_a_caller_and_its_sub_agent_with_one_set_of_dependencies():
    sub = Agent(ScriptedModel([call("pay", usd=1), "done"]), tools=[pay], deps_type=Desk)
    agent = caller(sub, Desk)
    waiting = agent.run_sync("go", **GIVEN)
    request = waiting.outcome
    assert isinstance(request, UserInputRequested)
    assert (request.asker, request.tool) == ("ask", "pay")
    with pytest.raises(MissingDepsError):
        asyncio.run(agent.resume(request.suspension_record, Allow()).load())
    assert agent.resume_sync(request.suspension_record, Allow(), deps=Desk("back")).output == "ok"


# -- context variables ----------------------------------------------------------------------------------

USER: ContextVar[str] = ContextVar("USER", default="nobody")


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "record"])
def test_context_variables_are_those_of_whoever_awaits_the_run_also_after_an_approval(stored: bool) -> None:
    seen: dict[str, set[str]] = {}

    def note(who: str) -> str:
        seen.setdefault(who, set()).add(USER.get())
        return "ok"

    class NotingModel(ScriptedModel):
        async def reply(self, request: ModelRequest) -> Reply:
            note("model")
            return await super().reply(request)

    @tool(requires_approval=lambda arguments: note("approval") == "ok")
    def plain() -> str:
        """Run in a thread."""
        note("plain tool")
        USER.set("of the tool")
        return "ok"

    @tool
    async def quick() -> str:
        """Run in the event loop."""
        return note("async tool")

    @hook("dispatch_tool")
    def watch(context: HookContext[Any]) -> None:
        note("hook")

    async def greet(context: RunContext[Any]) -> str:
        return note("instructions")

    def in_sub_agent() -> str:
        """Run in a sub-agent."""
        return note("sub-agent")

    child = Agent(NotingModel([call("in_sub_agent"), "ok"]), tools=[in_sub_agent])
    script = [call("quick"), call("plain"), call("quick"), call("ask_child", task="look"), "done"]
    host = Host(store=MemoryStore() if stored else None, secret=b"of the host, 32 bytes at the least")
    agent = Agent(
        NotingModel(script),
        tools=[plain, quick, child.as_tool("ask_child", "Ask.")],
        hooks=[watch, observer(lambda event: note("observer") and None)],
        instructions=greet,
        host=host,
    )

    async def scene() -> None:
        USER.set("ann")
        waiting = (await agent.run("go", run_id="r")).outcome
        assert isinstance(waiting, UserInputRequested)
        everybody = {name: {"ann"} for name in ("model", "approval", "async tool", "hook", "instructions", "observer")}
        assert seen == everybody
        seen.clear()
        USER.set("bob")
        result = await agent.resume("r" if stored else waiting.suspension_record, Allow())
        assert (result.output, USER.get()) == ("done", "bob")
        del everybody["instructions"]  # they are in the journal
        assert seen == {name: {"bob"} for name in (*everybody, "plain tool", "sub-agent")}

    asyncio.run(scene())
