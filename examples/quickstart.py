"""An agent with a tool, in ten lines. The model is scripted, so no API key and no network is needed.

Shows: tools from plain functions, the answer, and the transitions that led to it.
"""

from agentfsm import Agent
from agentfsm.testing import ScriptedModel, call


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ScriptedModel([call("add", a=20, b=22), "It is 42."])  # or "openai:gpt-5-mini", "ollama:llama3.2" ...
result = Agent(model, tools=[add]).run_sync("What is 20 + 22?")

print(result.output)
for decision in result.decisions:
    print(decision)
