"""A run's state as a fold over its records: no model, no tool and no guard is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from agentfsm.core.codec import load_state
from agentfsm.core.fold import apply
from agentfsm.core.follow import follow
from agentfsm.core.messages import ToolResult
from agentfsm.core.outcomes import Cancelled, Outcome
from agentfsm.core.state import RunState, Waiting
from agentfsm.errors import JournalError
from agentfsm.journal.names import Names
from agentfsm.journal.outcomes import OutcomeReader, load_failure
from agentfsm.journal.records import FORM, START, Record, Row, open_row, was_redacted
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Transition

__all__ = ["Past", "record", "records", "restore"]

Data = dict[str, Any]


class Past:
    """A run as far as its records tell, one record after the other.

    Attributes:
        run: What the run knew behind the last record.
        head: Number and hash of the last record, and the epoch in which it was written.
        created: The first record.
        graph: The table that the run runs on, with its name and fingerprint.
        suspended: The last record where the run waits, or None.
        asked: Number and hash of that record.
        finished: Whether the run's last record is there.
        attempts: Attempts at each effect.
        left: The states that it has left.
        outcome: The outcome that the last transition folded in.
    """

    def __init__(self) -> None:
        self.seq, self.hash, self.epoch = 0, START, 0
        self.created: Data = {}
        self.graph: Data = {}
        self.asked: tuple[int, str] | None = None
        self.suspended: Data | None = None
        self.finished = False
        self.attempts: dict[str, int] = {}
        self.left: set[str] = set()
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

    def add(self, row: Row) -> None:
        """Fold one record in.

        Raises:
            JournalError: The record cannot be read, or a value in it was redacted.
        """
        body = open_row(row)
        try:
            step = _FOLD.get(body["kind"])
            if step is not None:
                if was_redacted(row):
                    raise JournalError("a value in it was redacted, and nobody can go on without it")
                getattr(self, step)(body)
            epoch = body["epoch"]
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, JournalError) as error:
            raise JournalError(f"record {row.seq} cannot be folded in: {error}") from error
        self.seq, self.hash, self.epoch = row.seq, row.hash, epoch
        if body["kind"] == "run.suspended":
            self.asked = row.seq, row.hash

    @property
    def loose(self) -> dict[str, ToolResult]:
        """Results of calls that had ended when the run was cut off in the middle of their batch, by effect."""
        return dict(self._reader.results)

    # -- one method a kind of record ------------------------------------------------------------------

    def _created(self, body: Data) -> None:
        if body["form"] != FORM:
            raise JournalError(f"the journal is of form {body['form']}; this release reads form {FORM}")
        self.created, self.graph = body, body["graph"]
        if "state" in body:
            self._run = load_state(body["state"])
            return
        graph = body["graph"]
        self._run = load_state(
            {
                "run_id": body["run"],
                "session_id": body.get("session", ""),
                "parent": _worked_for(body.get("parent", {})),
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
        apply(run, outcome, took / 1e6, silence / 1e6)
        if "cancel" in body:
            apply(run, Cancelled(body["cancel"]))
        if "aborted" in body and run.aborted is None:
            run.aborted = load_failure(body["aborted"])
        source = body["transition"].rpartition(".")[0]
        if source != run.state:
            raise JournalError(f"it leaves {source!r}, and the run is in {run.state!r}")
        run.state = body["to"]
        self.left.add(source)
        found = load_failure(body["failure"]) if "failure" in body else None
        final = any(name == body["to"] and ends for name, _, ends, _ in self.graph["states"])
        follow(run, Decision(Transition(source, None, body["to"]), (), found), final)
        self.outcome = outcome
        self._reader.results = {}

    def _intent(self, body: Data) -> None:
        eid = body["eid"]
        self.attempts[eid] = self.attempts.get(eid, 0) + 1
        _, dot, place = eid.rpartition(".")
        if dot:  # a tool's call, by its place in the batch; cut off from here on, it is in doubt
            self.run.batch[int(place)].started = True

    def _result(self, body: Data) -> None:
        self._reader.result(body["eid"], body["out"])

    def _suspend(self, body: Data) -> None:
        self.suspended = body
        self.run.waiting = _WAITING.validate_python(body["waiting"])

    def _resume(self, body: Data) -> None:
        self.suspended = self.asked = None

    def _migrate(self, body: Data) -> None:
        names, self.graph = Names.read(body), body["graph"]
        names.rename(self.run)
        self.left = {names.state(name) for name in self.left}

    def _finish(self, body: Data) -> None:
        self.finished = True


def _worked_for(parent: Data) -> list[str] | None:
    """For a sub-agent's run, the run and the call for which it works."""
    return [parent["run"], parent["call"]] if "call" in parent else None


_WAITING: TypeAdapter[Waiting] = TypeAdapter(Waiting)

_FOLD: Mapping[str, str] = {
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


def restore(rows: Iterable[Row]) -> Past:
    """A run as its records tell it.

    Raises:
        JournalError: A record cannot be read or does not fit behind the one before, or there is none.
    """
    past = Past()
    for row in rows:
        past.add(row)
    _ = past.run
    return past


def records(rows: Iterable[Row], run_id: str) -> list[Record]:
    """Rows, to read.

    Raises:
        JournalError: One of them cannot be read.
    """
    return [record(row, run_id) for row in rows]


def record(row: Row, run_id: str) -> Record:
    """One row, to read.

    Raises:
        JournalError: It cannot be read.
    """
    body = open_row(row)
    try:
        kind, time, epoch = body["kind"], body["ts"] / 1000, body["epoch"]
    except (LookupError, TypeError) as error:
        raise JournalError(f"record {row.seq} cannot be read: it is none") from error
    return Record(run_id, row.seq, kind, time, epoch, body, row.hash, redacted=was_redacted(row))
