"""Makes sealed records of a run's entries."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from agentfsm.core.failures import Failure
from agentfsm.core.messages import ToolResult
from agentfsm.core.model import ToolSpec
from agentfsm.core.outcomes import Outcome
from agentfsm.core.state import Waiting
from agentfsm.journal.canonical import encode
from agentfsm.journal.fields import written
from agentfsm.journal.outcomes import OutcomeWriter
from agentfsm.journal.records import FORM, START, Hider, Row, seal
from agentfsm.journal.secrets import Secrets
from agentfsm.machine.engine import Decision
from agentfsm.runtime.recorder import Beginning, Entry

__all__ = ["Scribe", "described"]

Data = dict[str, Any]
Texts = dict[str, str]  # fields of a record, each as JSON


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
        self._hider = Hider(secrets)
        self._outcomes = OutcomeWriter()
        self._moves: dict[int, tuple[Any, str]] = {}
        self._by_hand: Mapping[str, Callable[[Entry], str | None]] = {
            "transition": self._move,
            "effect.intent": self._intent,
            "effect.result": self._result,
        }

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
        by_hand = self._by_hand.get(entry[0])
        text = by_hand(entry) if by_hand is not None else None
        if text is None:
            text = self._body(entry)
        self.head = head = seal(self.head, text)
        return Row(self.seq, text, head, self._hider.taken())

    def _clean(self, text: str) -> str:
        return text if self._secrets is None else self._secrets.scrub(text)

    # The records of a step are put together by hand: their fields are known, and each stands where its name sorts.

    def _move(self, entry: Entry) -> str | None:
        """The body of an ordinary move, or None where the move is another: most records are one."""
        _, time, outcome, cancel, took, silence, decision, aborted = entry
        found = decision.found
        if cancel is not None or aborted is not None or (found is not None and isinstance(found, Failure)):
            return None
        row = decision.transition
        known = self._moves.get(id(row))
        if known is None:
            known = self._moves[id(row)] = (row, encode(_row_fields(decision))[1:-1])
        said = self._outcomes.repeated(outcome)
        out = self._outcomes.write(outcome, self._hider) if said is None else said
        self.seq += 1
        us = f',"us":[{took},{silence}]' if took or silence else ""
        text = (
            f'{{"epoch":{self.epoch},"kind":"transition","out":{out},"seq":{self.seq},'
            f'{known[1]},"ts":{int(time * 1000)}{us}}}'
        )
        return self._clean(text) if said is None else text  # else all of it is our own words

    def _intent(self, entry: Entry) -> str:
        _, time, eid, name, attempt, policy = entry
        self.seq += 1
        again = f'"attempt":{attempt},' if attempt > 1 else ""
        return self._clean(
            f'{{{again}"eid":{encode(eid)},"epoch":{self.epoch},"kind":"effect.intent","name":{encode(name)},'
            f'"policy":{encode(policy)},"seq":{self.seq},"ts":{int(time * 1000)}}}'
        )

    def _result(self, entry: Entry) -> str:
        _, time, eid, result = entry
        out = self._outcomes.result(eid, result, self._hider)
        self.seq += 1
        return self._clean(
            f'{{"eid":{encode(eid)},"epoch":{self.epoch},"kind":"effect.result","out":{out},'
            f'"seq":{self.seq},"ts":{int(time * 1000)}}}'
        )

    def _body(self, entry: Entry) -> str:
        kind, hider = entry[0], self._hider
        texts = _FIELDS.get(kind, _plain)(self._outcomes, entry, hider)
        if self._secrets is not None and kind in _BEGINNINGS:
            texts["salt"] = hider.put(self._secrets.salt)
        self.seq += 1
        texts |= {"epoch": str(self.epoch), "kind": f'"{kind}"', "seq": str(self.seq), "ts": str(int(entry[1] * 1000))}
        fields = [f'"{name}":{texts[name]}' for name in sorted(texts)]
        return self._clean(f"{{{','.join(fields)}}}")


def _texts(data: Data) -> Texts:
    """Each value by itself: few hold what must be tagged."""
    return {name: encode(value) for name, value in data.items()}


def _plain(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Texts:
    """What needs no care: fields that are JSON already."""
    return _texts(entry[2] or {})


def _transition(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Texts:
    outcome, cancel, took, silence, decision, aborted = cast(
        "tuple[Outcome, str | None, int, int, Decision, Any]", entry[2:]
    )
    texts = {"out": outcomes.write(outcome, hider), **_texts(_row_fields(decision))}
    if took or silence:
        texts["us"] = f"[{took},{silence}]"
    if cancel is not None:
        texts["cancel"] = encode(cancel)
    if isinstance(decision.found, Failure):
        texts["failure"] = written(decision.found, hider)
    if aborted is not None:
        texts["aborted"] = written(aborted, hider)
    return texts


def _row_fields(decision: Decision) -> Data:
    """Which row was taken; ``tried`` has a digit for each guard that was asked, in order: 1 where it held."""
    row = decision.transition
    return {"to": str(row.target), "transition": row.id, "tried": "0" * (len(decision.tried) - 1) + "1"}


def _suspended(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Texts:
    what = dict(entry[2])
    waiting = outcomes.waiting(cast("Waiting", what.pop("waiting")), hider)
    return {**_texts(what), "waiting": waiting}


def _created(outcomes: OutcomeWriter, entry: Entry, hider: Hider) -> Texts:
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
    if begun.parent:
        body["parent"] = dict(begun.parent)
    if begun.tools:
        body["tools"] = {t.name: _spec_hash(t) for t in begun.tools}
    if begun.state is None:
        return {**_texts(body), "messages": written(begun.messages, hider)}
    return {**_texts(body), "at": encode(begun.state["state"]), "state": hider.put(begun.state)}


_FIELDS: dict[str, Callable[[OutcomeWriter, Entry, Hider], Texts]] = {
    "transition": _transition,
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


@cache
def _versions() -> Data:
    try:
        own = version("agentfsm")
    except PackageNotFoundError:
        own = "0"
    return {"agentfsm": own, "python": platform.python_version()}
