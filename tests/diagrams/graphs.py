"""The graphs that pictures are tried on: the default loop, four states more, three states, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable

from agentfsm.core.loop import LOOP
from agentfsm.machine import Graph, StateSpec, Transition


def guard(name: str) -> Callable[[object], bool]:
    def never(run: object) -> bool:
        return False

    never.__name__ = name
    return never


SMALL = Graph(
    name="small",
    states=(
        StateSpec("plan", "think", spends="a step"),
        StateSpec("work", "do it"),
        StateSpec("end", "over", final=True),
    ),
    transitions=(
        Transition("plan", guard("cancelled"), "end"),
        Transition("plan", guard("declared_done"), "end"),
        Transition("plan", None, "work"),
        Transition("work", guard("cancelled"), "end"),
        Transition("work", guard("again"), "work", spends="a try"),
        Transition("work", guard("revise"), "plan"),
        Transition("work", None, "end"),
    ),
)

ODD = Graph(
    name='odd <graph> & "co"',
    states=(
        StateSpec("end", 'say "hi" <b> & `x` #1; [a|b] */ \x00\n two', spends="a */ b"),
        StateSpec("état", "o", lane="left"),
        StateSpec("x1", "x", lane="right", waits=True),
        StateSpec("default", "stop", final=True),
    ),
    transitions=(
        Transition("end", guard("a"), "état"),
        Transition("end", guard("o"), "x1"),
        Transition("end", None, "default"),
        Transition("état", None, "default"),
        Transition("x1", guard("class_"), "end"),
    ),
)
"""Names and notes that one or another form takes for words of its own."""

LONELY = Graph(states=(StateSpec("only", final=True),), transitions=(), name="lonely")


def more_states() -> Graph:
    """The default loop with a state more in each lane and one that reviews the answer."""
    graph = LOOP.with_state(
        StateSpec("review", "a second model reads the answer"),
        [Transition("review", guard("rejected"), "recover"), Transition("review", None, "terminal")],
        entered_by="post_llm.otherwise",
    )
    graph = graph.with_state(
        StateSpec("compact", "shorten the context"),
        [Transition("compact", guard("failed"), "recover"), Transition("compact", None, "call_llm")],
        entered_by="pre_step.otherwise",
    )
    graph = graph.with_state(
        StateSpec("escalate", "ask a stronger model", lane="left"),
        [Transition("escalate", guard("declined"), "suspended"), Transition("escalate", None, "pre_step")],
        entered_by=Transition("recover", guard("hard"), "escalate"),
        before="retry_tool",
    )
    return graph.with_state(
        StateSpec("parked", "wait for a slot", lane="right", waits=True),
        [
            Transition("parked", guard("slot_expired"), "terminal"),
            Transition("parked", guard("slot_free"), "dispatch_tool"),
            Transition("parked", guard("slot_lost"), "recover"),
            Transition("parked", guard("asked"), "suspended"),
            Transition("parked", guard("polled"), "parked"),
        ],
        entered_by=Transition("dispatch_tool", guard("no_slot"), "parked"),
        before="in_doubt",
    )


def random_graph(seed: int) -> Graph:
    """A graph of 2 to 13 states in any lanes, with up to 12 rows each, that keeps the rules of graphs."""
    rng = random.Random(seed)
    finals = rng.choice((1, 1, 2))
    inner = [f"state_{i}" for i in range(rng.randint(1, 11))]
    ends = [f"end_{i}" for i in range(finals)]
    states = [
        StateSpec(
            name,
            rng.choice(("", "does a thing", "does something that takes more words to say than most do")),
            spends="a step",
            waits=rng.random() < 0.2,
            lane=rng.choice(("main", "main", "left", "right")),
        )
        for name in inner
    ] + [StateSpec(name, final=True) for name in ends]
    rows: list[Transition] = []
    for place, name in enumerate(inner):
        onward = [*inner, *ends][place + 1]  # so that every state is reached and reaches an end
        targets = [onward, *(rng.choice([*inner, *ends]) for _ in range(rng.randint(0, 10)))]
        rng.shuffle(targets)
        for number, target in enumerate(targets):
            word = rng.choice(("declared_done", f"guard_{number}", f"a_longer_guard_{number}"))
            taken = {t.name for t in rows if t.source == name}
            rows.append(Transition(name, guard(word if word not in taken else f"guard_{number}"), target))
        rows.append(Transition(name, None, rng.choice([*inner, *ends])))
    for end in ends:
        if not any(t.target == end for t in rows):
            rows.insert(0, Transition(inner[-1], guard(f"to_{end}"), end))
    return Graph(tuple(states), tuple(rows), f"random {seed}")


def every_graph() -> dict[str, Graph]:
    graphs = {"loop": LOOP, "more": more_states(), "small": SMALL, "odd": ODD, "lonely": LONELY}
    return graphs | {f"random-{seed}": random_graph(seed) for seed in range(60)}
