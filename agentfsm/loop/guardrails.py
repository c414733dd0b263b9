"""A run's settings: its limits (``AgentGuardrails``) and its behavior switches (``Behavior``), validated when built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentfsm.errors import GraphError
from agentfsm.loop.read_only import read_only
from agentfsm.machine.declaration import Counter

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

STEPS_WITHOUT_ITERATION_LIMIT = 10_000

STEPS_PER_ITERATION = 4
"""A step may call no model, as one that finds a limit does: so many steps are allowed for each model call."""


@read_only
class AgentGuardrails(BaseModel, frozen=True):
    """The limits of a run. Zero, negative numbers and NaN are rejected; the error names the field.

    Attributes:
        max_iterations: Maximum number of model calls. May be None only if another budget is finite.
        max_execution_time_s: Maximum active time in seconds; time spent suspended does not count.
        finalize_grace_s: Seconds for one last turn, in which the model is asked to wrap up, once
            ``max_execution_time_s`` is over; 0 for none.
        max_tokens: Maximum input plus output tokens of all model calls; None for no limit.
        max_cost_usd: Maximum cost of all model calls in USD; None for no limit.
        max_steps: Maximum number of entries to ``pre_step``, whatever the policy decides. Defaults to
            ``4 * max_iterations * (1 + max_continues)`` (10,000 if ``max_iterations`` is None), so that it cuts off
            nothing that ``max_continues`` grants.
        max_continues: How many times a person may extend a spent budget before the run stops. Model calls and time
            start over then; of tokens and USD the same amount is granted once more.
        max_calls_per_reply: How many calls of one reply are run. Those after them are not, and their results say so.
        max_moves: How many transitions a run may take between two waits for a person, whatever its graph; past it the
            run ends as aborted. None for the bound that follows from the graph, and at least 100,000.
        on_limit: What happens when a budget is spent: ``ask_user``, ``stop`` or ``handoff``.
        tool_timeout_s: Timeout of one tool call, and of a memory, in seconds; a tool's own ``timeout`` takes
            precedence.
        max_tool_result_chars: How many characters of one tool's result the model gets, its beginning and its end; a
            tool's own ``max_result_chars`` takes precedence. None for all of them.
        hook_timeout_s: Timeout of one hook in seconds; one that does not return in time counts as having raised.
        cancel_grace_s: Seconds that a tool, hook, model or memory has to clean up after its timeout or a cancellation.
            One that is still running then is abandoned: closed where it is, and the run continues without it.
        llm_timeout_s: Timeout in seconds of a whole reply, and of the first piece of a streamed one. A stream that
            flows is bounded by ``stream_heartbeat_s``. No call outlasts the run's own time.
        stream_heartbeat_s: Seconds of silence between two pieces after which a streamed reply counts as dropped;
            keep-alive comments are silence.
        stall_threshold_s: Seconds of silence between two phases after which the run counts as stalled.
        loop_soft_threshold: From this number of equal calls with equal results on, the result warns the model.
        loop_hard_threshold: At this number of equal calls with equal results, the call is not run: ``loop_detected``.
        loop_window: How many of the last calls are checked for repeats.
        repeated_error_threshold: Batches in a row with an equal tool error that open the circuit breaker.
        max_denials: Consecutive denied calls that are a ``policy_violation``.
        max_tool_retries: How many times one call may be run again unchanged (idempotent, retryable tools).
        max_output_tokens: Maximum tokens of one reply; None leaves it to the provider.
        max_output_tokens_limit: Upper bound for that maximum, which is doubled after each truncated reply.
        validity_s: Seconds for which a suspended run may be resumed, as a record or in a store. None is 24 hours for a
            suspension record, and no limit for a run in a store.

    Raises:
        pydantic.ValidationError: A limit is out of range; the error names the field.
    """

    model_config = ConfigDict(extra="forbid")

    max_iterations: Count | None = 50
    max_execution_time_s: Seconds | None = 300
    finalize_grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    max_tokens: Count | None = None
    max_cost_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_steps: Count | None = None
    max_continues: Annotated[int, Field(ge=0)] = 3
    max_moves: Count | None = None
    on_limit: Literal["ask_user", "stop", "handoff"] = "ask_user"
    tool_timeout_s: Seconds = 600
    max_tool_result_chars: Count | None = 200_000
    hook_timeout_s: Seconds = 60
    cancel_grace_s: Seconds = 2
    llm_timeout_s: Seconds = 60
    stream_heartbeat_s: Seconds = 20
    stall_threshold_s: Seconds = 30
    loop_soft_threshold: Count = 2
    loop_hard_threshold: Count = 6
    loop_window: Count = 20
    repeated_error_threshold: Count = 5
    max_denials: Count = 3
    max_calls_per_reply: Count = 64
    max_tool_retries: Annotated[int, Field(ge=0)] = 1
    max_output_tokens: Count | None = None
    max_output_tokens_limit: Count = 32_768
    validity_s: Seconds | None = None

    @model_validator(mode="after")
    def _some_budget_is_finite(self) -> AgentGuardrails:
        budgets = (self.max_iterations, self.max_execution_time_s, self.max_tokens, self.max_cost_usd)
        if all(budget is None for budget in budgets):
            raise ValueError(
                "max_iterations may be None only while another budget is finite: set max_execution_time_s, "
                "max_tokens or max_cost_usd"
            )
        if self.loop_hard_threshold > self.loop_window:
            raise ValueError("loop_hard_threshold is larger than loop_window, so no loop could ever be detected")
        return self

    @property
    def step_limit(self) -> int:
        """Maximum number of entries to ``pre_step``: ``max_steps``, or its default."""
        if self.max_steps is not None:
            return self.max_steps
        iterations = self.max_iterations
        if iterations is None:
            return STEPS_WITHOUT_ITERATION_LIMIT
        return STEPS_PER_ITERATION * iterations * (1 + self.max_continues)


@lru_cache(maxsize=1)
def _whole_limits() -> frozenset[str]:
    """The names of the guardrails that are whole numbers."""
    properties: dict[str, Any] = AgentGuardrails.model_json_schema()["properties"]
    kinds = {name: [field, *field.get("anyOf", ())] for name, field in properties.items()}
    return frozenset({"step_limit", *(n for n, each in kinds.items() if any(k.get("type") == "integer" for k in each))})


def check_counter_limits(counters: Iterable[Counter]) -> None:
    """Check that the limits of counters are numbers, or guardrails that are whole numbers.

    Raises:
        GraphError: One is not.
    """
    for counter in counters:
        if isinstance(counter.limit, str) and counter.limit not in _whole_limits():
            problem = f"its limit {counter.limit!r} is not a guardrail that is a whole number"
            raise GraphError(problem, counter.name, f"choose one of {', '.join(sorted(_whole_limits()))}")


def change_guardrails(guardrails: AgentGuardrails | Mapping[str, Any], limits: Mapping[str, Any]) -> AgentGuardrails:
    """Guardrails, or those that a journal recorded, with some limits changed.

    Raises:
        pydantic.ValidationError: There is no such limit, or a value is out of range.
    """
    before = guardrails.model_dump() if isinstance(guardrails, AgentGuardrails) else guardrails
    return AgentGuardrails.model_validate({**before, **limits})


@read_only
class Behavior(BaseModel):
    """Switches for what published agent loops do differently; each preset has one.

    Attributes:
        text_is_answer: Whether a reply with text and no calls is the final answer; if not, it is ``no_progress``.
        missing_call: What a reply without a call is where text is not an answer: ``no_progress``, or ``malformed`` like
            a reply that cannot be parsed.
        control_tools: Whether ``ask_user``, ``return_done`` and ``return_unable`` are registered.
        envelope: Whether the model answers in JSON envelopes (``{"kind": "final" | "tool_call", ...}``)
            instead of native tool calls.
        feedback: Whether feedback that answers no call is part of one request only (``once``) or is stored as a
            tool message (``kept``).
        addendum: Whether the loop adds to what the model reads: what failed so far (``lessons_learned``) at the end of
            each request, and a note to the result of a call that was made before.
        repeats: Whether the loop guard counts calls as equal only if their results were equal too (``results``), and
            warns the model; or counts the calls alone, and logs a warning (``calls``).
        environment_errors: Whether the model may try again after an OSError in a tool (``retry``) or the run is
            handed off at once (``terminal``).
        breaker_counts: Whether equal errors of the calls of one reply are one for the circuit breaker (``batches``), or
            as many as there are calls (``calls``), as in journals that were written before this could be chosen.
        attempts_scope: Whether a success resets the count of failures of a kind (``streak``) or failures count
            over the whole run (``run``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text_is_answer: bool = True
    missing_call: Literal["no_progress", "malformed"] = "no_progress"
    control_tools: bool = False
    envelope: bool = False
    feedback: Literal["once", "kept"] = "once"
    addendum: bool = True
    repeats: Literal["results", "calls"] = "results"
    environment_errors: Literal["retry", "terminal"] = "retry"
    breaker_counts: Literal["batches", "calls"] = "batches"
    attempts_scope: Literal["streak", "run"] = "streak"
