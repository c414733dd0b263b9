"""A model on this machine, through Ollama, with a tool and the events as they come.

Shows: a real model by its name, iterating a run, and what happens where no server answers.

    ollama pull llama3.2
    python local_model.py "How much room is left on this disk?"

OLLAMA_HOST names another address; any model that can call tools will do.
"""

import asyncio
import shutil
import sys

from agentfsm import Agent, AgentGuardrails, Handoff, ModelReplied, RecoveryStarted, RunCompleted, ToolFinished


def disk_space(path: str = "/") -> dict[str, int]:
    """The size of the disk that holds a path, and what is free of it, in gigabytes.

    Args:
        path: Any file or folder on it.
    """
    usage = shutil.disk_usage(path)
    return {"size": usage.total // 10**9, "free": usage.free // 10**9}


async def main(prompt: str) -> int:
    """Run, and say what happens."""
    limits = AgentGuardrails(max_iterations=8, on_limit="stop")
    agent = Agent("ollama:llama3.2", tools=[disk_space], guardrails=limits)
    async for event in agent.run(prompt):
        match event:
            case ModelReplied(message=message):
                for call in message.tool_calls:
                    print(f"calls {call.name}({dict(call.arguments)})")
            case ToolFinished(result=result):
                print(f"  gives {result.content}")
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
