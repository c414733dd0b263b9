"""Checks that all that a journal tells was allowed: moves, effects, waits, epochs, and what it was taken over to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from agentfsm.journal.chain import BadError
from agentfsm.journal.names import JUDGED, Names
from agentfsm.journal.records import FORM
from agentfsm.journal.store import Head

__all__ = ["CannotError", "Course"]

Data = dict[str, Any]

_ANY_TIME = frozenset({"redaction", "checkpoint"})
"""What may come behind everything, also behind the end."""

_TAKEN = frozenset({"run.created", "run.forked", "run.resumed", "run.migrated", *_ANY_TIME})
"""Where somebody takes the run: an epoch may begin there, and nowhere else."""

_WHILE_WAITING = frozenset({"run.resumed", "run.migrated", *_ANY_TIME})


class CannotError(Exception):
    """A journal of a form that this release does not know."""


class Course:
    """What one run did, as far as its records were looked at.

    Attributes:
        state: The state that it is in.
        status: ``none``, ``running``, ``suspended`` or ``finished``.
        waiting: What it waits for, where it does.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.state = ""
        self.status = "none"
        self.waiting = ""
        self._epoch = 0
        self._fingerprint = ""
        self._states: frozenset[str] = frozenset()
        self._finals: frozenset[str] = frozenset()
        self._waits: frozenset[str] = frozenset()
        self._table: dict[str, tuple[str, str, str]] = {}
        self._answered = False  # whether somebody has answered, and the run has not moved on it yet
        self._asked: tuple[int, str] | None = None  # number and hash of the record where it last came to wait
        self._taken_over = False  # whether a graph changed while it waited: it was noted as running from there on
        self._taken: set[str] = set()  # the rows that the run has taken, for a graph that it is taken over to
        self._begun: dict[str, str] = {}  # effects that were begun in this visit to a state, and how they may run
        self._ended: set[str] = set()
        self._excused = 0  # calls of which a person said that they did not run, and that are not begun again yet

    def record(self, body: Data, own: str) -> None:
        """Look at the next record.

        Args:
            body: The record.
            own: Its hash, in hex.

        Raises:
            BadError: It tells of something that was not allowed.
            CannotError: The journal is of another form.
        """
        kind, epoch = cast("str", body["kind"]), body["epoch"]
        if self.status == "none" and kind not in ("run.created", "run.forked"):
            raise BadError(f"a journal begins with run.created, not with {kind}")
        if epoch < self._epoch or (epoch > self._epoch and kind not in _TAKEN):
            raise BadError(f"it was written in epoch {epoch}, and the run was in epoch {self._epoch}")
        self._epoch = epoch
        if self.status == "finished" and kind not in _ANY_TIME:
            raise BadError(f"the run has ended, and {kind} comes behind")
        if self.status == "suspended" and kind not in _WHILE_WAITING:
            raise BadError(f"the run waits for a person, and {kind} comes behind")
        look = _KINDS.get(kind)
        if look is None:
            raise BadError(f"{kind} is no kind of record")
        getattr(self, look)(body)
        if kind == "run.suspended":
            self._asked = body["seq"], own

    def end(self, head: Head | None) -> None:
        """Hold what the store notes of the run against what its records tell, once every record was looked at.

        Args:
            head: What the store notes, where there is a store.

        Raises:
            BadError: The two differ.
        """
        if head is None:
            return
        told = "running" if self.status == "none" else self.status
        if head.status != told and not (self._taken_over and head.status == "running"):
            raise BadError(f"the store notes that the run is {head.status}, and by its records it is {told}")
        if head.epoch < self._epoch:
            raise BadError(f"the store notes epoch {head.epoch}, and the run was in epoch {self._epoch}")

    def still_open(self) -> list[str]:
        """What is not at its end yet, a line each."""
        if self.status == "none":
            return ["cut off before its first record"]
        if self.status == "suspended":
            return [f"waits for a person ({self.waiting})"]
        if self.status != "running":
            return []
        return [
            f"cut off, or being run, in {self.state}",
            *(
                f"effect {eid} is begun and has no result"
                for eid, policy in self._begun.items()
                if policy == "once" and eid not in self._ended
            ),
        ]

    # -- one method a kind ----------------------------------------------------------------------------

    def _created(self, body: Data) -> None:
        if self.status != "none":
            raise BadError("a journal begins only once")
        if body["form"] != FORM:
            raise CannotError(f"the journal is of form {body['form']}; this release knows form {FORM}")
        if body["run"] != self.run_id:
            raise BadError(f"it belongs to run {body['run']!r}")
        self._pin(body["graph"])
        self.state = body.get("at") or body["graph"]["states"][0][0]
        self.status = "running"
        self._answered = self.state in self._waits  # a signed record, and the answer to it, begin a journal

    def _pin(self, graph: Data) -> None:
        table = {"states": graph["states"], "transitions": graph["transitions"]}
        if hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest() != graph["fingerprint"]:
            raise BadError("the pinned graph is not the one of its fingerprint")
        self._fingerprint = graph["fingerprint"]
        self._states = frozenset(name for name, _, _, _ in graph["states"])
        self._finals = frozenset(name for name, _, final, _ in graph["states"] if final)
        self._waits = frozenset(name for name, waits, _, _ in graph["states"] if waits)
        self._table = {}
        places: dict[str, int] = {}
        for source, guard, target, _ in graph["transitions"]:
            place = places[source] = places.get(source, -1) + 1
            self._table[f"{source}.{guard}"] = (source, target, "0" * place + "1")

    def _transition(self, body: Data) -> None:
        way = body["transition"]
        row = self._table.get(way)
        if row is None:
            raise BadError(f"{way} is no row of the pinned graph")
        source, target, tried = row
        if source != self.state:
            raise BadError(f"{way} cannot be taken in {self.state!r}")
        if body["to"] != target:
            raise BadError(f"{way} leads to {target!r}, not to {body['to']!r}")
        if body["tried"] != tried:
            raise BadError(f"{way} is taken when {len(tried) - 1} guards before it say no, not so")
        ((what, outcome),) = body["out"].items()
        if what == "answered":
            if not self._answered:
                raise BadError("a person's answer moves it, and nothing says that somebody was asked and answered")
            self._answered = False
        for result in outcome.get("results", ()):
            if isinstance(result, str) and result not in self._ended:
                raise BadError(f"it takes up the result of effect {result}, which has none")
        if way.endswith(".doubt_settled") and outcome["reply"]["kind"] == "did_not_run":
            self._excused += 1
        self._taken.add(way)
        self.state = target
        if "waiting" in outcome:
            if "held" in outcome:  # sub-agents that wait for a person go on as they are
                self._begun = {eid: policy for eid, policy in self._begun.items() if eid in self._ended}
            return  # calls that were cut off stay in doubt
        if source not in self._waits:
            self._begun, self._ended, self._excused = {}, set(), 0

    def _intent(self, body: Data) -> None:
        eid, policy = body["eid"], body["policy"]
        if self._begun.get(eid) == "once" and eid not in self._ended:
            if not self._excused:
                raise BadError(f"effect {eid} of {body['name']} may run only once, and is begun again")
            self._excused -= 1
        self._begun[eid] = policy

    def _result(self, body: Data) -> None:
        eid = body["eid"]
        if eid not in self._begun:
            raise BadError(f"effect {eid} has a result, and nothing says that it was begun")
        if eid in self._ended:
            raise BadError(f"effect {eid} has two results")
        self._ended.add(eid)

    def _suspended(self, body: Data) -> None:
        if self.state not in self._waits:
            raise BadError(f"the run is in {self.state!r}, where it waits for nobody")
        self.status, self._taken_over = "suspended", False
        self.waiting = body["waiting"]["kind"]

    def _resumed(self, body: Data) -> None:
        if "to" in body and self._asked != (to := (body["to"]["seq"], body["to"]["hash"])):
            raise BadError(f"it answers record {to[0]} ({to[1][:12]}), which does not ask what the run waits for")
        if "to" in body and self.status != "suspended":
            raise BadError(f"it answers record {body['to']['seq']}, which was answered before")
        self.status, self._answered, self._taken_over = "running", "to" in body, False

    def _migrated(self, body: Data) -> None:
        if body["from"] != self._fingerprint:
            raise BadError(f"it takes the run over from graph {body['from'][:12]}, which is not the run's")
        if body["judged"] not in JUDGED:
            raise BadError(f"{body['judged']!r} is no way to judge a change of graph")
        names, waited, was = Names.read(body), self.state in self._waits, self._table
        self._pin(body["graph"])
        state = names.state(self.state)
        if state != body["to"] or state not in self._states:
            raise BadError(f"it takes the run over to {body['to']!r}, which is not what {self.state!r} is called there")
        if waited != (state in self._waits):
            raise BadError(f"it takes the run over to {state!r}: the one waits for a person, and the other does not")
        if body["judged"] == "replayed":
            for way in sorted(self._taken):
                there = self._table.get(names.transition(way))
                if there is None or there[1] != names.state(was[way][1]):
                    raise BadError(f"it says that the run's path is the same there, and {way} is no row of that graph")
            self._taken = {names.transition(way) for way in self._taken}
        else:
            self._taken = set()
        self.state, self._taken_over = state, self.status == "suspended"

    def _finished(self, body: Data) -> None:
        if self.state not in self._finals:
            raise BadError(f"the run is in {self.state!r}, which is no end")
        self.status = "finished"

    def _aside(self, body: Data) -> None:
        """A record beside the run's course: it moves nothing."""


_KINDS: Mapping[str, str] = {
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
