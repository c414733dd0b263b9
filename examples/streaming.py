"""A reply as it comes, letter by letter, in a terminal.

Shows: the deltas of text, of reasoning and of tool calls; what becomes of half a reply that breaks off.

    export OPENAI_API_KEY=...
    python streaming.py "Write a haiku about Paris, and look at the clock first."
    python streaming.py -m ollama:llama3.2 "..."

Any model will do: those behind HTTP stream, and others tell their whole reply at once.
"""

import argparse
import asyncio
from datetime import UTC, datetime

from agentfsm import (
    Agent,
    ModelReplied,
    ReasoningDelta,
    RecoveryStarted,
    ReplyRestarted,
    RunCompleted,
    TextDelta,
    ToolCallDelta,
    ToolFinished,
)

GREY, PLAIN = "\033[90m", "\033[0m"


def clock() -> str:
    """The time of day, in UTC."""
    return f"{datetime.now(UTC):%H:%M}"


async def main(model: str, prompt: str) -> int:
    """Run, and show what is said while it is said."""
    async for event in Agent(model, tools=[clock]).run(prompt):
        match event:
            case ReasoningDelta(text=text):
                print(f"{GREY}{text}{PLAIN}", end="", flush=True)
            case TextDelta(text=text):
                print(text, end="", flush=True)
            case ToolCallDelta(arguments=text):
                print(f"{GREY}{text}{PLAIN}", end="", flush=True)
            case ToolFinished(result=result):
                print(f" {GREY}[{result.name}] -> {result.content}{PLAIN}", flush=True)
            case ModelReplied(message=message) if message.content:
                print()
            case ReplyRestarted(reason=why):
                print(f"\n{GREY}(another model begins anew: {why}){PLAIN}")
            case RecoveryStarted(failure=failure):
                print(f"\n{GREY}(once more: {failure.explanation}){PLAIN}")  # what was shown of this reply is void
            case _:
                pass
    return 0 if isinstance(event, RunCompleted) else 1


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("prompt")
    words.add_argument("-m", "--model", default="openai:gpt-5-mini")
    given = words.parse_args()
    raise SystemExit(asyncio.run(main(given.model, given.prompt)))
