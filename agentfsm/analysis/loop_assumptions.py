"""The model of a graph: what its declaration says about its runs, and what is known about the loop's own functions.

Two kinds of things are known. What the *engine* enforces holds for every graph: declared counters, what rows spend and
refill, and guards that are made from counters. What the loop's *own* effects and guards do is bound to these functions
and to the rows that they rely on, never to a name: a user's guard may hold or not at any time, a user's state may do
anything, and where a row on which something relies is missing or in another order, it is not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from agentfsm.analysis.assumptions import Assumptions, GuardAssumption, Update, Variable, iff
from agentfsm.analysis.liveness import ExportedModel
from agentfsm.loop import detectors as d
from agentfsm.loop import guards
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.outcomes import (
    CALL_MODEL,
    CHECK_BUDGETS,
    CHOOSE_RECOVERY,
    CLOSES_BATCH,
    JUDGE_RESULTS,
    PARSE_REPLY,
    RUN_CALLS,
)
from agentfsm.loop.transition_table import BUILT_IN_GUARDS, LOOP
from agentfsm.machine.declaration import Counter, EffectSpec, Exhausted, Guard, StateSpec, Transition
from agentfsm.machine.graph import Graph


@dataclass(frozen=True, slots=True)
class AgentTraits:
    """What is known about the agent that runs a graph.

    Attributes:
        behavior: The behavior of its preset; None if it may have any.
        structured: Whether it has an output type; None if that is not known.
        sub_agents: Whether a tool of it may be a sub-agent, or ask a person in the middle of its work.
        secrets: Whether a tool of it may take secret arguments.
        fallbacks: Whether its model may make several calls for one reply.
        parallel: Whether calls of its tools may run in parallel.
        asks: Whether a tool of it may ask the user; None if that follows from its behavior.
        gives_up: Whether a tool of it may declare that the task cannot be done; None if that follows from its behavior.
        scripted: Whether the testing kit plays its model, its tools and people, so that calls behave the same whatever
            the rows are.
        certain: Whether all this was read from an agent; otherwise it is listed as an assumption.
    """

    behavior: Behavior | None = None
    structured: bool | None = None
    sub_agents: bool = False
    secrets: bool = False
    fallbacks: bool = False
    parallel: bool = True
    asks: bool | None = None
    gives_up: bool | None = None
    scripted: bool = False
    certain: bool = False

    @property
    def may_ask(self) -> bool:
        """Whether a tool may ask the user."""
        return self.sub_agents or (self._has_control_tools if self.asks is None else self.asks)

    @property
    def may_give_up(self) -> bool:
        """Whether a tool may declare that the task cannot be done."""
        return self._has_control_tools if self.gives_up is None else self.gives_up

    @property
    def _has_control_tools(self) -> bool:
        return self.behavior is None or self.behavior.control_tools


def graph_assumptions(graph: Graph, guardrails: AgentGuardrails, traits: AgentTraits | None = None) -> Assumptions:
    """What is known about the runs of a graph under given limits.

    Args:
        graph: The graph.
        guardrails: The limits of its runs.
        traits: What is known about the agent; by default only what holds for an agent without sub-agents and without
            tools that take secret arguments.
    """
    known = traits or AgentTraits()
    builder = _VariableBuilder(graph, guardrails, known)
    variables = (*builder.counters(), *builder.modes())
    return Assumptions(variables, tuple(_GuardReader(graph, guardrails, known).guards())).relevant()


def makes_unseen_calls(graph: Graph, traits: AgentTraits) -> bool:
    """Whether more model calls may be made than rows show: by own states, by sub-agents, and to fall back."""
    own = any(callable(spec.effect) and not spec.final for spec in graph.states)
    return not traits.scripted and (traits.sub_agents or traits.fallbacks or own)


def exported_model(
    graph: Graph,
    guardrails: AgentGuardrails | None = None,
    traits: AgentTraits | None = None,
    assumptions: Assumptions | None = None,
) -> ExportedModel:
    """What is known about the runs of a graph, for exports such as ``agentfsm.diagrams.promela.promela_model``.

    Args:
        graph: The graph.
        guardrails: The limits of its runs; by default those of ``AgentGuardrails()``.
        traits: What is known about the agent that runs it.
        assumptions: Assumptions about your own guards.
    """
    known = graph_assumptions(graph, guardrails or AgentGuardrails(), traits)
    return ExportedModel(graph, known + (assumptions or Assumptions()))


# -- rows, by what they are and not by their names ----------------------------------------------------


_LIMIT_LABELS = ("iteration_limit", "time_limit", "other_limit")

_ABOUT_LABELS = ("other", *_LIMIT_LABELS, "tool_failure", "approval", "doubt", "call")
"""What recovery is about, or what a run waits for; ``call``: a question within a call, which then continues."""

_FAILURE_LABELS = ("other", *_LIMIT_LABELS, "tool_failure")

_FAILURES: dict[Guard, str] = {
    d.runaway: "iteration_limit",
    d.iteration_limit: "iteration_limit",
    d.time_limit: "time_limit",
    d.token_limit: "other_limit",
    d.cost_limit: "other_limit",
    d.tool_error: "tool_failure",
    d.environment_error: "tool_failure",
    **dict.fromkeys(
        (
            d.no_progress,
            d.loop_detected,
            d.transient_provider,
            d.provider_error,
            d.context_overflow,
            d.output_truncated,
            d.output_refused,
            d.output_malformed,
            d.policy_violation,
            d.repeated_error,
            d.ambiguous_input,
            d.scope_too_large,
            d.capability_gap,
            d.kernel_invalidated,
            d.unknown_tool,
            d.invalid_arguments,
        ),
        "other",
    ),
}
"""What each of the loop's own detectors finds. Others may find anything."""


