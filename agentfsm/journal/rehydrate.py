"""Folds a journal's records back into a run's state. The recorded transitions are trusted: no guard is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from agentfsm.errors import JournalError
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.outcome_codec import OutcomeReader, load_value
from agentfsm.journal.records import (
    FORMAT_VERSION,
    RenameMap,
    SealedRecord,
    open_record,
    was_redacted,
    without_redacted,
)
from agentfsm.loop.failures import Failure
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import Reply, ToolCall, ToolResult, Usage
from agentfsm.loop.outcomes import Cancelled, Outcome
from agentfsm.loop.reducer import on_outcome, on_transition
from agentfsm.loop.state import CallState, RunState, StateCall, request_digest, state_call_number
from agentfsm.loop.state_json import load_state
from agentfsm.loop.stored_table import StoredTable, read_table
from agentfsm.loop.withholding import SecretOpener
from agentfsm.machine.engine import Decision, spend_counters

Data = dict[str, Any]


class RehydratedRun:
    """A run's state after the records added so far.

    Args:
        opener: Opens the secrets of the run; without it, their placeholders stay.

    Attributes:
        seq: The sequence number of the last record; 0 before the first.
        hash: The hash of that record, 64 hex digits.
        epoch: The epoch in which it was written.
        created: The body of the first record.
        graph: The pinned table of the graph that the run runs on, with its name and fingerprint.
        table: The same, as states and rows.
        suspension: The body of the record with which the run was suspended, or None if it is not suspended.
        request_ref: Sequence number and hash of that record, or None.
        asked: The same of every record with a request since the run reached the state in which it is: with the votes on
            it, a request is written again.
        finished: Whether the run has finished.
        attempts: Number of attempts by effect id.
        visited: The states that the run has left.
        outcome: The outcome of the last transition.
    """

    def __init__(self, opener: SecretOpener | None = None, *, to_end: bool = False) -> None:
        self._opener, self._to_end = opener, to_end
        self.seq, self.hash, self.epoch = 0, GENESIS_HASH, 0
        self.created: Data = {}
        self.graph: Data = {}
        self.table: StoredTable
        self.request_ref: tuple[int, str] | None = None
        self.asked: list[tuple[int, str]] = []
        self.suspension: Data | None = None
        self.finished = False
        self.attempts: dict[str, int] = {}
        self.visited: set[str] = set()
        self.outcome: Outcome | None = None
        self._run: RunState | None = None
        self._reader = OutcomeReader()
        self._lacks_state = False  # that of a fork, which was redacted
        self._model_requests: dict[int, tuple[str, str]] = {}  # of user-defined states, by number

    @classmethod
    def restored(
        cls,
        opener: SecretOpener,
        created: Data,
        run: RunState,
        *,
        seq: int,
        digest: str,
        epoch: int,
        known: Mapping[str, Any],
    ) -> RehydratedRun:
        """A run as it was after a record at which no effect was in progress.

        Args:
            opener: Opens its secrets.
            created: The body of its first record.
            run: Its state.
            seq: The sequence number of the record.
            digest: Its hash, 64 hex digits.
            epoch: The epoch in which it was written.
            known: ``asked``, ``attempts`` and ``visited``, and the ``id`` and ``expires`` of its ``suspension``.
        """
        new = cls(opener)
        new.seq, new.hash, new.epoch, new.created, new._run = seq, digest, epoch, created, run
        new.graph = created["graph"]
        new.table = read_table(new.graph)
        new.asked = [(asked, of) for asked, of in known["asked"]]
        new.attempts, new.visited = dict(known["attempts"]), set(known["visited"])
        new._reader.reply = run.reply
        suspension, request = known["suspension"], run.pending_request
        if suspension is not None and request is not None:
            new.suspension = {**suspension, "waiting": {"kind": request.kind}}
            new.request_ref = seq, digest
        return new

    @property
    def run(self) -> RunState:
        """The state of the run after the last record.

        Raises:
            JournalError: There is no record.
        """
        if self._run is None:
            raise JournalError("the journal is empty")
        return self._run

    def add(self, record: SealedRecord) -> None:
        """Fold in the next record.

        Raises:
            JournalError: The record cannot be read, or a value in it was redacted.
        """
        body = open_record(record, self._opener)
        try:
            handler = _HANDLERS.get(body["kind"])
            if handler is not None:
                if was_redacted(record):
                    if not self._to_end:
                        raise JournalError(
                            "a value in it was redacted, and the run cannot continue without it: it can be dismissed"
                        )
                    body = without_redacted(body)
                getattr(self, handler)(body)
            epoch = body["epoch"]
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, JournalError) as error:
            raise JournalError(f"record {record.seq} cannot be applied: {error}") from error
        self.seq, self.hash, self.epoch = record.seq, record.hash, epoch
        if body["kind"] == "run.suspended":
            self.request_ref = record.seq, record.hash
            self.asked.append(self.request_ref)

    @property
    def unclaimed_results(self) -> dict[str, ToolResult]:
        """By effect id, results of calls that had ended when the run was interrupted during their batch."""
        return dict(self._reader.results)

    # -- one method per kind of record ----------------------------------------------------------------

    def _created(self, body: Data) -> None:
        if body["form"] != FORMAT_VERSION:
            raise JournalError(f"the journal has format {body['form']}; this release reads format {FORMAT_VERSION}")
        self.created, self.graph = body, body["graph"]
        self.table = read_table(self.graph)
        if body.get("state") is not None:
            self._run = load_state(body["state"])
            self._set_guardrails(body)  # a sub-agent's limits change when it continues
            return
        self._lacks_state = "state" in body
        self._run = load_state(
            {
                "run_id": body["run"],
                "session_id": body.get("session", ""),
                "state": body.get("at", self.table.initial.name),  # of a fork whose state was redacted
                "guardrails": body["guardrails"],
                "rules": body["rules"],
                "messages": body.get("messages", ()),
                "requester": body.get("requester"),
                "details": self._details(body),
                "counters": dict.fromkeys(self.table.initial.spends, 1),
            }
        )
        parent = body.get("parent", {})
        if self._lacks_state:
            self._run.usage = Usage(**body.get("spent", {}))
        if "call" in parent:  # a sub-agent's run: the run and the call that started it
            self._run.parent = (parent["run"], parent["call"])

    def _details(self, body: Data) -> Data:
        """What the run was given when it was started."""
        model = body.get("own_model", {})
        return {
            "tags": body.get("tags", ()),
            "metadata": body.get("metadata", {}),
            "has_deps": body.get("deps", False),
            "model": model.get("name", ""),
            "model_is_object": model.get("object", False),
            "settings": body.get("own_settings", {}),
            "own_guardrails": body.get("own_guardrails", False),
            "history": body.get("history", {}),
            "approvals": body.get("approvals", {}),
        }

    def _transition(self, body: Data) -> None:
        run = self.run
        row, target = body["transition"], body["to"]
        source = row.rpartition(".")[0]
        if source != run.state:
            raise JournalError(f"the transition starts in {source!r}, but the run is in {run.state!r}")
        outcome = self._reader.read(body["out"])
        self._on_outcome_read(body, outcome)
        self._reader.results = {}
        apply_outcome(run, outcome, body)
        transition, states = self.table.rows[row], self.table.states
        if transition.target != target:
            raise JournalError(f"{row} leads to {transition.target!r}, not to {target!r}")
        if target != source:
            self.asked.clear()
        run.state = target
        spend_counters(run.counters, transition, states[target])
        failure = load_value(Failure, body["failure"]) if "failure" in body else None
        on_transition(run, Decision(transition, (), failure), states)
        self.visited.add(source)
        self.outcome = outcome

    def _on_outcome_read(self, body: Data, outcome: Outcome | None) -> None:
        """Called with each outcome before it is applied."""

    def _intent(self, body: Data) -> None:
        eid = body["eid"]
        self.attempts[eid] = self.attempts.get(eid, 0) + 1
        if "request" in body:
            self._start_state_call(eid, body["name"], body["request"])
            return
        _, dot, place = eid.rpartition(".")
        if dot and not self._lacks_state:  # a tool call, by its place in the batch; interrupted now, it is in doubt
            self.run.batch[int(place)].started = True

    def _result(self, body: Data) -> None:
        number = state_call_number(body["eid"])
        if number is None:
            self._reader.read_result(body["eid"], body["out"])
        else:
            self._end_state_call(number, body["out"])

    def _start_state_call(self, eid: str, name: str, request: Data) -> None:
        """A call of a user-defined state's effect: a tool call that is interrupted from here on is in doubt."""
        number = state_call_number(eid) or 0
        ((kind, value),) = request.items()
        if kind == "messages":
            self._model_requests[number] = name, request_digest(value)
            return
        call = self.run.state_calls.get(number)
        if call is None:
            arguments = ToolCall(eid, name, value)
            call = StateCall(name, request_digest(value), tool=CallState(arguments, ""))
            self.run.state_calls[number] = call
        if call.tool is not None:
            call.tool.started = True

    def _end_state_call(self, number: int, out: Data) -> None:
        if "call_id" not in out:  # a model call
            reply = load_value(Reply, out["reply"]) if "reply" in out else None
            failure = load_value(Failure, out["failure"]) if "failure" in out else None
            self.run.state_calls[number] = StateCall(
                *self._model_requests[number], reply, failure, model_calls=out["model_calls"]
            )
            return
        tool = self.run.state_calls[number].tool
        if tool is None:
            raise JournalError(f"call {number} is not a tool call")
        tool.result, tool.started = load_value(ToolResult, out), False

    def _suspend(self, body: Data) -> None:
        self.suspension = body
        self.run.pending_request = _REQUEST_ADAPTER.validate_python(body["waiting"])
        self.run.event_seq = body.get("events", 0)

    def _resume(self, body: Data) -> None:
        self.suspension = self.request_ref = None
        if "guardrails" in body:
            self._set_guardrails(body)

    def _set_guardrails(self, body: Data) -> None:
        self.run.guardrails = AgentGuardrails.model_validate(body["guardrails"])

    def _migrate(self, body: Data) -> None:
        names, self.graph = RenameMap.from_record(body), body["graph"]
        self.table = read_table(self.graph)
        names.rename(self.run)
        self.visited = {names.state(name) for name in self.visited}

    def _adopt(self, body: Data) -> None:
        """What a person has approved, and has not run yet, is asked again: nobody knows who wrote the approval."""
        self.run.withdraw_approvals()

    def _finish(self, body: Data) -> None:
        self.finished = True


