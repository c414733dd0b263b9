"""The app under review: a support agent that may refund money, and its policy.

Two rules protect the money. A refund above 100 needs approval: the tool declares that. A reply that asks for a refund
of more than 500 is not dispatched at all, but handed off to a human: that is a detector, and its row in the table is
what a reviewer reviews.
"""

from __future__ import annotations

from dataclasses import replace

from agentfsm import LOOP, Action, Agent, Example, Failure, FailureKind, Graph, Model, RunState, detector, tool
from agentfsm.testing import call

APPROVAL_ABOVE = 100
MAX_REFUND = 500


@tool(requires_approval=lambda arguments: arguments["amount"] > APPROVAL_ABOVE)
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
        Example(call=call("refund", order="A-1", amount=MAX_REFUND + 1)),
        Example(call=call("refund", order="A-1", amount=10_000)),
    ],
    silent_on=[
        Example(call=call("refund", order="A-1", amount=MAX_REFUND)),
        Example(call=call("look_up", order="A-1")),
        Example(reply="You will have your money tomorrow."),
    ],
)
def too_much(run: RunState) -> Failure | None:
    """A reply asks for a refund above the maximum."""
    amounts = [c.call.arguments.get("amount", 0) for c in run.batch if c.call.name == "refund"]
    if not any(isinstance(amount, int) and amount > MAX_REFUND for amount in amounts):
        return None
    return Failure(
        kind=FailureKind.policy_violation,
        explanation=f"no refund may be more than {MAX_REFUND}",
        suggested_action=Action.handoff,
    )


GRAPH: Graph = replace(LOOP.with_detector("post_llm", too_much, before="tool_calls"), name="refunds")
"""The reviewed table: the detector is evaluated before any call is dispatched."""

HURRIED: Graph = replace(LOOP.with_detector("post_llm", too_much), name="refunds")
"""The same table after a careless change: without ``before="tool_calls"``, the row comes after ``tool_calls``. This is
a deliberate bug. The graph is valid and has all its edges, but it pays whatever the model asks for."""


def support(model: str | Model, graph: Graph = GRAPH) -> Agent:
    """The agent."""
    return Agent(model, tools=[refund, look_up], instructions="You help customers.", graph=graph)
