"""A help desk whose dependencies and answers are typed: mypy and pyright find each misspelt field.

Shows: deps_type and output_type, tools, instructions, a hook, an approval and an output validator that read the
dependencies, a sub-agent with the same dependencies, the tools of an MCP server, a session, tags and metadata, a run
that is resumed with its dependencies.

Needs the extra ``mcp``, and the package ``mcp-server-time``. The models are scripted, so no API key is needed.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from agentfsm import (
    AbortRun,
    Actor,
    Agent,
    Allow,
    Approval,
    HookContext,
    Host,
    MemoryStore,
    Run,
    RunContext,
    RunResult,
    Session,
    ToolContext,
    ToolError,
    UserInputRequested,
    hook,
    tool,
)
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call

# -- what the app works with --------------------------------------------------------------------------


class Order(BaseModel):
    """An order of a customer's."""

    number: str
    customer: str
    total_usd: float


class Resolution(BaseModel):
    """The answer of the help desk."""

    order_number: str
    refunded_usd: float = Field(ge=0)
    message: str


@dataclass
class Shop:
    """The shop's database."""

    orders: dict[str, Order]
    refunds: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def find(self, number: str) -> Order | None:
        """The order with a number, or None."""
        return self.orders.get(number)


@dataclass(frozen=True)
class Desk:
    """What each run depends on: the shop, and the limit of the clerk who asks."""

    shop: Shop
    clerk_limit_usd: float
    is_open: bool = True


# -- tools, approvals and hooks -----------------------------------------------------------------------


@tool(idempotent=True)
def look_up(context: ToolContext[Desk], order_number: str) -> Order:
    """Look up an order by its number."""
    order = context.deps.shop.find(order_number)
    if order is None:
        raise ToolError(f"there is no order {order_number}")
    return order


def over_the_limit(arguments: dict[str, Any], context: HookContext[Desk]) -> bool | Approval:
    """Above the clerk's limit, a manager must approve a refund."""
    return Approval(roles=("manager",)) if arguments["usd"] > context.deps.clerk_limit_usd else False


@tool(requires_approval=over_the_limit)
async def refund(context: ToolContext[Desk], order_number: str, usd: float) -> str:
    """Pay money back on an order."""
    context.deps.shop.refunds.append((order_number, usd))
    return f"refunded {usd:.2f} USD on {order_number} for {context.metadata['tenant']}"


@hook("pre_step", fail_open=False)
def only_while_open(context: HookContext[Desk]) -> AbortRun | None:
    """End the run if the desk is closed."""
    return None if context.deps.is_open else AbortRun("the desk is closed")


def greet(context: RunContext[Desk]) -> str:
    """The system prompt of a run."""
    return f"You are the help desk of a shop. You may refund {context.deps.clerk_limit_usd} USD without a manager."


def refund_was_paid(context: RunContext[Desk], resolution: Resolution) -> None:
    """Refuse an answer that promises what was not paid."""
    if (resolution.order_number, resolution.refunded_usd) not in context.deps.shop.refunds:
        raise ValueError(f"nothing was refunded on {resolution.order_number}: call refund first")


# -- the agents ---------------------------------------------------------------------------------------

rules = Agent(ScriptedModel(["Up to 30 days, in full."]), instructions="You know the rules of returns.", deps_type=Desk)


def clerk_with(clock: MCPTools) -> Agent[Desk, Resolution]:
    """The clerk, who can also use the tools of a server."""
    return Agent(
        ScriptedModel(
            [
                call("look_up", order_number="A-1"),
                call("time_get_current_time", timezone="UTC"),
                call("rules", task="May a lamp be returned after 10 days?"),
                call("refund", order_number="A-1", usd=80),
                '{"order_number": "A-1", "refunded_usd": 80, "message": "You get 80 USD back."}',
                '{"order_number": "A-1", "refunded_usd": 80, "message": "You will have it in three days."}',
            ]
        ),
        tools=[look_up, refund, rules.as_tool("rules", "Knows the rules of returns."), *clock],
        hooks=[only_while_open],
        instructions=greet,
        deps_type=Desk,
        output_type=Resolution,
        output_validators=[refund_was_paid],
        host=Host(store=MemoryStore()),
    )


def report(result: RunResult[Resolution]) -> str:
    """What the desk tells the customer."""
    resolution = result.output
    return f"{resolution.message} ({resolution.order_number}: {resolution.refunded_usd:.2f} USD)"


async def complain(session: Session[Desk, Resolution], desk: Desk) -> RunResult[Resolution]:
    """Handle one complaint, with the manager's approval if it is needed."""
    run: Run[Desk, Resolution] = session.run(
        "The lamp of order A-1 is broken.", deps=desk, actor="sam", tags=["returns"], metadata={"tenant": "acme"}
    )
    print("The limit of this run:", run.deps.clerk_limit_usd)
    result = await run
    if isinstance(request := result.outcome, UserInputRequested):
        print(request.question, request.arguments)
        manager = Actor("mia", roles=("manager",))
        result = await session.resume(Allow(), to=request.digest, by=manager, deps=desk)
    return result


async def main(shop: Shop) -> None:
    """Handle a complaint, and a question about it."""
    desk = Desk(shop, clerk_limit_usd=50)
    settings = MCPSettings(prefix="time_", only=("get_current_time",))
    async with MCPTools.stdio(sys.executable, ["-m", "mcp_server_time"], settings=settings) as clock:
        session = clerk_with(clock).session("kim-1")
        print(report(await complain(session, desk)))
        print(report(await session.run("When do I get it?", deps=desk)))


if __name__ == "__main__":
    shop = Shop({"A-1": Order(number="A-1", customer="kim", total_usd=80)})
    asyncio.run(main(shop))
    print("Refunds:", shop.refunds)
