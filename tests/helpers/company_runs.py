"""The runs of a company that pays its invoices with an agent: what the pictures of the viewer and of reports show.

``crash`` runs ``python -m tests.helpers.company_runs FILE RUN``, because the process ends in the middle of a call.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfsm import (
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Deny,
    Host,
    Message,
    Reply,
    Runs,
    SqliteStore,
    ToolContext,
    ToolError,
    TransientProviderError,
    tool,
)
from agentfsm.journal.redact import redact
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import ToolCall, Usage
from agentfsm.testing import FakeClock
from tests.helpers.child_process import child_environment

__all__ = ["SECRET", "accountant", "crash", "fill", "says"]

SECRET = b"of the tests"
BEGINNING = 1_791_190_800.0  # 2026-10-05 09:00:00 UTC
ANN, BOB, CY = Actor("ann"), Actor("bob", ("manager",)), Actor("cy", ("manager",))


@tool(requires_approval=Approval(n=2, roles=("manager",), not_requester=True))
def pay(to: str, amount: int, invoice: str) -> str:
    """Pay an invoice.

    Args:
        to: Who is paid.
        amount: EUR.
        invoice: The number of the invoice.
    """
    return f"paid {amount} EUR to {to} for invoice {invoice}"


@tool(requires_approval=True)
def refund(customer: str, amount: int, express: bool = False, note: str = "") -> str:
    """Pay money back to a customer.

    Args:
        customer: Who gets it.
        amount: EUR.
        express: On the same day.
        note: What the customer reads.
    """
    return f"refunded {amount} EUR to {customer}"


@tool(idempotent=True, retryable=True)
def find_invoice(number: str) -> str:
    """Find an invoice by its number."""
    if not number.isdigit():
        raise ToolError(f"{number} is not a number of an invoice")
    return f"invoice {number}: Miller Ltd., 1,840 EUR, due on 2026-10-09"


@tool(asks=True)
async def choose_account(ctx: ToolContext, customer: str) -> str:
    """Ask a person which account of a customer is meant."""
    return await ctx.ask(
        f"Which account of {customer} is meant?", context="Two accounts are open.", choices=("EUR", "USD")
    )


@tool
def transfer(iban: str, amount: int) -> str:
    """Transfer money; the bank does not say whether it has."""
    os._exit(1)


TOOLS = (pay, refund, find_invoice, choose_account, transfer)


def says(text: str = "", *calls: tuple[str, dict[str, Any]], tokens: int = 900) -> Reply:
    """A reply of the model with its price."""
    made = tuple(ToolCall(f"call-{n}-{name}", name, arguments) for n, (name, arguments) in enumerate(calls))
    usage = Usage(tokens, 40 + len(text) // 4, cost_usd=round(tokens * 3e-6 + 0.0009, 6))
    return Reply(Message.assistant(text, made), usage=usage, model="model-large-2026-09")


class TimedModel:
    """Plays replies, each of which takes some seconds.

    Args:
        clock: The clock that goes on.
        script: The replies.
    """

    name = "model-large-2026-09"

    def __init__(self, clock: FakeClock, script: Sequence[Reply | BaseException]) -> None:
        self._clock, self._script = clock, iter(script)

    async def reply(self, request: Any) -> Reply:
        """The next reply.

        Raises:
            BaseException: The script has an error here.
        """
        self._clock.advance(1.7)
        found = next(self._script)
        if isinstance(found, BaseException):
            raise found
        return found


def accountant(
    store: Any, *script: Reply | BaseException, clock: FakeClock | None = None, tools: Sequence[Any] = (), **more: Any
) -> Agent[Any, Any]:
    """The agent of the company, as a process has it.

    Args:
        store: The store of its runs.
        script: What its model says.
        clock: Its clock.
        tools: Tools that it has besides.
        more: Other arguments of ``Agent``.
    """
    clock = clock or FakeClock(BEGINNING)
    host = Host(store=store, secret=SECRET, clock=clock)
    instructions = "You pay the invoices of the company. Check each of them first."
    model = TimedModel(clock, script)
    return Agent(model, tools=[*TOOLS, *tools], instructions=instructions, host=host, **more)


PAYMENT = ("pay", {"to": "Miller Ltd.", "amount": 1840, "invoice": "2231"})
REFUND = ("refund", {"customer": "Ana Souza", "amount": 75, "note": "We are sorry for the delay."})


async def _fill(store: SqliteStore) -> None:
    clock = FakeClock(BEGINNING)

    def agent(*script: Reply | BaseException, **more: Any) -> Agent[Any, Any]:
        return accountant(store, *script, clock=clock, **more)

    async def asked(text: str, run_id: str, *script: Reply | BaseException, **more: Any) -> None:
        clock.advance(9 * 3600 + 420)
        actor, tags = more.pop("actor", ANN), more.pop("tags", ())
        await agent(*script, **more).run(text, run_id=run_id, actor=actor, tags=tags)

    async def decided(run_id: str, answer: Any, by: Actor, *script: Reply | BaseException, **more: Any) -> None:
        clock.advance(190)
        await agent(*script, **more).resume(run_id, answer, by=by)

    reader = agent(says("It is genuine: the number, the sum and the account match the order."))
    check = reader.as_tool("check_invoice", "Checks an invoice against the order.")
    await asked(
        "Pay invoice 2231 of Miller Ltd.",
        "invoice-2231",
        says("", ("find_invoice", {"number": "no. 2231"})),
        says("", ("find_invoice", {"number": "2231"}), tokens=1100),
        TransientProviderError("overloaded, try again later", retry_after_s=2.0),
        says("", ("check_invoice", {"task": "Is invoice 2231 of Miller Ltd. over 1,840 EUR genuine?"}), tokens=1300),
        says("", PAYMENT, tokens=1500),
        tools=[check],
        tags=["invoices", "october"],
    )
    await decided("invoice-2231", Allow(), BOB, tools=[check])
    await decided(
        "invoice-2231", Allow(), CY, says("Invoice 2231 is paid: 1,840 EUR to Miller Ltd.", tokens=1700), tools=[check]
    )
    await asked("Refund 75 EUR to Ana Souza: her order came late.", "refund-118", says("", REFUND), tags=["refunds"])
    await decided("refund-118", Deny("she has had her money back already"), BOB, says("No refund: Ana has it already."))
    await asked(
        "Was invoice 2218 paid?", "question-2218", says("", ("find_invoice", {"number": "2218"})), says("It is due.")
    )
    await asked(
        "Pay whatever is due.", "loops", *(says("", ("find_invoice", {"number": "2231"})) for _ in range(9)),
        says("I give up.", tokens=4200), guardrails=AgentGuardrails(max_iterations=4), tags=["night"],
    )  # fmt: skip
    await Runs(store, secret=SECRET).cancel("loops", "it does the same again and again", by=BOB)
    await (await agent().next_run("loops"))  # type: ignore[misc]
    await asked(
        "Übersicht über alle offenen Rechnungen — قائمة الفواتير غير المدفوعة, for every subsidiary, in "
        "the order of their due dates, with the names of those who may approve them and of those who have done so",
        "overview-of-2026-10-for-the-subsidiaries-in-Germany-Japan-and-Egypt-7f3a9c",
        says("Nothing is due this week."), tags=["overview"], actor=Actor("accounts-payable@subsidiaries.example.org"),
    )  # fmt: skip
    await asked("Send the payslip of Jo Doe.", "payslip", says("It is sent."), actor=Actor("hr"))
    await redact(store, "payslip", "1.messages", Keyring(SECRET), by="privacy officer")
    await asked("Close the account of Carl Ray.", "account-ray", says("", ("choose_account", {"customer": "Carl Ray"})))
    await asked("Refund 75 EUR to Ana Souza.", "refund-121", says("", REFUND), tags=["refunds"])
    await asked(
        "Pay invoice 2240 of Miller Ltd.", "invoice-2240", says("", (PAYMENT[0], {**PAYMENT[1], "invoice": "2240"}))
    )
    await decided("invoice-2240", Allow(), BOB)


def fill(file: Path) -> None:
    """Make a store with the runs of the company: some ended, four wait for a person."""
    with SqliteStore(file, synchronous="normal") as store:
        asyncio.run(_fill(store))
    crash(file)


def crash(file: Path, run_id: str = "transfer") -> None:
    """Add a run to a store of whose last call nobody knows whether it ran, so that it waits for a person."""
    command = [sys.executable, "-m", "tests.helpers.company_runs", str(file), run_id]
    ended = subprocess.run(command, env=child_environment(), cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == 1, "the process was to end in the middle of the call"

    async def ask(store: SqliteStore) -> None:
        (run,) = await accountant(store, clock=FakeClock(BEGINNING + 6 * 86_400)).unfinished_runs()
        await run

    with SqliteStore(file) as store:
        asyncio.run(ask(store))


def _crash(file: Path, run_id: str) -> None:
    with SqliteStore(file) as store:
        call = ("transfer", {"iban": "DE89 3704 0044 0532 0130 00", "amount": 1200})
        clock = FakeClock(BEGINNING + 5 * 86_400)
        accountant(store, says("", call), clock=clock).run_sync("Transfer 1,200 EUR.", run_id=run_id, actor=ANN)


if __name__ == "__main__":
    _crash(Path(sys.argv[1]), sys.argv[2])
