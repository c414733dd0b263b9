"""Loads a stored run: the request it waits for, and everything needed to resume it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from agentfsm.errors import ConfigurationError, JournalError, RunError, UnknownRunError
from agentfsm.journal.migration import Migration, migrate
from agentfsm.journal.records import Redacted, SealedRecord, is_kind, open_record, was_redacted
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.store import Head, Store, consistent_read, off_loop
from agentfsm.journal.verification import require_authentic, verify
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.human_input import ReachedLimit
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.state import RunState
from agentfsm.loop.withholding import SecretOpener
from agentfsm.machine.graph import Graph
from agentfsm.runtime.recorder import ResumePoint

__all__ = [
    "LoadedRun",
    "StoredConversation",
    "StoredRequest",
    "is_subagent_run",
    "load_conversation",
    "load_stored_run",
    "pending_request",
]


@dataclass(frozen=True)
class StoredRequest:
    """The request for human input that a stored run waits for.

    Attributes:
        run_id: The run.
        seq: The sequence number of the record with the request.
        digest: That record's hash, 64 hex digits; a reply can be bound to it.
        kind: ``question``, ``form``, ``approval``, ``limit`` or ``in_doubt``.
        question: The question; an empty string if it was redacted.
        tool: The tool that it is about, or an empty string.
        arguments: The arguments of the tool call, as the journal has them; empty if they were redacted.
        expires_at: When the request expires, in seconds since the epoch; None if it does not.
        quorum: For an approval with a rule about who may answer, the rule and the votes so far; else None.
        limit: For a limit, how much of it is used up, and what a reply grants by default; else None.
        form: For a form, the JSON schema of the object to fill in; else empty.
        asked_at: When it was asked, in seconds since the epoch; votes and escalation do not change it.
        is_redacted: Whether a part of it was redacted, so that the run cannot go on.
    """

    run_id: str
    seq: int
    digest: str
    kind: str
    question: str
    tool: str
    arguments: Mapping[str, Any]
    expires_at: float | None
    quorum: Quorum | None = None
    limit: ReachedLimit | None = None
    form: Mapping[str, Any] = field(default_factory=dict[str, Any])
    asked_at: float = 0.0
    is_redacted: bool = False

    def has_expired(self, now: float) -> bool:
        """Whether no reply is accepted any more.

        Args:
            now: Seconds since the epoch.
        """
        return self.expires_at is not None and now > self.expires_at

    def __str__(self) -> str:
        votes = "" if self.quorum is None else f"  {self.quorum}"
        about = f"  {self.tool} {json.dumps(self.arguments, ensure_ascii=False, default=repr)}" if self.tool else ""
        return f"{self.kind}: {self.question}{votes}{about}"


_ACQUIRED = ("run.resumed", "run.migrated", "run.adopted")

_QUORUM: TypeAdapter[Quorum | None] = TypeAdapter(Quorum | None)
_LIMIT: TypeAdapter[ReachedLimit | None] = TypeAdapter(ReachedLimit | None)


async def pending_request(store: Store, head: Head) -> StoredRequest | None:
    """The request that a stored run waits for, or None if it is not suspended.

    Args:
        store: The store that has the run.
        head: The head of the run.

    Raises:
        JournalError: A record cannot be read.
        agentfsm.errors.StoreError: The store cannot be read.
    """
    if head.status != "suspended":
        return None
    record = _last_suspension(await store.records(head.run_id, head.seq - 1))
    record = record or _last_suspension(await store.records(head.run_id))
    if record is None:
        return None
    body = open_record(record)
    try:
        request = body["waiting"]
        question, arguments = request.get("question", ""), request.get("arguments", {})
        form, quorum = request.get("form", {}), _QUORUM.validate_python(request.get("quorum"))
        return StoredRequest(
            head.run_id,
            record.seq,
            record.hash,
            request["kind"],
            "" if isinstance(question, Redacted) else question,
            request.get("tool", ""),
            {} if isinstance(arguments, Redacted) else arguments,
            _expiry(body),
            quorum,
            _LIMIT.validate_python(request.get("limit")),
            {} if isinstance(form, Redacted) else form,
            body["ts"] / 1000 if quorum is None else quorum.asked_at,
            was_redacted(record),
        )
    except (LookupError, TypeError, AttributeError, ValueError, ConfigurationError) as error:
        raise JournalError(f"record {record.seq} has no valid request") from error


def _stepped_at(records: Sequence[SealedRecord]) -> float | None:
    """When a run took its last step, in seconds since the epoch: to acquire it again is none."""
    last = next((each for each in reversed(records) if not any(is_kind(each, kind) for kind in _ACQUIRED)), None)
    return None if last is None else decode(last.body)["ts"] / 1000


def _expiry(suspension: Mapping[str, Any]) -> float | None:
    """When a request expires, in seconds since the epoch, or None."""
    return None if suspension["expires"] is None else suspension["expires"] / 1000


def _last_suspension(records: Sequence[SealedRecord]) -> SealedRecord | None:
    """The last ``run.suspended`` record; usually it is the last of all."""
    return next((record for record in reversed(records) if is_kind(record, "run.suspended")), None)


async def is_subagent_run(store: Store, run_id: str) -> bool:
    """Whether a run is a sub-agent's. Its requests are made by its parent run, which also resumes it.

    Raises:
        JournalError: Its first record cannot be read.
        agentfsm.errors.StoreError: The store does not have it, or cannot be read.
    """
    records = await store.records(run_id)
    try:
        return bool(records) and "call" in decode(records[0].body).get("parent", ())
    except (ValueError, TypeError, AttributeError) as error:
        raise JournalError("record 1 cannot be read") from error


@dataclass(frozen=True)
class LoadedRun:
    """A stored run, ready to resume.

    Attributes:
        run: Its state after its last record.
        resume_point: Where its journal continues.
        suspension_id: The id of its suspension, or None if it was interrupted.
        pinned: Its first record, which has the rules and the guardrails that it began with.
        asked: Sequence number and hash of each record with the request that it waits for: with the votes on it, a
            request is written anew.
    """

    run: RunState
    resume_point: ResumePoint
    suspension_id: str | None
    pinned: Mapping[str, Any] = field(default_factory=dict[str, Any])
    asked: tuple[tuple[int, str], ...] = ()


async def load_stored_run(
    store: Store, run_id: str, graph: Graph, keyring: Keyring, migrations: Sequence[Migration] = ()
) -> LoadedRun:
    """A stored run, verified, rehydrated and, if needed, migrated to a graph. Nothing is written.

    Args:
        store: The store that has the run.
        run_id: The run.
        graph: The graph under which it is to continue.
        keyring: The keys of the host, one of which must have sealed its journal.
        migrations: Which runs of other graphs may continue.

    Raises:
        UnknownRunError: There is no such run, or it was interrupted before its first record.
        RunError: The run has finished.
        JournalGraphError: It was written under another graph; the error lists what differs.
        JournalError: Its journal cannot be read, was tampered with, or was not sealed under a secret of the host.
        StoreError: The store cannot be read.
        MissingExtraError: It has sealed values, and the package that opens them is not installed.
    """
    records, head = await consistent_read(store, run_id)
    if not records:
        raise UnknownRunError(f"run {run_id!r} was interrupted before its first record: start it again")
    return await off_loop(lambda rows: _load(rows, head, run_id, graph, keyring, migrations), records)


def _load(
    records: Sequence[SealedRecord],
    head: Head | None,
    run_id: str,
    graph: Graph,
    keyring: Keyring,
    migrations: Sequence[Migration],
) -> LoadedRun:
    require_authentic(verify(run_id, records, head, keyring=keyring), "resumed")
    opener = SecretOpener(keyring)
    rehydrated = rehydrate(records, opener)
    if rehydrated.finished:
        raise RunError(f"run {run_id!r} has finished; there is nothing to resume")
    migration_details = migrate(records, rehydrated, graph, migrations)
    suspension, run = rehydrated.suspension, rehydrated.run
    resume_point = ResumePoint(
        rehydrated.seq,
        rehydrated.hash,
        kind="interrupted" if suspension is None else str(suspension["waiting"]["kind"]),
        tool=run.pending_request.tool if run.pending_request is not None else "",
        expires_at=None if suspension is None else _expiry(suspension),
        request_ref=rehydrated.request_ref,
        attempts=dict(rehydrated.attempts),
        visited=frozenset(rehydrated.visited),
        results=rehydrated.unclaimed_results,
        migration_details=migration_details,
        secrets=tuple(opener.opened.values()),
        epoch=rehydrated.epoch,
        records=records,
        stepped_at=_stepped_at(records),
    )
    suspension_id = None if suspension is None else str(suspension["id"])
    return LoadedRun(run, resume_point, suspension_id, rehydrated.created, tuple(rehydrated.asked))


@dataclass(frozen=True)
class StoredConversation:
    """What a stored run leaves to the next run of its conversation.

    Attributes:
        run: Its state after its last record.
        secrets: The values that its records withhold.
    """

    run: RunState
    secrets: tuple[Any, ...] = field(default=(), repr=False)


async def load_conversation(store: Store, run_id: str, keyring: Keyring, session_id: str) -> StoredConversation:
    """What a stored run knows, verified and rehydrated, to continue its conversation in another run.

    The session that it belongs to is that of its first record: whoever can change the columns by which runs are
    listed must not be able to have one person's transcript read by another.

    Args:
        store: The store that has the run.
        run_id: The run.
        keyring: The keys of the host, one of which must have sealed its journal.
        session_id: The session in which it is listed.

    Raises:
        UnknownRunError: There is no such run.
        JournalError: Its journal cannot be read, was tampered with, or was not sealed under a secret of the host; or
            it belongs to another session.
        StoreError: The store cannot be read.
        MissingExtraError: It has sealed values, and the package that opens them is not installed.
    """
    records, head = await consistent_read(store, run_id)

    def load(rows: Sequence[SealedRecord]) -> StoredConversation:
        require_authentic(verify(run_id, rows, head, keyring=keyring), "continued")
        if not rows or open_record(rows[0]).get("session", "") != session_id:
            raise JournalError(
                f"run {run_id!r} is listed in session {session_id!r}, but its first record does not say so: agentfsm "
                "verify says what was changed, and agentfsm store rebuild lists the run as its records say"
            )
        opener = SecretOpener(keyring)
        run = rehydrate(rows, opener).run
        return StoredConversation(run, (*run.withheld, *opener.opened.values()))

    return await off_loop(load, records)
