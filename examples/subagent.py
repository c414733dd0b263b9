"""A sub-agent: an agent calls another one as a tool, and both wait for approval of a call of the other one.

Shows: as_tool, a suspension that a sub-agent causes, resuming both with one reply, usage that adds up.

The models are scripted, so no API key is needed.
"""

import asyncio

from agentfsm import Agent, Allow, Message, Reply, RunResult, Usage, UserInputRequested, tool
from agentfsm.testing import ScriptedModel, call


@tool(requires_approval=True)
def book(flight: str) -> str:
    """Book a flight."""
    return f"booked {flight}"


def reply(text: str) -> Reply:
    return Reply(Message.assistant(text), usage=Usage(input_tokens=20, output_tokens=5))


traveller = Agent(ScriptedModel([call("book", flight="LH 802"), reply("LH 802 it is.")]), tools=[book])
assistant = Agent(
    ScriptedModel([call("travel", task="A flight to Stockholm"), reply("You fly with LH 802.")]),
    tools=[traveller.as_tool("travel", "Books travel.")],
)


async def main() -> RunResult:
    result = await assistant.run("I must be in Stockholm tomorrow.")
    if isinstance(request := result.outcome, UserInputRequested):
        print(f"{request.asker} asks: {request.question} {request.arguments}")
        result = await assistant.resume(request.suspension_record, Allow())
    return result


result = asyncio.run(main())
print(result.output)
print("Output tokens of both agents:", result.usage.output_tokens)
