"""Random tables with random facts, the same for a seed everywhere; and three tables with a known fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentfsm.analysis import Change, Counter, Facts, Known, exactly, loop_facts
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.loop import LOOP
from agentfsm.errors import GraphError
from agentfsm.machine.graph import Graph, StateSpec, Transition

COUNTERS = ("c0", "c1", "c2")


def guard(name: str) -> Callable[[Any], bool]:
    """A guard that is never asked: only its name counts here."""

    def answer(run: Any) -> bool:
        raise AssertionError(f"{name} was asked")

    answer.__name__ = name
    return answer


def random_case(seed: int) -> tuple[Graph, Facts]:
    """A valid graph of 3 to 7 states and what is known of it: up to three counters, all of them bounded."""
    dice = random.Random(seed)
    while True:
        graph = _graph(dice, seed)
        if graph is not None:
            return graph, _facts(dice, graph)


def _graph(dice: random.Random, seed: int) -> Graph | None:
    names = ["s0", "call_llm", "dispatch_tool", "s3", "s4", "s5"][: dice.randint(2, 6)]
    waiting = {n for n in names if dice.random() < 0.25}
    states = [StateSpec(n, waits=n in waiting, spends="patience") for n in names]
    states.append(StateSpec("end", final=True))
    rows: list[Transition] = []
    for name in names:
        targets = [dice.choice([*names, "end"]) for _ in range(dice.randint(0, 3))]
        rows += [Transition(name, guard(f"g{name[1:]}{i}"), target) for i, target in enumerate(targets)]
        if name not in waiting or not targets:
            rows.append(Transition(name, None, dice.choice([*names, "end"])))
    try:
        return Graph(tuple(states), tuple(rows), f"random-{seed}")
    except GraphError:
        return None


def _facts(dice: random.Random, graph: Graph) -> Facts:
    counters = [_counter(dice, name, graph) for name in COUNTERS]
    known = []
    for row in graph:
        if row.guard is None or dice.random() < 0.45:
            continue
        when = _condition(dice)
        kind = dice.random()
        may, must = (when, when) if kind < 0.6 else (when, "never") if kind < 0.8 else ("always", when)
        known.append(Known(row.guard, may=may, must=must))
    return Facts(tuple(counters), tuple(known))


def _counter(dice: random.Random, name: str, graph: Graph) -> Counter:
    limit = dice.choice([1, 2, 3, 5])
    changes = []
    for _ in range(dice.randint(1, 4)):
        row = dice.choice(graph.transitions)
        on = dice.choice([row.id, f"{row.source}.*", f"* -> {row.target}"])
        when = "always" if dice.random() < 0.7 else _condition(dice)
        if dice.random() < 0.75:
            changes.append(Change(on, dice.choice([1, 1, 1, 2, -1]), when=when))
        else:
            values = tuple(sorted({dice.randint(0, limit) for _ in range(dice.randint(1, 2))}))
            changes.append(Change(on, to=values, when=when))
    return Counter(name, limit, tuple(changes), start=dice.randint(0, limit) if dice.random() < 0.3 else 0)


def _condition(dice: random.Random) -> str:
    def test() -> str:
        return f"{dice.choice(COUNTERS)} {dice.choice(['==', '!=', '<', '>=', '>='])} {dice.randint(0, 3)}"

    text = test()
    if dice.random() < 0.2:
        text += f" {dice.choice(['and', 'or'])} {test()}"
    return text


def endless_retry(*, resets: bool) -> tuple[Graph, Facts]:
    """A draft's mistake: a budget of attempts that each success sets back, so that it is never spent.

    The answer comes (a success), cannot be read (a failure), is asked for again, and so on.
    """
    spent, failed, unreadable = guard("attempts_spent"), guard("call_failed"), guard("unreadable")
    graph = Graph(
        (
            StateSpec("ask"),
            StateSpec("read"),
            StateSpec("recover"),
            StateSpec("end", final=True),
        ),
        (
            Transition("ask", failed, "recover"),
            Transition("ask", None, "read"),
            Transition("read", unreadable, "recover"),
            Transition("read", None, "end"),
            Transition("recover", spent, "end"),
            Transition("recover", None, "ask", spends="an attempt"),
        ),
        "resetting" if resets else "counting",
    )
    reset = (Change("ask.otherwise", to=(0,)),) if resets else ()
    attempts = Counter("attempts", 3, (*reset, Change("* -> recover", 1)))
    return graph, Facts((attempts,), (exactly(spent, "attempts >= 3"),))


def dodging() -> tuple[Graph, Facts]:
    """Another: in LOOP, a retry that goes straight to ``call_llm`` passes by the budget."""
    rows = [
        replace(t, target="call_llm", spends="a retry") if t.id == "recover.otherwise" else t for t in LOOP.transitions
    ]
    graph = replace(LOOP, transitions=tuple(rows), name="dodging")
    return graph, loop_facts(AgentGuardrails(max_iterations=2, max_steps=4, max_continues=1), calls_per_reply=2)
