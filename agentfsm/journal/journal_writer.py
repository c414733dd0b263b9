"""Writes a run's journal: turns entries into sealed records and appends them to a store under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import platform
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from agentfsm.errors import JournalError, StaleLease, StoreError
from agentfsm.journal.hash_chain import GENESIS_HASH, RecordSealer
from agentfsm.journal.outcome_codec import CommitmentWriter, OutcomeWriter, to_json
from agentfsm.journal.records import FORMAT_VERSION, Record, SealedRecord, installed_release, read_records
from agentfsm.journal.run_info import RunInfo, called_model, first_info, info_of, spent_before
from agentfsm.journal.signal_inbox import SignalInbox
from agentfsm.journal.snapshot import SnapshotMaker
from agentfsm.journal.store import Lease, SealedSnapshot, Status, Store, owner_name
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.failures import Failure
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.keys import Keyring, SecretKeys
from agentfsm.loop.messages import NO_USAGE, Message, ToolResult
from agentfsm.loop.outcomes import Outcome
from agentfsm.loop.state import RunDetails, RunState
from agentfsm.loop.withholding import Withholder
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.runtime.recorder import JournalBase, JournalEntry, Recorder, ResumePoint, RunHeader

Data = dict[str, Any]
JsonFields = dict[str, str]  # the fields of a record, each value as JSON


class RecordWriter:
    """Writes one run's records, each chained to the previous one by its hash.

    Args:
        seq: The sequence number of the last record; 0 for a new run.
        head: Its hash, 64 hex digits.
        epoch: The epoch of the lease under which records are written.
        withholder: Replaces what must never be written.
        keys: The keys under which records are sealed; without them, only hashes are computed.

    Attributes:
        seq: The sequence number of the last record.
        head: Its hash, 64 hex digits.
    """

    def __init__(
        self,
        seq: int = 0,
        head: str = GENESIS_HASH,
        epoch: int = 1,
        withholder: Withholder | None = None,
        keys: SecretKeys | None = None,
    ) -> None:
        self.seq = seq
        self.head = head
        self.epoch = epoch
        self._sealer = RecordSealer(keys)
        self._commitments = CommitmentWriter(withholder)
        self._outcomes = OutcomeWriter()
        self._row_cache: dict[int, tuple[Any, str]] = {}
        self._fast_writers: Mapping[str, Callable[[JournalEntry], str | None]] = {
            "transition": self._write_transition,
            "effect.intent": self._write_intent,
            "effect.result": self._write_result,
        }

    def resume_from(self, tool: str, results: Mapping[str, ToolResult]) -> None:
        """Continue a run that another process wrote."""
        self._outcomes.resume_from(tool, results)

    def add_secrets(self, values: Iterable[Any]) -> None:
        """Withhold values from now on."""
        self._commitments.add_secrets(values)

    def write(self, entries: Iterable[JournalEntry]) -> list[SealedRecord]:
        """The sealed records of the entries of one commit.

        Raises:
            TypeError: A value cannot be represented as JSON.
            ValueError: A value contains itself or is nested too deeply.
        """
        first, bodies = self.seq + 1, list[tuple[str, str]]()
        for entry in entries:
            write_fast = self._fast_writers.get(entry[0])
            text = write_fast(entry) if write_fast is not None else None
            if text is None:
                text = self._write_generic(entry)
            bodies.append((text, self._commitments.drain()))
        records = self._sealer.seal_commit(first, bodies, self.head)
        if records:
            self.head = records[-1].hash
        return records

    # The most frequent records are formatted by hand, for speed: their fields are known, and in sorted order.

    def _write_transition(self, entry: JournalEntry) -> str | None:
        """The body of a transition without a failure, cancellation or abort, as most are; None for any other."""
        _, time, outcome, cancel, elapsed_us, silence_us, decision, aborted = entry
        found = decision.guard_result
        if cancel is not None or aborted is not None or (found is not None and isinstance(found, Failure)):
            return None
        row = decision.transition
        cached = self._row_cache.get(id(row))
        if cached is None:
            cached = self._row_cache[id(row)] = (row, encode(_row_fields(decision))[1:-1])
        repeated = self._outcomes.write_if_repeated(outcome)
        out = self._outcomes.write(outcome, self._commitments) if repeated is None else repeated
        self.seq += 1
        us = f',"us":[{elapsed_us},{silence_us}]' if elapsed_us or silence_us else ""
        return (
            f'{{"epoch":{self.epoch},"kind":"transition","out":{out},"seq":{self.seq},'
            f'{cached[1]},"ts":{int(time * 1000)}{us}}}'
        )

    def _write_intent(self, entry: JournalEntry) -> str:
        _, time, eid, name, attempt, policy, request = entry
        self.seq += 1
        asked = "" if request is None else f'"request":{self._request_json(name, request)},'
        attempt_field = f'"attempt":{attempt},' if attempt > 1 else ""
        return (
            f'{{{attempt_field}"eid":{encode(eid)},"epoch":{self.epoch},"kind":"effect.intent","name":{encode(name)},'
            f'"policy":{encode(policy)},{asked}"seq":{self.seq},"ts":{int(time * 1000)}}}'
        )

    def _request_json(self, name: str, request: Mapping[str, Any]) -> str:
        """What a call of a user-defined state's effect was given: a tool's arguments, or a model's messages."""
        if "arguments" in request:
            return f'{{"arguments":{self._commitments.arguments_json(name, request["arguments"])}}}'
        return f'{{"messages":{self._commitments.own_json(request["messages"])}}}'

    def _write_result(self, entry: JournalEntry) -> str:
        _, time, eid, result = entry
        out = self._outcomes.write_result(eid, result, self._commitments)
        self.seq += 1
        return (
            f'{{"eid":{encode(eid)},"epoch":{self.epoch},"kind":"effect.result","out":{out},'
            f'"seq":{self.seq},"ts":{int(time * 1000)}}}'
        )

    def _write_generic(self, entry: JournalEntry) -> str:
        kind, commitments = entry[0], self._commitments
        texts = _FIELD_WRITERS.get(kind, _plain_fields)(self._outcomes, entry, commitments)
        self.seq += 1
        texts |= {"epoch": str(self.epoch), "kind": f'"{kind}"', "seq": str(self.seq), "ts": str(int(entry[1] * 1000))}
        fields = [f'"{name}":{texts[name]}' for name in sorted(texts)]
        return f"{{{','.join(fields)}}}"


