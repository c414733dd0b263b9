"""``StateContext``: what the effect of a user-defined state is given, and ``custom_effect``, which runs it.

What the effect calls through its context is charged to the run, limited, retried and journaled as the loop's own
calls are. Each call has a number, in the order in which the effect makes them. An effect that is run again, because a
person was asked or the process died, gets the recorded results of its earlier calls in that order; a tool call that
was started and has no end is in doubt, as it is in the loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any, Generic, NamedTuple

from pydantic_core import PydanticSerializationError, to_jsonable_python

from agentfsm.errors import (
    BudgetSpentError,
    ContextOverflowError,
    ModelError,
    ProviderError,
    StateEffectError,
    TransientProviderError,
)
from agentfsm.loop.detectors import cost_limit, iteration_limit, time_limit, token_limit
from agentfsm.loop.events import ToolFinished, ToolStarted
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guards import approval_decided, approval_required, doubt_settled, in_doubt
from agentfsm.loop.history import check_cut
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import Message, Reply, ToolCall, ToolResult, Usage
from agentfsm.loop.model import CallBudget, Model, ModelRequest
from agentfsm.loop.outcomes import CallBlocked, Charge, Outcome, StateResult
from agentfsm.loop.read_only import MAX_NESTING, user_code
from agentfsm.loop.recovery_policy import decide_recovery
from agentfsm.loop.state import CallState, RunState, RunView, StateCall, request_digest
from agentfsm.loop.tool_batch import charge
from agentfsm.machine.declaration import StateSpec
from agentfsm.runtime.approval import check_call, is_repeatable, require_rows_for_rule
from agentfsm.runtime.context import Context, Effect, LongWait, require_short_wait, rest_of_wait_s
from agentfsm.runtime.host import Clock
from agentfsm.runtime.model_call import reply_or_failure
from agentfsm.runtime.run_context import AboutRun, Deps
from agentfsm.runtime.timeout import TimeLimitError, Timeout, being_cancelled
from agentfsm.runtime.tool_channel import CallChannel
from agentfsm.runtime.tool_dispatch import tool_call_context
from agentfsm.runtime.tool_execution import invalid_arguments, run_call
from agentfsm.runtime.tools import Tool

_MODEL_ERRORS: Mapping[FailureKind, type[ModelError]] = {
    FailureKind.transient_provider: TransientProviderError,
    FailureKind.context_overflow: ContextOverflowError,
}

_WAITING_GUARDS = {"approval": (approval_required, approval_decided), "in_doubt": (in_doubt, doubt_settled)}
"""For what a call may wait for: the guard of the row to a waiting state, and of the row that leads back."""


class _EffectWaits(BaseException):  # not an error: it leaves an effect that must wait
    """Leaves the effect, past its ``except Exception``, when a call must wait for a person or for a long time."""


class StateContext(AboutRun, Generic[Deps]):
    """What the effect of a user-defined state may use. It makes one call at a time, and ends with the effect.

    It has the attributes of ``RunContext``, too.

    Attributes:
        run: Everything the run knew when the effect began; it cannot be changed.
        state: The name of the state.
        clock: The host's clock.
        idempotency_key: The same each time the effect is run again after an interruption or a wait, and different for
            every other visit of a state, in any run.
        deps: The run's dependencies; None if it has none.
    """

    def __init__(self, calls: EffectCalls) -> None:
        self.deps: Deps = calls.deps
        self.run: RunView = calls.run.view()
        self.state: str = calls.state
        self.clock: Clock = calls.clock
        self.idempotency_key: str = f"{calls.run.run_id}:{calls.visit}"
        self._calls = calls

    def now(self) -> float:
        """The time, in seconds since the epoch."""
        return self.clock.time()

    async def sleep(self, seconds: float) -> None:
        """Wait. An effect that is run again waits again.

        Args:
            seconds: How long.

        Raises:
            BudgetSpentError: The run's time would be up before; the wait is not begun.
        """
        await self._calls.sleep(seconds)

    async def ask_model(
        self,
        messages: str | Sequence[Message],
        *,
        model: Model | None = None,
        max_output_tokens: int | None = None,
        output_schema: Mapping[str, Any] | None = None,
    ) -> Reply:
        """A model's reply. It does not become part of the transcript.

        Every attempt is a model call of the run: it counts towards ``max_iterations``, ``max_tokens`` and
        ``max_cost_usd``, has ``llm_timeout_s`` or what is left of the run's time, and is journaled. A failed one is
        repeated as the run's policy says.

        Args:
            messages: A prompt, or all messages of the request.
            model: The model; by default the run's.
            max_output_tokens: Maximum tokens of the reply; by default the guardrails'.
            output_schema: JSON schema of the reply, or None for text.

        Raises:
            BudgetSpentError: Nothing is left of a budget of the run.
            ModelError: The call failed, and the policy does not retry it.
            StateEffectError: The effect has ended, is still in another call, or is run again and made another call
                here before.
        """
        sent = [Message.user(messages)] if isinstance(messages, str) else list(messages)
        options = _ModelOptions(max_output_tokens, output_schema)
        async with self._calls.one_at_a_time():
            return await self._calls.ask_model(model, sent, options)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The result of a call of one of the agent's tools, even if it failed or was denied.

        It is validated, approved, timed out and journaled as a call of the model is. If it must wait for a person,
        the effect is left here, and run again after the reply.

        Args:
            name: The tool.
            arguments: Its arguments, as JSON data.

        Raises:
            StateEffectError: The tool cannot be called from here, or rows for the wait are missing; the error says
                which. Or the effect has ended, is still in another call, or is run again and made another call here
                before.
            BudgetSpentError: The run's time is up.
        """
        async with self._calls.one_at_a_time():
            try:
                given = to_jsonable_python(dict(arguments))
            except PydanticSerializationError:
                raise
            except ValueError:  # too deeply nested to be converted, and so to be called
                return invalid_arguments(ToolCall("", name), f"they are nested more than {MAX_NESTING} deep")
            return await self._calls.call_tool(name, given)


