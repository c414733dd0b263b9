"""The state in which a run shortens its history, as its policy says: its effect, and its rows in a graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from agentfsm.errors import BudgetSpentError, GraphError, ModelError
from agentfsm.loop.guards import came_back
from agentfsm.loop.history import (
    COMPACT,
    KeepLast,
    Summarize,
    estimate_tokens,
    history_too_long,
    plan_compaction,
    policy_from_json,
    summary_prompt,
)
from agentfsm.loop.messages import Compaction, Message
from agentfsm.loop.model import Model
from agentfsm.loop.outcomes import CHECK_BUDGETS, StateResult
from agentfsm.loop.prompts import compacted
from agentfsm.machine.declaration import Counter, StateSpec, Transition
from agentfsm.machine.graph import Graph
from agentfsm.runtime.state_context import StateContext

FAILED = "failed"
COMPACTIONS = "compactions"

summary_failed = came_back(FAILED)


def with_compaction(graph: Graph, policy: KeepLast | Summarize, model: Model | None = None) -> Graph:
    """A graph whose runs shorten their history as their policy says.

    The state that checks the budgets gets a row ``history_too_long``, asked after the limits, which spends one of the
    policy's ``max_compactions``. It leads to the state ``compact``, and that leads back.

    Raises:
        GraphError: The graph has a state or a counter of that name already, or none of its states checks budgets.
    """
    if any(spec.name == COMPACT for spec in graph.states) or any(c.name == COMPACTIONS for c in graph.counters):
        raise GraphError(f"an agent with a history policy adds the state {COMPACT!r} itself", COMPACT, "rename yours")
    source = next((spec.name for spec in graph.states if spec.effect is CHECK_BUDGETS), None)
    if source is None:
        raise GraphError("no state checks the budgets, so none can shorten the history", graph.name)
    rows = [Transition(COMPACT, None, source)]
    outcomes: tuple[str, ...] = ()
    if isinstance(policy, Summarize):
        rows.insert(0, Transition(COMPACT, summary_failed, source))
        outcomes = (FAILED,)
    note = "summarize older turns" if isinstance(policy, Summarize) else "leave out older turns"
    return graph.with_counter(Counter(COMPACTIONS, policy.max_compactions)).with_state(
        StateSpec(COMPACT, note, effect=partial(compact_history, model), outcomes=outcomes),
        rows,
        entered_by=Transition(source, history_too_long, COMPACT, spends=COMPACTIONS),
    )


async def compact_history(model: Model | None, context: StateContext[Any]) -> StateResult:
    """The effect of ``compact``: leave out what the run's policy says, and summarize it where that is said."""
    run = context.run
    policy, plan = policy_from_json(run.details.history), plan_compaction(run)
    if policy is None or plan is None:
        return StateResult()
    if isinstance(policy, KeepLast):
        return _done(context, plan)
    prompt = [Message.system(policy.instructions), Message.user(summary_prompt(run, plan))]
    try:
        reply = await context.ask_model(prompt, model=model, max_output_tokens=policy.max_output_tokens)
    except (ModelError, BudgetSpentError) as error:
        return StateResult({"failed": str(error), "messages": len(run.messages)}, outcome=FAILED)
    text = reply.message.content.strip()
    if not text:
        return StateResult({"failed": "the model wrote no summary", "messages": len(run.messages)}, outcome=FAILED)
    return _done(context, replace(plan, text=text))


def _done(context: StateContext[Any], compaction: Compaction) -> StateResult:
    messages, before = context.run.messages, context.run.compaction
    tokens = [estimate_tokens(compacted(messages, each)) for each in (before, compaction)]
    return StateResult({"tokens_before": tokens[0], "tokens_after": tokens[1]}, compaction=compaction)
