"""What generated paths take for granted: how ``LOOP`` runs with the examples of its guards and the kit's own tools.

Paths are tests and not proofs. A path that is left out is a test less, and one that no run can take is a wrong test.
So they assume more than a proof may (``agentfsm.analysis.graph_assumptions``), such as that a detector of yours reports
a failure that running the same calls again does not help.
"""

from __future__ import annotations

from dataclasses import replace

from agentfsm.analysis.assumptions import Assumptions, GuardAssumption, Update, Variable, iff
from agentfsm.loop import detectors as d
from agentfsm.loop import guards
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.machine.graph import Guard

__all__ = ["loop_assumptions"]


_ABOUT_LABELS = (
    "nothing",
    "iteration_limit",
    "time_limit",
    "other_limit",
    "loop",
    "tool_failure",
    "other",
    "approval",
    "doubt",
    "question",
)


def budget_counters(g: AgentGuardrails, calls: int) -> tuple[Variable, ...]:
    """The counters on which the length of a run depends. A search prefers those declared first."""
    limits = "about == iteration_limit or about == time_limit or about == other_limit"
    return (
        Variable("steps", g.step_limit + 1, (Update("* -> pre_step", 1),), start=1),
        Variable(
            "calls",
            calls,
            (
                Update("post_llm.tool_calls", to=tuple(range(1, calls + 1))),
                *(Update(f"* -> {state}", to=(0,)) for state in ("pre_step", "call_llm", "recover", "terminal")),
                Update("post_llm.*", to=tuple(range(calls + 1))),
                Update("post_tool.question_asked", to=(0,)),
                *(
                    Update("recover.retry_tool", to=tuple(range(1, ran + 1)), when=f"ran == {ran}")
                    for ran in range(1, calls + 1)
                ),
                Update("recover.retry_tool", to=(1,)),
                Update("dispatch_tool.approval_required", -1, when="allowed == 1"),
                Update("dispatch_tool.otherwise", to=(0,), when="together == 1"),
                Update("dispatch_tool.otherwise", -1),
            ),
        ),
        Variable(
            "tool_retries",
            g.max_tool_retries,
            (
                Update("post_llm.*", to=(0,)),
                *(Update(f"* -> {state}", to=(0,)) for state in ("pre_step", "call_llm", "terminal")),
                Update("recover.retry_tool", 1),
            ),
        ),
        Variable(
            "iterations",
            g.max_iterations or 0,
            (Update("* -> call_llm", 1), Update("suspended.replied", to=(0,), when="about == iteration_limit")),
        ),
        Variable("continues", g.max_continues, (Update("suspended.replied", 1, when=limits),)),
        Variable("about", labels=_ABOUT_LABELS, updates=_ABOUT_UPDATES),
    )


_ABOUT_UPDATES = (
    Update("*.iteration_limit -> recover", to=("iteration_limit",)),
    Update("*.time_limit -> recover", to=("time_limit",)),
    Update("*.token_limit -> recover", to=("other_limit",)),
    Update("*.cost_limit -> recover", to=("other_limit",)),
    Update("*.loop_detected -> recover", to=("loop",)),
    Update("*.tool_error -> recover", to=("tool_failure",)),
    Update("*.environment_error -> recover", to=("tool_failure",)),
    Update("* -> recover", to=("other",)),
    Update("dispatch_tool.approval_required", to=("approval",)),
    Update("dispatch_tool.in_doubt", to=("doubt",)),
    Update("post_tool.question_asked", to=("question",)),
    Update("recover.ask_user"),  # unchanged
    Update("recover.*", to=("nothing",)),
    Update("suspended.*", to=("nothing",)),
)


