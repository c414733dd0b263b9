"""What a suspended run asks a person for, what the person replies, and how the run records that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfsm.errors import HumanReplyError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.messages import Usage
from agentfsm.loop.quorum import Actor, Quorum
from agentfsm.loop.read_only import FrozenDict, freeze_field, read_only

GUARDRAIL_OF_UNIT = {
    "model_calls": "max_iterations",
    "seconds": "max_execution_time_s",
    "tokens": "max_tokens",
    "usd": "max_cost_usd",
}
"""The field of ``AgentGuardrails`` that limits each unit, which is an argument of ``Extend``."""


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
        shown_at: Of several that wait together, until when the time of its request is counted, in seconds since the
            epoch; 0 if people were not asked about it yet.
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
    shown_at: float = 0.0


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


@dataclass(frozen=True, slots=True)
class Allow:
    """Reply to an approval request: run the call."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Reply to an approval request: do not run the call, and give the model the reason. To a form: decline it."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """Reply to an approval request: run the call with other arguments; the model is told that they were changed."""

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ItRan:
    """Reply about an interrupted call: it did run, with this result."""

    result: str = "done"


@dataclass(frozen=True, slots=True)
class ItDidNotRun:
    """Reply about an interrupted call: it did not run; run it now."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Reply about an interrupted call: it is not known whether it ran; continue without it. To a form: cancel it."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Reply to a form: its fields. Those that have a default may be left out."""

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Extend:
    """Reply to a request about a limit: continue with another amount than the default. Give one, of what ran out.

    Attributes:
        tokens: So many tokens beyond those that the run might use.
        usd: So many USD beyond those that the run might use.
        seconds: So many seconds of active time from now on.
        model_calls: So many model calls from now on; at most ``max_iterations``.
        message: What the model is told, as a string reply would; empty for nothing.
    """

    tokens: int | None = None
    usd: float | None = None
    seconds: float | None = None
    model_calls: int | None = None
    message: str = ""


HumanInput = str | Extend | Fill | Allow | Deny | Edit | ItRan | ItDidNotRun | GiveUp
"""What a human may reply: a string answers a question."""


def to_human_reply(human_input: HumanInput) -> HumanReply:
    """A human's reply in the form that the run state stores.

    Raises:
        HumanReplyError: It is not a valid reply.
    """
    match human_input:
        case str():
            return HumanReply("text", human_input)
        case Extend():
            return _to_extension(human_input)
        case Allow():
            return HumanReply("allow")
        case Deny(str(reason)):
            return HumanReply("deny", reason)
        case Edit(arguments):
            return HumanReply("edit", arguments=_json_object(arguments, "the arguments of Edit()"))
        case Fill(fields):
            return HumanReply("fill", arguments=_json_object(fields, "the fields of Fill()"))
        case ItRan(str(result)):
            return HumanReply("ran", result)
        case ItDidNotRun():
            return HumanReply("did_not_run")
        case GiveUp():
            return HumanReply("give_up")
        case _:
            raise HumanReplyError(
                "a reply must be a string, Extend(), Fill(), Allow(), Deny(), Edit(), ItRan(), ItDidNotRun() or "
                f"GiveUp(), not {human_input!r}"
            )


_MAX_AMOUNT = 10**12


def _to_extension(extend: Extend) -> HumanReply:
    named: dict[str, Any] = {unit: getattr(extend, unit) for unit in GUARDRAIL_OF_UNIT}
    named = {unit: amount for unit, amount in named.items() if amount is not None}
    if len(named) > 1:
        raise HumanReplyError(f"Extend() takes one amount, of what ran out, not {' and '.join(named)}")
    message: Any = extend.message
    if not isinstance(message, str):
        raise HumanReplyError(f"Extend(message=...) must be a string, not {message!r}")
    for unit, amount in named.items():
        whole = unit in ("tokens", "model_calls")
        if isinstance(amount, bool) or not isinstance(amount, int if whole else (int, float)):
            raise HumanReplyError(f"Extend({unit}=...) is {'a whole number' if whole else 'a number'}, not {amount!r}")
        if not 0 < amount <= _MAX_AMOUNT:  # not NaN either
            raise HumanReplyError(f"Extend({unit}={amount!r}): an amount is more than 0 and at most {_MAX_AMOUNT:,}")
        return HumanReply("extend", message, unit=unit, amount=float(amount))
    return HumanReply("extend", message)


def _json_object(arguments: Mapping[str, Any], what: str) -> dict[str, Any]:
    try:
        copy: dict[str, Any] = json.loads(canonical_json(dict(arguments)))
    except (TypeError, ValueError) as error:
        raise HumanReplyError(f"{what} are not a JSON object: {error}") from None
    return copy
