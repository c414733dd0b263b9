"""Checks a run's journal: that nothing was changed, and that everything in it was allowed.

1. Numbers go up by one, and every hash fits its record and the one before.
2. What stands hidden fits its commitment; what is missing was redacted, and a record says so.
3. The run starts where its pinned graph starts, and every move is a row of that graph, taken because every
   row in front of it said no.
4. Epochs only rise, and only where somebody takes the run up; a run that has ended does nothing more.
5. Every effect was written down before its result; one that may run only once was begun twice only after a
   person had said that it did not run.
6. The store's own note of the last record says the same, and so does a checkpoint, where there is one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentfsm.journal.records import FORM, START, Row
from agentfsm.journal.store import Head

__all__ = ["CANNOT", "GOOD", "OPEN", "TAMPERED", "Report", "verify"]

GOOD, TAMPERED, CANNOT, OPEN = 0, 1, 3, 4
"""Exit codes of ``agentfsm verify``; 2 is wrong usage."""

Data = dict[str, Any]

_HIDDEN = re.compile(r'\{"#":\[(\d+),"([0-9a-f]{64})"\]\}')
_SALTED = re.compile(r'\["((?:[0-9a-f]{2})*)",')
_value_at = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Report:
    """What was found out about one run's journal.

    Attributes:
        run_id: The run.
        code: ``GOOD``, ``TAMPERED``, ``CANNOT`` (it cannot be verified) or ``OPEN`` (good, not at its end).
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


class _BadError(Exception):
    """A record is not what it should be."""


class _CannotError(Exception):
    """A journal of a form that this release does not know."""


def verify(
    run_id: str, rows: Sequence[Row], head: Head | None = None, sealed: Mapping[int, str] | None = None
) -> Report:
    """Check a run's journal.

    Args:
        run_id: The run.
        rows: Its rows, in order.
        head: What the store notes of its last record, where there is a store.
        sealed: Hashes of records by number, from checkpoints that were found good.
    """
    check = _Check(run_id)
    seq = 0
    try:
        for seq, row in enumerate(rows, 1):
            check.row(row, seq)
        seq = len(rows)
        check.end(head, sealed or {}, rows)
    except _BadError as bad:
        return Report(run_id, TAMPERED, len(rows), seq, str(bad))
    except _CannotError as cannot:
        return Report(run_id, CANNOT, len(rows), seq, str(cannot))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return Report(run_id, TAMPERED, len(rows), seq, f"it is no record: {type(error).__name__}: {error}")
    still = check.still_open()
    return Report(run_id, OPEN if still else GOOD, len(rows), open=still)


