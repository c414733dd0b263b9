"""``RunState``: everything a run knows, and its JSON form.

Guards read it and ``reducer`` changes it. It survives a round trip through JSON, so a run can be suspended and resumed
in another process. Effects never change it: they return an outcome, which ``reducer.on_outcome`` applies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import Action, Failure, FailureKind, describe_exception
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.messages import Message, Reply, ToolCall, ToolResult, Usage
from agentfsm.machine.graph import State

__all__ = [
    "MAX_LESSONS",
    "CallState",
    "HumanReply",
    "PendingRequest",
    "RunState",
    "SuspendedSubRun",
    "dump_state",
    "load_state",
]


MAX_LESSONS = 5
"""How many kinds of failure ``lessons_learned`` holds; the oldest falls out."""


@dataclass(slots=True)
class CallState:
    """One call of the batch at hand.

    Attributes:
        call: The call; a person may have edited its arguments.
        signature: The signature of the call as the model made it.
        result: What became of it, or None while it is pending.
        started: Whether it was started and no end is known: after a crash it is in doubt.
        approved: Whether a person has allowed it.
        edited: Whether a person has changed its arguments.
        denied: What the model is told, once a person has denied it.
        retries: How often it was run again as it stands.
        held: For a sub-agent's call, the suspended run that works on it, or None.
        answer: A person's answer that this run has not been given yet, or None.
    """

    call: ToolCall
    signature: str
    result: ToolResult | None = None
    started: bool = False
    approved: bool = False
    edited: bool = False
    denied: str | None = None
    retries: int = 0
    held: SuspendedSubRun | None = None
    answer: HumanReply | None = None


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """What a suspended run waits for.

    Attributes:
        kind: ``question``, ``approval``, ``limit`` or ``in_doubt``.
        question: What the person is asked.
        context: More about it, or an empty string.
        choices: Answers to choose from, or empty.
        call_id: The call that it is about, or None.
        tool: The tool of that call, or an empty string.
        arguments: The arguments of that call, for an approval.
        failure_kind: The kind of failure that led here, or None where a tool asked.
        asker: Where a sub-agent asks, the tool that it is; one that asks through another stands behind it
            (``researcher/reader``). Else an empty string.
    """

    kind: str
    question: str
    context: str = ""
    choices: tuple[str, ...] = ()
    call_id: str | None = None
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure_kind: FailureKind | None = None
    asker: str = ""


@dataclass(frozen=True, slots=True)
class SuspendedSubRun:
    """A sub-agent's run that waits for a person, and with it the call that it works on.

    Attributes:
        run_id: The sub-agent's run.
        waiting: What the person is asked, as the run above asks it.
        suspension: The id of its suspension.
        record: The signed record of that run as JSON text; empty where a store keeps the run.
        usage: What its model calls used up since the call began or went on.
        spent: What they have used up in all.
    """

    run_id: str
    waiting: PendingRequest
    suspension: str
    record: str = ""
    usage: Usage = field(default_factory=Usage)
    spent: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class HumanReply:
    """A person's answer, as the loop keeps it.

    Attributes:
        kind: ``text``, ``allow``, ``deny``, ``edit``, ``ran``, ``did_not_run`` or ``give_up``.
        text: The words: an answer, a reason, or the result of a call that ran.
        arguments: For ``edit``, the new arguments.
        by: Who answered, where the caller says so.
    """

    kind: str
    text: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    by: str = ""


@dataclass(slots=True)
class RunState:
    """Everything that one run knows, in plain data.

    Attributes:
        run_id: The run's id.
        session_id: The conversation that it belongs to, where the caller has one.
        parent: For a sub-agent's run, the run and the call for which it works; else None.
        state: The declared state that it is in.
        guardrails: Its limits.
        behavior: Its choices of behaviour.
        messages: The transcript; it only grows.
        deferred_messages: Messages of states of your own that wait until every call of the batch has its result.
        reply: The model's last reply, while it is judged.
        malformed: Why that reply could not be read, or None.
        batch: The calls of that reply.
        answer: The final answer that was read from that reply, or None.
        steps: How often ``pre_step`` was entered.
        iterations: Model calls made (since a person extended that budget).
        model_calls: Model calls made in all.
        usage: Tokens and USD of all model calls.
        elapsed_s: Seconds of active time (since a person extended that budget).
        silence_s: The longest silence between two phases since the last model call, in seconds.
        final_turn: ``""``, ``now`` during the last turn that ``finalize_grace_s`` grants, then ``used``.
        continues: How often a person has extended a spent budget.
        failure: The failure that is being recovered from, or the one that ended the run.
        action: What the policy decided about it.
        retry_calls: Whether that is to run the failed calls of the batch again.
        failure_attempts: Strikes of each kind.
        lessons_learned: The newest failure of each kind, five kinds at most, oldest first.
        pending_instruction: What the next request tells the model after ``narrow_scope``; one-shot.
        feedback: What the next request tells the model about a reply that no call answers; one-shot.
        output_cap: The cap on the next reply after a truncated one, in tokens, or None.
        partial_answer: The beginning of an answer that was cut off, while the model is asked to go on with it.
        elided: How many of the oldest messages show no tool results any more (the prompt was too long).
        backoff_s: Seconds to wait before the next step.
        call_failures: The first failure of each kind in the batch at hand.
        recent_calls: Signatures of the last calls, oldest first.
        error_key: The key of the last tool error; ``error_streak`` counts how often it came in a row.
        denials: Denials in a row.
        pending_request: What a suspended run waits for, or None.
        human_reply: A person's answer that has not been acted on yet, or None.
        ending: ``done``, ``unable`` or ``ask`` once a tool declared it, with ``ending_value``.
        cancelled: The reason of a cancellation, or None.
        aborted: The failure that aborted the run, or None.
        expired: Whether the time for an answer is over.
        state_results: What the effects of states of your own returned, by state; JSON.
    """

    run_id: str
    session_id: str = ""
    parent: tuple[str, str] | None = None
    state: str = State.PRE_STEP
    guardrails: AgentGuardrails = field(default_factory=AgentGuardrails)
    behavior: Behavior = field(default_factory=Behavior)
    messages: list[Message] = field(default_factory=list[Message])
    deferred_messages: list[Message] = field(default_factory=list[Message])
    reply: Reply | None = None
    malformed: str | None = None
    batch: list[CallState] = field(default_factory=list[CallState])
    answer: Any = None
    steps: int = 0
    iterations: int = 0
    model_calls: int = 0
    usage: Usage = field(default_factory=Usage)
    elapsed_s: float = 0.0
    silence_s: float = 0.0
    final_turn: str = ""
    continues: int = 0
    failure: Failure | None = None
    action: Action | None = None
    retry_calls: bool = False
    failure_attempts: dict[FailureKind, int] = field(default_factory=dict[FailureKind, int])
    lessons_learned: list[Failure] = field(default_factory=list[Failure])
    pending_instruction: str | None = None
    feedback: str | None = None
    output_cap: int | None = None
    partial_answer: str = ""
    elided: int = 0
    backoff_s: float = 0.0
    call_failures: dict[FailureKind, Failure] = field(default_factory=dict[FailureKind, Failure])
    recent_calls: list[str] = field(default_factory=list[str])
    error_key: tuple[str, str, str, str] | None = None
    error_streak: int = 0
    denials: int = 0
    pending_request: PendingRequest | None = None
    human_reply: HumanReply | None = None
    ending: str | None = None
    ending_value: Any = None
    cancelled: str | None = None
    aborted: Failure | None = None
    expired: bool = False
    state_results: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return self.state == State.TERMINAL

    @property
    def last_repeat_counts(self) -> dict[str, int]:
        """How often each signature stands among the recent calls (loop detection; never ``attempts``)."""
        return dict(Counter(self.recent_calls))

    def attempts(self, kind: FailureKind) -> int:
        """Strikes of a kind so far."""
        return self.failure_attempts.get(kind, 0)

    def record_failure_attempt(self, kind: FailureKind) -> None:
        """Count one strike of a kind."""
        self.failure_attempts[kind] = self.attempts(kind) + 1

    def add_lesson(self, failure: Failure) -> None:
        """Keep a failure as a lesson: the newest of each kind, ``MAX_LESSONS`` kinds, the oldest falls out."""
        others = [lesson for lesson in self.lessons_learned if lesson.kind != failure.kind]
        self.lessons_learned = [*others, failure][-MAX_LESSONS:]

    def abort(self, by: str, error: BaseException) -> None:
        """Note that code of the user's raised; the first one stands."""
        if self.aborted is None:
            text = f"{by} raised {describe_exception(error)}"
            self.aborted = Failure(
                kind=FailureKind.aborted,
                explanation=text,
                metadata={"by": by, "error_class": type(error).__name__},
            )


