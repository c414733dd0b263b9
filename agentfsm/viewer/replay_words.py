"""Where a replay under other settings parts from a run, in plain words."""

from __future__ import annotations

from collections.abc import Mapping

from agentfsm.journal.replay import Divergence
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.graph import Graph

__all__ = ["in_plain_words"]

_MEANINGS: Mapping[str, str] = {
    guard.__name__: (guard.__doc__ or "").partition("\n")[0].rstrip(".").replace("``", "") for guard in BUILT_IN_GUARDS
}
"""What each guard of the presets says when it holds."""


def in_plain_words(divergence: Divergence, number: int, settings: str, graph: Graph) -> str:
    """What a run did in a move, what it would have done under other settings instead, and why.

    Args:
        divergence: The first transition that would have been another one.
        number: The number of the move, counted from 1.
        settings: What these are called, such as ``strict``.
        graph: The graph of the replay.
    """
    recorded, _, went = divergence.recorded.partition(" -> ")
    instead, arrow, would_go = divergence.instead.partition(" -> ")
    if not arrow:  # it would have started elsewhere, or no row would have held
        return f"Under {settings}, move {number} would have been another: {divergence.instead}."
    notes = {str(spec.name): spec.note for spec in graph.states}

    def state(name: str) -> str:
        return f"{name} ({notes[name]})" if notes.get(name) else name

    source, _, guard = recorded.rpartition(".")
    rows, holding = [row.id for row in graph], instead.rpartition(".")[2]
    held = "no guard would have held" if holding == "otherwise" else f"the guard {_named(holding)} would have held"
    if recorded not in rows:
        why = f"{settings} has no such row: {held}"
    elif instead in rows and rows.index(instead) < rows.index(recorded):
        why = f"under {settings} the guard {_named(holding)}, which is asked before it, would have held"
    else:
        why = f"under {settings} that guard would have said no, and {held}"
    took = "No guard held" if guard == "otherwise" else f"The guard {_named(guard)} held"
    return (
        f"In move {number} the run was in {state(source)}. {took}, so it went to {state(went)}. "
        f"But {why}, so it would have gone to {state(would_go)}."
    )


def _named(guard: str) -> str:
    meaning = _MEANINGS.get(guard, "")
    return f"{guard} (\N{LEFT DOUBLE QUOTATION MARK}{meaning}\N{RIGHT DOUBLE QUOTATION MARK})" if meaning else guard
