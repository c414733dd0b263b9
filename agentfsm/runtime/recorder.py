"""What happened in a run, in order and by reference: written down when somebody asks, or when a store is to keep it.

Every entry is a tuple that begins with its kind and its time; ``agentfsm.journal.scribe`` makes records of
them. Without a store nothing here awaits, encodes or hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfsm.core.failures import Failure
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.messages import Message, ToolResult
from agentfsm.core.model import ToolSpec
from agentfsm.core.outcomes import Outcome
from agentfsm.core.rules import Rules
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.runtime.host import Clock

__all__ = ["Beginning", "Entry", "Keeper", "Recorder", "TakenUp"]

Entry = tuple[Any, ...]
"""``(kind, seconds since the epoch, ...)``; what follows depends on the kind."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a run begins with; its first record pins all of it.

    Attributes:
        run_id: The run.
        session_id: The conversation, where the caller has one.
        graph: The table.
        guardrails: Its limits.
        rules: Its choices.
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
    rules: Rules
    policy: Any
    messages: tuple[Message, ...] = ()
    state: dict[str, Any] | None = None
    seed: int | None = None
    parent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class TakenUp:
    """Where a run stood in its store when it was read, to be gone on with.

    Attributes:
        seq: Its last record.
        hash: That record's hash, in hex.
        kind: What it waited for, or ``interrupted`` where it was cut off.
        tool: The tool that a person was asked about, or an empty string.
        expires_at: Until when it can be answered, in seconds since the epoch, or None.
        asked: Number and hash of the record that asks, or None where it waits for nobody.
        attempts: Attempts at each effect so far.
        left: The states that it has left before.
        results: Results of calls that had ended while others of their batch had not, by effect.
        migrated: For a run that changes its graph: what the record of that says; else empty.
    """

    seq: int
    hash: str
    kind: str
    tool: str = ""
    expires_at: float | None = None
    asked: tuple[int, str] | None = None
    attempts: Mapping[str, int] = field(default_factory=dict[str, int])
    left: frozenset[str] = frozenset()
    results: Mapping[str, ToolResult] = field(default_factory=dict[str, ToolResult])
    migrated: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Keeper(Protocol):
    """Keeps a run's entries in a store; made by ``agentfsm.journal.keeper``."""

    @property
    def head(self) -> str:
        """The hash of the last record that was handed over, in hex."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why nothing can be kept any more, or None."""
        ...

    def push(self, entries: list[Entry]) -> None:
        """Hand entries over, in order, without waiting."""
        ...

    async def settle(self) -> None:
        """Wait until everything handed over is durable.

        Raises:
            agentfsm.errors.StoreError: It cannot be kept; the run must not go on.
        """
        ...


class Recorder:
    """The entries of one run.

    Attributes:
        entries: With a store, those that it does not have yet; else all.
        keeper: Who hands them to a store, or None.
    """

    __slots__ = ("_attempts", "_time", "entries", "keeper")

    def __init__(self, clock: Clock) -> None:
        self._time = clock.time
        self._attempts: dict[str, int] = {}
        self.entries: list[Entry] = []
        self.keeper: Keeper | None = None

    def note(self, kind: str, what: Any = None) -> None:
        """Something happened to the run as a whole."""
        self.entries.append((kind, self._time(), what))

    def moved(
        self,
        outcome: Outcome,
        cancel: str | None,
        took_us: int,
        silence_us: int,
        decision: Decision,
        aborted: Failure | None,
    ) -> None:
        """An outcome was folded in, and the run moved.

        Args:
            outcome: What the effect came back with.
            cancel: The reason of a cancellation that was folded in behind it, or None.
            took_us: Microseconds that the effect took.
            silence_us: Microseconds between the effect before and this one.
            decision: The move.
            aborted: What aborted the run, if something has.
        """
        self.entries.append(("transition", self._time(), outcome, cancel, took_us, silence_us, decision, aborted))

    def intend(self, eid: str, name: str, policy: str) -> int:
        """An effect is about to begin; gives the number of this attempt, from 1.

        Args:
            eid: The effect's id in the run, the same for every attempt.
            name: The model, the tool or the state.
            policy: ``again`` where a cut-off attempt may be repeated, ``once`` where a person must be asked.
        """
        attempt = self._attempts[eid] = self._attempts.get(eid, 0) + 1
        self.entries.append(("effect.intent", self._time(), eid, name, attempt, policy))
        return attempt

    def tried(self, attempts: Mapping[str, int]) -> None:
        """Attempts that were made before this process took the run up."""
        self._attempts.update(attempts)

    def ended(self, eid: str, result: ToolResult) -> None:
        """A tool call has its result."""
        self.entries.append(("effect.result", self._time(), eid, result))

    def push(self) -> None:
        """Hand what there is to the store, without waiting."""
        if self.keeper is not None and self.entries:
            entries, self.entries = self.entries, []
            self.keeper.push(entries)

    async def commit(self) -> None:
        """Wait until everything so far is durable; without a store, do nothing.

        Raises:
            agentfsm.errors.StoreError: It cannot be kept; the run must not go on.
        """
        if self.keeper is not None:
            self.push()
            await self.keeper.settle()
