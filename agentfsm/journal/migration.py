"""Migrations: which runs of an earlier graph may continue under a new one, and the checks for it.

A run's graph is identified by the names of its states and guards, and their order. An agent with a different graph
refuses the run unless a ``Migration`` admits it. Then the path so far is replayed on the new graph, guards included:
if every transition would have been the same, the run continues. Otherwise it continues only if the developer vouches
for it. A ``run.migrated`` record says which of the two it was, and pins the new graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from agentfsm.errors import ConfigurationError, GraphError, JournalGraphError
from agentfsm.journal.records import RenameMap, SealedRecord
from agentfsm.journal.rehydrate import RehydratedRun
from agentfsm.journal.replay import Replay, replay
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.stored_table import read_table
from agentfsm.machine.declaration import StateSpec, Transition
from agentfsm.machine.graph import Graph

_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}")


@dataclass(frozen=True)
class Migration:
    """Lets runs of an earlier graph continue on an agent's: ``Agent(..., graph=new, migrations=[Migration(old)])``.

    A run is admitted if a replay of its path so far on the new graph makes the same transitions. A migration from the
    agent's own graph can admit that its runs continue with an agent that asks people less (``approvals``).

    Attributes:
        old: The earlier graph; or its fingerprint, or the first 12 or more hex digits of it, as errors and
            ``agentfsm show`` print it; None for any graph.
        states: New names of its states, by old name, if they have changed.
        transitions: New ids of its transitions (``"post_llm.too_long": "post_llm.long_answer"``), if the names of
            their guards have changed.
        vouched: Whether you vouch for the path of the runs: they then continue in their current state, without a
            replay.
        approvals: Names of tools and hooks whose calls the runs may continue with although the agent requires less
            approval of them than the agent that the runs began with; those of a sub-agent as ``"researcher/pay"``.

    Raises:
        ConfigurationError: The text is not a fingerprint, two names would become the same, or you vouch for the
            runs of any graph.
    """

    old: Graph | str | None = None
    states: Mapping[str, str] = field(default_factory=dict[str, str])
    transitions: Mapping[str, str] = field(default_factory=dict[str, str])
    vouched: bool = False
    approvals: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(cast("object", self.approvals), str):
            raise ConfigurationError(f"approvals must be a tuple of names, such as ({self.approvals!r},)")
        if isinstance(self.old, str) and not _FINGERPRINT.fullmatch(self.old):
            raise ConfigurationError(f"{self.old!r} is not the fingerprint of a graph: 12 to 64 hex digits")
        if self.old is None and self.vouched:
            raise ConfigurationError(
                "vouched=True needs the graph that the runs are from; it cannot be used for any graph"
            )
        for renamed in (self.states, self.transitions):
            if len(set(renamed.values())) != len(renamed):
                raise ConfigurationError(f"two of {', '.join(map(str, renamed))} would have the same name")

    @property
    def rename_map(self) -> RenameMap:
        """The new names of states and transitions."""
        return RenameMap(self.states, self.transitions)

    def matches(self, fingerprint: str) -> bool:
        """Whether the migration applies to runs of the graph with a fingerprint."""
        if self.old is None:
            return True
        return fingerprint.startswith(self.old if isinstance(self.old, str) else self.old.fingerprint)

    def check(self, new: Graph) -> None:
        """Check that the states and transitions it names exist.

        Args:
            new: The graph under which runs are to continue.

        Raises:
            GraphError: The new graph, or the earlier one if it is given, has no such state or transition.
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
    """Migrate a run to another graph, if a declared migration admits it. Nothing is written.

    Args:
        records: The run's records.
        rehydrated: The run, rehydrated; its states are renamed in place.
        graph: The graph under which it is to continue.
        migrations: The declared migrations; the first one that matches the run's graph is used.

    Returns:
        The fields of the ``run.migrated`` record; empty if the run is on that graph already.

    Raises:
        JournalGraphError: The run may not continue; the error lists what differs between the graphs.
        JournalError: The journal cannot be read.
    """
    pinned, run = rehydrated.graph, rehydrated.run
    if pinned["fingerprint"] == graph.fingerprint:
        return {}
    declared = next((m for m in migrations if m.matches(pinned["fingerprint"])), None)
    if declared is None:
        raise _migration_error(rehydrated, graph, _migration_advice(records, rehydrated, graph))
    names = declared.rename_map
    if reason := _incompatibility(rehydrated, graph, names):
        raise _migration_error(rehydrated, graph, reason)
    replayed = Replay(0) if declared.vouched else replay(records, graph, rename_map=names)
    if not replayed.same:
        raise _migration_error(rehydrated, graph, _divergence_advice(replayed, rehydrated))
    names.rename(run)
    rehydrated.visited = {names.state(name) for name in rehydrated.visited}
    return {
        "from": pinned["fingerprint"],
        "graph": {"name": graph.name, "fingerprint": graph.fingerprint, **graph.table},
        "judged": "vouched" if declared.vouched else "replayed",
        "to": run.state,
        **({} if declared.vouched else {"moves": replayed.moves}),
        **names.to_record(),
    }