def mode_counters(calls: int) -> tuple[Variable, ...]:
    """The counters that decide which moves are possible, but not how many."""
    return tuple(
        replace(counter, budget=False)
        for counter in (
            # tokens and cost: spent by a reply, noticed at the next check, never refunded
            Variable(
                "fresh",
                updates=(
                    *(Update(f"call_llm.{x}") for x in ("transient_provider", "provider_error", "context_overflow")),
                    Update("call_llm.*", to=(1,)),
                    *(Update(f"pre_step.{x}", to=(0,)) for x in ("cost_limit", "no_progress", "otherwise")),
                ),
            ),
            Variable("tokens", updates=(Update("*.token_limit", to=(1,)),)),
            Variable("cost", updates=(Update("*.cost_limit", to=(1,)),)),
            Variable(
                "late",
                updates=(
                    Update("*.time_limit", to=(1,)),
                    Update("suspended.replied", to=(0,), when="about == time_limit"),
                ),
            ),
            # the current batch, and the next call in it
            Variable(
                "ran",
                calls,
                (
                    *(Update(on, to=(0,)) for on in (*_ENDS_BATCH, "recover.retry_tool")),
                    Update("dispatch_tool.otherwise", 1),
                ),
            ),
            Variable("asked", updates=(*_reset_on(_ENDS_BATCH), Update("dispatch_tool.approval_required", to=(1,)))),
            Variable("doubted", updates=(*_reset_on(_ENDS_BATCH), Update("dispatch_tool.in_doubt", to=(1,)))),
            Variable("allowed", updates=(*_reset_on(_ENDS_CALL), Update("suspended.approval_decided", to=(1,)))),
            Variable(
                "gated",
                updates=(
                    *_reset_on((*_ENDS_CALL, "dispatch_tool.in_doubt")),
                    Update("dispatch_tool.approval_required", to=(1,)),
                ),
            ),
            Variable(  # approvals for one call after another, which happens only for calls that run in parallel
                "together",
                updates=(
                    *_reset_on(_ENDS_CALL),
                    Update("dispatch_tool.approval_required", to=(1,), when="allowed == 1"),
                ),
            ),
            # the effects of earlier replies
            Variable("errors", updates=(*_ERROR_UPDATES,)),
            Variable(
                "repeatable",
                updates=(
                    Update("post_llm.tool_calls", to=(1,)),
                    Update("suspended.replied", to=(0,), when="about == loop"),
                ),
            ),
        )
    )


_ENDS_BATCH = ("* -> pre_step", "* -> call_llm", "post_llm.*")
_ENDS_CALL = (*_ENDS_BATCH, "post_tool.*")


def _reset_on(rows: tuple[str, ...]) -> tuple[Update, ...]:
    return tuple(Update(on, to=(0,)) for on in rows)


_ERROR_UPDATES = (
    *(Update(on, to=(0,)) for on in ("* -> terminal", "post_llm.* -> recover", "pre_step.no_progress -> recover")),
    *(
        Update(f"post_tool.{name} -> recover", to=(1,))
        for name in (
            "ambiguous_input",
            "scope_too_large",
            "capability_gap",
            "kernel_invalidated",
            "unknown_tool",
            "invalid_arguments",
            "environment_error",
            "tool_error",
        )
    ),
    Update("post_tool.*", to=(0,)),
)


CALLS_PER_REPLY = 4
"""The assumed maximum number of tool calls in a reply, unless given; no guardrail bounds it."""


def loop_assumptions(
    guardrails: AgentGuardrails,
    behavior: Behavior | None = None,
    *,
    structured: bool | None = None,
    calls_per_reply: int = CALLS_PER_REPLY,
) -> Assumptions:
    """The assumptions about the loop's guards under given limits.

    Args:
        guardrails: The limits.
        behavior: The behavior of the preset; None makes no assumption that only some behaviors meet.
        structured: Whether the agent has an output type; None makes no assumption about it.
        calls_per_reply: The maximum number of tool calls in a reply.
    """
    single = behavior is not None and behavior.envelope
    calls = 1 if single else calls_per_reply
    return Assumptions(
        (*budget_counters(guardrails, calls), *mode_counters(calls)),
        (
            *_limit_guards(guardrails),
            *_batch_guards(guardrails, single),
            *_human_reply_guards(guardrails),
            *_behavior_guards(behavior, structured),
        ),
    )


def _limit_guards(g: AgentGuardrails) -> tuple[GuardAssumption, ...]:
    no_grace = not g.finalize_grace_s
    return (
        iff(d.runaway, f"steps > {g.step_limit}", f"it ends a run at step {g.step_limit + 1}"),
        iff(d.iteration_limit, "never", "max_iterations is not set")
        if g.max_iterations is None
        else iff(
            d.iteration_limit,
            f"iterations >= {g.max_iterations}",
            f"it holds exactly after {g.max_iterations} model calls",
        ),
        iff(d.time_limit, "never", "max_execution_time_s is not set")
        if g.max_execution_time_s is None
        else GuardAssumption(
            d.time_limit, must="late == 1" if no_grace else "never", why="a time limit that has passed stays passed"
        ),
        _budget_guard(d.token_limit, "tokens", "max_tokens", g.max_tokens is None),
        _budget_guard(d.cost_limit, "cost", "max_cost_usd", g.max_cost_usd is None),
        GuardAssumption("pre_step.no_progress", may="steps > 1", why="there is no reply before the first step"),
    )


