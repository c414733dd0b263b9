"""Migrations: which runs of an earlier graph may continue under a new one, and the checks for it.

A run's graph is identified by the names of its states and guards, and their order. An agent with a different graph
refuses the run unless a ``Migration`` admits it. Then the path so far is replayed on the new graph, guards included:
if every transition would have been the same, the run continues. Otherwise somebody can vouch for it. Which of the
two it was is recorded as ``run.migrated``, with the new graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfsm.errors import ConfigurationError, GraphError, JournalGraphError
from agentfsm.journal.records import RenameMap, SealedRecord
from agentfsm.journal.replay import RehydratedRun, Replay, replay
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.graph import Graph

__all__ = ["Migration", "migrate", "pinned_graph_diff"]

_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True)
class Migration:
    """Lets runs of an earlier graph go on under an agent's: ``Agent(..., graph=new, migrations=[Migration(old)])``.

    A run is taken where a replay of its path so far on the new graph makes the same moves.

    Attributes:
        old: The earlier graph; or its fingerprint, or the first 12 or more hex digits of that, as errors and
            ``agentfsm show`` tell it; None for any graph.
        states: New names of its states, by old name, where they have changed.
        transitions: New ids of its transitions (``"post_llm.too_long": "post_llm.long_answer"``), where
            their guards' names have changed.
        vouched: Whether you vouch for the runs' past: they are then taken with no replay, in the state in
            which they are.

    Raises:
        ConfigurationError: It is no fingerprint, or you vouch for the runs of any graph.
    """

    old: Graph | str | None = None
    states: Mapping[str, str] = field(default_factory=dict[str, str])
    transitions: Mapping[str, str] = field(default_factory=dict[str, str])
    vouched: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.old, str) and not _FINGERPRINT.fullmatch(self.old):
            raise ConfigurationError(f"{self.old!r} is no fingerprint of a graph: 12 to 64 hex digits")
        if self.old is None and self.vouched:
            raise ConfigurationError("nobody can vouch for the runs of any graph: name the one that they are from")
        for what in (self.states, self.transitions):
            if len(set(what.values())) != len(what):
                raise ConfigurationError(f"two of {', '.join(map(str, what))} would have one name")

    @property
    def rename_map(self) -> RenameMap:
        """The names that change."""
        return RenameMap(self.states, self.transitions)

    def matches(self, fingerprint: str) -> bool:
        """Whether it is for runs of a graph."""
        if self.old is None:
            return True
        return fingerprint.startswith(self.old if isinstance(self.old, str) else self.old.fingerprint)

    def check(self, new: Graph) -> None:
        """Make sure that what it names is there.

        Args:
            new: The graph under which runs are to go on.

        Raises:
            GraphError: A state or a transition that it names is in none of the graphs.
        """
        for old, name in self.states.items():
            new.spec(name)
            if isinstance(self.old, Graph):
                self.old.spec(old)
        for old, transition in self.transitions.items():
            new.transition(transition)
            if isinstance(self.old, Graph):
                self.old.transition(old)


def migrate(
    records: Sequence[SealedRecord], rehydrated: RehydratedRun, graph: Graph, migrations: Sequence[Migration]
) -> dict[str, Any]:
    """Take a run over to another graph, if its journal and somebody's word allow it. Nothing is written.

    Args:
        records: Its journal.
        rehydrated: What its records tell; its run has the new names behind this.
        graph: The graph.
        migrations: What is declared; the first one for runs of its graph counts.

    Returns:
        What the record of it says; empty where the run is on that graph already.

    Raises:
        JournalGraphError: It is not allowed; the error lists what differs between the graphs.
        JournalError: The journal cannot be read.
    """
    pinned, run = rehydrated.graph, rehydrated.run
    if pinned["fingerprint"] == graph.fingerprint:
        return {}
    declared = next((m for m in migrations if m.matches(pinned["fingerprint"])), None)
    if declared is None:
        raise _migration_error(rehydrated, graph, _migration_advice(records, rehydrated, graph))
    names = declared.rename_map
    if why := _incompatibility(rehydrated, graph, names):
        raise _migration_error(rehydrated, graph, why)
    told = Replay(0) if declared.vouched else replay(records, graph, rename_map=names)
    if not told.same:
        raise _migration_error(rehydrated, graph, _divergence_advice(told, rehydrated))
    names.rename(run)
    rehydrated.visited = {names.state(name) for name in rehydrated.visited}
    return {
        "from": pinned["fingerprint"],
        "graph": {"name": graph.name, "fingerprint": graph.fingerprint, **graph.table},
        "judged": "vouched" if declared.vouched else "replayed",
        "to": run.state,
        **({} if declared.vouched else {"moves": told.moves}),
        **names.to_record(),
    }


def _incompatibility(rehydrated: RehydratedRun, graph: Graph, rename_map: RenameMap) -> str:
    """Why there is no state there in which the run could be, or wait, as it does; an empty string where there is."""
    old = rehydrated.run.state
    known = {name: (waits, final) for name, waits, final, _ in rehydrated.graph["states"]}
    for name in rename_map.states:
        if name not in known:
            return f"the migration renames {name!r}, and the run's graph has no such state"
    try:
        spec = graph.spec(rename_map.state(old))
    except GraphError:
        return f"the run is in {old!r}, and there is no such state there"
    if known[old] != (spec.waits, spec.final):
        return f"the run is in {old!r}, and {str(spec.name)!r} there is a state of another kind"
    return ""


def _migration_advice(records: Sequence[SealedRecord], rehydrated: RehydratedRun, graph: Graph) -> str:
    """What somebody can do who wants the run to go on under the graph."""
    way = f"Migration({rehydrated.graph['fingerprint'][:12]!r})"
    if why := _incompatibility(rehydrated, graph, RenameMap()):
        return f"{why}; Migration(..., states=...), or agentfsm resume --rename, says what it is called"
    told = replay(records, graph)
    if told.same:
        how = f"Agent(..., migrations=[{way}]), or agentfsm resume --migrate, lets it go on"
        return f"its path so far would have been the same there: {how}"
    return _divergence_advice(told, rehydrated)


def _divergence_advice(result: Replay, rehydrated: RehydratedRun) -> str:
    way = f"Migration({rehydrated.graph['fingerprint'][:12]!r}, vouched=True)"
    return (
        f"its path would have been another there: record {result.seq} is {result.recorded}, and would be {result.instead}; "
        f"Agent(..., migrations=[{way}]), or agentfsm resume --skip-path-check, lets it go on all the same"
    )


def _migration_error(rehydrated: RehydratedRun, graph: Graph, reason: str) -> JournalGraphError:
    pinned = rehydrated.graph
    presets = [name for name, preset in PRESETS.items() if preset.graph.fingerprint == pinned["fingerprint"]]
    was = f"{pinned['name']!r}" + (f" of preset {presets[0]!r}" if len(presets) == 1 else "")
    return JournalGraphError(
        f"run {rehydrated.run.run_id!r} was written under graph {was} ({pinned['fingerprint'][:12]}), the agent runs graph "
        f"{graph.name!r} ({graph.fingerprint[:12]}); {reason}. What differs:",
        pinned_graph_diff(pinned, graph),
    )


def pinned_graph_diff(pinned: Mapping[str, list[list[object]]], graph: Graph) -> tuple[str, ...]:
    """What differs between a pinned table and a graph, a line each."""
    lines: list[str] = []
    for what in ("states", "transitions"):
        old = [_format_table_row(row) for row in pinned[what]]
        new = [_format_table_row(row) for row in graph.table[what]]
        lines += [f"- {row}" for row in old if row not in new]
        lines += [f"+ {row}" for row in new if row not in old]
        if not lines and old != new:
            lines.append(f"the {what} stand in another order")
    return tuple(lines)


def _format_table_row(row: list[object]) -> str:
    if len(row) == 4 and isinstance(row[1], bool):
        name, waits, final, spends = row
        return " ".join(str(part) for part in (name, "waits" * bool(waits), "final" * bool(final), spends) if part)
    source, guard, target, spends = row
    return f"{source}.{guard} -> {target}" + (f" (spends {spends})" if spends else "")
