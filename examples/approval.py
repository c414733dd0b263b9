"""A dangerous tool waits for a person, and the run goes on in another process.

Shows: requires_approval, the suspension record, resuming from it elsewhere, a record that is good only once.

    python approval.py             runs until the tool must wait, and leaves a record in waiting.json
    python approval.py allow       goes on from there; "deny" tells the model why it may not

Both processes must have the same secret; here it stands in the variable AGENTFSM_SECRET.
"""

import asyncio
import os
import sys
from pathlib import Path

from agentfsm import (
    Agent,
    Allow,
    Deny,
    FileReplayGuard,
    Host,
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
    return f"the account of {user} is gone"


def agent() -> Agent:
    """The agent; a resumed run needs one with the same graph and the same tools."""
    ask_first = call("delete_account", user="ann")
    report = lambda messages: f"Result: {messages[-1].content}"  # noqa: E731
    script = [report] if RECORD.exists() else [ask_first, report]
    host = Host(secret=SECRET.encode(), replay_guard=FileReplayGuard("used-records"))
    return Agent(ScriptedModel(script), tools=[delete_account], host=host)


def begin() -> None:
    """Run until a person is needed."""
    outcome = agent().run_sync("Ann wants to leave us.").outcome
    if isinstance(outcome, UserInputRequested):
        RECORD.write_text(outcome.suspension_record.to_json())
        print(f"{outcome.question} {outcome.tool} {dict(outcome.arguments)}")
        print(f"The run waits in {RECORD}.")


async def go_on(record: str, reply: Allow | Deny) -> RunResult:
    """Resume the run with a person's reply."""
    return await agent().resume(record, reply)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        begin()
    else:
        try:
            reply = Allow() if sys.argv[1] == "allow" else Deny("she changed her mind")
            print(asyncio.run(go_on(RECORD.read_text(), reply)).output)
        except SuspensionRecordError as error:
            sys.exit(f"This cannot be resumed: {error}")
