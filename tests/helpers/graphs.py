"""Graphs for tests: the default loop typed in by hand, small and odd graphs, and random ones by seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

from agentfsm.analysis import Assumptions, GuardAssumption, Update, Variable, graph_assumptions, iff
from agentfsm.errors import GraphError
from agentfsm.loop import detectors, guards
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.outcomes import CALL_MODEL, CHECK_BUDGETS, PARSE_REPLY, RUN_CALLS, StateResult
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine import declaration
from agentfsm.machine.declaration import Exhausted, guard_name
from agentfsm.machine.graph import Graph, Guard, StateSpec, Transition

LOOP_TABLE = """
pre_step: cancelled>terminal aborted>terminal runaway>terminal
pre_step: iteration_limit>recover time_limit>recover token_limit>recover cost_limit>recover no_progress>recover
pre_step: otherwise>call_llm
call_llm: cancelled>terminal aborted>terminal
call_llm: transient_provider>recover provider_error>recover context_overflow>recover
call_llm: otherwise>post_llm
post_llm: cancelled>terminal aborted>terminal
post_llm: output_truncated>recover output_refused>recover output_malformed>recover
post_llm: loop_detected>recover no_progress>recover
post_llm: tool_calls>dispatch_tool
post_llm: otherwise>terminal
dispatch_tool: cancelled>terminal aborted>terminal
dispatch_tool: approval_required>suspended in_doubt>suspended
dispatch_tool: otherwise>post_tool
post_tool: cancelled>terminal aborted>terminal declared_done>terminal declared_unable>terminal
post_tool: question_asked>suspended policy_violation>recover calls_pending>dispatch_tool
post_tool: repeated_error>recover ambiguous_input>recover scope_too_large>recover capability_gap>recover
post_tool: kernel_invalidated>recover unknown_tool>recover invalid_arguments>recover environment_error>recover
post_tool: tool_error>recover
post_tool: otherwise>pre_step
recover: cancelled>terminal aborted>terminal
recover: ask_user>suspended handoff>terminal stop>terminal retry_tool>dispatch_tool
recover: otherwise>pre_step
suspended: cancelled>terminal aborted>terminal expired>terminal
suspended: approval_decided>dispatch_tool doubt_settled>dispatch_tool replied>pre_step
"""

LOOP_SPENDS = {
    "post_llm.tool_calls": ("pending_calls",),
    "post_tool.calls_pending": ("pending_calls",),
    "recover.retry_tool": ("tool_retries", "pending_calls"),
}

LOOP_REFILLS = {"post_llm.tool_calls": ("pending_calls", "tool_retries"), "recover.retry_tool": ("pending_calls",)}

LOOP_ENDS = {
    "cancelled": "cancelled",
    "expired": "cancelled",
    "aborted": "aborted",
    "runaway": "partial",
    "stop": "partial",
    "declared_unable": "handed_off",
    "handoff": "handed_off",
    "declared_done": "completed",
    "otherwise": "completed",
}
"""How a run ends, by the guard of the row into ``terminal``."""


def renamed(graph: Graph, prefix: str = "my_") -> Graph:
    """The same graph with other names of its states, in the same order."""
    names = {spec.name: f"{prefix}{spec.name}" for spec in graph.states}
    states = tuple(replace(spec, name=names[spec.name]) for spec in graph.states)
    rows = tuple(replace(row, source=names[row.source], target=names[row.target]) for row in graph)
    return replace(graph, name=f"{prefix}{graph.name}", states=states, transitions=rows)


def with_wrapped_guards(graph: Graph) -> Graph:
    """The same graph with a function of its own around each guard, as a user adds logging to one."""
    wrappers: dict[Guard | None, Guard] = {
        row.guard: _wrap(row.guard) for row in graph if row.guard is not None and row.guard not in graph.first
    }
    rows = tuple(replace(row, guard=wrappers.get(row.guard, row.guard)) for row in graph)
    return replace(graph, transitions=rows)


def _wrap(guard: Guard) -> Guard:
    if isinstance(guard, Exhausted):
        return guard

    @wraps(guard)
    def wrapper(run: Any) -> object:
        return guard(run)

    wrapper.__name__ = f"logged_{guard_name(guard)}"
    return wrapper


def loop_rows() -> list[tuple[str, str, str]]:
    """The hand-written rows as (state, guard, target), in order."""
    found: list[tuple[str, str, str]] = []
    for line in LOOP_TABLE.strip().splitlines():
        state, _, entries = line.partition(": ")
        for entry in entries.split():
            guard, target = entry.split(">")
            found.append((state, guard, target))
    return found


def reference_loop() -> Graph:
    """The hand-written table as a graph, with the loop's own detectors."""
    guards = {t.name: t.guard for t in LOOP}
    table = [
        Transition(
            state,
            guards[guard],
            target,
            spends=LOOP_SPENDS.get(f"{state}.{guard}", ()),
            refills=LOOP_REFILLS.get(f"{state}.{guard}", ()),
            ends=LOOP_ENDS[guard] if target == "terminal" else "",
        )
        for state, guard, target in loop_rows()
    ]
    return replace(LOOP, transitions=tuple(table), name="reference")


