"""Makes sealed records of a run's entries."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from agentfsm.core.failures import Failure
from agentfsm.core.messages import ToolResult
from agentfsm.core.model import ToolSpec
from agentfsm.core.outcomes import Checked, Judged, Outcome
from agentfsm.core.state import Waiting
from agentfsm.journal.canonical import encode
from agentfsm.journal.outcomes import OutcomeWriter, written
from agentfsm.journal.records import FORM, START, Hider, Row, seal
from agentfsm.journal.secrets import Secrets
from agentfsm.machine.engine import Decision
from agentfsm.runtime.recorder import Beginning, Entry

__all__ = ["Scribe", "described"]

Data = dict[str, Any]


class Scribe:
    """Writes one run's records, each sealed onto the one before.

    Args:
        seq: The last record that there is.
        head: Its hash.
        epoch: Which holder of the run writes.
        secrets: What must never be written.
    """

    def __init__(self, seq: int = 0, head: str = START, epoch: int = 1, secrets: Secrets | None = None) -> None:
        self.seq = seq
        self.head = head
        self.epoch = epoch
        self._secrets = secrets
        self._outcomes = OutcomeWriter()
        self._moves: dict[int, tuple[Any, str]] = {}

    def go_on(self, asked: str, results: Mapping[str, ToolResult]) -> None:
        """Go on with a run that somebody else wrote.

        Args:
            asked: The tool that a person is being asked about, or an empty string.
            results: Results that have a record, and no outcome that holds them yet.
        """
        self._outcomes.go_on(asked, results)

    def write(self, entries: Iterable[Entry]) -> list[Row]:
        """The records of some entries."""
        return [self._row(entry) for entry in entries]

    def _row(self, entry: Entry) -> Row:
        kind = entry[0]
        hider = Hider(self._secrets)
        text = self._move(entry, hider) if kind == "transition" else None
        if text is None:
            text = self._body(kind, entry, hider)
        if self._secrets is not None:
            text = self._secrets.scrub(text)
        self.head = seal(self.head, text)
        return Row(self.seq, text, self.head, hider.kept())

    def _move(self, entry: Entry, hider: Hider) -> str | None:
        """The body of an ordinary move, put together by hand: most records are one, and the text is known."""
        _, time, outcome, cancel, took, silence, decision, aborted = entry
        if cancel is not None or aborted is not None or isinstance(decision.found, Failure):
            return None
        row = decision.transition
        known = self._moves.get(id(row))
        if known is None:
            known = self._moves[id(row)] = (row, encode(_row_fields(decision))[1:-1])
        out = _NOTHING.get(outcome) if type(outcome) in _PLAIN else None
        if out is None:
            out = encode(self._outcomes.write(outcome, hider))
        self.seq += 1
        us = f',"us":[{took},{silence}]' if took or silence else ""
        return (
            f'{{"epoch":{self.epoch},"kind":"transition","out":{out},"seq":{self.seq},'
            f'{known[1]},"ts":{int(time * 1000)}{us}}}'
        )

    def _body(self, kind: str, entry: Entry, hider: Hider) -> str:
        body = _FIELDS.get(kind, _plain)(self._outcomes, entry, hider)
        if self._secrets is not None and kind in _BEGINNINGS:
            body["salt"] = hider.hide(self._secrets.salt)
        self.seq += 1
        body["epoch"], body["kind"], body["seq"], body["ts"] = self.epoch, kind, self.seq, int(entry[1] * 1000)
        return encode(body)


def _plain(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Data:
    """What needs no care: fields that are JSON already."""
    return dict(entry[2] or {})


def _transition(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Data:
    outcome, cancel, took, silence, decision, aborted = cast(
        "tuple[Outcome, str | None, int, int, Decision, Any]", entry[2:]
    )
    body: Data = {"out": outcomes.write(outcome, hider), **_row_fields(decision)}
    if took or silence:
        body["us"] = [took, silence]
    if cancel is not None:
        body["cancel"] = cancel
    if isinstance(decision.found, Failure):
        body["failure"] = written(decision.found, hider)
    if aborted is not None:
        body["aborted"] = written(aborted, hider)
    return body


def _row_fields(decision: Decision) -> Data:
    """Which row was taken; ``tried`` has a digit for each guard that was asked, in order: 1 where it held."""
    row = decision.transition
    return {"to": str(row.target), "transition": row.id, "tried": "0" * (len(decision.tried) - 1) + "1"}


_NOTHING = {Checked(): '{"checked":{}}', Judged(): '{"judged":{}}'}
_PLAIN = frozenset({Checked, Judged})


def _intent(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Data:
    _, _, eid, name, attempt, policy = entry
    body: Data = {"eid": eid, "name": name, "policy": policy}
    if attempt > 1:
        body["attempt"] = attempt
    return body


def _result(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Data:
    eid, result = cast("tuple[str, ToolResult]", entry[2:])
    return {"eid": eid, "out": outcomes.result(eid, result, hider)}


def _suspended(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Data:
    what = dict(entry[2])
    return {**what, "waiting": outcomes.waiting(cast("Waiting", what["waiting"]), hider)}


def _created(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Data:
    begun = cast("Beginning", entry[2])
    body: Data = {
        "form": FORM,
        "run": begun.run_id,
        "graph": {"name": begun.graph.name, "fingerprint": begun.graph.fingerprint, **begun.graph.table},
        "guardrails": begun.guardrails.model_dump(mode="json"),
        "rules": begun.rules.model_dump(mode="json"),
        "policy": described(begun.policy),
        "versions": _versions(),
    }
    if begun.session_id:
        body["session"] = begun.session_id
    if begun.seed is not None:
        body["seed"] = begun.seed
    if begun.state is not None:
        body["state"] = hider.hide(begun.state)
        body["at"] = begun.state["state"]
    else:
        body["messages"] = written(begun.messages, hider)
    if begun.parent:
        body["parent"] = dict(begun.parent)
    if begun.tools:
        body["tools"] = {t.name: _spec_hash(t) for t in begun.tools}
    return body


_FIELDS: dict[str, Callable[[OutcomeWriter, Entry, Hider], Data]] = {
    "transition": _transition,
    "effect.intent": _intent,
    "effect.result": _result,
    "run.created": _created,
    "run.forked": _created,
    "run.suspended": _suspended,
}


_BEGINNINGS = frozenset({"run.created", "run.forked", "run.resumed"})
"""Where a process begins to write, with a salt of its own for the secrets that it meets."""


def _spec_hash(spec: ToolSpec) -> str:
    """SHA-256 (hex) of all that a model is told of a tool: the same as long as nobody changes it."""
    told = {"description": spec.description, "name": spec.name, "parameters": dict(spec.parameters)}
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def described(policy: Any) -> Data:
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


def _versions() -> Data:
    try:
        own = version("agentfsm")
    except PackageNotFoundError:
        own = "0"
    return {"agentfsm": own, "python": platform.python_version()}
