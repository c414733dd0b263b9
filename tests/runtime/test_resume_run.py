"""Resuming and dismissing runs: each record once, calls in doubt, in another process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Action,
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Deny,
    Edit,
    FailureKind,
    GiveUp,
    Host,
    HumanReplyError,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    RunCancelled,
    RunCompleted,
    RunResult,
    TransientProviderError,
    Transition,
    Transitioned,
    observer,
    permissions,
    tool,
)
from agentfsm.errors import (
    JournalGraphError,
    SuspensionExpiredError,
    SuspensionGraphError,
    SuspensionGuardrailsError,
    SuspensionRulesError,
    SuspensionToolError,
    SuspensionUsedError,
)
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.events import Event, RecoveryStarted, RunResumed
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import RunState
from agentfsm.loop.state_json import dump_state, load_state
from agentfsm.runtime.permissions import PermissionRule
from agentfsm.runtime.run import Run, live_state
from agentfsm.runtime.run_request import RunRequest
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.scenarios import check_result, run_async, run_script, scripted_agent, transcript_of

# -- resuming -----------------------------------------------------------------------------------------


@tool(requires_approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


def test_a_record_that_was_claimed_elsewhere_changes_nothing():
    agent, _ = scripted_agent(call("pay"), "done", tools=[pay])

    async def scene() -> None:
        record = (await agent.run("go")).outcome.suspension_record
        one, other = [await agent.resume(record, Allow()).load() for _ in range(2)]
        assert (await one).output == "done"
        with pytest.raises(SuspensionUsedError):
            await other
        assert not other.finished
        assert other.run_state.state == "suspended"
        with pytest.raises(SuspensionUsedError):
            await agent.resume(record, Allow()).load()

    run_async(scene)


def test_a_resumed_run_says_what_it_had_waited_for():
    events: list[Event] = []
    agent, _ = scripted_agent(call("pay"), "done", tools=[pay], hooks=[observer(events.append)])

    async def scene() -> None:
        await agent.resume((await agent.run("go")).outcome.suspension_record, Allow())

    run_async(scene)
    assert [e.kind for e in events if isinstance(e, RunResumed)] == ["approval"]


@pytest.mark.parametrize(
    ("late", "reason"), [(False, "no longer wanted"), (True, "the request expired without a reply")]
)
def test_a_run_may_be_dismissed_in_time_or_late(late, reason):
    clock = FakeClock()
    agent, model = scripted_agent(call("pay"), "done", tools=[pay], clock=clock)

    async def scene() -> RunResult:
        record = (await agent.run("go")).outcome.suspension_record
        if late:
            clock.advance(24 * 3600 + 1)
        return check_result(await agent.dismiss(record.to_json(), "no longer wanted"), model)

    result = run_async(scene)
    assert isinstance(result.outcome, RunCancelled)
    assert result.outcome.reason == reason
    assert result.decisions[-1].transition.id == ("suspended.expired" if late else "suspended.cancelled")
    assert [m.role.value for m in result.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("authenticate", "by", "reason"),
    [
        (None, None, "no longer wanted"),
        (None, "Ann", "no longer wanted (by Ann, claimed, not verified)"),
        ({"token": Actor("ann", ("manager",))}.get, "token", "no longer wanted (by ann (manager))"),
    ],
)
def test_the_reason_of_a_dismissed_run_names_who_dismissed_it(authenticate, by, reason):
    host = Host(store=MemoryStore(), authenticate=authenticate)
    agent = Agent(ScriptedModel([call("pay")]), tools=[pay], host=host)

    async def scene() -> str:
        await agent.run("go", run_id="r", actor=by)
        return (await agent.dismiss("r", "no longer wanted", by=by)).outcome.reason

    assert asyncio.run(scene()) == reason


# -- calls in doubt -----------------------------------------------------------------------------------


def cut_off(name: str, ran: list[str], *, idempotent: bool = False) -> tuple[Agent, RunState]:
    """The state of a run that a process left while its first call was running, and an agent of another process."""

    @tool(name=name, idempotent=idempotent)
    def work(n: int) -> str:
        ran.append(f"{name} {n}")
        return f"result {n}"

    calls = [call(name, n=1), call(name, n=2)]
    left, _ = scripted_agent(calls, tools=[work])

    async def scene() -> RunState:
        run = left.run("go")
        async for event in run:
            if isinstance(event, Transitioned) and event.target == "dispatch_tool":
                break
        live_state(run).batch[0].started = True
        return load_state(json.loads(canonical_json(dump_state(live_state(run)))))

    return scripted_agent("done", tools=[work])[0], run_async(scene)


def go_on(agent: Agent, state: RunState) -> RunResult:
    """Take a run up where its state says that it is."""

    async def scene() -> RunResult:
        return check_result(await Run(agent._config, state, RunRequest("go")))

    return run_async(scene)


def test_a_call_that_had_started_is_not_run_again_but_is_in_doubt():
    ran: list[str] = []
    result = go_on(*cut_off("pay_out", ran))
    assert ran == []
    assert (result.outcome.kind, result.outcome.tool, result.outcome.arguments) == ("in_doubt", "pay_out", {"n": 1})
    assert "whether it ran" in result.outcome.question


@pytest.mark.parametrize(
    ("answer", "wanted_runs", "first_result"),
    [
        (ItRan("it paid 1"), ["pay_out 2"], "it paid 1"),
        (ItDidNotRun(), ["pay_out 1", "pay_out 2"], "result 1"),
        (GiveUp(), ["pay_out 2"], "It is not known whether this call ran, and it was given up. Do not repeat it."),
    ],
)
def test_the_reply_about_a_call_in_doubt_is_applied(answer, wanted_runs, first_result):
    ran: list[str] = []
    agent, state = cut_off("pay_out", ran)
    record = go_on(agent, state).outcome.suspension_record

    async def scene() -> RunResult:
        return check_result(await agent.resume(record, answer))

    result = run_async(scene)
    assert ran == wanted_runs
    assert [text for role, text in transcript_of(result) if role == "tool"] == [first_result, "result 2"]
    assert result.output == "done"


@pytest.mark.parametrize("answer", ["it ran", Allow()])
def test_a_call_in_doubt_accepts_only_its_own_replies(answer):
    agent, state = cut_off("pay_out", [])
    record = go_on(agent, state).outcome.suspension_record
    with pytest.raises(HumanReplyError, match="ItRan"):
        asyncio.run(agent.resume(record, answer).load())


def test_an_idempotent_call_that_had_started_is_run_again():
    ran: list[str] = []
    result = go_on(*cut_off("fetch", ran, idempotent=True))
    assert ran == ["fetch 1", "fetch 2"]
    assert result.output == "done"


# -- elsewhere, and what is told ----------------------------------------------------------------------


def test_a_record_is_resumed_in_another_process():
    """Another agent, another host with the same secret, and nothing but the text of the record."""
    agent, _ = scripted_agent(call("pay"), "never", tools=[pay])

    async def first() -> str:
        return (await agent.run("go")).outcome.suspension_record.to_json()

    text = run_async(first)
    other, model = scripted_agent("done elsewhere", tools=[pay], host=Host(clock=FakeClock(), secret=b"secret"))

    async def second() -> RunResult:
        return check_result(await other.resume(text, Allow()), model)

    result = run_async(second)
    assert result.output == "done elsewhere"
    assert [text for role, text in transcript_of(result) if role == "tool"] == ["paid"]


# -- what was approved is what runs -------------------------------------------------------------------


def paying(kind: str, ran: list[int]) -> list[Any]:
    """The tools of an agent that has ``pay``, or another tool of that name."""

    def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        return "paid"

    def refund(amount: int) -> str:
        """Pay."""
        raise AssertionError

    class Reckless:
        @staticmethod
        def pay(amount: int, twice: bool = False) -> str:
            """Pay."""
            raise AssertionError

    described = tool(name="pay", requires_approval=True)
    if kind == "another description":
        pay.__doc__ = "Pay, and tell nobody."
    others = {"none": [], "another function": [described(refund)], "another schema": [described(Reckless.pay)]}
    return others.get(kind, [described(pay)])


OTHER_TOOLS = ["none", "another function", "another schema", "another description"]


@pytest.mark.parametrize("stored", [True, False], ids=["stored run", "suspension record"])
@pytest.mark.parametrize("kind", OTHER_TOOLS)
def test_an_approval_is_for_the_tool_that_was_shown_and_the_run_waits_on_for_it(kind, stored):
    ran: list[int] = []
    host = Host(clock=FakeClock(), secret=b"secret", store=MemoryStore() if stored else None)
    agent, _ = scripted_agent(call("pay", amount=5), "done", tools=paying("pay", ran), host=host)
    other, _ = scripted_agent("done", tools=paying(kind, ran), host=host)

    async def scene() -> RunResult:
        outcome = (await agent.run("go", run_id="r")).outcome
        waiting = "r" if stored else outcome.suspension_record.to_json()
        for reply in (Allow(), Edit({"amount": 6})):
            with pytest.raises(SuspensionToolError, match=r"'pay'.*nothing was changed"):
                await other.resume(waiting, reply).load()
        return await agent.resume(waiting, Allow())

    assert run_async(scene).output == "done"
    assert ran == [5]


@pytest.mark.parametrize("kind", OTHER_TOOLS)
def test_a_call_in_doubt_is_run_again_only_with_the_tool_that_was_shown(kind):
    agent, state = cut_off("pay", ran := [])
    record = go_on(agent, state).outcome.suspension_record
    other, _ = scripted_agent("done", tools=paying(kind, []))
    with pytest.raises(SuspensionToolError):
        asyncio.run(other.resume(record, ItDidNotRun()).load())
    assert ran == []


def test_a_denial_needs_no_tool():
    agent, _ = scripted_agent(call("pay", amount=5), tools=paying("pay", []))
    other, _ = scripted_agent("done", tools=[])

    async def scene() -> RunResult:
        return await other.resume((await agent.run("go")).outcome.suspension_record, Deny("no"))

    assert run_async(scene).output == "done"


@pytest.mark.parametrize("kind", ["another function", "another schema", "another description"])
def test_a_call_whose_tool_changed_between_approval_and_call_is_asked_about_again(kind):
    """The process that applied the approval died before the call; the next one has another tool of that name."""
    ran: list[int] = []
    agent, _ = scripted_agent(call("pay", amount=5), "done", tools=paying("pay", ran))

    async def scene() -> RunResult:
        record = (await agent.run("go")).outcome.suspension_record
        run = agent.resume(record, Allow())
        async for event in run:
            if isinstance(event, Transitioned) and event.target == "dispatch_tool":
                break
        approved = load_state(json.loads(canonical_json(dump_state(live_state(run)))))
        await run.aclose()
        other, _ = scripted_agent("done", tools=paying(kind, ran))
        return await Run(other._config, approved, RunRequest("go"))

    outcome = run_async(scene).outcome
    assert ran == []
    assert (outcome.kind, outcome.tool) == ("approval", "pay")
    assert "not for this definition of the tool" in outcome.question


FUNNEL = PRESETS["funnel"].graph


@pytest.mark.parametrize("stored", [True, False], ids=["stored run", "suspension record"])
@pytest.mark.parametrize(
    ("other", "error", "says"),
    [
        ({"preset": "standard", "graph": FUNNEL}, SuspensionRulesError, r"control_tools: True there, False here"),
        ({"preset": "breaker", "graph": FUNNEL}, SuspensionRulesError, "another preset"),
        ({"guardrails": AgentGuardrails(max_iterations=7)}, SuspensionGuardrailsError, "max_iterations: 50 there, 7"),
        ({"graph": LOOP.without("pre_step.cost_limit")}, (SuspensionGraphError, JournalGraphError), "graph"),
    ],
    ids=["no control tools", "another preset", "other limits", "another graph"],
)
def test_a_run_is_resumed_by_an_agent_with_its_preset_limits_and_graph_and_waits_on_for_it(other, error, says, stored):
    host = Host(clock=FakeClock(), secret=b"secret", store=MemoryStore() if stored else None)
    script = call("ask_user", question="Which?"), call("return_done", output="done")
    agent, _ = scripted_agent(*script, preset="funnel", host=host)
    stranger, model = scripted_agent("done", **{"preset": "funnel", "host": host, **other})

    async def scene() -> RunResult:
        outcome = (await agent.run("go", run_id="r")).outcome
        for waiting in ["r"] * stored + [outcome.suspension_record.to_json()]:
            with pytest.raises(error, match=says):
                await stranger.resume(waiting, "The first.")
        assert model.requests == []
        return await agent.resume("r" if stored else outcome.suspension_record, "The first.")

    assert run_async(scene).output == "done"


# -- for how long a run waits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("validity_s", "stored", "waits_s"),
    [(None, False, 86_400), (None, True, None), (3600, False, 3600), (3600, True, 3600)],
)
def test_a_record_waits_a_day_and_a_stored_run_without_limit_unless_the_guardrails_say(validity_s, stored, waits_s):
    clock = FakeClock()
    host = Host(clock=clock, secret=b"secret", store=MemoryStore() if stored else None)
    limits = AgentGuardrails(validity_s=validity_s)
    agent, _ = scripted_agent(*[call("pay"), "done"] * 2, tools=[pay], host=host, guardrails=limits)

    async def scene(late: bool) -> RunResult:
        outcome = (await agent.run("go", run_id=f"r{late}")).outcome
        waiting = f"r{late}" if stored and late else outcome.suspension_record
        clock.advance((waits_s or 30 * 86_400) + (1 if late else -1))
        if waits_s is not None and late:
            with pytest.raises(SuspensionExpiredError, match="dismiss"):
                await agent.resume(waiting, Allow()).load()
            return await agent.dismiss(waiting)
        return await agent.resume(waiting, Allow())

    assert run_async(lambda: scene(late=False)).output == "done"
    late = run_async(lambda: scene(late=True))
    assert late.decisions[-1].transition.id == "suspended.expired" if waits_s else late.output == "done"


@pytest.mark.parametrize("to", ["", " ", 0, [], False, b"", {}])
@pytest.mark.parametrize("stored", [True, False], ids=["stored run", "suspension record"])
def test_a_reply_to_nothing_is_an_error(to, stored):
    host = Host(clock=FakeClock(), secret=b"secret", store=MemoryStore() if stored else None)
    agent, _ = scripted_agent(call("pay"), "done", tools=[pay], host=host)

    async def scene() -> RunResult:
        outcome = (await agent.run("go", run_id="r")).outcome
        for waiting in ("r" if stored else outcome.suspension_record, outcome.suspension_record):
            with pytest.raises(HumanReplyError, match="names no request"):
                await agent.resume(waiting, Allow(), to=to).load()
        return await agent.resume(outcome.suspension_record, Allow(), to=None)

    assert run_async(scene).output == "done"


@pytest.mark.parametrize("action", ["deny", "ask"])
def test_a_policy_that_became_stricter_while_a_sub_agent_waited_decides_about_its_call(action):
    def make(otherwise: Any) -> Agent:
        helper, _ = scripted_agent(call("pay"), "helped", tools=[pay])
        rules = permissions(PermissionRule(action=otherwise, tool="helper"), otherwise="allow")
        return scripted_agent(
            call("helper", task="x"), "done", tools=[helper.as_tool("helper", "Helps.")], hooks=[rules]
        )[0]

    agent, stricter = make("allow"), make(action)

    async def scene() -> RunResult:
        waiting = (await agent.run("go")).outcome
        assert (waiting.tool, waiting.asker) == ("pay", "helper")
        return await stricter.resume(waiting.suspension_record, Allow())

    result = run_async(scene)
    if action == "ask":
        assert (result.outcome.kind, result.outcome.tool, result.outcome.asker) == ("approval", "helper", "")
    else:
        assert next(text for role, text in transcript_of(result) if role == "tool").startswith("Denied")


@pytest.mark.parametrize("waited_for", ["pay", "look"])
@pytest.mark.parametrize("action", ["deny", "ask"])
def test_a_policy_that_became_stricter_while_a_run_waited_decides_about_its_calls(action, waited_for):
    paid: list[str] = []

    @tool(requires_approval=waited_for == "pay")
    def pay() -> str:
        """Pay."""
        paid.append("pay")
        return "paid"

    @tool(requires_approval=waited_for == "look")
    def look() -> str:
        """Look."""
        return "seen"

    def make(action: Any, *script: Any) -> Agent:
        rules = permissions(PermissionRule(action=action, tool="pay"), otherwise="allow")
        return scripted_agent(*script, tools=[pay, look], hooks=[rules])[0]

    async def scene() -> RunResult:
        waiting = (await make("allow", *([call("look")] if waited_for == "look" else [call("pay")])).run("go")).outcome
        assert waiting.tool == waited_for
        script = (call("pay"), "done") if waited_for == "look" else ("done",)
        return await make(action, *script).resume(waiting.suspension_record, Allow())

    result = run_async(scene)
    if action == "deny":
        assert paid == []
        assert any(text.startswith("Denied") for role, text in transcript_of(result) if role == "tool")
    elif waited_for == "look":
        assert (result.outcome.kind, result.outcome.tool, paid) == ("approval", "pay", [])
    else:  # a person has approved this very call
        assert paid == ["pay"]


def test_recoveries_are_events_as_they_happen():
    events: list[Event] = []
    run_script(TransientProviderError("busy"), call("nothing"), "done", hooks=[observer(events.append)])
    told = [
        (e.failure.kind, e.action, e.attempt, e.backoff_s, e.recoverable)
        for e in events
        if isinstance(e, RecoveryStarted)
    ]
    assert told == [
        (FailureKind.transient_provider, Action.retry, 1, 2.0, True),
        (FailureKind.unknown_tool, Action.retry, 1, 0.0, True),
    ]
    assert isinstance(events[-1], RunCompleted)


def test_a_run_that_waits_without_a_request_still_has_a_question():
    def pause(run: RunState) -> bool:
        return run.steps == 1

    graph = LOOP.with_transition(Transition("post_llm", pause, "suspended"), before="tool_calls")
    result = run_script("first", graph=graph)
    assert (result.outcome.kind, result.outcome.question) == ("question", "The run waits in 'suspended'.")
