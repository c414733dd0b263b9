"""Verifies a stored or exported journal: hash chain, legal history, store head and checkpoint.

What is checked:

1. Sequence numbers increase by one, and every hash matches its record and the previous hash.
2. Hidden values match their commitments; a missing value was redacted, and a record says so.
3. The run starts where its pinned graph starts. Every transition is a row of that graph, taken because every earlier
   row of its state said no. A migrated run continues in the same state, or in the one its record names; if the
   record says the path was replayed, every transition of it exists in the new graph too.
4. Epochs only increase, and only where the run is acquired; a run that has ended does nothing more.
5. Every effect was recorded before its result. One that may run only once was started again only after a person said
   that it did not run. A human reply answers the record that asked, and no other.
6. The store's head of the run (last record, status, epoch) agrees, and so does a checkpoint, if given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.hash_chain import HashChainVerifier, InvalidRecordError
from agentfsm.journal.records import FORMAT_VERSION, MIGRATION_BASES, RenameMap, SealedRecord, is_kind, read_line
from agentfsm.journal.store import Head, Store, consistent_read

__all__ = [
    "GOOD",
    "OPEN",
    "TAMPERED",
    "UNVERIFIABLE",
    "CheckpointHeads",
    "HistoryVerifier",
    "UnsupportedFormatError",
    "VerificationReport",
    "verify",
    "verify_export",
    "verify_stored_run",
]


Data = dict[str, Any]

_KINDS_AFTER_END = frozenset({"redaction", "checkpoint"})
"""What may come behind everything, also behind the end."""

_EPOCH_START_KINDS = frozenset({"run.created", "run.forked", "run.resumed", "run.migrated", *_KINDS_AFTER_END})
"""Where somebody takes the run: an epoch may begin there, and nowhere else."""

_KINDS_WHILE_SUSPENDED = frozenset({"run.resumed", "run.migrated", *_KINDS_AFTER_END})


class UnsupportedFormatError(Exception):
    """A journal of a form that this release does not know."""


class HistoryVerifier:
    """What one run did, as far as its records were looked at.

    Attributes:
        state: The state that it is in.
        status: ``none``, ``running``, ``suspended`` or ``finished``.
        waiting_for: What it waits for, where it does.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.state = ""
        self.status = "none"
        self.waiting_for = ""
        self._epoch = 0
        self._fingerprint = ""
        self._states: frozenset[str] = frozenset()
        self._finals: frozenset[str] = frozenset()
        self._waits: frozenset[str] = frozenset()
        self._transitions_by_id: dict[str, tuple[str, str, str]] = {}
        self._reply_received = False  # whether somebody has answered, and the run has not moved on it yet
        self._request_ref: tuple[int, str] | None = None  # number and hash of the record where it last came to wait
        self._migrated_while_suspended = (
            False  # whether a graph changed while it waited: it was noted as running from there on
        )
        self._path: set[str] = set()  # the rows that the run has taken, for a graph that it is taken over to
        self._started_effects: dict[
            str, str
        ] = {}  # effects that were begun in this visit to a state, and how they may run
        self._finished_effects: set[str] = set()
        self._retries_allowed = (
            0  # calls of which a person said that they did not run, and that are not begun again yet
        )

    def verify_record(self, body: Data, digest: str) -> None:
        """Look at the next record.

        Args:
            body: The record.
            digest: Its hash, in hex.

        Raises:
            BadError: It tells of something that was not allowed.
            CannotError: The journal is of another form.
        """
        kind, epoch = cast("str", body["kind"]), body["epoch"]
        if self.status == "none" and kind not in ("run.created", "run.forked"):
            raise InvalidRecordError(f"a journal begins with run.created, not with {kind}")
        if epoch < self._epoch or (epoch > self._epoch and kind not in _EPOCH_START_KINDS):
            raise InvalidRecordError(f"it was written in epoch {epoch}, and the run was in epoch {self._epoch}")
        self._epoch = epoch
        if self.status == "finished" and kind not in _KINDS_AFTER_END:
            raise InvalidRecordError(f"the run has ended, and {kind} comes behind")
        if self.status == "suspended" and kind not in _KINDS_WHILE_SUSPENDED:
            raise InvalidRecordError(f"the run waits for a person, and {kind} comes behind")
        look = _HANDLERS.get(kind)
        if look is None:
            raise InvalidRecordError(f"{kind} is no kind of record")
        getattr(self, look)(body)
        if kind == "run.suspended":
            self._request_ref = body["seq"], digest

    def finish(self, head: Head | None) -> None:
        """Hold what the store notes of the run against what its records tell, once every record was looked at.

        Args:
            head: What the store notes, where there is a store.

        Raises:
            BadError: The two differ.
        """
        if head is None:
            return
        told = "running" if self.status == "none" else self.status
        if head.status != told and not (self._migrated_while_suspended and head.status == "running"):
            raise InvalidRecordError(f"the store notes that the run is {head.status}, and by its records it is {told}")
        if head.epoch < self._epoch:
            raise InvalidRecordError(f"the store notes epoch {head.epoch}, and the run was in epoch {self._epoch}")

    def open_items(self) -> list[str]:
        """What is not at its end yet, a line each."""
        if self.status == "none":
            return ["cut off before its first record"]
        if self.status == "suspended":
            return [f"waits for a person ({self.waiting_for})"]
        if self.status != "running":
            return []
        return [
            f"cut off, or being run, in {self.state}",
            *(
                f"effect {eid} is begun and has no result"
                for eid, policy in self._started_effects.items()
                if policy == "once" and eid not in self._finished_effects
            ),
        ]

    # -- one method a kind ----------------------------------------------------------------------------

    def _created(self, body: Data) -> None:
        if self.status != "none":
            raise InvalidRecordError("a journal begins only once")
        if body["form"] != FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"the journal is of form {body['form']}; this release knows form {FORMAT_VERSION}"
            )
        if body["run"] != self.run_id:
            raise InvalidRecordError(f"it belongs to run {body['run']!r}")
        self._pin_graph(body["graph"])
        self.state = body.get("at") or body["graph"]["states"][0][0]
        self.status = "running"
        self._reply_received = self.state in self._waits  # a signed record, and the answer to it, begin a journal

    def _pin_graph(self, graph: Data) -> None:
        table = {"states": graph["states"], "transitions": graph["transitions"]}
        if hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest() != graph["fingerprint"]:
            raise InvalidRecordError("the pinned graph is not the one of its fingerprint")
        self._fingerprint = graph["fingerprint"]
        self._states = frozenset(name for name, _, _, _ in graph["states"])
        self._finals = frozenset(name for name, _, final, _ in graph["states"] if final)
        self._waits = frozenset(name for name, waits, _, _ in graph["states"] if waits)
        self._transitions_by_id = {}
        places: dict[str, int] = {}
        for source, guard, target, _ in graph["transitions"]:
            place = places[source] = places.get(source, -1) + 1
            self._transitions_by_id[f"{source}.{guard}"] = (source, target, "0" * place + "1")

    def _transition(self, body: Data) -> None:
        way = body["transition"]
        row = self._transitions_by_id.get(way)
        if row is None:
            raise InvalidRecordError(f"{way} is no row of the pinned graph")
        source, target, tried = row
        if source != self.state:
            raise InvalidRecordError(f"{way} cannot be taken in {self.state!r}")
        if body["to"] != target:
            raise InvalidRecordError(f"{way} leads to {target!r}, not to {body['to']!r}")
        if body["tried"] != tried:
            raise InvalidRecordError(f"{way} is taken when {len(tried) - 1} guards before it say no, not so")
        ((what, outcome),) = body["out"].items()
        if what == "answered":
            if not self._reply_received:
                raise InvalidRecordError(
                    "a person's answer moves it, and nothing says that somebody was asked and answered"
                )
            self._reply_received = False
        for result in outcome.get("results", ()):
            if isinstance(result, str) and result not in self._finished_effects:
                raise InvalidRecordError(f"it takes up the result of effect {result}, which has none")
        if way.endswith(".doubt_settled") and outcome["reply"]["kind"] == "did_not_run":
            self._retries_allowed += 1
        self._path.add(way)
        self.state = target
        if "waiting" in outcome:
            if "held" in outcome:  # sub-agents that wait for a person go on as they are
                self._started_effects = {
                    eid: policy for eid, policy in self._started_effects.items() if eid in self._finished_effects
                }
            return  # calls that were cut off stay in doubt
        if source not in self._waits:
            self._started_effects, self._finished_effects, self._retries_allowed = {}, set(), 0

    def _intent(self, body: Data) -> None:
        eid, policy = body["eid"], body["policy"]
        if self._started_effects.get(eid) == "once" and eid not in self._finished_effects:
            if not self._retries_allowed:
                raise InvalidRecordError(f"effect {eid} of {body['name']} may run only once, and is begun again")
            self._retries_allowed -= 1
        self._started_effects[eid] = policy

    def _result(self, body: Data) -> None:
        eid = body["eid"]
        if eid not in self._started_effects:
            raise InvalidRecordError(f"effect {eid} has a result, and nothing says that it was begun")
        if eid in self._finished_effects:
            raise InvalidRecordError(f"effect {eid} has two results")
        self._finished_effects.add(eid)

    def _suspended(self, body: Data) -> None:
        if self.state not in self._waits:
            raise InvalidRecordError(f"the run is in {self.state!r}, where it waits for nobody")
        self.status, self._migrated_while_suspended = "suspended", False
        self.waiting_for = body["waiting"]["kind"]

    def _resumed(self, body: Data) -> None:
        if "to" in body and self._request_ref != (to := (body["to"]["seq"], body["to"]["hash"])):
            raise InvalidRecordError(
                f"it answers record {to[0]} ({to[1][:12]}), which does not ask what the run waits for"
            )
        if "to" in body and self.status != "suspended":
            raise InvalidRecordError(f"it answers record {body['to']['seq']}, which was answered before")
        self.status, self._reply_received, self._migrated_while_suspended = "running", "to" in body, False

    def _migrated(self, body: Data) -> None:
        if body["from"] != self._fingerprint:
            raise InvalidRecordError(f"it takes the run over from graph {body['from'][:12]}, which is not the run's")
        if body["judged"] not in MIGRATION_BASES:
            raise InvalidRecordError(f"{body['judged']!r} is no way to judge a change of graph")
        names, waited, was = RenameMap.from_record(body), self.state in self._waits, self._transitions_by_id
        self._pin_graph(body["graph"])
        state = names.state(self.state)
        if state != body["to"] or state not in self._states:
            raise InvalidRecordError(
                f"it takes the run over to {body['to']!r}, which is not what {self.state!r} is called there"
            )
        if waited != (state in self._waits):
            raise InvalidRecordError(
                f"it takes the run over to {state!r}: the one waits for a person, and the other does not"
            )
        if body["judged"] == "replayed":
            for way in sorted(self._path):
                there = self._transitions_by_id.get(names.transition(way))
                if there is None or there[1] != names.state(was[way][1]):
                    raise InvalidRecordError(
                        f"it says that the run's path is the same there, and {way} is no row of that graph"
                    )
            self._path = {names.transition(way) for way in self._path}
        else:
            self._path = set()
        self.state, self._migrated_while_suspended = state, self.status == "suspended"

    def _finished(self, body: Data) -> None:
        if self.state not in self._finals:
            raise InvalidRecordError(f"the run is in {self.state!r}, which is no end")
        self.status = "finished"

    def _aside(self, body: Data) -> None:
        """A record beside the run's course: it moves nothing."""


