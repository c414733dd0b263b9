"""Loads a stored run: the request it waits for, and everything needed to resume it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from agentfsm.errors import ConfigurationError, JournalError, RunEndedError, UnknownRunError
from agentfsm.journal.history_verifier import KnownHistory
from agentfsm.journal.migration import Migration, migrate
from agentfsm.journal.records import Redacted, SealedRecord, is_kind, open_record, was_redacted
from agentfsm.journal.rehydrate import RehydratedRun, rehydrate
from agentfsm.journal.snapshot import Snapshot, open_snapshot
from agentfsm.journal.store import Head, Store, consistent_read, off_loop
from agentfsm.journal.verification import require_authentic, verify, verify_after
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.human_input import ReachedLimit
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.state import RunState
from agentfsm.loop.withholding import SecretOpener
from agentfsm.machine.graph import Graph
from agentfsm.runtime.recorder import EarlierPart, JournalBase, ResumePoint


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
        is_redacted: Whether a part of it was redacted, so that the run cannot continue.
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


_NO_STEP = ("run.resumed", "run.migrated", "run.adopted", "effect.intent")

_QUORUM: TypeAdapter[Quorum | None] = TypeAdapter(Quorum | None)
_LIMIT: TypeAdapter[ReachedLimit | None] = TypeAdapter(ReachedLimit | None)


async def pending_request(store: Store, head: Head) -> StoredRequest | None:
    """The request that a stored run waits for, or None if it is not suspended.

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


async def pending_digest(store: Store, head: Head) -> str:
    """The hash of the record with the request that a run waits for, which is not its last one if it was redacted since.

    An empty text if it waits for nothing, or if the request cannot be read.

    Raises:
        agentfsm.errors.StoreError: The store cannot be read.
    """
    try:
        request = await pending_request(store, head)
    except JournalError:
        return ""
    return "" if request is None else request.digest


