"""What a driver is sent out with, and what a journal says of that."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from agentfsm.core.fold import apply
from agentfsm.core.outcomes import Answered, Outcome
from agentfsm.core.state import PersonReply, RunState
from agentfsm.core.suspension import SuspensionRecord
from agentfsm.errors import NoTransitionError
from agentfsm.machine.engine import Machine
from agentfsm.runtime.context import Parts
from agentfsm.runtime.recorder import Beginning, TakenUp

__all__ = ["Errand", "beginning", "moves", "refuse_what_moves_nothing", "resumed"]


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


def resumed(errand: Errand) -> dict[str, Any]:
    """What a record says of a run that somebody takes up: from what, and which record is answered."""
    taken_up = errand.taken_up
    if taken_up is None:
        return {}
    if errand.reply is None or taken_up.asked is None:
        return {"from": taken_up.kind}
    seq, digest = taken_up.asked
    return {"from": taken_up.kind, "to": {"seq": seq, "hash": digest}}


def moves(machine: Machine, run: RunState, outcome: Outcome) -> bool:
    """Whether a run that waits would go on with an outcome; the run itself stays as it is.

    Args:
        machine: Its graph, compiled.
        run: The run.
        outcome: What would come from outside.
    """
    trial = copy.copy(run)
    trial.messages, trial.recent_calls = list(run.messages), list(run.recent_calls)
    trial.batch = [copy.copy(call) for call in run.batch]
    trial.behind, trial.notes = list(run.behind), dict(run.notes)
    trial.failure_attempts, trial.call_failures = dict(run.failure_attempts), dict(run.call_failures)
    apply(trial, outcome)
    return machine.would_move(trial)


def refuse_what_moves_nothing(machine: Machine, run: RunState, outcome: Outcome) -> None:
    """Make sure that a run that waits would go on with an outcome, before anything is done about it.

    Raises:
        NoTransitionError: The graph has no row for it; nothing was changed, and no record was used.
    """
    if not moves(machine, run, outcome):
        what = outcome.reply.kind if isinstance(outcome, Answered) else type(outcome).__name__.lower()
        rows = ", ".join(row.name for row in machine.graph.rows(run.state))
        raise NoTransitionError(
            f"run {run.run_id!r} waits in {str(run.state)!r}, and no row there takes {what!r} (rows: {rows}); it waits "
            "as before, and its record is unused: add a row to the graph"
        )
