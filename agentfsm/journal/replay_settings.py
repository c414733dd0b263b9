"""``ReplaySettings``: what stored runs are replayed under, and what stays as their journals have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfsm.errors import ConfigurationError, GraphError, JournalError
from agentfsm.journal.records import SealedRecord, is_kind, open_record
from agentfsm.journal.replay import Replay, replay
from agentfsm.loop.approval_rows import with_votes
from agentfsm.loop.guardrails import AgentGuardrails, Behavior, change_guardrails
from agentfsm.loop.guards import vote_recorded
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.recovery_policy import RecoveryPolicy
from agentfsm.loop.stored_table import read_table
from agentfsm.machine.graph import Graph


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What runs are replayed under. Whatever is None stays as recorded.

    Attributes:
        graph: The graph; None for the recorded one, which must be that of a preset.
        policy: The recovery policy.
        guardrails: The limits.
        behavior: The behavior switches.
        limits: Single limits to change, by name; without ``guardrails``, in the recorded ones.
        known_graphs: Graphs that runs may have been recorded on, besides those of the presets.
    """

    graph: Graph | None = None
    policy: RecoveryPolicy | None = None
    guardrails: AgentGuardrails | None = None
    behavior: Behavior | None = None
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    known_graphs: Sequence[Graph] = ()

    @classmethod
    def of_preset(
        cls,
        name: str | None,
        *,
        graph: Graph | None = None,
        policy: str | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> ReplaySettings:
        """The settings of a preset, or the recorded ones, with a part changed.

        Args:
            name: The preset; None for what is recorded.
            graph: A graph instead of the preset's.
            policy: The preset whose recovery policy is used instead.
            limits: Single limits to change.

        Raises:
            ConfigurationError: There is no such preset.
            pydantic.ValidationError: There is no such limit, or a value is out of range.
        """
        for each in (name, policy):
            if each is not None and each not in PRESETS:
                raise ConfigurationError(f"there is no preset {each!r}; there are: {', '.join(PRESETS)}")
        preset = None if name is None else PRESETS[name]
        changed: Mapping[str, Any] = {} if limits is None else limits
        change_guardrails(AgentGuardrails(), changed)  # names that there are not are refused before anything is read
        return cls(
            graph=graph or (None if preset is None else preset.graph),
            policy=PRESETS[policy].policy if policy is not None else None if preset is None else preset.policy,
            guardrails=None if preset is None else change_guardrails(preset.guardrails, changed),
            behavior=None if preset is None else preset.behavior,
            limits=changed,
        )

    def replay(self, records: Sequence[SealedRecord]) -> Replay:
        """How a run would have gone, on its recorded outcomes.

        Args:
            records: The run's journal, from its first record.

        Raises:
            JournalError: It cannot be read; ``graph`` is None and its graph is neither known nor that of a preset; or
                it counts votes, and ``graph`` cannot.
        """
        guardrails = self.guardrails
        if guardrails is None and self.limits:
            guardrails = change_guardrails(open_record(records[0]).get("guardrails", {}), self.limits)
        return replay(
            records,
            self._graph_for(records),
            policy=self.policy,
            guardrails=guardrails,
            behavior=self.behavior,
        )

    def _graph_for(self, records: Sequence[SealedRecord]) -> Graph:
        """The graph for a run: one that counts votes, as an agent would have made it, where the recorded one does."""
        pins = [row for row in records if row.seq == 1 or is_kind(row, "run.migrated")]
        try:
            pinned = open_record(pins[-1])["graph"]
            fingerprint, counts_votes = pinned["fingerprint"], _counts_votes(pinned)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise JournalError(f"record {pins[-1].seq if pins else 1} names no graph") from error
        if self.graph is not None:
            try:
                return with_votes(self.graph) if counts_votes else self.graph
            except GraphError as error:
                raise JournalError(f"the run counts votes, and graph {self.graph.name!r} cannot: {error}") from error
        for each in (*(preset.graph for preset in PRESETS.values()), *self.known_graphs):
            graph = with_votes(each) if counts_votes else each
            if graph.fingerprint == fingerprint:
                return graph
        raise JournalError("its graph is not known, and no preset has it: name the graph")


def _counts_votes(pinned: Mapping[str, Any]) -> bool:
    """Whether a pinned graph has a row that counts votes."""
    return any(row.name == vote_recorded.__name__ for row in read_table(pinned).rows.values())
