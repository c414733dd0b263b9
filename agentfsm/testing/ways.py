"""Single ways through the product in which paths are found: to a row, and home."""

from __future__ import annotations

from agentfsm.analysis import Facts, loop_facts
from agentfsm.analysis.product import Config, Product
from agentfsm.analysis.search import path_to, run_to
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.rules import Rules
from agentfsm.machine.graph import Graph, Transition

__all__ = ["first_way", "product_of", "way_home"]


def first_way(product: Product, row: Transition) -> tuple[tuple[Transition, ...], int] | None:
    """The rows of a shortest run that takes a row and goes home, and that row's place; None where none does."""
    graph = product.graph
    place = next(i for i, t in enumerate(graph.transitions) if t is row)
    found = run_to(product, 0, lambda _, taken: int(taken == place), goal=1)
    if found is None:
        return None
    here = {product.start}
    for taken in found:
        here = {after for config in here for r, after in product.moves(config) if r == taken}
    rows = (*found, *way_home(product, min(here)))
    return tuple(graph.transitions[r] for r in rows), len(found) - 1


def way_home(product: Product, config: Config) -> tuple[int, ...]:
    """The rows of a shortest way to the end."""
    back: dict[Config, tuple[Config, int] | None] = {config: None}
    todo = [config]
    for here in todo:
        if here[0] in product.finals:
            return path_to(back, here)
        for row, after in product.moves(here):
            if after not in back:
                back[after] = (here, row)
                todo.append(after)
    return ()


def product_of(
    graph: Graph,
    guardrails: AgentGuardrails,
    rules: Rules | None = None,
    structured: bool | None = None,
    facts: Facts | None = None,
) -> Product:
    """The product in which paths are found: a reply makes two calls at most."""
    known = loop_facts(guardrails, rules, structured=structured, calls_per_reply=2)
    return Product(graph, known + (facts or Facts()))
