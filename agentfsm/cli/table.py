"""The table of a run: one line a transition, with the guard that decided and those that had said no."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import OTHERWISE, Graph

__all__ = ["colour", "transition_table"]


def colour(graph: Graph, state: str) -> str:
    """The style of a state: what pictures use for recovery and waiting, and bold for the end."""
    spec = graph.spec(state)
    if spec.final:
        return "bold"
    return "cyan" if spec.waits else "yellow" if spec.lane == "left" else ""


def transition_table(decisions: Iterable[Decision], graph: Graph) -> Table:
    """A run's moves as a table.

    Args:
        decisions: Every move, in order.
        graph: The graph that it ran on.
    """
    moves = list(decisions)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("#", justify="right", style="dim", min_width=len(str(len(moves))))
    for name, words in (
        ("from", [d.source for d in moves]),
        ("to", [d.target for d in moves]),
        ("guard that held", [d.guard for d in moves]),
    ):
        table.add_column(name, no_wrap=True, min_width=max(map(len, [name, *words])))
    table.add_column("asked before it, all said no", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for number, decision in enumerate(moves, 1):
        marked = colour(graph, decision.target)
        guard = Text(decision.guard, "dim italic" if decision.guard == OTHERWISE else marked or "bold")
        before = [name for name, _ in decision.tried[:-1]]
        asked = f"{len(before)}: {', '.join(before)}" if before else ""
        table.add_row(
            str(number),
            Text(str(decision.source), colour(graph, decision.source)),
            Text(str(decision.target), marked),
            guard,
            asked,
        )
    return table