def never_guard(name: str) -> Callable[[object], bool]:
    def never(run: object) -> bool:
        return False

    never.__name__ = name
    return never


def exhausted_guard(name: str, counter: declaration.Counter, *, past: bool = True) -> declaration.Exhausted:
    """A guard with a name that is made from a counter."""
    return declaration.exhausted(counter, past=past)(never_guard(name))


def unchecked_graph(
    states: Iterable[StateSpec],
    transitions: Iterable[Transition],
    name: str = "graph",
    counters: Iterable[declaration.Counter] = (),
    first: Iterable[Guard] = (),
    *,
    unchecked: Iterable[str] = ("graph.check_graph",),
) -> Graph:
    """A graph that breaks rules on purpose, for what must cope with such a graph or find the fault itself.

    Args:
        states: Its states.
        transitions: Its rows.
        name: Its name.
        counters: Its counters.
        first: The guards that come first.
        unchecked: The functions of ``agentfsm.machine`` that do not check it; by default nothing does.
    """
    with ExitStack() as patches:
        for check in unchecked:
            patches.enter_context(patch(f"agentfsm.machine.{check}"))
        return Graph(tuple(states), tuple(transitions), name, tuple(counters), tuple(first))


_STEPS = declaration.Counter("steps", 5)

SMALL_GRAPH = Graph(
    name="small",
    states=(
        StateSpec("plan", "think", spends="steps"),
        StateSpec("work", "do it"),
        StateSpec("end", "over", final=True),
    ),
    counters=(_STEPS, declaration.Counter("tries", 2)),
    transitions=(
        Transition("plan", exhausted_guard("too_long", _STEPS), "end", ends="partial"),
        Transition("plan", never_guard("declared_done"), "end", ends="completed"),
        Transition("plan", None, "work"),
        Transition("work", never_guard("cancelled"), "end", ends="cancelled"),
        Transition("work", never_guard("again"), "work", spends="tries"),
        Transition("work", never_guard("revise"), "plan"),
        Transition("work", None, "end", ends="completed"),
    ),
)

_ETAPES = declaration.Counter("étapes", 4)

ODD_NAMES_GRAPH = Graph(
    name='odd <graph> & "co"',
    states=(
        StateSpec("end", 'say "hi" <b> & `x` #1; [a|b] */ \x00\n two', spends="étapes"),
        StateSpec("état", "o", lane="left"),
        StateSpec("x1", "x", lane="right", waits=True),
        StateSpec("default", "stop", final=True),
    ),
    counters=(_ETAPES,),
    transitions=(
        Transition("end", never_guard("a"), "état"),
        Transition("end", never_guard("o"), "x1"),
        Transition("end", exhausted_guard("fini", _ETAPES), "default", ends="partial"),
        Transition("end", None, "default", ends="completed"),
        Transition("état", None, "default", ends="handed_off"),
        Transition("x1", never_guard("class_"), "end"),
    ),
)
"""Names and notes that have a special meaning in one of the diagram formats."""

SINGLE_STATE_GRAPH = Graph(states=(StateSpec("only", final=True),), transitions=(), name="lonely")


def extended_loop() -> Graph:
    """The default loop with one more state in each lane and one that reviews the answer."""
    graph = LOOP.with_state(
        StateSpec("review", "a second model reads the answer"),
        [
            Transition("review", never_guard("rejected"), "recover"),
            Transition("review", None, "terminal", ends="completed"),
        ],
        entered_by="post_llm.otherwise",
    )
    graph = graph.with_state(
        StateSpec("compact", "shorten the context"),
        [Transition("compact", never_guard("failed"), "recover"), Transition("compact", None, "call_llm")],
        entered_by="pre_step.otherwise",
    )
    graph = graph.with_state(
        StateSpec("escalate", "ask a stronger model", lane="left"),
        [Transition("escalate", never_guard("declined"), "suspended"), Transition("escalate", None, "pre_step")],
        entered_by=Transition("recover", never_guard("hard"), "escalate"),
        before="retry_tool",
    )
    return graph.with_state(
        StateSpec("parked", "wait for a slot", lane="right", waits=True),
        [
            Transition("parked", never_guard("slot_expired"), "terminal", ends="cancelled"),
            Transition("parked", never_guard("slot_free"), "dispatch_tool"),
            Transition("parked", never_guard("slot_lost"), "recover"),
            Transition("parked", never_guard("asked"), "suspended"),
            Transition("parked", never_guard("polled"), "parked"),
        ],
        entered_by=Transition("dispatch_tool", never_guard("no_slot"), "parked"),
        before="in_doubt",
    )


