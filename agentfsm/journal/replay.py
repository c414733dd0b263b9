"""Folds a journal's records back into a run's state (rehydrate), or runs the real machine on them (replay).

Rehydrating trusts the recorded transitions: no model, tool or guard is called. Replaying evaluates the guards again,
so a run can be replayed under another graph, other guardrails or another policy, to see whether, and at which
record, it would have diverged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from agentfsm.errors import GraphError, JournalError, NoTransitionError
from agentfsm.journal.outcome_codec import OutcomeReader, load_failure
from agentfsm.journal.records import FORMAT_VERSION, GENESIS_HASH, Record, SealedRecord, open_record, was_redacted
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import ToolResult
from agentfsm.loop.outcomes import Cancelled, Outcome, RecoveryDecided
from agentfsm.loop.policy import RecoveryPolicy, decide_recovery
from agentfsm.loop.reducer import on_outcome, on_transition
from agentfsm.loop.state import PendingRequest, RunState, load_state
from agentfsm.machine.engine import Decision, Machine
from agentfsm.machine.graph import Graph, Transition

__all__ = [
    "MIGRATION_BASES",
    "RehydratedRun",
    "RenameMap",
    "Replay",
    "read_record",
    "read_records",
    "rehydrate",
    "replay",
]


MIGRATION_BASES = frozenset({"replayed", "vouched"})
"""How a change of graph is judged: the run's path was replayed on the new one, or somebody vouches for it."""


@dataclass(frozen=True, slots=True)
class RenameMap:
    """New names by old ones; what is not among them keeps its name.

    Attributes:
        states: New names of states.
        transitions: New ids of transitions; one that is not among them moves with its state.
    """

    states: Mapping[str, str] = field(default_factory=dict[str, str])
    transitions: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def from_record(cls, body: Mapping[str, Any]) -> RenameMap:
        """The names that a record of a change of graph holds."""
        return cls(dict(body.get("states", ())), dict(body.get("transitions", ())))

    def to_record(self) -> dict[str, list[list[str]]]:
        """The names as a record holds them: pairs, since a journal's keys are ASCII and names need not be."""
        pairs = {"states": self.states, "transitions": self.transitions}
        return {what: [[str(old), str(new)] for old, new in sorted(of.items())] for what, of in pairs.items() if of}

    def state(self, name: str) -> str:
        """What a state is called."""
        return str(self.states.get(name, name))

    def transition(self, transition_id: str) -> str:
        """What a transition is called."""
        if transition_id in self.transitions:
            return self.transitions[transition_id]
        source, _, guard = transition_id.rpartition(".")
        return f"{self.state(source)}.{guard}"

    def rename(self, run: RunState) -> None:
        """Use the new names in what a run knows: the state that it is in, and the notes of its states."""
        run.state = self.state(run.state)
        run.state_results = {self.state(name): value for name, value in run.state_results.items()}


Data = dict[str, Any]


