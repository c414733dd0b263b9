"""``LOOP``: the default transition table. It is the whole control flow; nothing else moves a run.

In each state the rows are evaluated from top to bottom, and the first whose guard holds is taken. Every state except
``suspended`` and ``terminal`` ends with a row without a guard, so a run cannot get stuck in it. A suspended run waits
until one of its guards holds, and ``terminal`` is the end.

Every model call passes through ``pre_step`` and spends a step; every other cycle spends a pending call or a tool retry,
or waits for human input. So every run ends or waits within a bound that follows from its guardrails. Each row into
``terminal`` says how the run ends.
"""

from __future__ import annotations

from agentfsm.loop.detectors import (
    CONTINUES,
    ITERATIONS,
    STEPS,
    ambiguous_input,
    answer_not_serializable,
    capability_gap,
    context_overflow,
    cost_limit,
    environment_error,
    invalid_arguments,
    iteration_limit,
    kernel_invalidated,
    loop_detected,
    no_progress,
    output_malformed,
    output_refused,
    output_truncated,
    policy_violation,
    provider_error,
    repeated_error,
    runaway,
    scope_too_large,
    time_limit,
    token_limit,
    tool_error,
    transient_provider,
    unknown_tool,
)
from agentfsm.loop.guards import (
    aborted,
    approval_decided,
    approval_required,
    ask_user,
    calls_pending,
    cancelled,
    declared_done,
    declared_unable,
    doubt_settled,
    escalated,
    expired,
    handoff,
    in_doubt,
    question_asked,
    replied,
    retry_tool,
    stop,
    tool_calls,
    vote_recorded,
)
from agentfsm.loop.outcomes import (
    CALL_MODEL,
    CHECK_BUDGETS,
    CHOOSE_RECOVERY,
    JUDGE_RESULTS,
    PARSE_REPLY,
    RUN_CALLS,
)
from agentfsm.machine.declaration import Counter
from agentfsm.machine.graph import Graph, State, StateSpec
from agentfsm.machine.graph import Transition as Row

PRE_STEP, CALL_LLM, POST_LLM, DISPATCH_TOOL, POST_TOOL, RECOVER, SUSPENDED, TERMINAL = State

