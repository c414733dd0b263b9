"""What is to be done about runs and activations whose worker died, decided from what the store says; nothing awaits.

The store knows which owners live: a run that is running and has no owner was cut off. An engine does not know it: an
activation that was delivered to a process that died stays unfinished until somebody settles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentfsm.journal.load import StoredRequest
from agentfsm.journal.records import SealedRecord, is_kind
from agentfsm.journal.store import Head
from agentfsm.loop.canonical_json import decode
from agentfsm.workers.waker import Activation

__all__ = ["StaleAction", "attempts_without_progress", "due_at", "is_cut_off", "stale_action"]

StaleAction = Literal["leave", "redeliver", "drop", "wake"]
"""Leave it, deliver it again, finish it, or finish it and wake its run in the epoch in which that is now."""

_REPEATED_KINDS = ("run.resumed", "run.migrated", "effect.intent")
"""The kinds of records that each attempt at the same effect writes again."""


def is_cut_off(head: Head) -> bool:
    """Whether a run was begun and then left by its owner in the middle."""
    return head.status == "running" and head.owner is None and head.seq > 0


def stale_action(activation: Activation, head: Head | None) -> StaleAction:
    """What to do about an activation that was delivered a while ago and is not finished.

    Args:
        activation: The activation.
        head: The head of its run now, or None if the store does not have it.
    """
    if head is None or not head.seq:  # the run has not begun
        owned = head is not None and head.owner is not None
        return "leave" if owned else "redeliver"
    if activation.epoch == 0:  # it did begin
        return "leave" if head.owner is not None else _after_death(head)
    if head.epoch == activation.epoch:  # nobody has acquired the run since
        return "drop" if head.status == "finished" else "redeliver"
    at_work = head.owner is not None and head.epoch == activation.epoch + 1
    return "leave" if at_work else _after_death(head)


def _after_death(head: Head) -> StaleAction:
    """What to do once a worker that had acquired a run has died: a run that is cut off is found by other means."""
    return "wake" if head.status == "suspended" and head.owner is None else "drop"


def due_at(request: StoredRequest) -> float:
    """When a request is to be escalated or expires, whichever comes first, in seconds since the epoch."""
    escalates = None if request.quorum is None else request.quorum.escalates_at
    return min(float("inf") if at is None else at for at in (request.expires_at, escalates))


def attempts_without_progress(records: Sequence[SealedRecord], head: Head) -> int:
    """How often a run was tried at the point where it was cut off.

    Args:
        records: The run's records.
        head: Its head.
    """
    for record in reversed(records):
        if not any(is_kind(record, kind) for kind in _REPEATED_KINDS):
            return head.epoch - int(decode(record.body)["epoch"]) + 1
    return head.epoch