class _RowReader:
    """Says what the rows of a graph are, for what is known about them."""

    def __init__(self, graph: Graph, guardrails: AgentGuardrails, traits: AgentTraits) -> None:
        self.graph = graph
        self.limits = guardrails
        self.traits = traits
        self.many = 1 if guardrails.max_calls_per_reply == 1 else 2
        self.rows = [row for row in graph.transitions if not graph.spec(row.target).final]
        self.mode_rows = [row for row in self.rows if not _keeps_waiting(graph, row)]
        self.may_ask_about_failures = _may_ask_about_failures(graph)
        usual = _batches_as_in_loop(graph) and not (traits.sub_agents or traits.secrets)
        self.batches_as_in_loop = traits.scripted or usual

    def source(self, row: Transition) -> StateSpec:
        return self.graph.spec(row.source)

    def target(self, row: Transition) -> StateSpec:
        return self.graph.spec(row.target)

    def from_effect(self, row: Transition, *effects: EffectSpec) -> bool:
        return self.source(row).effect in effects

    def into_effect(self, row: Transition, *effects: EffectSpec) -> bool:
        return self.target(row).effect in effects

    def into_wait(self, row: Transition) -> bool:
        return self.target(row).waits

    def precedes(self, row: Transition, guard: Guard) -> bool:
        """Whether a row that is taken whenever one of the loop's guards holds comes before a row in the same state."""
        for each in self.graph.rows(row.source):
            if each is row:
                return False
            if each.guard is guard and not _counters_needed(each):
                return True
        return False

    def limit_of(self, counter: Counter) -> int | None:
        limit: int | None = counter.limit if isinstance(counter.limit, int) else getattr(self.limits, counter.limit)
        return limit

    def charged_unseen(self, counter: Counter) -> bool:
        """Whether more may spend a counter than the rows say: calls by own states, sub-agents and fallbacks."""
        return counter.name == d.ITERATIONS.name and makes_unseen_calls(self.graph, self.traits)

    def no_results_when_leaving(self, row: Transition) -> bool:
        """Whether no call of the batch can have a result when a row is taken."""
        return self.from_effect(row, CHECK_BUDGETS, CALL_MODEL) or (
            self.from_effect(row, PARSE_REPLY)
            and all(self.from_effect(each, CALL_MODEL) for each in self.graph if each.target == row.source)
        )

    def from_recovery(self, row: Transition) -> bool:
        return self.from_effect(row, CHOOSE_RECOVERY)

    def closes_batch(self, row: Transition) -> bool:
        return self.into_effect(row, *CLOSES_BATCH)

    def evaluated_by(self, row: Transition, guard: Guard) -> bool:
        return row.guard is guard or self.precedes(row, guard)  # a row is only taken if its guard was evaluated

    def unless_agent(self, why: str, condition: str) -> str:
        """A reason, with the condition on the agent unless it was read from the agent."""
        if self.traits.certain:
            return why
        return f"{why} ({'paths leave out sub-agents and tools that ask' if self.traits.scripted else condition})"

    def _only_read_after_a_reply(self, state: str) -> bool:
        """Whether a state is entered only from model calls that did not fail."""
        failures = (d.transient_provider, d.provider_error, d.context_overflow)
        entries = [row for row in self.graph if row.target == state]
        return state != self.graph.initial and all(
            self.from_effect(row, CALL_MODEL) and row.guard is None and all(self.precedes(row, f) for f in failures)
            for row in entries
        )


