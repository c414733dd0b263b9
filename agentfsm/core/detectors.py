"""What goes wrong in a run: the detectors of the default loop, pure functions of ``RunState`` that its rows ask.

A *detector* is a guard that says why: it returns a ``Failure`` or None. (The guards that only say yes or no stand in
``guards``.) None of them changes anything. To add one, write it (here or in your own code) and give it a row.
"""

from __future__ import annotations

from agentfsm.core.failures import Action, Failure, FailureKind
from agentfsm.core.messages import FinishReason
from agentfsm.core.state import RunState
from agentfsm.machine.graph import State

# -- pre_step: budgets and silence --------------------------------------------------------------------


def runaway(run: RunState) -> Failure | None:
    """``pre_step`` was entered more often than ``max_steps`` allows, whatever the policy decided."""
    limit = run.guardrails.step_limit
    if run.steps <= limit:
        return None
    return Failure(
        kind=FailureKind.iteration_limit,
        explanation=f"the run took more than {limit} steps without coming to an end",
        suggested_action=Action.stop,
        metadata={"max_steps": limit},
    )


def _limit(run: RunState, kind: FailureKind, explanation: str) -> Failure:
    return Failure(kind=kind, explanation=explanation, suggested_action=Action(run.guardrails.on_limit))


def iteration_limit(run: RunState) -> Failure | None:
    """As many model calls as ``max_iterations`` were made."""
    limit = run.guardrails.max_iterations
    if limit is None or run.iterations < limit:
        return None
    return _limit(run, FailureKind.iteration_limit, f"{run.iterations} of {limit} model calls are used up")


def time_limit(run: RunState) -> Failure | None:
    """``max_execution_time_s`` of active time is over, and so is the last turn, where one was granted."""
    limit = run.guardrails.max_execution_time_s
    if limit is None or run.elapsed_s < limit or run.grace == "now":
        return None
    return _limit(run, FailureKind.time_limit, f"{run.elapsed_s:.1f} s of {limit:g} s are used up")


def token_limit(run: RunState) -> Failure | None:
    """``max_tokens`` are used up."""
    limit = run.guardrails.max_tokens
    if limit is None or run.usage.total_tokens < limit:
        return None
    return _limit(run, FailureKind.token_limit, f"{run.usage.total_tokens} of {limit} tokens are used up")


def cost_limit(run: RunState) -> Failure | None:
    """``max_cost_usd`` is used up."""
    limit = run.guardrails.max_cost_usd
    if limit is None or run.usage.cost_usd < limit:
        return None
    return _limit(run, FailureKind.cost_limit, f"{run.usage.cost_usd:.4f} of {limit:g} USD are used up")


def no_progress(run: RunState) -> Failure | None:
    """In ``pre_step``: a stall. Elsewhere: a reply that says and calls nothing, or only talks."""
    return _stall(run) if run.state == State.PRE_STEP else _idle(run)


def _stall(run: RunState) -> Failure | None:
    if run.silence_s <= run.guardrails.stall_threshold_s:
        return None
    return Failure(
        kind=FailureKind.no_progress,
        explanation=f"nothing happened for {run.silence_s:.1f} s between two phases",
        metadata={"stall": True},
    )


def _idle(run: RunState) -> Failure | None:
    if run.batch or run.malformed is not None or run.reply is None:
        return None
    if not run.reply.message.content.strip():
        return Failure(kind=FailureKind.no_progress, explanation="the reply says nothing and calls nothing")
    if run.rules.text_is_answer:
        return None
    return Failure(kind=FailureKind.no_progress, explanation="the reply is text only; it calls no tool")


# -- call_llm: the provider ---------------------------------------------------------------------------


def _found(run: RunState, kind: FailureKind) -> Failure | None:
    return run.failure if run.failure is not None and run.failure.kind is kind else None


def transient_provider(run: RunState) -> Failure | None:
    """The model's call failed in a way that another try can mend."""
    return _found(run, FailureKind.transient_provider)


def provider_error(run: RunState) -> Failure | None:
    """The model's call failed in a way that nobody can retry away."""
    return _found(run, FailureKind.provider_error)


def context_overflow(run: RunState) -> Failure | None:
    """The provider says that the prompt is too long."""
    return _found(run, FailureKind.context_overflow)


# -- post_llm: the reply ------------------------------------------------------------------------------


def output_truncated(run: RunState) -> Failure | None:
    """The model was cut off by the cap on its reply."""
    if run.reply is None or run.reply.finish_reason is not FinishReason.LENGTH:
        return None
    return Failure(kind=FailureKind.output_truncated, explanation="the reply was cut off by its length limit")