def _json_fields(data: Data) -> JsonFields:
    """Each value as JSON."""
    return {name: encode(value) for name, value in data.items()}


def _plain_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    """The fields of an entry whose data is a dict of JSON values."""
    return _json_fields(entry[2] or {})


def _transition_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    outcome, cancel, elapsed_us, silence_us, decision, aborted = cast(
        "tuple[Outcome | None, str | None, int, int, Decision, Any]", entry[2:]
    )
    texts = {"out": outcomes.write(outcome, commitments), **_json_fields(_row_fields(decision))}
    if elapsed_us or silence_us:
        texts["us"] = f"[{elapsed_us},{silence_us}]"
    if cancel is not None:
        texts["cancel"] = commitments.commitment_json(cancel)
    if isinstance(decision.guard_result, Failure):
        texts["failure"] = to_json(decision.guard_result, commitments)
    if aborted is not None:
        texts["aborted"] = to_json(aborted, commitments)
    return texts


_GUARD_DIGITS: Mapping[bool | None, str] = {True: "1", False: "0", None: "e"}


def _row_fields(decision: Decision) -> Data:
    """The transition that was taken.

    ``tried`` has a character for each guard that was evaluated, in order: 1 for the one that held, 0 for those that did
    not, e for one that raised.
    """
    row = decision.transition
    tried = "".join([_GUARD_DIGITS[result] for _, result in decision.tried])
    return {"to": str(row.target), "transition": row.id, "tried": tried}


def _suspended_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    data = dict(entry[2])
    waiting = outcomes.write_request(cast("PendingRequest", data.pop("waiting")), commitments)
    return {**_json_fields(data), "waiting": waiting}


