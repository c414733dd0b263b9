"""Overlays: a run's path, a counterexample, test coverage, the diff from another graph, an agent's hooks.

An overlay is an object with one method, ``apply_to``, which turns a view into another view. So every format for
people can show it, and any object with that method is an overlay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from textwrap import shorten
from typing import Protocol

from agentfsm.diagrams.view import Box, Lane, RowKind, RowMark, TableRow, View, box_of, build_view, lane_of, order_boxes
from agentfsm.machine.graph import Graph

TIMES_SIGN = "\N{MULTIPLICATION SIGN}"

MAX_CHANGE_LENGTH = 140
"""Characters of a changed decision that the caption shows."""

MAX_NUMBERED_MOVES = 20
"""The moves of a run whose moves are numbered in its picture; those of a longer one are counted."""

MAX_NUMBERS = 5
"""The numbers that one row shows; a run that takes a row more often is counted."""


class Overlay(Protocol):
    """Anything that can add to a view."""

    def apply_to(self, view: View) -> View:
        """The view with the overlay applied."""
        ...


@dataclass(frozen=True, slots=True)
class RunPath:
    """The path of one run: which transitions it took, and its current state. The rest is greyed out.

    The moves of a short run are numbered in the order in which it made them, those of a longer one counted. The
    final state is green if the run completed, and red if it ended otherwise.

    ::

        write(LOOP, "run.svg", overlay=RunPath.from_ids(["pre_step.otherwise", "call_llm.cancelled"], "terminal"))

    Attributes:
        counts: How often each transition was taken, by its id; those that are missing were not taken.
        current: The current state of the run, or None.
        moves: The ids of the transitions in the order in which they were taken; empty if only counts are known.
    """

    counts: Mapping[str, int]
    current: str | None = None
    moves: tuple[str, ...] = ()

    @classmethod
    def from_ids(cls, ids: Iterable[str], current: str | None = None) -> RunPath:
        """The path of a run, from the ids of its transitions in the order in which they were taken."""
        moves = tuple(ids)
        return cls(Counter(moves), current, moves)

    def apply_to(self, view: View) -> View:
        """The view with numbers or counts, the current state marked, and everything that was not visited greyed out.

        Raises:
            GraphError: An id or the current state is not in the graph.
        """
        taken = _checked_counts(view.graph, self.counts)
        steps = sum(taken.values())
        where = f", now in {self.current}" if self.current is not None else ""
        view = _with_ending(view, [*taken, *self.moves[-1:]], self.current)
        return _with_path(view, self._tags(taken), self.current, f"a run of {_count_moves(steps)}{where}")

    def _tags(self, taken: Mapping[str, int]) -> dict[str, str]:
        """What each row shows: the numbers of the moves by it, or how many there were."""
        numbers: dict[str, list[str]] = {}
        for number, key in enumerate(self.moves, 1):
            numbers.setdefault(key, []).append(str(number))
        if 0 < len(self.moves) <= MAX_NUMBERED_MOVES and max(map(len, numbers.values())) <= MAX_NUMBERS:
            return {key: f"move{'s' * (len(of) > 1)} {', '.join(of)}" for key, of in numbers.items()}
        return {key: f"{TIMES_SIGN}{n}" for key, n in taken.items()}


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A run that violates a property, with the number of its step at each row. The rest is greyed out.

    ::

        broken = LOOP.analyse(never_after("call_llm", "suspended")).verdicts[-1]
        write(LOOP, "broken.svg", overlay=Counterexample(broken.path, broken.loop, broken.text))

    Attributes:
        path: The ids of its transitions, in order.
        loop: The ids of transitions that can then repeat forever.
        violated: The text of the property.
    """

    path: tuple[str, ...]
    loop: tuple[str, ...] = ()
    violated: str = ""

    def apply_to(self, view: View) -> View:
        """The view with the number of the step, or "forever", on each row, and the last state marked.

        Raises:
            GraphError: An id is not in the graph.
        """
        steps: dict[str, list[str]] = {}
        for number, key in enumerate(self.path, 1):
            steps.setdefault(view.graph.transition(key).id, []).append(str(number))
        tags = {key: f"step {', '.join(numbers)}" for key, numbers in steps.items()}
        for key in dict.fromkeys(view.graph.transition(key).id for key in self.loop):
            tags[key] = f"{tags[key]}, forever" if key in tags else "forever"
        ids = (*self.path, *self.loop)
        last = str(view.graph.transition(ids[-1]).target) if ids else None
        again = ", and then one that never ends" if self.loop else ""
        what = f"broken: {self.violated}; by " if self.violated else ""
        view = replace(view, meanings={"current": "the run ends here", "dim": "not part of it"})
        return _with_path(view, tags, last, f"{what}a run of {_count_moves(len(self.path))}{again}")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often tests took each transition; rows that none took are tinted.

    ::

        write(LOOP, "covered.svg", overlay=Coverage({"pre_step.otherwise": 12, "pre_step.cancelled": 1}))

    Attributes:
        counts: How often each transition was taken, by its id; those that are missing were not taken.
        impossible: The ids of transitions that no run can take: they are greyed out, and not required.
    """

    counts: Mapping[str, int]
    impossible: Collection[str] = ()

    def apply_to(self, view: View) -> View:
        """The view with a count, "never" or "cannot" on each row.

        Raises:
            GraphError: An id is not in the graph.
        """
        taken = _checked_counts(view.graph, self.counts)

        cannot = {view.graph.transition(key).id for key in self.impossible} - taken.keys()

        def counted(row: TableRow) -> TableRow:
            n = taken.get(row.transition.id, 0)
            if row.transition.id in cannot:
                return replace(row, dim=True, tag="cannot")
            return replace(row, mark="" if n else "never", tag=f"{TIMES_SIGN}{n}" if n else "never")

        boxes = tuple(replace(b, rows=tuple(counted(r) for r in b.rows)) for b in view.boxes)
        caption = f"coverage: {len(taken)} of {len(view.graph.transitions) - len(cannot)} transitions taken"
        if cannot:
            caption += f", {len(cannot)} cannot be"
        return replace(view, boxes=boxes, caption=caption, overlaid=True, meanings={"dim": "no run can take it"})


@dataclass(frozen=True, slots=True)
class HeatMap:
    """How often many runs took each transition: the more often, the longer the bar behind the row.

    ::

        write(LOOP, "used.svg", overlay=HeatMap({"pre_step.otherwise": 1200, "pre_step.cancelled": 3}, runs=310))

    The bars grow with the logarithm of the numbers, so that what happens rarely can be seen beside what always does.

    Attributes:
        counts: How often each transition was taken, by its id; those that are missing were not taken.
        runs: How many runs took them; 0 if that is not known.
    """

    counts: Mapping[str, int]
    runs: int = 0

    def apply_to(self, view: View) -> View:
        """The view with a count and a bar on each row that was taken, and the others greyed out.

        Raises:
            GraphError: An id is not in the graph.
        """
        taken = _checked_counts(view.graph, self.counts)
        most = math.log1p(max(taken.values(), default=0))

        def counted(row: TableRow) -> TableRow:
            n = taken.get(row.transition.id, 0)
            if not n:
                return replace(row, dim=True)
            return replace(row, mark="often", share=math.log1p(n) / most, tag=f"{TIMES_SIGN}{n}")

        boxes = tuple(replace(b, rows=tuple(counted(r) for r in b.rows)) for b in view.boxes)
        of = f" of {self.runs} run{'' if self.runs == 1 else 's'}" if self.runs else ""
        caption = f"{_count_moves(sum(taken.values()))}{of}, by {len(taken)} of {len(view.graph.transitions)} rows"
        return replace(view, boxes=boxes, caption=caption, overlaid=True, meanings={"dim": "never taken"})


@dataclass(frozen=True, slots=True)
class DiffOverlay:
    """The difference from an older graph: rows and states that are new, removed, moved, or have another target.

    ::

        changes = agentfsm.analysis.diff(reviewed, mine).decisions
        elsewhere = [str(each) for each in changes if each.leads_elsewhere]
        write(mine, "difference.svg", overlay=DiffOverlay(reviewed, elsewhere, len(changes) - len(elsewhere)))

    Attributes:
        before: The older graph.
        decisions: The decisions that change and lead elsewhere, as text; the first is shown, the others are counted.
            The diagram shows rows, but two rows that merely change places can change what a run does.
        minor: How many decisions change, but lead to the same state.
    """

    before: Graph
    decisions: Sequence[str] = ()
    minor: int = 0

    def apply_to(self, view: View) -> View:
        """The view with removed rows and states put back, struck through, and each change marked."""
        old = {b.name: b for b in build_view(self.before).boxes}
        boxes = [_compared_box(old.pop(box.name, None), box) for box in view.boxes]
        for gone in old.values():
            rows = tuple(replace(r, mark="removed", tag="gone") for r in gone.rows)
            lane: Lane = lane_of(gone.spec)
            boxes.append(replace(box_of(gone.spec, lane, rows), mark="removed"))
        marks = Counter[RowMark](r.mark for b in boxes for r in b.rows)
        names: dict[RowMark, str] = {"added": "new", "removed": "gone", "moved": "moved", "changed": "lead elsewhere"}
        changes = ", ".join(f"{marks[mark]} {name}" for mark, name in names.items() if marks[mark])
        caption = f"difference: {changes or 'none'}"
        if self.decisions:
            more = f" (and {len(self.decisions) - 1} decisions more)" if len(self.decisions) > 1 else ""
            caption += f"; {shorten(self.decisions[0], MAX_CHANGE_LENGTH, placeholder='...')}{more}"
        if self.minor:
            caption += f"; {self.minor} decision{'s' if self.minor > 1 else ''} by another row to the same state"
        return replace(view, boxes=order_boxes(boxes), caption=caption, overlaid=True)


def _count_moves(number: int) -> str:
    return f"{number} transition{'' if number == 1 else 's'}"


def _with_ending(view: View, taken: Sequence[str], current: str | None) -> View:
    """The view with the final state that a run has reached in the color of its ending.

    Args:
        view: The view.
        taken: The ids of the transitions that the run took; if they are in order, the last one ended it.
        current: The state that the run is in.
    """
    rows = [view.graph.transition(key) for key in taken]
    ends = next((row.ends for row in reversed(rows) if row.ends and row.target == current), "")
    if not ends:
        return view
    kind: RowKind = "done" if ends == "completed" else "stop"
    boxes = tuple(replace(box, kind=kind) if box.name == current else box for box in view.boxes)
    return replace(view, boxes=boxes, meanings={**view.meanings, "current": f"the run ended: {ends.replace('_', ' ')}"})


def _with_path(view: View, tags: Mapping[str, str], current: str | None, caption: str) -> View:
    """The view with tags at the rows that were taken, and everything else greyed out.

    Raises:
        GraphError: The current state is not in the graph.
    """
    visited = {view.graph.initial, *(str(t.target) for t in view.graph if t.id in tags)}
    if current is not None:
        visited.add(str(view.graph.spec(current).name))
    boxes = tuple(
        replace(
            box,
            rows=tuple(
                replace(r, dim=r.transition.id not in tags, tag=tags.get(r.transition.id, "")) for r in box.rows
            ),
            current=box.name == current,
            dim=box.name not in visited,
        )
        for box in view.boxes
    )
    return replace(view, boxes=boxes, caption=caption, overlaid=True)


def _checked_counts(graph: Graph, counts: Mapping[str, int]) -> dict[str, int]:
    """The counts above zero.

    Raises:
        GraphError: An id is not in the graph.
    """
    return {graph.transition(key).id: n for key, n in counts.items() if n > 0}


def _compared_box(old: Box | None, new: Box) -> Box:
    """A box with the removed rows of its older version in their old places."""
    if old is None:
        rows = tuple(replace(r, mark="added", tag="new") for r in new.rows)
        return replace(new, rows=rows, mark="added")
    before = {r.transition.name: r for r in old.rows}
    after = {r.transition.name for r in new.rows}
    merged: list[TableRow] = []
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


@dataclass(frozen=True, slots=True)
class HooksOverlay:
    """The hooks of an agent, shown in the box of the state that they guard; ``agent.diagram()`` applies it.

    ::

        print(diagram(LOOP, "text", overlay=HooksOverlay({"dispatch_tool": ["permissions"]})))

    Attributes:
        hooks: The names of the hooks of each state, in the order in which they run.
    """

    hooks: Mapping[str, Sequence[str]]

    def apply_to(self, view: View) -> View:
        """The view with the names of its hooks in each box.

        Raises:
            GraphError: A hook belongs to a state that the graph does not have.
        """
        named = {str(view.graph.spec(state).name): names for state, names in self.hooks.items() if names}
        boxes = tuple(
            replace(box, spec=replace(box.spec, note=f"{', '.join(names)} \N{RIGHTWARDS ARROW} {box.note}".rstrip()))
            if (names := named.get(box.name))
            else box
            for box in view.boxes
        )
        count = sum(map(len, named.values()))
        caption = f"{view.caption}, {count} hook{'' if count == 1 else 's'}"
        return replace(view, boxes=boxes, caption=caption, overlaid=True)
