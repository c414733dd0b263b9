"""Puts the examples of a path's guards together into one script: what must happen outside for each row to be taken.

A reply is made before it is judged, and a batch of calls before any of them runs, so what a row needs is
often said several moves earlier. The path is read reply by reply: first what the whole batch goes
through, then the reply that makes those calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentfsm.core.examples import Example
from agentfsm.core.failures import Action
from agentfsm.core.messages import canonical_json
from agentfsm.errors import AgentfsmError
from agentfsm.machine.graph import State, Transition
from agentfsm.testing.batches import Batch
from agentfsm.testing.paths import Path
from agentfsm.testing.scripts import DISMISSED, EXPIRED, Moment, Said, Script
from agentfsm.testing.witnesses import Witnesses

__all__ = ["NoExampleError", "compose"]


class NoExampleError(AgentfsmError):
    """A guard of the path has no example: declare one with ``@detector(fires_on=[Example(...)])``."""


def compose(
    path: Path,
    witnesses: Witnesses,
    *,
    envelope: bool,
    answer: Any,
    instead: Mapping[int, Example] | None = None,
    beside: Mapping[int, Example] | None = None,
) -> Script:
    """The script that makes a run take a path.

    Args:
        path: The path.
        witnesses: The examples.
        envelope: Whether the model answers in envelopes.
        answer: A final answer of the model.
        instead: Examples to use at some moves in place of the guard's first.
        beside: What else is to happen at some moves.

    Raises:
        NoExampleError: A guard has no example.
    """
    return _Composer(path, witnesses, envelope, answer, instead or {}, beside or {}).script()


class _Composer:
    def __init__(
        self,
        path: Path,
        witnesses: Witnesses,
        envelope: bool,
        answer: Any,
        instead: Mapping[int, Example],
        beside: Mapping[int, Example],
    ) -> None:
        self._path = path
        self._rows = path.rows
        self._witnesses = witnesses
        self._envelope = envelope
        self._answer = answer
        self._examples = [self._example(i, row, instead) for i, row in enumerate(path.rows)]
        self._beside = beside
        self._moments: dict[int, Moment] = {}
        self._replies: list[Said] = []
        self._last_reply: int | None = None
        self._batch = Batch(witnesses.call(), self._rows, self._examples, single=envelope)

    def _example(self, place: int, row: Transition, instead: Mapping[int, Example]) -> Example:
        if place in instead:
            return instead[place]
        found = self._witnesses.of(row)
        if found is None or not found.fires_on:
            raise NoExampleError(
                f"{row.id} has no example: declare @detector(fires_on=[Example(...)]) on {row.name!r}, or pass "
                f"examples={{{row.name!r}: Example(...)}}"
            )
        return found.fires_on[0]

    def script(self) -> Script:
        """The script."""
        actions: list[Action | None] = []
        people: list[Any] = []
        for place, row in enumerate(self._rows):
            example = self._examples[place]
            self._moment(place, example)
            if row.source == State.CALL_LLM:
                self._replies.append(self._said(place, example))
                if not isinstance(self._replies[-1].entry, BaseException):
                    self._last_reply = len(self._replies) - 1
            elif row.source == State.RECOVER:
                actions.append(self._action(place, example))
            elif row.name in ("cancelled", "expired") and self._waits(row):
                people.append(EXPIRED if row.name == "expired" else DISMISSED)
            elif example.answer is not None:
                people.append(self._batch.answers.get(place, example.answer))
            if example.tokens or example.cost_usd:
                self._spend(example)
        return Script(
            tuple(self._replies),
            tuple(cell.value for cell in self._batch.cells),
            tuple(actions),
            tuple(people),
            self._moments,
            self._path.guardrails,
        )

    def _waits(self, row: Transition) -> bool:
        return row.source == State.SUSPENDED

    def _moment(self, place: int, example: Example) -> None:
        more = self._beside.get(place, Example())
        both = (example, more)
        moment = Moment(
            took_s=max(e.took_s for e in both),
            silent_s=max(e.silent_s for e in both),
            cancel=any(e.cancel for e in both),
            abort=any(e.abort for e in both),
            asks=any(e.asks for e in both),
            cut=any(e.cut for e in both),
            notes=example.notes,
        )
        if moment != Moment():
            self._moments[place] = moment
        if more.tokens or more.cost_usd:
            self._spend(more)

    def _spend(self, example: Example) -> None:
        if self._last_reply is not None:
            said = self._replies[self._last_reply]
            self._replies[self._last_reply] = Said(
                said.entry, max(said.tokens, example.tokens), max(said.cost_usd, example.cost_usd)
            )

    def _action(self, place: int, example: Example) -> Action:
        if example.action is not None:
            return example.action
        # behind a failure of a call that may be run again, a retry would run it again
        return Action.narrow_scope if self._batch.rerunnable(place) else Action.retry

    # -- replies --------------------------------------------------------------------------------------

    def _said(self, place: int, example: Example) -> Said:
        """What the model says at a call: an exception, or what the moves up to the next call ask for."""
        if isinstance(example.reply, BaseException):
            return Said(example.reply)
        until = next(
            (i for i in range(place + 1, len(self._rows)) if self._rows[i].source == State.CALL_LLM), len(self._rows)
        )
        entry = example.reply
        for i in range(place + 1, until):
            for each in (self._examples[i], self._beside.get(i)):
                if each is not None and each.reply is not None and entry is None:
                    entry = each.reply
        calls = self._batch.plan(place + 1, until)
        if not calls:
            return Said(self._enveloped_text(entry))
        if self._envelope:
            call = calls[0]
            return Said(canonical_json({"kind": "tool_call", "tool_name": call.name, "arguments": dict(call.arguments)}))
        return Said(_with_calls(entry, calls))

    def _enveloped_text(self, entry: Any) -> Any:
        if entry is None:
            entry = self._answer
        if self._envelope and entry is self._answer:
            return canonical_json({"kind": "final", "content": entry})
        return entry


def _with_calls(entry: Any, calls: list[Any]) -> Any:
    """A reply that also makes calls."""
    from dataclasses import replace

    from agentfsm.core.messages import Message, Reply

    numbered = tuple(replace(call, id=f"{call.name}_{i}") for i, call in enumerate(calls, 1))
    if entry is None:
        return list(numbered)
    reply = entry if isinstance(entry, Reply) else Reply(entry if isinstance(entry, Message) else Message.assistant(str(entry)))
    return replace(reply, message=replace(reply.message, tool_calls=numbered))