def _created_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    header = cast("RunHeader", entry[2])
    body: Data = {
        "form": FORMAT_VERSION,
        "run": header.run_id,
        "guardrails": header.guardrails.model_dump(mode="json"),
        "rules": header.behavior.model_dump(mode="json"),
        "versions": {"agentfsm": installed_release(), "python": platform.python_version()},
    }
    if header.seed is not None:
        body["seed"] = header.seed
    if header.parent:
        body["parent"] = dict(header.parent)
    if header.tools:
        body["tools"] = {t.name: t.digest for t in header.tools}
    fields = {**_json_fields(body), "graph": _graph_json(header.graph)}
    fields["policy"] = commitments.commitment_json(describe_policy(header.policy))
    fields |= _details_fields(header.details, commitments)
    if header.session_id:
        fields["session"] = commitments.name_json(header.session_id)
    if header.requester is not None:
        fields["requester"] = to_json(header.requester, commitments)
    if header.state is None:
        return {**fields, "messages": to_json(header.messages, commitments)}
    return {
        **fields,
        "at": encode(header.state["state"]),
        "state": commitments.own_json(header.state),
    }


@lru_cache(maxsize=32)  # the runs of an agent have the same
def _graph_json(graph: Graph) -> str:
    return encode({"name": graph.name, "fingerprint": graph.fingerprint, **graph.table})


def _details_fields(details: RunDetails, commitments: CommitmentWriter) -> JsonFields:
    """What else the run was given."""
    fields: JsonFields = {}
    if details.tags:
        fields["tags"] = commitments.commitment_json(list(details.tags))
    if details.metadata:
        fields["metadata"] = commitments.commitment_json(details.metadata)
    if details.has_deps:
        fields["deps"] = "true"
    if details.model:
        fields["own_model"] = encode({"name": details.model, "object": details.model_is_object})
    if details.settings:
        fields["own_settings"] = commitments.commitment_json(details.settings)
    if details.own_guardrails:
        fields["own_guardrails"] = "true"
    if details.history:
        fields["history"] = commitments.commitment_json(details.history)
    if details.approvals:
        fields["approvals"] = commitments.commitment_json(details.approvals)
    return fields


_FIELD_WRITERS: dict[str, Callable[[OutcomeWriter, JournalEntry, CommitmentWriter], JsonFields]] = {
    "transition": _transition_fields,
    "run.created": _created_fields,
    "run.forked": _created_fields,
    "run.suspended": _suspended_fields,
}


def describe_policy(policy: Any) -> Data:
    """A policy as JSON data: its class, and its fields if it is a dataclass."""
    data: Data = {"type": f"{type(policy).__module__}.{type(policy).__qualname__}"}
    if dataclasses.is_dataclass(policy):
        for each in dataclasses.fields(policy):
            value: Any = getattr(policy, each.name)
            if isinstance(value, Mapping):
                value = {str(k): v for k, v in cast("Mapping[object, object]", value).items()}
            data[each.name] = value
    try:
        encode(data)
    except (TypeError, ValueError):
        return {"type": data["type"], "repr": repr(policy)[:500]}
    return data


LISTED_EVERY_S = 1.0
"""Seconds after which a run that continues is listed again: it costs more than a commit's other rows together."""

_STATUS_AFTER: Mapping[str, Status] = {"run.suspended": "suspended", "run.finished": "finished"}


