"""A graph's table as a journal stored it: its states and rows, without the code of guards and effects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from agentfsm.loop.outcomes import (
    BUILT_IN_EFFECTS,
    CALL_MODEL,
    CHECK_BUDGETS,
    CHOOSE_RECOVERY,
    JUDGE_RESULTS,
    PARSE_REPLY,
    RUN_CALLS,
)
from agentfsm.machine.declaration import OTHERWISE, EffectSpec, Guard, State, StateSpec, Transition, extends_limit


@dataclass(frozen=True, slots=True)
class StoredTable:
    """The states and rows of a stored table.

    Attributes:
        states: The states by name, the initial one first.
        rows: The rows by id, those of each state in order. Their guards have names and cannot be called.
        places: The place of each row among the rows of its state, from 0, by its id.
        names_endings: Whether the table says how runs end. Those of version 0.1.0 do not; what it did is filled in.
    """

    states: Mapping[str, StateSpec]
    rows: Mapping[str, Transition]
    places: Mapping[str, int]
    names_endings: bool

    @property
    def initial(self) -> StateSpec:
        """The state in which a run starts."""
        return next(iter(self.states.values()))


def read_table(table: Mapping[str, Any]) -> StoredTable:
    """A table as ``Graph.table`` has it, or as version 0.1.0 stored it.

    Raises:
        ValueError: It is not a table.
        LookupError: It is not a table.
        TypeError: It is not a table.
    """
    return _read_text(json.dumps(table))  # most runs of a store have the same table


@lru_cache(maxsize=16)
def _read_text(text: str) -> StoredTable:
    table: Mapping[str, Any] = json.loads(text)
    former = all(len(row) == 4 for row in (*table["states"], *table["transitions"]))
    states = {spec.name: spec for spec in map(_former_state if former else _state, table["states"])}
    rows: dict[str, Transition] = {}
    places: dict[str, int] = {}
    counts: dict[str, int] = {}
    for columns in table["transitions"]:
        row = _former_row(columns, states) if former else _row(columns)
        rows[row.id] = row
        places[row.id] = counts.get(row.source, 0)
        counts[row.source] = places[row.id] + 1
    return StoredTable(MappingProxyType(states), MappingProxyType(rows), MappingProxyType(places), not former)


def _state(columns: list[Any]) -> StateSpec:
    name, waits, final, spends, effect = columns
    return StateSpec(name, spends=spends, waits=waits, final=final, effect=_EFFECTS[effect])


_OWN_EFFECT = EffectSpec("custom")
"""Stands for a user function."""

_EFFECTS: Mapping[str, EffectSpec | None] = MappingProxyType({**BUILT_IN_EFFECTS, "custom": _OWN_EFFECT, "": None})


def _row(columns: list[Any]) -> Transition:
    source, guard, target, spends, refills, ends, extends = columns
    return Transition(source, _named_guard(guard, extends), target, spends, refills, ends)


def _named_guard(name: str, extends: bool) -> Guard | None:
    if name == OTHERWISE:
        return None

    def guard(run: object) -> object:
        raise TypeError(f"the guard {name!r} is known by its name only: a journal stores no code")

    guard.__name__ = guard.__qualname__ = name
    return extends_limit(guard) if extends else guard


# -- tables of version 0.1.0, which did not say what follows from the names -------------------------------

_FORMER_EFFECTS: Mapping[str, EffectSpec] = MappingProxyType(
    {
        State.PRE_STEP: CHECK_BUDGETS,
        State.CALL_LLM: CALL_MODEL,
        State.POST_LLM: PARSE_REPLY,
        State.DISPATCH_TOOL: RUN_CALLS,
        State.POST_TOOL: JUDGE_RESULTS,
        State.RECOVER: CHOOSE_RECOVERY,
    }
)

_FORMER_ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        "cancelled": "cancelled",
        "expired": "cancelled",
        "aborted": "aborted",
        "runaway": "partial",
        "stop": "partial",
        "declared_unable": "handed_off",
        "handoff": "handed_off",
    }
)

_FORMER_COUNTING: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "tool_calls": (("pending_calls",), ("pending_calls", "tool_retries")),
        "calls_pending": (("pending_calls",), ()),
        "retry_tool": (("tool_retries", "pending_calls"), ("pending_calls",)),
    }
)
"""What the rows with these guards spend and refill."""


def _former_state(columns: list[Any]) -> StateSpec:
    name, waits, final, spends = columns
    effect = None if waits or final else _FORMER_EFFECTS.get(name, _OWN_EFFECT)
    return StateSpec(name, spends="steps" if spends == "a step" else (), waits=waits, final=final, effect=effect)


def _former_row(columns: list[Any], states: Mapping[str, StateSpec]) -> Transition:
    source, guard, target, _ = columns
    spends, refills = _FORMER_COUNTING.get(guard, ((), ()))
    ends = _FORMER_ENDINGS.get(guard, "completed") if states[target].final else ""
    return Transition(source, _named_guard(guard, guard == "replied"), target, spends, refills, ends)