class RehydratedRun:
    """A run as far as its records tell, one record after the other.

    Attributes:
        run: What the run knew behind the last record.
        head: Number and hash of the last record, and the epoch in which it was written.
        created: The first record.
        graph: The table that the run runs on, with its name and fingerprint.
        suspension: The last record where the run waits, or None.
        request_ref: Number and hash of that record.
        finished: Whether the run's last record is there.
        attempts: Attempts at each effect.
        visited: The states that it has left.
        outcome: The outcome that the last transition folded in.
    """

    def __init__(self) -> None:
        self.seq, self.hash, self.epoch = 0, GENESIS_HASH, 0
        self.created: Data = {}
        self.graph: Data = {}
        self.request_ref: tuple[int, str] | None = None
        self.suspension: Data | None = None
        self.finished = False
        self.attempts: dict[str, int] = {}
        self.visited: set[str] = set()
        self.outcome: Outcome | None = None
        self._run: RunState | None = None
        self._reader = OutcomeReader()

    @property
    def run(self) -> RunState:
        """What the run knew behind the last record.

        Raises:
            JournalError: There is no record.
        """
        if self._run is None:
            raise JournalError("the journal is empty")
        return self._run

    def add(self, record: SealedRecord) -> None:
        """Fold one record in.

        Raises:
            JournalError: The record cannot be read, or a value in it was redacted.
        """
        body = open_record(record)
        try:
            step = _HANDLERS.get(body["kind"])
            if step is not None:
                if was_redacted(record):
                    raise JournalError("a value in it was redacted, and nobody can go on without it")
                getattr(self, step)(body)
            epoch = body["epoch"]
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, JournalError) as error:
            raise JournalError(f"record {record.seq} cannot be folded in: {error}") from error
        self.seq, self.hash, self.epoch = record.seq, record.hash, epoch
        if body["kind"] == "run.suspended":
            self.request_ref = record.seq, record.hash

    @property
    def unclaimed_results(self) -> dict[str, ToolResult]:
        """Results of calls that had ended when the run was cut off in the middle of their batch, by effect."""
        return dict(self._reader.results)

    # -- one method a kind of record ------------------------------------------------------------------

    def _created(self, body: Data) -> None:
        if body["form"] != FORMAT_VERSION:
            raise JournalError(f"the journal is of form {body['form']}; this release reads form {FORMAT_VERSION}")
        self.created, self.graph = body, body["graph"]
        if "state" in body:
            self._run = load_state(body["state"])
            return
        graph = body["graph"]
        self._run = load_state(
            {
                "run_id": body["run"],
                "session_id": body.get("session", ""),
                "parent": _parent_ref(body.get("parent", {})),
                "state": graph["states"][0][0],
                "guardrails": body["guardrails"],
                "rules": body["rules"],
                "messages": body["messages"],
                "steps": 1,
            }
        )
        if "call" in body.get("parent", ()):
            self._run.parent = (body["parent"]["run"], body["parent"]["call"])

    def _transition(self, body: Data) -> None:
        run = self.run
        outcome = self._reader.read(body["out"])
        took, silence = body.get("us", (0, 0))
        on_outcome(run, outcome, took / 1e6, silence / 1e6)
        if "cancel" in body:
            on_outcome(run, Cancelled(body["cancel"]))
        if "aborted" in body and run.aborted is None:
            run.aborted = load_failure(body["aborted"])
        source = body["transition"].rpartition(".")[0]
        if source != run.state:
            raise JournalError(f"it leaves {source!r}, and the run is in {run.state!r}")
        run.state = body["to"]
        self.visited.add(source)
        found = load_failure(body["failure"]) if "failure" in body else None
        final = any(name == body["to"] and ends for name, _, ends, _ in self.graph["states"])
        on_transition(run, Decision(Transition(source, None, body["to"]), (), found), final)
        self.outcome = outcome
        self._reader.results = {}

    def _intent(self, body: Data) -> None:
        eid = body["eid"]
        self.attempts[eid] = self.attempts.get(eid, 0) + 1
        _, dot, place = eid.rpartition(".")
        if dot:  # a tool's call, by its place in the batch; cut off from here on, it is in doubt
            self.run.batch[int(place)].started = True

    def _result(self, body: Data) -> None:
        self._reader.read_result(body["eid"], body["out"])

    def _suspend(self, body: Data) -> None:
        self.suspension = body
        self.run.pending_request = _REQUEST_ADAPTER.validate_python(body["waiting"])

    def _resume(self, body: Data) -> None:
        self.suspension = self.request_ref = None

    def _migrate(self, body: Data) -> None:
        names, self.graph = RenameMap.from_record(body), body["graph"]
        names.rename(self.run)
        self.visited = {names.state(name) for name in self.visited}

    def _finish(self, body: Data) -> None:
        self.finished = True


def _parent_ref(parent: Data) -> list[str] | None:
    """For a sub-agent's run, the run and the call for which it works."""
    return [parent["run"], parent["call"]] if "call" in parent else None


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
    "run.finished": "_finish",
}
"""The method that folds each kind of record in; other kinds change nothing that a run knows."""


def rehydrate(records: Iterable[SealedRecord]) -> RehydratedRun:
    """A run as its records tell it.

    Raises:
        JournalError: A record cannot be read or does not fit behind the one before, or there is none.
    """
    past = RehydratedRun()
    for row in records:
        past.add(row)
    _ = past.run
    return past


def read_records(sealed: Iterable[SealedRecord], run_id: str) -> list[Record]:
    """Rows, to read.

    Raises:
        JournalError: One of them cannot be read.
    """
    return [read_record(row, run_id) for row in sealed]


def read_record(sealed: SealedRecord, run_id: str) -> Record:
    """One row, to read.

    Raises:
        JournalError: It cannot be read.
    """
    body = open_record(sealed)
    try:
        kind, time, epoch = body["kind"], body["ts"] / 1000, body["epoch"]
    except (LookupError, TypeError) as error:
        raise JournalError(f"record {sealed.seq} cannot be read: it is none") from error
    return Record(run_id, sealed.seq, kind, time, epoch, body, sealed.hash, redacted=was_redacted(sealed))


@dataclass(frozen=True)
class Replay:
    """How a replay went.

    Attributes:
        moves: Moves that went as they are recorded.
        seq: The first record that would have been another, or None.
        recorded: Where that record went, as ``source.guard -> target``, in the names of the graph at hand.
        instead: Where the run would have gone.
        since: The record from which on guards were asked: 1, or the one where the run was last taken over to
            another graph with nothing but somebody's word for its path so far.
    """

    moves: int
    seq: int | None = None
    recorded: str = ""
    instead: str = ""
    since: int = 1

    @property
    def same(self) -> bool:
        """Whether everything went as it is recorded."""
        return self.seq is None