class StoreJournal:
    """Appends one run's records to a store, under a lease.

    Args:
        store: The store.
        lease: The lease of the run.
        writer: Writes the records.
        run: The state of the run, which is what it is listed by.
        snapshots: Makes its snapshots.
        records: The records that the run has already, without those that were not read.
        base: What its journal continues from; None for a new run.
        inbox: The signals to the run, or None if nobody may cancel it from elsewhere.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        writer: RecordWriter,
        run: RunState,
        snapshots: SnapshotMaker,
        records: Sequence[SealedRecord] = (),
        base: JournalBase | None = None,
        inbox: SignalInbox | None = None,
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._run = run
        self._info: RunInfo | None = None  # what the first records say, once they are known
        self._spent_before = NO_USAGE  # what they say, too
        self._listed_status: Status | None = None
        self._listed_at = 0.0
        self._lease: Lease | None = lease
        self._writer = writer
        self._snapshots = snapshots
        self._records = list(records)
        self._base = base
        self._appends: deque[tuple[asyncio.Future[None], Sequence[SealedRecord]]] = deque()  # not checked yet, in order
        self._last_append: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None
        self._stopped: StaleLease | None = None  # why nothing more is written, if it could be
        self._released: asyncio.Future[None] | None = None

    @property
    def error(self) -> Exception | None:
        """The first error of an append, or None; later errors only follow from it."""
        if self._appends:
            self._check_appends()
        return self._error or self._stopped

    def _check_appends(self) -> None:
        """Take note of the appends that are done: of their records, or of the first error."""
        while self._appends and self._appends[0][0].done():
            done, records = self._appends.popleft()
            error = None if done.cancelled() else done.exception()
            if self._error is None and isinstance(error, Exception):
                self._error = error
            if self._error is None:
                self._records += records

    @property
    def epoch(self) -> int:
        """The epoch of the lease: how often the run was acquired."""
        return self._writer.epoch

    @property
    def records(self) -> Sequence[SealedRecord]:
        """The run's records so far that are durable: those from which it was resumed, and those written since.

        Raises:
            JournalError: Some of them are not read yet.
        """
        _ = self.error  # checks which appends are done
        if self._unread:
            raise JournalError("the earlier records of this run are not read yet: they are when it ends or waits")
        return self._records

    @property
    def _unread(self) -> int:
        """How many records, from the first, are not read yet."""
        return 0 if self._base is None else self._base.unread

    @property
    def has_unread(self) -> bool:
        """Whether records before the snapshot from which the run was loaded were not read yet."""
        return self._unread > 0

    async def read_earlier(self) -> Sequence[Message]:
        """Read and verify what was not read of the run; see ``JournalSink.read_earlier``."""
        base = self._base
        if base is None or base.read is None:
            return ()
        earlier = await base.read()
        if self._unread:
            self._base = replace(base, unread=0)
            self._records[:0] = earlier.records
            self._writer.add_secrets(earlier.secrets)
        return earlier.messages

    @property
    def head(self) -> str:
        """The hash of the last record that was pushed, 64 hex digits."""
        return self._writer.head

    async def watch_signals(self, cancel: Callable[[str], None], acted_on: str = "") -> None:
        """Cancel the run if its store gets a request to do so; see ``JournalSink.watch_signals``."""
        if self._inbox is not None and self._lease is not None:
            await self._inbox.watch(self._lease, self._hash_of, cancel, acted_on)

    async def _hash_of(self, seq: int) -> str | None:
        if seq <= self._unread:
            await self.read_earlier()
        _ = self.error  # checks which appends are done
        place = seq - self._unread - 1
        return self._records[place].hash if 0 <= place < len(self._records) else None

    def push(self, entries: list[JournalEntry]) -> None:
        """Queue entries for appending, in order, without waiting."""
        if self._lease is None or self._ended or self.error is not None:
            return
        try:
            records = self._writer.write(entries)
        except (TypeError, ValueError) as error:
            self._error = JournalError(f"the run cannot be written to its journal: {error}")
            return
        status = _STATUS_AFTER.get(entries[-1][0], "running")
        now: float = entries[-1][1]
        listed = None
        if status != self._listed_status or not 0 <= now - self._listed_at < LISTED_EVERY_S:
            listed = self._list(records, entries[-1], status)
            self._listed_status, self._listed_at = status, now
        snapshot = self._snapshots.after(entries, records, "" if self._info is None else self._info.model)
        self._last_append = self._append(self._lease, records, status, listed, snapshot)
        self._ended = status != "running"  # the append ends the lease, unless it fails

    def _list(self, records: Sequence[SealedRecord], last: JournalEntry, status: Status) -> RunInfo:
        """What the run is listed by after some records."""
        if self._info is None:
            first = (*self._records, *records)[0] if self._base is None else self._base.first
            self._info = first_info(self._run.run_id, first)
            self._info = replace(self._info, model="" if self._base is None else self._base.model)
            self._spent_before = spent_before(first)
        if not self._info.model:
            self._info = replace(self._info, model=called_model((*self._records, *records)))
        expires = last[2]["expires"] if last[0] == "run.suspended" else None
        deadline = None if expires is None else expires / 1000
        return info_of(self._info, self._spent_before, self._run, status, last[1], deadline)

    def _append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> asyncio.Future[None]:
        appended = asyncio.ensure_future(self._store.append(lease, records, status, info, snapshot))
        self._appends.append((appended, records))
        return appended

    async def flush(self) -> None:
        """Wait until everything that was pushed is durable.

        Raises:
            agentfsm.errors.StoreError: The store cannot write; the run must not continue.
            agentfsm.errors.JournalError: An entry cannot be written as JSON.
        """
        self._check_appends()
        if self._last_append is not None and self._error is None:
            cancelled = self._last_append.cancelled()  # an earlier flush was; the append itself is still queued
            if cancelled and self._lease is not None and not self._ended:
                self._last_append = self._append(self._lease, (), "running")
            with contextlib.suppress(Exception):  # the first error is raised below
                await self._last_append  # the store appends in order, so the last one is done after all others
        if (error := self.error) is not None:
            with contextlib.suppress(StoreError):  # the first error is the one to raise
                await self._release()
            raise error
        if self._inbox is not None and (self._ended or self._inbox.has_work):
            await self._inbox.clear_up(self._listed_status if self._ended else None)
        if self._ended:
            self._lease = None

    def stop(self) -> None:
        """Take no more entries: from now on, ``error`` says so, and the run does nothing more in this process."""
        if self._lease is not None and not self._ended:
            self._stopped = StaleLease(self._lease.run_id, None, "was handed over: another process may continue it")

    async def release(self) -> None:
        """Stop, wait until everything that was pushed is durable, and release the lease of a run that has not ended.

        Raises:
            agentfsm.errors.StoreError: The store cannot write.
            agentfsm.errors.JournalError: An entry cannot be written as JSON.
        """
        self.stop()
        try:
            await self.flush()
        except StaleLease as error:
            if error is not self._stopped:
                raise
            await self._release()

    async def _release(self) -> None:
        """Release the lease, or wait until that is done."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._released = asyncio.ensure_future(self._store.release(lease))
        if self._released is not None:
            await asyncio.shield(self._released)


