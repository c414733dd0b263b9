"""Puts the examples of a path's guards together into one script: what must happen outside for each row to be taken.

A reply is made before it is judged, and a batch of calls before any of them runs, so what a row needs is
often said several moves earlier. The path is read reply by reply: first what the whole batch goes
through, then the reply that makes those calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentfsm.core.examples import Example
from agentfsm.core.failures import Action
from agentfsm.core.messages import Message, Reply, ToolCall, canonical_json
from agentfsm.errors import AgentfsmError
from agentfsm.machine.graph import State, Transition
from agentfsm.runtime.tools import Tool
from agentfsm.testing.batches import Batch
from agentfsm.testing.pathfinder import Path
from agentfsm.testing.scripts import DISMISSED, EXPIRED, QUIET, Moment, Said, Script
from agentfsm.testing.witnesses import Witnesses

__all__ = ["NoExampleError", "compose"]


class NoExampleError(AgentfsmError):
    """A guard of the path has no example: declare one with ``@detector(fires_on=[Example(...)])``."""


def compose(
    path: Path,
    witnesses: Witnesses,
    *,
    tools: Mapping[str, Tool],
    envelope: bool,
    answer: Any,
    instead: Mapping[int, Example] | None = None,
    spare: bool = False,
) -> Script:
    """The script that makes a run take a path.

    Args:
        path: The path.
        witnesses: The examples.
        tools: The agent's tools.
        envelope: Whether the model answers in envelopes.
        answer: A final answer of the model.
        instead: Examples to use at some moves in place of the guard's first.
        spare: Whether each batch has a call more than the path runs.

    Raises:
        NoExampleError: A guard has no example.
    """
    batch = (tools, envelope, spare)
    return _Composer(path, witnesses, batch, answer, instead or {}).script()


class _Composer:
    def __init__(
        self,
        path: Path,
        witnesses: Witnesses,
        batch: tuple[Mapping[str, Tool], bool, bool],
        answer: Any,
        instead: Mapping[int, Example],
    ) -> None:
        tools, envelope, spare = batch
        self._path = path
        self._rows = path.rows
        self._witnesses = witnesses
        self._envelope = envelope
        self._answer = answer
        self._examples = [self._example(i, row, instead) for i, row in enumerate(path.rows)]
        self._moments: dict[int, Moment] = {}
        self._replies: list[Said] = []
        self._last_reply: int | None = None
        self._batch = Batch(witnesses.call(), self._rows, self._examples, tools, single=envelope, spare=spare)

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
        moment = Moment(
            example.took_s,
            example.silent_s,
            example.cancel,
            example.abort,
            example.asks,
            example.cut,
            example.notes,
        )
        if moment != QUIET:
            self._moments[place] = moment

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
        if entry is None:
            entry = next((e.reply for e in self._examples[place + 1 : until] if e.reply is not None), None)
        calls = self._batch.plan(place + 1, until)
        if not calls:
            return Said(self._enveloped_text(entry))
        if self._envelope:
            name, arguments = calls[0].name, dict(calls[0].arguments)
            return Said(canonical_json({"kind": "tool_call", "tool_name": name, "arguments": arguments}))
        return Said(_with_calls(entry, calls))

    def _enveloped_text(self, entry: Any) -> Any:
        if entry is None:
            entry = self._answer
        if self._envelope and entry is self._answer:
            return canonical_json({"kind": "final", "content": entry})
        return entry


def _with_calls(entry: Any, calls: Sequence[ToolCall]) -> Any:
    """A reply that also makes calls."""
    numbered = tuple(replace(call, id=f"{call.name}_{i}") for i, call in enumerate(calls, 1))
    if entry is None:
        return list(numbered)
    message = entry if isinstance(entry, Message) else Message.assistant(str(entry))
    reply = entry if isinstance(entry, Reply) else Reply(message)
    return replace(reply, message=replace(reply.message, tool_calls=numbered))