_HANDLERS: Mapping[str, str] = {
    "run.created": "_created",
    "run.forked": "_created",
    "run.suspended": "_suspended",
    "run.resumed": "_resumed",
    "run.migrated": "_migrated",
    "run.finished": "_finished",
    "transition": "_transition",
    "effect.intent": "_intent",
    "effect.result": "_result",
    "redaction": "_aside",
    "checkpoint": "_aside",
}
"""The method that looks at each kind of record."""


GOOD, TAMPERED, UNVERIFIABLE, OPEN = 0, 1, 3, 4
"""Exit codes of ``agentfsm verify``; 2 is wrong usage."""


@dataclass(frozen=True)
class VerificationReport:
    """What was found out about one run's journal.

    Attributes:
        run_id: The run.
        code: ``GOOD_BODIES``, ``TAMPERED``, ``UNVERIFIABLE`` (it cannot be verified) or ``PERMISSIVE_BEHAVIOR`` (good, not at its end).
        records: How many records were looked at.
        seq: The first bad record, or None.
        reason: What is wrong with it, or an empty string.
        open: What is not at its end yet, a line each.
    """

    run_id: str
    code: int
    records: int
    seq: int | None = None
    reason: str = ""
    open: tuple[str, ...] = ()


def verify(
    run_id: str,
    records: Sequence[SealedRecord],
    head: Head | None = None,
    checkpoint_hashes: Mapping[int, str] | None = None,
) -> VerificationReport:
    """Check a run's journal.

    Args:
        run_id: The run.
        records: Its rows, in order.
        head: What the store notes of its last record, where there is a store.
        checkpoint_hashes: Hashes of records by number, from checkpoints that were found good.
    """
    chain, course = HashChainVerifier(), HistoryVerifier(run_id)
    seq = 0
    try:
        for seq, row in enumerate(records, 1):
            body = chain.verify_record(row, seq)
            course.verify_record(body, row.hash)
            if body["kind"] == "redaction":
                chain.note_redaction(body)
        seq = len(records)
        chain.finish(head, checkpoint_hashes or {}, records)
        course.finish(head)
    except InvalidRecordError as bad:
        return VerificationReport(run_id, TAMPERED, len(records), bad.seq or seq or None, str(bad))
    except UnsupportedFormatError as cannot:
        return VerificationReport(run_id, UNVERIFIABLE, len(records), seq, str(cannot))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return VerificationReport(
            run_id, TAMPERED, len(records), seq, f"it is no record: {type(error).__name__}: {error}"
        )
    still = (
        *course.open_items(),
        *(
            f"hidden value {place} of record {of} is to be redacted, and is still there"
            for of, place in chain.unfinished_redactions()
        ),
    )
    return VerificationReport(run_id, OPEN if still else GOOD, len(records), open=still)


