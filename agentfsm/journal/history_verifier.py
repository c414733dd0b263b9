"""Verifies that the history of one run is legal: that each of its records may follow those before it.

1. The run starts where its pinned graph starts. Every transition is a row of that graph, taken because the guard of
   every earlier row of its state was false. A migrated run continues in the same state, or in the one that its record
   names; if the record says that the path was replayed, every transition of it exists in the new graph too.
2. Epochs only increase, and only where the run is acquired; a run that has ended does nothing more.
3. Every effect was recorded before its result. One that may run only once was started again only after a human reply
   said that it did not run. A human reply answers the latest request, and no other.
   A call that needs several approvals got them: from distinct actors with the roles that the request names, not from
   the requester if it says so; and it was escalated to other roles only when that was due.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from pydantic import TypeAdapter

from agentfsm.errors import ConfigurationError, HumanReplyError
from agentfsm.journal.hash_chain import InvalidRecordError
from agentfsm.journal.records import FORMAT_VERSION, MIGRATION_BASES, RenameMap
from agentfsm.journal.store import Head
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.failures import Action
from agentfsm.loop.outcomes import CLOSES_BATCH, may_leave_undecided
from agentfsm.loop.quorum import APPROVING_REPLIES, Actor, Quorum
from agentfsm.loop.stored_table import StoredTable, read_table
from agentfsm.machine.declaration import Transition
from agentfsm.machine.graph import table_fingerprint

Data = dict[str, Any]

KINDS_AFTER_END = frozenset({"redaction", "checkpoint", "run.adopted"})
"""Kinds that may follow any record, also the end of the run."""

_EPOCH_START_KINDS = frozenset({"run.created", "run.forked", "run.resumed", "run.migrated", *KINDS_AFTER_END})
"""Kinds with which an epoch may begin: the first record after the run was acquired."""

_KINDS_WHILE_SUSPENDED = frozenset({"run.resumed", "run.migrated", *KINDS_AFTER_END})


ENDING_EVENTS = {
    "completed": "RunCompleted",
    "handed_off": "Handoff",
    "partial": "PartialRunSummary",
    "cancelled": "RunCancelled",
    "aborted": "RunAborted",
}
"""The last event of a run, by what its last row says about the ending."""


_ACTOR: TypeAdapter[Actor] = TypeAdapter(Actor)
_QUORUM: TypeAdapter[Quorum] = TypeAdapter(Quorum)


def _read_quorum(request: Data) -> Quorum | None:
    """The rule and the votes of a request; None if it has none, or if the votes are counted by a sub-agent's run."""
    if "quorum" not in request or request.get("asker"):
        return None
    try:
        return _QUORUM.validate_python(decode(json.dumps(request["quorum"])))
    except (ValueError, ConfigurationError) as error:
        raise InvalidRecordError(f"the rule of its request cannot be read: {error}") from error


class KnownHistory(NamedTuple):
    """What is known of a run at one of its records, at which no effect is in progress.

    Attributes:
        run_id: The run.
        graph: The pinned table of the graph that it runs on.
        state: The state that it is in.
        epoch: The epoch of the record.
        request_ref: Sequence number and hash of the record, if the run was suspended with it; else None.
        waiting_for: The kind of the request that it then waits for.
        quorum: Its rule and the votes on it; None if it has none, or if they are counted by a sub-agent's run.
    """

    run_id: str
    graph: Data
    state: str
    epoch: int
    request_ref: tuple[int, str] | None
    waiting_for: str
    quorum: Quorum | None


class UnsupportedFormatError(Exception):
    """The journal has a format that this release does not know."""