# fmt: off
LOOP = Graph(
    name="loop",
    states=(
        StateSpec(PRE_STEP, "check budgets", effect=CHECK_BUDGETS, spends="steps"),
        StateSpec(CALL_LLM, "call the model", effect=CALL_MODEL),
        StateSpec(POST_LLM, "read the reply", effect=PARSE_REPLY),
        StateSpec(DISPATCH_TOOL, "run the next call", effect=RUN_CALLS),
        StateSpec(POST_TOOL, "judge the batch", effect=JUDGE_RESULTS),
        StateSpec(RECOVER, "ask the policy, back off", effect=CHOOSE_RECOVERY, lane="left"),
        StateSpec(SUSPENDED, "wait for a person", waits=True, lane="right"),
        StateSpec(TERMINAL, "the end", final=True),
    ),
    counters=(
        STEPS,
        ITERATIONS,
        Counter("pending_calls", "max_calls_per_reply"),
        Counter("tool_retries", "max_tool_retries"),
        CONTINUES,
    ),
    first=(cancelled, aborted),
    transitions=(
        #   from           guard               to
        Row(PRE_STEP,      cancelled,          TERMINAL, ends="cancelled"),
        Row(PRE_STEP,      aborted,            TERMINAL, ends="aborted"),
        Row(PRE_STEP,      runaway,            TERMINAL, ends="partial"),
        Row(PRE_STEP,      iteration_limit,    RECOVER),
        Row(PRE_STEP,      time_limit,         RECOVER),
        Row(PRE_STEP,      token_limit,        RECOVER),
        Row(PRE_STEP,      cost_limit,         RECOVER),
        Row(PRE_STEP,      no_progress,        RECOVER),
        Row(PRE_STEP,      None,               CALL_LLM),

        Row(CALL_LLM,      cancelled,          TERMINAL, ends="cancelled"),
        Row(CALL_LLM,      aborted,            TERMINAL, ends="aborted"),
        Row(CALL_LLM,      transient_provider, RECOVER),
        Row(CALL_LLM,      provider_error,     RECOVER),
        Row(CALL_LLM,      context_overflow,   RECOVER),
        Row(CALL_LLM,      None,               POST_LLM),

        Row(POST_LLM,      cancelled,          TERMINAL, ends="cancelled"),
        Row(POST_LLM,      aborted,            TERMINAL, ends="aborted"),
        Row(POST_LLM,      output_truncated,   RECOVER),
        Row(POST_LLM,      output_refused,     RECOVER),
        Row(POST_LLM,      output_malformed,   RECOVER),
        Row(POST_LLM,      loop_detected,      RECOVER),
        Row(POST_LLM,      no_progress,        RECOVER),
        Row(POST_LLM,      tool_calls,         DISPATCH_TOOL, spends="pending_calls",
                                                              refills=("pending_calls", "tool_retries")),
        Row(POST_LLM,      None,               TERMINAL, ends="completed"),

        Row(DISPATCH_TOOL, cancelled,          TERMINAL, ends="cancelled"),
        Row(DISPATCH_TOOL, aborted,            TERMINAL, ends="aborted"),
        Row(DISPATCH_TOOL, approval_required,  SUSPENDED),
        Row(DISPATCH_TOOL, in_doubt,           SUSPENDED),
        Row(DISPATCH_TOOL, None,               POST_TOOL),

        Row(POST_TOOL,     cancelled,          TERMINAL, ends="cancelled"),
        Row(POST_TOOL,     aborted,            TERMINAL, ends="aborted"),
        Row(POST_TOOL,     declared_done,      TERMINAL, ends="completed"),
        Row(POST_TOOL,     declared_unable,    TERMINAL, ends="handed_off"),
        Row(POST_TOOL,     question_asked,     SUSPENDED),
        Row(POST_TOOL,     policy_violation,   RECOVER),
        Row(POST_TOOL,     calls_pending,      DISPATCH_TOOL, spends="pending_calls"),
        Row(POST_TOOL,     repeated_error,     RECOVER),
        Row(POST_TOOL,     ambiguous_input,    RECOVER),
        Row(POST_TOOL,     scope_too_large,    RECOVER),
        Row(POST_TOOL,     capability_gap,     RECOVER),
        Row(POST_TOOL,     kernel_invalidated, RECOVER),
        Row(POST_TOOL,     unknown_tool,       RECOVER),
        Row(POST_TOOL,     invalid_arguments,  RECOVER),
        Row(POST_TOOL,     environment_error,  RECOVER),
        Row(POST_TOOL,     tool_error,         RECOVER),
        Row(POST_TOOL,     None,               PRE_STEP),

        Row(RECOVER,       cancelled,          TERMINAL, ends="cancelled"),
        Row(RECOVER,       aborted,            TERMINAL, ends="aborted"),
        Row(RECOVER,       ask_user,           SUSPENDED),
        Row(RECOVER,       handoff,            TERMINAL, ends="handed_off"),
        Row(RECOVER,       stop,               TERMINAL, ends="partial"),
        Row(RECOVER,       retry_tool,         DISPATCH_TOOL, spends=("tool_retries", "pending_calls"),
                                                              refills="pending_calls"),
        Row(RECOVER,       None,               PRE_STEP),

        Row(SUSPENDED,     cancelled,          TERMINAL, ends="cancelled"),
        Row(SUSPENDED,     aborted,            TERMINAL, ends="aborted"),
        Row(SUSPENDED,     expired,            TERMINAL, ends="cancelled"),
        Row(SUSPENDED,     approval_decided,   DISPATCH_TOOL),
        Row(SUSPENDED,     doubt_settled,      DISPATCH_TOOL),
        Row(SUSPENDED,     replied,            PRE_STEP),
    ),
)
# fmt: on

BUILT_IN_GUARDS = frozenset(
    {row.guard for row in LOOP if row.guard is not None} | {answer_not_serializable, escalated, vote_recorded}
)
"""The guards of ``LOOP`` and the presets, which read the run itself; all others get an immutable view of it."""