async def open_journal(
    store: Store,
    run: RunState,
    resume_point: ResumePoint | None,
    keyring: Keyring,
    withholder: Withholder,
) -> StoreJournal:
    """Acquire a run, new or stored, and return the journal that appends to it.

    Args:
        store: The store.
        run: The state of the run.
        resume_point: The end of the stored run when it was loaded, or None for a new run.
        keyring: The keys of the host; the current one seals its records.
        withholder: Replaces what must never be written.

    Raises:
        RunExistsError: The run should be new, and the store has a run with that id.
        StaleLease: Another owner holds the run, or it has new records since it was loaded.
        StoreError: The store cannot write, or somebody without the secret changed what it keeps about the run.
    """
    run_id = run.run_id
    lease = await store.acquire(run_id, owner_name(), new=resume_point is None, keyring=keyring)
    if resume_point is not None and (lease.seq, lease.hash) != (resume_point.seq, resume_point.hash):
        await store.release(lease)
        raise StaleLease(run_id, None, "has new records since it was loaded")
    writer = RecordWriter(lease.seq, lease.hash, lease.epoch, withholder, keyring.current)
    if resume_point is not None:
        writer.resume_from(resume_point.tool, resume_point.results)
    inbox = None if run.parent is not None else SignalInbox(store, run_id, keyring)  # its caller's run is cancelled
    snapshots = SnapshotMaker(run, keyring.current, withholder, resume_point)
    if resume_point is None:
        return StoreJournal(store, lease, writer, run, snapshots, inbox=inbox)
    return StoreJournal(store, lease, writer, run, snapshots, resume_point.records, resume_point.base, inbox)


def read_journal(recorder: Recorder, run_id: str, withholder: Withholder) -> list[Record]:
    """A run's records: what was written to its store or, without one, serialized now.

    Raises:
        JournalError: A record cannot be read.
    """
    if recorder.sink is not None:
        return read_records(recorder.sink.records, run_id)
    return read_records(RecordWriter(withholder=withholder).write(recorder.entries), run_id)
