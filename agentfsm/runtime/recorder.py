"""Collects a run's journal entries in memory and hands them to a journal sink.

An entry is a tuple that starts with its kind and its time; ``agentfsm.journal.journal_writer`` serializes it.
Without a store nothing here awaits, encodes or hashes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agentfsm.loop.failures import Failure
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.messages import Message, Reply, ToolResult
from agentfsm.loop.outcomes import Outcome
from agentfsm.loop.quorum import Actor
from agentfsm.loop.state import NO_DETAILS, RunDetails
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.runtime.host import Clock
from agentfsm.runtime.tools import Tool

if TYPE_CHECKING:
    from agentfsm.journal.records import SealedRecord

JournalEntry = tuple[Any, ...]
"""``(kind, seconds since the epoch, ...)``; what follows depends on the kind."""

_LENGTHS = {"transition": 8, "effect.intent": 7, "effect.result": 4}
"""How many values entries of these kinds have; those of any other kind, which are about the run as a whole, have 3."""


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The content of a run's first record.

    Attributes:
        run_id: The run's id.
        session_id: The conversation's id, or an empty string.
        graph: The transition table.
        guardrails: Its limits.
        behavior: The switches of its preset.
        policy: The recovery policy.
        messages: The initial transcript.
        state: For a run that starts from a suspension record, its state as JSON data; else None.
        seed: The host's seed of random draws.
        parent: For a fork: run, seq and hash of the record after which it diverges. For a sub-agent's run: the
            calling run and the id of the call. Else empty.
        tools: The tools; the record pins the digest of each.
        requester: Who requested the run, or None.
        details: What else the run was given when it was started.
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
    tools: tuple[Tool, ...] = ()
    requester: Actor | None = None
    details: RunDetails = NO_DETAILS


class EarlierPart(NamedTuple):
    """What was not read of a run that was loaded from a snapshot.

    Attributes:
        records: Its records, up to and with that of the snapshot.
        messages: Its messages at that record.
        secrets: The values that the records withhold.
    """

    records: Sequence[SealedRecord]
    messages: Sequence[Message]
    secrets: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class JournalBase:
    """What the process that continues a stored run has to know about its journal, besides its state.

    Attributes:
        first: The first record.
        unread: How many records, from the first, were not read.
        read: Reads and verifies them; None if none are missing.
        model: The name of the first model that it called, or an empty string if it has to be looked up.
        asked: Sequence number and hash of each record with the request that it waits for.
        may_have_snapshots: Whether its pinned graph is that of its first record.
    """

    first: SealedRecord
    unread: int = 0
    read: Callable[[], Awaitable[EarlierPart]] | None = None
    model: str = ""
    asked: tuple[tuple[int, str], ...] = ()
    may_have_snapshots: bool = True


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position in the journal from which a stored run is resumed.

    Attributes:
        seq: The sequence number of its last record.
        hash: That record's hash, in hex.
        kind: What it waits for, or ``interrupted``.
        tool: The tool that needs approval, or an empty string.
        expires_at: When the request expires, in seconds since the epoch, or None.
        request_ref: Sequence number and hash of the record with the pending request, or None if there is none.
        attempts: The number of attempts at each effect so far, by effect id.
        visited: The states that it has left before.
        results: Results of calls that had ended while others of their batch had not, by effect id.
        migration_details: For a run that changes graphs, the content of its migration record; else empty.
        secrets: The values that its records withhold.
        epoch: The epoch in which its last record was written.
        records: Its records, without those that were not read: ``base.unread`` tells how many.
        base: What its journal continues from; None for a run that is not in a store.
        stepped_at: When it took its last step, in seconds since the epoch; None if its records do not say.
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
    secrets: tuple[Any, ...] = field(default=(), repr=False)
    epoch: int = 0
    records: Sequence[SealedRecord] = field(default=(), repr=False)
    base: JournalBase | None = field(default=None, repr=False)
    stepped_at: float | None = None

    def with_earlier(self, earlier: EarlierPart) -> ResumePoint:
        """The same for a run of which nothing is unread."""
        return replace(
            self,
            records=(*earlier.records, *self.records),
            secrets=(*earlier.secrets, *self.secrets),
            base=None if self.base is None else replace(self.base, unread=0, read=None),
        )


class JournalSink(Protocol):
    """Writes a run's entries to a store; implemented by ``agentfsm.journal.journal_writer``."""

    @property
    def head(self) -> str:
        """The hash of the last record pushed, in hex."""
        ...

    @property
    def epoch(self) -> int:
        """How often the run was acquired, this time included."""
        ...

    @property
    def records(self) -> Sequence[SealedRecord]:
        """The run's records so far that are durable: those from which it was resumed, and those written since."""
        ...

    @property
    def has_unread(self) -> bool:
        """Whether the run was loaded from a snapshot, and records before that were not read yet."""
        ...

    async def read_earlier(self) -> Sequence[Message]:
        """Read and verify what was not read of the run when it was loaded.

        Returns:
            Its messages at the snapshot.

        Raises:
            agentfsm.errors.JournalError: It was tampered with, or cannot be read.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        ...

    @property
    def error(self) -> Exception | None:
        """Why writing has failed permanently, or None."""
        ...

    def push(self, entries: list[JournalEntry]) -> None:
        """Queue entries to be written in order, without waiting."""
        ...

    async def flush(self) -> None:
        """Wait until everything pushed is durable.

        Raises:
            agentfsm.errors.StoreError: It cannot be written; the run must not continue.
        """
        ...

    async def watch_signals(self, cancel: Callable[[str], None], acted_on: str = "") -> None:
        """Cancel the run if its store gets a request to do so, from whatever process, or has got one before.

        Args:
            cancel: Cancels the run, with a reason; called in the event loop of the caller.
            acted_on: The id of the signal that the run is resumed with, which is removed once that is durable.
        """
        ...

    def stop(self) -> None:
        """Take no more entries of a run that has not ended: from now on, ``error`` says that it was handed over."""
        ...

    async def release(self) -> None:
        """Stop, wait until everything pushed is durable, and release the lease of a run that has not ended.

        Raises:
            agentfsm.errors.StoreError: It cannot be written.
        """
        ...


class Recorder:
    """Collects the journal entries of one run.

    It keeps their values in one list, and not in a tuple for each: the garbage collector visits every tuple again and
    again, which would take a twentieth of a step.

    Attributes:
        sink: Writes them to a store; None without one.
    """

    __slots__ = ("_attempts", "_time", "_values", "sink")

    def __init__(self, clock: Clock) -> None:
        self._time = clock.time
        self._attempts: dict[str, int] = {}
        self._values: list[Any] = []
        self.sink: JournalSink | None = None

    @property
    def entries(self) -> list[JournalEntry]:
        """With a store, the entries not pushed yet; else all."""
        values, entries, at = self._values, list[JournalEntry](), 0
        size, length_of = len(values), _LENGTHS.get
        while at < size:
            end = at + length_of(values[at], 3)
            entries.append(tuple(values[at:end]))
            at = end
        return entries

    def record(self, kind: str, data: Any = None) -> None:
        """Add an entry about the run as a whole."""
        self._values += (kind, self._time(), data)

    def record_transition(
        self,
        outcome: Outcome | None,
        cancel: str | None,
        elapsed_us: int,
        silence_us: int,
        decision: Decision,
        aborted: Failure | None,
    ) -> None:
        """Add an entry: an outcome was applied, and a transition taken.

        Args:
            outcome: The outcome of the effect, or None if it has none.
            cancel: The reason of a cancellation that was applied after it, or None.
            elapsed_us: Microseconds that the effect took.
            silence_us: Microseconds between the previous effect and this one.
            decision: The transition taken.
            aborted: The failure that aborted the run in this step, or None.
        """
        time = self._time
        self._values += ("transition", time(), outcome, cancel, elapsed_us, silence_us, decision, aborted)

    def record_intent(self, effect_id: str, name: str, policy: str, request: Mapping[str, Any] | None = None) -> int:
        """Add an entry: an effect is about to start.

        Args:
            effect_id: The effect's id in the run, the same for every attempt.
            name: The name of the model, the tool or the state.
            policy: ``again`` if an interrupted attempt may be repeated, ``once`` if a human must decide.
            request: For a call of a user-defined state's effect, what is given to it: ``messages`` or ``arguments``.

        Returns:
            The number of this attempt, from 1.
        """
        attempts, time = self._attempts, self._time
        attempt = attempts[effect_id] = attempts.get(effect_id, 0) + 1
        self._values += ("effect.intent", time(), effect_id, name, attempt, policy, request)
        return attempt

    def restore_attempts(self, attempts: Mapping[str, int]) -> None:
        """Restore the attempt counts of a run loaded from a store."""
        self._attempts.update(attempts)

    def record_result(self, effect_id: str, result: ToolResult | tuple[Reply | Failure, int]) -> None:
        """Add an entry: an effect has its result.

        Args:
            effect_id: The effect's id.
            result: That of a tool call; or, for a user-defined state's effect, a model's answer and how many model
                calls it took.
        """
        time = self._time
        self._values += ("effect.result", time(), effect_id, result)

    def push(self) -> None:
        """Push the entries so far to the store, without waiting."""
        if self.sink is not None and self._values:
            entries, self._values = self.entries, []
            self.sink.push(entries)

    async def commit(self) -> None:
        """Wait until every entry so far is durable; without a store, do nothing.

        Raises:
            agentfsm.errors.StoreError: It cannot be written; the run must not continue.
        """
        if self.sink is not None:
            self.push()
            await self.sink.flush()
