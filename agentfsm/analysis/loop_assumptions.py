"""The assumptions about LOOP: its counters, and one entry for each of its guards that is not free.

Whatever policies, tools, hooks and people do is left free, so what is proved of a graph holds for all of
them. Entries are matched by the guard function: your own guard with the same name is free until declared.
"""

from __future__ import annotations

from dataclasses import replace

from agentfsm.analysis.assumptions import Assumptions, Counter, GuardAssumption, Update, iff
from agentfsm.loop import detectors as d
from agentfsm.loop import guards
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.machine.graph import Guard

__all__ = ["CALLS_PER_REPLY", "budget_counters", "loop_assumptions", "mode_counters"]


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


def budget_counters(g: AgentGuardrails, calls: int) -> tuple[Counter, ...]:
    """The counters on which the length of a run depends; a search follows the first that will do."""
    limits = "about == iteration_limit or about == time_limit or about == other_limit"
    return (
        Counter("steps", g.step_limit + 1, (Update("* -> pre_step", 1),), start=1),
        Counter(
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
        Counter(
            "tool_retries",
            g.max_tool_retries,
            (
                Update("post_llm.*", to=(0,)),
                *(Update(f"* -> {state}", to=(0,)) for state in ("pre_step", "call_llm", "terminal")),
                Update("recover.retry_tool", 1),
            ),
        ),
        Counter(
            "iterations",
            g.max_iterations or 0,
            (Update("* -> call_llm", 1), Update("suspended.replied", to=(0,), when="about == iteration_limit")),
        ),
        Counter("continues", g.max_continues, (Update("suspended.replied", 1, when=limits),)),
        Counter("about", labels=_ABOUT_LABELS, updates=_ABOUT_UPDATES),
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
    Update("recover.ask_user"),  # what it is about stays
    Update("recover.*", to=("nothing",)),
    Update("suspended.*", to=("nothing",)),
)


def mode_counters(calls: int) -> tuple[Counter, ...]:
    """What a run remembers that decides which moves are possible, though not how many."""
    return tuple(
        replace(counter, budget=False)
        for counter in (
            # tokens and money: spent by a reply, noticed at the next check, and never given back
            Counter(
                "fresh",
                updates=(
                    *(Update(f"call_llm.{x}") for x in ("transient_provider", "provider_error", "context_overflow")),
                    Update("call_llm.*", to=(1,)),
                    *(Update(f"pre_step.{x}", to=(0,)) for x in ("cost_limit", "no_progress", "otherwise")),
                ),
            ),
            Counter("tokens", updates=(Update("*.token_limit", to=(1,)),)),
            Counter("cost", updates=(Update("*.cost_limit", to=(1,)),)),
            Counter(
                "late",
                updates=(
                    Update("*.time_limit", to=(1,)),
                    Update("suspended.replied", to=(0,), when="about == time_limit"),
                ),
            ),
            # the batch at hand, and the call that is next in it
            Counter(
                "ran",
                calls,
                (
                    *(Update(on, to=(0,)) for on in (*_ENDS_BATCH, "recover.retry_tool")),
                    Update("dispatch_tool.otherwise", 1),
                ),
            ),
            Counter("asked", updates=(*_reset_on(_ENDS_BATCH), Update("dispatch_tool.approval_required", to=(1,)))),
            Counter("doubted", updates=(*_reset_on(_ENDS_BATCH), Update("dispatch_tool.in_doubt", to=(1,)))),
            Counter("allowed", updates=(*_reset_on(_ENDS_CALL), Update("suspended.approval_decided", to=(1,)))),
            Counter(
                "gated",
                updates=(
                    *_reset_on((*_ENDS_CALL, "dispatch_tool.in_doubt")),
                    Update("dispatch_tool.approval_required", to=(1,)),
                ),
            ),
            Counter(  # asked about one call after the other, which only calls that run together are
                "together",
                updates=(
                    *_reset_on(_ENDS_CALL),
                    Update("dispatch_tool.approval_required", to=(1,), when="allowed == 1"),
                ),
            ),
            # what earlier replies brought
            Counter("errors", updates=(*_ERROR_UPDATES,)),
            Counter(
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
"""How many calls a reply is taken to make at most, where nobody says otherwise; no guardrail bounds it."""


def loop_assumptions(
    guardrails: AgentGuardrails,
    behavior: Behavior | None = None,
    *,
    structured: bool | None = None,
    calls_per_reply: int = CALLS_PER_REPLY,
) -> Assumptions:
    """What is known of the loop's guards under some limits.

    Args:
        guardrails: The limits.
        behavior: The run's rules; None leaves everything open in which they differ.
        structured: Whether the agent has an output type; None leaves it open.
        calls_per_reply: How many calls a reply makes at most.
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
    certain = not g.finalize_grace_s
    return (
        iff(d.runaway, f"steps > {g.step_limit}", f"it ends a run at step {g.step_limit + 1}"),
        iff(d.iteration_limit, "never", "max_iterations is not set")
        if g.max_iterations is None
        else iff(
            d.iteration_limit,
            f"iterations >= {g.max_iterations}",
            f"it holds once {g.max_iterations} model calls are made, and not before",
        ),
        iff(d.time_limit, "never", "max_execution_time_s is not set")
        if g.max_execution_time_s is None
        else GuardAssumption(
            d.time_limit, must="late == 1" if certain else "never", why="time that is over stays over"
        ),
        _budget_guard(d.token_limit, "tokens", "max_tokens", g.max_tokens is None),
        _budget_guard(d.cost_limit, "cost", "max_cost_usd", g.max_cost_usd is None),
        GuardAssumption("pre_step.no_progress", may="steps > 1", why="nothing is silent before the first step"),
    )


def _budget_guard(guard: Guard, counter: str, field: str, off: bool) -> GuardAssumption:
    if off:
        return iff(guard, "never", f"{field} is not set")
    return GuardAssumption(
        guard,
        may=f"{counter} == 1 or fresh == 1",
        must=f"{counter} == 1",
        why="only a reply uses it up, and what is used up stays so",
    )


def _batch_guards(g: AgentGuardrails, single: bool) -> tuple[GuardAssumption, ...]:
    rerun = "a call that is run again names a tool that is there, with arguments that fit"
    alone = "calls that a person is asked about one after the other run together, and this one does not"
    unasked = "nobody is asked about a call that cannot run"
    never_fail = "only a call that failed is run again, and these never fail"
    earlier = "gated == 0" if single else "gated == 0 or ran > 1"  # else it was an earlier call of the batch
    again = f"about == tool_failure and tool_retries < {g.max_tool_retries}"
    return (
        iff(guards.calls_pending, "calls > 0", "it holds while calls of the batch have no result, and not longer"),
        GuardAssumption(
            guards.retry_tool,
            may=again + (" and doubted == 0" if single else ""),
            why="only tool_error and environment_error of an idempotent tool are mended by running it again, "
            f"{g.max_tool_retries} time(s)",
        ),
        GuardAssumption(
            guards.in_doubt, may="tool_retries == 0", why="only idempotent calls are run again, and none is in doubt"
        ),
        GuardAssumption(guards.in_doubt, may="together == 0", why=alone),
        GuardAssumption(
            guards.approval_required,
            may="allowed == 0 or calls > 1 and tool_retries == 0",
            why="what a person allowed is not asked about again, and no other call is left",
        ),
        GuardAssumption(
            guards.approval_required,
            may="asked == 0 or tool_retries == 0",
            why="what a person allowed is not asked about when it is run again",
        ),
        *(
            GuardAssumption(guard, may=may, why=why)
            for guard in (d.unknown_tool, d.invalid_arguments)
            for may, why in (("tool_retries == 0", rerun), (earlier, unasked))
        ),
        *(
            GuardAssumption(guard, may="tool_retries == 0", why=never_fail)
            for guard in (guards.question_asked, guards.declared_unable)
        ),
        *(GuardAssumption(guard, may="together == 0", why=alone) for guard in (d.unknown_tool, guards.question_asked)),
        GuardAssumption(guards.declared_unable, may="together == 0", why=alone),
        *(_single_call_guards() if single else ()),
    )


def _single_call_guards() -> tuple[GuardAssumption, ...]:
    """Where a reply makes one call at most, all that happens to a batch happens to that call."""
    return (
        *(
            GuardAssumption(
                guard, may="asked == 0 and doubted == 0", why="nobody is asked about a call that cannot run"
            )
            for guard in (d.unknown_tool, d.invalid_arguments)
        ),
        GuardAssumption(d.repeated_error, may="errors == 1", why="one call alone repeats no error"),
        GuardAssumption(d.loop_detected, may="repeatable == 1", why="one call alone repeats none"),
    )


def _human_reply_guards(g: AgentGuardrails) -> tuple[GuardAssumption, ...]:
    one_kind = "a run waits for one kind of answer at a time"
    within = "about != iteration_limit and about != time_limit and about != other_limit"
    return (
        GuardAssumption(
            guards.ask_user,
            may=f"{within} or continues < {g.max_continues}",
            why=f"a spent budget is extended {g.max_continues} time(s)",
        ),
        GuardAssumption(guards.approval_decided, may="about == approval", why=one_kind),
        GuardAssumption(guards.doubt_settled, may="about == doubt", why=one_kind),
        GuardAssumption(guards.replied, may="about != approval and about != doubt", why=one_kind),
    )


def _behavior_guards(behavior: Behavior | None, structured: bool | None) -> tuple[GuardAssumption, ...]:
    if behavior is None:
        return ()
    found: list[GuardAssumption] = []
    if not behavior.control_tools:
        off = "the control tools are not registered"
        found += [iff(guard, "never", off) for guard in (guards.question_asked, guards.declared_unable)]
    if not behavior.text_is_answer:
        found.append(GuardAssumption("post_llm.otherwise", may="never", why="a text is no answer here"))
    elif behavior.envelope:
        found.append(GuardAssumption("post_llm.no_progress", may="never", why="an envelope always says something"))
    if not behavior.envelope and (structured is False or not behavior.text_is_answer):
        found.append(iff(d.output_malformed, "never", "a reply has no form here that it could break"))
    return tuple(found)
