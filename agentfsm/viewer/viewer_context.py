"""What the pages of a viewer share: the store, who may do what, and the runs that are open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request

from agentfsm.errors import MissingExtraError, StoreError
from agentfsm.journal.checkpoint import SignedHeads
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Head, Store
from agentfsm.journal.tenant_store import TenantStore
from agentfsm.loop.keys import Keyring
from agentfsm.loop.quorum import Actor
from agentfsm.machine.graph import Graph
from agentfsm.runs import Runs, runs_on
from agentfsm.runtime.host import ReplayGuard
from agentfsm.viewer.access import Access, visitor_of
from agentfsm.viewer.agent_runner import AgentRunner
from agentfsm.viewer.followed_run import FollowedRuns
from agentfsm.viewer.run_figures import FiguresCache
from agentfsm.viewer.viewer_page import shown
from agentfsm.workers import SetAside, find_set_aside

logger = logging.getLogger("agentfsm.viewer")

POLL_S = 0.1
"""How often the store is asked what is new, in seconds; a run may be written by any process."""

KEPT_TENANTS = 200
"""For so many tenants, at most, what pages have read is kept."""

ALIVE_S = 15.0
"""After so long without news, a connection is checked."""

ASIDE_S = 5.0
"""How often the queues of the workers are asked about a run, at most, in seconds."""


class SetAsideRuns:
    """Which of the runs that pages show workers have set aside.

    The queues are asked only about runs that a worker should be working on.

    Args:
        queues: The store's URL or file, beside which the queues are; None if it has none.
        store: The store, with the runs that may be seen.
    """

    def __init__(self, queues: str | Path | None, store: Store) -> None:
        self._queues = queues
        self._store = store
        self._known: dict[str, tuple[float, SetAside | None]] = {}

    def on(self, store: Store) -> SetAsideRuns:
        """The same for a store with some of the runs; nothing that was read is shared."""
        return SetAsideRuns(self._queues, store)

    async def find(self, infos: Iterable[RunInfo]) -> Mapping[str, SetAside]:
        """Those of some runs that are set aside; none if the queues cannot be read, which is logged.

        Raises:
            agentfsm.errors.StoreError: The store cannot be read.
        """
        left = [each for each in infos if each.owner is None and each.status != "finished"]
        if self._queues is None or not left:
            return {}
        now = time.monotonic()
        self._known = {run_id: known for run_id, known in self._known.items() if known[0] > now - ASIDE_S}
        if asked := [each for each in left if each.run_id not in self._known]:
            found = await self._ask_queues(self._queues, await self._left_to_workers(asked))
            self._known |= {each.run_id: (now, found.get(each.run_id)) for each in asked}
        known = {each.run_id: self._known[each.run_id][1] for each in left if each.run_id in self._known}
        return {run_id: aside for run_id, aside in known.items() if aside is not None}

    async def _left_to_workers(self, infos: Sequence[RunInfo]) -> list[Head]:
        """The heads of the runs that are for a worker to begin, to continue or to end, and none does."""
        waiting = any(each.status == "suspended" for each in infos)
        sent = {each.run_id for each in await self._store.signals.pending()} if waiting else set[str]()
        heads: list[Head] = []
        for each in infos:
            head = await self._store.head(each.run_id)
            has_news = each.run_id in sent or (each.expires is not None and each.expires < time.time())
            if head is not None and head.is_left_to_workers(has_news=has_news):
                heads.append(head)
        return heads

    async def _ask_queues(self, queues: str | Path, heads: Sequence[Head]) -> Mapping[str, SetAside]:
        if not heads:
            return {}
        try:
            return await find_set_aside(queues, heads)
        except MissingExtraError:  # there may be no queues either
            self._queues = None
        except StoreError as error:
            logger.warning("it is not known which runs are set aside: %s", error)
        return {}


@dataclass(frozen=True)
class ViewerContext:
    """What every page has.

    Attributes:
        store: The store.
        runs: Its runs.
        access: Who may see and change what.
        followed: The runs that are open.
        runner: Goes on with the runs that are answered.
        claiming: Its runs, for people of whom the viewer does not know that they are who they say.
        replay_guard: Remembers which links were opened; None if links cannot be opened here.
        may_change: Whether runs can be answered and cancelled: that takes the secret of the host.
        host_keyring: The keys of the host that writes the store; None without its secret.
        checkpoint: What a signed checkpoint says the store had, if there is one.
        graphs: Graphs under which runs can be replayed, by name.
        set_aside: Which runs workers have set aside.
        figures: What the statistics have read.
        stopping: Set when the server stops, so that the connections of open pages end.
        for_tenants: What was made for people who may see the runs of some tenants only, the latest last.
    """

    store: Store
    runs: Runs
    access: Access
    followed: FollowedRuns
    runner: AgentRunner
    claiming: Runs
    set_aside: SetAsideRuns
    replay_guard: ReplayGuard | None = None
    may_change: bool = False
    host_keyring: Keyring | None = None
    checkpoint: SignedHeads | None = None
    graphs: Mapping[str, Graph] = field(default_factory=dict[str, Graph])
    figures: FiguresCache = field(default_factory=FiguresCache)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    for_tenants: OrderedDict[frozenset[str], ViewerContext] = field(
        default_factory=lambda: OrderedDict[frozenset[str], ViewerContext]()
    )

    def seen_by(self, tenants: frozenset[str] | None) -> ViewerContext:
        """What the pages have for somebody who may see the runs of some tenants only; None for all runs.

        Nothing that a page reads or remembers of the runs of one tenant is shared with another one.
        """
        if tenants is None:
            return self
        context = self.for_tenants.pop(tenants, None)
        if context is None:
            store = TenantStore(self.store, tenants)
            context = replace(
                self,
                store=store,
                runs=runs_on(self.runs, store),
                claiming=runs_on(self.claiming, store),
                followed=FollowedRuns(store),
                set_aside=self.set_aside.on(store),
                figures=FiguresCache(),
                checkpoint=None,  # it names the runs of all
            )
        self.for_tenants[tenants] = context
        while len(self.for_tenants) > KEPT_TENANTS:
            self.for_tenants.popitem(last=False)
        return context

    def runs_of(self, actor: Actor) -> Runs:
        """The runs, for what somebody writes: it is recorded whether the viewer vouches for them."""
        return self.runs if actor.verified else self.claiming


def context_of(request: Request) -> ViewerContext:
    """What the page of a request has: only what whoever sends it may see."""
    context: ViewerContext = request.app.state.viewer
    return context.seen_by(visitor_of(request).tenants)


async def ticks(context: ViewerContext, pause_s: float = POLL_S) -> AsyncIterator[bool]:
    """A moment to look for news, again and again; True if nothing may have been sent for long.

    A connection on which nothing is sent for long would not be noticed when it breaks.
    """
    silent_s = 0.0
    while not context.stopping.is_set():
        yield silent_s >= ALIVE_S
        silent_s = 0.0 if silent_s >= ALIVE_S else silent_s + pause_s
        await asyncio.sleep(pause_s)


def run_json(info: RunInfo, aside: SetAside | None = None) -> dict[str, Any]:
    """A run as the pages list it."""
    waiting = info.waiting_for
    return {
        "id": info.run_id,
        "status": info.status,
        "interrupted": info.status == "running" and info.owner is None,
        "owner": shown(info.owner or ""),
        "started": info.started,
        "updated": info.updated,
        "ending": shown(info.ending),
        "prompt": shown(info.prompt),
        "actor": shown(info.actor),
        "session": shown(info.session_id),
        "tags": shown(list(info.tags)),
        "metadata": [f"{shown(name)}={shown(value)}" for name, value in (info.metadata or {}).items()],
        "model": shown(info.model),
        "cost": info.cost_usd,
        "tokens": info.tokens,
        "waiting": None
        if waiting is None
        else {"kind": waiting.kind, "tool": shown(waiting.tool), "roles": shown(list(waiting.roles))},
        "expires": info.expires,
        "parent": shown(info.parent),
        "aside": None if aside is None else {"reason": shown(aside.reason), "until": aside.until},
    }
