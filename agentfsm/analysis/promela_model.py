"""A table and its facts as a Promela model, for ``spin``: an oracle that shares no code with ours.

The model follows the declared counters where they are declared, and lets every other guard answer what it
likes. Beside the state it keeps ``row``, the place of the last row taken, and ``last``, the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as combinations

from agentfsm.analysis.assumptions import Assumptions, Condition, Counter, Update, parse_condition
from agentfsm.machine.graph import Graph, Transition

__all__ = ["options", "to_promela"]


def to_promela(graph: Graph, facts: Assumptions) -> str:
    """The model as text, with one claim: every run ends, or waits for a person.

    Run it with ``spin -search -a model.pml``.

    Raises:
        ConfigurationError: The facts speak of something that is not declared.
    """
    facts.check()
    lines = [f"/* {graph.name}: {len(graph.states)} states, {len(graph.transitions)} transitions */"]
    lines += [f"/* state {i}: {spec.name} */" for i, spec in enumerate(graph.states)]
    lines += [f"/* row {i}: {t} */" for i, t in enumerate(graph.transitions)]
    lines += ["byte state = 0;", "byte row = 255;", "byte last = 255;"]
    lines += [f"short c_{c.name} = {c.start}; hidden short n_{c.name};" for c in facts.counters]
    rests = [str(i) for i, s in enumerate(graph.states) if s.final or s.waits]
    lines.append(f"#define RESTS ({' || '.join(f'state == {i}' for i in rests)})")
    finals = " || ".join(f"state == {i}" for i, s in enumerate(graph.states) if s.final)
    lines += ["", "active proctype moves() {", "  do"]
    lines += [f"  :: {text}" for text in options(graph, facts)]
    lines += [f"  :: ({finals}) -> break", "  od", "}"]
    lines += ["", "ltl ends_or_waits { [] <> RESTS }"]
    return "\n".join(lines) + "\n"


def options(graph: Graph, facts: Assumptions) -> Iterator[str]:
    """One option of the model's loop for each row, and for each of its outcomes where there are several."""
    states = {spec.name: i for i, spec in enumerate(graph.states)}
    places = {id(t): i for i, t in enumerate(graph.transitions)}
    for spec in graph.states:
        before: list[str] = []
        for row in graph.rows(spec.name):
            known = [k for k in facts.guards if k.applies_to(row)]
            guard = [f"state == {states[spec.name]}", *before]
            guard += [_text(facts, parse_condition(k.may)) for k in known if k.may != "always"]
            for effect in _effects(facts, row):
                yield (
                    f"d_step {{ {' && '.join(guard)} -> {effect} last = row; row = {places[id(row)]}; "
                    f"state = {states[row.target]} }}"
                )
            musts = [_text(facts, parse_condition(k.must)) for k in known if k.must != "never"]
            if musts:
                before.append(f"!({' || '.join(musts)})")


def _text(facts: Assumptions, given: Condition) -> str:
    """A condition in Promela."""
    alternatives: list[str] = []
    for tests in given:
        parts = [f"c_{t.counter} {t.op} {facts.counter(t.counter).value(t.value)}" for t in tests]
        alternatives.append(f"({' && '.join(parts) or 'true'})")
    return f"({' || '.join(alternatives) or 'false'})"


def _effects(facts: Assumptions, row: Transition) -> Iterator[str]:
    """What a row does to the counters: all read the old values, then all are set. One text for each outcome."""
    changing: list[tuple[Counter, list[Update]]] = []
    for counter in facts.counters:
        fitting = [c for c in counter.updates if c.applies_to(row)]
        if any(c.add or c.to for c in fitting):
            changing.append((counter, fitting))
    choices = [range(len(c.to) or 1) for _, changes in changing for c in changes]
    for chosen in combinations(*choices):
        picks = iter(chosen)
        sets = [f"n_{counter.name} = {_value(facts, counter, changes, picks)};" for counter, changes in changing]
        sets += [f"c_{counter.name} = n_{counter.name};" for counter, _ in changing]
        yield " ".join(sets)


def _value(facts: Assumptions, counter: Counter, changes: list[Update], picks: Iterator[int]) -> str:
    """The new value of a counter as one expression: the first change whose condition holds."""
    parts: list[tuple[str, str]] = []
    for change in changes:
        pick = next(picks)
        new = str(counter.value(change.to[pick])) if change.to else _added(counter, change.add)
        parts.append((_text(facts, parse_condition(change.when)), new))
    text = f"c_{counter.name}"
    for when, new in reversed(parts):
        text = f"({when} -> {new} : {text})"
    return text


def _added(counter: Counter, amount: int) -> str:
    if not amount:
        return f"c_{counter.name}"
    sum_ = f"c_{counter.name} + {amount}" if amount > 0 else f"c_{counter.name} - {-amount}"
    return f"(({sum_}) > {counter.limit} -> {counter.limit} : (({sum_}) < 0 -> 0 : ({sum_})))"
