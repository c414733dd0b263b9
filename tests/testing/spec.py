"""The default loop, typed in by hand from the rules: what the path tests hold the real table to.

Each line is a state; each entry is a guard and where it leads, in the order in which they are asked.
"""

from __future__ import annotations

from dataclasses import replace

from agentfsm.core.loop import LOOP
from agentfsm.machine.graph import Graph, Transition

TABLE = """
pre_step: cancelled>terminal aborted>terminal runaway>terminal
pre_step: iteration_limit>recover time_limit>recover token_limit>recover cost_limit>recover no_progress>recover
pre_step: otherwise>call_llm
call_llm: cancelled>terminal aborted>terminal
call_llm: transient_provider>recover provider_error>recover context_overflow>recover
call_llm: otherwise>post_llm
post_llm: cancelled>terminal aborted>terminal
post_llm: output_truncated>recover output_refused>recover output_malformed>recover
post_llm: loop_detected>recover no_progress>recover
post_llm: tool_calls>dispatch_tool
post_llm: otherwise>terminal
dispatch_tool: cancelled>terminal aborted>terminal
dispatch_tool: approval_required>suspended in_doubt>suspended
dispatch_tool: otherwise>post_tool
post_tool: cancelled>terminal aborted>terminal declared_done>terminal declared_unable>terminal
post_tool: question_asked>suspended policy_violation>recover calls_pending>dispatch_tool
post_tool: repeated_error>recover ambiguous_input>recover scope_too_large>recover capability_gap>recover
post_tool: kernel_invalidated>recover unknown_tool>recover invalid_arguments>recover environment_error>recover
post_tool: tool_error>recover
post_tool: otherwise>pre_step
recover: cancelled>terminal aborted>terminal
recover: ask_user>suspended handoff>terminal stop>terminal retry_tool>dispatch_tool
recover: otherwise>pre_step
suspended: cancelled>terminal expired>terminal
suspended: approval_decided>dispatch_tool doubt_settled>dispatch_tool replied>pre_step
"""

SPENDS = {"post_tool.calls_pending": "a pending call", "recover.retry_tool": "a tool's retry"}


def rows() -> list[tuple[str, str, str]]:
    """The hand-written rows as (state, guard, target), in order."""
    found = []
    for line in TABLE.strip().splitlines():
        state, _, entries = line.partition(": ")
        found += [(state, *entry.split(">")) for entry in entries.split()]
    return found


def reference() -> Graph:
    """The hand-written table as a graph, with the loop's own detectors."""
    guards = {t.name: t.guard for t in LOOP}
    table = [
        Transition(state, guards[guard], target, spends=SPENDS.get(f"{state}.{guard}", ""))
        for state, guard, target in rows()
    ]
    return replace(LOOP, transitions=tuple(table), name="reference")