class _VariableBuilder(_RowReader):
    """Builds the variables of the model, row by row: counters and modes."""

    def variable(self, name: str, limit: int, effect_of: Callable[[Transition], list[Update]]) -> Variable:
        """A mode variable, from a function that says what a row does to it (nothing by default)."""
        updates = chain.from_iterable(effect_of(row) for row in self.mode_rows)
        return Variable(name, limit, tuple(updates), budget=False)

    def counters(self) -> Iterator[Variable]:
        declared = self.graph.counters
        extensions = () if any(each.name == d.CONTINUES.name for each in declared) else (d.CONTINUES,)
        for counter in (*declared, *extensions):  # extensions are counted whether or not the graph declares it
            limit = self.limit_of(counter)
            cap = 1 if limit is None else limit + 1  # spent once more than the limit: as far as guards can tell
            updates = [u for row in self.rows for u in self._counter_updates(counter, row, cap)]
            start = min(cap, self.graph.states[0].spends.count(counter.name))
            refilled = any(counter.name in row.refills for row in self.rows)
            unseen = self.charged_unseen(counter)
            yield Variable(counter.name, cap, tuple(updates), start=start, accelerated=not refilled, lower_bound=unseen)

    def _counter_updates(self, counter: Counter, row: Transition, cap: int) -> Iterator[Update]:
        name = counter.name
        spent = row.spends.count(name) + self.target(row).spends.count(name)
        refilled = name in row.refills
        if name == d.ITERATIONS.name and self.source(row).effect is CALL_MODEL and not refilled:
            spent += 1  # before the row is taken, which would refill this one too
        if row.extends and self.source(row).waits and not self.into_wait(row):
            if name == d.ITERATIONS.name:  # filled up, or as far as the person says, after what the row spends
                most = cap if counter == d.ITERATIONS else cap + 1  # one of another limit may be left empty
                # where the real value may be larger anyway, the least stands for all
                left = range(1 if self.charged_unseen(counter) else max(most, 1))
                yield Update.of(row, to=tuple(left), when="about == iteration_limit")
            elif name == d.CONTINUES.name:
                for label in _LIMIT_LABELS:
                    when = f"about == {label}"
                    yield (
                        Update.of(row, to=(min(cap, spent + 1),), when=when)
                        if refilled
                        else Update.of(row, spent + 1, when=when)
                    )
        if refilled:
            yield Update.of(row, to=(min(cap, spent),))
        elif spent:
            yield Update.of(row, spent)

    def modes(self) -> Iterator[Variable]:
        yield Variable(
            "about", labels=_ABOUT_LABELS, updates=tuple(chain.from_iterable(map(self._about, self.mode_rows)))
        )
        yield self.variable("pending", self.many, self._pending)
        yield self.variable("ran", self.many, self._ran)
        yield self.variable("rerun", 1, self._rerun)
        yield self.variable("fresh", 1, self._fresh)
        yield self.variable("tokens", 1, lambda row: self._spent(row, d.token_limit))
        yield self.variable("cost", 1, lambda row: self._spent(row, d.cost_limit))
        yield self.variable("late", 1, self._late)
        if self.batches_as_in_loop:
            yield self.variable("asked", 1, lambda row: self._set_in_batch(row, guards.approval_required))
            yield self.variable("doubted", 1, lambda row: self._set_in_batch(row, guards.in_doubt))
            yield self.variable("allowed", 1, self._allowed)
            yield self.variable("gated", 1, self._gated)
            yield self.variable("together", 1, self._together)

    def _about(self, row: Transition) -> list[Update]:
        """What recovery is about, or what a run waits for."""
        if self.into_effect(row, CHOOSE_RECOVERY):
            label = _FAILURES.get(row.guard) if row.guard is not None and not self.source(row).waits else None
            if label is not None:
                return [Update.of(row, to=(label,))]
            known = self.no_results_when_leaving(row)
            return [Update.of(row, to=tuple(x for x in _FAILURE_LABELS if not (known and x == "tool_failure")))]
        if self.into_wait(row):
            return self._about_wait(row)
        return [Update.of(row, to=("other",))] if self.source(row).waits or self.from_recovery(row) else []

    def _about_wait(self, row: Transition) -> list[Update]:
        in_calls = ("call",) if self.traits.sub_agents else ()
        requests: dict[Guard | None, tuple[str, ...]] = {
            guards.approval_required: ("approval",),
            guards.in_doubt: ("doubt",),
            guards.question_asked: ("other", *in_calls),
        }
        if self.source(row).waits or (self.from_recovery(row) and row.guard is guards.ask_user):
            return []
        if row.guard in requests:
            return [Update.of(row, to=requests[row.guard])]
        other = ("other", "approval", "doubt", *in_calls)
        if row.source not in self.may_ask_about_failures:
            return [Update.of(row, to=other)]
        spent = any(d.CONTINUES.name in (*each.spends, *self.target(each).spends) for each in self.rows)
        left = "always" if spent else f"continues < {self.limits.max_continues}"  # as when recovery asked
        return [Update.of(row, to=(*other, *_LIMIT_LABELS), when=left), Update.of(row, to=other)]

    def _pending(self, row: Transition) -> list[Update]:
        """How many calls of the batch have no result; 2 stands for more than one."""
        every = tuple(range(self.many + 1))
        if self.closes_batch(row):
            return [Update.of(row, to=(0,))]
        if self.from_effect(row, CALL_MODEL):
            return [Update.of(row, to=(0,) if self.into_effect(row, PARSE_REPLY) else every)]
        if self.from_effect(row, PARSE_REPLY):
            return [Update.of(row, to=every[1:] if row.guard is guards.tool_calls else every)]
        if self.from_effect(row, RUN_CALLS):
            return list(self._pending_after_calls(row))
        if self.from_recovery(row):
            return list(self._pending_after_recovery(row))
        if self.source(row).waits and not self.into_wait(row):
            if row.guard is guards.approval_decided and not self.traits.sub_agents:
                return []
            if row.guard is guards.replied and not self.traits.sub_agents:
                return [Update.of(row, to=(0,))]
            return [Update.of(row, to=tuple(range(n + 1)), when=f"pending == {n}") for n in every]
        return []

    def _pending_after_calls(self, row: Transition) -> Iterator[Update]:
        if row.guard in (guards.approval_required, guards.in_doubt):
            yield Update.of(row, to=(1, 2), when="pending == 2")
            return
        blocked = not (self.precedes(row, guards.approval_required) and self.precedes(row, guards.in_doubt))
        stays = blocked or self.traits.may_ask
        yield Update.of(row, to=(0, 1) if stays else (0,), when="pending == 1")
        more = stays or self.limits.max_calls_per_reply > 2
        yield Update.of(row, to=(0, 1, 2) if more else (0, 1), when="pending == 2")

    def _pending_after_recovery(self, row: Transition) -> Iterator[Update]:
        if self.into_effect(row, RUN_CALLS):
            for old in range(self.many + 1):
                for ran in range(self.many + 1):
                    again = range(0 if row.guard is not guards.retry_tool else 1, ran + 1)
                    values = sorted({min(self.many, old + n) for n in again} or {old})
                    yield Update.of(row, to=tuple(values), when=f"pending == {old} and ran == {ran}")
        elif self.traits.behavior is None or self.traits.behavior.feedback == "kept":
            for n in range(1, self.many + 1):
                yield Update.of(row, to=(0, n), when=f"pending == {n}")

    def _ran(self, row: Transition) -> list[Update]:
        """How many calls of the batch have run since they were last to run; 2 stands for more than one."""
        every = tuple(range(self.many + 1))
        if self.closes_batch(row) or self.from_effect(row, CALL_MODEL, PARSE_REPLY):
            return [Update.of(row, to=(0,))]
        if self.from_effect(row, RUN_CALLS):
            blocked = row.guard in (guards.approval_required, guards.in_doubt)
            least = 0 if blocked else 1
            return [
                Update.of(row, to=tuple(range(min(n + least, self.many), self.many + 1)), when=f"ran == {n}")
                for n in every
            ]
        if self.from_recovery(row) and self.into_effect(row, RUN_CALLS):
            return [Update.of(row, to=(0,) if self.batches_as_in_loop else every)]
        if self.source(row).waits and row.guard is not guards.approval_decided:
            return [Update.of(row, to=tuple(range(n, self.many + 1)), when=f"ran == {n}") for n in every]
        return []

    def _rerun(self, row: Transition) -> list[Update]:
        """Whether the calls that are to run are run again."""
        if self.closes_batch(row) or self.from_effect(row, CALL_MODEL, PARSE_REPLY):
            return [Update.of(row, to=(0,))]
        return [Update.of(row, to=(1,))] if self.from_recovery(row) and self.into_effect(row, RUN_CALLS) else []

    def _fresh(self, row: Transition) -> list[Update]:
        """Whether tokens and cost were spent since they were last checked."""
        spec = self.source(row)
        if spec.effect is CALL_MODEL or (spec.effect is RUN_CALLS and self.traits.sub_agents) or callable(spec.effect):
            return [Update.of(row, to=(1,))]
        checked = self.evaluated_by(row, d.token_limit) and self.evaluated_by(row, d.cost_limit)
        return [Update.of(row, to=(0,))] if checked else []

    def _spent(self, row: Transition, limit: Guard) -> list[Update]:
        """Whether a limit on tokens or cost is known to be reached; a reply may grant the same amount once more."""
        if row.extends and self.source(row).waits:
            return [Update.of(row, to=(0, 1), when="about == other_limit")]
        return [Update.of(row, to=(1,))] if row.guard is limit else []

    def _late(self, row: Transition) -> list[Update]:
        """Whether the time limit is known to be reached."""
        if row.guard is d.time_limit:
            return [Update.of(row, to=(1,))]
        if row.extends and self.source(row).waits:
            return [Update.of(row, to=(0,), when="about == time_limit")]
        return []

    def _set_in_batch(self, row: Transition, guard: Guard) -> list[Update]:
        if self.closes_batch(row) or self.from_effect(row, PARSE_REPLY):
            return [Update.of(row, to=(0,))]
        return [Update.of(row, to=(1,))] if row.guard is guard else []

    def _ends_call(self, row: Transition) -> bool:
        return self.closes_batch(row) or self.from_effect(row, PARSE_REPLY, JUDGE_RESULTS)

    def _allowed(self, row: Transition) -> list[Update]:
        """Whether the next call is approved."""
        if self._ends_call(row):
            return [Update.of(row, to=(0,))]
        return [Update.of(row, to=(1,))] if row.guard is guards.approval_decided else []

    def _gated(self, row: Transition) -> list[Update]:
        """Whether the last request was for an approval."""
        if self._ends_call(row) or row.guard is guards.in_doubt:
            return [Update.of(row, to=(0,))]
        return [Update.of(row, to=(1,))] if row.guard is guards.approval_required else []

    def _together(self, row: Transition) -> list[Update]:
        """Whether one call after another needed an approval, which happens only to calls that run in parallel."""
        if self._ends_call(row):
            return [Update.of(row, to=(0,))]
        if row.guard is guards.approval_required:
            return [Update.of(row, to=(1,), when="allowed == 1")]
        return []


