"""A script: all that the outside does in one run: the model, the tools, the policy, people, time and mishaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.failures import Action
from agentfsm.core.guardrails import AgentGuardrails

__all__ = ["DISMISSED", "EXPIRED", "QUIET", "Moment", "Said", "Script"]


class _Silence:
    """What happens in place of an answer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


DISMISSED = _Silence("DISMISSED")
"""In place of a person's answer: the run is dismissed."""

EXPIRED = _Silence("EXPIRED")
"""In place of a person's answer: nobody answers in time."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the model says in one call.

    Attributes:
        entry: As an entry of a ``ScriptedModel``: a text, calls, a ``Reply``, an exception to raise...
        tokens: Tokens that it uses up, beside what the entry says.
        cost_usd: USD that it costs.
    """

    entry: Any
    tokens: int = 0
    cost_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What happens beside in one visit to a state.

    Attributes:
        took_s: Seconds that the state's work takes.
        silent_s: Seconds in which nothing happens, just before it.
        cancel: Whether somebody cancels the run.
        abort: Whether a hook aborts it.
        asks: Whether a hook asks for approval of the calls that are due.
        cut: Whether the power fails as a tool starts, and the run is taken up from its store.
        notes: What the effect of a state of your own returns, where it is not asked.
    """

    took_s: float = 0.0
    silent_s: float = 0.0
    cancel: bool = False
    abort: bool = False
    asks: bool = False
    cut: bool = False
    notes: Any = None


QUIET = Moment()
"""A visit in which nothing happens beside."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the outside does, each in the order in which it is asked. Where a list is out, nothing special happens.

    Attributes:
        replies: The model's, one a call; then it gives a last answer.
        results: The tools', one a call that runs; exceptions are raised; then all is fine.
        actions: The policy's, one a visit to ``recover``; then (and for None) the agent's own decides.
        people: Their answers, one a suspension, or ``DISMISSED`` or ``EXPIRED``, or a mapping from what the
            run may wait for (``question``, ``limit``, ``approval``, ``in_doubt``) to one of these; then the
            run is dismissed, as it is where an answer does not fit.
        moments: What happens beside, by the number of moves made before.
        guardrails: The run's limits, or None for the agent's own.
    """

    replies: Sequence[Said] = ()
    results: Sequence[Any] = ()
    actions: Sequence[Action | None] = ()
    people: Sequence[Any] = ()
    moments: Mapping[int, Moment] = field(default_factory=dict[int, Moment])
    guardrails: AgentGuardrails | None = None
