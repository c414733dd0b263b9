"""Limits on what the runs with a tag may cost in 24 hours before workers start no more of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import fsum

from agentfsm.errors import ConfigurationError
from agentfsm.journal.listing import iterate_runs
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.store import Store
from agentfsm.loop.messages import round_usd

DAY_S = 86_400.0

KNOWN_FOR_S = 5.0
"""Seconds for which a sum is used again."""


@dataclass(frozen=True, slots=True)
class SpendLimit:
    """What the runs with a tag may cost in 24 hours.

    Attributes:
        tag: The tag. One that ends with ``*`` stands for each tag that begins so, with a limit of its own.
        usd: The limit, in USD.

    Raises:
        ConfigurationError: The tag is blank, or the limit is not greater than 0.
    """

    tag: str
    usd: float

    def __post_init__(self) -> None:
        if not self.tag.strip() or not 0 < self.usd < float("inf"):
            raise ConfigurationError(f"a spend limit must have a tag and more than 0 USD, not {self}")

    def applies_to(self, tag: str) -> bool:
        """Whether a tag has this limit."""
        return tag.startswith(self.tag[:-1]) if self.tag.endswith("*") else tag == self.tag


class SpendLimits:
    """The limits of a worker, and what was spent lately."""

    def __init__(self, limits: Sequence[SpendLimit], store: Store, now: Callable[[], float] = time.time) -> None:
        self._limits = tuple(limits)
        self._store = store
        self._now = now
        self._known: dict[str, tuple[float, float]] = {}

    async def reached(self, tags: Iterable[str]) -> str:
        """Which limit the runs with some tags have reached, as a sentence; empty if none.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        for tag in tags:
            limits = [limit.usd for limit in self._limits if limit.applies_to(tag)]
            if limits and (spent := await self._spent(tag)) >= min(limits):
                return f"runs with the tag {tag} cost {spent:.2f} USD in 24 hours, and the limit is {min(limits):g} USD"
        return ""

    async def _spent(self, tag: str) -> float:
        now = self._now()
        at, spent = self._known.get(tag, (float("-inf"), 0.0))
        if not 0 <= now - at < KNOWN_FOR_S:
            # a sub-agent's run has the tags of its caller, whose cost includes it
            query = RunQuery(tag=tag, since=now - DAY_S, parent="", limit=500)
            costs = [info.cost_usd or 0.0 async for info in iterate_runs(self._store, query)]
            spent = round_usd(fsum(costs))
            self._known[tag] = (now, spent)
        return spent
