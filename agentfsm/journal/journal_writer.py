"""Writes a run's journal: entries to sealed records, appended to a store under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, cast

from agentfsm.errors import JournalError, StaleLease, StoreError
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.outcome_codec import (
    CommitmentWriter,
    OutcomeWriter,
    SecretScrubber,
    environment_secrets,
    to_json,
)
from agentfsm.journal.records import FORMAT_VERSION, Record, SealedRecord, read_records
from agentfsm.journal.store import Lease, Status, Store
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import ToolResult
from agentfsm.loop.model import ToolSpec
from agentfsm.loop.outcomes import Outcome
from agentfsm.loop.state import PendingRequest
from agentfsm.machine.engine import Decision
from agentfsm.runtime.recorder import JournalEntry, Recorder, ResumePoint, RunHeader

if TYPE_CHECKING:
    from pydantic import SecretStr

__all__ = ["RecordWriter", "StoreJournal", "describe_policy", "open_journal", "owner_name", "read_journal"]


Data = dict[str, Any]
JsonFields = dict[str, str]  # fields of a record, each as JSON


class RecordWriter:
    """Writes one run's records, each sealed onto the one before.

    Args:
        seq: The last record that there is.
        head: Its hash.
        epoch: Which holder of the run writes.
        secrets: What must never be written.
    """

    def __init__(
        self, seq: int = 0, head: str = GENESIS_HASH, epoch: int = 1, secrets: SecretScrubber | None = None
    ) -> None:
        self.seq = seq
        self.head = head
        self.epoch = epoch
        self._secrets = secrets
        self._commitments = CommitmentWriter(secrets)
        self._outcomes = OutcomeWriter()
        self._row_cache: dict[int, tuple[Any, str]] = {}
        self._fast_writers: Mapping[str, Callable[[JournalEntry], str | None]] = {
            "transition": self._write_transition,
            "effect.intent": self._write_intent,
            "effect.result": self._write_result,
        }

    def resume_from(self, tool: str, results: Mapping[str, ToolResult]) -> None:
        """Go on with a run that somebody else wrote.

        Args:
            tool: The tool that a person is being asked about, or an empty string.
            results: Results that have a record, and no outcome that holds them yet.
        """
        self._outcomes.resume_from(tool, results)

    def write(self, entries: Iterable[JournalEntry]) -> list[SealedRecord]:
        """The records of some entries."""
        return [self._seal(entry) for entry in entries]

    def _seal(self, entry: JournalEntry) -> SealedRecord:
        by_hand = self._fast_writers.get(entry[0])
        text = by_hand(entry) if by_hand is not None else None
        if text is None:
            text = self._write_generic(entry)
        self.head = head = record_hash(self.head, text)
        return SealedRecord(self.seq, text, head, self._commitments.drain())

    def _scrub(self, text: str) -> str:
        return text if self._secrets is None else self._secrets.scrub(text)

    # The records of a step are put together by hand: their fields are known, and each stands where its name sorts.

    def _write_transition(self, entry: JournalEntry) -> str | None:
        """The body of an ordinary move, or None where the move is another: most records are one."""
        _, time, outcome, cancel, took, silence, decision, aborted = entry
        found = decision.guard_result
        if cancel is not None or aborted is not None or (found is not None and isinstance(found, Failure)):
            return None
        row = decision.transition
        known = self._row_cache.get(id(row))
        if known is None:
            known = self._row_cache[id(row)] = (row, encode(_row_fields(decision))[1:-1])
        said = self._outcomes.write_if_repeated(outcome)
        out = self._outcomes.write(outcome, self._commitments) if said is None else said
        self.seq += 1
        us = f',"us":[{took},{silence}]' if took or silence else ""
        text = (
            f'{{"epoch":{self.epoch},"kind":"transition","out":{out},"seq":{self.seq},'
            f'{known[1]},"ts":{int(time * 1000)}{us}}}'
        )
        return self._scrub(text) if said is None else text  # else all of it is our own words

    def _write_intent(self, entry: JournalEntry) -> str:
        _, time, eid, name, attempt, policy = entry
        self.seq += 1
        again = f'"attempt":{attempt},' if attempt > 1 else ""
        return self._scrub(
            f'{{{again}"eid":{encode(eid)},"epoch":{self.epoch},"kind":"effect.intent","name":{encode(name)},'
            f'"policy":{encode(policy)},"seq":{self.seq},"ts":{int(time * 1000)}}}'
        )

    def _write_result(self, entry: JournalEntry) -> str:
        _, time, eid, result = entry
        out = self._outcomes.write_result(eid, result, self._commitments)
        self.seq += 1
        return self._scrub(
            f'{{"eid":{encode(eid)},"epoch":{self.epoch},"kind":"effect.result","out":{out},'
            f'"seq":{self.seq},"ts":{int(time * 1000)}}}'
        )

    def _write_generic(self, entry: JournalEntry) -> str:
        kind, hider = entry[0], self._commitments
        texts = _FIELD_WRITERS.get(kind, _plain_fields)(self._outcomes, entry, hider)
        if self._secrets is not None and kind in _SALTED_KINDS:
            texts["salt"] = hider.commitment_json(self._secrets.salt)
        self.seq += 1
        texts |= {"epoch": str(self.epoch), "kind": f'"{kind}"', "seq": str(self.seq), "ts": str(int(entry[1] * 1000))}
        fields = [f'"{name}":{texts[name]}' for name in sorted(texts)]
        return self._scrub(f"{{{','.join(fields)}}}")


def _json_fields(data: Data) -> JsonFields:
    """Each value by itself: few hold what must be tagged."""
    return {name: encode(value) for name, value in data.items()}


def _plain_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    """What needs no care: fields that are JSON already."""
    return _json_fields(entry[2] or {})


def _transition_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    outcome, cancel, took, silence, decision, aborted = cast(
        "tuple[Outcome | None, str | None, int, int, Decision, Any]", entry[2:]
    )
    texts = {"out": outcomes.write(outcome, commitments), **_json_fields(_row_fields(decision))}
    if took or silence:
        texts["us"] = f"[{took},{silence}]"
    if cancel is not None:
        texts["cancel"] = encode(cancel)
    if isinstance(decision.guard_result, Failure):
        texts["failure"] = to_json(decision.guard_result, commitments)
    if aborted is not None:
        texts["aborted"] = to_json(aborted, commitments)
    return texts


def _row_fields(decision: Decision) -> Data:
    """Which row was taken; ``tried`` has a digit for each guard that was asked, in order: 1 where it held."""
    row = decision.transition
    return {"to": str(row.target), "transition": row.id, "tried": "0" * (len(decision.tried) - 1) + "1"}


def _suspended_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    what = dict(entry[2])
    waiting = outcomes.write_request(cast("PendingRequest", what.pop("waiting")), commitments)
    return {**_json_fields(what), "waiting": waiting}


def _created_fields(outcomes: OutcomeWriter, entry: JournalEntry, commitments: CommitmentWriter) -> JsonFields:
    begun = cast("RunHeader", entry[2])
    body: Data = {
        "form": FORMAT_VERSION,
        "run": begun.run_id,
        "graph": {"name": begun.graph.name, "fingerprint": begun.graph.fingerprint, **begun.graph.table},
        "guardrails": begun.guardrails.model_dump(mode="json"),
        "rules": begun.behavior.model_dump(mode="json"),
        "policy": describe_policy(begun.policy),
        "versions": _versions(),
    }
    if begun.session_id:
        body["session"] = begun.session_id
    if begun.seed is not None:
        body["seed"] = begun.seed
    if begun.parent:
        body["parent"] = dict(begun.parent)
    if begun.tools:
        body["tools"] = {t.name: _tool_spec_hash(t) for t in begun.tools}
    if begun.state is None:
        return {**_json_fields(body), "messages": to_json(begun.messages, commitments)}
    return {**_json_fields(body), "at": encode(begun.state["state"]), "state": commitments.commitment_json(begun.state)}


_FIELD_WRITERS: dict[str, Callable[[OutcomeWriter, JournalEntry, CommitmentWriter], JsonFields]] = {
    "transition": _transition_fields,
    "run.created": _created_fields,
    "run.forked": _created_fields,
    "run.suspended": _suspended_fields,
}


_SALTED_KINDS = frozenset({"run.created", "run.forked", "run.resumed"})
"""Where a process begins to write, with a salt of its own for the secrets that it meets."""


def _tool_spec_hash(spec: ToolSpec) -> str:
    """SHA-256 (hex) of all that a model is told of a tool: the same as long as nobody changes it."""
    told = {"description": spec.description, "name": spec.name, "parameters": dict(spec.parameters)}
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def describe_policy(policy: Any) -> Data:
    """A policy in words and data: its class, and its fields where it is a dataclass."""
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


@cache
def _versions() -> Data:
    try:
        own = version("agentfsm")
    except PackageNotFoundError:
        own = "0"
    return {"agentfsm": own, "python": platform.python_version()}


_STATUS_AFTER: Mapping[str, Status] = {"run.suspended": "suspended", "run.finished": "finished"}


def owner_name() -> str:
    """Who we are, for people to read in an error."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class StoreJournal:
    """Keeps one run in a store, under a lease."""

    def __init__(self, store: Store, lease: Lease, writer: RecordWriter) -> None:
        self._store = store
        self._lease: Lease | None = lease
        self._writer = writer
        self._appends: deque[asyncio.Future[None]] = deque()  # what nobody has looked at yet, in order
        self._last_append: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """Why nothing can be kept any more, or None: the first error, since those behind it only follow from it."""
        while self._appends and self._appends[0].done():
            done = self._appends.popleft()
            error = None if done.cancelled() else done.exception()
            if self._error is None and isinstance(error, Exception):
                self._error = error
        return self._error

    @property
    def head(self) -> str:
        """The hash of the last record that was handed over, in hex."""
        return self._writer.head

    def push(self, entries: list[JournalEntry]) -> None:
        """Hand entries over, in order, without waiting."""
        if self._lease is None or self._ended or self.error is not None:
            return
        try:
            rows = self._writer.write(entries)
        except (TypeError, ValueError) as error:
            self._error = JournalError(f"the run cannot be written down: {error}")
            return
        status = _STATUS_AFTER.get(entries[-1][0], "running")
        self._last_append = self._append(self._lease, rows, status)
        self._ended = status != "running"  # the lease ends with it, unless it fails

    def _append(self, lease: Lease, records: Sequence[SealedRecord], status: Status) -> asyncio.Future[None]:
        handed = asyncio.ensure_future(self._store.append(lease, records, status))
        self._appends.append(handed)
        return handed

    async def flush(self) -> None:
        """Wait until everything handed over is durable.

        Raises:
            agentfsm.errors.StoreError: It cannot be kept; the run must not go on.
            agentfsm.errors.JournalError: An entry cannot be written as JSON.
        """
        if self._last_append is not None and self.error is None:
            cut_off = self._last_append.cancelled()  # whoever waited was; what was handed over is on its way
            if cut_off and self._lease is not None and not self._ended:
                self._last_append = self._append(self._lease, (), "running")
            with contextlib.suppress(Exception):  # the first error is told below
                await self._last_append  # order is kept by the store, so the last one stands for all
        if (error := self.error) is not None:
            if self._lease is not None:
                lease, self._lease = self._lease, None
                with contextlib.suppress(StoreError):  # the first error says more than this one
                    await self._store.release(lease)
            raise error
        if self._ended:
            self._lease = None


