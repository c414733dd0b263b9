"""A process that answers the runs of a store, while another one answers them, too.

    python -m tests.helpers.rival_answers STORE PAID

Each line of its input says what it does, as JSON. Before it writes, it prints "checked" and waits for a line, so that
others can write first. Then it prints what came of it: "done", or the name of the error that refused it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agentfsm import Actor, Agent, Allow, Approval, Deny, Edit, Host, Runs, ToolContext, open_store, tool
from agentfsm.errors import AgentfsmError
from agentfsm.journal.store import Store
from agentfsm.testing import ScriptedModel

SECRET = b"of the host, 32 bytes at the least"
REPLIES: dict[str, Any] = {"allow": Allow(), "deny": Deny("no"), "edit": Edit({"amount": 500, "people": 1})}


def people_asked(arguments: dict[str, Any]) -> Approval:
    """As many managers as the call says, other than who requested it."""
    return Approval(n=arguments["people"], roles=("manager",), not_requester=True)


def payer(store: Store, paid: Path, *script: Any) -> Agent:
    """The agent of all processes: it writes what it pays into a file."""

    @tool(requires_approval=people_asked)
    def pay(context: ToolContext, amount: int, people: int) -> str:
        """Pay."""
        with paid.open("a") as file:
            file.write(f"{context.run_id} {amount}\n")
        return "paid"

    return Agent(ScriptedModel(list(script)), tools=[pay], host=Host(store=store, secret=SECRET))


class Rival:
    """Who answers, one command after the other."""

    def __init__(self, store: Store, paid: Path) -> None:
        self.store, self.paid = store, paid
        self.waits = False
        for owner, name in ((type(store.signals), "send"), (type(store), "acquire")):
            setattr(owner, name, self._pausing(getattr(owner, name)))

    def _pausing(self, write: Any) -> Any:
        async def paused(*args: Any, **more: Any) -> Any:
            if self.waits:
                self.waits = False
                print("checked", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
            return await write(*args, **more)

        return paused

    async def do(self, what: str, run: str, reply: str = "", by: str = "", to: str | None = None) -> None:
        """Carry out one command."""
        self.waits, actor = True, Actor(by, ("manager",)) if by else None
        match what:
            case "send":
                await Runs(self.store, secret=SECRET).answer(run, REPLIES[reply], by=actor, to=to)
            case "cancel":
                await Runs(self.store, secret=SECRET).cancel(run, "no", by=actor)
            case "resume":
                await payer(self.store, self.paid, "Done.").resume(run, REPLIES[reply], by=actor, to=to)
            case _:
                for each in await payer(self.store, self.paid, "Done.").unfinished_runs():
                    await each

    async def live(self) -> None:
        """Carry out what is read, to the end of the input."""
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                await self.do(**json.loads(line))
            except AgentfsmError as error:
                print(type(error).__name__, flush=True)
            else:
                print("done", flush=True)


async def main(url: str, paid: str) -> None:
    async with open_store(url) as store:
        await Rival(store, Path(paid)).live()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