def output_refused(run: RunState) -> Failure | None:
    """The model, or a content filter, refused; its words are the blocker."""
    reply = run.reply
    if reply is None:
        return None
    filtered = reply.finish_reason in (FinishReason.CONTENT_FILTER, FinishReason.REFUSAL)
    if not filtered and reply.refusal is None:
        return None
    words = reply.refusal or reply.message.content or f"stopped by {reply.finish_reason.value}"
    return Failure(
        kind=FailureKind.output_refused, explanation="the model refused to answer", blockers=(words.strip(),)
    )


def output_malformed(run: RunState) -> Failure | None:
    """The envelope or the structured answer does not parse or validate."""
    if run.malformed is None:
        return None
    return Failure(kind=FailureKind.output_malformed, explanation=run.malformed)


def loop_detected(run: RunState) -> Failure | None:
    """A call of the reply would be the ``loop_hard_threshold``-th equal one among the last ``loop_window``."""
    if not run.batch:
        return None
    window, limit = run.guardrails.loop_window, run.guardrails.loop_hard_threshold
    calls = [*run.recent_calls, *[c.signature for c in run.batch]]
    for place in range(len(run.recent_calls), len(calls)):
        if calls.count(calls[place]) < limit:
            continue
        count = calls[max(0, place + 1 - window) : place + 1].count(calls[place])
        if count >= limit:
            tool = calls[place].rpartition(":")[0]
            return Failure(
                kind=FailureKind.loop_detected,
                explanation=f"the same call of {tool!r} came {count} times among the last {window} calls",
                metadata={"signature": calls[place], "count": count},
            )
    return None


# -- post_tool: what the batch brought ----------------------------------------------------------------


def _failed(run: RunState, kind: FailureKind) -> Failure | None:
    """The batch's failure of a kind; what else failed in it stands in the metadata."""
    failure = run.call_failures.get(kind)
    if failure is None or len(run.call_failures) == 1:
        return failure
    others = {k.value: f.explanation for k, f in run.call_failures.items() if k is not kind}
    return failure.model_copy(update={"metadata": {**failure.metadata, "others": others}})


def policy_violation(run: RunState) -> Failure | None:
    """``max_denials`` denials in a row, or a tool or guard said so."""
    if run.denials >= run.guardrails.max_denials:
        return Failure(
            kind=FailureKind.policy_violation,
            explanation=f"{run.denials} tool calls in a row were denied",
            blockers=(f"{run.denials} denials in a row",),
        )
    return _failed(run, FailureKind.policy_violation) if run.call_failures else None


def repeated_error(run: RunState) -> Failure | None:
    """The circuit breaker: the same error came ``repeated_error_threshold`` times in a row."""
    if run.error_key is None or run.error_streak < run.guardrails.repeated_error_threshold:
        return None
    _, tool, _, message = run.error_key
    return Failure(
        kind=FailureKind.repeated_error,
        explanation=f"{tool!r} failed {run.error_streak} times in a row in the same way: {message}",
        blockers=(message,),
    )


def ambiguous_input(run: RunState) -> Failure | None:
    """A tool says that the request is underspecified."""
    return _failed(run, FailureKind.ambiguous_input) if run.call_failures else None


def scope_too_large(run: RunState) -> Failure | None:
    """A tool says that the task is too big for one step."""
    return _failed(run, FailureKind.scope_too_large) if run.call_failures else None


def capability_gap(run: RunState) -> Failure | None:
    """A tool says that nothing here can do what is asked."""
    return _failed(run, FailureKind.capability_gap) if run.call_failures else None


def kernel_invalidated(run: RunState) -> Failure | None:
    """A tool says that the state of its execution kernel went bad."""
    return _failed(run, FailureKind.kernel_invalidated) if run.call_failures else None


def unknown_tool(run: RunState) -> Failure | None:
    """A call names a tool that is not registered."""
    return _failed(run, FailureKind.unknown_tool) if run.call_failures else None


def invalid_arguments(run: RunState) -> Failure | None:
    """A call's arguments do not parse or validate; the tool was not run."""
    return _failed(run, FailureKind.invalid_arguments) if run.call_failures else None


def environment_error(run: RunState) -> Failure | None:
    """A tool met an OSError: a missing file, a refused connection, a full disk."""
    failure = _failed(run, FailureKind.environment_error)
    if failure is None or run.rules.environment_errors == "retry":
        return failure
    return failure.model_copy(update={"suggested_action": Action.handoff})


def tool_error(run: RunState) -> Failure | None:
    """A tool raised, returned a failure, or took too long."""
    return _failed(run, FailureKind.tool_error) if run.call_failures else None
