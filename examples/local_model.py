"""A local model, through Ollama, with a tool and live events.

Shows: a real model by its name, iterating a run, and what happens if no server answers.

    ollama pull llama3.2
    python local_model.py "How much room is left on this disk?"

OLLAMA_HOST sets another address. Any model that supports tool calls works.
"""

import asyncio
import shutil
import sys

from agentfsm import Agent, AgentGuardrails, Handoff, ModelReplied, RecoveryStarted, RunCompleted, ToolFinished


def disk_space(path: str = "/") -> dict[str, int]:
    """The size and the free space of the disk that holds a path, in gigabytes.

    Args:
        path: Any file or folder on the disk.
    """
    usage = shutil.disk_usage(path)
    return {"size": usage.total // 10**9, "free": usage.free // 10**9}


async def main(prompt: str) -> int:
    """Run, and print what happens."""
    limits = AgentGuardrails(max_iterations=8, on_limit="stop")
    agent = Agent("ollama:llama3.2", tools=[disk_space], guardrails=limits)
    async for event in agent.run(prompt):
        match event:
            case ModelReplied(message=message):
                for call in message.tool_calls:
                    print(f"calls {call.name}({dict(call.arguments)})")
            case ToolFinished(result=result):
                print(f"  returned {result.content}")
            case RecoveryStarted(failure=failure, action=action):
                print(f"  {action}: {failure.explanation}")
            case RunCompleted(output=output):
                print(output)
                return 0
            case Handoff(rationale=rationale):
                print(f"handed off: {rationale}")
            case _:
                pass
    return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(" ".join(sys.argv[1:]) or "How much room is left on this disk?")))
