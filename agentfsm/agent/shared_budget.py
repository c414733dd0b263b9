"""A sub-agent's limits, capped by what is left of the calling run's budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentfsm.loop.extension import EXTENDING_REPLIES
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.messages import Usage
from agentfsm.loop.state import RunState
from agentfsm.runtime.delegation import CallingRun


@dataclass(frozen=True, slots=True)
class Spent:
    """What a sub-agent's run has used that the calling run has not been charged for yet."""

    model_calls: int = 0
    usage: Usage = field(default_factory=Usage)


class _Budget(NamedTuple):
    """One budget of a calling run and of its sub-agent's run.

    Attributes:
        name: The field of ``AgentGuardrails``.
        limit: The calling run's limit; None for none.
        spent: What the calling run has spent of it, and what it will be charged for.
        counted: The counter of the sub-agent's run.
        shared_by: How many sub-agents share what is left.
    """

    name: str
    limit: float | None
    spent: float
    counted: float
    shared_by: int


def _budgets(caller: CallingRun, state: RunState, uncharged: Spent) -> tuple[_Budget, ...]:
    run, share = caller.run, caller.share
    limits, n = run.guardrails, share.shared_by
    elapsed_s = run.elapsed_s + caller.uncharged_s
    usage, used = run.usage + share.uncharged + uncharged.usage, state.usage
    model_calls = run.iterations + share.uncharged_model_calls + uncharged.model_calls
    return (
        _Budget("max_iterations", limits.max_iterations, model_calls, state.iterations, n),
        _Budget("max_steps", limits.step_limit, run.steps, state.steps, n),
        _Budget("max_tokens", run.token_limit, usage.total_tokens, used.total_tokens, n),
        _Budget("max_cost_usd", run.cost_limit, usage.cost_usd, used.cost_usd, n),
        _Budget("max_execution_time_s", limits.max_execution_time_s, elapsed_s, state.elapsed_s, 1),
    )


_EXTENDED_BY_REPLY = {
    FailureKind.iteration_limit: "max_iterations",
    FailureKind.time_limit: "max_execution_time_s",
}
"""The budgets whose counter a person's reply sets to zero."""

_GRANTED_BY_REPLY = {FailureKind.token_limit: "max_tokens", FailureKind.cost_limit: "max_cost_usd"}
"""The budgets of which a person's reply grants the same amount once more."""


def cap_guardrails(
    own: AgentGuardrails,
    caller: CallingRun,
    state: RunState | None = None,
    uncharged: Spent | None = None,
    reply: HumanReply | None = None,
) -> AgentGuardrails | None:
    """A sub-agent's limits, capped by what is left of the calling run's; None if nothing is left.

    Each of model calls, steps, active time, tokens and USD is the smaller of the two. Sub-agents that start or
    continue together get equal shares, so all of them together stay within what is left; of tokens and USD each may
    exceed its share by one reply. Time is not divided, because it passes for all of them at once. Where the calling run
    asks nobody about a limit (``on_limit``), the sub-agent's run does not either.

    Args:
        own: The sub-agent's own limits.
        caller: The calling run.
        state: A run of the sub-agent that continues, or None for a new one.
        uncharged: What that run has used that the calling run has not been charged for.
        reply: The person's reply with which it continues, or None.
    """
    extends = reply is not None and reply.kind in EXTENDING_REPLIES
    request = state.pending_request if state is not None and extends else None
    kind = None if request is None else request.failure_kind
    extended, granted = (None, None) if kind is None else (_EXTENDED_BY_REPLY.get(kind), _GRANTED_BY_REPLY.get(kind))
    amount = 0.0 if reply is None else reply.amount
    validity_s = own.validity_s, caller.run.guardrails.validity_s
    update: dict[str, Any] = {"validity_s": max((each for each in validity_s if each is not None), default=None)}
    if own.on_limit == "ask_user":
        update["on_limit"] = caller.run.guardrails.on_limit
    for budget in _budgets(caller, state or RunState(""), uncharged or Spent()):
        own_limit = _own_limit(own, budget.name, state, amount, extended or granted)
        if budget.limit is None:
            update[budget.name] = own_limit
            continue
        left = budget.limit - budget.spent
        if budget.shared_by > 1:
            left = left // budget.shared_by if isinstance(left, int) else left / budget.shared_by
        if left <= 0 and (state is None or budget.name in (extended, granted)):
            return None
        cap = max(left, 0) + (0 if budget.name == extended else budget.counted)
        cap = cap or 1  # a limit is never zero: the run that continues is at its end without another model call
        update[budget.name] = cap if own_limit is None else min(own_limit, cap)
    return own.model_copy(update=update)


def _own_limit(
    own: AgentGuardrails, name: str, state: RunState | None, amount: float, extended: str | None
) -> float | None:
    """A sub-agent's own limit on a budget, with what a person has granted, and grants now.

    Args:
        own: The sub-agent's own limits.
        name: The field of them.
        state: The run that continues, or None for a new one.
        amount: What the person's reply names; 0 for the default.
        extended: The field that the reply extends, or None.
    """
    if name == "max_steps":
        return own.step_limit
    limit: float | None = getattr(own, name)
    if limit is None or state is None:
        return limit
    if name == "max_execution_time_s":
        return (amount or limit) if name == extended else (state.granted_s or limit)
    if name not in _GRANTED_BY_REPLY.values():
        return limit
    granted = amount or limit if name == extended else 0
    if name == "max_tokens":
        granted = int(granted)
    return max(limit, getattr(state.guardrails, name) or limit) + granted
