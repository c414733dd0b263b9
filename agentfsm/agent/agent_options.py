"""``AgentOptions``: the arguments of an ``Agent`` as they were given, and the checks that they must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfsm.errors import ConfigurationError, GraphError
from agentfsm.loop.approval_rows import check_answer_row, check_undecided_rows, counts_votes
from agentfsm.loop.detectors import no_progress
from agentfsm.loop.guardrails import AgentGuardrails, Behavior, check_counter_limits
from agentfsm.loop.guards import (
    approval_decided,
    approval_required,
    ask_user,
    doubt_settled,
    in_doubt,
    question_asked,
    replied,
)
from agentfsm.loop.history import HistoryPolicy, KeepAll, KeepLast, Summarize
from agentfsm.loop.outcomes import PARSE_REPLY, RUN_CALLS
from agentfsm.loop.presets import Preset
from agentfsm.loop.quorum import Approval
from agentfsm.loop.recovery_policy import RecoveryPolicy
from agentfsm.loop.transition_table import BUILT_IN_GUARDS, LOOP
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import Graph, Guard, State
from agentfsm.runtime.context import Effect
from agentfsm.runtime.effects import EFFECTS
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host, Memory
from agentfsm.runtime.permissions import check_rules, policies_of
from agentfsm.runtime.state_context import custom_effect
from agentfsm.runtime.tools import Tool, with_subagents
from agentfsm.runtime.toolsets import Toolset, takes_run_context

if TYPE_CHECKING:
    from agentfsm.journal.migration import Migration


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The keyword arguments of ``Agent``, as given; see there."""

    tools: Any
    instructions: str | Callable[[Any], Any]
    guardrails: AgentGuardrails | None
    policy: RecoveryPolicy | None
    preset: str | Preset
    graph: Graph | None
    hooks: Iterable[Hook | Observer]
    memory: Memory | None
    output_type: Any
    deps_type: Any
    deps_factory: Callable[[Any], Any] | None
    output_validators: Iterable[Callable[[Any, Any], Any]]
    host: Host | None
    migrations: Iterable[Migration]
    history: HistoryPolicy | None = None


_EXPECTED_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "tools": (
        "a list of functions, as in tools=[look]",
        lambda v: not isinstance(v, (str, bytes)) and (isinstance(v, (Iterable, Toolset)) or takes_run_context(v)),
    ),
    "instructions": ("a string, or a function of the run's context", lambda v: isinstance(v, str) or callable(v)),
    "deps_factory": ("a function of the run's context", lambda v: v is None or callable(v)),
    "guardrails": ("an AgentGuardrails", lambda v: v is None or isinstance(v, AgentGuardrails)),
    "policy": ("an object with decide() and backoff()", lambda v: v is None or has_methods(v, "decide", "backoff")),
    "graph": ("a Graph", lambda v: v is None or isinstance(v, Graph)),
    "migrations": ("a list of migrations, as in migrations=[Migration(old)]", lambda v: isinstance(v, Iterable)),
    "output_validators": ("a list of functions", lambda v: isinstance(v, Iterable) and not isinstance(v, str)),
    "hooks": ("a list of hooks and observers", lambda v: isinstance(v, Iterable)),
    "memory": ("an object with recall() and remember()", lambda v: v is None or has_methods(v, "recall", "remember")),
    "host": ("a Host", lambda v: v is None or isinstance(v, Host)),
    "history": (
        "KeepAll(), KeepLast(...) or Summarize(...)",
        lambda v: v is None or isinstance(v, (KeepAll, KeepLast, Summarize)),
    ),
}
"""For each argument: its expected type, as text and as a predicate."""


def has_methods(value: object, *methods: str) -> bool:
    """Whether an object has these methods."""
    return all(callable(getattr(value, method, None)) for method in methods)


def validate_types(options: AgentOptions) -> None:
    """Check the types of the arguments now: a wrong one would fail late, in the middle of a run.

    Raises:
        ConfigurationError: An argument has the wrong type; the message says what it must be.
    """
    for name in _EXPECTED_TYPES:
        validate_type(name, getattr(options, name))


