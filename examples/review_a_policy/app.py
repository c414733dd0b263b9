"""The app under review: a support agent that may refund, and the rules by which it may.

Two rules stand between the model and the money. A refund above 100 needs a person's leave: that is said at
the tool. A reply that wants to refund more than 500 is not even dispatched, but handed to a person: that is
a detector, and its row in the table is what a reviewer signs.
"""

from __future__ import annotations

from dataclasses import replace

from agentfsm import LOOP, Action, Agent, Example, Failure, FailureKind, Graph, Model, RunState, detector, tool
from agentfsm.testing import call

NEEDS_LEAVE = 100
NEVER = 500


@tool(requires_approval=lambda arguments: arguments["amount"] > NEEDS_LEAVE)
def refund(order: str, amount: int) -> str:
    """Give a customer money back.

    Args:
        order: The order.
        amount: How much, in euros.
    """
    return f"refunded {amount} for {order}"


@tool
def look_up(order: str) -> str:
    """Look an order up."""
    return f"{order}: paid, delivered"


@detector(
    fires_on=[
        Example(call=call("refund", order="A-1", amount=NEVER + 1)),
        Example(call=call("refund", order="A-1", amount=10_000)),
    ],
    silent_on=[
        Example(call=call("refund", order="A-1", amount=NEVER)),
        Example(call=call("look_up", order="A-1")),
        Example(reply="You will have your money tomorrow."),
    ],
)
def too_much(run: RunState) -> Failure | None:
    """A reply wants to give back more than anybody may."""
    wanted = [c.call.arguments.get("amount", 0) for c in run.batch if c.call.name == "refund"]
    if not any(isinstance(amount, int) and amount > NEVER for amount in wanted):
        return None
    return Failure(
        kind=FailureKind.policy_violation,
        explanation=f"no refund may be more than {NEVER}",
        suggested_action=Action.handoff,
    )


GRAPH: Graph = replace(LOOP.with_detector("post_llm", too_much, before="tool_calls"), name="refunds")
"""The table that was reviewed: the detector is asked before any call is dispatched."""

HURRIED: Graph = replace(LOOP.with_detector("post_llm", too_much), name="refunds")
"""The same, after a hurried change: one word is gone, and so the row stands behind ``tool_calls``. This is the
planted bug. The graph is valid, has every edge that it had, and pays whatever it is asked to."""


def support(model: str | Model, graph: Graph = GRAPH) -> Agent:
    """The agent."""
    return Agent(model, tools=[refund, look_up], instructions="You help customers.", graph=graph)
