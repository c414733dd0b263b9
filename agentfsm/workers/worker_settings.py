"""``WorkerSettings``: how a worker works, and the limits on what the runs with a tag may cost a day."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum

from agentfsm.errors import ConfigurationError
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.store import Store
from agentfsm.loop.messages import round_usd
from agentfsm.workers.notices import Notify


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker works.

    Attributes:
        sweep_s: Seconds between two searches of the store for runs that were cut off.
        settle_s: Seconds after which an activation that was delivered, and whose run nobody has acquired, counts as
            lost with its worker.
        max_attempts: How often a run is tried without progress before it is set aside.
        grace_s: Seconds for which effects that have begun may go on when the worker is to stop.
        forget_s: Seconds after which an activation that was handled is deleted from the engine's tables.
        spend_limits: What the runs with a tag may cost a day before no more of them are started.
        notify: Sends a notice of each request that a run of the store waits for, such as a ``Webhook``; None for no
            notices.
        remind_after_s: Seconds after which people are reminded of a request, again and again, unless its ``Approval``
            says another time; None for no reminders.
        viewer_url: Where the viewer is, for a link in each notice; empty for no link.

    Raises:
        ConfigurationError: A number is too small, or something about notices is given without ``notify``.
    """

    sweep_s: float = 0.25
    settle_s: float = 2.0
    max_attempts: int = 5
    grace_s: float = 30.0
    forget_s: float = 3600.0
    spend_limits: tuple[SpendLimit, ...] = ()
    notify: Notify | None = None
    remind_after_s: float | None = None
    viewer_url: str = ""

    def __post_init__(self) -> None:
        if not (self.sweep_s > 0 and self.settle_s > 0 and self.max_attempts >= 1):
            raise ConfigurationError("sweep_s and settle_s must be greater than 0, and max_attempts at least 1")
        if not (self.grace_s >= 0 and self.forget_s >= 0):
            raise ConfigurationError("grace_s and forget_s must not be negative")
        if self.notify is None and (self.remind_after_s is not None or self.viewer_url):
            raise ConfigurationError("remind_after_s and viewer_url are for notices: say with notify= where they go")


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
            costs, query = list[float](), RunQuery(tag=tag, since=now - DAY_S, parent="", limit=500)
            while True:
                page = await self._store.find_runs(query)
                costs += [info.cost_usd or 0.0 for info in page.runs]
                if not page.next:
                    break
                query = replace(query, after=page.next)
            spent = round_usd(fsum(costs))
            self._known[tag] = (now, spent)
        return spent