class _GuardReader(_RowReader):
    """Says what is known about the guard of each row."""

    def guards(self) -> Iterator[GuardAssumption]:
        for state in self.graph.states:
            stops_when_raised = _stops_when_a_guard_raises(self.graph, state)
            for row in self.graph.rows(state.name):
                for each in self._about_row(row):
                    yield each if stops_when_raised else replace(each, must="never")

    def _about_row(self, row: Transition) -> Iterator[GuardAssumption]:
        yield from self._enforced(row)
        if row.guard is None:
            yield from self._about_default_row(row)
        elif row.guard in BUILT_IN_GUARDS:
            yield from self._about_limits(row)
            yield from self._about_replies(row)
            yield from self._about_calls(row)
            if self.batches_as_in_loop:
                yield from self._about_batches(row)

    def _enforced(self, row: Transition) -> Iterator[GuardAssumption]:
        """What the engine enforces for every graph."""
        for counter in self.graph.counters:
            name, limit = counter.name, self.limit_of(counter)
            if limit is None or _keeps_waiting(self.graph, row):  # bounds start over at each wait
                continue
            if name in _counters_needed(row):
                yield GuardAssumption(
                    row.id, may=f"{name} < {limit}", why=f"{name} can be spent {limit} time(s)", enforced=True
                )
        if isinstance(row.guard, Exhausted):
            counter = row.guard.counter
            limit = self.limit_of(counter)
            if limit is None:
                yield iff(row.id, "never", f"{counter.limit} is not set", enforced=True)
            else:
                empty, why = f"{counter.name} >= {limit + row.guard.past}", f"it holds once {counter.name} is spent"
                may = "always" if self.charged_unseen(counter) else empty
                sure = row.guard in BUILT_IN_GUARDS or not row.spends
                yield GuardAssumption(
                    row.id, may=may, must=empty if sure and not row.spends else "never", why=why, enforced=True
                )

    def _about_limits(self, row: Transition) -> Iterator[GuardAssumption]:
        g = self.limits
        if row.guard is d.time_limit:
            if g.max_execution_time_s is None:
                yield iff(row.id, "never", "max_execution_time_s is not set", enforced=True)
            elif not g.finalize_grace_s and not row.spends:
                yield GuardAssumption(row.id, must="late == 1", why="a time limit that has passed stays passed")
        for guard, name, field in ((d.token_limit, "tokens", "max_tokens"), (d.cost_limit, "cost", "max_cost_usd")):
            if row.guard is not guard:
                continue
            if getattr(g, field) is None:
                yield iff(row.id, "never", f"{field} is not set", enforced=True)
            else:
                must = "never" if row.spends else f"{name} == 1"
                why = "only a model call spends it, and only an extension grants more"
                yield GuardAssumption(row.id, may=f"{name} == 1 or fresh == 1", must=must, why=why)
        if row.guard is d.no_progress and self._counts_steps(row.source):
            yield GuardAssumption(row.id, may="steps > 1", why="there is no reply before the first step")

    def _counts_steps(self, state: str) -> bool:
        """Whether only the visits of a state are steps, and no model replies before the first of them."""
        spec = self.graph.spec(state)
        if spec.effect is not CHECK_BUDGETS or tuple(spec.spends) != ("steps",):
            return False
        if any("steps" in other.spends for other in self.graph.states if other is not spec):
            return False
        before, found = set[str](), [self.graph.initial]
        while found:
            name = found.pop()
            if name != state and name not in before:
                before.add(name)
                found += [row.target for row in self.graph.rows(name)]
        return not any(self.graph.spec(name).effect is CALL_MODEL for name in before)

    def _about_replies(self, row: Transition) -> Iterator[GuardAssumption]:
        if self.from_recovery(row) and row.guard is guards.ask_user:
            limits = " and ".join(f"about != {label}" for label in _LIMIT_LABELS)
            most = self.limits.max_continues
            yield GuardAssumption(
                row.id,
                may=f"{limits} or continues < {most}",
                why=f"a spent budget can be extended {most} time(s)",
                enforced=True,
            )
        if self.source(row).waits:
            yield from self._about_answers(row)

    def _about_answers(self, row: Transition) -> Iterator[GuardAssumption]:
        """Which answers a wait can get."""
        in_calls = self.traits.sub_agents  # where any answer may go to a call, which then continues
        why = "a run waits for one kind of reply at a time"
        why = why if in_calls else self.unless_agent(why, "no tool is a sub-agent")
        if _keeps_waiting(self.graph, row):
            yield GuardAssumption(row.id, may="about == approval", why=why)
        elif row.guard is guards.approval_decided:
            answers = ("approval", "doubt", "call") if in_calls else ("approval",)
            yield GuardAssumption(row.id, may=" or ".join(f"about == {each}" for each in answers), why=why)
        elif row.guard is guards.doubt_settled:
            yield GuardAssumption(row.id, may="about == doubt", why=why)
        elif row.guard is guards.replied:
            yield GuardAssumption(row.id, may="about != approval and about != doubt and about != call", why=why)

    def _about_calls(self, row: Transition) -> Iterator[GuardAssumption]:
        traits, guard = self.traits, row.guard
        if self.from_effect(row, JUDGE_RESULTS) and guard is guards.calls_pending:
            must = "never" if row.spends else "pending > 0"
            why = "it holds exactly while calls of the batch have no result"
            yield GuardAssumption(row.id, may="pending > 0", must=must, why=why)
        if self.from_recovery(row) and guard is guards.retry_tool:
            why = "only a tool_error or environment_error of calls that ran is fixed by running them again"
            yield GuardAssumption(row.id, may="about == tool_failure and ran > 0", why=why)
        if guard is guards.question_asked and not traits.may_ask:
            why = self.unless_agent("the control tools are not registered", "no tool is a sub-agent")
            yield iff(row.id, "never", why)
        if guard is guards.declared_unable and not traits.may_give_up:
            yield iff(row.id, "never", "the control tools are not registered")
        behavior = traits.behavior
        if behavior is None or not self.from_effect(row, PARSE_REPLY):
            return
        if guard is d.no_progress and behavior.envelope and behavior.text_is_answer:
            yield iff(row.id, "never", "an envelope is never empty")
        free_form = traits.structured is False or not behavior.text_is_answer
        unread = free_form and not behavior.envelope and behavior.missing_call == "no_progress"
        others_first = self.precedes(row, d.output_truncated) and self.precedes(row, d.output_refused)
        if guard is d.output_malformed and unread and others_first:
            yield iff(row.id, "never", "replies have no required format here")

    def _about_default_row(self, row: Transition) -> Iterator[GuardAssumption]:
        behavior = self.traits.behavior
        if behavior is None or behavior.text_is_answer or not self.from_effect(row, PARSE_REPLY):
            return
        needed = [d.output_malformed, guards.tool_calls]
        needed += [d.no_progress] if behavior.missing_call == "no_progress" else []
        judged = all(self.precedes(row, guard) for guard in needed)
        if judged and self._only_read_after_a_reply(row.source):
            yield GuardAssumption(row.id, may="never", why="a text reply is not an answer here")

    def _about_batches(self, row: Transition) -> Iterator[GuardAssumption]:
        """What holds where batches are run, judged and approved by exactly the rows of ``LOOP``."""
        rerun = "a call that is run again names a known tool and has valid arguments"
        sequential = "only calls that run in parallel need approval one after another, and this call does not"
        cannot_run = "no approval is requested for a call that cannot run"
        never_fail = "only a failed call is run again, and these never fail"
        single = self.many == 1
        earlier = "gated == 0" if single else "gated == 0 or ran > 1"  # otherwise it was an earlier call of the batch
        known: dict[Guard, tuple[tuple[str, str], ...]] = {
            guards.in_doubt: (
                ("rerun == 0", "only idempotent calls are run again, and these are never in doubt"),
                ("together == 0", sequential),
            ),
            guards.approval_required: (
                (
                    "allowed == 0 or pending > 1 and rerun == 0",
                    "an approved call needs no second approval, and no other call is pending",
                ),
                ("asked == 0 or rerun == 0", "an approved call needs no second approval when it is run again"),
            ),
            d.unknown_tool: (("rerun == 0", rerun), (earlier, cannot_run), ("together == 0", sequential)),
            d.invalid_arguments: (("rerun == 0", rerun), (earlier, cannot_run)),
            guards.question_asked: (("rerun == 0", never_fail), ("together == 0", sequential)),
            guards.declared_unable: (("rerun == 0", never_fail), ("together == 0", sequential)),
            guards.retry_tool: (("doubted == 0", "a call that may be run again is never in doubt"),) if single else (),
        }
        condition = "no tool is a sub-agent or takes secret arguments"
        for may, why in known.get(row.guard, ()) if row.guard is not None else ():
            yield GuardAssumption(row.id, may=may, why=self.unless_agent(why, condition))


