"""What is known of the loop's own guards: ``loop_facts``, one entry for each that is not free.

Whatever the policy, the tools, the hooks and the people do is left free, so what is proved of a table
holds for all of them. Entries are found by the guard's function: a guard of yours with the same name is
free until you declare it.
"""

from __future__ import annotations

from dataclasses import replace

from agentfsm.analysis.facts import Change, Counter, Facts, Known, exactly
from agentfsm.core import detectors as d
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.rules import Rules
from agentfsm.machine.graph import Guard

__all__ = ["CALLS_PER_REPLY", "loop_facts"]

CALLS_PER_REPLY = 4
"""How many calls a reply is taken to make at most, where nobody says otherwise; no guardrail bounds it."""

_ABOUT = (
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


def loop_facts(
    guardrails: AgentGuardrails,
    rules: Rules | None = None,
    *,
    structured: bool | None = None,
    calls_per_reply: int = CALLS_PER_REPLY,
) -> Facts:
    """What is known of the loop's guards under some limits.

    Args:
        guardrails: The limits.
        rules: The run's rules; None leaves everything open in which they differ.
        structured: Whether the agent has an output type; None leaves it open.
        calls_per_reply: How many calls a reply makes at most.
    """
    single = rules is not None and rules.envelope
    calls = 1 if single else calls_per_reply
    return Facts(
        (*_budgets(guardrails, calls), *_memories(calls)),
        (
            *_limits(guardrails),
            *_batches(guardrails, single),
            *_people(guardrails),
            *_by_rules(rules, structured),
        ),
    )


# -- counters -----------------------------------------------------------------------------------------


def _budgets(g: AgentGuardrails, calls: int) -> tuple[Counter, ...]:
    """The counters on which the length of a run depends; a search follows the first that will do."""
    limits = "about == iteration_limit or about == time_limit or about == other_limit"
    return (
        Counter("steps", g.step_limit + 1, (Change("* -> pre_step", 1),), start=1),
        Counter(
            "calls",
            calls,
            (
                Change("post_llm.tool_calls", to=tuple(range(1, calls + 1))),
                *(Change(f"* -> {state}", to=(0,)) for state in ("pre_step", "call_llm", "recover", "terminal")),
                Change("post_llm.*", to=tuple(range(calls + 1))),
                Change("post_tool.question_asked", to=(0,)),
                *(
                    Change("recover.retry_tool", to=tuple(range(1, ran + 1)), when=f"ran == {ran}")
                    for ran in range(1, calls + 1)
                ),
                Change("recover.retry_tool", to=(1,)),
                Change("dispatch_tool.approval_required", -1, when="allowed == 1"),
                Change("dispatch_tool.otherwise", to=(0,), when="together == 1"),
                Change("dispatch_tool.otherwise", -1),
            ),
        ),
        Counter(
            "tool_retries",
            g.max_tool_retries,
            (
                Change("post_llm.*", to=(0,)),
                *(Change(f"* -> {state}", to=(0,)) for state in ("pre_step", "call_llm", "terminal")),
                Change("recover.retry_tool", 1),
            ),
        ),
        Counter(
            "iterations",
            g.max_iterations or 0,
            (Change("* -> call_llm", 1), Change("suspended.replied", to=(0,), when="about == iteration_limit")),
        ),
        Counter("continues", g.max_continues, (Change("suspended.replied", 1, when=limits),)),
        Counter("about", labels=_ABOUT, changes=_ABOUT_CHANGES),
    )


_ABOUT_CHANGES = (
    Change("*.iteration_limit -> recover", to=("iteration_limit",)),
    Change("*.time_limit -> recover", to=("time_limit",)),
    Change("*.token_limit -> recover", to=("other_limit",)),
    Change("*.cost_limit -> recover", to=("other_limit",)),
    Change("*.loop_detected -> recover", to=("loop",)),
    Change("*.tool_error -> recover", to=("tool_failure",)),
    Change("*.environment_error -> recover", to=("tool_failure",)),
    Change("* -> recover", to=("other",)),
    Change("dispatch_tool.approval_required", to=("approval",)),
    Change("dispatch_tool.in_doubt", to=("doubt",)),
    Change("post_tool.question_asked", to=("question",)),
    Change("recover.ask_user"),  # what it is about stays
    Change("recover.*", to=("nothing",)),
    Change("suspended.*", to=("nothing",)),
)


def _memories(calls: int) -> tuple[Counter, ...]:
    """What a run remembers that decides which moves are possible, though not how many."""
    return tuple(
        replace(counter, budget=False)
        for counter in (
            # tokens and money: spent by a reply, noticed at the next check, and never given back
            Counter(
                "fresh",
                changes=(
                    *(Change(f"call_llm.{x}") for x in ("transient_provider", "provider_error", "context_overflow")),
                    Change("call_llm.*", to=(1,)),
                    *(Change(f"pre_step.{x}", to=(0,)) for x in ("cost_limit", "no_progress", "otherwise")),
                ),
            ),
            Counter("tokens", changes=(Change("*.token_limit", to=(1,)),)),
            Counter("cost", changes=(Change("*.cost_limit", to=(1,)),)),
            Counter(
                "late",
                changes=(
                    Change("*.time_limit", to=(1,)),
                    Change("suspended.replied", to=(0,), when="about == time_limit"),
                ),
            ),
            # the batch at hand, and the call that is next in it
            Counter(
                "ran",
                calls,
                (
                    *(Change(on, to=(0,)) for on in (*_BATCH_OVER, "recover.retry_tool")),
                    Change("dispatch_tool.otherwise", 1),
                ),
            ),
            Counter("asked", changes=(*_zero(_BATCH_OVER), Change("dispatch_tool.approval_required", to=(1,)))),
            Counter("doubted", changes=(*_zero(_BATCH_OVER), Change("dispatch_tool.in_doubt", to=(1,)))),
            Counter("allowed", changes=(*_zero(_CALL_OVER), Change("suspended.approval_decided", to=(1,)))),
            Counter(
                "gated",
                changes=(
                    *_zero((*_CALL_OVER, "dispatch_tool.in_doubt")),
                    Change("dispatch_tool.approval_required", to=(1,)),
                ),
            ),
            Counter(  # asked about one call after the other, which only calls that run together are
                "together",
                changes=(*_zero(_CALL_OVER), Change("dispatch_tool.approval_required", to=(1,), when="allowed == 1")),
            ),
            # what earlier replies brought
            Counter("errors", changes=(*_ERROR_CHANGES,)),
            Counter(
                "repeatable",
                changes=(
                    Change("post_llm.tool_calls", to=(1,)),
                    Change("suspended.replied", to=(0,), when="about == loop"),
                ),
            ),
        )
    )


_BATCH_OVER = ("* -> pre_step", "* -> call_llm", "post_llm.*")
_CALL_OVER = (*_BATCH_OVER, "post_tool.*")


def _zero(rows: tuple[str, ...]) -> tuple[Change, ...]:
    return tuple(Change(on, to=(0,)) for on in rows)


_ERROR_CHANGES = (
    *(Change(on, to=(0,)) for on in ("* -> terminal", "post_llm.* -> recover", "pre_step.no_progress -> recover")),
    *(
        Change(f"post_tool.{name} -> recover", to=(1,))
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
    Change("post_tool.*", to=(0,)),
)


# -- guards -------------------------------------------------------------------------------------------


def _limits(g: AgentGuardrails) -> tuple[Known, ...]:
    certain = not g.finalize_grace_s
    return (
        exactly(d.runaway, f"steps > {g.step_limit}", f"it ends a run at step {g.step_limit + 1}"),
        exactly(d.iteration_limit, "never", "max_iterations is not set")
        if g.max_iterations is None
        else exactly(
            d.iteration_limit,
            f"iterations >= {g.max_iterations}",
            f"it holds once {g.max_iterations} model calls are made, and not before",
        ),
        exactly(d.time_limit, "never", "max_execution_time_s is not set")
        if g.max_execution_time_s is None
        else Known(d.time_limit, must="late == 1" if certain else "never", why="time that is over stays over"),
        _spent(d.token_limit, "tokens", "max_tokens", g.max_tokens is None),
        _spent(d.cost_limit, "cost", "max_cost_usd", g.max_cost_usd is None),
        Known("pre_step.no_progress", may="steps > 1", why="nothing is silent before the first step"),
    )


def _spent(guard: Guard, counter: str, field: str, off: bool) -> Known:
    if off:
        return exactly(guard, "never", f"{field} is not set")
    return Known(
        guard,
        may=f"{counter} == 1 or fresh == 1",
        must=f"{counter} == 1",
        why="only a reply uses it up, and what is used up stays so",
    )


def _batches(g: AgentGuardrails, single: bool) -> tuple[Known, ...]:
    rerun = "a call that is run again names a tool that is there, with arguments that fit"
    alone = "calls that a person is asked about one after the other run together, and this one does not"
    unasked = "nobody is asked about a call that cannot run"
    never_fail = "only a call that failed is run again, and these never fail"
    earlier = "gated == 0" if single else "gated == 0 or ran > 1"  # else it was an earlier call of the batch
    again = f"about == tool_failure and tool_retries < {g.max_tool_retries}"
    return (
        exactly(d.calls_pending, "calls > 0", "it holds while calls of the batch have no result, and not longer"),
        Known(
            d.retry_tool,
            may=again + (" and doubted == 0" if single else ""),
            why="only tool_error and environment_error of an idempotent tool are mended by running it again, "
            f"{g.max_tool_retries} time(s)",
        ),
        Known(d.in_doubt, may="tool_retries == 0", why="only idempotent calls are run again, and none is in doubt"),
        Known(d.in_doubt, may="together == 0", why=alone),
        Known(
            d.approval_required,
            may="allowed == 0 or calls > 1 and tool_retries == 0",
            why="what a person allowed is not asked about again, and no other call is left",
        ),
        Known(
            d.approval_required,
            may="asked == 0 or tool_retries == 0",
            why="what a person allowed is not asked about when it is run again",
        ),
        *(
            Known(guard, may=may, why=why)
            for guard in (d.unknown_tool, d.invalid_arguments)
            for may, why in (("tool_retries == 0", rerun), (earlier, unasked))
        ),
        *(Known(guard, may="tool_retries == 0", why=never_fail) for guard in (d.question_asked, d.declared_unable)),
        *(Known(guard, may="together == 0", why=alone) for guard in (d.unknown_tool, d.question_asked)),
        Known(d.declared_unable, may="together == 0", why=alone),
        *(_single() if single else ()),
    )


def _single() -> tuple[Known, ...]:
    """Where a reply makes one call at most, all that happens to a batch happens to that call."""
    return (
        *(
            Known(guard, may="asked == 0 and doubted == 0", why="nobody is asked about a call that cannot run")
            for guard in (d.unknown_tool, d.invalid_arguments)
        ),
        Known(d.repeated_error, may="errors == 1", why="one call alone repeats no error"),
        Known(d.loop_detected, may="repeatable == 1", why="one call alone repeats none"),
    )


def _people(g: AgentGuardrails) -> tuple[Known, ...]:
    one_kind = "a run waits for one kind of answer at a time"
    within = "about != iteration_limit and about != time_limit and about != other_limit"
    return (
        Known(
            d.ask_user,
            may=f"{within} or continues < {g.max_continues}",
            why=f"a spent budget is extended {g.max_continues} time(s)",
        ),
        Known(d.approval_decided, may="about == approval", why=one_kind),
        Known(d.doubt_settled, may="about == doubt", why=one_kind),
        Known(d.replied, may="about != approval and about != doubt", why=one_kind),
    )


def _by_rules(rules: Rules | None, structured: bool | None) -> tuple[Known, ...]:
    if rules is None:
        return ()
    found: list[Known] = []
    if not rules.control_tools:
        off = "the control tools are not registered"
        found += [exactly(guard, "never", off) for guard in (d.question_asked, d.declared_unable)]
    if not rules.text_is_answer:
        found.append(Known("post_llm.otherwise", may="never", why="a text is no answer here"))
    elif rules.envelope:
        found.append(Known("post_llm.no_progress", may="never", why="an envelope always says something"))
    if not rules.envelope and (structured is False or not rules.text_is_answer):
        found.append(exactly(d.output_malformed, "never", "a reply has no form here that it could break"))
    return tuple(found)
