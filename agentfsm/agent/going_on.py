"""How a run that was put aside, or cut off, goes on: from its signed record, or from the host's store."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentfsm.core.state import PersonReply, RunState
from agentfsm.core.suspension import SuspensionRecord, check_reply, open_record
from agentfsm.errors import (
    ConfigurationError,
    RecordExpiredError,
    RecordFormatError,
    RecordUsedError,
    ReplyError,
    StaleLease,
    StaleReplyError,
)
from agentfsm.runtime.context import Parts
from agentfsm.runtime.errand import Errand
from agentfsm.runtime.replies import Answer, person_reply
from agentfsm.runtime.run import Run

if TYPE_CHECKING:
    from agentfsm.journal.resume import Resumable
    from agentfsm.journal.store import Store

__all__ = ["Reply", "as_record", "dismissed", "is_run_id", "resumed", "state_of", "store_of", "taken_up"]

_DIGITS = 12
"""How many hex digits of a record's hash are enough to name it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What somebody replies to a run.

    Attributes:
        answer: The answer, or None.
        to: The hash of the record that they were shown, or at least its first 12 hex digits; empty where that
            is not known.
        by: Who they are, or an empty string.
    """

    answer: Answer | None
    to: str = ""
    by: str = ""

    def person(self, kind: str) -> PersonReply:
        """The answer as the loop keeps it.

        Args:
            kind: What the run waits for.

        Raises:
            RecordError: It does not fit.
        """
        reply = replace(person_reply("" if self.answer is None else self.answer), by=self.by)
        check_reply(kind, reply)
        return reply

    def check(self, found: Resumable) -> None:
        """Make sure that it is to what a run asks by now.

        Raises:
            StaleReplyError: It is to something else.
        """
        asked, waiting = found.taken_up.asked, found.run.waiting
        if not self.to or asked is None or waiting is None:
            return
        if len(self.to) >= _DIGITS and asked[1].startswith(self.to):
            return
        about = f"{waiting.tool} {json.dumps(dict(waiting.arguments), default=str)}" if waiting.tool else ""
        more = f" (its first {_DIGITS} digits or more are needed)" if len(self.to) < _DIGITS else ""
        raise StaleReplyError(
            f"the reply is to record {self.to[:_DIGITS]!r}{more}, and what run {found.run.run_id!r} asks now is record "
            f"{asked[0]} ({asked[1][:_DIGITS]}): {about or waiting.question}"
        )


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

    return take_up(store_of(parts), run_id, parts.machine.graph, parts.migrations)


def resumed(parts: Parts, record: SuspensionRecord | str, reply: Reply) -> Run:
    """The run of a record, or of the store, going on with a reply, or with none where it was cut off.

    Raises:
        RecordError: The record or the reply is not good.
        StoreError: The store does not have the run, or cannot be read.
        JournalGraphError: It belongs to another graph.
    """
    if is_run_id(record):
        return _from_store(parts, str(record), reply)
    opened = as_record(record)
    state = state_of(parts, opened)
    errand = Errand(record=opened, reply=reply.person(opened.kind))
    return _on_record(parts, opened, state, errand, reply)


def dismissed(parts: Parts, record: SuspensionRecord | str, reason: str) -> Run:
    """The run of a record, or of the store, ended without a reply.

    Raises:
        RecordError: The record is not good.
        StoreError: The store does not have the run, or cannot be read.
        JournalGraphError: It belongs to another graph.
    """
    if is_run_id(record):
        found = taken_up(parts, str(record))
        return Run(parts, found.run, Errand(dismiss=reason, taken_up=found.taken_up))
    opened = as_record(record)
    state = state_of(parts, opened, late=True)
    return _on_record(parts, opened, state, Errand(record=opened, dismiss=reason), Reply(None))


def _from_store(parts: Parts, run_id: str, reply: Reply) -> Run:
    found = taken_up(parts, run_id)
    expires = found.taken_up.expires_at
    if found.suspended is None:
        if reply.answer is not None:
            head = store_of(parts).head(run_id)
            if head is not None and head.owner is not None:  # somebody else was quicker to answer
                raise StaleLease(run_id, head.owner, "is being run")
            if head is not None and head.seq != found.taken_up.seq:
                raise StaleLease(run_id, None, "has moved on since it was read")
            raise ReplyError(f"run {run_id!r} was cut off and waits for nobody: resume it without a reply")
        first = found.run.steps == 1
        prompt = found.run.messages[-1].content if first and found.run.messages else ""
        return Run(parts, found.run, Errand(prompt, taken_up=found.taken_up))
    if expires is not None and parts.host.clock.time() > expires:
        raise RecordExpiredError(f"nobody answered in time; end the run with agent.dismiss({run_id!r})")
    reply.check(found)
    answer = reply.person(found.taken_up.kind)
    return Run(parts, found.run, Errand(reply=answer, taken_up=found.taken_up))


def _on_record(parts: Parts, record: SuspensionRecord, state: RunState, errand: Errand, reply: Reply) -> Run:
    """A run that a record holds; where the host's store has it too, the store is where it goes on."""
    store = parts.host.store
    if store is None or store.head(record.run_id) is None:
        if reply.to:
            raise ReplyError("no store keeps the run, so there is no record that the reply could be to: give no 'to'")
        return Run(parts, state, errand)
    found = taken_up(parts, record.run_id)
    if found.suspended != record.record_id:
        raise RecordUsedError(f"run {record.run_id!r} has gone on since record {record.record_id!r} was written")
    reply.check(found)
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
    host, graph = parts.host, parts.machine.graph.fingerprint
    stored = host.store is not None and host.store.head(record.run_id) is not None
    if stored and any(each.fits(record.graph) for each in parts.migrations):
        graph = record.graph  # whether the run may change its graph is judged from its journal
    state = open_record(record, graph=graph, secret=host.secret, now=host.clock.time(), late=late)
    if host.used.used(record.record_id):
        raise RecordUsedError(f"record {record.record_id!r} was resumed already; each is good for one reply")
    return state


def as_record(record: SuspensionRecord | str) -> SuspensionRecord:
    """A record, from its JSON text where it is one.

    Raises:
        RecordFormatError: It is neither.
    """
    if isinstance(record, SuspensionRecord):
        return record
    if not isinstance(record, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise RecordFormatError(f"a record is a SuspensionRecord or its JSON text, not {type(record).__name__}")
    return SuspensionRecord.from_json(record)


def is_run_id(record: SuspensionRecord | str) -> bool:
    """Whether a text is a run's id, and no record."""
    return isinstance(record, str) and not record.lstrip().startswith("{")
