"""Path generation: a small, deterministic set of runs that covers a graph by a coverage criterion.

Paths are found in the state space (the graph with what is known of its guards), so each of them can happen. What no
run can cover is listed with the reason. Guardrails are small (``SMALL_GUARDRAILS``), so that paths to a limit stay
short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, overload

from agentfsm.agent import Agent
from agentfsm.analysis import Assumptions
from agentfsm.analysis.loop_assumptions import AgentTraits
from agentfsm.analysis.model_checker import shortest_path_to
from agentfsm.analysis.state_space import Configuration, StateSpace, reconstruct_path
from agentfsm.errors import ConfigurationError
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.presets import Preset
from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing.path_assumptions import path_assumptions


def shortest_run_through(space: StateSpace, row: Transition) -> tuple[tuple[Transition, ...], int] | None:
    """The rows of a shortest complete run that takes a row, and the index of that row; None if no run takes it."""
    graph = space.graph
    place = next(i for i, t in enumerate(graph.transitions) if t is row)
    found = shortest_path_to(space, 0, lambda _, taken: int(taken == place), goal=1)
    if found is None:
        return None
    here = {space.initial}
    for taken in found:
        here = {after for config in here for r, after in space.moves(config) if r == taken}
    rows = (*found, *shortest_run_to_end(space, min(here)))
    return tuple(graph.transitions[r] for r in rows), len(found) - 1


def shortest_run_to_end(space: StateSpace, config: Configuration) -> tuple[int, ...]:
    """The rows of a shortest path from a configuration to the end of the run, by their numbers."""
    back: dict[Configuration, tuple[Configuration, int] | None] = {config: None}
    todo = [config]
    for here in todo:
        if here[0] in space.finals:
            return reconstruct_path(back, here)
        for row, after in space.moves(here):
            if after not in back:
                back[after] = (here, row)
                todo.append(after)
    return ()


def state_space_for(
    graph: Graph,
    guardrails: AgentGuardrails,
    traits: AgentTraits,
    assumptions: Assumptions | None = None,
) -> StateSpace:
    """The state space in which paths are generated. A reply makes at most two calls there."""
    known = path_assumptions(graph, guardrails, traits)
    return StateSpace(graph, known + (assumptions or Assumptions()))


CRITERIA = ("transitions", "pairs", "triples", "prime")
"""The coverage criteria, from the weakest to the strongest."""

_WINDOW_LENGTHS = {"transitions": 1, "pairs": 2, "triples": 3}

Requirement = tuple[tuple[int, ...], ...]
"""Consecutive transitions to cover; each as the numbers of the rows of which one must be taken."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A requirement that no run can cover.

    Attributes:
        rows: The ids of the rows, in order.
        reason: Why no run takes them in this order.
    """

    rows: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{' > '.join(self.rows)}: {self.reason}"


def requirements(graph: Graph, cover: str) -> list[Requirement]:
    """Every requirement of a criterion, in table order, feasible or not."""
    if cover == "prime":
        return [_requirement_of(graph, path) for path in _prime_state_paths(graph)]
    windows: list[tuple[int, ...]] = [(i,) for i in range(len(graph.transitions))]
    for _ in range(_WINDOW_LENGTHS[cover] - 1):
        windows = [
            (*window, i)
            for window in windows
            for i, t in enumerate(graph.transitions)
            if t.source == graph.transitions[window[-1]].target
        ]
    return [tuple((i,) for i in window) for window in windows]


def requirement_ids(graph: Graph, requirement: Requirement) -> tuple[str, ...]:
    """A requirement as the ids of its rows; ``a|b`` if either row may be taken."""
    return tuple("|".join(graph.transitions[row].id for row in rows) for rows in requirement)


def prime_paths(graph: Graph) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The prime paths of a graph: the names of their states, and the ``requirement_ids`` of each path."""
    return [(path, requirement_ids(graph, _requirement_of(graph, path))) for path in _prime_state_paths(graph)]


def _requirement_of(graph: Graph, path: tuple[str, ...]) -> Requirement:
    """The rows that lead from each state of a path to the next one."""
    return tuple(
        tuple(i for i, t in enumerate(graph.transitions) if (t.source, t.target) == step) for step in pairwise(path)
    )


