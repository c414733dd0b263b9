"""Promela for the SPIN model checker: a graph as a transition system, with its properties.

Run the model with ``spin -search -a model.pml``. The first property says that every run ends, or reaches a state that
waits, again and again; ``-ltl property_1`` selects one of those that were asked for. Each row of the graph is one
option of the model's loop, or several where a counter can take several values. A guard may hold or not at any time,
unless assumptions say when it can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product as combinations
from typing import TYPE_CHECKING

from agentfsm.diagrams.style import Theme
from agentfsm.diagrams.view import View
from agentfsm.machine.graph import Graph, Transition

if TYPE_CHECKING:
    from agentfsm.analysis.assumptions import Assumptions, CounterUpdate, NumericCondition
    from agentfsm.analysis.liveness import ExportedModel
    from agentfsm.analysis.safety_properties import SafetyProperty


def promela(view: View, theme: Theme = "auto") -> str:
    """A graph as Promela, with the assumptions of ``agentfsm check`` and its default limits. Themes have no effect."""
    from agentfsm.analysis import exported_model  # loads the model checker

    return promela_model(view.graph, exported_model(view.graph))


def promela_model(
    graph: Graph, counters: Assumptions | ExportedModel, properties: Sequence[SafetyProperty] = ()
) -> str:
    """A graph as a Promela model, with a formula for each property: ``spin -search -a -ltl property_1 loop.pml``.

    ::

        model = promela_model(LOOP, exported_model(LOOP, AgentGuardrails(max_iterations=2)))

    Args:
        graph: The graph.
        counters: Its counters and assumptions about its guards: ``agentfsm.analysis.exported_model`` or
            ``agentfsm.analysis.Assumptions``.
        properties: Properties of its runs.
    """
    return "\n".join(_model(graph, counters, properties)) + "\n"


def _model(graph: Graph, model: Assumptions | ExportedModel, properties: Sequence[SafetyProperty]) -> Iterator[str]:
    rests = [f"state == {state_constant(s.name)}" for s in graph.states if s.final or s.waits]
    yield (
        f"/* {_comment(graph.name)}: {len(graph.states)} states, {len(graph.transitions)} transitions. "
        "Rows are evaluated in order; a guard may hold or not unless a counter decides. */"
    )
    yield f"mtype = {{ {', '.join(state_constant(s.name) for s in graph.states)} }};"
    yield f"mtype state = {state_constant(graph.initial)};"
    yield "short row = -1; /* the place of the row taken last in the table, from 0 */"
    for name, value in model.initial_values().items():
        yield f"short c_{ascii_identifier(name)} = {value}; hidden short n_{ascii_identifier(name)};"
    automata = [each.automaton(graph) for each in properties]
    for number, (initial, _) in enumerate(automata, 1):
        yield f"byte p_{number} = {initial}; /* {_VIOLATED} once property_{number} is violated */"
    yield f"#define RESTS ({' || '.join(rests)})"
    yield ""
    yield "active proctype run_of_graph()"
    yield "{"
    yield "  do"
    source = ""
    places = {id(row): place for place, row in enumerate(graph.transitions)}
    orders = {id(row): order for spec in graph.states for order, row in enumerate(graph.rows(spec.name), 1)}
    for row, option in step_options(graph, model):
        if row.source != source:
            source, spec = row.source, graph.spec(row.source)
            notes = [spec.name, spec.note, f"spends {', '.join(spec.spends)}" if spec.spends else ""]
            yield f"  /* {'; '.join(_comment(note) for note in notes if note)} */"
        spends = f", spends {', '.join(row.spends)}" if row.spends else ""
        follows = "".join(_follow(number, step, places[id(row)]) for number, (_, step) in enumerate(automata, 1))
        option = f"{option.removesuffix(' }')}{follows} }}"
        yield f"  :: {option} /* {orders[id(row)]} {row.id}{spends} */"
    yield "  :: else -> break"
    yield "  od"
    yield "}"
    yield ""
    yield "ltl ends_or_waits { []<>RESTS }"
    for number, each in enumerate(properties, 1):
        yield f"ltl property_{number} {{ [](p_{number} != {_VIOLATED}) }} /* {_comment(each.text)} */"


_VIOLATED = 2


def _follow(number: int, step: Callable[[int, int], int], place: int) -> str:
    """What taking a row does to the automaton of a property; nothing is written if that is nothing."""
    after = [step(0, place), step(1, place)]
    if after == [0, 1]:
        return ""
    name = f"p_{number}"
    return f"; {name} = ({name} == 0 -> {after[0]} : ({name} == 1 -> {after[1]} : {_VIOLATED}))"


def step_options(graph: Graph, counters: Assumptions | ExportedModel) -> Iterator[tuple[Transition, str]]:
    """Each row with one option of the model's loop for each of its results, in the order of the table.

    An option reads and sets ``state``, ``row`` and the counters ``c_...``, with ``n_...`` as scratch variables.
    """
    places = {id(t): i for i, t in enumerate(graph.transitions)}
    for spec in graph.states:
        earlier: list[str] = []  # conditions under which no earlier row of the state certainly holds
        for row in graph.rows(spec.name):
            guard = [f"state == {state_constant(spec.name)}", *earlier]
            guard += [_condition_text(each) for each in counters.may_conditions(row)]
            forgotten = "".join(_forget(name, when) for name, when in counters.forgotten(row).items())
            for effect in _effects(counters.counter_updates(row)):
                move = f"row = {places[id(row)]}; state = {state_constant(row.target)}"
                yield row, f"d_step {{ {' && '.join(guard)} -> {effect}{forgotten}{move} }}"
            musts = [_condition_text(each) for each in counters.must_conditions(row)]
            if musts:
                earlier.append(f"!({' || '.join(musts)})")


def _forget(name: str, when: NumericCondition) -> str:
    variable = f"c_{ascii_identifier(name)}"
    return f"{variable} = 0; " if when == ((),) else f"{variable} = ({_condition_text(when)} -> 0 : {variable}); "


def state_constant(name: str) -> str:
    """The constant that stands for a state."""
    return f"S_{ascii_identifier(name)}"


def ascii_identifier(name: str) -> str:
    """A name with its non-ASCII characters written as numbers, because Promela knows ASCII names only."""
    return "".join(char if char.isascii() else f"_{ord(char):x}" for char in name)


def _condition_text(condition: NumericCondition) -> str:
    alternatives = [
        f"({' && '.join(f'c_{ascii_identifier(name)} {op} {value}' for name, op, value in tests) or 'true'})"
        for tests in condition
    ]
    return f"({' || '.join(alternatives) or 'false'})"


def _effects(updates: Sequence[CounterUpdate]) -> Iterator[str]:
    """The assignments of a row, one text for each choice of values: all read the old values, then all are set."""
    choices = [range(len(values) or 1) for _, _, cases in updates for _, _, values in cases]
    for chosen in combinations(*choices):
        picks = iter(chosen)
        names = [ascii_identifier(name) for name, _, _ in updates]
        sets = [f"n_{name} = {_new_value(update, picks)}; " for name, update in zip(names, updates, strict=True)]
        yield "".join([*sets, *(f"c_{name} = n_{name}; " for name in names)])


def _new_value(update: CounterUpdate, picks: Iterator[int]) -> str:
    """The new value of a counter as one expression."""
    name, limit, cases = ascii_identifier(update[0]), update[1], update[2]
    branches: list[tuple[str, str]] = []
    for condition, add, values in cases:
        pick = next(picks)
        branches.append((_condition_text(condition), str(values[pick]) if values else _added(name, add, limit)))
    text = f"c_{name}"
    for condition_text, value in reversed(branches):
        text = f"({condition_text} -> {value} : {text})"
    return text


def _added(name: str, amount: int, limit: int) -> str:
    if not amount:
        return f"c_{name}"
    total = f"c_{name} + {amount}" if amount > 0 else f"c_{name} - {-amount}"
    return f"(({total}) > {limit} -> {limit} : (({total}) < 0 -> 0 : ({total})))"


def _comment(text: str) -> str:
    return " ".join(text.split()).replace("*/", "* /").replace("/*", "/ *")