def _counters_needed(row: Transition) -> frozenset[str]:
    """The counters without which a row does not hold: those that it spends and does not refill."""
    return frozenset(row.spends) - frozenset(row.refills)


def _stops_when_a_guard_raises(graph: Graph, state: StateSpec) -> bool:
    """Whether a guard that raises ends the run by a row that comes before any guard that could decide otherwise."""
    aborting = next((row for row in graph.rows(state.name) if row.ends == "aborted"), None)
    return state.final or (aborting is not None and aborting.guard is guards.aborted)


def _may_ask_about_failures(graph: Graph) -> list[str]:
    """The states in which a run may have a question of recovery, which it drops after a wait or with its batch."""
    found = [str(spec.name) for spec in graph.states if spec.effect is CHOOSE_RECOVERY]
    for state in found:
        for row in graph.rows(state):
            target = graph.spec(row.target)
            if not (target.waits or target.final or target.effect in CLOSES_BATCH) and target.name not in found:
                found.append(str(target.name))
    return found


def _keeps_waiting(graph: Graph, row: Transition) -> bool:
    """Whether a row is one of those that ``with_votes`` adds: it changes who may answer, and nothing else of a run."""
    votes = row.guard in (guards.escalated, guards.vote_recorded)
    return votes and row.source == row.target and graph.spec(row.source).waits and not row.extends


