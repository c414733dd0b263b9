"""A run's settings: its limits (``AgentGuardrails``) and its behavior switches (``Behavior``), validated when built."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["AgentGuardrails", "Behavior"]


Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

STEPS_WITHOUT_ITERATION_LIMIT = 10_000


class AgentGuardrails(BaseModel):
    """The limits of a run. Zero, negative and NaN are refused with the field's name.

    Attributes:
        max_iterations: Model calls in a run: N means exactly N. None only where another budget is finite.
        max_execution_time_s: Seconds of active time; time spent suspended is never charged.
        finalize_grace_s: Seconds for one last turn, told to wrap up, when the time is over; 0 for none.
        max_tokens: Input and output tokens of all model calls together; None for no limit.
        max_cost_usd: USD of all model calls together; None for no limit.
        max_steps: How often ``pre_step`` may be entered, whatever a policy decides; four times
            ``max_iterations`` unless set (10,000 where that is None).
        max_continues: How often a person may extend a spent budget; after that the run stops. What a person
            extends still counts against ``max_steps``: raise that too where the last extension must be whole.
        on_limit: What a spent budget does: ``ask_user``, ``stop`` or ``handoff``.
        tool_timeout_s: Seconds for one tool call; a tool's own ``timeout`` comes first. As long may a memory take.
        llm_timeout_s: Seconds for one model call.
        stream_heartbeat_s: Seconds of silence after which a streamed reply counts as dropped.
        stall_threshold_s: Seconds of silence between phases after which the run counts as stalled.
        loop_soft_threshold: The how-many-th equal call earns the model a warning.
        loop_hard_threshold: The how-many-th equal call is not run: ``loop_detected``.
        loop_window: How many of the last calls are looked at for repeats.
        repeated_error_threshold: Equal errors in a row that open the circuit breaker.
        max_denials: Denials in a row that are a ``policy_violation``.
        max_tool_retries: How often one call may be run again as it stands (idempotent, retryable tools).
        max_output_tokens: The cap asked of the model for one reply; None leaves it to the provider.
        max_output_tokens_limit: How far a truncated reply may raise that cap, doubling it each time.
        validity_s: Seconds for which a suspended run may be resumed (24 hours).

    Raises:
        pydantic.ValidationError: A limit is out of range; the error names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_iterations: Count | None = 50
    max_execution_time_s: Seconds | None = 300
    finalize_grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    max_tokens: Count | None = None
    max_cost_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_steps: Count | None = None
    max_continues: Annotated[int, Field(ge=0)] = 3
    on_limit: Literal["ask_user", "stop", "handoff"] = "ask_user"
    tool_timeout_s: Seconds = 600
    llm_timeout_s: Seconds = 60
    stream_heartbeat_s: Seconds = 20
    stall_threshold_s: Seconds = 30
    loop_soft_threshold: Count = 2
    loop_hard_threshold: Count = 6
    loop_window: Count = 20
    repeated_error_threshold: Count = 5
    max_denials: Count = 3
    max_tool_retries: Annotated[int, Field(ge=0)] = 1
    max_output_tokens: Count | None = None
    max_output_tokens_limit: Count = 32_768
    validity_s: Seconds = 24 * 60 * 60

    @model_validator(mode="after")
    def _some_budget_is_finite(self) -> AgentGuardrails:
        budgets = (self.max_iterations, self.max_execution_time_s, self.max_tokens, self.max_cost_usd)
        if all(budget is None for budget in budgets):
            raise ValueError(
                "max_iterations may be None only while another budget is finite: set max_execution_time_s, "
                "max_tokens or max_cost_usd"
            )
        if self.loop_hard_threshold > self.loop_window:
            raise ValueError("loop_hard_threshold is larger than loop_window, so no loop could ever be seen")
        return self

    @property
    def step_limit(self) -> int:
        """How often ``pre_step`` may be entered: ``max_steps``, or what follows from ``max_iterations``."""
        if self.max_steps is not None:
            return self.max_steps
        return STEPS_WITHOUT_ITERATION_LIMIT if self.max_iterations is None else 4 * self.max_iterations


class Behavior(BaseModel):
    """How a run behaves where sensible loops differ. A preset is a ``Behavior`` and its companions.

    Attributes:
        text_is_answer: Whether a reply of text without calls ends the run as its answer; where it does
            not, it is ``no_progress``.
        control_tools: Whether ``ask_user``, ``return_done`` and ``return_unable`` are registered.
        envelope: Whether the model answers in JSON envelopes (``{"kind": "final" | "tool_call", ...}``)
            in place of the wire's own tool calls.
        feedback: Whether feedback that answers no call stands in one request (``once``) or is stored as
            a tool message (``kept``).
        environment_errors: Whether the model may try again after an OSError of a tool (``retry``) or the
            run is handed off at once (``terminal``).
        attempts_scope: Whether a success sets the count of a kind's strikes back (``streak``) or the
            whole run counts (``run``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text_is_answer: bool = True
    control_tools: bool = False
    envelope: bool = False
    feedback: Literal["once", "kept"] = "once"
    environment_errors: Literal["retry", "terminal"] = "retry"
    attempts_scope: Literal["streak", "run"] = "streak"
