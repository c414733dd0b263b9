"""What is known of the loop's own guards: ``loop_facts``, one entry for each that is not free.

Whatever the policy, the tools, the hooks and the people do is left free, so what is proved of a table
holds for all of them. Entries are found by the guard's function: a guard of yours with the same name is
free until you declare it.
"""

from __future__ import annotations

from agentfsm.analysis.facts import Facts, Known, exactly
from agentfsm.analysis.loop_counters import budgets, memories
from agentfsm.core import detectors as d
from agentfsm.core import guards
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.rules import Rules
from agentfsm.machine.graph import Guard

__all__ = ["CALLS_PER_REPLY", "loop_facts"]

CALLS_PER_REPLY = 4
"""How many calls a reply is taken to make at most, where nobody says otherwise; no guardrail bounds it."""


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
        (*budgets(guardrails, calls), *memories(calls)),
        (
            *_limits(guardrails),
            *_batches(guardrails, single),
            *_people(guardrails),
            *_by_rules(rules, structured),
        ),
    )


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
        exactly(guards.calls_pending, "calls > 0", "it holds while calls of the batch have no result, and not longer"),
        Known(
            guards.retry_tool,
            may=again + (" and doubted == 0" if single else ""),
            why="only tool_error and environment_error of an idempotent tool are mended by running it again, "
            f"{g.max_tool_retries} time(s)",
        ),
        Known(
            guards.in_doubt, may="tool_retries == 0", why="only idempotent calls are run again, and none is in doubt"
        ),
        Known(guards.in_doubt, may="together == 0", why=alone),
        Known(
            guards.approval_required,
            may="allowed == 0 or calls > 1 and tool_retries == 0",
            why="what a person allowed is not asked about again, and no other call is left",
        ),
        Known(
            guards.approval_required,
            may="asked == 0 or tool_retries == 0",
            why="what a person allowed is not asked about when it is run again",
        ),
        *(
            Known(guard, may=may, why=why)
            for guard in (d.unknown_tool, d.invalid_arguments)
            for may, why in (("tool_retries == 0", rerun), (earlier, unasked))
        ),
        *(
            Known(guard, may="tool_retries == 0", why=never_fail)
            for guard in (guards.question_asked, guards.declared_unable)
        ),
        *(Known(guard, may="together == 0", why=alone) for guard in (d.unknown_tool, guards.question_asked)),
        Known(guards.declared_unable, may="together == 0", why=alone),
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
            guards.ask_user,
            may=f"{within} or continues < {g.max_continues}",
            why=f"a spent budget is extended {g.max_continues} time(s)",
        ),
        Known(guards.approval_decided, may="about == approval", why=one_kind),
        Known(guards.doubt_settled, may="about == doubt", why=one_kind),
        Known(guards.replied, may="about != approval and about != doubt", why=one_kind),
    )


def _by_rules(rules: Rules | None, structured: bool | None) -> tuple[Known, ...]:
    if rules is None:
        return ()
    found: list[Known] = []
    if not rules.control_tools:
        off = "the control tools are not registered"
        found += [exactly(guard, "never", off) for guard in (guards.question_asked, guards.declared_unable)]
    if not rules.text_is_answer:
        found.append(Known("post_llm.otherwise", may="never", why="a text is no answer here"))
    elif rules.envelope:
        found.append(Known("post_llm.no_progress", may="never", why="an envelope always says something"))
    if not rules.envelope and (structured is False or not rules.text_is_answer):
        found.append(exactly(d.output_malformed, "never", "a reply has no form here that it could break"))
    return tuple(found)
