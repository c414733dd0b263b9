"""Rows of the user's that lead past an approval before it is decided: refused exactly where runs would be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    PRESETS,
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Counter,
    Deny,
    Graph,
    GraphError,
    Host,
    MemoryStore,
    RunAborted,
    RunState,
    StateContext,
    StateSpec,
    Tool,
    Transition,
    UserInputRequested,
    tool,
    with_votes,
)
from agentfsm.journal.verification import GOOD, OPEN, TAMPERED, verify
from agentfsm.loop.guards import approval_decided, escalated, expired, replied, vote_recorded
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.journal_scenarios import reseal

VOTING = with_votes(LOOP)
EVENTS = ("vote", "escalation", "expiry", "denial")


def at_once(run: RunState) -> bool:
    """It holds whenever it is asked; its row spends a counter, so that it is taken once."""
    return True


def note(context: StateContext) -> None:
    """Does nothing."""


def with_note(graph: Graph) -> Graph:
    """A graph with a state of the user's, which ends the run."""
    ends = Transition("note", None, "terminal", ends="completed")
    enters = Transition("recover", at_once, "note", spends="once")
    counted = graph.with_counter(Counter("once", 1))
    return counted.with_state(StateSpec("note", effect=note), [ends], entered_by=enters)


def paying(rule: Any, paid: list[int] | None = None) -> Tool:
    @tool(requires_approval=rule)
    def pay(amount: int) -> str:
        """Pay."""
        if paid is not None:
            paid.append(amount)
        return "paid"

    return pay


def agent_with(graph: Graph | None, rule: Any = Approval(2), host: Host | None = None, *script: Any) -> Agent:  # noqa: B008
    return Agent(ScriptedModel(script), tools=[paying(rule)], graph=graph, host=host)


