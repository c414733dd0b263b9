"""Prices, from a table that you give: they change too often for a library to know them.

::

    PRICES = {"openai:gpt-5-mini": Price(input=0.25, cached=0.025, output=2.00), "ollama:*": Price()}
    agent = Agent(Priced("openai:gpt-5-mini", PRICES), guardrails=AgentGuardrails(max_cost_usd=0.50))
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from agentfsm.core.messages import Reply, Usage
from agentfsm.core.model import Model, ModelRequest
from agentfsm.core.streaming import Piece
from agentfsm.errors import ConfigurationError
from agentfsm.models.wrapping import InFront, admitted, pieces

__all__ = ["Price", "Priced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model costs, in USD for a million tokens.

    Attributes:
        input: Of the prompt.
        output: Of the reply, thinking included.
        cached: Of the prompt, read from the provider's cache; as ``input`` where None.
        written: Of the prompt, written to the provider's cache; as ``input`` where None.

    Raises:
        ConfigurationError: A price is below zero or no number.
    """

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None
    written: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached", "written"):
            value: float | None = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigurationError(f"the price of {name} tokens must be zero or more")

    def of(self, usage: Usage) -> float:
        """What this usage costs, in USD."""
        cached = self.input if self.cached is None else self.cached
        written = self.input if self.written is None else self.written
        rest = max(0, usage.input_tokens - usage.cached_tokens - usage.written_tokens)
        spent = rest * self.input + usage.cached_tokens * cached + usage.written_tokens * written
        return (spent + usage.output_tokens * self.output) / 1_000_000


class Priced(InFront):
    """A model whose replies say what they cost.

    A reply whose price the table does not know costs 0 and says so in ``usage.unpriced_tokens``; a run that has a
    ``max_cost_usd`` then warns that it cannot hold it. Where a provider itself says what a call cost, that stands.

    Args:
        model: The model or its name.
        prices: Prices by name: ``provider:model``, or a pattern of such names (``ollama:*``). An exact name
            comes first, then the longest pattern.
    """

    def __init__(self, model: str | Model, prices: Mapping[str, Price]) -> None:
        super().__init__(model)
        self._prices = dict(prices)

    @asynccontextmanager
    async def admission(self, request: ModelRequest) -> AsyncGenerator[Model, None]:
        """Wait where the model behind this one waits."""
        async with admitted(self.model, request) as inner:
            yield self if inner is self.model else Priced(inner, self._prices)

    async def reply(self, request: ModelRequest) -> Reply:
        """The model's reply, priced.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        return self._priced(await self.model.reply(request))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece | Reply, None]:
        """The same, piece by piece.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        async with aclosing(pieces(self.model, request)) as told:
            async for piece in told:
                yield self._priced(piece) if isinstance(piece, Reply) else piece

    def _priced(self, reply: Reply) -> Reply:
        usage = reply.usage
        if usage.cost_usd:
            return reply
        price = self._price_of(reply)
        if price is None:
            return replace(reply, usage=replace(usage, unpriced_tokens=usage.total_tokens))
        return replace(reply, usage=replace(usage, cost_usd=price.of(usage), unpriced_tokens=0))

    def _price_of(self, reply: Reply) -> Price | None:
        """By who answered (a fallback names it so), then by who was asked."""
        names = (reply.model, self.model.name)
        for name in names:
            if name in self._prices:
                return self._prices[name]
        for pattern in sorted(self._prices, key=len, reverse=True):
            if any(fnmatchcase(name, pattern) for name in names if name):
                return self._prices[pattern]
        return None
