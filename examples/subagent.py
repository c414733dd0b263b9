"""An agent that calls another one as a tool; the other one must be allowed something, so both wait for a person.

Shows: as_tool, a suspension that comes up from below, resuming both with one answer, usage that adds up.

The models are scripted ones, so this runs without a key.
"""

import asyncio

from agentfsm import Agent, Allow, RunResult, Usage, UserInputRequested, tool
from agentfsm.loop.messages import Message, Reply
from agentfsm.testing import ScriptedModel, call


@tool(requires_approval=True)
def book(flight: str) -> str:
    """Book a flight."""
    return f"booked {flight}"


def said(text: str) -> Reply:
    return Reply(Message.assistant(text), usage=Usage(input_tokens=20, output_tokens=5))


traveller = Agent(ScriptedModel([call("book", flight="LH 802"), said("LH 802 it is.")]), tools=[book])
assistant = Agent(
    ScriptedModel([call("travel", task="A flight to Stockholm"), said("You fly with LH 802.")]),
    tools=[traveller.as_tool("travel", "Books journeys.")],
)


async def main() -> RunResult:
    result = await assistant.run("I must be in Stockholm tomorrow.")
    if isinstance(asked := result.outcome, UserInputRequested):
        print(f"{asked.asker} asks: {asked.question} {asked.arguments}")
        result = await assistant.resume(asked.suspension_record, Allow())
    return result


done = asyncio.run(main())
print(done.output)
print("Tokens out, both agents together:", done.usage.output_tokens)
