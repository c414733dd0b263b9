"""Collects a run's journal entries in memory and hands them to a journal sink.

An entry is a tuple that begins with its kind and its time; the record writer of ``agentfsm.journal`` serializes
them. Without a store nothing here awaits, encodes or hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfsm.loop.failures import Failure
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.messages import Message, ToolResult
from agentfsm.loop.model import ToolSpec
from agentfsm.loop.outcomes import Outcome
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.runtime.host import Clock

__all__ = ["JournalEntry", "JournalSink", "Recorder", "ResumePoint", "RunHeader"]

JournalEntry = tuple[Any, ...]
"""``(kind, seconds since the epoch, ...)``; what follows depends on the kind."""


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What a run begins with; its first record pins all of it.

    Attributes:
        run_id: The run.
        session_id: The conversation, where the caller has one.
        graph: The table.
        guardrails: Its limits.
        behavior: Its choices.
        policy: What is done about failures, in words and data.
        messages: The transcript so far.
        state: Where a run does not begin at its beginning: all that it knows, as JSON data; else None.
        seed: The host's seed of random draws.
        parent: For a fork: run, seq and hash of the record behind which it leaves its parent. For a
            sub-agent's run: the run and the call for which it works.
        tools: What the model is told of its tools.
    """

    run_id: str
    session_id: str
    graph: Graph
    guardrails: AgentGuardrails
    behavior: Behavior
    policy: Any
    messages: tuple[Message, ...] = ()
    state: dict[str, Any] | None = None
    seed: int | None = None
    parent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run stood in its store when it was read, to be gone on with.

    Attributes:
        seq: Its last record.
        hash: That record's hash, in hex.
        kind: What it waited for, or ``interrupted`` where it was cut off.
        tool: The tool that a person was asked about, or an empty string.
        expires_at: Until when it can be answered, in seconds since the epoch, or None.
        request_ref: Number and hash of the record that asks, or None where it waits for nobody.
        attempts: Attempts at each effect so far.
        visited: The states that it has left before.
        results: Results of calls that had ended while others of their batch had not, by effect.
        migration_details: For a run that changes its graph: what the record of that says; else empty.
    """

    seq: int
    hash: str
    kind: str
    tool: str = ""
    expires_at: float | None = None
    request_ref: tuple[int, str] | None = None
    attempts: Mapping[str, int] = field(default_factory=dict[str, int])
    visited: frozenset[str] = frozenset()
    results: Mapping[str, ToolResult] = field(default_factory=dict[str, ToolResult])
    migration_details: Mapping[str, Any] = field(default_factory=dict[str, Any])


class JournalSink(Protocol):
    """Keeps a run's entries in a store; made by ``agentfsm.journal.journal_writer``."""

    @property
    def head(self) -> str:
        """The hash of the last record that was handed over, in hex."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why nothing can be kept any more, or None."""
        ...

    def push(self, entries: list[JournalEntry]) -> None:
        """Hand entries over, in order, without waiting."""
        ...

    async def flush(self) -> None:
        """Wait until everything handed over is durable.

        Raises:
            agentfsm.errors.StoreError: It cannot be kept; the run must not go on.
        """
        ...


class Recorder:
    """The entries of one run.

    Attributes:
        entries: With a store, those that it does not have yet; else all.
        sink: Who hands them to a store, or None.
    """

    __slots__ = ("_attempts", "_time", "entries", "sink")

    def __init__(self, clock: Clock) -> None:
        self._time = clock.time
        self._attempts: dict[str, int] = {}
        self.entries: list[JournalEntry] = []
        self.sink: JournalSink | None = None

    def record(self, kind: str, data: Any = None) -> None:
        """Something happened to the run as a whole."""
        self.entries.append((kind, self._time(), data))

    def record_transition(
        self,
        outcome: Outcome | None,
        cancel: str | None,
        elapsed_us: int,
        silence_us: int,
        decision: Decision,
        aborted: Failure | None,
    ) -> None:
        """An outcome was folded in, and the run moved.

        Args:
            outcome: What the effect returned.
            cancel: The reason of a cancellation that was folded in behind it, or None.
            elapsed_us: Microseconds that the effect took.
            silence_us: Microseconds between the effect before and this one.
            decision: The move.
            aborted: What aborted the run, if something has.
        """
        self.entries.append(("transition", self._time(), outcome, cancel, elapsed_us, silence_us, decision, aborted))

    def record_intent(self, effect_id: str, name: str, policy: str) -> int:
        """An effect is about to begin; gives the number of this attempt, from 1.

        Args:
            effect_id: The effect's id in the run, the same for every attempt.
            name: The model, the tool or the state.
            policy: ``again`` where a cut-off attempt may be repeated, ``once`` where a person must be asked.
        """
        attempt = self._attempts[effect_id] = self._attempts.get(effect_id, 0) + 1
        self.entries.append(("effect.intent", self._time(), effect_id, name, attempt, policy))
        return attempt

    def restore_attempts(self, attempts: Mapping[str, int]) -> None:
        """Attempts that were made before this process took the run up."""
        self._attempts.update(attempts)

    def record_result(self, effect_id: str, result: ToolResult) -> None:
        """A tool call has its result."""
        self.entries.append(("effect.result", self._time(), effect_id, result))

    def push(self) -> None:
        """Hand what there is to the store, without waiting."""
        if self.sink is not None and self.entries:
            entries, self.entries = self.entries, []
            self.sink.push(entries)

    async def commit(self) -> None:
        """Wait until everything so far is durable; without a store, do nothing.

        Raises:
            agentfsm.errors.StoreError: It cannot be kept; the run must not go on.
        """
        if self.sink is not None:
            self.push()
            await self.sink.flush()
