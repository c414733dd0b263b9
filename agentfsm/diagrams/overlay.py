"""What can be laid over a picture: a run's path, coverage, the difference from another graph.

An overlay is a little data with one method, ``on``, that turns a view into another view; so every form
that is looked at shows it, and anything with such a method is an overlay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Protocol

from agentfsm.diagrams.view import Box, Lane, Mark, Row, View, box_of, in_order, lane_of, plain
from agentfsm.machine.graph import Graph

__all__ = ["Coverage", "Difference", "Overlay", "RunPath"]

TIMES = "\N{MULTIPLICATION SIGN}"


class Overlay(Protocol):
    """Anything that has something to say about a view."""

    def on(self, view: View) -> View:
        """The view with what the overlay says."""
        ...


@dataclass(frozen=True, slots=True)
class RunPath:
    """The way that one run took: how often each transition, and where the run is. The rest stands back.

    Attributes:
        counts: How often each transition was taken, by its id; one that is missing was not.
        current: The state in which the run is, or None.
    """

    counts: Mapping[str, int]
    current: str | None = None

    @classmethod
    def of(cls, ids: Iterable[str], current: str | None = None) -> RunPath:
        """The path of a run, from the ids of its transitions as they were taken."""
        return cls(Counter(ids), current)

    def on(self, view: View) -> View:
        """The view with counts, the current state marked, and what was never visited standing back.

        Raises:
            GraphError: An id or the current state is not one of the graph.
        """
        taken = _taken(view.graph, self.counts)
        visited = {view.graph.initial, *(str(t.target) for t in view.graph if t.id in taken)}
        if self.current is not None:
            visited.add(str(view.graph.spec(self.current).name))
        boxes = tuple(
            replace(
                box,
                rows=tuple(
                    replace(r, dim=n == 0, tag=f"{TIMES}{n}" if n else "")
                    for r, n in ((r, taken.get(r.transition.id, 0)) for r in box.rows)
                ),
                current=box.name == self.current,
                dim=box.name not in visited,
            )
            for box in view.boxes
        )
        steps = sum(taken.values())
        where = f", now in {self.current}" if self.current is not None else ""
        return replace(view, boxes=boxes, caption=f"a run of {steps} transitions{where}", overlaid=True)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often tests took each transition; rows that none took are tinted.

    Attributes:
        counts: How often each transition was taken, by its id; one that is missing was not.
    """

    counts: Mapping[str, int]

    def on(self, view: View) -> View:
        """The view with a count, or "never", on each row.

        Raises:
            GraphError: An id is not one of the graph.
        """
        taken = _taken(view.graph, self.counts)

        def counted(row: Row) -> Row:
            n = taken.get(row.transition.id, 0)
            return replace(row, mark="" if n else "never", tag=f"{TIMES}{n}" if n else "never")

        boxes = tuple(replace(b, rows=tuple(counted(r) for r in b.rows)) for b in view.boxes)
        caption = f"coverage: {len(taken)} of {len(view.graph.transitions)} transitions taken"
        return replace(view, boxes=boxes, caption=caption, overlaid=True)


@dataclass(frozen=True, slots=True)
class Difference:
    """What became of an older graph: rows and states that are new, gone, moved, or lead elsewhere.

    Attributes:
        before: The older graph.
    """

    before: Graph

    def on(self, view: View) -> View:
        """The view with what is gone put back, struck through, and each change marked."""
        old = {b.name: b for b in plain(self.before).boxes}
        boxes = [_compared(old.pop(box.name, None), box) for box in view.boxes]
        for gone in old.values():
            rows = tuple(replace(r, mark="removed", tag="gone") for r in gone.rows)
            lane: Lane = lane_of(gone.spec)
            boxes.append(replace(box_of(gone.spec, lane, rows), mark="removed"))
        marks = Counter[Mark](r.mark for b in boxes for r in b.rows)
        words: dict[Mark, str] = {"added": "new", "removed": "gone", "moved": "moved", "changed": "lead elsewhere"}
        said = ", ".join(f"{marks[mark]} {word}" for mark, word in words.items() if marks[mark])
        caption = f"difference: {said or 'none'}"
        return replace(view, boxes=in_order(boxes), caption=caption, overlaid=True)


def _taken(graph: Graph, counts: Mapping[str, int]) -> dict[str, int]:
    """The counts above zero, each of a transition that the graph has."""
    return {graph.transition(key).id: n for key, n in counts.items() if n > 0}


def _compared(old: Box | None, new: Box) -> Box:
    """A box with the rows of its older self that are gone, in their old places."""
    if old is None:
        rows = tuple(replace(r, mark="added", tag="new") for r in new.rows)
        return replace(new, rows=rows, mark="added")
    before = {r.transition.name: r for r in old.rows}
    after = {r.transition.name for r in new.rows}
    merged: list[Row] = []
    matcher = SequenceMatcher(None, list(before), [r.transition.name for r in new.rows], autojunk=False)
    for what, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        gone = (r for r in old.rows[old_from:old_to] if r.transition.name not in after)
        merged += (replace(r, mark="removed", tag="gone") for r in gone)
        for row in new.rows[new_from:new_to]:
            was = before.get(row.transition.name)
            if was is None:
                merged.append(replace(row, mark="added", tag="new"))
                continue
            if what != "equal":
                row = replace(row, mark="moved", label=f"{was.order}→{row.order}", tag="moved")
            if was.transition.target != row.transition.target:
                row = replace(row, mark="changed", tag=f"was {was.transition.target}")
            merged.append(row)
    return replace(new, rows=tuple(merged))
