"""What generated paths take for granted: what is known of every run, made finer by what the testing kit does itself.

Paths are tests and not proofs. A path that is left out is a test less, and one that no run can take is a wrong test.
So to what a proof may assume (``agentfsm.analysis.loop_assumptions``) they add how the kit's model, tools and people
behave: only replies spend tokens and money, a reply makes at most two calls, and running a call again does not fix
what a detector of yours reports. Rows are known by the effects of their states and by their guards' functions, never
by names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from inspect import unwrap
from itertools import combinations
from typing import Any

from agentfsm.analysis.assumptions import Assumptions, GuardAssumption, Update, Variable
from agentfsm.analysis.loop_assumptions import AgentTraits, graph_assumptions
from agentfsm.loop import detectors as d
from agentfsm.loop import guards
from agentfsm.loop.detectors import Example
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.outcomes import CALL_MODEL, CHECK_BUDGETS, CHOOSE_RECOVERY, JUDGE_RESULTS, PARSE_REPLY, RUN_CALLS
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import Graph, Guard, StateSpec, Transition


def loop_guard(row: Transition) -> Guard | None:
    """The guard of a row; or the loop's own, if the row's wraps one of these (``functools.wraps``)."""
    if row.guard is None or row.guard in BUILT_IN_GUARDS:
        return row.guard
    innermost: Guard = unwrap(row.guard, stop=lambda guard: guard in BUILT_IN_GUARDS)
    return innermost if innermost in BUILT_IN_GUARDS else row.guard


def merged_start(examples: Iterable[Example]) -> dict[str, Any] | None:
    """The metadata, tags and actor that fit all of some examples, by field; None if they exclude each other."""
    metadata: dict[str, Any] = {}
    tags: dict[str, None] = {}
    actor: Any = None
    for each in examples:
        given = each.metadata or {}
        if any(metadata.get(name, value) != value for name, value in given.items()):
            return None
        if None not in (actor, each.actor) and actor != each.actor:
            return None
        metadata |= given
        tags |= dict.fromkeys(each.tags)
        actor = each.actor if actor is None else actor
    return {"metadata": metadata or None, "tags": tuple(tags), "actor": actor}


def _is_start(example: Example) -> bool:
    """Whether an example says how the run is started, and nothing else."""
    given = bool(example.metadata or example.tags or example.actor)
    return given and replace(example, metadata=None, tags=(), actor=None) == Example()


def path_assumptions(graph: Graph, guardrails: AgentGuardrails, traits: AgentTraits) -> Assumptions:
    """What is assumed of the runs of a graph for which the kit writes the replies, the results and the answers."""
    plain = _with_loop_guards(graph)
    known = graph_assumptions(plain, guardrails, replace(traits, scripted=True))
    kit = _KitAssumptions(plain, known)
    found = Assumptions(
        (*map(kit.refined, known.counters), *kit.variables()),
        (*known.guards, *kit.guards()),
    )
    return found if plain is graph else _renamed(found, plain, graph)


class _KitAssumptions:
    """Says what the kit adds to what is known about the rows of a graph."""

    def __init__(self, graph: Graph, known: Assumptions) -> None:
        self._graph = graph
        self._rows = graph.transitions
        self._known = {variable.name for variable in known.counters}
        self._constant = {guard: f"constant_{number}" for number, guard in enumerate(self._start_examples())}

    def _start_examples(self) -> dict[Guard, Example]:
        """The guards that depend only on how a run is started, as far as their examples tell; each with the first."""
        found: dict[Guard, Example] = {}
        spending = {row.guard for row in self._rows if row.spends}  # they need not be taken where they hold
        for guard in dict.fromkeys(row.guard for row in self._rows if row.guard is not None):
            examples: tuple[Example, ...] = getattr(guard, "fires_on", ())
            if examples and guard not in spending and all(map(_is_start, examples)):
                found[guard] = examples[0]
        return found

    def _source(self, row: Transition) -> StateSpec:
        return self._graph.spec(row.source)

    def _leaving(self, effect: EffectSpec, *only: Guard) -> Iterator[Transition]:
        """The rows of the states with an effect; only those with one of some guards, if any are given."""
        return (r for r in self._rows if self._source(r).effect is effect and (not only or r.guard in only))

    def _into_recovery(self, row: Transition) -> bool:
        return self._graph.spec(row.target).effect is CHOOSE_RECOVERY

    def refined(self, variable: Variable) -> Variable:
        """A variable, with what the kit knows better about the rows that change it."""
        updates: Iterable[Update] = variable.updates
        if variable.name == "fresh":
            free = {str(row) for row in self._leaving(CALL_MODEL, *_FAILED_CALLS)}
            free |= {str(row) for row in self._rows if not isinstance(self._source(row).effect, EffectSpec)}
            updates = (each for each in updates if each.on not in free)
        elif variable.name == d.ITERATIONS.name:  # the kit's people extend by the default
            granting = {str(row) for row in self._rows if row.extends}
            updates = (replace(u, to=u.to[:1]) if u.on in granting else u for u in updates)
        elif variable.name in ("tokens", "cost"):  # the first example of each limit outlasts all that people grant
            granting = {str(row) for row in self._rows if row.extends}
            updates = (each for each in updates if each.on not in granting)
        elif variable.name == "about":
            failing = {str(row) for row in self._rows if self._into_recovery(row)}
            updates = (replace(u, to=("other",)) if u.on in failing and len(u.to) > 1 else u for u in updates)
        elif variable.name in ("pending", "ran"):
            settled = (
                r for r in self._rows if self._source(r).waits and self._graph.spec(r.target).effect is RUN_CALLS
            )
            ours = (r for r in self._leaving(RUN_CALLS) if r.guard is None or r.guard in BUILT_IN_GUARDS)
            exact = {str(row) for row in (*ours, *settled)}  # a user's own guard may hold before or after a call runs
            updates = [*(each for each in updates if each.on not in exact), *self._one_by_one(variable.name)]
        return replace(variable, updates=tuple(updates))

    def _one_by_one(self, name: str) -> Iterator[Update]:
        """One call runs at a time, unless one call after another had to wait for approval: these run together."""
        for row in self._leaving(RUN_CALLS):
            if row.guard is None and name == "ran":
                yield Update.of(row, 1)
            elif row.guard is None:
                if "together" in self._known:
                    yield Update.of(row, to=(0,), when="together == 1")
                yield Update.of(row, -1)
            elif row.guard is guards.approval_required and name == "pending" and "allowed" in self._known:
                yield Update.of(row, -1, when="allowed == 1")

    def variables(self) -> Iterator[Variable]:
        """The variables that only the kit has."""
        later = [
            *(Update.of(row, to=(0,)) for row in self._leaving(CALL_MODEL)),
            *(Update.of(row, to=(1,)) for row in self._rows if row.guard in (guards.calls_pending, guards.in_doubt)),
        ]
        yield Variable("later", updates=tuple(later), budget=False)
        yield Variable("errors", updates=tuple(self._errors()), budget=False)
        for guard, name in self._constant.items():
            yield Variable(
                name, updates=tuple(self._evaluated(guard)), labels=("unknown", "holds", "never"), budget=False
            )
        if any(row.guard is guards.escalated for row in self._rows):
            changes: dict[Guard | None, int] = {guards.escalated: 1, guards.approval_required: 0}
            raised = (Update.of(row, to=(changes[row.guard],)) for row in self._rows if row.guard in changes)
            yield Variable("raised", updates=tuple(raised), budget=False)

    def _evaluated(self, guard: Guard) -> Iterator[Update]:
        """What is known of a guard once a row was taken that has it, or that comes after one that has it."""
        for spec in self._graph.states:
            evaluated = False
            for row in self._graph.rows(spec.name):
                if row.guard is guard:
                    evaluated = True
                    yield Update.of(row, to=("holds",))
                elif evaluated:
                    yield Update.of(row, to=("never",))

    def _errors(self) -> Iterator[Update]:
        """Whether the last batch failed with an error that the next can repeat."""
        for row in self._leaving(JUDGE_RESULTS):
            if self._into_recovery(row) and row.guard in _REPEATABLE_FAILURES:
                yield Update.of(row, to=(1,), when=self._nobody_asked())
            yield Update.of(row, to=(0,))
        forgetting = (*self._leaving(PARSE_REPLY), *self._leaving(CHECK_BUDGETS, d.no_progress))
        yield from (Update.of(row, to=(0,)) for row in forgetting if self._into_recovery(row))

    def _nobody_asked(self) -> str:
        """The condition that no call of the batch waited for a person."""
        known = [f"{name} == 0" for name in ("asked", "doubted") if name in self._known]
        return " and ".join(known) or "always"

    def guards(self) -> Iterator[GuardAssumption]:
        """What only the kit assumes about guards."""
        for guard, name in self._constant.items():
            why = "it depends only on how the run was started"
            yield GuardAssumption(guard, may=f"{name} != never", must=f"{name} == holds", why=why)
        for (one, example), (other, rival) in combinations(self._start_examples().items(), 2):
            if merged_start((example, rival)) is None:
                why = "no run is started as both need it"
                yield GuardAssumption(one, may=f"{self._constant[other]} != holds", why=why)
                yield GuardAssumption(other, may=f"{self._constant[one]} != holds", why=why)
        for row in self._rows:
            if row.guard is guards.calls_pending and "pending" in self._known:
                why = "a reply makes fewer calls than a batch may have"
                yield GuardAssumption(row.id, must="pending > 0", why=why)
            elif row.guard is guards.escalated:
                yield GuardAssumption(row.id, may="raised == 0", why="a request is escalated once")
            elif row.guard in (d.token_limit, d.cost_limit):
                why = "once a reply has spent the budget, its later calls are not run"
                yield GuardAssumption(row.id, may="later == 0", why=why)
            elif row.guard is d.repeated_error:
                why = "equal errors of one batch are one"
                yield GuardAssumption(row.id, may="errors == 1", why=why)
                yield GuardAssumption(row.id, may=self._nobody_asked(), why=why)


_FAILED_CALLS = (d.transient_provider, d.provider_error, d.context_overflow)

_REPEATABLE_FAILURES = (
    d.ambiguous_input,
    d.scope_too_large,
    d.capability_gap,
    d.kernel_invalidated,
    d.unknown_tool,
    d.invalid_arguments,
    d.environment_error,
    d.tool_error,
)


def _with_loop_guards(graph: Graph) -> Graph:
    """A graph with the loop's guards in place of those that wrap them; the same graph if there are none."""
    wrapped = {row.guard: loop_guard(row) for row in graph if row.guard is not None}
    twice = Counter((row.source, loop_guard(row)) for row in graph)
    rows = tuple(
        row if twice[row.source, loop_guard(row)] > 1 else replace(row, guard=loop_guard(row)) for row in graph
    )
    if all(row.guard is mine.guard for row, mine in zip(graph, rows, strict=True)):
        return graph
    return replace(graph, transitions=rows, first=tuple(wrapped.get(each) or each for each in graph.first))


def _renamed(assumptions: Assumptions, old: Graph, new: Graph) -> Assumptions:
    """Assumptions about the rows of a graph, for one whose rows differ in the names of their guards."""
    names: dict[object, str] = {}
    for row, renamed in zip(old, new, strict=True):
        names |= {row.id: renamed.id, str(row): str(renamed)}
    return Assumptions(
        tuple(
            replace(v, updates=tuple(replace(u, on=names.get(u.on, u.on)) for u in v.updates))
            for v in assumptions.counters
        ),
        tuple(replace(k, guard=names.get(k.guard, k.guard)) for k in assumptions.guards),
    )