class _Check:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.hash = START
        self.epoch = 0
        self.state = ""
        self.finals: frozenset[str] = frozenset()
        self.waits: frozenset[str] = frozenset()
        self.table: dict[str, tuple[str, str, str]] = {}
        self.status = "none"
        self.waiting = ""
        self.begun: dict[str, str] = {}  # effects that were begun in this visit to a state, and how they may run
        self.ended: set[str] = set()
        self.excused = 0  # calls of which a person said that they did not run, and that are not begun again yet
        self.missing: dict[tuple[int, int], None] = {}  # hidden values that are gone
        self.redacted: set[tuple[int, int]] = set()
        self.left: list[tuple[int, int]] = []

    # -- one record -----------------------------------------------------------------------------------

    def row(self, row: Row, seq: int) -> None:
        if row.seq != seq:
            raise _BadError(f"it has number {row.seq} where {seq} was to come: a record is missing, or out of order")
        own = hashlib.sha256(b"\0" + bytes.fromhex(self.hash) + row.body.encode()).hexdigest()
        if own != row.hash:
            raise _BadError("its hash does not fit: it was changed, or what stands before it was")
        self.hash = own
        body: Data = json.loads(row.body)
        if body["seq"] != seq:
            raise _BadError(f"it says that it is number {body['seq']}")
        self._hidden(row, seq)
        kind = cast("str", body["kind"])
        if self.status == "none" and kind not in ("run.created", "run.forked"):
            raise _BadError(f"a journal begins with run.created, not with {kind}")
        self._epoch(kind, body["epoch"])
        if self.status == "finished" and kind not in ("redaction", "checkpoint"):
            raise _BadError(f"the run has ended, and {kind} comes behind")
        if self.status == "suspended" and kind not in ("redaction", "checkpoint", "run.resumed", "run.migrated"):
            raise _BadError(f"the run waits for a person, and {kind} comes behind")
        check = _CHECKS.get(kind)
        if check is None:
            raise _BadError(f"{kind} is no kind of record")
        getattr(self, check)(body)

    def _hidden(self, row: Row, seq: int) -> None:
        refs = _HIDDEN.findall(row.body)
        if not refs:
            if row.hidden:
                raise _BadError("values stand beside it that it does not know")
            return
        if not row.hidden:
            raise _BadError("what it keeps hidden is gone, and nothing says that it was redacted")
        kept = _kept(row.hidden)
        if len(kept) != len(refs):
            raise _BadError(f"it keeps {len(refs)} values hidden, and {len(kept)} stand beside it")
        for place, promised in refs:
            found = kept[int(place)]
            if found is None:
                self.missing[seq, int(place)] = None
                continue
            salt, text = found
            if hashlib.sha256(salt + text.encode()).hexdigest() != promised:
                raise _BadError(f"its hidden value {place} is not the one that was put aside")

    def _epoch(self, kind: str, epoch: int) -> None:
        taken = kind in ("run.created", "run.forked", "run.resumed", "run.migrated", "redaction", "checkpoint")
        if epoch < self.epoch or (epoch > self.epoch and not taken):
            raise _BadError(f"it was written in epoch {epoch}, and the run was in epoch {self.epoch}")
        self.epoch = epoch

    # -- one method a kind ----------------------------------------------------------------------------

    def created(self, body: Data) -> None:
        if self.status != "none":
            raise _BadError("a journal begins only once")
        if body["form"] != FORM:
            raise _CannotError(f"the journal is of form {body['form']}; this release knows form {FORM}")
        if body["run"] != self.run_id:
            raise _BadError(f"it belongs to run {body['run']!r}")
        self.pin(body["graph"])
        self.state = body.get("at") or body["graph"]["states"][0][0]
        self.status = "running"

    def pin(self, graph: Data) -> None:
        table = {"states": graph["states"], "transitions": graph["transitions"]}
        if hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest() != graph["fingerprint"]:
            raise _BadError("the pinned graph is not the one of its fingerprint")
        self.finals = frozenset(name for name, _, final, _ in graph["states"] if final)
        self.waits = frozenset(name for name, waits, _, _ in graph["states"] if waits)
        places: dict[str, int] = {}
        for source, guard, target, _ in graph["transitions"]:
            place = places[source] = places.get(source, -1) + 1
            self.table[f"{source}.{guard}"] = (source, target, "0" * place + "1")

    def transition(self, body: Data) -> None:
        row = self.table.get(body["transition"])
        if row is None:
            raise _BadError(f"{body['transition']} is no row of the pinned graph")
        source, target, tried = row
        if source != self.state:
            raise _BadError(f"{body['transition']} cannot be taken in {self.state!r}")
        if body["to"] != target:
            raise _BadError(f"{body['transition']} leads to {target!r}, not to {body['to']!r}")
        if body["tried"] != tried:
            raise _BadError(f"{body['transition']} is taken when {len(tried) - 1} guards before it say no, not so")
        ((_, outcome),) = body["out"].items()
        for result in outcome.get("results", ()):
            if isinstance(result, str) and result not in self.ended:
                raise _BadError(f"it takes up the result of effect {result}, which has none")
        if body["transition"].endswith(".doubt_settled") and outcome["reply"]["kind"] == "did_not_run":
            self.excused += 1
        self.state = target
        if "waiting" in outcome:
            if "held" in outcome:  # sub-agents that wait for a person go on as they are
                self.begun = {eid: policy for eid, policy in self.begun.items() if eid in self.ended}
            return  # calls that were cut off stay in doubt
        if source not in self.waits:
            self.begun, self.ended, self.excused = {}, set(), 0

    def intent(self, body: Data) -> None:
        eid, policy = body["eid"], body["policy"]
        if self.begun.get(eid) == "once" and eid not in self.ended:
            if not self.excused:
                raise _BadError(f"effect {eid} of {body['name']} may run only once, and is begun again")
            self.excused -= 1
        self.begun[eid] = policy

    def result(self, body: Data) -> None:
        eid = body["eid"]
        if eid not in self.begun:
            raise _BadError(f"effect {eid} has a result, and nothing says that it was begun")
        if eid in self.ended:
            raise _BadError(f"effect {eid} has two results")
        self.ended.add(eid)

    def suspended(self, body: Data) -> None:
        if self.state not in self.waits:
            raise _BadError(f"the run is in {self.state!r}, where it waits for nobody")
        self.status = "suspended"
        self.waiting = body["waiting"]["kind"]

    def resumed(self, body: Data) -> None:
        self.status = "running"

    def migrated(self, body: Data) -> None:
        self.table = {}
        self.pin(body["graph"])
        self.state = body.get("to", self.state)

    def finished(self, body: Data) -> None:
        if self.state not in self.finals:
            raise _BadError(f"the run is in {self.state!r}, which is no end")
        self.status = "finished"

    def redaction(self, body: Data) -> None:
        self.redacted.update((body["of"], place) for place in body["places"])

    def checkpoint(self, body: Data) -> None:
        """Nothing to check: a checkpoint proves something only from outside."""

    # -- the whole ------------------------------------------------------------------------------------

    def end(self, head: Head | None, sealed: Mapping[int, str], rows: Sequence[Row]) -> None:
        for seq, expected in sealed.items():
            if seq > len(rows):
                raise _BadError(f"a checkpoint knows {seq} records, and {len(rows)} are there: the end was cut off")
            if rows[seq - 1].hash != expected:
                raise _BadError(f"a checkpoint knows another record {seq}: the journal was written anew")
        if head is not None and (head.seq, head.hash) != (len(rows), self.hash):
            raise _BadError(f"the store notes {head.seq} records with another end: records were cut off or added")
        for seq, place in self.missing:
            if (seq, place) not in self.redacted:
                raise _BadError(f"hidden value {place} of record {seq} is gone, and nothing says that it was redacted")
        self.left = sorted(self.redacted - self.missing.keys())

    def still_open(self) -> tuple[str, ...]:
        lines: list[str] = []
        if self.status == "suspended":
            lines.append(f"waits for a person ({self.waiting})")
        elif self.status == "running":
            lines.append(f"cut off, or being run, in {self.state}")
            lines += [
                f"effect {eid} is begun and has no result"
                for eid, policy in self.begun.items()
                if policy == "once" and eid not in self.ended
            ]
        lines += [
            f"hidden value {place} of record {seq} is to be redacted, and is still there" for seq, place in self.left
        ]
        return tuple(lines)


_CHECKS = {
    "run.created": "created",
    "run.forked": "created",
    "run.suspended": "suspended",
    "run.resumed": "resumed",
    "run.migrated": "migrated",
    "run.finished": "finished",
    "transition": "transition",
    "effect.intent": "intent",
    "effect.result": "result",
    "redaction": "redaction",
    "checkpoint": "checkpoint",
}


def _kept(text: str) -> list[tuple[bytes, str] | None]:
    """The salts and the texts that stand beside a record, the texts exactly as they were hashed."""
    found: list[tuple[bytes, str] | None] = []
    place = 1
    while text[place] != "]":
        place += text[place] == ","
        if text.startswith("null", place):
            found.append(None)
            place += 4
            continue
        salted = _SALTED.match(text, place)
        if salted is None:
            raise _BadError("what stands beside it cannot be read")
        _, end = _value_at(text, salted.end())
        found.append((bytes.fromhex(salted.group(1)), text[salted.end() : end]))
        place = end + 1
    return found