def _stepped_at(records: Sequence[SealedRecord]) -> float | None:
    """When a run took its last step, in seconds since the epoch: acquiring it again, or beginning a call, is none."""
    last = next((each for each in reversed(records) if not any(is_kind(each, kind) for kind in _NO_STEP)), None)
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
    records = await store.records(run_id, limit=1)
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
            request is written again.
    """

    run: RunState
    resume_point: ResumePoint
    suspension_id: str | None
    pinned: Mapping[str, Any] = field(default_factory=dict[str, Any])
    asked: tuple[tuple[int, str], ...] = ()


async def load_stored_run(
    store: Store,
    run_id: str,
    graph: Graph,
    keyring: Keyring,
    migrations: Sequence[Migration] = (),
    *,
    lazily: bool = False,
    to_end: bool = False,
) -> LoadedRun:
    """A stored run, verified, rehydrated and, if needed, migrated to a graph. Nothing is written.

    Args:
        store: The store that has the run.
        run_id: The run.
        graph: The graph under which it is to continue.
        keyring: The keys of the host, one of which must have sealed its journal.
        migrations: Which runs of other graphs may continue.
        lazily: Whether to begin at its newest snapshot, if that can be used: the records before it, and messages in
            them, are then read and verified when they are needed.
        to_end: Whether it is only to end, so that values that were redacted may be missing.

    Raises:
        UnknownRunError: There is no such run, or it was interrupted before its first record.
        RunEndedError: The run has ended.
        JournalGraphError: It was written under another graph; the error lists what differs.
        JournalError: Its journal cannot be read, was tampered with, or was not sealed under a secret of the host.
        StoreError: The store cannot be read.
        MissingExtraError: It has sealed values, and the package that opens them is not installed.
    """
    if lazily and (loaded := await _load_from_snapshot(store, run_id, graph, keyring)) is not None:
        return loaded
    records, head = await consistent_read(store, run_id)
    if not records:
        if head is not None and head.status == "finished":  # it was cancelled before it began
            raise RunEndedError(f"run {run_id!r} has ended")
        raise UnknownRunError(f"run {run_id!r} was interrupted before its first record: start it again")
    return await off_loop(lambda rows: _load(rows, head, run_id, graph, keyring, migrations, to_end), records)


def _load(
    records: Sequence[SealedRecord],
    head: Head | None,
    run_id: str,
    graph: Graph,
    keyring: Keyring,
    migrations: Sequence[Migration],
    to_end: bool,
) -> LoadedRun:
    require_authentic(verify(run_id, records, head, keyring=keyring), "resumed")
    opener = SecretOpener(keyring)
    rehydrated = rehydrate(records, opener, to_end=to_end)
    if rehydrated.finished:
        raise RunEndedError(f"run {run_id!r} has ended")
    migration_details = migrate(records, rehydrated, graph, migrations)
    base = JournalBase(
        records[0],
        asked=tuple(rehydrated.asked),
        may_have_snapshots=not migration_details and rehydrated.graph is rehydrated.created["graph"],
    )
    return _loaded(rehydrated, opener, records, base, _stepped_at(records), migration_details)


def _loaded(
    rehydrated: RehydratedRun,
    opener: SecretOpener,
    records: Sequence[SealedRecord],
    base: JournalBase,
    stepped_at: float | None,
    migration_details: Mapping[str, Any],
) -> LoadedRun:
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
        base=base,
        stepped_at=stepped_at,
    )
    suspension_id = None if suspension is None else str(suspension["id"])
    return LoadedRun(run, resume_point, suspension_id, rehydrated.created, tuple(rehydrated.asked))


async def _load_from_snapshot(store: Store, run_id: str, graph: Graph, keyring: Keyring) -> LoadedRun | None:
    """A stored run, from its newest snapshot; None if it has none that can be used, or if anything is wrong with it."""
    sealed = await store.snapshot(run_id)
    if sealed is None:
        return None
    snapshot = await off_loop(lambda _: open_snapshot(sealed, run_id, keyring), (), sealed)
    if snapshot is None:
        return None
    first = await store.records(run_id, limit=1)
    records, head = await consistent_read(store, run_id, snapshot.seq)
    if not first or head is None or head.status == "finished":
        return None
    earlier = _EarlierReader(store, run_id, keyring, (snapshot.seq, str(snapshot.data["hash"])))

    def load(rows: Sequence[SealedRecord]) -> LoadedRun | None:
        try:
            return _load_after(snapshot, first[0], rows, head, graph, keyring, earlier.read)
        except JournalError:
            return None

    return await off_loop(load, records, sealed)


def _load_after(
    snapshot: Snapshot,
    first: SealedRecord,
    records: Sequence[SealedRecord],
    head: Head,
    graph: Graph,
    keyring: Keyring,
    read: Callable[[], Awaitable[EarlierPart]],
) -> LoadedRun | None:
    opener = SecretOpener(keyring)
    rehydrated = snapshot.restore(first, opener)
    run = rehydrated.run
    request = run.pending_request
    known = KnownHistory(
        head.run_id,
        rehydrated.graph,
        run.state,
        rehydrated.epoch,
        rehydrated.request_ref,
        "" if request is None else str(request.kind),
        None if request is None or request.asker else request.quorum,
    )
    fits = rehydrated.graph["fingerprint"] == graph.fingerprint
    if not fits or not verify_after(known, (rehydrated.seq, rehydrated.hash), records, head, keyring):
        return None
    for record in records:
        rehydrated.add(record)
    model, asked = str(snapshot.data["model"]), tuple(rehydrated.asked)
    base = JournalBase(first, snapshot.seq, read, model, asked)
    stepped_at = _stepped_at(records) or snapshot.data["ts"] / 1000
    return _loaded(rehydrated, opener, records, base, stepped_at, {})


class _EarlierReader:
    """Reads the records of a run up to that of its snapshot, once, when somebody needs them."""

    def __init__(self, store: Store, run_id: str, keyring: Keyring, last: tuple[int, str]) -> None:
        self._store, self._run_id, self._keyring, self._last = store, run_id, keyring, last
        self._part: EarlierPart | None = None
        self._reading = asyncio.Lock()

    async def read(self) -> EarlierPart:
        """The records, verified, and what they say.

        Raises:
            JournalError: They were tampered with, or cannot be read.
            StoreError: The store cannot be read.
        """
        async with self._reading:
            if self._part is None:
                self._part = await off_loop(self._fold, await self._store.records(self._run_id, limit=self._last[0]))
            return self._part

    def _fold(self, records: Sequence[SealedRecord]) -> EarlierPart:
        require_authentic(verify(self._run_id, records, keyring=self._keyring), "continued")
        if (len(records), records[-1].hash) != self._last:
            raise JournalError(
                f"run {self._run_id!r} cannot be continued: record {self._last[0]} is not that of its snapshot"
            )
        opener = SecretOpener(self._keyring)
        run = rehydrate(records, opener).run
        return EarlierPart(records, run.messages, tuple(opener.opened.values()))


@dataclass(frozen=True)
class StoredConversation:
    """What a stored run leaves to the next run of its conversation."""

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
