"""How a run that was put aside, or cut off, goes on: from its signed record, or from the host's store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentfsm.core.state import RunState
from agentfsm.core.suspension import SuspensionRecord, check_reply, open_record
from agentfsm.errors import (
    ConfigurationError,
    RecordExpiredError,
    RecordUsedError,
    ReplyError,
)
from agentfsm.runtime.context import Parts
from agentfsm.runtime.errand import Errand
from agentfsm.runtime.replies import Answer, person_reply
from agentfsm.runtime.run import Run

if TYPE_CHECKING:
    from agentfsm.journal.resume import Resumable
    from agentfsm.journal.store import Store

__all__ = ["as_record", "from_store", "is_run_id", "on_record", "state_of", "store_of", "taken_up"]


def store_of(parts: Parts) -> Store:
    """The host's store.

    Raises:
        ConfigurationError: The host has none.
    """
    store = parts.host.store
    if store is None:
        raise ConfigurationError("the agent's host has no store: Host(store=SqliteStore('runs.db'))")
    return store


def taken_up(parts: Parts, run_id: str) -> Resumable:
    """A run as its store has it.

    Raises:
        StoreError: The store does not have it, or cannot be read.
        JournalGraphError: It belongs to another graph.
    """
    from agentfsm.journal.resume import take_up  # the journal loads when a run comes from a store

    return take_up(store_of(parts), run_id, parts.machine.graph)


def from_store(parts: Parts, run_id: str, reply: Answer | None) -> Run:
    """A run of the store, going on with a reply, or with none where it was cut off.

    Raises:
        RecordError: The reply does not fit, or comes too late.
    """
    found = taken_up(parts, run_id)
    expires = found.taken_up.expires_at
    if found.suspended is None:
        if reply is not None:
            raise ReplyError(f"run {run_id!r} was cut off and waits for nobody: resume it without a reply")
        first = found.run.steps == 1
        prompt = found.run.messages[-1].content if first and found.run.messages else ""
        return Run(parts, found.run, Errand(prompt, taken_up=found.taken_up))
    if expires is not None and parts.host.clock.time() > expires:
        raise RecordExpiredError(f"nobody answered in time; end the run with agent.dismiss({run_id!r})")
    answer = person_reply("" if reply is None else reply)
    check_reply(found.taken_up.kind, answer)
    return Run(parts, found.run, Errand(reply=answer, taken_up=found.taken_up))


def on_record(parts: Parts, record: SuspensionRecord, state: RunState, errand: Errand) -> Run:
    """A run that a record holds; where the host's store has it too, the store is where it goes on."""
    store = parts.host.store
    if store is None or store.head(record.run_id) is None:
        return Run(parts, state, errand)
    found = taken_up(parts, record.run_id)
    if found.suspended != record.record_id:
        raise RecordUsedError(f"run {record.run_id!r} has gone on since record {record.record_id!r} was written")
    return Run(parts, found.run, replace(errand, taken_up=found.taken_up))


def state_of(parts: Parts, record: SuspensionRecord, late: bool = False) -> RunState:
    """What a record's run knows.

    Args:
        parts: The agent's.
        record: The record.
        late: Whether an expired one is taken all the same.

    Raises:
        RecordError: The record is not good.
    """
    host = parts.host
    state = open_record(
        record, graph=parts.machine.graph.fingerprint, secret=host.secret, now=host.clock.time(), late=late
    )
    if host.used.used(record.record_id):
        raise RecordUsedError(f"record {record.record_id!r} was resumed already; each is good for one reply")
    return state


def as_record(record: SuspensionRecord | str) -> SuspensionRecord:
    """A record, from its JSON text where it is one."""
    return SuspensionRecord.from_json(record) if isinstance(record, str) else record


def is_run_id(record: SuspensionRecord | str) -> bool:
    """Whether a text is a run's id, and no record."""
    return isinstance(record, str) and not record.lstrip().startswith("{")
