"""Human in the loop: a tool call waits for approval, and another process resumes the run.

Shows: requires_approval, the suspension record, resuming from it in another process, and that it works only once.

    python approval.py             runs until the call needs approval, and writes a record to waiting.json
    python approval.py allow       resumes the run; "deny" denies the call, and the model gets the reason

Both processes need the same secret, here from the environment variable AGENTFSM_SECRET.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfsm import (
    Agent,
    Allow,
    Deny,
    FileReplayGuard,
    Host,
    Message,
    RunResult,
    SuspensionRecordError,
    UserInputRequested,
    tool,
)
from agentfsm.testing import ScriptedModel, call

RECORD = Path("waiting.json")
SECRET = os.environ.get("AGENTFSM_SECRET", "for this example only")


@tool(requires_approval=True)
def delete_account(user: str) -> str:
    """Delete a user's account."""
    return f"the account of {user} was deleted"


def report(messages: Sequence[Message]) -> str:
    """What a model would answer with the tool's result."""
    return f"Result: {messages[-1].content}"


def agent() -> Agent:
    """The agent. To resume a run, make one with the same graph and the same tools."""
    delete = call("delete_account", user="ann")
    script: list[Any] = [report] if RECORD.exists() else [delete, report]
    host = Host(secret=SECRET.encode(), replay_guard=FileReplayGuard("used-records"))
    return Agent(ScriptedModel(script), tools=[delete_account], host=host)


def start() -> None:
    """Run until approval is needed."""
    outcome = agent().run_sync("Ann wants her account deleted.").outcome
    if isinstance(outcome, UserInputRequested):
        RECORD.write_text(outcome.suspension_record.to_json())
        print(f"{outcome.question} {outcome.tool} {dict(outcome.arguments)}")
        print(f"The run is suspended in {RECORD}.")


async def resume(record: str, reply: Allow | Deny) -> RunResult:
    """Resume the run with a human's reply."""
    return await agent().resume(record, reply)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        start()
    else:
        try:
            reply = Allow() if sys.argv[1] == "allow" else Deny("she changed her mind")
            print(asyncio.run(resume(RECORD.read_text(), reply)).output)
        except SuspensionRecordError as error:
            sys.exit(f"This cannot be resumed: {error}")
