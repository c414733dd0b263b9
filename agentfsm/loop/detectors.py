"""The failure detectors of ``LOOP``, and the ``detector`` decorator that attaches examples to a guard.

A detector is a pure function of ``RunState`` that returns a ``Failure`` or None. To add one, write it here or in your
own code and add a row to the table. The examples are external events after which a guard holds, or does not;
``agentfsm.testing`` replays them on the real loop.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.messages import FinishReason, ToolCall
from agentfsm.loop.quorum import Actor
from agentfsm.loop.state import RunState
from agentfsm.machine.declaration import Counter, exhausted, silent_while, takes

DEFAULT_RESULT = "fine"
"""What a tool returns unless an example says otherwise."""

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One external event. Give what matters; everything else succeeds without incident.

    Attributes:
        reply: The model's previous reply: a string, a ``Reply``, or an exception to raise.
        call: A tool call in that reply.
        times: How many times the reply makes that call; the calls run in parallel.
        result: What the tool returns; an exception is raised.
        duration_s: Seconds that the state's effect takes.
        idle_s: Seconds without activity just before it.
        tokens: Tokens of the previous reply.
        cost_usd: Cost of the previous reply in USD.
        action: What the policy decides.
        answer: A person's answer: a string, ``Allow()``, ``ItRan()``...
        needs_approval: Whether a hook requires approval of the call.
        crash: Whether the process dies as the call begins, and the run is resumed from its store.
        cancel: Whether the run is cancelled.
        abort: Whether a hook aborts the run or, in a state that waits, a guard raises.
        state_result: What the effect of a user-defined state returns without running: a value, or a ``StateResult``.
        metadata: Entries of the run's metadata, with which it is started.
        tags: Tags of the run, with which it is started.
        actor: Who requests the run.
    """

    reply: Any = None
    call: ToolCall | None = None
    times: int = 1
    result: Any = DEFAULT_RESULT
    duration_s: float = 0.0
    idle_s: float = 0.0
    tokens: int = 0
    cost_usd: float = 0.0
    action: Action | None = None
    answer: Any = None
    needs_approval: bool = False
    crash: bool = False
    cancel: bool = False
    abort: bool = False
    state_result: Any = None
    metadata: Mapping[str, Any] | None = None
    tags: Sequence[str] = ()
    actor: Actor | str | None = None


def detector(*, fires_on: Iterable[Example], silent_on: Iterable[Example] = ()) -> Callable[[F], F]:
    """Attach examples to a guard; the function itself is unchanged.

    ::

        @detector(
            fires_on=[Example(call=call("pay", amount=501))],
            silent_on=[Example(call=call("pay", amount=500)), Example(reply="It is paid.")],
        )
        def too_much(run):
            if all(c.call.arguments.get("amount", 0) <= 500 for c in run.batch):
                return None
            return Failure(kind=FailureKind.policy_violation, explanation="too much")

    Args:
        fires_on: Examples for which it holds; generated paths use the first.
        silent_on: Examples for which it does not.
    """

    def attach_examples(function: F) -> F:
        function.fires_on = tuple(fires_on)  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        function.silent_on = tuple(silent_on)  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return attach_examples


STEPS = Counter("steps", "step_limit")
"""Spent by each entry to ``pre_step``."""

ITERATIONS = Counter("iterations", "max_iterations")
"""Spent by each model call, whoever makes it."""

CONTINUES = Counter("continues", "max_continues")
"""Spent by each reply that extends a budget."""


# -- pre_step: budgets and stalls --------------------------------------------------------------------


@exhausted(STEPS, past=True)
def runaway(run: RunState) -> Failure:
    """``pre_step`` was entered more than ``max_steps`` times, whatever the policy decided."""
    limit = run.guardrails.step_limit
    return Failure(
        kind=FailureKind.iteration_limit,
        explanation=f"the run took more than {limit} steps without coming to an end",
        suggested_action=Action.stop,
        metadata={"max_steps": limit},
    )


