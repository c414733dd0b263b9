"""Runs the real machine on recorded outcomes: no model and no tool is called.

The guards are asked anew, so a run can be replayed under another graph, other limits or another policy, to
see whether, and at which record, it would have gone elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfsm.core.fold import apply
from agentfsm.core.follow import follow
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.outcomes import Cancelled, Recovered
from agentfsm.core.policy import RecoveryPolicy, choose
from agentfsm.errors import GraphError, JournalError, NoTransitionError
from agentfsm.journal.names import Names
from agentfsm.journal.outcomes import load_failure
from agentfsm.journal.records import Row, open_row
from agentfsm.journal.restore import Past
from agentfsm.machine.engine import Machine
from agentfsm.machine.graph import Graph

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """How a replay went.

    Attributes:
        moves: Moves that went as they are recorded.
        seq: The first record that would have been another, or None.
        recorded: Where that record went, as ``source.guard -> target``, in the names of the graph at hand.
        instead: Where the run would have gone.
        since: The record from which on guards were asked: 1, or the one where the run was last taken over to
            another graph with nothing but somebody's word for its path so far.
    """

    moves: int
    seq: int | None = None
    recorded: str = ""
    instead: str = ""
    since: int = 1

    @property
    def same(self) -> bool:
        """Whether everything went as it is recorded."""
        return self.seq is None


class _ElsewhereError(Exception):
    def __init__(self, recorded: str, instead: str) -> None:
        self.recorded, self.instead = recorded, instead


class _Again(Past):
    """A run that is replayed: like one that is restored, but its guards (and its policy) are asked."""

    def __init__(
        self,
        machine: Machine,
        policy: RecoveryPolicy | None,
        guardrails: AgentGuardrails | None,
        names: list[Names],
        since: int,
    ) -> None:
        super().__init__()
        self.moves = 0
        self._machine, self._policy, self._guardrails = machine, policy, guardrails
        self._names, self._since = names, since

    @property
    def _asking(self) -> bool:
        return self.seq >= self._since - 1

    def _created(self, body: dict[str, Any]) -> None:
        super()._created(body)
        if self._guardrails is not None:
            self.run.guardrails = self._guardrails
        if self._asking:
            for names in self._names:
                names.rename(self.run)

    def _migrate(self, body: dict[str, Any]) -> None:
        if self._asking and self.seq + 1 > self._since:  # the run has gone by the new names from the beginning
            self.graph = body["graph"]
            del self._names[0]
            return
        super()._migrate(body)
        if self._asking:
            for names in self._names:
                names.rename(self.run)

    def _transition(self, body: dict[str, Any]) -> None:
        if not self._asking:
            super()._transition(body)
            return
        run, row, target = self.run, body["transition"], body["to"]
        for names in self._names:
            row, target = names.transition(row), names.state(target)
        recorded = f"{row} -> {target}"
        if row.rpartition(".")[0] != run.state:
            raise JournalError(f"it leaves another state than {run.state!r}, where the run is")
        outcome = self._reader.read(body["out"])
        self._reader.results = {}
        if self._policy is not None and isinstance(outcome, Recovered):
            outcome = choose(self._policy, run, self.created.get("seed"))
        took, silence = body.get("us", (0, 0))
        apply(run, outcome, took / 1e6, silence / 1e6)
        if "cancel" in body:
            apply(run, Cancelled(body["cancel"]))
        if "aborted" in body and run.aborted is None:
            run.aborted = load_failure(body["aborted"])
        try:
            decision = self._machine.step(run)
        except (NoTransitionError, GraphError) as error:  # nothing holds, or the graph has no such state
            raise _ElsewhereError(recorded, str(error)) from None
        instead = f"{decision.transition.id} -> {decision.target}"
        if instead != recorded:
            raise _ElsewhereError(recorded, instead)
        follow(run, decision, self._machine.graph.spec(decision.target).final)
        self.outcome = outcome
        self.moves += 1


def replay(
    rows: Iterable[Row],
    graph: Graph,
    *,
    policy: RecoveryPolicy | None = None,
    guardrails: AgentGuardrails | None = None,
    names: Names | None = None,
) -> Replay:
    """Run the machine on the outcomes of a journal.

    Args:
        rows: The journal.
        graph: The graph to run on, with its guards.
        policy: Asked in place of the recorded decisions about failures, where given.
        guardrails: In place of the recorded limits, where given.
        names: What the states and transitions of the run's graph are called in this one, where that differs.

    Raises:
        JournalError: A record cannot be read, or a value in it was redacted.
    """
    journal = list(rows)
    since, renamed = _changes(journal)
    if names is not None:
        renamed.append(names)
    again = _Again(Machine(graph), policy, guardrails, renamed, since)
    for row in journal:
        try:
            again.add(row)
        except _ElsewhereError as elsewhere:
            return Replay(again.moves, row.seq, elsewhere.recorded, elsewhere.instead, since)
    if not again.seq:
        raise JournalError("the journal is empty")
    return Replay(again.moves, since=since)


def _changes(rows: Sequence[Row]) -> tuple[int, list[Names]]:
    """Where the run was last taken over on somebody's word, or 1; and the names that changed behind that."""
    since, names = 1, list[Names]()
    for row in rows:
        if '"kind":"run.migrated"' in row.body:
            body = open_row(row)
            if body["judged"] == "vouched":
                since, names = row.seq, []
            else:
                names.append(Names.read(body))
    return since, names