def _batches_as_in_loop(graph: Graph) -> bool:
    """Whether calls are run, judged, approved and run again by rows of ``LOOP``, in its order, and by no others.

    Rows into a final state may be added anywhere, as well as those of ``with_votes``, and detectors that lead to
    recovery after ``calls_pending``.
    """
    own = {spec.effect: spec.name for spec in graph.states if isinstance(spec.effect, EffectSpec)}
    waits = [spec.name for spec in graph.states if spec.waits]
    effects = (RUN_CALLS, JUDGE_RESULTS, CHOOSE_RECOVERY)
    if len(waits) != 1 or any(sum(s.effect is e for s in graph.states) != 1 for e in effects):
        return False
    states = {LOOP.spec(name).effect or "wait": name for name in ("dispatch_tool", "post_tool", "recover")}
    pairs = [(own[e], name) for e, name in states.items() if isinstance(e, EffectSpec)] + [(waits[0], "suspended")]
    names = dict(pairs)
    return all(_rows_as_in_loop(graph, theirs, ours) for theirs, ours in pairs) and _entered_as_in_loop(graph, names)


_NEEDED = {
    "dispatch_tool": (guards.approval_required, guards.in_doubt, None),
    "post_tool": (guards.calls_pending,),
    "recover": (),
    "suspended": (guards.approval_decided, guards.doubt_settled, guards.replied),
}
"""Rows of ``LOOP`` without which nothing is assumed about batches, by the name of their state there."""