class HistoryVerifier:
    """Verifies that one run did only what its pinned graph allows, record by record.

    Attributes:
        state: The state that the run is in.
        status: ``none`` (no record yet), ``running``, ``suspended`` or ``finished``.
        waiting_for: The kind of request that a suspended run waits for.
        claimed: The ids of actors who voted, and for whom no host vouched, in order.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.state = ""
        self.status = "none"
        self.waiting_for = ""
        self._epoch = 0
        self._fingerprint = ""
        self._table: StoredTable
        # How the last transition ended the run, by its row.
        self._ended = ""
        # Whether there is a human reply on which the run has not moved yet.
        self._reply_received = False
        # Sequence number and hash of the last ``run.suspended`` record.
        self._request_ref: tuple[int, str] | None = None
        # Whether the run was migrated while it was suspended: the store has it as running from then on.
        self._migrated_while_suspended = False
        self._is_queued = False
        self._never_began = False  # it was cancelled before
        # The transitions that the run has made, to check them against a graph to which it is migrated.
        self._path: set[str] = set()
        # The effects started since the run entered its state, with their policies (``once`` or ``again``).
        self._started_effects: dict[str, str] = {}
        self._finished_effects: set[str] = set()
        # Number of calls that did not run, according to a human reply, and that were not started again yet.
        self._retries_allowed = 0
        # Whether it started from a suspension record or a fork, whose state is hidden, and made no request since.
        self._origin_unread = False
        # The rule of the approval that the run waits for, and the votes on it; None if it has none.
        self._quorum: Quorum | None = None
        # Whether it expired, so that the next request for it has a deadline of its own.
        self._asks_again = False
        self.claimed: dict[str, None] = {}

    @classmethod
    def resumed(cls, known: KnownHistory) -> HistoryVerifier:
        """A verifier for the records after one at which no effect was in progress."""
        new = cls(known.run_id)
        new._pin_graph(known.graph)
        new.state, new._epoch, new.status = known.state, known.epoch, "running"
        if known.request_ref is not None:
            new.status, new.waiting_for = "suspended", known.waiting_for
            new._request_ref, new._quorum = known.request_ref, known.quorum
        return new

    def verify_record(self, body: Data, digest: str) -> None:
        """Verify the next record.

        Raises:
            InvalidRecordError: The record describes something that is not allowed.
            UnsupportedFormatError: The journal has another format.
        """
        kind, epoch = cast("str", body["kind"]), body["epoch"]
        if self.status == "none" and kind not in ("run.created", "run.forked"):
            raise InvalidRecordError(f"a journal starts with run.created, not with {kind}")
        if epoch < self._epoch or (epoch > self._epoch and kind not in _EPOCH_START_KINDS):
            raise InvalidRecordError(f"it was written in epoch {epoch}, and the run was in epoch {self._epoch}")
        self._epoch = epoch
        if self.status == "finished" and kind not in KINDS_AFTER_END:
            raise InvalidRecordError(f"{kind} comes after the end of the run")
        if self.status == "suspended" and kind not in _KINDS_WHILE_SUSPENDED:
            raise InvalidRecordError(f"{kind} comes while the run waits for a human reply")
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise InvalidRecordError(f"unknown kind of record: {kind}")
        getattr(self, handler)(body)
        if kind == "run.suspended":
            self._request_ref = body["seq"], digest

    def finish(self, head: Head | None) -> None:
        """Compare the store's head of the run with its records, once every record is verified.

        Raises:
            InvalidRecordError: The two differ.
        """
        if head is None:
            return
        self._is_queued = self.status == "none" and head.status == "suspended"
        self._never_began = self.status == "none" and head.status == "finished"
        status = "running" if self.status == "none" else self.status
        may_run = self._migrated_while_suspended and head.status == "running"
        if not (head.status == status or self._is_queued or self._never_began or may_run):
            raise InvalidRecordError(f"the store has the run as {head.status}, and by its records it is {status}")
        if head.epoch < self._epoch:
            raise InvalidRecordError(f"the store has epoch {head.epoch}, and the run was in epoch {self._epoch}")

    def open_items(self) -> list[str]:
        """What is unfinished, one line each; empty for a finished run."""
        if self._never_began:
            return []
        if self.status == "none":
            return ["waits for a worker to start it" if self._is_queued else "interrupted before its first record"]
        if self.status == "suspended":
            return [f"waits for a human reply ({self.waiting_for})"]
        if self.status != "running":
            return []
        return [
            f"interrupted or in progress in {self.state}",
            *(
                f"effect {eid} was started and has no result"
                for eid, policy in self._started_effects.items()
                if policy == "once" and eid not in self._finished_effects
            ),
        ]

    # -- one method per kind of record ----------------------------------------------------------------

    def _created(self, body: Data) -> None:
        if self.status != "none":
            raise InvalidRecordError("a journal has only one first record")
        if body["form"] != FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"the journal has format {body['form']}; this release reads format {FORMAT_VERSION}"
            )
        if body["run"] != self.run_id:
            raise InvalidRecordError(f"it belongs to run {body['run']!r}")
        self._pin_graph(body["graph"])
        self.state = body.get("at") or self._table.initial.name
        self.status = "running"
        self._reply_received = self._table.states[
            self.state
        ].waits  # resumed from a suspension record: its journal starts with the reply
        self._origin_unread = "state" in body

    def _pin_graph(self, graph: Data) -> None:
        table: Data = {part: graph[part] for part in ("states", "transitions", "counters") if part in graph}
        if table_fingerprint(table) != graph["fingerprint"]:
            raise InvalidRecordError("the pinned graph does not match its fingerprint")
        self._fingerprint = graph["fingerprint"]
        self._table = read_table(table)

    def _transition(self, body: Data) -> None:
        transition = body["transition"]
        row = self._table.rows.get(transition)
        if row is None:
            raise InvalidRecordError(f"{transition} is not a row of the pinned graph")
        source, target = row.source, row.target
        if source != self.state:
            raise InvalidRecordError(f"{transition} is not possible in {self.state!r}")
        if body["to"] != target:
            raise InvalidRecordError(f"{transition} leads to {target!r}, not to {body['to']!r}")
        self._verify_guards(row, body["tried"])
        ((kind, outcome),) = body["out"].items()
        if kind == "answered":
            if not self._reply_received:
                raise InvalidRecordError(
                    "it uses a human reply, and no record says that there was a request and a reply"
                )
            self._reply_received = False
            self._count_vote(outcome["reply"])
            self._retries_allowed += outcome["reply"]["kind"] == "did_not_run"
        for result in outcome.get("results", ()):
            if isinstance(result, str) and result not in self._finished_effects:
                raise InvalidRecordError(f"it uses the result of effect {result}, which has none")
        self._verify_quorum(row, kind, body)
        self._path.add(transition)
        self.state, self._ended = target, row.ends
        self._follow_request(row, kind, outcome)
        if "waiting" in outcome:
            if "held" in outcome:  # the suspended sub-agents stay as they are
                self._started_effects = {
                    eid: policy for eid, policy in self._started_effects.items() if eid in self._finished_effects
                }
            return  # interrupted calls stay in doubt
        if not self._table.states[source].waits:
            self._started_effects, self._finished_effects, self._retries_allowed = {}, set(), 0

    def _count_vote(self, reply: Data) -> None:
        """Check who gives a reply against the rule of the request, and count it if it approves."""
        quorum, kind = self._quorum, reply["kind"]
        if quorum is None:
            return
        actor = _ACTOR.validate_python(reply["actor"]) if "actor" in reply else None
        try:
            quorum.check_reply(kind, actor)
        except HumanReplyError as error:
            raise InvalidRecordError(f"it uses a reply that the rule of the request does not allow: {error}") from error
        if actor is not None and not actor.verified:
            self.claimed[actor.id] = None
        if kind in APPROVING_REPLIES:
            self._quorum = quorum.with_vote(actor)

    def _follow_request(self, row: Transition, kind: str, outcome: Data) -> None:
        """Follow which request for approvals the run has; none if a row of a user's graph led past its wait."""
        if "waiting" in outcome:
            self._quorum = _read_quorum(outcome["waiting"])
            if self._quorum is not None and (self._quorum.votes or self._quorum.escalated):
                raise InvalidRecordError("its request for an approval has votes already")
        source, target = self._table.states[row.source], self._table.states[row.target]
        if source.waits:
            return
        left_state_call = "charge" in outcome and not (target.waits or target.final)
        went_on = kind == "ran" or target.effect in CLOSES_BATCH
        asks_a_question = kind == "recovered" and outcome["action"] == Action.ask_user
        if left_state_call or went_on or asks_a_question:
            self._quorum = None

    def _verify_quorum(self, row: Transition, kind: str, body: Data) -> None:
        """Verify that a run leaves its wait for an approval by enough votes or a denial, drops the call, or ends."""
        quorum, states = self._quorum, self._table.states
        if quorum is None or not states[row.source].waits:
            return
        if kind == "escalated":
            if not quorum.is_due(body["ts"] / 1000 + 0.001):  # times of records are cut off to milliseconds
                raise InvalidRecordError("it escalates a request that was not due yet")
            self._quorum = replace(quorum, escalated=True)
        target = states[row.target]
        if target.waits:
            self._asks_again = kind == "expired"
            return
        if not target.final:
            reply = body["out"]["answered"]["reply"]["kind"] if kind == "answered" else ""
            settled = self.waiting_for == "in_doubt"  # whether the call ran, which one of them says
            approved = reply in APPROVING_REPLIES and not quorum.missing
            undecided = reply in APPROVING_REPLIES or kind in ("escalated", "expired")
            if not (reply == "deny" or settled or approved or (undecided and may_leave_undecided(target))):
                raise InvalidRecordError(
                    f"it continues with {len(quorum.votes)} of the {quorum.rule.n} approvals that the request needs"
                )
        self._quorum = None

    def _verify_guards(self, row: Transition, tried: str) -> None:
        """Verify that no guard before a row held, or that one raised and aborted the run."""
        place = self._table.places[row.id]
        if tried == "0" * place + "1":
            return
        last = max(p for other, p in self._table.places.items() if self._table.rows[other].source == row.source)
        if row.ends == "aborted" and tried.endswith("e1") and set(tried[:-2]) <= {"0"} and len(tried) - 2 <= last:
            return
        raise InvalidRecordError(f"{row.id} needs the guards {'0' * place}1 (1: true), and the record has {tried}")

    def _intent(self, body: Data) -> None:
        eid, policy = body["eid"], body["policy"]
        if self._started_effects.get(eid) == "once" and eid not in self._finished_effects:
            if not self._retries_allowed:
                raise InvalidRecordError(f"effect {eid} of {body['name']} may run only once, and is started again")
            self._retries_allowed -= 1
        if self._table.states[self.state].waits:
            raise InvalidRecordError(f"effect {eid} starts while the run waits in {self.state!r}")
        self._started_effects[eid] = policy

    def _result(self, body: Data) -> None:
        eid = body["eid"]
        if eid not in self._started_effects:
            raise InvalidRecordError(f"effect {eid} has a result, and no record says that it was started")
        if eid in self._finished_effects:
            raise InvalidRecordError(f"effect {eid} has two results")
        self._finished_effects.add(eid)

    def _suspended(self, body: Data) -> None:
        if not self._table.states[self.state].waits:
            raise InvalidRecordError(f"the run is in {self.state!r}, which is not a waiting state")
        self.status, self._migrated_while_suspended = "suspended", False
        self.waiting_for = body["waiting"]["kind"]
        quorum = _read_quorum(body["waiting"])
        if self._quorum is None and self._origin_unread:
            self._quorum = quorum
        if self._asks_again and quorum is not None and self._quorum is not None:
            if not self._quorum.asked_at <= quorum.asked_at <= body["ts"] / 1000 + 0.001:
                raise InvalidRecordError("it asks again at a time before the first request, or after its own record")
            self._quorum = replace(self._quorum, asked_at=quorum.asked_at)
        self._asks_again = False
        if quorum != self._quorum:
            raise InvalidRecordError("its request shows another rule or other votes than the records before it")
        self._origin_unread = False

    def _resumed(self, body: Data) -> None:
        if "to" in body and self._request_ref != (to := (body["to"]["seq"], body["to"]["hash"])):
            raise InvalidRecordError(
                f"it replies to record {to[0]} ({to[1][:12]}), which is not the request that the run waits for"
            )
        if "to" in body and self.status != "suspended":
            raise InvalidRecordError(f"it replies to record {body['to']['seq']}, which has a reply already")
        self.status, self._reply_received, self._migrated_while_suspended = "running", "to" in body, False

    def _migrated(self, body: Data) -> None:
        if body["from"] != self._fingerprint:
            raise InvalidRecordError(f"it migrates from graph {body['from'][:12]}, which is not the run's")
        if body["judged"] not in MIGRATION_BASES:
            raise InvalidRecordError(f"{body['judged']!r} is not a valid basis for a migration")
        names, waited, old_rows = RenameMap.from_record(body), self._table.states[self.state].waits, self._table.rows
        self._pin_graph(body["graph"])
        state = names.state(self.state)
        if state != body["to"] or state not in self._table.states:
            raise InvalidRecordError(
                f"it migrates to state {body['to']!r}, which is not the new name of {self.state!r}"
            )
        if waited != self._table.states[state].waits:
            raise InvalidRecordError(
                f"it migrates from {self.state!r} to {state!r}, and only one of them waits for a human reply"
            )
        if body["judged"] == "replayed":
            for transition in sorted(self._path):
                row = self._table.rows.get(names.transition(transition))
                if row is None or row.target != names.state(old_rows[transition].target):
                    raise InvalidRecordError(
                        f"it says that the run's path was replayed on the new graph, which has no row {transition}"
                    )
            self._path = {names.transition(transition) for transition in self._path}
        else:
            self._path = set()
        self.state, self._migrated_while_suspended = state, self.status == "suspended"

    def _finished(self, body: Data) -> None:
        if not self._table.states[self.state].final:
            raise InvalidRecordError(f"the run is in {self.state!r}, which is not a final state")
        if self._table.names_endings and body["ending"] != ENDING_EVENTS[self._ended]:
            raise InvalidRecordError(
                f"it ends as {body['ending']}, and the last row ends it as {ENDING_EVENTS[self._ended]}"
            )
        self.status = "finished"

    def _ignored(self, body: Data) -> None:
        """A record that does not change the run."""


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
    "redaction": "_ignored",
    "run.adopted": "_ignored",
    "checkpoint": "_ignored",
}
"""The method that verifies each kind of record."""
