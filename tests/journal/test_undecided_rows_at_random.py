"""Random graphs: an agent is refused if some run of it could count as tampered with, and hardly ever otherwise."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    ConfigurationError,
    Deny,
    Graph,
    GraphError,
    Host,
    HumanReplyError,
    ItRan,
    JournalError,
    MemoryStore,
    Message,
    NoTransitionError,
    Reply,
    ToolCall,
    ToolContext,
    Transition,
    UserInputRequested,
    tool,
    with_votes,
)
from agentfsm.errors import StaleLease, SuspensionRecordError
from agentfsm.journal.verification import TAMPERED, verify
from agentfsm.loop.approval_rows import check_undecided_rows
from agentfsm.loop.guards import escalated, vote_recorded
from tests.helpers.random_agents import WorldClock
from tests.helpers.random_graphs import CHANGES, World
from tests.journal.test_undecided_rows import unchecked

PLAIN = [Approval(n, roles=("clerk",), validity_s=600) for n in (1, 3)]
RULES = [*PLAIN, *(replace(each, escalate_to=("boss",), escalate_after_s=60) for each in PLAIN)]
OTHER_CHANGES = (
    *["own wait"] * 3,
    *["own state"] * 2,
    "rows reordered",
    "row retargeted",
    "row dropped",
    "row added",
)
RUNS, RUNS_OF_REFUSED = 6, 200


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [100, pytest.param(1_000, marks=pytest.mark.soak)])
def test_a_random_graph_is_refused_if_and_only_if_a_run_can_be_lost(
    monkeypatch: pytest.MonkeyPatch, seeds: int
) -> None:
    unchecked(monkeypatch)
    counts = Counter[str]()
    for seed in range(seeds):
        dice, world = random.Random(seed), World()
        rule = dice.choice(RULES)
        try:
            graph = draw_graph(dice, world)
            agent_in(world, graph, rule, MemoryStore())
        except ConfigurationError:  # for another reason
            continue
        try:
            check_undecided_rows(graph, "pay", rule)
            runs, verdict = RUNS, "accepted"
        except GraphError:
            runs, verdict = RUNS_OF_REFUSED, "refused"
        if verdict == "refused" and spends_what_votes_need(graph):
            continue  # whether a row for votes then covers those after it is more than the check wants to know
        lost = any(is_lost(world, graph, rule, 1000 * seed + number) for number in range(runs))
        assert lost == (verdict == "refused"), f"seed {seed} is {verdict}"
        counts[verdict] += 1
    assert counts["accepted"] > seeds / 2
    assert counts["refused"] > seeds / 20


def spends_what_votes_need(graph: Graph) -> bool:
    """Whether another row spends a counter of the rows for votes."""
    others = (row for row in graph if row.guard not in (escalated, vote_recorded))
    return any({"votes", "escalations"} & {*row.spends} for row in others)


def draw_graph(dice: random.Random, world: World) -> Graph:
    """A graph that counts votes, with changes most of which are about its waits."""
    graph = with_votes(LOOP) if dice.random() < 0.7 else LOOP
    changes = [out_of_a_wait] * 4 + [into_a_wait] * 2 + [CHANGES[name] for name in OTHER_CHANGES]
    for number in range(dice.choice((1, 2, 3, 4, 5))):
        try:
            graph = dice.choice(changes)(graph, dice, world, number)
        except GraphError:
            continue
    return with_votes(graph)


def out_of_a_wait(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    return with_row(graph, dice, world, number, [s.name for s in graph.states if s.waits], graph.states)


def into_a_wait(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    sources = [s.name for s in graph.states if not s.final]
    return with_row(graph, dice, world, number, sources, [s for s in graph.states if s.waits])


def with_row(graph: Graph, dice: random.Random, world: World, number: int, sources: Any, targets: Any) -> Graph:
    def guard(run: Any) -> bool:
        return world.happens(0.5)

    guard.__name__ = f"own_{number}"
    source, target = dice.choice(sources), dice.choice(targets)
    spends = dice.choice(["", "", *(each.name for each in graph.counters)])
    row = Transition(source, guard, target.name, ends="partial" if target.final else "", spends=spends)
    before = [each.name for each in graph.rows(source) if each.guard not in (None, *graph.first)]
    return graph.with_transition(row, before=dice.choice([*before, None]))


class AnyModel:
    """A model that mostly calls tools."""

    name = "any"

    def __init__(self, world: World) -> None:
        self._dice, self._ids = world.dice, count()

    async def reply(self, request: Any) -> Reply:
        if self._dice.random() < 0.25:
            return Reply(Message.assistant("Done."))
        names = self._dice.choices(("pay", "pay", "look", "ask"), k=self._dice.choice((1, 1, 2)))
        return Reply(Message.assistant("", tuple(ToolCall(f"c{next(self._ids)}", name, {}) for name in names)))


@tool
def look() -> str:
    """Look."""
    return "seen"


@tool(asks=True)
async def ask(context: ToolContext) -> str:
    """Ask."""
    return await context.ask("Sure?")


def agent_in(world: World, graph: Graph, rule: Approval, store: MemoryStore) -> Agent:
    @tool(requires_approval=rule)
    def pay() -> str:
        """Pay."""
        return "paid"

    limits = AgentGuardrails(max_iterations=4, max_continues=1, max_denials=2)
    host = Host(store=store, secret=b"of the tests", clock=WorldClock(world))
    return Agent(AnyModel(world), tools=[pay, look, ask], graph=graph, guardrails=limits, host=host)


def is_lost(world: World, graph: Graph, rule: Approval, seed: int) -> bool:
    """Whether a run, in which anything may happen, counts as tampered with at some time."""
    world.start(seed)
    store = MemoryStore()

    async def main() -> bool:
        agent = agent_in(world, graph, rule, store)
        outcome: Any = (await agent.run("Go.", run_id="r")).outcome
        for _ in range(8):
            if verify("r", await store.records("r")).code == TAMPERED:
                return True
            if not isinstance(outcome, UserInputRequested):
                return False
            try:
                outcome = (await something_happens(agent, world, outcome.kind)).outcome
            except JournalError:
                return True
            except StaleLease:  # a guard that draws lots said yes when asked in advance, and then no
                return False
            except (HumanReplyError, NoTransitionError, SuspensionRecordError):
                pass  # it waits as before
        return verify("r", await store.records("r")).code == TAMPERED

    return asyncio.run(main())


async def something_happens(agent: Agent, world: World, kind: str) -> Any:
    """Somebody votes, denies or answers, or the request is escalated or expires."""
    dice = world.dice
    if kind == "in_doubt":
        return await agent.resume("r", ItRan("paid"), by=Actor("ann", ("clerk",)))
    if kind != "approval":
        return await agent.resume("r", "Yes.")
    world.clock.advance(dice.choice((0, 0, 0, 61, 601)))
    voter = Actor(dice.choice("abcdef"), ("clerk", "boss"))
    match dice.choices(("expire", "escalate", "deny", "vote"), (3, 3, 2, 12))[0]:
        case "expire":
            return await agent.dismiss("r")
        case "escalate":
            return await agent.resume("r")
        case "deny":
            return await agent.resume("r", Deny("no"), by=voter)
        case _:
            return await agent.resume("r", Allow(), by=voter)
