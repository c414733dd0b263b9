"""What a suspended run asks a person for, and what the person answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfsm.loop.failures import FailureKind
from agentfsm.loop.messages import Usage
from agentfsm.loop.quorum import Actor, Quorum
from agentfsm.loop.read_only import FrozenDict, freeze_field, read_only


@read_only
@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """A limit that a run has reached, and what a person's reply grants by default.

    Attributes:
        unit: ``model_calls``, ``seconds``, ``tokens`` or ``usd``: the argument of ``Extend`` that names another amount.
        spent: How much is used up.
        limit: How much the run might use.
        default: What a reply that names no amount grants; 0 if no reply grants anything where the run waits.
    """

    unit: str
    spent: float
    limit: float
    default: float

    @property
    def unit_name(self) -> str:
        """The unit as text, such as ``model calls``."""
        return "USD" if self.unit == "usd" else self.unit.replace("_", " ")

    def __str__(self) -> str:
        used = f"{self.spent:.10g} of {self.limit:.10g} {self.unit_name} are used up"
        return f"{used}, and a reply grants {self.default:.10g} by default" if self.default else used


@read_only
@dataclass(frozen=True, slots=True)
class PendingRequest:
    """What a suspended run waits for.

    Attributes:
        kind: ``question``, ``form``, ``approval``, ``limit`` or ``in_doubt``.
        question: The question for the person.
        context: Background for the question, or an empty string.
        choices: Answers to choose from, or empty.
        call_id: The call that it is about, or None.
        tool: The tool of that call, or an empty string.
        arguments: The arguments of that call, for an approval.
        failure_kind: The kind of failure that led to it, or None if a tool asked.
        asker: If a sub-agent asks, its tool name; for nested sub-agents their path (``researcher/reader``). Else
            an empty string.
        tool_digest: The digest of that tool (``Tool.digest``), to which the reply is bound; empty in what version
            0.1.0 wrote.
        quorum: For an approval with a rule about who may answer, the rule and the votes so far; else None.
        limit: For a limit, how much of it is used up; None for any other request.
        form: For a form, the JSON schema of the object to fill in; empty for any other request.
    """

    kind: str
    question: str
    context: str = ""
    choices: tuple[str, ...] = ()
    call_id: str | None = None
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=FrozenDict)
    failure_kind: FailureKind | None = None
    asker: str = ""
    tool_digest: str = ""
    quorum: Quorum | None = None
    limit: ReachedLimit | None = None
    form: Mapping[str, Any] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        freeze_field(self, "arguments")
        freeze_field(self, "form")

    @property
    def asks_something(self) -> bool:
        """Whether a call, a sub-agent or a failure led to it; otherwise a state of the user's only waits."""
        return bool(self.call_id or self.asker or self.failure_kind)


@read_only
@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question that a tool has asked, and a person's answer."""

    question: str
    answer: str


@read_only
@dataclass(frozen=True, slots=True)
class SuspendedSubRun:
    """What works on a call and waits for a person: a sub-agent's run, or a tool that has asked. The call waits with it.

    Attributes:
        run_id: The sub-agent's run; empty for a tool.
        waiting: The request to the person, as the parent run makes it.
        suspension: The id of its suspension; empty for a tool.
        record: The signed suspension record of that run as JSON text; empty if a store has the run.
        usage: Usage of its model calls since the call began or was resumed.
        spent: Total usage of its model calls.
        model_calls: How many model calls it made since the call began or was resumed.
        total_model_calls: How many model calls it has made.
        answers: For a tool, its questions so far with the answers to them.
    """

    run_id: str
    waiting: PendingRequest
    suspension: str
    record: str = ""
    usage: Usage = field(default_factory=Usage)
    spent: Usage = field(default_factory=Usage)
    model_calls: int = 0
    total_model_calls: int = 0
    answers: tuple[AnsweredQuestion, ...] = ()


@read_only
@dataclass(frozen=True, slots=True)
class HumanReply:
    """A person's answer, as the run records it.

    Attributes:
        kind: ``text``, ``extend``, ``fill``, ``allow``, ``deny``, ``edit``, ``ran``, ``did_not_run`` or ``give_up``.
        text: The answer, the reason, or the result of a call that ran.
        arguments: For ``edit``, the new arguments; for ``fill``, the fields of the form.
        unit: For ``extend``, what is extended, as in ``ReachedLimit``; empty if the reply names no amount.
        amount: For ``extend``, how much is granted; 0 if the reply names no amount.
        by: Who answered, if the caller names them.
        actor: Who answered, if the caller gives an ``Actor`` or the host vouches for one; else None.
    """

    kind: str
    text: str = ""
    arguments: Mapping[str, Any] = field(default_factory=FrozenDict)
    by: str = ""
    actor: Actor | None = None
    unit: str = ""
    amount: float = 0.0

    def __post_init__(self) -> None:
        freeze_field(self, "arguments")

    @property
    def answered_by(self) -> Actor | None:
        """Who answered; a name alone is an actor without roles, for which nobody vouches."""
        return self.actor or (Actor(self.by) if self.by.strip() else None)