def _prime_state_paths(graph: Graph) -> list[tuple[str, ...]]:
    """The simple paths of states (a cycle may end where it began) that are not part of a longer one."""
    nexts = {s.name: list(dict.fromkeys(t.target for t in graph.rows(s.name))) for s in graph.states}
    found: list[tuple[str, ...]] = []
    todo: list[tuple[str, ...]] = [(s.name,) for s in graph.states]
    while todo:
        path = todo.pop(0)
        longer = [
            (*path, n)
            for n in nexts[path[-1]]
            if (path[0] != path[-1] or len(path) == 1) and (n not in path or n == path[0])
        ]
        todo += longer
        if not longer and len(path) > 1:
            found.append(path)
    maximal = [p for p in found if not any(_is_subpath(p, other) for other in found)]
    return [tuple(map(str, path)) for path in sorted(maximal, key=len)]


def _is_subpath(path: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(path) < len(other) and any(other[i : i + len(path)] == path for i in range(len(other) - len(path) + 1))


def reachable_configurations(space: StateSpace, required: list[Requirement]) -> dict[Requirement, set[Configuration]]:
    """For each requirement and each of its prefixes, the configurations of runs that have just met it.

    Every configuration has met the empty prefix.
    """
    after: dict[int, dict[Configuration, None]] = {}
    found: dict[Requirement, set[Configuration]] = {(): set(_all_configurations(space))}
    for config in found[()]:
        for row, then in space.moves(config):
            after.setdefault(row, {})[then] = None
    for requirement in required:
        if requirement[:-1] in found:  # requirements of one criterion share their prefixes
            here = found[requirement[:-1]]
            found[requirement] = {then for c in here for row, then in space.moves(c) if row in requirement[-1]}
            continue
        here = {then for row in requirement[0] for then in after.get(row, ())}
        found[requirement[:1]] = here
        for length in range(1, len(requirement)):
            here = {then for c in here for row, then in space.moves(c) if row in requirement[length]}
            found[requirement[: length + 1]] = here
    return found


def _all_configurations(space: StateSpace) -> Iterator[Configuration]:
    seen = {space.initial: None}
    for config in (todo := [space.initial]):
        yield config
        for _, after in space.moves(config):
            if after not in seen:
                seen[after] = None
                todo.append(after)


def infeasibility_reason(
    space: StateSpace, requirement: Requirement, reached: dict[Requirement, set[Configuration]]
) -> str:
    """Why no run meets a requirement, from the assumptions about its first row that cannot be taken."""
    length = next(n for n in range(1, len(requirement) + 1) if not reached[requirement[:n]])
    names = space.graph.transitions
    wanted = requirement[length - 1]
    here = reached[requirement[: length - 1]]
    off: dict[str, None] = {}
    own: dict[str, None] = {}
    others: dict[str, None] = {}
    sources = {space.state_index[names[row].source] for row in wanted}
    for config in sorted(c for c in here if c[0] in sources):
        for row in space.rows[config[0]]:
            if row.place in wanted:
                for known in (k for k in row.assumptions if not row.allowed_by(k, config)):
                    (off if known.may == "never" else own)[f"{row.transition.name}: {known.why or known.may}"] = None
                break
            if row.must(config):
                others[f"{row.transition.id} holds first"] = None
                break
    return "; ".join(off or own or others) or f"no run reaches {names[wanted[0]].source}"


SMALL_GUARDRAILS = AgentGuardrails(
    max_iterations=2,
    max_steps=4,
    max_continues=1,
    max_tokens=1_000,
    max_cost_usd=1.0,
    max_denials=1_000,
    repeated_error_threshold=2,
)
"""Guardrails under which every row can be reached in a few transitions."""

SMALL_GUARDRAILS_SINGLE_CALL = SMALL_GUARDRAILS.model_copy(update={"loop_hard_threshold": 2})
"""The same for agents whose model makes at most one call per reply, where a repeated call takes two replies."""


def small_guardrails(behavior: Behavior | None = None) -> AgentGuardrails:
    """Guardrails under which every row can be reached in a few transitions, with a behavior."""
    return SMALL_GUARDRAILS_SINGLE_CALL if behavior is not None and behavior.envelope else SMALL_GUARDRAILS


MAX_PATH_LENGTH = 40
"""A path of this length is completed without looking for more requirements to cover."""


@dataclass(frozen=True, slots=True)
class Path:
    """A complete run, as the rows that it takes from the first state to the end.

    Attributes:
        number: Its position in the list, from 1.
        rows: The rows.
        guardrails: The limits under which it can happen.
        behavior: The behavior for which it was generated; None for any.
    """

    number: int
    rows: tuple[Transition, ...]
    guardrails: AgentGuardrails
    behavior: Behavior | None = None

    @property
    def id(self) -> str:
        """A name for tests: its number, its length and its last row."""
        return f"{self.number:03d}-{len(self.rows)}moves-{self.rows[-1].id}"

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its rows."""
        return tuple(row.id for row in self.rows)

    def __str__(self) -> str:
        return f"{self.id}: {' > '.join(self.ids)}"


@dataclass(frozen=True, slots=True)
class Paths(Sequence[Path]):
    """The generated paths, and the requirements that no run can cover. A sequence of ``Path``.

    Attributes:
        graph: The graph.
        cover: The coverage criterion.
        items: The paths.
        required: The number of requirements of the criterion, including infeasible ones.
        infeasible: The requirements that no run can cover, with reasons.
    """

    graph: Graph
    cover: str
    items: tuple[Path, ...]
    required: int
    infeasible: tuple[Infeasible, ...]

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Path, ...]: ...
    def __getitem__(self, index: int | slice) -> Path | tuple[Path, ...]:
        return self.items[index]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.items)

    def __str__(self) -> str:
        moves = sum(len(p.rows) for p in self.items)
        covered = self.required - len(self.infeasible)
        return (
            f"{self.graph.name}: {len(self.items)} runs of {moves} moves cover"
            f" {covered} of {self.required} {self.cover}; {len(self.infeasible)} cannot happen"
        )


def graph_of(source: Graph | Preset | Agent[Any, Any]) -> tuple[Graph, Behavior | None, bool | None]:
    """The graph of a graph, a preset or an agent; with its behavior, and whether it has an output type.

    Raises:
        ConfigurationError: The source is not one of these.
    """
    match source:
        case Graph():
            return source, None, None
        case Preset():
            return source.graph, source.behavior, None
        case Agent():
            return source.graph, source.behavior, source.config.output_adapter is not None
        case _:  # pyright: ignore[reportUnnecessaryComparison]  # callers may be untyped
            raise ConfigurationError(f"neither a graph nor a preset nor an agent: {source!r}")


def traits_of(source: Graph | Preset | Agent[Any, Any]) -> AgentTraits:
    """What paths may assume about a graph, a preset or an agent: its behavior, and which control tools it has.

    Raises:
        ConfigurationError: The source is not one of these.
    """
    _, behavior, structured = graph_of(source)
    if not isinstance(source, Agent):
        return AgentTraits(behavior, structured)
    tools = source.config.tools.values()
    controls = {tool.control for tool in tools}
    simple = not any(tool.delegate is not None or tool.asks for tool in tools)
    return AgentTraits(behavior, structured, asks="ask" in controls, gives_up="unable" in controls, certain=simple)


def paths(
    graph: Graph | Preset | Agent[Any, Any],
    cover: str = "pairs",
    *,
    guardrails: AgentGuardrails | None = None,
    behavior: Behavior | None = None,
    structured: bool | None = None,
    assumptions: Assumptions | None = None,
) -> Paths:
    """A small, deterministic list of runs that cover a graph.

    ::

        print(paths(LOOP))  # loop: 136 runs of 970 moves cover 239 of 269 pairs; 30 cannot happen
        for path in paths(my_agent, "transitions"):
            print(path)

    Args:
        graph: The graph; or a preset or an agent, with its behavior.
        cover: The coverage criterion: ``transitions``; ``pairs`` or ``triples`` of consecutive rows; or ``prime``:
            every path of states that visits none twice (a cycle may end where it began) and is not part of a longer
            one (Ammann and Offutt, Introduction to Software Testing, section 7.2.1).
        guardrails: The limits of the runs; by default small ones, which keep paths to a limit short.
        behavior: The behavior of the runs, if ``graph`` is a graph; None allows any.
        structured: Whether the agent has an output type, if ``graph`` is not an agent; None allows both.
        assumptions: What is known about your own guards.

    Raises:
        ConfigurationError: The criterion is unknown, the assumptions name something that does not exist, or ``graph``
            is not a graph, a preset or an agent.
    """
    if cover not in CRITERIA:
        raise ConfigurationError(f"unknown criterion {cover!r}; available: {', '.join(CRITERIA)}")
    source = graph
    graph, own_behavior, own_structured = graph_of(source)
    behavior = own_behavior if behavior is None else behavior
    structured = own_structured if structured is None else structured
    limits = guardrails or small_guardrails(behavior)
    traits = replace(traits_of(source), behavior=behavior, structured=structured)
    space = state_space_for(graph, limits, traits, assumptions)
    required = requirements(graph, cover)
    reached = reachable_configurations(space, required)
    runs = _PathGenerator(space, [each for each in required if reached[each]]).generate()
    return Paths(
        graph,
        cover,
        tuple(Path(i, tuple(graph.transitions[r] for r in rows), limits, behavior) for i, rows in enumerate(runs, 1)),
        len(required),
        tuple(
            Infeasible(requirement_ids(graph, each), infeasibility_reason(space, each, reached))
            for each in required
            if not reached[each]
        ),
    )


_Node = tuple[Configuration, Requirement]
"""A configuration, and the longest suffix of the last transitions that is a prefix of a requirement."""


class _PathGenerator:
    """Generates paths one after the other; each goes from one uncovered requirement to the nearest next one.

    Requirements that end a run are left for last: each needs a path of its own anyway.
    """

    def __init__(self, space: StateSpace, possible: list[Requirement]) -> None:
        self._space = space
        self._uncovered = dict.fromkeys(possible)
        self._prefixes = {requirement[:n] for requirement in possible for n in range(len(requirement) + 1)}
        labels = {row: label for requirement in possible for label in requirement for row in label}
        self._labels = [labels.get(i, (i,)) for i in range(len(space.graph.transitions))]
        finals = {spec.name for spec in space.graph.states if spec.final}
        self._final_rows = {i for i, t in enumerate(space.graph.transitions) if t.target in finals}
        self._next_suffixes: dict[tuple[Requirement, int], Requirement] = {}
        self._met: dict[Requirement, tuple[Requirement, ...]] = {}

    def generate(self) -> Iterator[tuple[int, ...]]:
        """Every path, as the places of its rows."""
        while self._uncovered:
            yield self._generate_one()

    def _generate_one(self) -> tuple[int, ...]:
        here: _Node = (self._space.initial, ())
        rows: list[int] = []
        while here[0][0] not in self._space.finals:
            middle = len(rows) < MAX_PATH_LENGTH and any(
                requirement[-1][0] not in self._final_rows for requirement in self._uncovered
            )
            part = self._search(here, may_end=False) if middle else None
            for row, node in part or self._search(here, may_end=True) or self._search(here, to_end=True) or ():
                rows.append(row)
                here = node
                for requirement in self._requirements_met(node[1]):
                    self._uncovered.pop(requirement, None)
        return tuple(rows)

    def _advance(self, seen: Requirement, row: int) -> Requirement:
        """The longest suffix of the transitions, after one more, that is a prefix of a requirement."""
        if (seen, row) not in self._next_suffixes:
            ending = (*seen, self._labels[row])
            while ending not in self._prefixes:
                ending = ending[1:]
            self._next_suffixes[seen, row] = ending
        return self._next_suffixes[seen, row]

    def _requirements_met(self, seen: Requirement) -> tuple[Requirement, ...]:
        """The requirements that have just been met."""
        if seen not in self._met:
            endings = (seen[i:] for i in range(len(seen)))
            self._met[seen] = tuple(e for e in endings if e in self._uncovered)
        return self._met[seen]

    def _search(self, start: _Node, *, may_end: bool = True, to_end: bool = False) -> list[tuple[int, _Node]] | None:
        """The shortest way to an uncovered requirement, or to the end of the run; None if there is none."""
        back: dict[_Node, tuple[_Node, int] | None] = {start: None}
        todo = deque([start])
        while todo:
            node = todo.popleft()
            for row, config in self._space.moves(node[0]):
                if row in self._final_rows and not may_end:
                    continue
                then = (config, self._advance(node[1], row))
                if then in back:
                    continue
                back[then] = (node, row)
                found = (
                    config[0] in self._space.finals
                    if to_end
                    else any(g in self._uncovered for g in self._requirements_met(then[1]))
                )
                if found:
                    return _trace_back(back, then)
                todo.append(then)
        return None


def _trace_back(back: dict[_Node, tuple[_Node, int] | None], node: _Node) -> list[tuple[int, _Node]]:
    steps: list[tuple[int, _Node]] = []
    while (step := back[node]) is not None:
        steps.append((step[1], node))
        node = step[0]
    return steps[::-1]