def _incompatibility(rehydrated: RehydratedRun, graph: Graph, rename_map: RenameMap) -> str:
    """Why the run's current state has no counterpart in a graph; an empty string if it has one."""
    old = rehydrated.run.state
    kinds = {name: (spec.waits, spec.final) for name, spec in rehydrated.table.states.items()}
    for name in rename_map.states:
        if name not in kinds:
            return f"the migration renames {name!r}, and the run's graph has no such state"
    try:
        spec = graph.spec(rename_map.state(old))
    except GraphError:
        return f"the run is in {old!r}, and the new graph has no such state"
    if kinds[old] != (spec.waits, spec.final):
        return f"the run is in {old!r}, and {str(spec.name)!r} of the new graph waits or ends where it does not"
    return ""


def _migration_advice(records: Sequence[SealedRecord], rehydrated: RehydratedRun, graph: Graph) -> str:
    """How the run can be made to continue under the graph."""
    migration = f"Migration({rehydrated.graph['fingerprint'][:12]!r})"
    if reason := _incompatibility(rehydrated, graph, RenameMap()):
        return f"{reason}; give its new name with Migration(..., states=...) or agentfsm resume --rename"
    replayed = replay(records, graph)
    if replayed.same:
        return (
            "its path so far would have been the same on the new graph: allow it to continue with "
            f"Agent(..., migrations=[{migration}]) or agentfsm resume --migrate"
        )
    return _divergence_advice(replayed, rehydrated)


def _divergence_advice(result: Replay, rehydrated: RehydratedRun) -> str:
    migration = f"Migration({rehydrated.graph['fingerprint'][:12]!r}, vouched=True)"
    first = result.divergences[0]
    return (
        f"its path would have been different on the new graph: record {first.seq} is {first.recorded}, and would be "
        f"{first.instead}; allow it to continue all the same with Agent(..., migrations=[{migration}]) or "
        "agentfsm resume --skip-path-check"
    )


def _migration_error(rehydrated: RehydratedRun, graph: Graph, reason: str) -> JournalGraphError:
    pinned = rehydrated.graph
    presets = [name for name, preset in PRESETS.items() if preset.graph.fingerprint == pinned["fingerprint"]]
    of_preset = f" of preset {presets[0]!r}" if len(presets) == 1 else ""
    return JournalGraphError(
        f"run {rehydrated.run.run_id!r} was written under graph {pinned['name']!r}{of_preset} "
        f"({pinned['fingerprint'][:12]}), and the agent runs graph {graph.name!r} ({graph.fingerprint[:12]}); "
        f"{reason}. Differences:",
        pinned_graph_diff(pinned, graph),
    )


def pinned_graph_diff(pinned: Mapping[str, Any], graph: Graph) -> tuple[str, ...]:
    """The differences between a pinned table and a graph, one line each."""
    table = read_table(pinned)
    rows = [row for spec in graph.states for row in graph.rows(spec.name)]
    lines: list[str] = []
    for part, old, new in (
        ("states", list(map(_format_state, table.states.values())), list(map(_format_state, graph.states))),
        ("transitions", list(map(_format_row, table.rows.values())), list(map(_format_row, rows))),
    ):
        lines += [f"- {row}" for row in old if row not in new]
        lines += [f"+ {row}" for row in new if row not in old]
        if not lines and old != new:
            lines.append(f"the {part} are in another order")
    return tuple(lines)


def _format_state(spec: StateSpec) -> str:
    words = (spec.name, "waits" * spec.waits, "final" * spec.final, _format_counters("spends", spec.spends))
    return " ".join(word for word in words if word)


def _format_row(row: Transition) -> str:
    parts = (row.ends, _format_counters("spends", row.spends), _format_counters("refills", row.refills))
    details = ", ".join(part for part in parts if part)
    return str(row) + (f" ({details})" if details else "")


def _format_counters(verb: str, names: Sequence[str]) -> str:
    return f"{verb} {', '.join(names)}" if names else ""
