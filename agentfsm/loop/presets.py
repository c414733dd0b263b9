"""Presets: the behavior of each published loop as its rows, switches, policy and limits. There is one loop for all.

Where a source says something, the preset does that and no more: rows that contradict it are taken out of ``LOOP``, and
switches say only what a row cannot. The rows for cancellation, aborts and limits stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agentfsm.loop.detectors import answer_not_serializable
from agentfsm.loop.failures import MODEL_MISTAKE_KINDS, Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.recovery_policy import DefaultPolicy, Recovery, RecoveryPolicy
from agentfsm.loop.state import RunView
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph, State

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
        former_graphs: The fingerprints of its tables in earlier releases: runs stored under one may continue, if
            their path would have been the same.
    """

    name: str
    behavior: Behavior = field(default_factory=Behavior)
    policy: RecoveryPolicy = field(default_factory=DefaultPolicy)
    guardrails: AgentGuardrails = field(default_factory=AgentGuardrails)
    graph: Graph = LOOP
    former_graphs: frozenset[str] = frozenset()


_LOOP_0_1_0 = frozenset({"783cf8c8881ba5f0a9290c0ac1ef361bd556047eb851bcc0dde8eb0f6e434a5d"})
_STRICT_0_1_0 = frozenset({"b12d99370096d511bf9a7634a875e85e4e4d72bed2e540198aa4ae6a14ef6e25"})


@dataclass(frozen=True)
class BreakerPolicy(DefaultPolicy):
    """Hands off after ``repeated_error_threshold`` equal replies in a row without a usable tool call.

    For equal errors of tool calls, the row ``post_tool.repeated_error`` does the same.
    """

    def decide(self, failure: Failure, state: RunView) -> Action | Recovery:
        """As ``DefaultPolicy`` decides, until the same error has occurred too often in a row."""
        if failure.kind is K.output_malformed and state.error_streak >= state.guardrails.repeated_error_threshold:
            return Action.handoff
        return super().decide(failure, state)


# Another budget ends the run first.
_UNLIMITED_RETRIES = 1_000_000

_FATAL_PROVIDER = {K.context_overflow: Action.handoff}
"""With no retries for ``transient_provider``, every failed model call then ends the run."""

_LIMITS_THAT_DO_NOT_ACT = AgentGuardrails(
    max_iterations=None, max_execution_time_s=24 * 60 * 60, max_tool_result_chars=None
)
"""For a source without such limits. Some budget must be finite, so that every run ends."""

_STALL_AND_IDLE = ("pre_step.no_progress", "post_llm.no_progress")

STANDARD = Preset(
    "standard",
    policy=DefaultPolicy(
        budgets={
            **DefaultPolicy().budgets,
            **dict.fromkeys((K.tool_error, K.unknown_tool, K.invalid_arguments, K.environment_error), 5),
        }
    ),
    former_graphs=_LOOP_0_1_0,
)
"""The default: retries as in ``funnel``, but five for each kind of failed tool call; a text reply is the answer."""

FUNNEL = Preset(
    "funnel",
    behavior=Behavior(control_tools=True, text_is_answer=False, repeats="calls"),
    graph=replace(LOOP.without("post_tool.repeated_error"), name="funnel"),
    former_graphs=_LOOP_0_1_0,
)
"""parsimony-agents: control tools are registered, a text reply is ``no_progress``, and there is no circuit breaker."""

FEEDBACK = Preset(
    "feedback",
    behavior=Behavior(
        envelope=True, feedback="kept", addendum=False, environment_errors="terminal", attempts_scope="run"
    ),
    policy=DefaultPolicy(budgets=dict.fromkeys(MODEL_MISTAKE_KINDS, _UNLIMITED_RETRIES), actions=_FATAL_PROVIDER),
    guardrails=AgentGuardrails(
        max_iterations=5, max_execution_time_s=None, on_limit="stop", max_tool_result_chars=None
    ),
    graph=replace(
        LOOP.without(
            *_STALL_AND_IDLE,
            "post_llm.output_truncated",
            "post_llm.output_refused",
            "post_llm.loop_detected",
            "post_tool.repeated_error",
        ),
        name="feedback",
    ),
    former_graphs=_LOOP_0_1_0,
)
"""abcb: one step budget (5) and nothing else stops the model; feedback is stored as tool messages, and replies are JSON
envelopes; environment and provider errors end the run."""

BREAKER = Preset(
    "breaker",
    behavior=Behavior(control_tools=True, text_is_answer=False, missing_call="malformed", addendum=False),
    policy=BreakerPolicy(
        budgets=dict.fromkeys((*MODEL_MISTAKE_KINDS, K.environment_error), _UNLIMITED_RETRIES),
        actions=_FATAL_PROVIDER,
    ),
    guardrails=_LIMITS_THAT_DO_NOT_ACT,
    graph=replace(
        LOOP.without(
            *_STALL_AND_IDLE,
            "post_llm.output_truncated",
            "post_llm.output_refused",
            "post_llm.loop_detected",
        ),
        name="breaker",
    ),
    former_graphs=_LOOP_0_1_0,
)
"""Forge: errors go back to the model until the circuit breaker opens after five equal ones, whether of calls or of
replies without one; no iteration limit; tools end the run; so does a model that cannot be reached."""

STRICT = Preset(
    "strict",
    behavior=Behavior(addendum=False),
    policy=DefaultPolicy(
        budgets={K.output_truncated: K.output_truncated.spec.retries},
        actions=_FATAL_PROVIDER,
    ),
    guardrails=_LIMITS_THAT_DO_NOT_ACT,
    graph=replace(
        LOOP.without(
            *_STALL_AND_IDLE,
            "post_llm.loop_detected",
            "post_tool.policy_violation",
            "post_tool.repeated_error",
            "post_tool.ambiguous_input",
            "post_tool.scope_too_large",
            "post_tool.capability_gap",
            "post_tool.kernel_invalidated",
            "post_tool.unknown_tool",
            "post_tool.invalid_arguments",
            "post_tool.environment_error",
            "post_tool.tool_error",
        ).with_detector(State.POST_LLM, answer_not_serializable, before="output_malformed"),
        name="strict",
    ),
    former_graphs=_STRICT_0_1_0,
)
"""Jan: a failed model call is fatal, and so is an answer that cannot be serialized; a failed or denied tool call is
data for the conversation, and text is the answer."""

PRESETS = MappingProxyType({p.name: p for p in (STANDARD, FUNNEL, FEEDBACK, BREAKER, STRICT)})
"""Every preset by name."""
