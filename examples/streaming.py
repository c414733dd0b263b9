"""Streaming: a reply in a terminal as it arrives.

Shows: the deltas of text, reasoning and tool calls, and what happens when a reply breaks off halfway.

    export OPENAI_API_KEY=...
    python streaming.py "Write a haiku about Paris, and look at the clock first."
    python streaming.py -m ollama:llama3.2 "..."

Any model works: the built-in providers stream; a model without streaming returns its reply in one piece.
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
    TextDelta,
    ToolCallDelta,
    ToolFinished,
)

GREY, PLAIN = "\033[90m", "\033[0m"


def clock() -> str:
    """The time of day, in UTC."""
    return f"{datetime.now(UTC):%H:%M}"


async def main(model: str, prompt: str) -> int:
    """Run, and print deltas as they arrive."""
    run = Agent(model, tools=[clock]).run(prompt)
    async for event in run:
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
                print(f"\n{GREY}(another model starts over: {why}){PLAIN}")
            case RecoveryStarted(failure=failure):
                print(f"\n{GREY}(again: {failure.explanation}){PLAIN}")  # the deltas of this reply are void
            case _:
                pass
    return 0 if run.result.ok else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show a reply as it arrives.")
    parser.add_argument("prompt")
    parser.add_argument("-m", "--model", default="openai:gpt-5-mini")
    args = parser.parse_args()
    raise SystemExit(asyncio.run(main(args.model, args.prompt)))
