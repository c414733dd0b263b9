"""``ReplaySettings``: what stored runs are replayed under, and what stays as their journals have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfsm.errors import ConfigurationError, JournalError
from agentfsm.journal.records import SealedRecord, is_kind, open_record
from agentfsm.journal.replay import Replay, replay
from agentfsm.loop.guardrails import AgentGuardrails, Behavior, change_guardrails
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.recovery_policy import RecoveryPolicy
from agentfsm.machine.graph import Graph

__all__ = ["ReplaySettings"]


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What runs are replayed under. Whatever is None stays as recorded.

    Attributes:
        graph: The graph; None for the recorded one, which must be that of a preset.
        policy: The recovery policy.
        guardrails: The limits.
        behavior: The behavior switches.
        limits: Single limits to change, by name; without ``guardrails``, in the recorded ones.
    """

    graph: Graph | None = None
    policy: RecoveryPolicy | None = None
    guardrails: AgentGuardrails | None = None
    behavior: Behavior | None = None
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])

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
            JournalError: It cannot be read, or no preset has its graph and ``graph`` is None.
        """
        guardrails = self.guardrails
        if guardrails is None and self.limits:
            guardrails = change_guardrails(open_record(records[0]).get("guardrails", {}), self.limits)
        return replay(
            records,
            self.graph or _recorded_graph(records),
            policy=self.policy,
            guardrails=guardrails,
            behavior=self.behavior,
        )


def _recorded_graph(records: Sequence[SealedRecord]) -> Graph:
    """The graph that a run's journal pins, if a preset has it.

    Raises:
        JournalError: None has it.
    """
    pins = [row for row in records if row.seq == 1 or is_kind(row, "run.migrated")]
    try:
        fingerprint = open_record(pins[-1])["graph"]["fingerprint"]
    except (LookupError, TypeError) as error:
        raise JournalError(f"record {pins[-1].seq if pins else 1} names no graph") from error
    graph = next((each.graph for each in PRESETS.values() if each.graph.fingerprint == fingerprint), None)
    if graph is None:
        raise JournalError("no preset has its graph: name the graph (--graph)")
    return graph