def validate_type(name: str, value: object) -> None:
    """Check the type of one argument of an agent.

    Raises:
        ConfigurationError: It has the wrong type; the message says what it must be.
    """
    expected, fits = _EXPECTED_TYPES[name]
    if isinstance(value, type):
        raise ConfigurationError(f"{name} must be an object, not the class {value.__name__}")
    if not fits(value):
        raise ConfigurationError(f"{name} must be {expected}, not {type(value).__name__}")


def check_validators(validators: Iterable[Any]) -> tuple[Callable[[Any, Any], Any], ...]:
    """The output validators, after checking that they are functions.

    Raises:
        ConfigurationError: One of them is not a function.
    """
    checked = tuple(validators)
    for each in checked:
        if not callable(each):
            raise ConfigurationError(f"an output validator must be a function of (context, answer), not {each!r}")
    return checked


def check_ending(behavior: Behavior, tools: Mapping[str, Tool]) -> None:
    """Check that some reply of the model can end a run.

    Raises:
        ConfigurationError: Text is not an answer, and no tool ends a run.
    """
    if not behavior.text_is_answer and not any(t.ends_run or t.control in ("done", "unable") for t in tools.values()):
        raise ConfigurationError(
            "no reply could end a run: text is not an answer (text_is_answer=False), and no tool ends one. Add "
            "return_done or a tool made with @tool(ends_run=True), or set control_tools=True"
        )


def check_rows_for_texts(behavior: Behavior, graph: Graph) -> None:
    """Check that a preset's graph does not end a run with a text that its behavior takes for no answer.

    Raises:
        ConfigurationError: No row judges replies without a call, and the last one ends the run as completed.
    """
    if behavior.text_is_answer or behavior.missing_call == "malformed":
        return
    for state in graph.states:
        if state.effect is not PARSE_REPLY:
            continue
        *rows, last = graph.rows(state.name)
        judged = any(row.guard is no_progress or row.guard not in BUILT_IN_GUARDS for row in rows)
        if last.ends == "completed" and not judged:
            raise ConfigurationError(
                f"text is not an answer (text_is_answer=False), and no row of {str(state.name)!r} acts on a reply "
                "without a call, so it would end the run as completed: add the row no_progress of LOOP to the preset's "
                "graph, or set missing_call='malformed'"
            )


def check_agent_graph(graph: Graph, tools: Mapping[str, Tool]) -> Graph:
    """The graph, after checking that it can run an agent with these tools.

    Raises:
        GraphError: It cannot; the error says what is missing.
    """
    effects_by_state(graph)
    if graph.first != LOOP.first:
        raise GraphError(
            "an agent's graph has the rows 'cancelled' and 'aborted' first in every state that is not final",
            graph.name,
            "declare it with Graph(..., first=LOOP.first)",
        )
    for spec in (each for each in graph.states if not each.final):
        for row, ending in zip(graph.rows(spec.name), ("cancelled", "aborted"), strict=False):
            if row.ends != ending:
                raise GraphError(f"{row.name!r} must end the run as {ending}", row.id)
    check_counter_limits(counter for counter in graph.counters if counter not in LOOP.counters)
    if graph.spec(graph.initial).waits:
        raise GraphError(
            "a run cannot start in a state that waits, because nobody has been asked anything",
            graph.initial,
            "let it start in a state whose row leads there",
        )
    for tool in tools.values():
        for state, outcome in missing_rows(graph, tool):
            raise GraphError(
                f"the tool {tool.name!r} may lead to {outcome!r} there, and no row of the state takes that",
                state,
                f"add the row that LOOP has for it, or leave {tool.name!r} out",
            )
    for asks, answered in dict.fromkeys(_answers(tools)):
        check_answer_row(graph, asks, answered)
    for name in (each.name for each in tools.values() if each.may_need_votes):
        if not counts_votes(graph):
            raise GraphError(
                f"a call of {name!r} may need several approvals or escalation, and the graph counts no votes",
                graph.name,
                "give the agent with_votes(graph)",
            )
    for each in tools.values():
        rule = each.requires_approval if isinstance(each.requires_approval, Approval) else None
        if rule is not None or each.may_need_votes:
            check_undecided_rows(graph, each.name, rule)
    return graph


_CONTROL_OUTCOMES = {"ask": "question_asked", "done": "declared_done", "unable": "declared_unable"}