def claims_graph() -> Graph:
    """An insurance claim: 22 states, six of which wait for somebody, with lines far up and down."""
    steps = (
        "intake", "triage", "verify_policy", "collect", "read_documents", "assess", "estimate", "check_fraud", "decide",
        "offer", "pay", "close",
    )  # fmt: skip
    recoveries = {"retry": ("await_manager", "triage"), "repair": ("await_expert", "collect")}
    recoveries["escalate"] = ("await_manager", "decide")
    waits = {
        "await_documents": ("collect", "read_documents"),
        "await_expert": ("assess", "estimate"),
        "await_investigator": ("check_fraud", "decide"),
        "await_manager": ("decide", "offer"),
        "await_customer": ("offer", "pay"),
        "await_bank": ("pay", "close"),
    }
    rows: list[Transition] = []
    for place, step in enumerate(steps):
        rows.append(Transition(step, exhausted_guard("out_of_steps", _STEPS), "done", ends="partial"))
        rows.append(Transition(step, never_guard("cancelled"), "done", ends="cancelled"))
        rows.append(Transition(step, never_guard("failed"), list(recoveries)[place % 3]))
        needed = [wait for wait, (asked, _) in waits.items() if asked == step]
        needed += ["await_documents"] if step in ("triage", "assess", "decide") else []
        needed += ["await_manager"] if step in ("estimate", "check_fraud") else []
        rows += [Transition(step, never_guard(f"needs_{wait.removeprefix('await_')}"), wait) for wait in needed]
        last = step == steps[-1]
        rows.append(Transition(step, None, "done" if last else steps[place + 1], ends="completed" if last else ""))
    for state, (asked, back) in recoveries.items():
        rows.append(Transition(state, exhausted_guard("out_of_steps", _STEPS), "done", ends="partial"))
        rows += [Transition(state, never_guard("ask"), asked), Transition(state, None, back)]
    for state, (asked, next_step) in waits.items():
        rows.append(Transition(state, never_guard("expired"), "done", ends="cancelled"))
        rows += [
            Transition(state, never_guard("answered"), next_step),
            Transition(state, never_guard("asks_back"), asked),
        ]
        rows.append(Transition(state, never_guard("forwarded"), _other_wait(state)))
    return Graph(
        (
            *(StateSpec(name, name.replace("_", " "), spends="steps") for name in steps),
            *(StateSpec(name, "recover", spends="steps", lane="left") for name in recoveries),
            *(StateSpec(name, "wait", waits=True, lane="right") for name in waits),
            StateSpec("done", final=True),
        ),
        tuple(rows),
        "claims",
        (_STEPS,),
    )


def _other_wait(state: str) -> str:
    return "await_expert" if state == "await_manager" else "await_manager"


def random_graph(seed: int) -> Graph:
    """A valid graph of 2 to 13 states in any lanes, with up to 12 rows each."""
    rng = random.Random(seed)
    finals = rng.choice((1, 1, 2))
    inner = [f"state_{i}" for i in range(rng.randint(1, 11))]
    ends = [f"end_{i}" for i in range(finals)]
    states = [
        StateSpec(
            name,
            rng.choice(("", "does a thing", "does something that takes more words to say than most do")),
            spends="steps",
            waits=rng.random() < 0.2,
            lane=rng.choice(("main", "main", "left", "right")),
        )
        for name in inner
    ] + [StateSpec(name, final=True) for name in ends]

    def ending(target: str) -> str:
        return rng.choice(declaration.ENDINGS) if target in ends else ""

    rows: list[Transition] = []
    for place, name in enumerate(inner):
        rows.append(Transition(name, exhausted_guard("out_of_steps", _STEPS), ends[0], ends="partial"))
        onward = [*inner, *ends][place + 1]  # every state can be reached and reaches an end
        targets = [onward, *(rng.choice([*inner, *ends]) for _ in range(rng.randint(0, 10)))]
        rng.shuffle(targets)
        for number, target in enumerate(targets):
            word = rng.choice(("declared_done", f"guard_{number}", f"a_longer_guard_{number}"))
            taken = {t.name for t in rows if t.source == name}
            guard = never_guard(word if word not in taken else f"guard_{number}")
            rows.append(Transition(name, guard, target, ends=ending(target)))
        last = rng.choice([*inner, *ends])
        rows.append(Transition(name, None, last, ends=ending(last)))
    for end in ends:
        if not any(t.target == end for t in rows):
            rows.insert(0, Transition(inner[-1], never_guard(f"to_{end}"), end, ends=ending(end)))
    return Graph(tuple(states), tuple(rows), f"random {seed}", (_STEPS,))


