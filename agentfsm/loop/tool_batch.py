"""The current batch of tool calls: recording each result, and appending all of them to the transcript."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from agentfsm.loop import prompts
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import FinishReason, Role, ToolCall, ToolResult, Usage, new_message
from agentfsm.loop.state import CallState, RunState


def charge(run: RunState, usage: Usage | None, model_calls: int) -> None:
    """Charge a run for model calls that were made for it outside ``call_llm``."""
    if usage is not None:
        run.usage += usage
    run.model_calls += model_calls
    run.counters["iterations"] = run.iterations + model_calls


def open_batch(run: RunState, calls: Collection[ToolCall]) -> None:
    """Make the calls of a reply the current batch. Those beyond ``max_calls_per_reply`` are not run."""
    run.first_pending = 0
    batch = run.batch = []
    if not calls:
        return
    for call in calls:
        batch.append(CallState(call, call.signature))  # noqa: PERF401  # quicker for the usual single call
    limit = run.guardrails.max_calls_per_reply
    if len(batch) > limit:
        for each in batch[limit:]:
            text = prompts.too_many_calls_text(limit)
            each.result = ToolResult(each.call.id, each.call.name, text, status="skipped")


def record_results(run: RunState, results: Sequence[ToolResult]) -> None:
    """Store results of calls of the batch, and update the counts of denials and repeated errors."""
    batch = run.batch
    by_id: dict[str, CallState] | None = None
    for result in results:
        index = run.first_pending
        call = batch[index] if index < len(batch) else None
        if call is None or call.call.id != result.call_id:  # not the next one, as it is in nearly every case
            if by_id is None:
                by_id = {each.call.id: each for each in batch}
            call = by_id.get(result.call_id)
        if call is not None:
            _record_result(run, call, result)


def _record_result(run: RunState, call: CallState, result: ToolResult) -> None:
    call.started = False
    call.held = call.answer = None
    if result.usage is not None:
        charge(run, result.usage, result.model_calls)
    if result.withheld:
        run.withheld = (*run.withheld, *(each for each in result.withheld if each not in run.withheld))
    if result.ending == "ask":  # its result is the person's reply
        run.ending = "ask"
        run.pending_request = PendingRequest(
            "question", call_id=result.call_id, tool=result.name, **_question_fields(result)
        )
        return
    call.result = result
    run.first_pending = run.next_call
    if result.status == "denied":
        run.denials += 1
    elif result.failure is not None:
        run.denials = 0
        key = _error_key(result)
        counts_each = run.behavior.breaker_counts == "calls"
        if (
            counts_each
            or key != run.error_key
            or not any(_has_error(each, key) for each in run.batch if each is not call)
        ):
            count_error(run, key)
        run.call_failures.setdefault(result.failure.kind, result.failure)
    elif result.status == "done":
        run.denials = run.error_streak = 0
        run.error_key = None
        if result.ending is not None:
            run.ending, run.ending_value = result.ending, result.value


def _error_key(result: ToolResult) -> tuple[str, str, str, str]:
    kind = "" if result.failure is None else result.failure.kind.value
    return kind, result.name, result.error_class, " ".join(result.content.split())


def _has_error(call: CallState, key: tuple[str, str, str, str]) -> bool:
    return call.result is not None and call.result.failure is not None and _error_key(call.result) == key


def count_error(run: RunState, key: tuple[str, str, str, str]) -> None:
    """Count an error for the circuit breaker; a different one starts over."""
    run.error_streak = run.error_streak + 1 if key == run.error_key else 1
    run.error_key = key


def _question_fields(result: ToolResult) -> dict[str, Any]:
    value = cast("Mapping[str, Any]", result.value or {})
    return {
        "question": value.get("question", ""),
        "context": value.get("context", ""),
        "choices": tuple(value.get("choices", ())),
    }


def is_final_text(run: RunState) -> bool:
    """Whether the transcript ends with a reply without calls; a retry must then say why it was rejected."""
    return not run.batch and bool(run.messages) and run.messages[-1].role is Role.ASSISTANT


def append_tool_results(run: RunState) -> None:
    """Append one result for every call of the batch to the transcript, and close the batch."""
    if not run.batch:
        return
    _note_results(run)
    native = run.reply is not None and bool(run.reply.message.tool_calls)  # else the calls came in an envelope
    for call in run.batch:
        result = call.result or ToolResult(call.call.id, call.call.name, _skip_reason(run), status="skipped")
        content = result.content
        if call.edited:
            content += "\n[Note: a person changed the arguments of this call.]"
        if result.status in ("done", "failed") and run.behavior.repeats == "results" and run.behavior.addendum:
            count, enough = run.recent_calls.count(call.signature), run.guardrails.loop_soft_threshold
            if count >= enough and call.result is not None:  # only then are the results compared
                count = _count_equal_results(run, call.signature, call.result)
            if count >= enough:
                content += "\n" + prompts.repeated_call_note(count)
        call_id = result.call_id if native else None
        failed = result.status != "done"
        run.messages.append(new_message(Role.TOOL, content, (), call_id, result.name, failed, None, result.images))
    run.batch, run.first_pending = [], 0
    run.call_failures = {}
    if run.deferred_messages:
        run.messages.extend(run.deferred_messages)
        run.deferred_messages = []


def _note_results(run: RunState) -> None:
    """Store digests of the batch's results beside its signatures, which are the last of the recent calls."""
    calls, results = run.recent_calls, run.recent_results
    place = len(calls)
    if len(results) != place:  # of a run that was stored before results were compared
        results.extend([""] * (place - len(results)))
    for call in reversed(run.batch):
        place -= 1
        if place < 0:
            return
        if call.result is not None and call.result.status != "skipped" and calls[place] == call.signature:
            results[place] = _digest(call.result)


def _digest(result: ToolResult) -> str:
    text = result.content.encode("utf-8", "surrogatepass")
    if result.images:
        text += "".join(image.data for image in result.images).encode()
    return f"{zlib.crc32(text):08x}"  # of an honest tool; a digest that nobody can forge is not needed here


def _count_equal_results(run: RunState, signature: str, result: ToolResult) -> int:
    """How many of the recent calls are equal to one of the batch, and are known to have had the same result."""
    entry = (signature, _digest(result))
    return sum(pair == entry for pair in zip(run.recent_calls, run.recent_results, strict=False))


def _skip_reason(run: RunState) -> str:
    if run.cancelled is not None:
        return prompts.NOT_RUN_TEXTS["cancelled"]
    if run.aborted is not None:
        return prompts.NOT_RUN_TEXTS["aborted"]
    if run.reply is not None and run.reply.finish_reason is FinishReason.LENGTH:
        return prompts.NOT_RUN_TEXTS["truncated"]
    if run.pending_request is not None and run.pending_request.call_id is not None:
        return prompts.NOT_RUN_TEXTS["ask"]
    return prompts.NOT_RUN_TEXTS[run.ending or ""]