def missing_rows(graph: Graph, tool: Tool) -> Iterator[tuple[str, str]]:
    """The states of a graph that lack a row for what a tool may lead to, and what that is."""
    for outcome in _requested_outcomes(tool):
        for spec in graph.states:
            declared = spec.effect.on_request if isinstance(spec.effect, EffectSpec) else ()
            if outcome in declared and not graph.takes(spec.name, outcome):
                yield str(spec.name), outcome


def _requested_outcomes(tool: Tool) -> Iterator[str]:
    """What a tool may lead to that a graph may lack rows for (``EffectSpec.on_request``)."""
    yield "tool_calls"
    if tool.control is not None:
        yield _CONTROL_OUTCOMES[tool.control]
    elif tool.ends_run:
        yield "declared_done"
    if tool.requires_approval or tool.secret or tool.delegate is not None or tool.asks:
        yield "approval_required"
    if tool.delegate is not None or tool.asks:
        yield "question_asked"


def _answers(tools: Mapping[str, Tool]) -> Iterator[tuple[Guard, Guard]]:
    """The guards of the rows by which an agent may ask somebody, and of those that take the answer."""
    yield ask_user, replied
    for tool in tools.values():
        if tool.control == "ask":
            yield question_asked, replied
        if tool.delegate is not None or tool.asks:
            yield question_asked, approval_decided
        if "approval_required" in _requested_outcomes(tool):
            yield approval_required, approval_decided
        if tool.control is None and not tool.idempotent:
            yield in_doubt, doubt_settled


def effects_by_state(graph: Graph) -> dict[str, Effect]:
    """What runs in each state that does something.

    Raises:
        GraphError: A state has no effect.
    """
    effects: dict[str, Effect] = {}
    for spec in graph.states:
        if spec.final or spec.waits:
            continue
        if isinstance(spec.effect, EffectSpec):
            effects[spec.name] = EFFECTS[spec.effect]
        elif spec.effect is not None:
            effects[spec.name] = custom_effect(spec.effect)
        else:
            raise GraphError("the state has no effect", spec.name, "declare it with StateSpec(..., effect=function)")
    return effects


def check_migrations(migrations: Sequence[Migration], graph: Graph) -> tuple[Migration, ...]:
    """The migrations, after checking that the states and transitions they name exist.

    Raises:
        ConfigurationError: An item is not a migration.
        GraphError: One of them names a state or a transition that does not exist.
    """
    if not all(has_methods(each, "matches", "check") for each in migrations):
        raise ConfigurationError("migrations must be a list of migrations, as in migrations=[Migration(old)]")
    for each in migrations:
        each.check(graph)
    return tuple(migrations)


def check_permissions(hooks: dict[str, tuple[Hook, ...]], tools: Mapping[str, Tool]) -> dict[str, tuple[Hook, ...]]:
    """The hooks, after checking that the permission rules among them can apply to the tools, even to sub-agents'.

    Raises:
        ConfigurationError: A rule can never apply to a tool that it names.
    """
    check_rules(policies_of(hooks), with_subagents(tools))
    return hooks


def hooks_by_state(hooks: Sequence[Hook | Observer], graph: Graph) -> dict[str, tuple[Hook, ...]]:
    """The hooks of each state, in order.

    Raises:
        ConfigurationError: An item is neither a hook nor an observer.
        GraphError: A hook names a state that the graph does not have.
    """
    by_state: dict[str, tuple[Hook, ...]] = {}
    dispatching = {spec.name for spec in graph.states if spec.effect is RUN_CALLS}
    for each in hooks:
        if isinstance(each, Observer):
            continue
        if not isinstance(each, Hook):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise ConfigurationError(f"a hook must be made with @hook(...) or @observer, not {type(each).__name__}")
        if each.at is RUN_CALLS or each.at == State.DISPATCH_TOOL or each.at in dispatching:
            states = [str(State.DISPATCH_TOOL)]  # what checks tool calls checks them wherever one is made
        elif isinstance(each.at, EffectSpec):
            states = [spec.name for spec in graph.states if spec.effect is each.at]
        else:
            states = [graph.spec(each.at).name]
        for state in states:
            by_state[state] = (*by_state.get(state, ()), each)
    return by_state