def _limit_failure(run: RunState, kind: FailureKind, explanation: str) -> Failure:
    return Failure(kind=kind, explanation=explanation, suggested_action=Action(run.guardrails.on_limit))


@exhausted(ITERATIONS)
def iteration_limit(run: RunState) -> Failure:
    """``max_iterations`` model calls were made."""
    limit = run.guardrails.max_iterations
    return _limit_failure(run, FailureKind.iteration_limit, f"{run.iterations} of {limit} model calls are used up")


def time_limit(run: RunState) -> Failure | None:
    """``max_execution_time_s`` of active time has passed, and so has the last turn, if there is one."""
    limit = run.guardrails.max_execution_time_s if run.granted_s is None else run.time_limit  # asked in every step
    if limit is None or run.elapsed_s < limit or run.final_turn == "now":
        return None
    return _limit_failure(run, FailureKind.time_limit, f"{round(run.elapsed_s, 2):g} s of {limit:g} s are used up")


@silent_while("guardrails.max_tokens", None)
def token_limit(run: RunState) -> Failure | None:
    """``max_tokens`` are used up."""
    limit = run.token_limit
    if limit is None or run.usage.total_tokens < limit:
        return None
    return _limit_failure(run, FailureKind.token_limit, f"{run.usage.total_tokens} of {limit} tokens are used up")


@silent_while("guardrails.max_cost_usd", None)
def cost_limit(run: RunState) -> Failure | None:
    """``max_cost_usd`` is used up."""
    limit = run.cost_limit
    if limit is None or run.usage.cost_usd < limit:
        return None
    return _limit_failure(run, FailureKind.cost_limit, f"{run.usage.cost_usd:g} of {limit:g} USD are used up")


def no_progress(run: RunState) -> Failure | None:
    """A reply that is judged: it is empty, or text where a tool call is required. Once it has been judged: a stall."""
    return _stall_failure(run) if run.reply is None or run.reply_judged else _idle_reply_failure(run)


def _stall_failure(run: RunState) -> Failure | None:
    if run.silence_s <= run.guardrails.stall_threshold_s or run.steps == 1:  # before the first step there is no phase
        return None
    return Failure(
        kind=FailureKind.no_progress,
        explanation=f"nothing happened for {run.silence_s:.1f} s between two phases",
        metadata={"stall": True},
    )


def _idle_reply_failure(run: RunState) -> Failure | None:
    if run.batch or run.malformed is not None or run.reply is None:
        return None
    if not run.reply.message.content.strip():
        return Failure(kind=FailureKind.no_progress, explanation="the reply says nothing and calls nothing")
    if run.behavior.text_is_answer:
        return None
    return Failure(kind=FailureKind.no_progress, explanation="the reply is text only; it calls no tool")


# -- call_llm: the provider ---------------------------------------------------------------------------


def _of_kind(failure: Failure, kind: FailureKind) -> Failure | None:
    return failure if failure.kind is kind else None


@silent_while("failure", None)
@takes("transient_provider")
def transient_provider(run: RunState) -> Failure | None:
    """The model call failed, and a retry may succeed."""
    return run.failure and _of_kind(run.failure, FailureKind.transient_provider)


@silent_while("failure", None)
@takes("provider_error")
def provider_error(run: RunState) -> Failure | None:
    """The model call failed, and a retry cannot help."""
    return run.failure and _of_kind(run.failure, FailureKind.provider_error)


@silent_while("failure", None)
@takes("context_overflow")
def context_overflow(run: RunState) -> Failure | None:
    """The provider rejected the prompt as too long."""
    return run.failure and _of_kind(run.failure, FailureKind.context_overflow)


# -- post_llm: the reply ------------------------------------------------------------------------------


