"""The counters of the loop: what a run carries along that decides which moves are possible, and how many."""

from __future__ import annotations

from dataclasses import replace

from agentfsm.analysis.facts import Change, Counter
from agentfsm.core.guardrails import AgentGuardrails

__all__ = ["budgets", "memories"]

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


def budgets(g: AgentGuardrails, calls: int) -> tuple[Counter, ...]:
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


def memories(calls: int) -> tuple[Counter, ...]:
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