async def open_journal(
    store: Store,
    run_id: str,
    resume_point: ResumePoint | None,
    secret_arguments: Mapping[str, frozenset[str]],
    known_secrets: Iterable[SecretStr] = (),
) -> StoreJournal:
    """Take a run, new or known, and keep it from here on.

    Args:
        store: Where.
        run_id: The run.
        resume_point: Where a known run stood when it was read, or None for a new one.
        secret_arguments: Names of arguments that must not be written, by tool.
        known_secrets: What must not be written wherever it stands, beside the keys of the environment.

    Raises:
        StaleLease: Somebody else holds the run, or it has moved on since it was read.
        StoreError: The store cannot write.
    """
    lease = await store.acquire(run_id, owner_name(), new=resume_point is None)
    if resume_point is not None and (lease.seq, lease.hash) != (resume_point.seq, resume_point.hash):
        await store.release(lease)
        raise StaleLease(run_id, None, "has moved on since it was read")
    scribe = RecordWriter(lease.seq, lease.hash, lease.epoch, _secret_scrubber(secret_arguments, known_secrets))
    if resume_point is not None:
        scribe.resume_from(resume_point.tool, resume_point.results)
    return StoreJournal(store, lease, scribe)


def read_journal(
    recorder: Recorder,
    run_id: str,
    store: Store | None,
    secret_arguments: Mapping[str, frozenset[str]],
    known_secrets: Iterable[SecretStr] = (),
) -> list[Record]:
    """A run's records, from its store or, without one, written now; see ``open_journal``."""
    if store is not None:
        return read_records(store.records(run_id), run_id)
    scribe = RecordWriter(secrets=_secret_scrubber(secret_arguments, known_secrets))
    return read_records(scribe.write(recorder.entries), run_id)


def _secret_scrubber(arguments: Mapping[str, frozenset[str]], known_secrets: Iterable[SecretStr]) -> SecretScrubber:
    return SecretScrubber([*environment_secrets(), *(secret.get_secret_value() for secret in known_secrets)], arguments)
