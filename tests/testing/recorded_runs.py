"""The recorded runs with which ``core_mutants.py`` tests the core, beside the files of docs/paths.md."""

import asyncio
from typing import Annotated

import pytest
from policy import AGENT, pay
from pydantic import AfterValidator

from agentfsm import (
    LOOP,
    AbortRun,
    Action,
    Actor,
    ActorRoleError,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Counter,
    DefaultPolicy,
    Deny,
    Edit,
    Extend,
    FinishReason,
    Host,
    Message,
    Reply,
    StateResult,
    StateSpec,
    TransientProviderError,
    Transition,
    Usage,
    came_back,
    hook,
    tool,
)
from agentfsm.testing import (
    FakeClock,
    ModelTurn,
    Scenario,
    ScriptedModel,
    Simulator,
    WitnessDriver,
    call,
    paths,
    random_scenarios,
)

HOST = Host(secret="a secret for tests only")
SIMULATOR = Simulator(AGENT)
PAY = ModelTurn(call("pay", amount=200))
SCENARIOS = {
    "denied": Scenario([PAY] * 4, human_replies=[Deny("no")] * 4),
    "edited": Scenario([PAY], human_replies=[Edit({"amount": 150})]),
    "busy": Scenario(
        [ModelTurn(TransientProviderError("busy"))] * 5, guardrails=AgentGuardrails(max_execution_time_s=9)
    ),
    "extended": Scenario(
        [ModelTurn(call("pay", amount=n)) for n in range(9)],
        human_replies=["go on"] * 4,
        guardrails=AgentGuardrails(max_iterations=2, max_continues=3),
    ),
    "granted": Scenario(
        [ModelTurn(call("pay", amount=n)) for n in range(9)],
        human_replies=[Extend(model_calls=1)] * 4,
        guardrails=AgentGuardrails(max_iterations=2, max_continues=3),
    ),
    "costly": Scenario(
        [ModelTurn(call("pay", amount=n), cost_usd=0.9) for n in range(9)],
        human_replies=["go on"] * 4,
        guardrails=AgentGuardrails(max_cost_usd=1, max_continues=3),
    ),
    "loop": Scenario([ModelTurn([call("pay", amount=n), call("pay", amount=99)]) for n in range(9)]),
    "patient": Scenario(
        [ModelTurn(call("pay", amount=1))] * 14, [ValueError("no money")] * 14, recovery_actions=[Action.retry] * 14
    ),
    "repeated": Scenario([ModelTurn([call("pay", amount=1), call("pay", amount=2)])] * 9, [*"abcdefgh"] + ["z"] * 12),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_may_happen(name, fsm_record):
    fsm_record(SIMULATOR.run_sync(SCENARIOS[name]))
    fsm_record(SIMULATOR.run_sync(SCENARIOS[name].with_crashes()))


REPLIES = [
    Reply(Message.assistant("The rest"), FinishReason.LENGTH),
    Reply(Message.assistant("No."), FinishReason.CONTENT_FILTER),
    Reply(Message.assistant("\ud800", (call("pay", "1", amount=1),)), FinishReason.TOOL_CALLS),
]

PRESETS = ["standard", "funnel", "feedback", "breaker", "strict"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset, fsm_record):
    agent = Agent(ScriptedModel(), tools=[pay], preset=preset)
    driver = WitnessDriver(agent, tools="checked")
    for path in paths(agent, "transitions"):
        run = driver.run(path).check()
        fsm_record(run)
        fsm_record(driver.run(path, extra_call=True))
        fsm_record(Simulator(agent).run_sync(run.scenario.with_crashes()))
    for scenario in [*SCENARIOS.values(), *(Scenario([ModelTurn(reply)]) for reply in REPLIES)]:
        fsm_record(Simulator(agent).run_sync(scenario))


@tool(idempotent=True, retryable=True, parallel=True)
def balance(account: int) -> int:
    """Look up the balance of an account."""
    return 100


@tool(requires_approval=Approval(2))
def close(account: int) -> str:
    """Close an account."""
    return "closed"


@tool(ends_run=True)
def report(text: str) -> str:
    """Report, as the last thing."""
    return text


@pytest.mark.parametrize("preset", PRESETS)
def test_anything_may_happen(preset, fsm_record):
    agent = Agent(ScriptedModel(), tools=[pay, balance, close, report], preset=preset)
    for scenario in random_scenarios(agent, 60):
        fsm_record(Simulator(agent).run_sync(scenario))


@hook("terminal")
def too_late(context):
    return AbortRun("the run is over")


@hook("pre_step", once=True)
def greet(context):
    pass


@hook("pre_step")
def stop(context):
    return AbortRun("three steps are enough") if context.run.counters["steps"] == 3 else None


@hook("pre_step", fail_open=False)
async def dawdle(context):
    await asyncio.Event().wait()


@hook("pre_step")
def meddle(context):
    context.run.iterations = 0


def fail(value):
    raise LookupError("there is no such account")


@tool
def refund(account: Annotated[int, AfterValidator(fail)]) -> str:
    """Pay back."""
    return "paid back"


class NoPolicy(DefaultPolicy):
    def decide(self, failure, state):
        raise LookupError("nobody knows")


REVIEW = StateSpec("review", effect=fail)
REVIEWED = [Transition("review", None, "terminal", ends="completed")]
FAULTY = {
    "guard": Agent(ScriptedModel(["Hello."]), graph=LOOP.with_detector("post_llm", fail)),
    "effect": Agent(
        ScriptedModel(["Hello."]), graph=LOOP.with_state(REVIEW, REVIEWED, entered_by="post_llm.otherwise")
    ),
    "policy": Agent(ScriptedModel([""]), policy=NoPolicy()),
    "hook": Agent(ScriptedModel(["Hello."]), hooks=[too_late]),
    "slow hook": Agent(
        ScriptedModel(["Hello."]),
        hooks=[dawdle],
        guardrails=AgentGuardrails(max_execution_time_s=0.1),
        host=Host(clock=FakeClock()),
    ),
    "meddling hook": Agent(ScriptedModel(["Hello."]), hooks=[meddle]),
    "hooks": Agent(ScriptedModel([call("pay", amount=n) for n in range(4)]), tools=[pay], hooks=[greet, stop]),
    "validator": Agent(ScriptedModel([call("refund", account=1), "Hello."]), tools=[refund]),
}


@pytest.mark.parametrize("name", FAULTY)
def test_code_that_raises(name, fsm_record):
    fsm_record(FAULTY[name].run_sync("Hello."))


def test_each_visit_of_a_state_has_its_own_key(fsm_record):
    keys = []

    def review(context):
        keys.append(context.idempotency_key)
        return StateResult(outcome="good" if context.run.model_calls == 2 else "poor")

    rows = [
        Transition("review", came_back("good"), "terminal", ends="completed"),
        Transition("review", came_back("poor"), "pre_step", spends="reviews"),
        Transition("review", None, "terminal", ends="partial"),
    ]
    state = StateSpec("review", effect=review, outcomes=("good", "poor"))
    graph = LOOP.with_counter(Counter("reviews", 2)).with_state(state, rows, entered_by="post_llm.otherwise")
    fsm_record(Agent(ScriptedModel(["Hello.", "Hello again."]), graph=graph).run_sync("Hello."))
    assert len(set(keys)) == 2


@tool(requires_approval=Approval(roles=("boss",)))
def erase(account: int) -> str:
    """Erase an account."""
    return "erased"


def test_only_a_boss_decides(fsm_record):
    agent = Agent(ScriptedModel([call("erase", account=1), "Erased."]), tools=[erase], host=HOST)

    async def run_and_decide():
        record = (await agent.run("Erase it.")).outcome.suspension_record
        with pytest.raises(ActorRoleError):
            await agent.resume(record, Allow(), by=Actor("ann"))
        with pytest.raises(ActorRoleError):
            await agent.dismiss(record, "no", by=Actor("ann"))
        fsm_record(await agent.resume(record, Allow(), by=Actor("bob", roles=("boss",))))

    asyncio.run(run_and_decide())


def test_a_sub_agent_waits(fsm_record):
    paid = Reply(Message.assistant("It is paid."), usage=Usage(input_tokens=20, output_tokens=5, cost_usd=0.01))
    helper = Agent(ScriptedModel([call("pay", amount=200), paid]), tools=[pay])
    model = ScriptedModel([call("ask_helper", task="Pay."), "Done."])
    agent = Agent(model, tools=[helper.as_tool("ask_helper", "Pays.")], host=HOST)

    async def run_and_allow():
        waiting = await agent.run("Pay.")
        fsm_record(waiting)
        fsm_record(await agent.resume(waiting.outcome.suspension_record, Allow()))

    asyncio.run(run_and_allow())


def test_a_person_or_whoever_awaits_the_run_cancels(fsm_record):
    waiting = Agent(ScriptedModel([call("pay", amount=200)]), tools=[pay], host=HOST)
    started = Agent(ScriptedModel([lambda messages: asyncio.Event().wait()]))

    async def run_and_cancel():
        asked = await waiting.run("Pay.")
        fsm_record(await waiting.dismiss(asked.outcome.suspension_record, "not today"))
        run = started.run("Hello.")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run, 0.05)
        fsm_record(run.result)

    asyncio.run(run_and_cancel())


def test_the_host_cancels(fsm_record):
    runs = []

    def called(messages):
        asyncio.get_running_loop().call_soon(runs[0].cancel, "not today")
        return asyncio.Event().wait()

    async def run_and_cancel():
        runs.append(Agent(ScriptedModel([called])).run("Hello."))
        fsm_record(await runs[0])

    asyncio.run(run_and_cancel())