@silent_while("reply.finish_reason", FinishReason.STOP)
@takes("output_truncated")
def output_truncated(run: RunState) -> Failure | None:
    """The reply was truncated by its token limit."""
    if run.reply is None or run.reply.finish_reason is not FinishReason.LENGTH:
        return None
    return Failure(kind=FailureKind.output_truncated, explanation="the reply was truncated by its token limit")


@silent_while("reply.finish_reason", FinishReason.STOP)
@silent_while("reply.refusal", None)
@takes("output_refused")
def output_refused(run: RunState) -> Failure | None:
    """The model or a content filter refused; the text of the refusal is the blocker."""
    reply = run.reply
    if reply is None:
        return None
    filtered = reply.finish_reason in (FinishReason.CONTENT_FILTER, FinishReason.REFUSAL)
    if not filtered and reply.refusal is None:
        return None
    text = reply.refusal or reply.message.content or f"stopped by {reply.finish_reason.value}"
    return Failure(kind=FailureKind.output_refused, explanation="the model refused to answer", blockers=(text.strip(),))


@silent_while("malformed", None)
@silent_while("reply.finish_reason", FinishReason.STOP)
@silent_while("reply.refusal", None)
@takes("output_malformed", "output_truncated", "output_refused")
def output_malformed(run: RunState) -> Failure | None:
    """The envelope or the structured output cannot be parsed or is not valid.

    In a graph without rows for a truncated or refused reply, such a reply is malformed too.
    """
    if run.malformed is not None:
        return Failure(kind=FailureKind.output_malformed, explanation=run.malformed)
    reply = run.reply
    if reply is None or (reply.finish_reason is FinishReason.STOP and reply.refusal is None):  # in nearly every step
        return None
    other = output_truncated(run) or output_refused(run)
    return None if other is None else Failure(kind=FailureKind.output_malformed, explanation=other.explanation)


@detector(fires_on=[Example(reply="half a character: \ud800")], silent_on=[Example(reply="a whole one: \u00e4")])
def answer_not_serializable(run: RunState) -> Failure | None:
    """The answer cannot be serialized. A row of the preset ``strict``; elsewhere the odd character is replaced."""
    if run.batch or run.reply is None or run.reply.message.content.isascii():
        return None
    try:
        run.reply.message.content.encode()
    except UnicodeEncodeError:
        text = "the answer cannot be serialized: it contains half a character (a lone surrogate)"
        return Failure(kind=FailureKind.output_malformed, explanation=text)
    return None


def loop_detected(run: RunState) -> Failure | None:
    """A call would be the ``loop_hard_threshold``-th among the last ``loop_window`` that are equal.

    Equal calls have equal results, too, unless the preset counts calls alone: running the tests again after each edit
    is not a loop.
    """
    if not run.batch:
        return None
    window, limit = run.guardrails.loop_window, run.guardrails.loop_hard_threshold
    if len(run.batch) == 1 and run.recent_calls.count(run.batch[0].signature) + 1 < limit:  # evaluated in every step
        return None
    calls = [*run.recent_calls, *[c.signature for c in run.batch]]
    suspects = {signature for signature, count in collections.Counter(calls).items() if count >= limit}
    if not suspects:
        return None
    results = run.recent_results if run.behavior.repeats == "results" else []
    for index in range(len(run.recent_calls), len(calls)):
        if calls[index] not in suspects:
            continue
        count = _count_equal(calls, results, index, window)
        if count >= limit:
            tool = calls[index].rpartition(":")[0]
            return Failure(
                kind=FailureKind.loop_detected,
                explanation=f"the same call of {tool!r} came {count} times among the last {window} calls",
                metadata={"signature": calls[index], "count": count},
            )
    return None


def _count_equal(calls: list[str], results: Sequence[str], index: int, window: int) -> int:
    """How many of the last calls up to one are equal to it and had the newest known result, or an unknown one."""
    digests = [
        results[i] if i < len(results) else ""
        for i in range(max(0, index + 1 - window), index + 1)
        if calls[i] == calls[index]
    ]
    newest = next((digest for digest in reversed(digests) if digest), "")
    return sum(digest in ("", newest) for digest in digests)