CheckpointHeads = Mapping[str, tuple[int, str]]
"""Number and hash of the last record of each run that a checkpoint knows."""


def verify_stored_run(store: Store, run_id: str, checkpoint: CheckpointHeads) -> VerificationReport:
    """Check one run of a store.

    Args:
        store: Where it is.
        run_id: The run.
        checkpoint: What a checkpoint knows; empty where there is none.

    Raises:
        UnknownRunError: There is no such run, and no checkpoint knows one.
    """
    try:
        if run_id in checkpoint and store.head(run_id) is None:
            return VerificationReport(run_id, TAMPERED, 0, None, "a checkpoint knows it, and the store does not")
        rows, head = consistent_read(store, run_id)
    except UnknownRunError:
        raise
    except StoreError as error:
        return _report_unreadable(store, run_id, str(error))
    told = verify(run_id, rows, head, _checkpoint_hashes(checkpoint, run_id))
    if told.code == TAMPERED or not rows or not is_kind(rows[0], "run.forked"):
        return told
    why = _check_fork_parent(store, rows[0])
    return VerificationReport(run_id, TAMPERED, len(rows), 1, why) if why else told


def _check_fork_parent(store: Store, first_record: SealedRecord) -> str:
    """What is wrong with where a run says that it is forked from, or an empty string."""
    try:
        parent = json.loads(first_record.body)["parent"]
        run_id, seq, seal = str(parent["run"]), int(parent["seq"]), parent["hash"]
        found = store.records(run_id, seq - 1)
    except StoreError:  # it is kept elsewhere; or it cannot be read, which is said where it is checked itself
        return ""
    except (LookupError, TypeError, ValueError):
        return "it does not say what it is forked from"
    if found and found[0].hash == seal:
        return ""
    return f"it is forked from record {seq} of run {run_id}, and that is another one"