def at_once_too(run: RunState) -> bool:
    """It holds whenever it is asked."""
    return True


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents be created with any rows."""

    def check(graph: Graph, tool: str, rule: Approval | None) -> None:
        """Accept any."""

    for module in ("agent.agent_options", "runtime.approval"):
        monkeypatch.setattr(f"agentfsm.{module}.check_undecided_rows", check)


def is_lost(graph: Graph, event: str, rule: Approval) -> bool:
    """Whether a run to which this happens while it waits for its approval counts as tampered with."""
    clock = FakeClock()
    host = Host(store=MemoryStore(), secret=b"of the tests", clock=clock)

    async def main() -> bool:
        pays = call("pay", amount=5)
        agent = agent_with(graph, rule, host, pays, *["Go on."] * 3)
        await agent.run("Pay.", run_id="r")
        if event == "escalation":
            clock.advance(60)
            await agent.resume("r")
        elif event == "expiry":
            clock.advance(601)
            await agent.dismiss("r")
        else:
            await agent.resume("r", Allow() if event == "vote" else Deny("no"), by=ANN)
        return verify("r", await host.store.records("r")).code == TAMPERED  # type: ignore[union-attr]

    return asyncio.run(main())


RULE = Approval(2, roles=("clerk",), escalate_to=("boss",), escalate_after_s=60, validity_s=600)
ONE = Approval(roles=("clerk",), validity_s=600)
ANN = Actor("ann", ("clerk",))


def own_row(target: str, before: str | None) -> Graph:
    row = Transition("suspended", at_once, target, spends="once")
    return with_note(VOTING).with_transition(row, before=before)


PLACES = ("expired", "escalated", "vote_recorded", "approval_decided", None)
TARGETS = ("pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "recover", "note", "suspended")


WHEN = {
    "expired": ["vote", "escalation", "expiry"],
    "escalated": ["vote", "escalation"],
    "vote_recorded": ["vote"],
    "approval_decided": [],
    None: [],
}
"""What may happen to a request when a row that stands in front of another one may be taken."""


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_is_refused_exactly_where_a_run_that_takes_it_counts_as_tampered_with(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused_where_lost(
        target, RULE, WHEN if target not in ("pre_step", "call_llm", "suspended") else {}, monkeypatch
    )


@pytest.mark.parametrize(
    "rule", [replace(RULE, n=1), replace(RULE, escalate_to=(), escalate_after_s=None), ONE], ids=str
)
def test_only_what_can_happen_under_the_rule_of_a_call_counts(rule: Approval, monkeypatch: pytest.MonkeyPatch) -> None:
    happens = {"vote": rule.n > 1, "escalation": bool(rule.escalate_to), "expiry": True}
    lost = {place: [event for event in events if happens[event]] for place, events in WHEN.items()}
    assert_refused_where_lost("note", rule, lost, monkeypatch)


def assert_refused_where_lost(
    target: str, rule: Approval, lost: Mapping[str | None, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str | None] = []
    for place in PLACES:
        try:
            agent_with(own_row(target, place), rule)
        except GraphError:
            refused.append(place)
    unchecked(monkeypatch)
    happens = [event for event in EVENTS if event != "escalation" or rule.escalate_to]
    for place in PLACES:
        assert [event for event in happens if is_lost(own_row(target, place), event, rule)] == lost.get(place, [])
    assert refused == [place for place in PLACES if lost.get(place)]


def redirected(row: str, target: str) -> Graph:
    graph = with_note(VOTING)
    rows = (replace(each, target=target, ends="") if each.id == row else each for each in graph)
    return replace(graph, transitions=tuple(rows))


def test_the_error_names_the_row_and_says_what_to_do() -> None:
    with pytest.raises(GraphError) as caught:
        agent_with(own_row("dispatch_tool", "escalated"), RULE)
    assert str(caught.value) == (
        "suspended.at_once: it may lead to 'dispatch_tool' before the approval of a call of 'pay' is decided; let it "
        "lead to a state that waits, that ends the run or that drops the call, such as 'pre_step'; or put it after "
        "rows of its state with the guards escalated, vote_recorded"
    )
    with pytest.raises(GraphError) as caught:
        agent_with(redirected("suspended.expired", "note"))
    assert caught.value.edge == "suspended.expired"
    assert str(caught.value).endswith("such as 'pre_step'")


def test_rows_past_what_no_tool_waits_for_are_nobodys_concern() -> None:
    past_votes, past_expiry = own_row("note", "escalated"), redirected("suspended.expired", "note")

    def decide(arguments: Any) -> bool:
        return True

    for rule in (False, True, decide):
        agent_with(past_votes, rule)
        agent_with(past_expiry, rule)
    agent_with(past_votes, Approval())  # one approval decides
    for rule in (Approval(), Approval(roles=("clerk",))):
        with pytest.raises(GraphError, match=r"suspended\.expired"):
            agent_with(past_expiry, rule)


@pytest.mark.parametrize("rule", [RULE, ONE], ids=["votes", "one"])
@pytest.mark.parametrize("target", ["note", "pre_step"])
def test_a_run_whose_request_expires_is_lost_if_the_row_is_refused_and_goes_on_otherwise(
    target: str, rule: Approval, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = redirected("suspended.expired", target)
    if target == "note":
        with pytest.raises(GraphError):
            agent_with(graph, rule)
    unchecked(monkeypatch)
    assert is_lost(graph, "expiry", rule) == (target == "note")


def test_a_request_that_expired_does_not_expire_those_that_come_after_it() -> None:
    clock, paid = FakeClock(), list[int]()
    host = Host(store=MemoryStore(), secret=b"of the tests", clock=clock)
    pays = call("pay", amount=5)
    agent = Agent(
        ScriptedModel([pays, pays, "Paid."]),
        tools=[paying(ONE, paid)],
        graph=redirected("suspended.expired", "pre_step"),
        host=host,
    )

    async def main() -> None:
        await agent.run("Pay.", run_id="r")
        clock.advance(601)
        asked = (await agent.dismiss("r")).outcome
        assert isinstance(asked, UserInputRequested)
        result = await agent.resume("r", Allow(), by=ANN)
        assert (result.output, paid) == ("Paid.", [5])
        assert verify("r", await host.store.records("r")).code == GOOD  # type: ignore[union-attr]

    asyncio.run(main())


# -- where a run may wait for an approval ---------------------------------------------------------------


def with_wait(*rows: Transition, entered_by: Transition | str, before: str | None = None) -> Graph:
    wait = StateSpec("desk", waits=True)
    return with_note(VOTING).with_state(wait, rows, entered_by=entered_by, before=before)


ON_REPLY = Transition("desk", at_once, "note", spends="once")
DECIDES = Transition("desk", approval_decided, "dispatch_tool")


@pytest.mark.parametrize(
    "graph",
    [
        with_wait(ON_REPLY, entered_by="dispatch_tool.approval_required"),
        with_wait(ON_REPLY, entered_by=Transition("dispatch_tool", at_once, "desk"), before="approval_required"),
        with_wait(ON_REPLY, entered_by=Transition("suspended", at_once, "desk"), before="vote_recorded"),
        with_wait(ON_REPLY, entered_by=Transition("recover", at_once_too, "desk")).with_transition(
            Transition("dispatch_tool", at_once, "recover", spends="once"), before="approval_required"
        ),
    ],
    ids=["asked there", "before it is asked", "after a vote", "by way of another state"],
)
def test_every_state_in_which_a_run_may_wait_for_an_approval_is_looked_at(graph: Graph) -> None:
    with pytest.raises(GraphError, match=r"^desk\.at_once: it may lead to 'note'"):
        agent_with(graph)


@pytest.mark.parametrize(
    "graph",
    [
        with_wait(ON_REPLY, entered_by="recover.ask_user"),
        with_wait(ON_REPLY, entered_by="post_tool.question_asked"),
        with_wait(ON_REPLY, entered_by="dispatch_tool.in_doubt"),
        with_wait(ON_REPLY, entered_by=Transition("dispatch_tool", at_once, "desk")),
        with_wait(ON_REPLY, entered_by=Transition("post_llm", at_once, "desk")),
        with_wait(DECIDES, Transition("desk", replied, "note"), entered_by="post_tool.question_asked")
        .with_transition(Transition("desk", escalated, "desk", spends="escalations"))
        .with_transition(Transition("desk", vote_recorded, "desk", spends="votes")),
    ],
    ids=["limit", "question", "doubt", "after it was asked", "after a reply of the model", "loop's rows alone"],
)
def test_rows_out_of_other_waits_lead_wherever_they_like(graph: Graph) -> None:
    assert agent_with(graph).graph is graph


def test_a_row_for_votes_whose_counter_may_be_spent_covers_no_row_after_it() -> None:
    row = Transition("suspended", at_once, "note", spends="once")
    graph = with_note(VOTING).with_transition(row)
    assert agent_with(graph).graph is graph
    with pytest.raises(GraphError, match=r"with the guards vote_recorded$"):
        agent_with(graph.with_counter(Counter("votes", 1)))
    with pytest.raises(GraphError, match=r"with the guards escalated$"):
        agent_with(graph.with_transition(Transition("suspended", at_once_too, "suspended", spends="escalations")), RULE)
    never_filled = tuple(replace(each, refills=()) if each.name == "approval_required" else each for each in graph)
    with pytest.raises(GraphError, match=r"with the guards escalated, vote_recorded$"):
        agent_with(replace(graph, transitions=never_filled), RULE)


# -- a wait that follows another one ---------------------------------------------------------------------


def with_boss(*rows: Transition, entered_by: str = "suspended.expired") -> Graph:
    """A graph in which somebody else is asked: by default once nobody has answered in time."""
    return with_votes(LOOP.with_state(StateSpec("boss", waits=True), rows, entered_by=entered_by))


EXPIRES = Transition("boss", expired, "terminal", ends="cancelled")
APPROVES = Transition("boss", approval_decided, "dispatch_tool")
ORDERS = {"expired first": (EXPIRES, APPROVES), "expired last": (APPROVES, EXPIRES)}
TWO = Approval(2, validity_s=600)


def waiting(graph: Graph, rule: Any, **limits: Any) -> tuple[Agent, FakeClock, list[int], MemoryStore]:
    clock, paid, store = FakeClock(), list[int](), MemoryStore()
    agent = Agent(
        ScriptedModel([call("pay", amount=5), "Paid."]),
        tools=[paying(rule, paid)],
        graph=graph,
        guardrails=AgentGuardrails(**limits),
        host=Host(store=store, secret=b"of the tests", clock=clock),
    )
    return agent, clock, paid, store


@pytest.mark.parametrize("rows", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("rule", [True, Approval(validity_s=600), TWO], ids=["plain", "rule", "two"])
def test_who_is_asked_after_an_expiry_has_as_long_to_answer_and_is_heard(
    rule: Any, rows: tuple[Transition, ...]
) -> None:
    agent, clock, paid, store = waiting(with_boss(*rows), rule, validity_s=600)
    people = [ANN, Actor("cy", ("clerk",))][: 2 if rule is TWO else 1]

    async def main() -> None:
        await agent.run("Pay.", run_id="r")
        clock.advance(601)
        asked: Any = await agent.dismiss("r")
        assert asked.state == "boss"
        for each in people:
            assert asked.outcome.suspension_record.expires_at == asked_at + 601 + 600
            clock.advance(250)
            assert paid == []
            asked = await agent.resume("r", Allow(), by=each)
        assert (asked.output, paid) == ("Paid.", [5])
        assert verify("r", await store.records("r")).code == GOOD

    asked_at = clock.time()
    asyncio.run(main())


@pytest.mark.parametrize(("after_s", "code"), [(-1, TAMPERED), (0, OPEN), (601, OPEN), (602, TAMPERED)])
def test_a_request_that_asks_again_was_not_made_before_the_first_one_or_after_its_record(
    after_s: int, code: int
) -> None:
    agent, clock, _, store = waiting(with_boss(*ORDERS["expired first"]), Approval(validity_s=600))

    async def main() -> None:
        await agent.run("Pay.", run_id="r")
        clock.advance(601)
        await agent.dismiss("r")
        rows = await store.records("r")
        *before, last = rows
        body = last.body.replace(f'"{started + 601}"', f'"{started + after_s}"')
        assert (body == last.body) == (after_s == 601)
        assert verify("r", reseal([*before, last._replace(body=body)], len(before))).code == code

    started = clock.time()
    asyncio.run(main())


@pytest.mark.parametrize("rows", ORDERS.values(), ids=ORDERS)
def test_a_request_expires_although_somebody_has_voted_wherever_the_row_stands(rows: tuple[Transition, ...]) -> None:
    agent, clock, paid, store = waiting(with_boss(*rows, entered_by="dispatch_tool.approval_required"), TWO)

    async def main() -> None:
        await agent.run("Pay.", run_id="r")
        await agent.resume("r", Allow(), by=ANN)
        clock.advance(601)
        result = await agent.dismiss("r")
        assert [decision.transition.id for decision in result.decisions] == ["boss.expired"]
        assert paid == []
        assert verify("r", await store.records("r")).code == GOOD

    asyncio.run(main())


def test_a_request_expires_although_it_was_escalated_wherever_the_row_stands() -> None:
    graph = with_boss(*ORDERS["expired last"], entered_by="dispatch_tool.approval_required")
    endless = tuple(replace(row, spends=()) if row.guard is escalated else row for row in graph)
    agent, clock, _, _ = waiting(replace(graph, transitions=endless), RULE)

    async def main() -> None:
        await agent.run("Pay.", run_id="r")
        clock.advance(60)
        assert [d.transition.id for d in (await agent.resume("r")).decisions] == ["boss.escalated"]
        clock.advance(541)
        assert [d.transition.id for d in (await agent.dismiss("r")).decisions] == ["boss.expired"]

    asyncio.run(main())


def test_an_answer_that_led_to_another_wait_does_not_answer_that_one_when_it_expires() -> None:
    graph = with_boss(Transition("boss", replied, "pre_step"), EXPIRES, entered_by="suspended.replied")
    agent, clock, _, _ = waiting(graph, False, validity_s=600, max_iterations=1)

    async def main() -> None:
        assert (await agent.run("Pay.", run_id="r")).state == "suspended"
        assert (await agent.resume("r", "Go on.")).state == "boss"
        clock.advance(601)
        assert [d.transition.id for d in (await agent.dismiss("r")).decisions] == ["boss.expired"]

    asyncio.run(main())


# -- wherever an agent is made --------------------------------------------------------------------------


PAST = own_row("dispatch_tool", "vote_recorded")


def test_presets_functions_toolsets_and_sub_agents_are_checked_too() -> None:
    def decide(arguments: Any) -> Approval:
        return Approval(2)

    with pytest.raises(GraphError, match=r"suspended\.at_once"):
        agent_with(PAST, decide)
    pay = paying(Approval(2))
    with pytest.raises(GraphError, match=r"suspended\.at_once"):
        Agent(ScriptedModel([]), tools=[pay], preset=replace(PRESETS["standard"], name="own", graph=PAST))
    sub = Agent(ScriptedModel([]), tools=[pay]).as_tool("helper", "Pays.")
    assert Agent(ScriptedModel([]), tools=[sub], graph=PAST)  # the sub-agent's run counts the votes


def test_a_rule_that_a_function_returns_unannounced_ends_the_run_before_anybody_is_asked() -> None:
    def decide(arguments: Any) -> object:
        return Approval(2)

    paid: list[int] = []
    agent = Agent(ScriptedModel([call("pay", amount=5)]), tools=[paying(decide, paid)], graph=PAST)
    outcome = agent.run_sync("Pay.").outcome
    assert isinstance(outcome, RunAborted)
    assert "suspended.at_once: it may lead to 'dispatch_tool'" in str(outcome.failure)
    assert paid == []
