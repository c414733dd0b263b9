"""The agent: its arguments, what it rejects, and how runs are started, resumed and dismissed."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Behavior,
    BlankHumanReplyError,
    ConfigurationError,
    DefaultPolicy,
    Deny,
    Failure,
    FailureKind,
    FileReplayGuard,
    GraphError,
    Handoff,
    Host,
    HumanReplyError,
    ItRan,
    Message,
    Migration,
    Preset,
    Role,
    RunError,
    RunResult,
    RunState,
    StateSpec,
    SuspensionExpiredError,
    SuspensionFormatError,
    SuspensionGraphError,
    SuspensionTamperedError,
    SuspensionUsedError,
    ToolCall,
    ToolDefinitionError,
    Transition,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.store import Head, WhichRuns
from agentfsm.loop.presets import PRESETS
from agentfsm.runtime.run import Run
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.provider_rules import check_requests
from tests.helpers.scenarios import (
    check_result,
    explode,
    run_agent,
    run_async,
    run_script,
    scripted_agent,
    transcript_of,
)


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


@tool(requires_approval=True)
def pay(amount: int = 1) -> str:
    """Pay."""
    return f"paid {amount}"


class Report(BaseModel):
    title: str


class Nameless:
    """A model that events could not name."""

    async def reply(self, request: Any) -> Any: ...


# -- what it is made of -------------------------------------------------------------------------------


def test_an_agent_is_a_model_and_the_rest_is_the_presets():
    model = ScriptedModel(["hi"])
    agent = Agent(model)
    assert agent.model is model
    assert agent.guardrails == AgentGuardrails()
    assert agent.behavior == Behavior()
    assert agent.graph is LOOP
    assert agent.instructions == ""
    assert repr(agent) == "Agent('scripted', tools=[], graph='loop')"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_may_be_named_or_given(name):
    for preset in (name, PRESETS[name]):
        agent = Agent(ScriptedModel(), preset=preset)
        assert agent.guardrails == PRESETS[name].guardrails
        assert agent.behavior == PRESETS[name].behavior
        assert agent.graph is PRESETS[name].graph


def test_what_is_given_comes_before_what_the_preset_brings():
    limits, graph = AgentGuardrails(max_iterations=7), LOOP.without("post_tool.repeated_error")
    agent = Agent(ScriptedModel(), preset="feedback", guardrails=limits, graph=graph)
    assert agent.guardrails is limits
    assert agent.graph is graph
    assert agent.behavior.envelope


def test_an_agent_takes_a_custom_preset():
    mine = Preset("mine", behavior=Behavior(control_tools=True), policy=DefaultPolicy(budgets={}))
    agent = Agent(ScriptedModel(), preset=mine)
    assert "return_done" in repr(agent)


@pytest.mark.parametrize("name", ["funnel", "breaker"])
def test_presets_with_control_tools_tell_the_model_of_them(name):
    agent, model = scripted_agent(call("return_done", output="x"), preset=name, tools=[look])
    run_async(lambda: _run(agent))
    assert [t.name for t in model.requests[0].tools] == ["look", "ask_user", "return_done", "return_unable"]


def test_envelope_instructions_follow_the_agents_instructions():
    agent = Agent(ScriptedModel(), preset="feedback", tools=[look], instructions="Be brief.")
    assert agent.instructions.startswith("Be brief.\n\nAnswer with exactly one JSON object")
    assert '"description":"Look somewhere."' in agent.instructions


def test_the_output_schema_is_in_the_instructions_unless_a_tool_has_it():
    assert "JSON schema" in Agent(ScriptedModel(), output_type=Report).instructions
    assert Agent(ScriptedModel(), output_type=Report, preset="funnel").instructions == ""
    assert Agent(ScriptedModel(), output_type=str).instructions == ""


async def _run(agent: Agent, prompt: str = "go", **more: Any) -> RunResult:
    return await agent.run(prompt, **more)


# -- what it refuses ----------------------------------------------------------------------------------


def a(run: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ({"model": 3}, ConfigurationError, "a model must be a name, or an object with reply() and a name, not int"),
        (
            {"model": Nameless()},
            ConfigurationError,
            "a model must be a name, or an object with reply() and a name, not Nameless",
        ),
        ({"model": None}, ConfigurationError, "not NoneType"),
        ({"preset": "nice"}, ConfigurationError, "there is no preset 'nice'; the presets are: standard, funnel"),
        ({"tools": ["look"]}, ToolDefinitionError, "a tool must be a function, not str"),
        ({"tools": [look, look]}, ToolDefinitionError, "two tools have the name 'look'"),
        ({"output_type": object()}, ConfigurationError, "output_type cannot be described as JSON"),
        ({"output_type": type(a)}, ConfigurationError, "output_type cannot be described as JSON"),
        ({"hooks": [a]}, ConfigurationError, "a hook must be made with"),
        ({"tools": look}, ConfigurationError, "tools must be a list of functions, as in tools=[look], not Tool"),
        ({"tools": None}, ConfigurationError, "tools must be a list of functions"),
        ({"tools": "look"}, ConfigurationError, "tools must be a list of functions, as in tools=[look], not str"),
        (
            {"instructions": ["Be short."]},
            ConfigurationError,
            "instructions must be a string, or a function of",
        ),
        ({"guardrails": {"max_iterations": 3}}, ConfigurationError, "guardrails must be an AgentGuardrails, not dict"),
        ({"policy": "retry"}, ConfigurationError, "policy must be an object with decide() and backoff(), not str"),
        ({"policy": DefaultPolicy}, ConfigurationError, "policy must be an object, not the class DefaultPolicy"),
        ({"graph": "LOOP"}, ConfigurationError, "graph must be a Graph, not str"),
        ({"hooks": hook("terminal")(a)}, ConfigurationError, "hooks must be a list of hooks and observers, not Hook"),
        ({"memory": {}}, ConfigurationError, "memory must be an object with recall() and remember(), not dict"),
        ({"host": "here"}, ConfigurationError, "host must be a Host, not str"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_reason(parts, error, words):
    with pytest.raises(error, match=re.escape(words)):
        Agent(**{"model": ScriptedModel(), **parts})


def test_tools_that_are_named_as_the_presets_own_are_refused():
    @tool(name="return_done")
    def mine(output: str) -> str:
        return output

    with pytest.raises(ConfigurationError, match="return_done: the preset already has tools with these names"):
        Agent(ScriptedModel(), tools=[mine], preset="funnel")
    assert Agent(ScriptedModel(), tools=[mine]).behavior.control_tools is False


@pytest.mark.parametrize(
    ("graph", "edge", "rule"),
    [
        (lambda: LOOP.without("recover.aborted"), "recover", "'aborted' must be row 2 of every state"),
        (lambda: LOOP.without("call_llm.cancelled"), "call_llm", "'cancelled' must be row 1 of every state"),
        (lambda: replace(LOOP, first=()), "loop", "has the rows 'cancelled' and 'aborted' first"),
        (
            lambda: LOOP.with_state(
                StateSpec("extra"),
                [Transition("extra", None, "terminal", ends="completed")],
                entered_by="post_llm.otherwise",
            ),
            "extra",
            "the state has no effect",
        ),
    ],
)
def test_a_graph_that_cannot_run_an_agent_is_refused(graph, edge, rule):
    with pytest.raises(GraphError, match=rule) as caught:
        Agent(ScriptedModel(), graph=graph())
    assert caught.value.edge == edge


def test_a_stop_that_leads_elsewhere_than_to_an_end_is_refused():
    rows = [replace(t, target="recover", ends="") if t.id == "post_llm.aborted" else t for t in LOOP]
    with pytest.raises(GraphError, match="'aborted' must lead to a final state"):
        replace(LOOP, transitions=rows)


def test_a_stop_that_ends_the_run_as_something_else_is_refused():
    rows = [replace(t, ends="completed") if t.id == "post_llm.aborted" else t for t in LOOP]
    with pytest.raises(GraphError, match="'aborted' must end the run as aborted"):
        Agent(ScriptedModel(), graph=replace(LOOP, transitions=rows))


def test_a_limit_out_of_range_is_refused_with_its_name():
    with pytest.raises(ValidationError, match="max_iterations"):
        AgentGuardrails(max_iterations=0)


def test_nothing_is_half_done_when_something_is_refused():
    used: list[str] = []

    class Model:
        name = "m"

        async def reply(self, request: Any) -> Any:
            used.append("asked")

    with pytest.raises(ConfigurationError):
        Agent(Model(), preset="nice")
    assert used == []


# -- beginning a run ----------------------------------------------------------------------------------


def test_a_run_begins_with_instructions_history_and_prompt():
    agent, _ = scripted_agent("done", instructions="be good")
    history = [Message.system("an older word"), Message.user("hello"), Message.assistant("hi")]
    result = run_async(lambda: _run(agent, "go", message_history=history, session_id="s", run_id="r"))
    assert transcript_of(result) == [
        ("system", "be good"), ("user", "hello"), ("assistant", "hi"), ("user", "go"), ("assistant", "done"),
    ]  # fmt: skip
    assert (result.run_state.run_id, result.run_state.session_id) == ("r", "s")
    assert len(history) == 3


def test_a_conversation_continues_from_the_messages_of_a_result():
    agent, model = scripted_agent(call("look"), "one", call("look"), "two", tools=[look], instructions="be good")

    async def scene() -> RunResult:
        first = check_result(await agent.run("first"), model)
        return check_result(await agent.run("second", message_history=first.messages), model)

    result = run_async(scene)
    assert [role for role, _ in transcript_of(result)] == [
        "system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_a_history_that_ends_in_an_open_call_is_completed():
    """The messages of a run that waits for a person, taken for a new one instead of an answer."""
    agent, model = scripted_agent(call("pay"), "done", tools=[pay])

    async def scene() -> RunResult:
        waiting = await agent.run("go")
        assert isinstance(waiting.outcome, UserInputRequested)
        return check_result(await agent.run("never mind", message_history=waiting.messages), model)

    result = run_async(scene)
    assert [m.role for m in result.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.USER, Role.ASSISTANT]
    assert result.messages[2].is_error


def test_a_history_may_hold_several_open_calls_and_stray_results():
    agent, model = scripted_agent("done", tools=[pay])
    history = [
        Message.user("a"),
        Message.assistant("", (ToolCall("1", "pay"), ToolCall("2", "pay"))),
        Message(Role.TOOL, "paid", tool_call_id="2", name="pay"),
        Message.user("b"),
        Message.assistant("", (ToolCall("3", "pay"),)),
    ]
    check_result(run_async(lambda: _run(agent, message_history=history)))
    check_requests(model.requests)


@pytest.mark.parametrize("prompt", [None, 3, b"go", {"text": "go"}])
def test_a_prompt_is_a_text_or_a_list_of_parts(prompt):
    with pytest.raises(RunError, match="a prompt must be a string"):
        Agent(ScriptedModel()).run(prompt)


def test_runs_of_one_agent_do_not_disturb_each_other():
    agent, _ = scripted_agent("a", "b")
    first, second = agent.run("one"), agent.run("two")
    assert first.run_state is not second.run_state
    assert first.run_id != second.run_id


# -- run_sync, resume_sync, notebooks ---------------------------------------------------------------------------


def test_run_sync_gives_the_result_where_no_loop_runs():
    agent, model = scripted_agent(call("look"), "done", "again", tools=[look])
    first = check_result(agent.run_sync("go", session_id="s"), model)
    assert (first.output, first.run_state.session_id) == ("done", "s")
    assert agent.run_sync("more", message_history=first.messages).output == "again"


def test_a_run_is_started_under_its_id_and_resumed_without_a_loop():
    agent = paying()
    first = agent.run_sync("go", run_id="mine")
    assert first.run_id == "mine"
    assert isinstance(first.outcome, UserInputRequested)
    result = agent.resume_sync(first.outcome.suspension_record, Allow(), by="ann")
    assert (result.run_id, result.output) == ("mine", "done")


def test_the_methods_without_a_loop_are_an_error_in_a_running_one():
    agent, _ = scripted_agent("done")

    async def scene() -> None:
        with pytest.raises(RunError, match=r"use 'await agent\.run"):
            agent.run_sync("go")
        with pytest.raises(RunError, match=r"use 'await agent\.resume"):
            agent.resume_sync("record")

    asyncio.run(scene())


def test_a_notebook_shows_the_path_of_a_result_and_the_picture_of_a_graph():
    agent, _ = scripted_agent("done")
    result = agent.run_sync("go")
    assert result._repr_svg_() == result.diagram() != agent.graph._repr_svg_() == agent.graph.diagram()


# -- resuming -----------------------------------------------------------------------------------------


def waiting(agent: Agent) -> str:
    """The record of a run that waits, as text."""

    async def scene() -> str:
        result = await agent.run("go")
        assert isinstance(result.outcome, UserInputRequested)
        return result.outcome.suspension_record.to_json()

    return run_async(scene)


def resumed(agent: Agent, record: Any, answer: Any) -> RunResult:
    async def scene() -> RunResult:
        return check_result(await agent.resume(record, answer))

    return run_async(scene)


def paying(*script: Any, **parts: Any) -> Agent:
    return scripted_agent(call("pay", amount=3), *(script or ("done",)), **{"tools": [pay], **parts})[0]


@pytest.mark.parametrize("form", ["text", "indented", "record"])
def test_a_record_resumes_in_any_form(form):
    agent = paying()
    record: Any = waiting(agent)
    if form == "indented":
        record = "\n " + json.dumps(json.loads(record), indent=2)
    elif form == "record":
        from agentfsm import SuspensionRecord

        record = SuspensionRecord.from_json(record)
    assert resumed(agent, record, Allow()).output == "done"


def changed(record: str, **fields: Any) -> str:
    return json.dumps({**json.loads(record), **fields})


@pytest.mark.parametrize(
    ("change", "answer", "error"),
    [
        (lambda r: r, "yes", HumanReplyError),
        (lambda r: r, "", BlankHumanReplyError),
        (lambda r: r, "  ", BlankHumanReplyError),
        (lambda r: r, ItRan("x"), HumanReplyError),
        (lambda r: r, 42, HumanReplyError),
        (lambda r: r, None, BlankHumanReplyError),
        (lambda r: changed(r, question="May it really?"), Allow(), SuspensionTamperedError),
        (lambda r: changed(r, version=3), Allow(), SuspensionFormatError),
        (lambda r: changed(r, expires_at=10**12), Allow(), SuspensionTamperedError),
        (lambda r: "{}", Allow(), SuspensionFormatError),
        (lambda r: r[:-9], Allow(), SuspensionFormatError),
        (lambda r: None, Allow(), SuspensionFormatError),
        (lambda r: {}, Allow(), SuspensionFormatError),
    ],
)
def test_a_reply_or_a_record_that_is_not_good_changes_nothing(change, answer, error):
    agent = paying()
    record = waiting(agent)
    with pytest.raises(error):
        asyncio.run(agent.resume(change(record), answer).load())
    assert resumed(agent, record, Allow()).output == "done"


def test_what_is_not_a_record_is_refused_with_where_one_is_found():
    agent, _ = scripted_agent(call("ask_user", question="Which?"), preset="funnel")
    result = agent.run_sync("go")
    for wrong in (result, result.outcome):
        with pytest.raises(SuspensionFormatError, match=r"result.outcome.suspension_record.*result.run_id"):
            agent.resume_sync(wrong, "this one")


def test_a_blank_reply_to_a_question_changes_nothing():
    agent, _ = scripted_agent(call("ask_user", question="Which?"), call("return_done", output="x"), preset="funnel")
    record = waiting(agent)
    for blank in ("", "\n\t "):
        with pytest.raises(BlankHumanReplyError):
            asyncio.run(agent.resume(record, blank).load())
    with pytest.raises(HumanReplyError):
        asyncio.run(agent.resume(record, Allow()).load())
    assert resumed(agent, record, "this one").output == "x"


def test_a_record_is_good_for_one_reply():
    agent = paying("done", "never")
    record = waiting(agent)
    resumed(agent, record, Deny("no"))
    for use in (lambda: agent.resume(record, Allow()), lambda: agent.dismiss(record)):
        with pytest.raises(SuspensionUsedError, match="already resumed"):
            asyncio.run(use().load())


def test_a_record_that_was_only_looked_at_is_not_used_up():
    agent = paying()
    record = waiting(agent)
    asyncio.run(agent.resume(record, Allow()).load())
    asyncio.run(agent.dismiss(record).load())
    assert resumed(agent, record, Allow()).output == "done"


def test_one_folder_makes_a_record_good_for_one_reply_among_processes(tmp_path):
    def host() -> Host:
        return Host(clock=FakeClock(), secret=b"shared", replay_guard=FileReplayGuard(tmp_path))

    first, second = paying(host=host()), paying(host=host())
    record = waiting(first)
    third, _ = scripted_agent("done", tools=[pay], host=host())
    assert resumed(third, record, Allow()).output == "done"
    for agent in (first, second):
        with pytest.raises(SuspensionUsedError):
            asyncio.run(agent.resume(record, Allow()).load())


def test_another_secret_another_graph_and_another_day_are_refused():
    clock = FakeClock()
    host = Host(clock=clock, secret=b"ours")
    agent = paying(host=host)
    record = waiting(agent)
    with pytest.raises(SuspensionTamperedError, match="secret"):
        asyncio.run(paying(host=Host(clock=clock, secret=b"theirs")).resume(record, Allow()).load())
    with pytest.raises(SuspensionTamperedError):
        asyncio.run(paying(host=Host(clock=clock)).resume(record, Allow()).load())
    with pytest.raises(SuspensionGraphError):
        asyncio.run(paying(host=host, preset="strict").resume(record, Allow()).load())
    clock.advance(24 * 60 * 60)
    asyncio.run(agent.resume(record, Allow()).load())
    clock.advance(1)
    with pytest.raises(SuspensionExpiredError, match="dismiss"):
        asyncio.run(agent.resume(record, Allow()).load())


def test_a_run_that_was_resumed_may_wait_again_with_a_record_of_its_own():
    agent = paying(call("pay", amount=4), "done")
    first = waiting(agent)
    second = resumed(agent, first, Allow())
    assert isinstance(second.outcome, UserInputRequested)
    assert second.outcome.suspension_record.record_id != json.loads(first)["record_id"]
    assert second.outcome.suspension_record.run_id == json.loads(first)["run_id"]
    assert resumed(agent, second.outcome.suspension_record, Allow()).output == "done"


def test_lessons_are_carried_through_a_suspension():
    agent, model = scripted_agent(call("explode"), call("pay"), "done", tools=[pay, explode])
    result = resumed(agent, waiting(agent), Allow())
    assert [x.kind for x in result.run_state.lessons_learned] == [FailureKind.tool_error]
    assert "context_addendum" in model.requests[-1].messages[-1].content


# -- the presets, end to end --------------------------------------------------------------------------


def test_standard_takes_text_for_the_answer():
    assert run_script("42").output == "42"


def test_funnel_takes_no_text_for_an_answer():
    result = run_script("I think", "still thinking", preset="funnel")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure.kind is FailureKind.no_progress


def test_feedback_keeps_its_feedback_and_has_five_steps():
    result = run_script(*["not JSON"] * 5, preset="feedback")
    assert result.run_state.model_calls == 5
    assert result.outcome.failure.kind is FailureKind.iteration_limit
    assert len([m for m in result.messages if m.role is Role.TOOL]) == 5


def test_breaker_opens_at_five_equal_errors():
    @tool
    def fail() -> str:
        raise ValueError("always")

    result = run_script(*[call("fail", f"id{n}") for n in range(9)], preset="breaker", tools=[fail])
    assert result.run_state.model_calls == 5
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure.kind is FailureKind.repeated_error


def test_strict_takes_a_tools_failure_for_conversation():
    @tool
    def fail(n: int) -> str:
        raise ValueError("always")

    result = run_script(*[call("fail", n=n) for n in range(7)], "gave up on it", preset="strict", tools=[fail])
    assert result.output == "gave up on it"
    assert result.run_state.lessons_learned == []
    busy = run_script(TimeoutError("busy"), "never", preset="strict")
    assert isinstance(busy.outcome, Handoff)


class Behind(MemoryStore):
    """A store whose list of runs was read a moment ago: since then somebody has gone on with all of them."""

    async def heads(self, which: WhichRuns | None = None) -> list[Head]:
        return [replace(head, status="running", owner=None) for head in await super().heads()]


def test_runs_that_another_process_has_resumed_are_left_alone(caplog):
    store = Behind()
    agent, _ = scripted_agent("done", call("pay", amount=1), tools=[pay], host=Host(store=store))

    async def scene() -> list[Run]:
        over, waits = await agent.run("go"), await agent.run("pay")
        assert over.ok
        assert isinstance(waits.outcome, UserInputRequested)
        return await agent.unfinished_runs()

    assert run_async(scene) == []
    assert not caplog.text


def test_hooks_and_migrations_may_come_one_by_one():
    seen: list[Any] = []
    parts = [hook("call_llm")(seen.append), observer(seen.append)]
    agent, model = scripted_agent(
        "done", hooks=(part for part in parts), migrations=(each for each in [Migration(LOOP)])
    )
    check_result(run_async(lambda: run_agent(agent)), model)
    assert {type(each).__name__ for each in seen} > {"HookContext", "RunStarted", "RunCompleted"}
    assert agent.config.migrations == (Migration(LOOP),)


@pytest.mark.parametrize("odd", [["hello"], [{"role": "user", "content": "hello"}], "hello", [None]])
def test_a_history_of_anything_but_messages_is_refused(odd):
    with pytest.raises(RunError, match="message_history must be a list of Message"):
        Agent(ScriptedModel(["done"])).run("go", message_history=odd)


# -- an agent whose model could never end a run ------------------------------------------------------


@tool(ends_run=True)
def publish(text: str) -> str:
    """Publish it."""
    return text


def is_plain_text(run: RunState) -> Failure | None:
    """A reply without a call, as a user's own row judges it."""
    return None if run.batch else Failure(kind=FailureKind.no_progress, explanation="it calls nothing")


