"""Extensions: what a person's reply to a spent budget grants, by default or as the reply names it.

Each extension spends the counter ``continues``. Model calls are a declared counter, too, and proofs about a graph rest
on its limit, so an extension at most fills it up: no stretch between two waits has more than ``max_iterations`` of
them. Proofs know nothing of time, tokens and USD, so of these a person may grant any amount.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from agentfsm.errors import HumanReplyError
from agentfsm.loop.detectors import CONTINUES, ITERATIONS
from agentfsm.loop.failures import LIMIT_KINDS, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.guards import (
    aborted,
    approval_decided,
    cancelled,
    doubt_settled,
    escalated,
    expired,
    replied,
    vote_recorded,
)
from agentfsm.loop.human_input import GUARDRAIL_OF_UNIT, HumanReply, PendingRequest, ReachedLimit
from agentfsm.loop.messages import round_usd
from agentfsm.loop.outcomes import RUN_CALLS
from agentfsm.loop.state import RunState
from agentfsm.machine.graph import Graph, StateSpec, Transition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EXTENDING_REPLIES = frozenset({"text", "extend"})
"""The kinds of replies that extend the limit that a run asks about."""


@dataclass(frozen=True, slots=True)
class _Budget:
    """A budget that a person can extend: what it is counted in, and how much of it a run has used and may use."""

    unit: str
    spent: Callable[[RunState], float]
    limit: Callable[[RunState], float | None]


_BUDGETS: Mapping[FailureKind, _Budget] = {
    FailureKind.iteration_limit: _Budget("model_calls", attrgetter("iterations"), ITERATIONS.limit_in),
    FailureKind.time_limit: _Budget("seconds", attrgetter("elapsed_s"), attrgetter("time_limit")),
    FailureKind.token_limit: _Budget("tokens", attrgetter("usage.total_tokens"), attrgetter("token_limit")),
    FailureKind.cost_limit: _Budget("usd", attrgetter("usage.cost_usd"), attrgetter("cost_limit")),
}


def reached_limit(run: RunState, kind: FailureKind | None) -> ReachedLimit | None:
    """The limit that a run has reached, in numbers; None if the failure is not about a budget that is limited."""
    budget = None if kind is None else _BUDGETS.get(kind)
    limit = None if budget is None else budget.limit(run)
    if budget is None or limit is None:
        return None
    return ReachedLimit(budget.unit, budget.spent(run), limit, getattr(run.guardrails, GUARDRAIL_OF_UNIT[budget.unit]))


_NEVER_HOLD_FOR_REPLY = frozenset({cancelled, aborted, expired, escalated, vote_recorded, doubt_settled})
"""Guards of the loop that do not hold when a person has replied to a limit."""


def with_granted_default(run: RunState, request: PendingRequest, limit: ReachedLimit, graph: Graph) -> ReachedLimit:
    """A limit with what a reply grants by default in the state in which the run waits."""
    if not _reply_extends(graph, run.state, request):
        return replace(limit, default=0.0)
    own = getattr(run.guardrails, GUARDRAIL_OF_UNIT[limit.unit])
    return limit if request.asker else replace(limit, default=own)


def _reply_extends(graph: Graph, state: str, request: PendingRequest) -> bool:
    """Whether the rows that may take a reply extend the limit or end the run, and not all of them end it."""
    answered, other = (approval_decided, replied) if request.asker else (replied, approval_decided)
    grants = False
    for row in graph.rows(state):
        target = graph.spec(row.target)
        if row.guard is other or row.guard in _NEVER_HOLD_FOR_REPLY:
            continue
        if not target.final:
            grants = extends(row, target, request)
            if not grants:
                return False
        if row.guard is answered and set(row.spends) <= set(row.refills):
            break
    return grants


def extends(row: Transition, target: StateSpec, request: PendingRequest) -> bool:
    """Whether a reply extends the limit that a request is about, if a row takes it."""
    if request.asker:  # the sub-agent's call continues with it
        return target.effect is RUN_CALLS
    return row.extends and not (target.waits or target.final)


def check_extension(run: RunState, reply: HumanReply, guardrails: AgentGuardrails) -> None:
    """Check that a run that waits can be extended by the amount that a reply names.

    Raises:
        HumanReplyError: The reply names another unit than the one that was used up, more model calls than one extension
            may grant, or fewer tokens or USD than were used beyond the limit.
    """
    if reply.kind != "extend" or not reply.unit:
        return
    request = run.pending_request
    reached = None if request is None else request.limit or reached_limit(run, request.failure_kind)
    if reached is None:
        raise HumanReplyError(
            f"no amount of {reply.unit} extends the limit that the run asks about, and it still waits: reply with "
            "Extend() or a string"
        )
    if reply.unit != reached.unit:
        raise HumanReplyError(
            f"the reply extends {reply.unit}, and the run has reached another limit ({reached}); it still waits: reply "
            f"with Extend({reached.unit}=...)"
        )
    most = guardrails.max_iterations
    if reached.unit == "model_calls" and most is not None and reply.amount > most:
        raise HumanReplyError(
            f"one extension grants at most {most} model calls (max_iterations), since what is proved about the run "
            f"rests on that limit, and the reply names {reply.amount:g}; the run still waits, and can be extended "
            "again later"
        )
    beyond = round_usd(reached.spent - reached.limit)
    if reached.unit in ("tokens", "usd") and reply.amount <= beyond:
        raise HumanReplyError(
            f"{reply.amount:g} more {reached.unit_name} are not enough ({reached}), and the run still waits: name more "
            f"than {beyond:g}"
        )


def extend_limit(run: RunState) -> None:
    """Grant what the person's reply names of the budget that the run asks about, or else the same amount once more.

    How often is bounded by ``max_continues``. A reply to a sub-agent extends nothing of its caller. A sub-agent's run
    gets its limits each time that it continues, from what its caller has left; only its model calls and its time start
    over here.
    """
    request = run.pending_request
    kind = None if request is None or request.asker else request.failure_kind
    if kind not in LIMIT_KINDS:
        return
    run.counters[CONTINUES.name] = run.continues + 1
    amount = run.human_reply.amount if run.human_reply is not None else 0
    guardrails = run.guardrails
    if kind is FailureKind.iteration_limit:
        most = ITERATIONS.limit_in(run)
        run.counters[ITERATIONS.name] = max(0, most - int(amount)) if most is not None and amount else 0
    elif kind is FailureKind.time_limit:
        run.elapsed_s, run.granted_s, run.final_turn = 0.0, amount or None, ""
    elif run.parent is not None:
        return
    elif kind is FailureKind.token_limit:
        run.granted_tokens += int(amount) or guardrails.max_tokens or 0
    elif kind is FailureKind.cost_limit:
        run.granted_usd += amount or guardrails.max_cost_usd or 0.0
