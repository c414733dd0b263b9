"""Tools that depend on the context of a run: chosen when it starts, pinned in its journal, and chosen again later."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from agentfsm import (
    Agent,
    Allow,
    Approval,
    ConfigurationError,
    Deny,
    FilteredToolset,
    Host,
    MemoryStore,
    RunContext,
    SuspensionApprovalError,
    SuspensionToolError,
    Tool,
    ToolContext,
    ToolDefinitionError,
    ToolsetError,
    UserInputRequested,
    allow,
    ask_user,
    deny,
    permissions,
    tool,
)
from agentfsm.agent.config import proof_traits
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, verify_stored_run
from agentfsm.loop.presets import STANDARD
from agentfsm.runtime.permissions import unattended_calls
from agentfsm.runtime.run import hand_over
from agentfsm.testing import ModelTurn, RecordingModel, Scenario, ScriptedModel, Simulator, call


def look(page: str) -> str:
    """Look at a page."""
    return f"{page} is short"


@tool(requires_approval=True)
def delete(page: str) -> str:
    """Delete a page."""
    return f"{page} is gone"


class EditorTools:
    """Tools of editors."""

    def __init__(self, *tools: Any) -> None:
        self.tools = tools
        self.contexts: list[RunContext[Any]] = []

    async def get_tools(self, context: RunContext[Any]) -> list[Any]:
        await asyncio.sleep(0)
        self.contexts.append(context)
        return list(self.tools) if "editor" in context.tags else []


def for_editors(context: RunContext[Any], tool: Tool) -> bool:
    return tool.name == "look" or "editor" in context.tags


async def for_editors_later(context: RunContext[Any], tool: Tool) -> bool:
    await asyncio.sleep(0)
    return for_editors(context, tool)


def by_function(context: RunContext[Any]) -> list[Any]:
    return [look, delete] if "editor" in context.tags else [look]


async def by_async_function(context: RunContext[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return by_function(context)


EVERY_WAY: dict[str, Any] = {
    "filtered": [FilteredToolset([look, delete], for_editors)],
    "filtered later": FilteredToolset([look, delete], for_editors_later),
    "object": [look, EditorTools(delete)],
    "function": by_function,
    "async function": by_async_function,
    "lambda": lambda context: by_function(context),  # a function without annotations
}


def agent_with(tools: Any, *script: Any, **more: Any) -> Agent[Any, Any]:
    return Agent(RecordingModel(ScriptedModel(list(script))), tools=tools, **more)


def results(result: Any) -> list[str]:
    return [m.content for m in result.messages if m.role == "tool"]


def offered(agent: Agent[Any, Any]) -> list[list[str]]:
    return [[spec.name for spec in request.tools] for request in cast("Any", agent.model).requests]


def pinned(result: Any) -> set[str]:
    return set(result.journal[0].data.get("tools", {}))


@pytest.mark.parametrize("tools", EVERY_WAY.values(), ids=EVERY_WAY)
def test_each_run_has_the_tools_that_are_chosen_for_it_and_its_journal_pins_them(tools: Any):
    agent = agent_with(
        tools, call("delete", page="a"), "no", call("delete", page="b"), "yes", host=Host(secret=b"s" * 32)
    )
    reader = agent.run_sync("go")
    assert results(reader) == ["There is no tool named 'delete'. Call one of the registered tools: look."]
    assert pinned(reader) == {"look"}
    editor = agent.run_sync("go", tags=["editor"])
    assert isinstance(editor.outcome, UserInputRequested)
    assert pinned(editor) == {"look", "delete"}
    done = agent.resume_sync(editor.outcome.suspension_record, Allow())
    assert results(done) == ["b is gone"]
    assert offered(agent) == [["look"], ["look"], ["look", "delete"], ["look", "delete"]]


def test_runs_that_go_on_at_once_do_not_get_each_others_tools():
    async def both() -> list[Any]:
        agents = [agent_with(EVERY_WAY["object"], call("delete", page="a"), "no", host=host) for _ in range(2)]
        shared = agents[0]
        return await asyncio.gather(shared.run("go", tags=["editor"]), agents[1].run("go"))

    host = Host(secret=b"s" * 32)
    editor, reader = asyncio.run(both())
    assert (pinned(editor), pinned(reader)) == ({"look", "delete"}, {"look"})


def test_a_toolset_gets_the_dependencies_and_all_that_the_run_was_given():
    toolset = EditorTools(delete)
    agent = agent_with([toolset], "ok", deps_factory=lambda context: f"deps of {context.run_id}")
    agent.run_sync("go", run_id="r1", session_id="s", actor="ann", tags=["editor"], metadata={"n": 1})
    (context,) = toolset.contexts
    assert (context.run_id, context.session_id, context.actor and context.actor.id) == ("r1", "s", "ann")
    assert (context.tags, context.metadata["n"], context.deps) == (("editor",), 1, "deps of r1")


def test_the_tools_are_chosen_again_when_a_run_goes_on_in_another_process():
    store, first = MemoryStore(), EditorTools(delete)
    host = Host(store=store, secret=b"s" * 32)
    agent_with([first], call("delete", page="a"), host=host).run_sync("go", run_id="r", tags=["editor"])
    second = EditorTools(delete)
    later = agent_with([second], "done", host=host)
    assert results(later.resume_sync("r", Allow())) == ["a is gone"]
    assert (len(first.contexts), len(second.contexts)) == (1, 1)
    assert asyncio.run(verify_stored_run(store, "r", keyring=host.keyring)).code == GOOD


def other_delete(page: str) -> str:
    """Delete a page, and its history."""
    return f"{page} and its history are gone"


@pytest.mark.parametrize(
    ("later", "why"),
    [([], "this agent does not have"), ([tool(name="delete", requires_approval=True)(other_delete)], "another")],
    ids=["no longer has it", "has another one"],
)
@pytest.mark.parametrize("stored", [True, False])
def test_an_approval_holds_for_a_tool_of_a_toolset_only_as_it_was_shown(later: list[Any], why: str, stored: bool):
    host = Host(store=MemoryStore() if stored else None, secret=b"s" * 32)
    waits = agent_with([EditorTools(delete)], call("delete", page="a"), host=host).run_sync(
        "go", run_id="r", tags=["editor"]
    )
    assert isinstance(waits.outcome, UserInputRequested)
    record: Any = "r" if stored else waits.outcome.suspension_record
    changed = agent_with([look, EditorTools(*later)], "ok", host=host)
    with pytest.raises(SuspensionToolError, match=why):
        changed.resume_sync(record, Allow())
    denied = changed.resume_sync(record, Deny("no"))  # nothing runs, so it needs no tool
    assert denied.output == "ok"


async def interrupted(agent: Agent[Any, Any]) -> None:
    """A stored run after its first step, which nobody goes on with."""
    run = agent.run("go", run_id="r", tags=["editor"])
    await run.step()
    await hand_over(run)


def test_a_run_that_was_interrupted_goes_on_with_the_tools_of_its_context():
    host = Host(store=MemoryStore(), secret=b"s" * 32)

    async def go_on() -> Any:
        await interrupted(agent_with([EditorTools(look)], call("look", page="a"), host=host))
        (run,) = await agent_with([EditorTools(look)], call("look", page="b"), "done", host=host).unfinished_runs()
        return await run

    assert results(asyncio.run(go_on())) == ["a is short", "b is short"]


class Broken:
    def get_tools(self, context: RunContext[Any]) -> Any:
        raise OSError("the directory is down")


def returning(value: Any) -> Any:
    class Returning:
        def get_tools(self, context: RunContext[Any]) -> Any:
            return value

    return Returning()


@tool(requires_approval=Approval(n=2))
def pay(usd: int) -> str:
    """Pay."""
    return f"paid {usd}"


@pytest.mark.parametrize(
    ("toolset", "why"),
    [
        (Broken(), "the directory is down"),
        (returning("look"), "returned str, and not a list of tools"),
        (returning(None), "returned NoneType"),
        (returning([3]), "must be a function, not int"),
        (returning([ask_user]), "returned ask_user, which is given to an agent in tools="),
        (returning([look]), "two tools have the name 'look'"),
        (returning([pay]), "the graph counts no votes"),
    ],
)
def test_a_run_does_not_start_with_tools_that_it_cannot_have(toolset: Any, why: str):
    agent = agent_with([look, toolset], "ok", host=Host(store=(store := MemoryStore()), secret=b"s" * 32))
    with pytest.raises(ToolsetError, match=why):
        agent.run_sync("go", run_id="r")
    assert asyncio.run(store.head("r")) is None


def test_a_run_that_loses_the_only_tool_that_could_end_it_does_not_start():
    behavior = STANDARD.behavior.model_copy(update={"text_is_answer": False})

    @tool(ends_run=True)
    def hand_in(text: str) -> str:
        """Hand in."""
        return text

    toolset = FilteredToolset([hand_in], lambda context, tool: "editor" in context.tags)
    agent = agent_with([toolset], call("hand_in", text="x"), preset=replace(STANDARD, behavior=behavior))
    with pytest.raises(ToolsetError, match="no reply could end a run"):
        agent.run_sync("go")
    assert agent.run_sync("go", tags=["editor"]).output == "x"


def test_a_permission_rule_that_can_never_apply_to_a_tool_of_a_toolset_refuses_the_run():
    policy = permissions(deny("delete", where={"pge": "x"}), allow("*"))
    with pytest.raises(ToolsetError, match="can never apply to the tool 'delete'"):
        agent_with([EditorTools(delete)], "ok", hooks=[policy]).run_sync("go", tags=["editor"])


def test_permission_rules_decide_about_the_tools_of_toolsets():
    policy = permissions(allow("look"), otherwise="deny")
    result = agent_with(by_function, call("delete", page="a"), "ok", hooks=[policy]).run_sync("go", tags=["editor"])
    (text,) = results(result)
    assert "denied" in text.lower()


@pytest.mark.parametrize("tools", ["look", b"look", 7, None, look, delete, str, lambda a, b: [], list])
def test_tools_that_are_neither_a_list_nor_a_toolset_nor_a_function_of_the_context_are_refused(tools: Any):
    with pytest.raises(ConfigurationError, match=r"tools must be|must be an object, not the class"):
        Agent(ScriptedModel([]), tools=tools)


def test_a_class_in_place_of_a_toolset_is_refused():
    with pytest.raises(ToolDefinitionError, match=r"EditorTools is a class: give a toolset of it"):
        Agent(ScriptedModel([]), tools=[EditorTools])


def test_a_filter_that_is_no_function_is_refused():
    with pytest.raises(ConfigurationError, match="keep must be a function"):
        FilteredToolset([look], cast("Any", "admin"))


def test_a_run_whose_toolset_fails_when_it_goes_on_stays_as_it_is_and_can_be_dismissed():
    host = Host(store=(store := MemoryStore()), secret=b"s" * 32)
    agent_with([EditorTools(delete)], call("delete", page="a"), host=host).run_sync("go", run_id="r", tags=["editor"])
    broken = agent_with([Broken()], host=host)
    before = asyncio.run(store.head("r"))
    with pytest.raises(ToolsetError, match="the directory is down"):
        broken.resume_sync("r", Allow())
    assert asyncio.run(store.head("r")) == before

    async def dismiss() -> Any:
        return await broken.dismiss("r", "too late")

    assert asyncio.run(dismiss()).outcome.reason == "too late"


def test_a_run_whose_tools_cannot_be_chosen_is_left_alone_and_the_log_says_why(caplog: pytest.LogCaptureFixture):
    host = Host(store=MemoryStore(), secret=b"s" * 32)
    asyncio.run(interrupted(agent_with([EditorTools(look)], call("look", page="a"), host=host)))
    assert asyncio.run(agent_with([Broken()], host=host).unfinished_runs()) == []
    assert "the directory is down" in caplog.text


def test_secret_arguments_of_a_toolsets_tool_are_not_journaled():
    @tool(secret=["pin"])
    def unlock(pin: str) -> str:
        """Unlock."""
        return f"unlocked with {pin}"

    agent = agent_with([EditorTools(unlock)], call("unlock", pin="4711-0815"), "ok")
    events: list[Any] = []

    async def follow() -> Any:
        run = agent.run("go", tags=["editor"])
        async for event in run:
            events.append(event.to_dict())
        return await run

    result = asyncio.run(follow())
    assert results(result) == ["unlocked with 4711-0815"]
    assert "4711-0815" not in repr([record.data for record in result.journal])
    assert "4711-0815" not in repr(events)


def test_an_envelope_and_a_function_of_instructions_name_the_tools_of_the_run_alone():
    agent = agent_with(
        EVERY_WAY["filtered"],
        '{"type": "final", "answer": "x"}',
        preset="feedback",
        instructions=lambda context: f"You help {context.run_id}.",
    )
    editor, reader = agent.run_sync("go", tags=["editor"], run_id="e"), agent.run_sync("go", run_id="r")
    told = [result.messages[0].content for result in (editor, reader)]
    assert [text[:11] for text in told] == ["You help e.", "You help r."]
    assert [("look" in text, "delete" in text) for text in told] == [(True, True), (True, False)]


def test_the_system_prompt_stands_once_in_a_run_that_was_resumed():
    host = Host(secret=b"s" * 32)
    agent = agent_with(by_function, call("delete", page="a"), "ok", instructions="Be brief.", host=host)
    waits = agent.run_sync("go", tags=["editor"])
    assert isinstance(waits.outcome, UserInputRequested)
    result = agent.resume_sync(waits.outcome.suspension_record, Allow())
    assert [m.content for m in result.messages if m.role == "system"] == ["Be brief."]


@dataclass
class Team:
    name: str


class TeamTools:
    def get_tools(self, context: RunContext[Team]) -> list[Any]:
        @tool(requires_approval=True)
        def publish(context: ToolContext[Team], page: str) -> str:
            """Publish a page."""
            return f"{page} by {context.deps.name}"

        return [publish] if context.deps.name == "press" else []


@pytest.mark.parametrize("stored", [True, False])
def test_a_sub_agents_toolset_gets_the_dependencies_of_the_calling_run_also_after_a_wait(stored: bool):
    host = Host(store=MemoryStore() if stored else None, secret=b"s" * 32)

    def caller(inner_script: list[Any], *script: Any) -> Agent[Team, str]:
        inner = Agent(ScriptedModel(inner_script), tools=[TeamTools()], deps_type=Team)
        return Agent(
            ScriptedModel(list(script)),
            tools=[inner.as_tool("writer", "Writes.")],
            deps_type=Team,
            deps_factory=lambda context: Team("press"),
            host=host,
        )

    waits = caller([call("publish", page="Home")], call("writer", task="publish Home")).run_sync("go", run_id="r")
    assert isinstance(waits.outcome, UserInputRequested)
    record: Any = "r" if stored else waits.outcome.suspension_record
    goes_on = caller(["published"], "all done")
    assert results(goes_on.resume_sync(record, Allow())) == ["published"]


def test_a_session_chooses_the_tools_of_each_run():
    agent = agent_with(by_function, "one", "two", host=Host(store=MemoryStore(), secret=b"s" * 32))
    session = agent.session("s")
    session.run_sync("go", tags=["editor"])
    session.run_sync("go on")
    assert offered(agent) == [["look", "delete"], ["look"]]


def test_a_monitored_run_with_a_toolset_stays_within_what_its_proof_allows():
    host = Host(monitor="raise", secret=b"s" * 32)
    agent = agent_with([EditorTools(delete)], call("delete", page="a"), "ok", host=host)
    waits = agent.run_sync("go", tags=["editor"])
    assert isinstance(waits.outcome, UserInputRequested)
    assert agent.resume_sync(waits.outcome.suspension_record, Allow()).output == "ok"


def test_a_run_with_a_toolset_replays_without_it():
    store = MemoryStore()
    agent = agent_with([EditorTools(look)], call("look", page="a"), "ok", host=Host(store=store))
    agent.run_sync("go", run_id="r", tags=["editor"])
    assert replay(asyncio.run(store.records("r")), agent.graph).same


def test_proofs_count_with_every_kind_of_tool_of_a_toolset_and_with_no_more_than_the_declared_ones_of_a_filter():
    def traits(tools: Any) -> tuple[bool, bool]:
        found = proof_traits(Agent(ScriptedModel([]), tools=tools).config)
        return found.sub_agents, found.secrets

    assert traits([look]) == (False, False)
    assert traits([FilteredToolset([look], for_editors)]) == (False, False)
    assert traits([look, EditorTools()]) == (True, True)
    assert traits(by_function) == (True, True)

    @tool(secret=["pin"])
    def unlock(pin: str) -> str:
        """Unlock."""
        return "ok"

    assert traits([FilteredToolset([unlock], for_editors)]) == (False, True)


def test_what_a_toolset_may_call_without_a_person_is_said_to_be_unknown_and_a_filters_tools_are_listed():
    agent = Agent(ScriptedModel([]), tools=[FilteredToolset([look, delete], for_editors), EditorTools()])
    config = agent.config
    verdicts = {c.tool: c.unattended for c in unattended_calls(config.tools, config.hooks, config.toolsets)}
    assert verdicts == {"look": "always", "delete": "never", "EditorTools": "unknown"}
    outer = Agent(ScriptedModel([]), tools=[agent.as_tool("wiki", "Wiki.")]).config
    nested = [c.tool for c in unattended_calls(outer.tools, outer.hooks, outer.toolsets)]
    assert nested == ["wiki", "wiki/look", "wiki/delete", "wiki/EditorTools"]


def test_paths_walk_with_all_tools_that_a_filter_declares():
    agent = Agent(ScriptedModel([]), tools=[FilteredToolset([look, delete], lambda context, tool: False)])
    played = Simulator(agent).run_sync(Scenario([ModelTurn([call("delete", page="a")])]))
    assert "dispatch_tool.approval_required" in played.ids


def test_an_agent_with_other_toolsets_is_another_tool():
    def digest(tools: Any) -> str:
        return Agent(ScriptedModel([]), tools=tools).as_tool("a", "b").digest

    assert digest([EditorTools()]) == digest([EditorTools()])
    assert len({digest([]), digest([EditorTools()]), digest([Broken()])}) == 3


@pytest.mark.parametrize("stored", [True, False])
def test_the_approval_that_chosen_tools_need_is_pinned_when_the_run_begins(stored: bool):
    host = Host(store=MemoryStore() if stored else None, secret=b"s" * 32)
    begun = agent_with([EditorTools(delete, tool(look))], call("delete", page="a"), host=host)
    waits = begun.run_sync("go", run_id="r", tags=["editor"])
    record: Any = "r" if stored else waits.outcome.suspension_record
    weaker = agent_with([EditorTools(replace(delete, requires_approval=False))], call("delete", page="b"), host=host)
    with pytest.raises(SuspensionApprovalError, match="'delete' needs an approval there, and none here"):
        weaker.resume_sync(record, Allow())
    assert agent_with([EditorTools(delete)], "ok", host=host).resume_sync(record, Deny("no")).output == "ok"
