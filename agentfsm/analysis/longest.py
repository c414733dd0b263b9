"""The costliest way through a graph that may have cycles, as long as going round one costs nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from agentfsm.analysis.laps import Cost

__all__ = ["costliest"]

N = TypeVar("N", bound=Hashable)


def costliest(start: N, nexts: Mapping[N, Sequence[tuple[N | None, Cost]]]) -> Cost | None:
    """The most of each measure but the first on any way from a node; None where there is no most.

    Tarjan's algorithm gives the strongly connected components, those that lead nowhere first. Within one,
    every node can go on as every other can, provided that nothing on the way costs anything.

    Args:
        start: The node.
        nexts: What can follow each node, and what that costs; None for an end.
    """
    index: dict[N, int] = {}
    low: dict[N, int] = {}
    open_: list[N] = []
    values: dict[N, Cost] = {}
    stack: list[tuple[N, int]] = [(start, 0)]
    while stack:
        node, place = stack.pop()
        edges = nexts[node]
        if place == 0:
            index[node] = low[node] = len(index)
            open_.append(node)
        else:
            child = edges[place - 1][0]
            if child is not None and child not in values:
                low[node] = min(low[node], low[child])
        for at in range(place, len(edges)):
            after = edges[at][0]
            if after is None or after in values:
                continue
            if after not in index:
                stack += [(node, at + 1), (after, 0)]
                break
            low[node] = min(low[node], index[after])
        else:
            if low[node] == index[node]:
                component: list[N] = []
                while not component or component[-1] != node:
                    component.append(open_.pop())
                value = _value(component, nexts, values)
                if value is None:
                    return None
                values.update(dict.fromkeys(component, value))
    return values[start]


def _value(
    component: list[N], nexts: Mapping[N, Sequence[tuple[N | None, Cost]]], values: dict[N, Cost]
) -> Cost | None:
    """What all nodes of a component can come to; None where going round in it costs something."""
    model = tool = 0
    for node in component:
        for after, cost in nexts[node]:
            beyond: Cost | None = (0, 0, 0) if after is None else values.get(after)
            if beyond is None:  # it is of this component, as all others are known
                if cost[1] or cost[2]:
                    return None
            else:
                model, tool = max(model, cost[1] + beyond[1]), max(tool, cost[2] + beyond[2])
    return (0, model, tool)