# -- post_tool: the results of the batch ----------------------------------------------------------------


def _batch_failure(run: RunState, kind: FailureKind) -> Failure | None:
    """The batch's failure of a kind; its metadata lists the other failures of the batch."""
    failure = run.call_failures.get(kind)
    if failure is None or len(run.call_failures) == 1:
        return failure
    others = {k.value: f.explanation for k, f in run.call_failures.items() if k is not kind}
    return failure.model_copy(update={"metadata": {**failure.metadata, "others": others}})


@silent_while("denials", 0)
@silent_while("call_failures", {})
def policy_violation(run: RunState) -> Failure | None:
    """``max_denials`` consecutive calls were denied, or a tool reported it."""
    if run.denials >= run.guardrails.max_denials:
        return Failure(
            kind=FailureKind.policy_violation,
            explanation=f"{run.denials} tool calls in a row were denied",
            blockers=(f"{run.denials} denials in a row",),
        )
    return _batch_failure(run, FailureKind.policy_violation) if run.call_failures else None


@silent_while("error_key", None)
def repeated_error(run: RunState) -> Failure | None:
    """Circuit breaker: the same tool error occurred in ``repeated_error_threshold`` batches in a row."""
    if run.error_key is None or run.error_streak < run.guardrails.repeated_error_threshold:
        return None
    kind, tool, _, message = run.error_key
    if kind == FailureKind.output_malformed:  # replies without a usable call, which the policy counts
        return None
    return Failure(
        kind=FailureKind.repeated_error,
        explanation=f"{tool!r} failed {run.error_streak} times in a row in the same way: {message}",
        blockers=(message,),
    )


@silent_while("call_failures", {})
def ambiguous_input(run: RunState) -> Failure | None:
    """A tool reported that the request is ambiguous."""
    return _batch_failure(run, FailureKind.ambiguous_input) if run.call_failures else None


@silent_while("call_failures", {})
def scope_too_large(run: RunState) -> Failure | None:
    """A tool reported that the task is too large for one step."""
    return _batch_failure(run, FailureKind.scope_too_large) if run.call_failures else None


@silent_while("call_failures", {})
def capability_gap(run: RunState) -> Failure | None:
    """A tool reported that no available tool can do what is needed."""
    return _batch_failure(run, FailureKind.capability_gap) if run.call_failures else None


@silent_while("call_failures", {})
def kernel_invalidated(run: RunState) -> Failure | None:
    """A tool reported that its execution kernel lost its state."""
    return _batch_failure(run, FailureKind.kernel_invalidated) if run.call_failures else None


@silent_while("call_failures", {})
def unknown_tool(run: RunState) -> Failure | None:
    """A call names a tool that is not registered."""
    return _batch_failure(run, FailureKind.unknown_tool) if run.call_failures else None


@silent_while("call_failures", {})
def invalid_arguments(run: RunState) -> Failure | None:
    """A call's arguments cannot be parsed or are not valid; the tool was not run."""
    return _batch_failure(run, FailureKind.invalid_arguments) if run.call_failures else None


@silent_while("call_failures", {})
def environment_error(run: RunState) -> Failure | None:
    """A tool raised an OSError: a missing file, a refused connection, a full disk."""
    failure = _batch_failure(run, FailureKind.environment_error) if run.call_failures else None
    if failure is None or run.behavior.environment_errors == "retry":
        return failure
    return failure.model_copy(update={"suggested_action": Action.handoff})


@silent_while("call_failures", {})
def tool_error(run: RunState) -> Failure | None:
    """A tool raised, returned a failure, or timed out."""
    return _batch_failure(run, FailureKind.tool_error) if run.call_failures else None