def _report_unreadable(store: Store, run_id: str, why: str) -> VerificationReport:
    """What is known of a run of which some record cannot be read: the last such record."""
    try:
        head = store.head(run_id)
        high = 0 if head is None else head.seq
        store.records(run_id, high)
    except StoreError as error:
        return VerificationReport(run_id, UNVERIFIABLE, 0, None, str(error))
    low, records = 0, high
    while low < high:
        middle = (low + high) // 2
        try:
            store.records(run_id, middle)
        except StoreError:
            low = middle + 1
        else:
            high = middle
    if not low:
        return VerificationReport(run_id, UNVERIFIABLE, records, None, why)  # by now it can be read
    return VerificationReport(run_id, TAMPERED, records, low, f"it cannot be read: {why}")


def verify_export(text: str, checkpoint: CheckpointHeads | None) -> VerificationReport:
    """Check an exported journal.

    Args:
        text: The file's.
        checkpoint: What a checkpoint knows, or None where there is none.

    Raises:
        JournalError: It holds no journal.
    """
    lines = text.rstrip("\n").split("\n")
    rows: list[SealedRecord] = [read_line(1, lines[0])]
    try:
        run_id = str(json.loads(rows[0].body)["run"])
    except (LookupError, ValueError, TypeError):
        raise JournalError("line 1 does not say whose journal this is") from None
    for number, line in enumerate(lines[1:], 2):
        try:
            rows.append(read_line(number, line))
        except JournalError as error:
            so_far = verify(run_id, rows)
            return (
                so_far
                if so_far.code == TAMPERED
                else VerificationReport(run_id, TAMPERED, len(lines), number, str(error))
            )
    told = verify(run_id, rows, None, _checkpoint_hashes(checkpoint or {}, run_id))
    if checkpoint is not None and run_id not in checkpoint and told.code != TAMPERED:
        return VerificationReport(run_id, UNVERIFIABLE, len(rows), None, "the checkpoint does not know this run")
    return told


def _checkpoint_hashes(checkpoint: CheckpointHeads, run_id: str) -> dict[int, str]:
    seq, seal = checkpoint.get(run_id, (0, ""))
    return {seq: seal} if seq else {}