def _rows_as_in_loop(graph: Graph, state: str, ours: str) -> bool:
    loop_rows = LOOP.rows(ours)
    order: list[int] = []
    complete = ours != "post_tool"
    for row in graph.rows(state):
        place = next((i for i, each in enumerate(loop_rows) if each.guard is row.guard), None)
        if graph.spec(row.target).final or _keeps_waiting(graph, row):
            continue
        if place is not None and _is_like(graph, row, loop_rows[place]):
            order.append(place)
            complete = complete or row.guard is guards.calls_pending
        elif not (complete and graph.spec(row.target).effect is CHOOSE_RECOVERY and place is None):
            return False
    present = {row.guard for row in graph.rows(state)}
    return order == sorted(order) and all(guard in present for guard in _NEEDED[ours])


def _is_like(graph: Graph, row: Transition, ours: Transition) -> bool:
    """Whether a row leads to a state such as a row of ``LOOP`` does, and is taken whenever that would be."""
    theirs, mine = graph.spec(row.target), LOOP.spec(ours.target)
    leads_alike = (theirs.effect, theirs.waits, theirs.final) == (mine.effect, mine.waits, mine.final)
    return leads_alike and _counters_needed(row) <= _counters_needed(ours)


def _entered_as_in_loop(graph: Graph, names: dict[str, str]) -> bool:
    """Whether the states of batches are entered only by rows that lead to them in ``LOOP``."""
    for row in graph.transitions:
        if row.target not in names or names[row.target] == "recover" or _keeps_waiting(graph, row):
            continue
        if not any(
            each.guard is row.guard
            and LOOP.spec(each.source).effect is graph.spec(row.source).effect
            and names[row.target] == each.target
            for each in LOOP
        ):
            return False
    return True
