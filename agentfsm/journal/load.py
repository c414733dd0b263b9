"""Loads a stored run: what it waits for, and everything needed to resume it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfsm.errors import JournalError, RunError, UnknownRunError
from agentfsm.journal.migration import Migration, migrate
from agentfsm.journal.records import Redacted, SealedRecord, is_kind, open_record
from agentfsm.journal.replay import rehydrate
from agentfsm.journal.store import Head, Store, consistent_read
from agentfsm.journal.verification import TAMPERED, UNVERIFIABLE, verify
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.state import RunState
from agentfsm.machine.graph import Graph
from agentfsm.runtime.recorder import ResumePoint

__all__ = ["LoadedRun", "StoredRequest", "is_subagent_run", "load_stored_run", "pending_request"]


@dataclass(frozen=True)
class StoredRequest:
    """What a person is asked by a run.

    Attributes:
        run_id: The run.
        seq: The record that asks.
        digest: That record's hash, to which an answer can be bound.
        kind: ``question``, ``approval``, ``limit`` or ``in_doubt``.
        question: The question; an empty string where it was redacted.
        tool: The tool that it is about, or an empty string.
        arguments: The arguments of its call, as the journal has them.
        expires_at: Until when an answer is good, in seconds since the epoch.
    """

    run_id: str
    seq: int
    digest: str
    kind: str
    question: str
    tool: str
    arguments: Mapping[str, Any]
    expires_at: float

    def __str__(self) -> str:
        about = f"  {self.tool} {json.dumps(self.arguments, ensure_ascii=False, default=repr)}" if self.tool else ""
        return f"{self.kind}: {self.question}{about}"


def pending_request(store: Store, head: Head) -> StoredRequest | None:
    """What a run of a store asks, or None where it does not wait for anybody.

    Raises:
        JournalError: A record cannot be read.
        agentfsm.errors.StoreError: The store cannot be read.
    """
    if head.status != "suspended":
        return None
    row = _last_suspension(store.records(head.run_id, head.seq - 1)) or _last_suspension(store.records(head.run_id))
    if row is None:
        return None
    body = open_record(row)
    try:
        waiting = body["waiting"]
        question, arguments = waiting.get("question", ""), waiting.get("arguments", {})
        return StoredRequest(
            head.run_id,
            row.seq,
            row.hash,
            waiting["kind"],
            "" if isinstance(question, Redacted) else question,
            waiting.get("tool", ""),
            {} if isinstance(arguments, Redacted) else arguments,
            body["expires"] / 1000,
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise JournalError(f"record {row.seq} does not say what it asks") from error


def _last_suspension(records: Sequence[SealedRecord]) -> SealedRecord | None:
    """The last row that asks; most often it is the last of all."""
    return next((row for row in reversed(records) if is_kind(row, "run.suspended")), None)


def is_subagent_run(store: Store, run_id: str) -> bool:
    """Whether a run is a sub-agent's; the run for which it works asks what it asks, and goes on with it.

    Raises:
        JournalError: Its first record cannot be read.
        agentfsm.errors.StoreError: The store does not have it, or cannot be read.
    """
    rows = store.records(run_id)
    try:
        return bool(rows) and "call" in decode(rows[0].body).get("parent", ())
    except (ValueError, TypeError, AttributeError) as error:
        raise JournalError("record 1 cannot be read") from error


@dataclass(frozen=True)
class LoadedRun:
    """A run that can go on.

    Attributes:
        run: What it knew behind its last record.
        resume_point: Where it stood.
        suspension_id: The id of the suspension that it waits in, or None where it was cut off.
    """

    run: RunState
    resume_point: ResumePoint
    suspension_id: str | None


def load_stored_run(store: Store, run_id: str, graph: Graph, migrations: Sequence[Migration] = ()) -> LoadedRun:
    """A run that a store holds, made ready to go on. Nothing is written.

    Args:
        store: Where it is.
        run_id: The run.
        graph: The graph under which it is to go on.
        migrations: What lets runs of other graphs in.

    Raises:
        UnknownRunError: There is no such run, or it was cut off before anything was kept of it.
        RunError: The run is over.
        JournalGraphError: It was written under another graph; the error lists what differs.
        JournalError: Its journal cannot be read.
    """
    rows, head = consistent_read(store, run_id)
    if not rows:
        raise UnknownRunError(f"run {run_id!r} was cut off before it did anything: start it anew")
    told = verify(run_id, rows, head)
    if told.code in (TAMPERED, UNVERIFIABLE):
        raise JournalError(f"run {run_id!r} cannot go on: record {told.seq}: {told.reason}")
    past = rehydrate(rows)
    if past.finished:
        raise RunError(f"run {run_id!r} is over; there is nothing to go on with")
    migrated = migrate(rows, past, graph, migrations)
    waits, run = past.suspension, past.run
    taken_up = ResumePoint(
        past.seq,
        past.hash,
        kind="interrupted" if waits is None else str(waits["waiting"]["kind"]),
        tool=run.pending_request.tool if run.pending_request is not None else "",
        expires_at=None if waits is None else waits["expires"] / 1000,
        request_ref=past.request_ref,
        attempts=dict(past.attempts),
        visited=frozenset(past.visited),
        results=past.unclaimed_results,
        migration_details=migrated,
    )
    return LoadedRun(run, taken_up, None if waits is None else str(waits["id"]))
