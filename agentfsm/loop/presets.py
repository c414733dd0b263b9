"""Presets: the behavior of each published loop as a few lines of configuration (switches, policy, limits, graph)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agentfsm.loop.failures import MODEL_MISTAKE_KINDS, Action, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.recovery_policy import DefaultPolicy, RecoveryPolicy
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph

__all__ = ["BREAKER", "FEEDBACK", "FUNNEL", "PRESETS", "STANDARD", "STRICT", "Preset"]

K = FailureKind


@dataclass(frozen=True)
class Preset:
    """A named configuration of the loop.

    Attributes:
        name: Its name, as in ``Agent(preset="funnel")``.
        behavior: Its behavior switches.
        policy: Its recovery policy; the agent may pass another.
        guardrails: Its limits; the agent may pass others.
        graph: Its table; the agent may pass another.
    """

    name: str
    behavior: Behavior = field(default_factory=Behavior)
    policy: RecoveryPolicy = field(default_factory=DefaultPolicy)
    guardrails: AgentGuardrails = field(default_factory=AgentGuardrails)
    graph: Graph = LOOP


# Another budget ends the run first.
_UNLIMITED_RETRIES = 1_000_000

STANDARD = Preset("standard")
"""The default: the full recovery policy, and a text reply is the answer."""

FUNNEL = Preset("funnel", behavior=Behavior(control_tools=True, text_is_answer=False, repeats="calls"))
"""parsimony-agents: control tools are registered, and a text reply is ``no_progress``."""

FEEDBACK = Preset(
    "feedback",
    behavior=Behavior(
        envelope=True, feedback="kept", addendum=False, environment_errors="terminal", attempts_scope="run"
    ),
    policy=DefaultPolicy(budgets=dict.fromkeys(MODEL_MISTAKE_KINDS, _UNLIMITED_RETRIES)),
    guardrails=AgentGuardrails(max_iterations=5, on_limit="stop"),
)
"""abcb: one step budget (5), feedback stored as tool messages, JSON envelopes; environment and provider errors end
the run."""

BREAKER = Preset(
    "breaker",
    behavior=Behavior(control_tools=True, text_is_answer=False, addendum=False),
    policy=DefaultPolicy(
        budgets={**dict.fromkeys((*MODEL_MISTAKE_KINDS, K.environment_error), _UNLIMITED_RETRIES), K.no_progress: 4},
        actions={K.no_progress: Action.retry},
    ),
    guardrails=AgentGuardrails(max_iterations=None),
)
"""Forge: errors go back to the model until the circuit breaker opens after five equal ones; no iteration limit; tools
end the run; so does a model that cannot be reached."""

STRICT = Preset(
    "strict",
    behavior=Behavior(addendum=False),
    policy=DefaultPolicy(budgets={K.output_truncated: K.output_truncated.spec.retries}),
    graph=replace(
        LOOP.without(
            "post_tool.policy_violation",
            "post_tool.repeated_error",
            "post_tool.unknown_tool",
            "post_tool.invalid_arguments",
            "post_tool.environment_error",
            "post_tool.tool_error",
        ),
        name="strict",
    ),
)
"""Jan: a failed model call is fatal, a failed tool call is data for the conversation, and text is the answer."""

PRESETS = MappingProxyType({p.name: p for p in (STANDARD, FUNNEL, FEEDBACK, BREAKER, STRICT)})
"""Every preset by name."""