_REQUEST_ADAPTER: TypeAdapter[PendingRequest] = TypeAdapter(PendingRequest)

_HANDLERS: Mapping[str, str] = {
    "run.created": "_created",
    "run.forked": "_created",
    "transition": "_transition",
    "effect.intent": "_intent",
    "effect.result": "_result",
    "run.suspended": "_suspend",
    "run.resumed": "_resume",
    "run.migrated": "_migrate",
    "run.adopted": "_adopt",
    "run.finished": "_finish",
}
"""The method that folds in each kind of record; records of other kinds do not change a run's state."""


def apply_outcome(run: RunState, outcome: Outcome | None, body: Data) -> None:
    """Apply what happened before a transition: an outcome and its times, and a cancellation or an exception."""
    elapsed_us, silence_us = body.get("us", (0, 0))
    on_outcome(run, outcome, elapsed_us / 1e6, silence_us / 1e6)
    if "cancel" in body:
        on_outcome(run, Cancelled(body["cancel"]))
    if "aborted" in body and run.aborted is None:
        run.aborted = load_value(Failure, body["aborted"])


def rehydrate(
    records: Iterable[SealedRecord], opener: SecretOpener | None = None, *, to_end: bool = False
) -> RehydratedRun:
    """The state of a run, rebuilt from its records.

    Args:
        records: The records.
        opener: Opens the secrets of the run; without it, their placeholders stay.
        to_end: Whether the run is only to end, so that values that were redacted may be missing.

    Raises:
        JournalError: A record cannot be read or does not follow from the one before, or there is none.
        MissingExtraError: The package that opens secrets is not installed.
    """
    rehydrated = RehydratedRun(opener, to_end=to_end)
    for record in records:
        rehydrated.add(record)
    _ = rehydrated.run  # raises if there was no record
    return rehydrated