class _DivergenceError(Exception):
    def __init__(self, recorded: str, instead: str) -> None:
        self.recorded, self.instead = recorded, instead


class _ReplayRun(RehydratedRun):
    """A run that is replayed: like one that is restored, but its guards (and its policy) are asked."""

    def __init__(
        self,
        machine: Machine,
        policy: RecoveryPolicy | None,
        guardrails: AgentGuardrails | None,
        rename_maps: list[RenameMap],
        since: int,
    ) -> None:
        super().__init__()
        self.moves = 0
        self._machine, self._policy, self._guardrails = machine, policy, guardrails
        self._rename_maps, self._since = rename_maps, since

    @property
    def _evaluating_guards(self) -> bool:
        return self.seq >= self._since - 1

    def _created(self, body: dict[str, Any]) -> None:
        super()._created(body)
        if self._guardrails is not None:
            self.run.guardrails = self._guardrails
        if self._evaluating_guards:
            for names in self._rename_maps:
                names.rename(self.run)

    def _migrate(self, body: dict[str, Any]) -> None:
        if (
            self._evaluating_guards and self.seq + 1 > self._since
        ):  # the run has gone by the new names from the beginning
            self.graph = body["graph"]
            del self._rename_maps[0]
            return
        super()._migrate(body)
        if self._evaluating_guards:
            for names in self._rename_maps:
                names.rename(self.run)

    def _transition(self, body: dict[str, Any]) -> None:
        if not self._evaluating_guards:
            super()._transition(body)
            return
        run, row, target = self.run, body["transition"], body["to"]
        for names in self._rename_maps:
            row, target = names.transition(row), names.state(target)
        recorded = f"{row} -> {target}"
        if row.rpartition(".")[0] != run.state:
            raise JournalError(f"it leaves another state than {run.state!r}, where the run is")
        outcome = self._reader.read(body["out"])
        self._reader.results = {}
        if self._policy is not None and isinstance(outcome, RecoveryDecided):
            outcome = decide_recovery(self._policy, run, self.created.get("seed"))
        took, silence = body.get("us", (0, 0))
        on_outcome(run, outcome, took / 1e6, silence / 1e6)
        if "cancel" in body:
            on_outcome(run, Cancelled(body["cancel"]))
        if "aborted" in body and run.aborted is None:
            run.aborted = load_failure(body["aborted"])
        try:
            decision = self._machine.step(run)
        except (NoTransitionError, GraphError) as error:  # nothing holds, or the graph has no such state
            raise _DivergenceError(recorded, str(error)) from None
        instead = f"{decision.transition.id} -> {decision.target}"
        if instead != recorded:
            raise _DivergenceError(recorded, instead)
        on_transition(run, decision, self._machine.graph.spec(decision.target).final)
        self.outcome = outcome
        self.moves += 1


def replay(
    records: Iterable[SealedRecord],
    graph: Graph,
    *,
    policy: RecoveryPolicy | None = None,
    guardrails: AgentGuardrails | None = None,
    rename_map: RenameMap | None = None,
) -> Replay:
    """Run the machine on the outcomes of a journal.

    Args:
        records: The journal.
        graph: The graph to run on, with its guards.
        policy: Asked in place of the recorded decisions about failures, where given.
        guardrails: In place of the recorded limits, where given.
        rename_map: What the states and transitions of the run's graph are called in this one, where that differs.

    Raises:
        JournalError: A record cannot be read, or a value in it was redacted.
    """
    journal = list(records)
    since, renamed = _renames_to_replay(journal)
    if rename_map is not None:
        renamed.append(rename_map)
    again = _ReplayRun(Machine(graph), policy, guardrails, renamed, since)
    for row in journal:
        try:
            again.add(row)
        except _DivergenceError as elsewhere:
            return Replay(again.moves, row.seq, elsewhere.recorded, elsewhere.instead, since)
    if not again.seq:
        raise JournalError("the journal is empty")
    return Replay(again.moves, since=since)


def _renames_to_replay(records: Sequence[SealedRecord]) -> tuple[int, list[RenameMap]]:
    """Where the run was last taken over on somebody's word, or 1; and the names that changed behind that."""
    since, names = 1, list[RenameMap]()
    for row in records:
        if '"kind":"run.migrated"' in row.body:
            body = open_record(row)
            if body["judged"] == "vouched":
                since, names = row.seq, []
            else:
                names.append(RenameMap.from_record(body))
    return since, names