def _budget_guard(guard: Guard, counter: str, field: str, unset: bool) -> GuardAssumption:
    if unset:
        return iff(guard, "never", f"{field} is not set")
    return GuardAssumption(
        guard,
        may=f"{counter} == 1 or fresh == 1",
        must=f"{counter} == 1",
        why="only a reply spends it, and it is never refunded",
    )


def _batch_guards(g: AgentGuardrails, single: bool) -> tuple[GuardAssumption, ...]:
    rerun = "a call that is run again names a known tool and has valid arguments"
    sequential = "only calls that run in parallel need approval one after another, and this call does not"
    cannot_run = "no approval is requested for a call that cannot run"
    never_fail = "only a failed call is run again, and these never fail"
    earlier = "gated == 0" if single else "gated == 0 or ran > 1"  # otherwise it was an earlier call of the batch
    retryable = f"about == tool_failure and tool_retries < {g.max_tool_retries}"
    return (
        iff(guards.calls_pending, "calls > 0", "it holds exactly while calls of the batch have no result"),
        GuardAssumption(
            guards.retry_tool,
            may=retryable + (" and doubted == 0" if single else ""),
            why="only tool_error and environment_error of an idempotent tool are fixed by running it again, "
            f"{g.max_tool_retries} time(s)",
        ),
        GuardAssumption(
            guards.in_doubt,
            may="tool_retries == 0",
            why="only idempotent calls are run again, and these are never in doubt",
        ),
        GuardAssumption(guards.in_doubt, may="together == 0", why=sequential),
        GuardAssumption(
            guards.approval_required,
            may="allowed == 0 or calls > 1 and tool_retries == 0",
            why="an approved call needs no second approval, and no other call is pending",
        ),
        GuardAssumption(
            guards.approval_required,
            may="asked == 0 or tool_retries == 0",
            why="an approved call needs no second approval when it is run again",
        ),
        *(
            GuardAssumption(guard, may=may, why=why)
            for guard in (d.unknown_tool, d.invalid_arguments)
            for may, why in (("tool_retries == 0", rerun), (earlier, cannot_run))
        ),
        *(
            GuardAssumption(guard, may="tool_retries == 0", why=never_fail)
            for guard in (guards.question_asked, guards.declared_unable)
        ),
        *(
            GuardAssumption(guard, may="together == 0", why=sequential)
            for guard in (d.unknown_tool, guards.question_asked)
        ),
        GuardAssumption(guards.declared_unable, may="together == 0", why=sequential),
        *(_single_call_guards() if single else ()),
    )


def _single_call_guards() -> tuple[GuardAssumption, ...]:
    """If a reply makes at most one call, everything that happens to a batch happens to that call."""
    return (
        *(
            GuardAssumption(
                guard, may="asked == 0 and doubted == 0", why="no approval is requested for a call that cannot run"
            )
            for guard in (d.unknown_tool, d.invalid_arguments)
        ),
        GuardAssumption(d.repeated_error, may="errors == 1", why="a single call repeats no error"),
        GuardAssumption(d.loop_detected, may="repeatable == 1", why="a single call repeats none"),
    )


def _human_reply_guards(g: AgentGuardrails) -> tuple[GuardAssumption, ...]:
    one_kind = "a run waits for one kind of reply at a time"
    within_limits = "about != iteration_limit and about != time_limit and about != other_limit"
    return (
        GuardAssumption(
            guards.ask_user,
            may=f"{within_limits} or continues < {g.max_continues}",
            why=f"a spent budget can be extended {g.max_continues} time(s)",
        ),
        GuardAssumption(guards.approval_decided, may="about == approval", why=one_kind),
        GuardAssumption(guards.doubt_settled, may="about == doubt", why=one_kind),
        GuardAssumption(guards.replied, may="about != approval and about != doubt", why=one_kind),
    )


def _behavior_guards(behavior: Behavior | None, structured: bool | None) -> tuple[GuardAssumption, ...]:
    if behavior is None:
        return ()
    assumptions: list[GuardAssumption] = []
    if not behavior.control_tools:
        why = "the control tools are not registered"
        assumptions += [iff(guard, "never", why) for guard in (guards.question_asked, guards.declared_unable)]
    if not behavior.text_is_answer:
        assumptions.append(GuardAssumption("post_llm.otherwise", may="never", why="a text reply is not an answer here"))
    elif behavior.envelope:
        assumptions.append(GuardAssumption("post_llm.no_progress", may="never", why="an envelope is never empty"))
    free_form = structured is False or not behavior.text_is_answer
    if free_form and not behavior.envelope and behavior.missing_call == "no_progress":
        assumptions.append(iff(d.output_malformed, "never", "replies have no required format here"))
    return tuple(assumptions)
