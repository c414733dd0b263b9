"""Anthropic with OpenAI as the fallback, with rate, concurrency and cost limits.

Shows: FallbackModel, Limited with limits that all runs share, Priced with a price table, ModelSettings.

    export ANTHROPIC_API_KEY=... OPENAI_API_KEY=...
    python hosted_models.py Paris Rome Oslo

Prices are in USD per million tokens; look up the current ones before you rely on a cost limit.
"""

import asyncio
import sys

from agentfsm import Agent, AgentGuardrails
from agentfsm.models import ConcurrencyLimit, FallbackModel, Limited, ModelSettings, Price, Priced, RateLimit, resolve

SETTINGS = ModelSettings(max_tokens=300)
PRICES = {
    "anthropic:claude-sonnet-4-6": Price(input=3.00, cached=0.30, written=3.75, output=15.00),
    "openai:gpt-5-mini": Price(input=0.25, cached=0.025, output=2.00),
}


async def main(towns: list[str]) -> None:
    """Ask about all towns at the same time."""
    fallback = FallbackModel(
        resolve("anthropic:claude-sonnet-4-6", settings=SETTINGS), resolve("openai:gpt-5-mini", settings=SETTINGS)
    )
    model = Limited(Priced(fallback, PRICES), RateLimit(calls=50, tokens=100_000), ConcurrencyLimit(2))
    agent = Agent(model, instructions="Answer in one sentence.", guardrails=AgentGuardrails(max_cost_usd=0.10))
    results = await asyncio.gather(*(agent.run(f"What is {town} known for?") for town in towns))
    for town, result in zip(towns, results, strict=True):
        usage = result.usage
        print(f"{town}: {result.output if result.ok else result.outcome}")
        print(f"  {usage.input_tokens} + {usage.output_tokens} tokens, {usage.cost_usd:.6f} USD")
    await model.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["Paris"]))