@cache
def all_graphs() -> dict[str, Graph]:
    graphs = {
        "loop": LOOP,
        "more": extended_loop(),
        "small": SMALL_GRAPH,
        "odd": ODD_NAMES_GRAPH,
        "lonely": SINGLE_STATE_GRAPH,
        "claims": claims_graph(),
    }
    return graphs | {f"random-{seed}": random_graph(seed) for seed in range(60)}


COUNTER_NAMES = ("c0", "c1", "c2")


def unasked_guard(name: str) -> Callable[[Any], bool]:
    """A guard that must not be evaluated: only its name matters."""

    def answer(run: Any) -> bool:
        raise AssertionError(f"{name} was asked")

    answer.__name__ = name
    return answer


def random_graph_with_assumptions(seed: int) -> tuple[Graph, Assumptions]:
    """A valid graph of 3 to 7 states and assumptions about it: up to three counters, all of them bounded."""
    dice = random.Random(seed)
    while True:
        graph = _random_counted_graph(dice, seed)
        if graph is not None:
            return graph, _random_assumptions(dice, graph)


def _random_counted_graph(dice: random.Random, seed: int) -> Graph | None:
    names = ["s0", "call_llm", "dispatch_tool", "s3", "s4", "s5"][: dice.randint(2, 6)]
    waiting = {n for n in names if dice.random() < 0.25}
    effects = {"call_llm": CALL_MODEL, "dispatch_tool": RUN_CALLS}
    states = [StateSpec(n, waits=n in waiting, effect=effects.get(n)) for n in names]
    states.append(StateSpec("end", final=True))
    rows: list[Transition] = []
    for name in names:
        targets = [dice.choice([*names, "end"]) for _ in range(dice.randint(0, 3))]
        rows += [Transition(name, unasked_guard(f"g{name[1:]}{i}"), target) for i, target in enumerate(targets)]
        if name not in waiting or not targets:
            rows.append(Transition(name, None, dice.choice([*names, "end"])))
    rows = [replace(t, ends="completed") if t.target == "end" else t for t in rows]
    try:
        skipped = ("graph_checks._check_cycles", "graph_checks._check_outcomes")
        return unchecked_graph(states, rows, f"random-{seed}", unchecked=skipped)
    except GraphError:
        return None


def _random_assumptions(dice: random.Random, graph: Graph) -> Assumptions:
    counters = [_random_counter(dice, name, graph) for name in COUNTER_NAMES]
    known: list[GuardAssumption] = []
    for row in graph:
        if row.guard is None or dice.random() < 0.45:
            continue
        when = _random_condition(dice)
        kind = dice.random()
        may, must = (when, when) if kind < 0.6 else (when, "never") if kind < 0.8 else ("always", when)
        known.append(GuardAssumption(row.guard, may=may, must=must))
    return Assumptions(tuple(counters), tuple(known))


def _random_counter(dice: random.Random, name: str, graph: Graph) -> Variable:
    limit = dice.choice([1, 2, 3, 5])
    changes: list[Update] = []
    for _ in range(dice.randint(1, 4)):
        row = dice.choice(graph.transitions)
        on = dice.choice([row.id, f"{row.source}.*", f"* -> {row.target}"])
        when = "always" if dice.random() < 0.7 else _random_condition(dice)
        if dice.random() < 0.75:
            changes.append(Update(on, dice.choice([1, 1, 1, 2, -1]), when=when))
        else:
            values = tuple(sorted({dice.randint(0, limit) for _ in range(dice.randint(1, 2))}))
            changes.append(Update(on, to=values, when=when))
    return Variable(name, limit, tuple(changes), start=dice.randint(0, limit) if dice.random() < 0.3 else 0)