def test_a_preset_in_which_no_reply_can_end_a_run_is_refused_when_the_agent_is_built():
    silent = Preset("silent", Behavior(text_is_answer=False))
    with pytest.raises(ConfigurationError, match=r"no reply could end a run.*ends_run=True"):
        scripted_agent("done", preset=silent, tools=[explode])
    assert scripted_agent("done", preset=silent, tools=[publish])
    assert scripted_agent("done", preset=Preset("control", Behavior(text_is_answer=False, control_tools=True)))
    envelopes = Preset("envelopes", Behavior(text_is_answer=False, envelope=True))
    with pytest.raises(ConfigurationError, match=r"no reply could end a run.*ends_run=True"):
        scripted_agent("done", preset=envelopes)
    assert scripted_agent("done", preset=envelopes, tools=[publish])


@pytest.mark.parametrize("name", ["feedback", "strict", "breaker"])
def test_a_preset_that_would_end_runs_with_a_text_that_is_no_answer_is_refused(name):
    preset = PRESETS[name]
    switches = {"text_is_answer": False, "control_tools": True, "missing_call": "no_progress"}
    silent = replace(preset, behavior=preset.behavior.model_copy(update=switches))
    with pytest.raises(ConfigurationError, match=r"'post_llm'.*completed: add the row no_progress"):
        scripted_agent("done", preset=silent)
    assert scripted_agent("done", preset=silent, graph=LOOP)
    judged = LOOP.without("post_llm.no_progress").with_detector("post_llm", is_plain_text, before="tool_calls")
    assert scripted_agent("done", preset=replace(silent, graph=judged))
    assert scripted_agent("done", preset=silent, graph=preset.graph)  # given on purpose
    malformed = replace(silent, behavior=silent.behavior.model_copy(update={"missing_call": "malformed"}))
    assert scripted_agent("done", preset=malformed)
