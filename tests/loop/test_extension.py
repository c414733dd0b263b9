"""A person extends a limit by the amount that they name; the run keeps waiting if that amount makes no sense."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Extend,
    Graph,
    Host,
    HumanReplyError,
    MemoryStore,
    Message,
    NoTransitionError,
    ReachedLimit,
    Reply,
    RunResult,
    RunState,
    SqliteStore,
    StateSpec,
    SuspensionRecord,
    Transition,
    Usage,
    UserInputRequested,
    tool,
)
from agentfsm.analysis import analyse
from agentfsm.journal.load import pending_request
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.guards import replied
from agentfsm.loop.human_input import HumanInput
from agentfsm.loop.state_json import dump_state
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel, call
from tests.helpers.scenarios import await_run

SECRET = b"shared by all processes of these tests"

UNITS = ("model_calls", "seconds", "tokens", "usd")


ENOUGH = {"model_calls": 1, "seconds": 4, "tokens": 10, "usd": 0.25}
"""What one more call of ``Looking`` takes."""


@tool
def look() -> str:
    """Look."""
    return "seen"


class Looking:
    """A model that looks for ever; each call takes 10 tokens, 0.25 USD and 4 seconds."""

    name = "looking"

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.calls = 0

    async def reply(self, request: Any) -> Reply:
        self.clock.advance(4)
        self.calls += 1
        return Reply(Message.assistant("", [call("look", f"c{self.calls}")]), usage=Usage(7, 3, 0, 0.25))


LIMITS = {
    "model_calls": AgentGuardrails(max_iterations=5),
    "seconds": AgentGuardrails(max_execution_time_s=20, max_iterations=None),
    "tokens": AgentGuardrails(max_tokens=50, max_iterations=None, max_execution_time_s=None),
    "usd": AgentGuardrails(max_cost_usd=1.25, max_iterations=None, max_execution_time_s=None),
}
"""Limits that each are reached after five calls of ``Looking``."""


class World:
    """An agent that reaches one limit, in a host whose store every new agent of it shares."""

    def __init__(self, unit: str, store: Any = None, graph: Graph = LOOP, **limits: Any) -> None:
        self.graph = graph
        self.clock = FakeClock()
        self.model = Looking(self.clock)
        self.guardrails = LIMITS[unit].model_copy(update={"loop_hard_threshold": 999, "loop_window": 999, **limits})
        self.host = Host(secret=SECRET, store=store, clock=self.clock, monitor="raise")

    def agent(self) -> Agent:
        return Agent(self.model, tools=[look], graph=self.graph, guardrails=self.guardrails, host=self.host)

    def start(self) -> RunResult:
        return asyncio.run(await_run(self.agent().run("go", run_id="r1")))

    def resume(self, result: RunResult, reply: HumanInput) -> RunResult:
        assert isinstance(result.outcome, UserInputRequested)
        record: Any = "r1" if self.host.store is not None else result.outcome.suspension_record
        return asyncio.run(await_run(self.agent().resume(record, reply)))


@pytest.fixture(params=["record", "store"])
def store(request: pytest.FixtureRequest) -> MemoryStore | None:
    return MemoryStore() if request.param == "store" else None


REACHED = {
    "model_calls": ReachedLimit("model_calls", 5, 5, 5),
    "seconds": ReachedLimit("seconds", 20, 20, 20),
    "tokens": ReachedLimit("tokens", 50, 50, 50),
    "usd": ReachedLimit("usd", 1.25, 1.25, 1.25),
}


@pytest.mark.parametrize("unit", UNITS)
def test_the_request_says_how_much_is_used_up_and_what_a_reply_grants(unit: str, store: Any) -> None:
    world = World(unit, store)
    result = world.start()
    assert isinstance(result.outcome, UserInputRequested)
    assert (result.outcome.kind, result.outcome.limit) == ("limit", REACHED[unit])
    record = SuspensionRecord.from_json(result.outcome.suspension_record.to_json())
    assert record.limit == REACHED[unit]
    if store is not None:
        request = asyncio.run(pending_request(store, asyncio.run(store.head("r1"))))
        assert request is not None
        assert request.limit == REACHED[unit]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extend", "calls"),
    [
        (Extend(model_calls=2), 2),
        (Extend(model_calls=5), 5),
        (Extend(seconds=8), 2),
        (Extend(seconds=9), 3),
        (Extend(seconds=400), 100),
        (Extend(tokens=20), 2),
        (Extend(tokens=21), 3),
        (Extend(tokens=5000), 500),
        (Extend(usd=0.5), 2),
        (Extend(usd=25), 100),
    ],
    ids=str,
)
def test_the_named_amount_is_granted_and_no_more(extend: Extend, calls: int, store: Any) -> None:
    unit = next(unit for unit in UNITS if getattr(extend, unit) is not None)
    world = World(unit, store)
    first = world.start()
    assert world.model.calls == 5
    second = world.resume(first, extend)
    assert world.model.calls == 5 + calls
    assert isinstance(second.outcome, UserInputRequested)
    assert second.outcome.limit is not None
    assert second.outcome.limit.default == REACHED[unit].default  # what was named once is not the default now
    assert second.run_state.continues == 1


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("reply", ["go on", Extend(), Extend(message="go on")], ids=str)
def test_a_reply_without_an_amount_grants_the_same_once_more(unit: str, reply: HumanInput, store: Any) -> None:
    world = World(unit, store)
    second = world.resume(world.start(), reply)
    assert world.model.calls == 10
    assert [m.content for m in second.messages if m.role == "user"][1:] == ([] if reply == Extend() else ["go on"])


def test_after_an_amount_was_named_the_default_holds_again() -> None:
    world = World("seconds")
    second = world.resume(world.start(), Extend(seconds=8))
    third = world.resume(second, "go on")
    assert world.model.calls == 5 + 2 + 5
    world.resume(third, Extend(seconds=40))
    assert world.model.calls == 5 + 2 + 5 + 10


@pytest.mark.parametrize("unit", UNITS)
def test_it_can_be_extended_max_continues_times_whatever_is_named(unit: str) -> None:
    world = World(unit, max_continues=2)
    result = world.start()
    for _ in range(2):
        result = world.resume(result, Extend(**{unit: ENOUGH[unit]}))
    assert world.model.calls == 5 + 2
    assert type(result.outcome).__name__ == "PartialRunSummary"


def test_the_model_is_told_the_message_and_nothing_else() -> None:
    model = RecordingModel(ScriptedModel([call("look"), "done"]))
    agent = Agent(model, tools=[look], guardrails=AgentGuardrails(max_iterations=1), host=Host(secret=SECRET))
    outcome: Any = agent.run_sync("go").outcome
    result = agent.resume_sync(outcome.suspension_record, Extend(model_calls=1, message="be brief"))
    assert result.output == "done"
    assert [m.content for m in model.requests[1].messages][-2:] == ["seen", "be brief"]


# -- graphs of the user's ---------------------------------------------------------------------------------


def has_answered(run: RunState) -> bool:
    """Somebody has answered."""
    return run.human_reply is not None


def says_no(run: RunState) -> bool:
    """Somebody says no."""
    return run.human_reply is not None and run.human_reply.text == "no"


def with_desk(*rows: Transition) -> Graph:
    """A graph in which somebody at another place is asked about limits."""
    return LOOP.with_state(StateSpec("desk", waits=True), rows, entered_by="recover.ask_user")


ENDS = Transition("desk", says_no, "terminal", ends="partial")
GRANTS = Transition("desk", replied, "pre_step")
GRANTING = {
    "the row of the loop alone": with_desk(GRANTS),
    "a row that ends the run": with_desk(ENDS, GRANTS),
    "a row that no reply comes to": with_desk(GRANTS, Transition("desk", has_answered, "pre_step")),
}
MAYBE_GRANTING = {
    "a row before it": with_desk(Transition("desk", says_no, "pre_step"), GRANTS),
    "a row after it, if that cannot be taken": with_desk(
        replace(GRANTS, spends="continues"), Transition("desk", has_answered, "pre_step")
    ),
}
NOT_GRANTING = {
    "a guard of the user's": with_desk(Transition("desk", has_answered, "pre_step")),
    "no row that goes on": with_desk(Transition("desk", replied, "terminal", ends="partial")),
    "a row that ends the run before it": with_desk(
        Transition("desk", has_answered, "terminal", ends="partial"), replace(GRANTS, target="desk")
    ),
}


@pytest.mark.parametrize("graph", GRANTING.values(), ids=GRANTING)
@pytest.mark.parametrize("unit", UNITS)
def test_a_reply_in_a_wait_of_the_users_grants_what_the_request_says(unit: str, graph: Graph, store: Any) -> None:
    world = World(unit, store, graph)
    first = world.start()
    assert (first.state, first.outcome.limit) == ("desk", REACHED[unit])  # type: ignore[union-attr]
    second = world.resume(first, Extend(**{unit: ENOUGH[unit]}))
    assert world.model.calls == 5 + 1
    world.resume(second, "go on")
    assert world.model.calls == 5 + 1 + 5


@pytest.mark.parametrize("graph", [*MAYBE_GRANTING.values(), *NOT_GRANTING.values()])
@pytest.mark.parametrize("unit", UNITS)
def test_a_request_promises_nothing_where_a_reply_may_grant_nothing(unit: str, graph: Graph, store: Any) -> None:
    outcome = World(unit, store, graph).start().outcome
    assert isinstance(outcome, UserInputRequested)
    assert outcome.limit == replace(REACHED[unit], default=0)
    shown = outcome.question + str(outcome.limit)
    assert "used up" in shown
    assert "grants" not in shown


@pytest.mark.parametrize("graph", MAYBE_GRANTING.values(), ids=MAYBE_GRANTING)
@pytest.mark.parametrize("unit", UNITS)
def test_an_extension_is_granted_where_the_row_that_takes_it_extends_the_limit(
    unit: str, graph: Graph, store: Any
) -> None:
    world = World(unit, store, graph)
    world.resume(world.start(), Extend(**{unit: ENOUGH[unit]}))
    assert world.model.calls == 5 + 1


@pytest.mark.parametrize("graph", NOT_GRANTING.values(), ids=NOT_GRANTING)
@pytest.mark.parametrize("unit", UNITS)
def test_an_extension_is_refused_where_the_row_that_takes_it_extends_nothing(
    unit: str, graph: Graph, store: Any
) -> None:
    world = World(unit, store, graph)
    first = world.start()
    for extend in (Extend(), Extend(**{unit: ENOUGH[unit]})):
        with pytest.raises(HumanReplyError, match=r"^the row desk\.\w+ would take the reply, and extends no limit"):
            world.resume(first, extend)
    assert world.model.calls == 5
    assert world.resume(first, "go on").decisions[0].transition.source == "desk"


def test_a_guard_that_raises_about_an_extension_leaves_the_run_waiting(store: Any) -> None:
    def broken(run: RunState) -> bool:
        raise ValueError("a bug of the user's")

    world = World("tokens", store, with_desk(Transition("desk", broken, "pre_step"), GRANTS))
    first = world.start()
    for _ in range(2):
        with pytest.raises(NoTransitionError, match="a bug of the user's"):
            world.resume(first, Extend(tokens=10))


def test_a_reply_that_grants_nothing_is_asked_for_again_until_the_steps_are_used_up() -> None:
    world = World("tokens", None, NOT_GRANTING["a guard of the user's"], max_steps=8)
    result, replies = world.start(), 0
    while isinstance(result.outcome, UserInputRequested):
        result, replies = world.resume(result, "go on"), replies + 1
    assert (world.model.calls, replies) == (5, 8 - 5)
    assert result.decisions[-1].transition.id == "pre_step.runaway"


def test_a_wait_that_leads_to_another_one_leaves_the_promise_to_that_one(store: Any) -> None:
    graph = LOOP.with_state(
        StateSpec("desk", waits=True), [Transition("desk", has_answered, "suspended")], entered_by="recover.ask_user"
    )
    world = World("tokens", store, graph)
    first = world.start()
    assert (first.state, first.outcome.limit.default) == ("desk", 0)  # type: ignore[union-attr]
    second = world.resume(first, "go on")
    assert (second.state, second.outcome.limit) == ("suspended", REACHED["tokens"])  # type: ignore[union-attr]
    world.resume(second, Extend(tokens=10))
    assert world.model.calls == 5 + 1


REPLIED_FIRST = LOOP.without("suspended.replied").with_transition(
    LOOP.transition("suspended.replied"), before="approval_decided"
)
DROPPED = LOOP.without("suspended.approval_decided").with_transition(
    replace(LOOP.transition("suspended.approval_decided"), target="pre_step"), before="doubt_settled"
)
"""The calls of a reply are dropped with an answer to one of them."""


@pytest.mark.parametrize(
    ("graph", "of_sub_agent", "default"),
    [
        (LOOP, LOOP, 5),
        (LOOP, GRANTING["a row that ends the run"], 5),
        (LOOP, NOT_GRANTING["a guard of the user's"], 0),
        (REPLIED_FIRST, LOOP, 5),
        (DROPPED, LOOP, 0),
        (NOT_GRANTING["a guard of the user's"], LOOP, 5),
    ],
    ids=[
        "as in the loop",
        "granting",
        "not in the sub-agent",
        "another row first",
        "the call does not go on",
        "elsewhere",
    ],
)
def test_a_request_of_a_sub_agent_promises_what_reaches_its_run(
    graph: Graph, of_sub_agent: Graph, default: int, store: Any
) -> None:
    world = World("model_calls", store, of_sub_agent)
    helper = world.agent().as_tool("helper", "Helps.")
    model = ScriptedModel([call("helper", task="x"), "done"])
    limits = AgentGuardrails(max_iterations=None, max_execution_time_s=500)
    agent = Agent(model, tools=[helper], graph=graph, guardrails=limits, host=world.host)
    first = agent.run_sync("go", run_id="r1")
    assert isinstance(first.outcome, UserInputRequested)
    assert first.outcome.limit == replace(REACHED["model_calls"], default=default)
    record: Any = "r1" if store else first.outcome.suspension_record
    if not default:
        with pytest.raises(HumanReplyError, match="would take the reply, and extends no limit"):
            agent.resume_sync(record, Extend(model_calls=1))
    agent.resume_sync(record, "go on")
    assert world.model.calls == 5 + default


WRONG = {
    "another unit": (
        "tokens",
        Extend(seconds=10),
        r"the reply extends seconds.*50 of 50 tokens.*Extend\(tokens=\.\.\.\)",
    ),
    "model calls for tokens": ("model_calls", Extend(tokens=10), r"Extend\(model_calls=\.\.\.\)"),
    "two amounts": ("tokens", Extend(tokens=10, usd=1), "takes one amount"),
    "negative": ("tokens", Extend(tokens=-1), "more than 0"),
    "zero": ("tokens", Extend(tokens=0), "more than 0"),
    "NaN": ("usd", Extend(usd=math.nan), "more than 0"),
    "infinite": ("seconds", Extend(seconds=math.inf), "at most 1,000,000,000,000"),
    "too large": ("tokens", Extend(tokens=10**13), "at most 1,000,000,000,000"),
    "a part of a token": ("tokens", Extend(tokens=1.5), "a whole number"),  # type: ignore[arg-type]
    "text": ("usd", Extend(usd="5"), "is a number"),  # type: ignore[arg-type]
    "a truth value": ("model_calls", Extend(model_calls=True), "a whole number"),
    "no text for the model": ("usd", Extend(message=5), "must be a string"),  # type: ignore[arg-type]
    "more than max_iterations": ("model_calls", Extend(model_calls=6), "at most 5 model calls"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_amount_that_makes_no_sense_is_refused_and_the_run_keeps_waiting(case: str, store: Any) -> None:
    unit, reply, why = WRONG[case]
    world = World(unit, store)
    first = world.start()
    before = None if store is None else asyncio.run(store.records("r1"))
    with pytest.raises(HumanReplyError, match=why):
        world.resume(first, reply)
    assert before is None or asyncio.run(store.records("r1")) == before
    world.resume(first, Extend(**{unit: ENOUGH[unit]}))
    assert world.model.calls == 6


def test_less_than_was_used_beyond_the_limit_is_refused() -> None:
    """The last call took 3 tokens beyond the limit, so three more would be none."""
    world = World("tokens", max_tokens=47)
    first = world.start()
    with pytest.raises(HumanReplyError, match=r"3 more tokens are not enough.*name more than 3"):
        world.resume(first, Extend(tokens=3))
    world.resume(first, Extend(tokens=4))
    assert world.model.calls == 6


def test_exactly_what_was_spent_beyond_the_limit_is_refused() -> None:
    """The last call cost 0.1 USD beyond the limit, though the floats 1.0 and 0.9 differ by a little less."""
    world = World("usd", max_cost_usd=0.9)
    first = world.start()
    with pytest.raises(HumanReplyError, match=r"0\.1 more USD are not enough.*name more than 0\.1$"):
        world.resume(first, Extend(usd=0.1))


def test_a_question_and_an_approval_are_not_extended() -> None:
    @tool(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent(ScriptedModel([call("pay"), "done"]), tools=[pay], host=Host(secret=SECRET))
    outcome: Any = agent.run_sync("go").outcome
    with pytest.raises(HumanReplyError, match="Allow"):
        agent.resume_sync(outcome.suspension_record, Extend(tokens=5))


@pytest.mark.parametrize("unit", UNITS)
def test_a_stored_run_that_was_extended_is_read_verified_and_replayed(unit: str, tmp_path: Path) -> None:
    """Each process has its own connection; what is read back is the state that the last process had."""
    world = World(unit)
    amounts = [Extend(**{unit: ENOUGH[unit]}), "go on", Extend(**{unit: 3 * ENOUGH[unit]})]
    result: Any = None
    for reply in [None, *amounts]:
        with SqliteStore(tmp_path / "runs.db") as store:
            world.host = replace(world.host, store=store)
            result = world.start() if reply is None else world.resume(result, reply)
    with SqliteStore(tmp_path / "runs.db") as store:
        records, head = asyncio.run(store.records("r1")), asyncio.run(store.head("r1"))
        assert verify("r1", records, head).code in (GOOD, OPEN)
        assert dump_state(rehydrate(records).run) == dump_state(result.run_state)
        assert replay(records, LOOP).same


def test_the_bounds_that_are_printed_hold_for_a_run_that_was_extended_as_far_as_possible() -> None:
    bounds = analyse(LOOP, guardrails=LIMITS["model_calls"]).bounds
    assert bounds.model_calls == 5
    world = World("model_calls")
    result = world.start()
    for _ in range(3):
        before = world.model.calls
        result = world.resume(result, Extend(model_calls=5))
        assert world.model.calls - before == bounds.model_calls
    assert world.model.calls == bounds.model_calls_in_all


# -- sub-agents ---------------------------------------------------------------------------------------


class Nested(World):
    """An agent whose sub-agent reaches the limit; the calling agent itself only delegates."""

    def __init__(self, unit: str, store: Any = None, above: AgentGuardrails | None = None) -> None:
        super().__init__(unit, store)
        self.above = above or AgentGuardrails(max_iterations=1000, max_execution_time_s=None)
        self.delegating = ScriptedModel([call("helper", "d1", task="look"), "done"])

    def agent(self) -> Agent:
        helper = Agent(self.model, tools=[look], guardrails=self.guardrails, host=self.host)
        return Agent(self.delegating, tools=[helper.as_tool("helper", "Helps.")], guardrails=self.above, host=self.host)


@pytest.mark.parametrize(
    ("extend", "calls"),
    [
        (Extend(model_calls=2), 2),
        (Extend(seconds=8), 2),
        (Extend(seconds=40), 10),
        (Extend(tokens=90), 9),
        (Extend(usd=2), 8),
    ],
    ids=str,
)
def test_a_sub_agents_limit_is_extended_by_the_named_amount(extend: Extend, calls: int, store: Any) -> None:
    unit = next(unit for unit in UNITS if getattr(extend, unit) is not None)
    world = Nested(unit, store)
    first = world.start()
    assert isinstance(first.outcome, UserInputRequested)
    assert (first.outcome.asker, first.outcome.limit) == ("helper", REACHED[unit])
    second = world.resume(first, extend)
    assert world.model.calls == 5 + calls
    assert isinstance(second.outcome, UserInputRequested)
    assert second.outcome.limit is not None
    assert second.outcome.limit.default == REACHED[unit].default


@pytest.mark.parametrize("case", ["another unit", "more than max_iterations"])
def test_an_amount_that_makes_no_sense_to_a_sub_agent_is_refused(case: str, store: Any) -> None:
    unit, reply, why = WRONG[case]
    world = Nested(unit, store)
    first = world.start()
    with pytest.raises(HumanReplyError, match=why):
        world.resume(first, reply)
    world.resume(first, "go on")
    assert world.model.calls == 10


def test_a_sub_agent_gets_no_more_than_its_caller_has_left(store: Any) -> None:
    world = Nested("tokens", store, AgentGuardrails(max_tokens=80))
    first = world.start()
    world.resume(first, Extend(tokens=1000))
    assert world.model.calls == 8