def _random_condition(dice: random.Random) -> str:
    def test() -> str:
        return f"{dice.choice(COUNTER_NAMES)} {dice.choice(['==', '!=', '<', '>=', '>='])} {dice.randint(0, 3)}"

    text = test()
    if dice.random() < 0.2:
        text += f" {dice.choice(['and', 'or'])} {test()}"
    return text


def endless_retry(*, resets: bool) -> tuple[Graph, Assumptions]:
    """A faulty graph: a retry budget that each success resets, so that it is never used up.

    The answer comes (a success), cannot be read (a failure), is asked for again, and so on.
    """
    spent, failed, unreadable = (
        unasked_guard("attempts_spent"),
        unasked_guard("call_failed"),
        unasked_guard("unreadable"),
    )
    graph = unchecked_graph(
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
            Transition("read", None, "end", ends="completed"),
            Transition("recover", spent, "end", ends="partial"),
            Transition("recover", None, "ask"),
        ),
        "resetting" if resets else "counting",
    )
    reset = (Update("ask.otherwise", to=(0,)),) if resets else ()
    attempts = Variable("attempts", 3, (*reset, Update("* -> recover", 1)))
    return graph, Assumptions((attempts,), (iff(spent, "attempts >= 3"),))


def retry_bypassing_budget() -> tuple[Graph, Assumptions]:
    """A faulty graph: LOOP with a retry that goes directly to ``call_llm`` and so bypasses the budget."""
    rows = [replace(t, target="call_llm") if t.id == "recover.otherwise" else t for t in LOOP.transitions]
    graph = unchecked_graph(LOOP.states, rows, "dodging", LOOP.counters, LOOP.first)
    limits = AgentGuardrails(max_iterations=2, max_steps=4, max_continues=1, max_calls_per_reply=2)
    return graph, graph_assumptions(graph, limits)


def pipeline(stages: int) -> Graph:
    """A pipeline: each stage may skip one or two others, and the last may start a new round."""
    states = [StateSpec(f"s{i}") for i in range(stages)]
    rows: list[Transition] = []
    for i in range(stages - 1):
        rows += [Transition(f"s{i}", unasked_guard(f"skip{i}_{d}"), f"s{i + d}") for d in (3, 2) if i + d < stages]
        rows.append(Transition(f"s{i}", None, f"s{i + 1}"))
    rows += [
        Transition(f"s{stages - 1}", unasked_guard("again"), "s0", spends="rounds"),
        Transition(f"s{stages - 1}", None, "end", ends="completed"),
    ]
    rounds = declaration.Counter("rounds", 5)
    return Graph((*states, StateSpec("end", final=True)), tuple(rows), "pipeline", (rounds,))


def written_from_scratch() -> Graph:
    """A graph with nothing of ``LOOP`` but some effects and guards: no tools, no recovery, and a state of its own.

    It asks a person about each answer that is too long, and declares no counter for extensions.
    """

    def file(context: object) -> StateResult:
        return StateResult(outcome="filed")

    def ends(state: str, guard: Guard, how: str) -> Transition:
        return Transition(state, guard, "done", ends=how)

    rows = [
        ends("check", detectors.runaway, "partial"),
        ends("check", detectors.iteration_limit, "partial"),
        Transition("check", None, "talk"),
        Transition("talk", detectors.transient_provider, "check"),
        ends("talk", detectors.provider_error, "handed_off"),
        ends("talk", detectors.context_overflow, "handed_off"),
        Transition("talk", None, "read"),
        Transition("read", detectors.output_truncated, "check"),
        Transition("read", detectors.output_malformed, "check"),
        Transition("read", None, "file"),
        ends("file", guards.came_back("filed"), "completed"),
        Transition("file", guards.came_back("unclear"), "asking"),
        Transition("file", None, "done", ends="partial"),
        ends("asking", guards.expired, "cancelled"),
        Transition("asking", guards.replied, "check"),
    ]
    states = (
        StateSpec("check", effect=CHECK_BUDGETS, spends="steps"),
        StateSpec("talk", effect=CALL_MODEL),
        StateSpec("read", effect=PARSE_REPLY),
        StateSpec("file", effect=file, outcomes=("filed", "unclear")),
        StateSpec("asking", waits=True),
        StateSpec("done", final=True),
    )
    stops = [
        ends(spec.name, guard, how)
        for spec in states[:-1]
        for guard, how in ((guards.cancelled, "cancelled"), (guards.aborted, "aborted"))
    ]
    ordered = tuple(row for spec in states for row in (*stops, *rows) if row.source == spec.name)
    return Graph(states, ordered, "scratch", (detectors.STEPS, detectors.ITERATIONS), LOOP.first)
