"""What a driver is sent out with, and what a journal says of that."""

from __future__ import annotations

from dataclasses import dataclass

from agentfsm.core.state import PersonReply, RunState
from agentfsm.core.suspension import SuspensionRecord
from agentfsm.runtime.context import Parts
from agentfsm.runtime.recorder import Beginning, TakenUp

__all__ = ["Errand", "beginning"]


@dataclass(frozen=True, slots=True)
class Errand:
    """What a driver is sent out with, beside the run.

    Attributes:
        prompt: The user's message, where a run begins.
        record: The record that is resumed, or None.
        reply: The person's answer to it.
        dismiss: Why the run is to end unanswered, or None.
        taken_up: Where the run stood in the host's store, where it comes from there.
    """

    prompt: str = ""
    record: SuspensionRecord | None = None
    reply: PersonReply | None = None
    dismiss: str | None = None
    taken_up: TakenUp | None = None

    @property
    def expires_at(self) -> float | None:
        """Until when the run can be answered, in seconds since the epoch."""
        if self.taken_up is not None:
            return self.taken_up.expires_at
        return None if self.record is None else self.record.expires_at


def beginning(parts: Parts, run: RunState, errand: Errand) -> Beginning:
    """What the first record of a run's journal says."""
    record = errand.record
    return Beginning(
        run.run_id,
        run.session_id,
        parts.machine.graph,
        run.guardrails,
        run.rules,
        parts.policy,
        tuple(run.messages) if record is None else (),
        None if record is None else record.state,
        parts.host.seed,
        {} if run.parent is None else {"run": run.parent[0], "call": run.parent[1]},
        tuple(t.spec for t in parts.tools.values()),
    )
