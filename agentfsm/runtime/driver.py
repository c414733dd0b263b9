"""Drives a run: await the effect, apply its outcome, take a transition, until the run ends or waits for a human.

    outcome  = await effects[run.state](context)    the only await
    on_outcome(run, outcome)                        pure
    decision = machine.step(run)                    pure, atomic
    on_transition(run, decision, states)            pure

There is no await between evaluating the guards and changing the state, so a step is atomic in its event loop, and a
cancellation can only arrive inside an effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from inspect import isawaitable
from time import perf_counter
from types import CoroutineType
from typing import Any, cast

from agentfsm.errors import (
    GraphError,
    JournalError,
    ModelMismatchError,
    ReadOnlyError,
    StaleLease,
    StoreError,
    SuspensionUsedError,
)
from agentfsm.loop.events import LastEvent, ModelReplied, RunResumed, RunStarted, Transitioned
from agentfsm.loop.failures import Failure, FailureKind, describe_exception
from agentfsm.loop.outcomes import (
    CHOOSE_RECOVERY,
    RUN_CALLS,
    Aborted,
    Cancelled,
    Charge,
    Escalated,
    Expired,
    HumanAnswered,
    ModelCallSucceeded,
    Outcome,
    PreStepDone,
    count_tool_calls,
)
from agentfsm.loop.recovery_policy import PolicyError
from agentfsm.loop.reducer import on_outcome, on_transition
from agentfsm.loop.state import RunState
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.runtime.approval import HookAbortError, run_hooks
from agentfsm.runtime.context import (
    NO_STATES,
    AgentConfig,
    Context,
    Effect,
    LongWait,
    Monitor,
    fill_in,
    read_earlier_messages,
)
from agentfsm.runtime.preparation import add_instructions, add_tools, make_deps
from agentfsm.runtime.recorder import JournalSink, ResumePoint
from agentfsm.runtime.result import ending_event, run_final_hooks, shielded, suspend, typed_output
from agentfsm.runtime.run_request import (
    RunRequest,
    escalation_is_due,
    identify_actor,
    require_transition,
    resume_details,
    run_header,
    would_transition,
)
from agentfsm.runtime.subruns import dismiss_subruns, open_subruns
from agentfsm.runtime.timeout import CancelRequests, being_cancelled
from agentfsm.runtime.tools import Tool
from agentfsm.runtime.watchdog import WATCHDOG

CHECKED_MOVES = 100_000
"""After this many moves without a wait, a run must still be within the bound that follows from its graph."""

_NOT_OF_USER_CODE = (StoreError, JournalError, LongWait, ModelMismatchError)
"""What an effect raises without user code: the run does not continue."""

MOVES_BETWEEN_CHECKS = 8
"""After so many moves a run checks whether to yield to the event loop, and how many moves it has made."""


class Driver:
    """Drives one run, a step at a time.

    Attributes:
        context: The run and what its effects work with.
        decisions: Every transition taken so far.
        outcome: The last event; None until the run has ended or is suspended.
        output: The answer, as a value of the agent's output type.
        cancel_reason: Why the run should be cancelled, or None.
        given_up: Why the run cannot continue in this process, or None.
        cancel_requests: What can cancel the task that advances it.
    """

    def __init__(self, config: AgentConfig, run: RunState, request: RunRequest) -> None:
        self.context = Context(config, run, request.prompt, request.deps)
        self.decisions: list[Decision] = []
        self.outcome: LastEvent | None = None
        self.output: Any = None
        self._run = run
        self._config = config
        self._request = request
        self._now = config.host.clock.monotonic
        self._machine = config.machine
        self._change_attempts = run.change_attempts
        self._states = config.machine.specs
        self._effects = config.effects
        self._hooked = _hooked_states(config)
        self._unhooked = _without(config.effects, self._hooked)
        self._move_limit = run.guardrails.max_moves or CHECKED_MOVES
        self._check_at = 0
        self._monitor: Monitor | None = None
        self._has_subagents = False
        self.given_up: JournalError | StoreError | None = None
        self._started = False
        self._escalates = False
        self.cancel_reason: str | None = None
        self.cancel_requests = CancelRequests()
        self._owner: asyncio.Task[Any]
        self._task: asyncio.Task[Any] | None = None
        self._effect_cancelled = False
        self._interruption: asyncio.CancelledError | None = None

    def cancel(self, reason: str) -> None:
        """Cancel the current effect and end the run. May be called from any thread."""
        if self.outcome is None and self.cancel_reason is None:
            self.cancel_reason = reason
            task = self._task
            if task is not None:
                task.get_loop().call_soon_threadsafe(self._cancel_effect, task)

    def stop(self) -> None:
        """Do nothing more about a stored run in this process: another one is to continue it."""
        recorder = self.context.recorder
        recorder.push()
        if recorder.sink is not None:
            recorder.sink.stop()
        elif self._config.open_journal_sink is not None:  # it has not begun, or acquires the run now
            self.given_up = StaleLease(self._run.run_id, None, "was handed over: another process may continue it")

    def cancel_call(self, call_id: str, reason: str) -> bool:
        """Cut off one tool call, and continue the run. May be called from any thread.

        Returns:
            Whether the call was running.
        """
        timer = self.context.running_calls.get(call_id)
        if timer is None:
            return False
        self._owner.get_loop().call_soon_threadsafe(self.context.cut_off_call, call_id, timer, reason)
        return True

    def _cancel_effect(self, task: asyncio.Task[Any]) -> None:
        if self._task is task and not self._effect_cancelled:  # otherwise the effect has already ended
            self._effect_cancelled = True
            self.cancel_requests.own += 1
            task.cancel()

    def exclude_silence(self, since: float) -> None:
        """Exclude the time since a clock reading from the silence: the consumer was handling an event or was away.

        Args:
            since: The reading of ``Clock.monotonic``, in seconds.
        """
        now, charged_at = self._now(), self.context.charged_at
        self.context.charged_at += max(0.0, now - max(since, charged_at))

    async def advance(self, until: Callable[[], bool] | None = None) -> None:
        """Await effects, apply their outcomes and take transitions, in a task that does nothing else.

        Args:
            until: Asked after each transition whether it was the last one for now; None to continue until the run has
                ended or is suspended.

        Raises:
            agentfsm.errors.StoreError: A journal cannot be written; the run must not continue.
            agentfsm.errors.JournalError: That of a sub-agent's run cannot be read, or is of another graph.
            LongWait: The run is to wait for longer than ``context.longest_wait_s``.
        """
        requests, task = self.cancel_requests, current_task()
        self._owner = self.context.timeout.owner = task
        end_watch = WATCHDOG.watch(self.context, self._config.host.watchdog_s)
        requests.apply_to(task)
        try:
            if self.given_up is not None:
                raise self.given_up
            await self._advance(until)
        except (JournalError, StoreError) as error:
            await self._give_up(error)
            raise
        finally:
            requests.forget(task)
            end_watch()

    async def _give_up(self, error: JournalError | StoreError) -> None:
        """Release a stored run that cannot continue here, so that another process may continue it at once."""
        sink = self.context.recorder.sink
        if sink is not None and self.outcome is None:
            self.given_up = error
            with suppress(JournalError, StoreError):  # the first error is the one to raise
                await sink.release()

    async def _advance(self, until: Callable[[], bool] | None) -> None:
        """Take at least one transition; see ``advance``."""
        run, context, states, stop_states = self._run, self.context, self._states, self._config.stop_states
        if self.outcome is None and not self._started:
            await self._open_run()
            if (
                run.state in stop_states
                and not self._escalates
                and _is_at_its_end(self._request, states[run.state].final)
            ):
                await self._finish()
        sink, decisions = context.recorder.sink, self.decisions
        now, unhooked, task, requests = self._now, self._unhooked, self._owner, self.cancel_requests
        while self.outcome is None:
            if sink is not None and sink.error is not None:  # a record was lost: none may follow it
                await sink.flush()  # raises, and releases the lease
            state = run.state
            effect = unhooked.get(state)
            if effect is None or self.cancel_reason is not None or len(decisions) >= self._check_at:
                effect = self._choose_effect(state)
            outcome: Any
            try:
                outcome = effect(context)
            except (Exception, asyncio.CancelledError) as error:  # of user code: no cancellation can arrive here
                outcome = self._exception_outcome(state, error)
            # Times are in whole microseconds, so that replaying the journal adds up exactly the same times.
            elapsed_us = silence_us = 0  # a plain function's time is negligible; it is counted with the next effect
            if outcome.__class__ is CoroutineType:
                started = now()
                silence_us = int((started - context.charged_at) * 1e6 + 0.5)
                self._task = task
                if self.cancel_reason is not None:  # by another thread, before there was a task to cancel
                    task.get_loop().call_soon(self._cancel_effect, task)
                try:
                    outcome = await outcome
                    if requests.from_outside:  # the effect suppressed it; it stands all the same
                        raise asyncio.CancelledError
                except BaseException as error:
                    outcome = self._raised_outcome(state, error)
                finally:
                    self._task = None
                    if self._effect_cancelled:
                        self._effect_cancelled = False
                        requests.own -= 1
                        task.uncancel()
                    context.charged_at = now()
                elapsed_us = int((context.charged_at - started) * 1e6 + 0.5)
            elif outcome.__class__ is PreStepDone:  # the guards read the clock, so its time must be counted
                silent_since, context.charged_at = context.charged_at, now()
                silence_us = int((context.charged_at - silent_since) * 1e6 + 0.5)
            subruns = open_subruns(context) if run.batch and self._has_subagents else ()
            self._apply_outcome(outcome, elapsed_us, silence_us)
            if run.state in stop_states and not (
                type(outcome) is Escalated and self._request.reply is not None  # which is applied next
            ):
                await self._finish(subruns)
            elif until is not None and not (self._interruption or requests.from_outside) and until():
                return  # a cancelled task's run ends first
        if self._interruption is not None:
            try:
                raise self._interruption
            finally:
                self._interruption = None

    async def _open_run(self) -> None:
        config, run, recorder = self._config, self._run, self.context.recorder
        request = self._request
        if request.by is not None or request.reply is not None or request.dismiss_reason is not None:
            request = self._request = await identify_actor(config, run, request)
        record, resume_point = request.suspension_record, request.resume_point
        run.guardrails = request.guardrails or run.guardrails
        waits = self._states[run.state].waits
        if run.details.has_deps or config.deps_factory is not None:
            await make_deps(self.context, dismissed=request.dismiss_reason is not None)
        if config.toolsets or config.make_instructions is not None:
            new = record is None and resume_point is None
            await add_tools(self.context, dismissed=request.dismiss_reason is not None)
            config = self._config = self.context.config
            if new:
                if (approvals := config.pin_approvals(config)) != run.details.approvals:  # those of its toolsets
                    run.details = replace(run.details, approvals=approvals)
                await add_instructions(self.context)
        self._escalates = waits and request.dismiss_reason is None and escalation_is_due(config, run)
        if self._escalates:
            require_transition(config.machine, run, Escalated())
        if waits and (request.reply is not None or request.dismiss_reason is not None):
            require_transition(config.machine, run, self._external_outcome())
        elif request.dismiss_reason is not None:  # an interrupted run: its effect is not run again
            self.cancel_reason = self.cancel_reason or request.dismiss_reason
        if config.open_journal_sink is not None:  # takes the run's lease: no other process can drive it from here on
            recorder.sink = await config.open_journal_sink(run, resume_point)
            if self.given_up is not None:
                raise self.given_up
            await recorder.sink.watch_signals(self.cancel, request.signal_id)
        counted_elsewhere = resume_point is not None or run.parent is not None  # by the store, or by the calling run
        if record is not None and not counted_elsewhere and not config.host.replay_guard.claim(record.record_id):
            raise SuspensionUsedError(f"record {record.record_id!r} was already resumed")
        self.context.may_lack_values = resume_point is not None or record is not None
        if resume_point is not None:
            recorder.restore_attempts(resume_point.attempts)
            does = self._states[run.state].effect
            if does is CHOOSE_RECOVERY or callable(does):  # a state of the user's own repeats its model calls, too
                self.context.waits_since = resume_point.stepped_at
            self.context.visited_before_resume = resume_point.visited
            self.context.completed_results.extend(resume_point.results.values())
            if resume_point.migration_details:
                recorder.record("run.migrated", resume_point.migration_details)
            recorder.record("run.resumed", resume_details(request))
        else:
            recorder.record("run.created", run_header(config, run, request))
        self.context.continue_numbers(_first_seq(resume_point, recorder.sink))
        kind = resume_point.kind if resume_point is not None else record.kind if record is not None else None
        about = {"model": config.model.name, "session_id": run.session_id, "parent": run.parent}
        if kind is not None:
            self.context.emit(RunResumed, kind=kind, **about)
        else:
            run.counters.update(dict.fromkeys(self._states[run.state].spends, 1))
            self.context.emit(RunStarted, prompt=request.prompt, **about)
        if config.open_monitor is not None:
            self._monitor = config.open_monitor(run)
        self._has_subagents = any(each.delegate is not None for each in config.tools.values())
        self._started = True
        self.context.charged_at = self._now()

    async def read_earlier_messages(self) -> None:
        """Read what was not read of the run when it was loaded.

        Raises:
            JournalError: It was tampered with, or cannot be read.
            StoreError: The store cannot be read.
        """
        if self._started:
            await read_earlier_messages(self.context)
        elif (point := self._request.resume_point) is not None and point.base is not None and point.base.read:
            earlier = await point.base.read()
            fill_in(self.context, earlier.messages)
            self._request = replace(self._request, resume_point=point.with_earlier(earlier))

    # -- the effect -----------------------------------------------------------------------------------

    def _choose_effect(self, state: str) -> Effect:
        """What is done in a state: its effect, or what comes before it or replaces it."""
        effect = self._effects.get(state)
        if effect is None:
            escalates, self._escalates = self._escalates and self.cancel_reason is None, False
            return _coming_back_with(Escalated() if escalates else self._external_outcome())
        if self.cancel_reason is not None:
            return _coming_back_with(self._cancelled_outcome())
        yields, made = False, len(self.decisions)
        if made >= self._check_at:
            if made >= self._move_limit:
                self._move_limit = _move_limit(self._config.machine.graph, self._run)
                if made >= self._move_limit:
                    text = (
                        f"the run has made {self._move_limit} moves without an end or a wait: a cycle of its graph has "
                        "no limit that ends it (max_moves)"
                    )
                    return _coming_back_with(self._aborted_outcome(text, RuntimeError(text)))
            self._check_at = made + MOVES_BETWEEN_CHECKS
            if self._check_at > self._move_limit:
                self._check_at = self._move_limit
            yields = perf_counter() > self.context.yield_at or _lacks_bounds(self._monitor)
        if yields or state in self._hooked:
            return lambda _: self._run_hooks_and_effect(state, effect)
        return effect

    async def _run_hooks_and_effect(self, state: str, effect: Effect) -> Outcome | None:
        await self.context.yield_if_due()
        await _compare_bounds(self._monitor, self.context)
        if state in self._hooked:
            self.context.recorder.push()
            await run_hooks(self.context, state)
        outcome = effect(self.context)
        return cast("Outcome | None", await outcome if isawaitable(outcome) else outcome)

    def _raised_outcome(self, state: str, error: BaseException) -> Outcome:
        """The outcome of an effect that raised: what ``cancel`` does to it, and any exception of user code.

        Raises:
            StoreError: The journal cannot be written; the run must not continue.
            JournalError: The journal cannot be read.
            LongWait: The run is not to continue now.
            ModelMismatchError: The run has exceeded a bound, and the host asked for an error.
            asyncio.CancelledError: The task was cancelled, and the run has been handed over, or its store has failed.
            BaseException: The program ends.
        """
        if isinstance(error, asyncio.CancelledError):
            if self.cancel_requests.from_outside or (not self._effect_cancelled and being_cancelled()):
                sink = self.context.recorder.sink
                if sink is not None and sink.error is not None:  # how the run ends cannot be recorded
                    raise error
                self._interruption = error
                self.cancel_reason = self.cancel_reason or "the task was cancelled"
            if self._interruption is not None or self._effect_cancelled:
                return self._cancelled_outcome()
        elif isinstance(error, _NOT_OF_USER_CODE) or not isinstance(error, Exception):
            raise error
        return self._exception_outcome(state, error)

    def _external_outcome(self) -> Outcome:
        request, machine = self._request, self._config.machine
        cancelled = Cancelled(self.cancel_reason or request.dismiss_reason or "dismissed")
        if request.reply is not None and (
            self.cancel_reason is None or not would_transition(machine, self._run, cancelled)
        ):
            return HumanAnswered(request.reply)
        late = request.expires_at is not None and self._config.host.clock.time() > request.expires_at
        return Expired() if late and would_transition(machine, self._run, Expired()) else cancelled

    def _cancelled_outcome(self) -> Cancelled:
        return Cancelled(
            "cancelled" if self.cancel_reason is None else self.cancel_reason,
            tuple(self.context.completed_results),
            _unfinished_charge(self.context),
        )

    def _exception_outcome(self, state: str, error: BaseException) -> Aborted:
        if isinstance(error, HookAbortError | PolicyError):  # its text says whose code it was
            return self._aborted_outcome(str(error), error.__cause__ or error)
        return self._aborted_outcome(f"the effect of {str(state)!r} raised {describe_exception(error)}", error)

    def _aborted_outcome(self, text: str, error: BaseException) -> Aborted:
        failure = Failure(kind=FailureKind.aborted, explanation=text, metadata={"error_class": type(error).__name__})
        return Aborted(failure, tuple(self.context.completed_results), _unfinished_charge(self.context))

    # -- the step -------------------------------------------------------------------------------------

    def _apply_outcome(self, outcome: Outcome | None, elapsed_us: int, silence_us: int) -> None:
        """Apply an outcome and take a transition. Nothing here awaits.

        Args:
            outcome: The outcome of the effect.
            elapsed_us: Microseconds that the effect took, if its time counts.
            silence_us: Silence before it: microseconds since the end of the last effect whose time counted.
        """
        context, run, change_attempts = self.context, self._run, self._change_attempts
        try:
            if silence_us or elapsed_us:
                on_outcome(run, outcome, elapsed_us / 1e6, silence_us / 1e6)
            elif outcome is not None:
                on_outcome(run, outcome)
        except Exception as error:  # a user's model or effect returned something that cannot be applied
            outcome, elapsed_us, silence_us = self._exception_outcome(run.state, error), 0, 0
            on_outcome(run, outcome)
        if context.completed_results:
            context.completed_results.clear()
        cancel = None
        if self.cancel_reason is not None and run.cancelled is None:
            cancel = self.cancel_reason
            on_outcome(run, Cancelled(cancel))
        aborted = run.aborted
        if change_attempts:  # of user code that has handled the error, or that runs in a task of its own
            run.abort("user code", ReadOnlyError(change_attempts[0]))
        decision = self._machine.step(run)
        self.decisions.append(decision)
        raised = run.aborted if run.aborted is not aborted else None  # a guard raised while it was evaluated
        if change_attempts:
            change_attempts.clear()
        context.recorder.record_transition(outcome, cancel, elapsed_us, silence_us, decision, raised)
        if context.builds_events:
            emitted = self._now()
            _emit_transition(context, outcome, decision)
            context.charged_at += self._now() - emitted  # the time that observers take is not silence
        on_transition(run, decision, self._states)
        context.seen = None
        monitor = self._monitor
        if monitor is not None:
            _report(context, monitor.record_move(decision.transition, run, count_tool_calls(outcome)))
            if monitor.lacks_bounds:
                self._check_at = 0  # they are computed before the next effect, or at the end

    # -- the end --------------------------------------------------------------------------------------

    async def _finish(self, subruns: Iterable[tuple[Tool, str]] = ()) -> None:
        """Record that the run has ended or waits, and emit its last event.

        Args:
            subruns: The runs of sub-agents that end with it, beside those that were replying to servers.
        """
        run = self._run
        final = self._states[run.state].final
        sink = self.context.recorder.sink
        unread = sink is not None and sink.has_unread
        cut_off = await shielded(read_earlier_messages(self.context)) if unread else None
        resumed = self._request.resume_point is not None
        if final and (subruns or resumed):  # before its own end is durable, or nobody does
            cut_off = await shielded(dismiss_subruns(self.context, subruns, resumed=resumed)) or cut_off
        try:
            if cut_off is not None:
                raise cut_off
            if self.cancel_reason is None:  # whoever cancelled the run does not wait for it
                await _compare_bounds(self._monitor, self.context)
            await run_final_hooks(self.context, final)
        finally:  # a cancellation that arrives here is too late to change how the run ended
            self.context.timeout.close()
            kind, fields = ending_event(run) if final else suspend(self.context)
            recorder = self.context.recorder
            if final:
                recorder.record("run.finished", {"ending": kind.__name__})
            cancellation = None
            if recorder.sink is not None:  # durable before the last event is emitted
                cancellation = await shielded(recorder.commit())
                if not final:
                    fields["digest"] = recorder.sink.head
            self.output = typed_output(self.context, fields.get("output"))
            if final:  # the number of the other event is in the journal already
                self.context.emit_blocked()
            self.outcome = cast("LastEvent", self.context.emit_final(kind, **fields))
            if cancellation is not None:
                raise cancellation


EVENTS_PER_EPOCH = 2**32
"""Events that a run can have in one process, at most: from a crash on, nobody knows how many it had."""


def _first_seq(resume_point: ResumePoint | None, sink: JournalSink | None) -> int:
    """The least number that the events of a run may continue from, so that none has the number of an earlier one.

    A suspension says how many there were. Since a crash, which may be one of a process that had only just acquired the
    run, the epoch takes its place.
    """
    if resume_point is None or sink is None:
        return 0
    crashed = resume_point.kind == "interrupted" or sink.epoch != resume_point.epoch + 1
    return sink.epoch * EVENTS_PER_EPOCH if crashed else 0


def _hooked_states(config: AgentConfig) -> frozenset[str]:
    """The states before whose effect hooks are run; those that check calls are run by the effect itself."""
    if not config.hooks:
        return NO_STATES
    specs = config.machine.specs
    return frozenset(state for state in config.hooks if state in specs and specs[state].effect is not RUN_CALLS)


def _without(effects: Mapping[str, Effect], states: frozenset[str]) -> Mapping[str, Effect]:
    """The effects of all other states."""
    return {state: effect for state, effect in effects.items() if state not in states} if states else effects


def _coming_back_with(outcome: Outcome) -> Effect:
    """What is done where the outcome is known."""
    return lambda _: outcome


def _is_at_its_end(request: RunRequest, final: bool) -> bool:
    """Whether an interrupted run was already at its end, or suspended, so that only its last event is due."""
    suspended = request.resume_point is not None and request.reply is None and request.dismiss_reason is None
    return final or suspended


def _unfinished_charge(context: Context) -> Charge | None:
    """What the effect of a user-defined state has used that was cut off; once."""
    take, context.take_charge = context.take_charge, None
    return None if take is None else take()


def _move_limit(graph: Graph, run: RunState) -> int:
    """How many moves the run may make: as many as its guardrails say, or else as its graph can make."""
    if run.guardrails.max_moves is not None:
        return run.guardrails.max_moves
    try:
        return max(CHECKED_MOVES, graph.max_moves(lambda counter: counter.limit_in(run)))
    except GraphError:  # a counter without a limit: no bound follows from the graph
        return CHECKED_MOVES


def _lacks_bounds(monitor: Monitor | None) -> bool:
    return monitor is not None and monitor.lacks_bounds


async def _compare_bounds(monitor: Monitor | None, context: Context) -> None:
    """Compare a run with the bounds of its model, once it has come so far, without blocking the event loop.

    Raises:
        ModelMismatchError: The run has exceeded one, and the host asked for an error.
    """
    if monitor is not None and monitor.lacks_bounds:
        _report(context, await asyncio.to_thread(monitor.compare_bounds))


def _report(context: Context, mismatch: object | None) -> None:
    """Report what the model of the graph's proofs does not allow, if there is anything."""
    if mismatch is None:
        return
    if context.config.host.monitor == "raise":
        raise ModelMismatchError(str(mismatch))
    context.warn(str(mismatch))


def after_one() -> bool:
    """For ``Driver.advance``: return after one transition."""
    return True


def current_task() -> asyncio.Task[Any]:
    """The task that this code runs in."""
    return cast("asyncio.Task[Any]", asyncio.current_task())


def _emit_transition(context: Context, outcome: Outcome | None, decision: Decision) -> None:
    if isinstance(outcome, ModelCallSucceeded):
        reply = outcome.reply
        context.emit(
            ModelReplied,
            message=reply.message,
            usage=reply.usage,
            finish_reason=reply.finish_reason,
            model=reply.model,
        )
    context.emit(Transitioned, decision=decision)
