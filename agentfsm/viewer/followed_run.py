"""A stored run whose journal is read as it grows, whichever process writes it, and only as far as a page asks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentfsm.diagrams import LayoutName, RunPath, diagram
from agentfsm.diagrams.svg import style_sheet
from agentfsm.errors import UnknownRunError
from agentfsm.journal.records import SealedRecord, is_kind
from agentfsm.journal.store import Head, Store
from agentfsm.report.ledger import LedgerRow, RunLedger
from agentfsm.report.reported_run import graph_of_run
from agentfsm.viewer.run_figures import PathReader
from agentfsm.viewer.step_reader import SentPrompt, StepReader

CHUNK = 1_000
"""Records that are read in one go; in a thread, because a thousand of them take some 100 ms."""

SMALL = 50
"""So few records are read at once, without a thread."""


class FollowedRun:
    """A run, read as far as somebody has asked.

    Attributes:
        run_id: The run.
        path: Its moves; complete after ``refresh``.
        head: Its head, as of the last ``refresh``.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self.run_id = run_id
        self._store = store
        self._refreshing, self._reading = asyncio.Lock(), asyncio.Lock()
        self._ahead: asyncio.Task[None] | None = None
        self._forget()

    def _forget(self) -> None:
        self.head: Head | None = None
        self.path = PathReader(self.run_id)
        self._sealed: list[SealedRecord] = []
        self._steps = StepReader(self.run_id)
        self._pictures: dict[str, tuple[int, str]] = {}

    async def refresh(self) -> Head:
        """Read what was written since the last time.

        Raises:
            UnknownRunError: There is no such run.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        async with self._refreshing:
            head = await self._store.head(self.run_id)
            if head is None:
                raise UnknownRunError(f"there is no run {self.run_id!r}")
            if self._is_outdated(head):
                self._forget()
            if self.head is None or head.seq != self.head.seq:
                rows = await self._store.records(self.run_id, self._sealed[-1].seq if self._sealed else 0)
                if self._sealed and any(is_kind(row, "redaction") for row in rows):
                    self._forget()  # also what was redacted
                    rows = await self._store.records(self.run_id)
                await _compute(partial(self.path.add, rows), len(rows) // 10)  # ten times as quick as reading steps
                self._sealed += rows
            self.head = head
            return head

    def _is_outdated(self, head: Head) -> bool:
        """Whether what was read is no longer in the store.

        A redaction is recorded first, and deletes under the same lease or the next one.
        """
        before = self.head
        if before is None or not self._sealed:
            return False
        redacts = is_kind(self._sealed[-1], "redaction") and (head.epoch, head.owner) != (before.epoch, before.owner)
        return redacts or head.seq < before.seq  # the store was restored from a backup

    async def _read_moves(self, count: int) -> StepReader:
        """The reader, once it has read so many moves or everything.

        Whoever wants few moves gets them between two chunks of somebody who wants many.
        """
        while True:
            async with self._reading:
                steps, sealed = self._steps, self._sealed  # others, once something was forgotten
                if steps.read_count >= len(sealed) or len(steps.ledger.moves) >= count:
                    return steps
                # the records of the moves that are wanted, and of a few more
                wanted = self.path.moves[count - 1].seq if count <= len(self.path.moves) else len(sealed)
                stop = max(steps.read_count + 1, min(wanted, steps.read_count + CHUNK))
                rows = sealed[steps.read_count : stop]
                await _compute(partial(steps.add, rows), len(rows))

    def read_ahead(self) -> None:
        """Read all moves in the background, so that a deep one is there when somebody wants it."""
        if self._ahead is None or self._ahead.done():
            self._ahead = asyncio.create_task(self._read_all(), name=f"agentfsm viewer reads {self.run_id}")

    async def _read_all(self) -> None:
        await self._read_moves(len(self._sealed) + 1)

    def stop_reading(self) -> None:
        """End what ``read_ahead`` began."""
        if self._ahead is not None:
            self._ahead.cancel()

    async def moves(self, start: int, stop: int) -> Sequence[LedgerRow]:
        """Some moves of the ledger, counted from 0."""
        return (await self._read_moves(stop)).ledger.moves[start:stop]

    async def step(self, number: int) -> dict[str, Any] | None:
        """What is shown of a move, counted from 1; None if there is none."""
        # one more, so that it is known which records belong to the last one
        steps = await self._read_moves(number + 1)
        return steps.step(number) if 1 <= number <= len(steps.ledger.moves) else None

    async def prompt(self, number: int) -> SentPrompt | None:
        """What the model was sent in a move, counted from 1."""
        steps = await self._read_moves(number + 1)
        return steps.prompt(number) if 1 <= number <= len(steps.ledger.moves) else None

    async def ledger(self) -> RunLedger:
        """All that the journal says."""
        return (await self._read_moves(len(self._sealed) + 1)).ledger.ledger()

    async def picture(self, layout: LayoutName, first: int | None = None) -> str:
        """The graph with the run's path, as SVG without its style sheet.

        Args:
            layout: How it is laid out.
            first: Only so many moves of the path; None for all.

        Raises:
            agentfsm.errors.GraphError: The journal names a row that its graph does not have.
        """
        if first is not None:
            return await asyncio.to_thread(self._draw, layout, first)
        count = len(self.path.moves)
        if layout not in self._pictures or self._pictures[layout][0] != count:
            drawn = await asyncio.to_thread(self._draw, layout)
            self._pictures[layout] = count, drawn
        return self._pictures[layout][1]

    def _draw(self, layout: LayoutName, first: int | None = None) -> str:
        graph = graph_of_run(self.path.pins)
        ids = {row.id for row in graph}
        taken = [self.path.kinds[move.kind] for move in self.path.moves[:first]]
        state = self.path.state if first is None else taken[-1].target if taken else str(graph.initial)
        path = RunPath.from_ids((each.id for each in taken if each.id in ids), state)
        return diagram(graph, layout=layout, overlay=path).replace(f"<style>{style_sheet('auto')}</style>\n", "")


async def _compute(work: Callable[[], None], records: int) -> None:
    if records <= SMALL:
        work()
    else:
        await asyncio.to_thread(work)


class FollowedRuns:
    """The runs that were looked at last."""

    def __init__(self, store: Store, most: int = 8) -> None:
        self._store, self._most = store, most
        self._runs: OrderedDict[str, FollowedRun] = OrderedDict()

    async def get(self, run_id: str) -> FollowedRun:
        """A run, up to date.

        Raises:
            UnknownRunError: There is no such run.
            agentfsm.errors.StoreError: The store cannot be read.
        """
        run = self._runs.get(run_id)
        if run is None:
            run = FollowedRun(self._store, run_id)
        await run.refresh()
        self._runs[run_id] = run
        self._runs.move_to_end(run_id)
        while len(self._runs) > self._most:
            self._runs.popitem(last=False)[1].stop_reading()
        return run

    def stop_reading(self) -> None:
        """End what is read ahead: nobody will ask for it."""
        for run in self._runs.values():
            run.stop_reading()