_STORED_NAMES = {
    "behavior": "rules",
    "deferred_messages": "behind",
    "final_turn": "grace",
    "human_reply": "person",
    "partial_answer": "so_far",
    "pending_request": "waiting",
    "state_results": "notes",
}
"""Fields that suspension records and journals know by an earlier name."""

_FIELD_NAMES = {stored: name for name, stored in _STORED_NAMES.items()}


@cache
def _state_adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def dump_state(run: RunState) -> dict[str, Any]:
    """Everything that a run knows, as JSON data; lone surrogates in texts become ``?``, NaN becomes null."""
    try:
        data: dict[str, Any] = _state_adapter().dump_python(run, mode="json")
        canonical_json(data).encode()
    except ValueError:  # NaN and infinity, or a lone surrogate, which has no UTF-8: JSON has none of them
        loose = json.dumps(_state_adapter().dump_python(run), ensure_ascii=False, default=_to_jsonable)
        data = json.loads(loose.encode("utf-8", "replace"), parse_constant=lambda _: None)
    return {_STORED_NAMES.get(name, name): value for name, value in data.items()}


def _to_jsonable(value: Any) -> Any:
    return to_jsonable_python(value, fallback=repr)


def load_state(data: dict[str, Any]) -> RunState:
    """The run that ``dump_state`` wrote down.

    Raises:
        pydantic.ValidationError: The data is not the state of a run.
    """
    return _state_adapter().validate_python({_FIELD_NAMES.get(name, name): value for name, value in data.items()})