class _ModelOptions(NamedTuple):
    max_output_tokens: int | None
    output_schema: Mapping[str, Any] | None


class EffectCalls:
    """The calls that one visit of a user-defined state makes, those of an earlier attempt at it included.

    Attributes:
        run: Everything the run knows.
        state: The name of the state.
        clock: The host's clock.
        visit: The id of the visit; those of its calls begin with it.
        request: What the effect must ask a person, or None.
        long_wait: How long it must wait before it repeats a call, if whoever advances the run does not hold it for so
            long; else None.
        deps: The run's dependencies, or None.
    """

    def __init__(self, context: Context) -> None:
        self.run: RunState = context.run
        self.state: str = str(self.run.state)
        self.clock: Clock = context.config.host.clock
        self.visit = f"{self.state}:{self.run.state_visits.get(self.run.state, 0) + 1}"
        self.request: PendingRequest | None = None
        self.long_wait: LongWait | None = None
        self.deps = context.deps
        self._context = context
        self._waits_since, context.waits_since = context.waits_since, None
        self._calls = dict(self.run.state_calls)
        self._count = 0
        self._busy = self._ended = False
        self._error: StateEffectError | None = None

    # -- calls ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def one_at_a_time(self) -> AsyncGenerator[None]:
        """Holds a call, so that the order of the calls is the same whenever the effect is run.

        Raises:
            StateEffectError: The effect has ended, or is still in another call.
        """
        if self._ended:
            raise StateEffectError(f"the effect of {self.state!r} has ended, and its context with it")
        if self._is_left:
            raise _EffectWaits
        if self._busy:
            raise StateEffectError(f"the effect of {self.state!r} makes one call at a time: await each before the next")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @property
    def _is_left(self) -> bool:
        """Whether the effect must be left: it is run again when somebody has replied, or the wait is over."""
        return self.request is not None or self.long_wait is not None

    async def sleep(self, seconds: float) -> None:
        """Wait, if the run's time allows it."""
        left = self._context.time_left_s
        if left is not None and seconds >= left:
            text = f"wait {seconds:g} s: {max(left, 0):.1f} s of the run's time are left"
            raise self._budget_spent(text, FailureKind.time_limit)
        self._context.recorder.push()  # so that nothing is lost if the process dies while it sleeps
        await self.clock.sleep(seconds)

    async def ask_model(self, model: Model | None, sent: list[Message], options: _ModelOptions) -> Reply:
        """The reply of a model, after as many attempts as the policy allows."""
        attempt = 0
        while True:
            answer = await self._call_model(model or self._context.config.model, sent, options)
            if isinstance(answer, Reply):
                return answer
            attempt += 1
            await self._wait_to_retry(answer, attempt)

    async def call_tool(self, name: str, given: dict[str, Any]) -> ToolResult:
        """The result of a tool call; the effect is left if a person must be asked."""
        number, known = self._next_call(name, request_digest(given))
        call_state = known.tool if known is not None else None
        if call_state is None:
            call_state = CallState(ToolCall(f"{self.visit}:{number}", name, given), "")
        elif not call_state.edited:  # what the journal has may lack secrets
            call_state.call = ToolCall(call_state.call.id, name, given)
        if call_state.result is not None:
            return call_state.result
        _require_callable(self._context, name)
        checked = await check_call(self._context, call_state)
        if isinstance(checked, ToolResult):
            return checked
        if isinstance(checked, PendingRequest):
            _require_rows(self._context, name, checked.kind)
            require_rows_for_rule(self._context, checked)
            self.request = checked
            raise _EffectWaits
        return await self._run_tool(number, call_state, *checked)

    def _next_call(self, name: str, digest: str) -> tuple[int, StateCall | None]:
        """The number of the next call, and what is known of it, if it was made before."""
        self._count += 1
        known = self._calls.get(self._count)
        if known is not None and (known.name != name or (known.digest and digest and known.digest != digest)):
            self._error = StateEffectError(
                f"the effect of {self.state!r} was run again, and its call {self._count} is not the one that it made "
                f"before: {known.name!r} was called then, and {name!r} is called now"
                + (", with something else" if known.name == name else "")
            )
            raise self._error
        return self._count, known

    async def _call_model(self, model: Model, sent: list[Message], options: _ModelOptions) -> Reply | Failure:
        context = self._context
        data: list[Any] = to_jsonable_python(sent)
        number, known = self._next_call(model.name, request_digest(data))
        if known is not None and (answer := known.reply or known.failure) is not None:
            return answer
        self._waits_since = None  # it is over
        self._require_budget()
        guardrails, left = context.run.guardrails, self._context.time_left_s
        limit = guardrails.llm_timeout_s if left is None else min(guardrails.llm_timeout_s, left)
        request = ModelRequest(
            sent,
            (),
            options.max_output_tokens or guardrails.max_output_tokens,
            limit,
            options.output_schema,
            heartbeat_s=guardrails.stream_heartbeat_s,
            budget=self._call_budget(),
        )
        call = self._calls[number] = StateCall(model.name, request_digest(data))
        eid, recorder, timer = f"{self.visit}:{number}", context.recorder, Timeout(guardrails.cancel_grace_s)
        recorder.record_intent(eid, model.name, "again", {"messages": data})
        await recorder.commit()
        try:
            answer = await reply_or_failure(context, model, request, timer, set(), stream=False)
        finally:
            timer.close()
            call.model_calls = request.budget.made
        if isinstance(answer, Reply):
            call.reply = answer
        else:
            call.failure = answer
        await self._record_result(eid, (answer, call.model_calls))
        return answer

    async def _wait_to_retry(self, failure: Failure, attempt: int) -> None:
        """Back off before the next attempt.

        Raises:
            ModelError: The policy does not retry the call.
            BudgetSpentError: The run's time would be up before.
        """
        trial, config = self._trial(), self._context.config
        trial.failure, trial.failure_attempts = failure, {failure.kind: attempt - 1}
        trial.guardrails = trial.guardrails.model_copy(update={"max_execution_time_s": None})  # asked below
        decision = decide_recovery(config.policy, trial, config.host.seed)
        if decision.action is not Action.retry:
            raise _MODEL_ERRORS.get(failure.kind, ProviderError)(failure.explanation)
        if decision.backoff_s and self._count + 1 not in self._calls:
            left = self._context.time_left_s
            rest_s = rest_of_wait_s(self.clock, decision.backoff_s, self._waits_since)
            if left is not None and rest_s >= left:
                text = f"repeat a model call: the backoff outlasts the run's time ({failure.explanation})"
                raise self._budget_spent(text, FailureKind.time_limit)
            try:
                require_short_wait(self._context, rest_s)
            except LongWait as wait:
                self.long_wait = wait
                raise _EffectWaits from None
            if rest_s:
                await self.sleep(rest_s)

    async def _run_tool(self, number: int, call_state: CallState, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        context, call = self._context, call_state.call
        recorder, left = context.recorder, self._context.time_left_s
        if left is not None and left <= 0:
            raise self._budget_spent(f"call {tool.name!r}: the run's time is up", FailureKind.time_limit)
        repeatable = is_repeatable(context, tool)
        if not repeatable and context.config.host.store is not None:
            _require_rows(context, tool.name, "in_doubt")
        self._calls.setdefault(number, StateCall(tool.name, request_digest(call.arguments), tool=call_state))
        attempt = recorder.record_intent(
            call.id, tool.name, "again" if repeatable else "once", {"arguments": call.arguments}
        )
        await recorder.commit()
        call_state.started = True
        if context.builds_events:
            context.emit(ToolStarted, call=call)
        run = context.run
        channel = CallChannel(context, call_state, tool) if tool.takes_context else None
        tool_context = None if channel is None else tool_call_context(context, call, call.id, attempt, channel)
        limit, timer = tool.timeout or run.guardrails.tool_timeout_s, Timeout(run.guardrails.cancel_grace_s)
        limit = limit if left is None else min(limit, left)
        context.running_calls[call.id] = timer
        try:
            result = await run_call(call, tool, arguments, tool_context, timer, limit)
        finally:
            del context.running_calls[call.id]
            timer.close()
            if channel is not None:
                channel.close()
        call_state.result, call_state.started = result, False
        await self._record_result(call.id, result)
        if context.builds_events:
            context.secrets.add(result.withheld)
            context.emit(ToolFinished, result=result)
        return result

    async def _record_result(self, effect_id: str, result: ToolResult | tuple[Reply | Failure, int]) -> None:
        """Record a result, durably before the effect gets it: after a crash nobody knows what the effect did then."""
        if not self._ended:  # else a task that outlived its effect called
            self._context.recorder.record_result(effect_id, result)
            await self._context.recorder.commit()

    # -- budgets --------------------------------------------------------------------------------------

    def _trial(self) -> RunState:
        """The run as it would be if the effect ended now, for the detectors and the policy."""
        trial, used = copy.copy(self._context.run), self.charge()
        trial.counters = dict(trial.counters)
        charge(trial, used.usage, used.model_calls)
        trial.elapsed_s += self._context.uncharged_s
        return trial

    def _require_budget(self) -> None:
        trial = self._trial()
        for limit_reached in (iteration_limit, time_limit, token_limit, cost_limit):
            failure = limit_reached(trial)
            if failure is not None:
                raise self._budget_spent(f"call a model: {failure.explanation}", failure.kind)

    def _call_budget(self) -> CallBudget:
        trial = self._trial()
        limit = trial.guardrails.max_iterations
        return CallBudget(None if limit is None else limit - trial.iterations)

    def _budget_spent(self, text: str, kind: FailureKind) -> BudgetSpentError:
        return BudgetSpentError(f"the effect of {self.state!r} cannot {text}", kind.value)

    def charge(self) -> Charge:
        """What the effect has used since the run was last charged; a call that was cut off counts."""
        calls = [each for each in self._calls.values() if each.tool is None and not each.charged]
        usage = sum((each.reply.usage for each in calls if each.reply is not None), Usage())
        return Charge(sum(each.model_calls for each in calls), usage)

    # -- the effect -----------------------------------------------------------------------------------

    async def run_function(self, function: Callable[[StateContext[Any]], Any]) -> Any:
        """What the function returns, within what is left of the run's time; None if it was left to be run again.

        Raises:
            BudgetSpentError: It did not end in time.
            StateEffectError: It did not make the calls that it had made before.
        """
        try:
            with user_code("effect", function, self.run.change_attempts):
                value = function(StateContext(self))
                value = await self._within_time(value) if isawaitable(value) else value
        except BaseException:
            if not self._is_left or being_cancelled():
                raise
            return None
        finally:
            self._ended = True
        if not self._is_left:
            self._require_same_calls()
        return value

    async def _within_time(self, value: Awaitable[Any]) -> Any:
        left, limit = self._context.time_left_s, self.run.time_limit
        timer = Timeout(2 * self.run.guardrails.cancel_grace_s)  # what it awaits in turn is abandoned before it
        try:
            return await timer.run(value, math.inf if left is None else max(left, 0.0))
        except TimeLimitError:
            text = f"go on: the run's time ({limit:g} s) was up before it ended"
            raise self._budget_spent(text, FailureKind.time_limit) from None
        finally:
            timer.close()

    def blocked(self, request: PendingRequest) -> CallBlocked:
        """The outcome of an effect that must ask a person."""
        return CallBlocked(request, charge=self.charge(), calls=self._calls)

    def _require_same_calls(self) -> None:
        if self._error is not None:
            raise self._error
        if self._busy:
            raise StateEffectError(f"the effect of {self.state!r} ended while it was still in a call: await each call")
        missing = sorted(number for number in self._calls if number > self._count)
        if missing:
            raise StateEffectError(
                f"the effect of {self.state!r} was run again, and ended without its call {missing[0]} of "
                f"{self._calls[missing[0]].name!r}, which it had made before"
            )


def _require_callable(context: Context, name: str) -> None:
    tool = context.config.tools.get(name)
    if tool is None:
        return
    is_agent = tool.delegate is not None and tool.delegate.is_agent
    if tool.control is not None or is_agent or tool.asks:
        what = "a control tool" if tool.control is not None else "a sub-agent" if is_agent else "a tool that asks"
        raise StateEffectError(
            f"the effect of {str(context.run.state)!r} cannot call {name!r}: it is {what}, which only a model's reply "
            "can call"
        )


def _require_rows(context: Context, name: str, kind: str) -> None:
    """Refuse a call that may have to wait for a person, in a state that cannot wait and come back."""
    leave, back = _WAITING_GUARDS[kind]
    graph, state = context.config.machine.graph, str(context.run.state)
    waiting = [row.target for row in graph.rows(state) if row.guard is leave and graph.spec(row.target).waits]
    if any(row.guard is back and row.target == state for each in waiting for row in graph.rows(each)):
        return
    why = "it needs a person's approval" if kind == "approval" else "it is not idempotent, so a crash leaves a doubt"
    raise StateEffectError(
        f"the effect of {state!r} cannot call {name!r}: {why}. Give the state a row {leave.__name__!r} to a "
        f"waiting state whose row {back.__name__!r} leads back to {state!r}"
    )


def custom_effect(function: Callable[[StateContext[Any]], Any]) -> Effect:
    """The effect of a user-defined state: its JSON value becomes ``run.state_results[state]``.

    Args:
        function: Plain or async; takes a ``StateContext`` and returns None, a JSON value, or
            ``StateResult(value, messages)`` to add messages to the transcript.
    """

    async def effect(context: Context) -> Outcome:
        calls, recorder = EffectCalls(context), context.recorder
        recorder.record_intent(calls.visit, calls.state, "again")
        if recorder.sink is not None:
            await recorder.commit()
        context.take_charge = calls.charge
        value = await calls.run_function(function)
        if calls.long_wait is not None:
            raise calls.long_wait
        if calls.request is not None:
            outcome: Outcome = calls.blocked(calls.request)
        else:
            declared = context.config.machine.graph.spec(calls.state)
            outcome = _state_result(value, calls.charge(), declared)
            if outcome.compaction is not None:
                check_cut(context.run.messages, outcome.compaction)
        context.take_charge = None
        return outcome

    return effect


def _state_result(value: Any, used: Charge, declared: StateSpec) -> StateResult:
    """What the effect of a state returned, as an outcome."""
    result = value if isinstance(value, StateResult) else StateResult(value)
    if result.outcome and result.outcome not in declared.outcomes:
        names = ", ".join(declared.outcomes) or "none"
        raise StateEffectError(
            f"the effect of {str(declared.name)!r} came back with {result.outcome!r}, and the state declares: {names}"
        )
    messages = tuple(result.messages)
    for each in messages:
        if not isinstance(each, Message):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
            raise TypeError(
                f"StateResult(messages=...) takes messages (Message.user('...')), not {type(each).__name__}"
            )
    value = to_jsonable_python(result.value, inf_nan_mode="null")
    return StateResult(value, messages, result.outcome, used, result.compaction)
