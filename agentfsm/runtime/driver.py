"""Drives a run: await the state's effect, apply its outcome, take a transition, until the run ends or waits for a human.

    outcome  = await effects[run.state](context)    the only await
    on_outcome(run, outcome)                        pure
    decision = machine.step(run)                    pure, atomic
    on_transition(run, decision)                    pure

``RunRequest`` says what the driver starts or resumes. There is no await between reading the guards and
changing the state, so a step is atomic in its event loop, and a cancellation can only land inside an effect.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine
from dataclasses import dataclass
from inspect import isawaitable
from types import CoroutineType
from typing import Any, cast

from agentfsm.errors import JournalError, NoTransitionError, StoreError, SuspensionUsedError
from agentfsm.loop.events import Ending, ModelReplied, RecoveryStarted, RunResumed, RunStarted, Transitioned
from agentfsm.loop.failures import Action, Failure, FailureKind, describe_exception
from agentfsm.loop.outcomes import (
    Aborted,
    Cancelled,
    Expired,
    HumanAnswered,
    ModelCallSucceeded,
    Outcome,
    RecoveryDecided,
)
from agentfsm.loop.reducer import on_outcome, on_transition
from agentfsm.loop.state import HumanReply, RunState
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.engine import Decision, Machine
from agentfsm.machine.graph import State
from agentfsm.runtime.approval import HookAbortError, run_hooks
from agentfsm.runtime.context import AgentConfig, Context, Effect
from agentfsm.runtime.recorder import ResumePoint, RunHeader
from agentfsm.runtime.result import ending_event, run_final_hooks, shielded, suspend, typed_output
from agentfsm.runtime.tool_execution import being_cancelled

__all__ = ["Driver", "RunRequest", "require_transition", "resume_details", "run_header", "would_transition"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a driver is sent out with, beside the run.

    Attributes:
        prompt: The user's message, where a run begins.
        suspension_record: The record that is resumed, or None.
        reply: The person's answer to it.
        dismiss_reason: Why the run is to end unanswered, or None.
        resume_point: Where the run stood in the host's store, where it comes from there.
    """

    prompt: str = ""
    suspension_record: SuspensionRecord | None = None
    reply: HumanReply | None = None
    dismiss_reason: str | None = None
    resume_point: ResumePoint | None = None

    @property
    def expires_at(self) -> float | None:
        """Until when the run can be answered, in seconds since the epoch."""
        if self.resume_point is not None:
            return self.resume_point.expires_at
        return None if self.suspension_record is None else self.suspension_record.expires_at


def run_header(config: AgentConfig, run: RunState, request: RunRequest) -> RunHeader:
    """What the first record of a run's journal says."""
    record = request.suspension_record
    return RunHeader(
        run.run_id,
        run.session_id,
        config.machine.graph,
        run.guardrails,
        run.behavior,
        config.policy,
        tuple(run.messages) if record is None else (),
        None if record is None else record.state,
        config.host.seed,
        {} if run.parent is None else {"run": run.parent[0], "call": run.parent[1]},
        tuple(t.spec for t in config.tools.values()),
    )


def resume_details(request: RunRequest) -> dict[str, Any]:
    """What a record says of a run that somebody takes up: from what, and which record is answered."""
    taken_up = request.resume_point
    if taken_up is None:
        return {}
    if request.reply is None or taken_up.request_ref is None:
        return {"from": taken_up.kind}
    seq, digest = taken_up.request_ref
    return {"from": taken_up.kind, "to": {"seq": seq, "hash": digest}}


def would_transition(machine: Machine, run: RunState, outcome: Outcome) -> bool:
    """Whether a run that waits would go on with an outcome; the run itself stays as it is.

    Args:
        machine: Its graph, compiled.
        run: The run.
        outcome: What would come from outside.
    """
    trial = copy.copy(run)
    trial.messages, trial.recent_calls = list(run.messages), list(run.recent_calls)
    trial.batch = [copy.copy(call) for call in run.batch]
    trial.deferred_messages, trial.state_results = list(run.deferred_messages), dict(run.state_results)
    trial.failure_attempts, trial.call_failures = dict(run.failure_attempts), dict(run.call_failures)
    on_outcome(trial, outcome)
    return machine.would_move(trial)


def require_transition(machine: Machine, run: RunState, outcome: Outcome) -> None:
    """Make sure that a run that waits would go on with an outcome, before anything is done about it.

    Raises:
        NoTransitionError: The graph has no row for it; nothing was changed, and no record was used.
    """
    if not would_transition(machine, run, outcome):
        what = outcome.reply.kind if isinstance(outcome, HumanAnswered) else type(outcome).__name__.lower()
        rows = ", ".join(row.name for row in machine.graph.rows(run.state))
        raise NoTransitionError(
            f"run {run.run_id!r} waits in {str(run.state)!r}, and no row there takes {what!r} (rows: {rows}); it waits "
            "as before, and its record is unused: add a row to the graph"
        )


class Driver:
    """Drives one run, a step at a time.

    Attributes:
        context: The run and its parts.
        decisions: Every move so far.
        outcome: The last event, once it is there.
        output: The answer, as a value of the agent's output type.
    """

    def __init__(self, config: AgentConfig, run: RunState, request: RunRequest) -> None:
        self.context = Context(config, run, request.prompt)
        self.decisions: list[Decision] = []
        self.outcome: Ending | None = None
        self.output: Any = None
        self._run = run
        self._config = config
        self._request = request
        self._now = config.host.clock.monotonic
        self._step = config.machine.step
        self._record_transition = self.context.recorder.record_transition
        self._final_states = frozenset(s.name for s in config.machine.graph.states if s.final)
        self._started = False
        self._idle_since = 0.0
        self._cancel_reason: str | None = None
        self._owner: asyncio.Task[Any]
        self._task: asyncio.Task[Any] | None = None
        self._effect_cancelled = False

    def cancel(self, reason: str) -> None:
        """Ask for the end: what is being awaited is cut off. Any thread may ask."""
        if self.outcome is None and self._cancel_reason is None:
            self._cancel_reason = reason
            task = self._task
            if task is not None:
                task.get_loop().call_soon_threadsafe(self._cancel_effect, task)

    def _cancel_effect(self, task: asyncio.Task[Any]) -> None:
        if self._task is task and not self._effect_cancelled:  # else the effect has ended by itself
            self._effect_cancelled = True
            task.cancel()

    def exclude_idle(self, since: float) -> None:
        """Do not count the time from then to now as silence: a consumer held an event, or left the run alone."""
        now = self._now()
        self._idle_since += max(0.0, now - max(since, self._idle_since))

    async def run_to_end(self) -> None:
        """Advance until the run has ended or waits for a person, all in the task at hand."""
        self._bind_task()
        while self.outcome is None:
            await self._advance()

    async def advance(self) -> None:
        """Await one effect, fold it in and step."""
        self._bind_task()
        await self._advance()

    def _bind_task(self) -> None:
        self._owner = self.context.timeout.owner = cast("asyncio.Task[Any]", asyncio.current_task())

    async def _advance(self) -> None:
        run = self._run
        keeper = self.context.recorder.sink
        if keeper is not None and keeper.error is not None:  # what was not kept did not happen: nothing comes behind
            await keeper.flush()  # it raises, and gives the run back
        if not self._started:
            await self._open_run()
            if run.state in self._config.stop_states and self._has_no_next_effect():
                await self._finish()
                return
        outcome = self._start_effect(run.state)
        if type(outcome) is CoroutineType:
            started = self._now()
            silence = started - self._idle_since
            try:
                outcome = await self._await_effect(run.state, cast("Coroutine[Any, Any, Outcome | None]", outcome))
            except asyncio.CancelledError:
                self._cancel_reason = self._cancel_reason or "the task was cancelled"
                self._apply_outcome(self._cancelled_outcome(), started, silence)
                await self._drain_cancelled()
                raise
            self._apply_outcome(outcome, started, silence)
        elif run.state == State.PRE_STEP:  # where time is judged, it must be known
            started = self._now()
            self._apply_outcome(outcome, started, started - self._idle_since)
        else:  # what takes no time to speak of is counted with what comes next
            self._apply_outcome(outcome)
        if run.state in self._config.stop_states:
            await self._finish()

    async def _open_run(self) -> None:
        parts, run, errand, recorder = self._config, self._run, self._request, self.context.recorder
        record, taken_up = errand.suspension_record, errand.resume_point
        waits = self._config.effects.get(run.state) is None and run.state not in self._final_states
        if waits and (errand.reply is not None or errand.dismiss_reason is not None):
            require_transition(parts.machine, run, self._external_outcome())
        elif errand.dismiss_reason is not None:  # it was cut off: what it was at is not done again
            self._cancel_reason = self._cancel_reason or errand.dismiss_reason
        if parts.open_journal_sink is not None:  # whoever has the run in the store has it alone, from here on
            recorder.sink = await parts.open_journal_sink(run.run_id, taken_up)
        if record is not None and not parts.host.replay_guard.claim(record.record_id):
            raise SuspensionUsedError(f"record {record.record_id!r} was resumed already")
        if taken_up is not None:
            recorder.restore_attempts(taken_up.attempts)
            self.context.visited_before_resume = taken_up.visited
            self.context.completed_results.extend(taken_up.results.values())
            if taken_up.migration_details:
                recorder.record("run.migrated", taken_up.migration_details)
            recorder.record("run.resumed", resume_details(errand))
        else:
            recorder.record("run.created", run_header(parts, run, errand))
        kind = taken_up.kind if taken_up is not None else record.kind if record is not None else None
        about = {"model": parts.model.name, "session_id": run.session_id, "parent": run.parent}
        if kind is not None:
            self.context.emit(RunResumed, kind=kind, **about)
        else:
            run.steps += 1
            self.context.emit(RunStarted, prompt=errand.prompt, **about)
        self._started = True
        self._idle_since = self._now()

    def _has_no_next_effect(self) -> bool:
        """Whether a run that was cut off at its end, or at a wait, has only to say so."""
        errand = self._request
        waits = errand.resume_point is not None and errand.reply is None and errand.dismiss_reason is None
        return waits or self._run.state in self._final_states

    # -- the effect -----------------------------------------------------------------------------------

    def _start_effect(self, state: str) -> Any:
        """The outcome of a state's effect, or the coroutine that brings it."""
        parts = self._config
        effect = parts.effects.get(state)
        if effect is None:
            return self._external_outcome()
        if self._cancel_reason is not None:
            return Cancelled(
                self._cancel_reason, tuple(self.context.completed_results)
            )  # of a run that was taken up, some are there
        if state in parts.hooks and state != State.DISPATCH_TOOL:
            return self._run_hooks_and_effect(state, effect)
        try:
            return effect(self.context)
        except (Exception, asyncio.CancelledError) as error:  # plain code of the user's: nobody cancels it
            return self._exception_outcome(state, error)

    async def _run_hooks_and_effect(self, state: str, effect: Effect) -> Outcome | None:
        self.context.recorder.push()
        await run_hooks(self.context, state)
        outcome = effect(self.context)
        return cast("Outcome | None", await outcome if isawaitable(outcome) else outcome)

    async def _await_effect(self, state: str, coroutine: Coroutine[Any, Any, Outcome | None]) -> Outcome | None:
        """Await an effect, which ``cancel`` may cut off as ``asyncio.timeout`` would at its deadline.

        Whatever user code raises becomes an outcome; only a cancellation from outside passes through.
        """
        task = self._owner
        before = task.cancelling()
        self._task = task
        if self._cancel_reason is not None:  # another thread asked just now, when there was no task to cut off
            task.get_loop().call_soon(self._cancel_effect, task)
        try:
            return await coroutine
        except asyncio.CancelledError as error:
            struck, self._effect_cancelled = self._effect_cancelled, False
            if struck and task.uncancel() <= before:
                return self._cancelled_outcome()
            if being_cancelled():
                raise
            return self._exception_outcome(state, error)  # it came out of what user code awaited, as any error may
        except HookAbortError as error:
            return self._aborted_outcome(str(error), error.__cause__ or error)
        except (StoreError, JournalError):  # what cannot be written down must not go on
            raise
        except Exception as error:
            return self._exception_outcome(state, error)
        finally:
            self._task = None
            if self._effect_cancelled:  # the effect swallowed the cancellation, or ended beside it
                self._effect_cancelled = False
                task.uncancel()

    def _external_outcome(self) -> Outcome:
        errand, machine = self._request, self._config.machine
        cancelled = Cancelled(self._cancel_reason or errand.dismiss_reason or "dismissed")
        if errand.reply is not None and (
            self._cancel_reason is None or not would_transition(machine, self._run, cancelled)
        ):
            return HumanAnswered(errand.reply)
        late = errand.expires_at is not None and self._config.host.clock.time() > errand.expires_at
        return Expired() if late and would_transition(machine, self._run, Expired()) else cancelled

    def _cancelled_outcome(self) -> Cancelled:
        return Cancelled(self._cancel_reason or "cancelled", tuple(self.context.completed_results))

    def _exception_outcome(self, state: str, error: BaseException) -> Aborted:
        return self._aborted_outcome(f"the effect of {str(state)!r} raised {describe_exception(error)}", error)

    def _aborted_outcome(self, text: str, error: BaseException) -> Aborted:
        failure = Failure(kind=FailureKind.aborted, explanation=text, metadata={"error_class": type(error).__name__})
        return Aborted(failure, tuple(self.context.completed_results))

    # -- the step -------------------------------------------------------------------------------------

    def _apply_outcome(self, outcome: Outcome | None, started: float | None = None, silence_s: float = 0.0) -> None:
        """Fold an outcome in and move. Nothing here awaits.

        Args:
            outcome: What the effect came back with.
            started: When the effect began, where its time counts.
            silence_s: Seconds from the end of the last effect whose time counted to then.
        """
        context, run = self.context, self._run
        took_us = silence_us = 0
        if started is not None:
            self._idle_since = ended = self._now()
            # whole microseconds, so that a journal says exactly what was added up
            took_us, silence_us = round((ended - started) * 1e6), round(silence_s * 1e6)
        try:
            if took_us or silence_us:
                on_outcome(run, outcome, took_us / 1e6, silence_us / 1e6)
            else:
                on_outcome(run, outcome)
        except Exception as error:  # a model or an effect of the user's gave what cannot be folded in
            outcome, took_us, silence_us = self._exception_outcome(run.state, error), 0, 0
            on_outcome(run, outcome)
        if context.completed_results:
            context.completed_results.clear()
        cancel = None
        if self._cancel_reason is not None and run.cancelled is None:
            cancel = self._cancel_reason
            on_outcome(run, Cancelled(cancel))
        aborted = run.aborted
        decision = self._step(run)
        self.decisions.append(decision)
        raised = run.aborted if run.aborted is not aborted else None  # by a guard, while it was asked
        self._record_transition(outcome, cancel, took_us, silence_us, decision, raised)
        if context.builds_events:
            told = self._now()
            self._emit_transition(outcome, decision)
            self._idle_since += self._now() - told  # what observers take is no silence
        on_transition(run, decision, decision.transition.target in self._final_states)

    def _emit_transition(self, outcome: Outcome | None, decision: Decision) -> None:
        context = self.context
        if isinstance(outcome, ModelCallSucceeded):
            reply = outcome.reply
            context.emit(
                ModelReplied,
                message=reply.message,
                usage=reply.usage,
                finish_reason=reply.finish_reason,
                model=reply.model,
            )
        elif isinstance(outcome, RecoveryDecided) and outcome.action in (Action.retry, Action.narrow_scope):
            failure = self._run.failure
            if failure is not None:
                context.emit(
                    RecoveryStarted,
                    failure=failure,
                    action=outcome.action,
                    attempt=self._run.attempts(failure.kind),
                    backoff_s=outcome.backoff_s,
                )
        context.emit(Transitioned, decision=decision)

    async def _drain_cancelled(self) -> None:
        """After a cancellation from outside: move on, with no effect, to the end."""
        while self._run.state not in self._final_states:
            self._apply_outcome(self._cancelled_outcome(), self._now(), 0.0)
        await self._finish()

    # -- the end --------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        run = self._run
        final = run.state in self._final_states
        try:
            await run_final_hooks(self.context, final)
        finally:  # a cancellation that lands here comes too late to change how the run ended
            self.context.timeout.close()
            kind, fields = ending_event(run) if final else suspend(self.context)
            recorder = self.context.recorder
            if final:
                recorder.record("run.finished", {"ending": kind.__name__})
            late = None
            if recorder.sink is not None:  # durable before anybody is told
                late = await shielded(recorder.commit())
                if not final:
                    fields["digest"] = recorder.sink.head
            self.output = typed_output(self.context, fields.get("output"))
            self.outcome = cast("Ending", self.context.emit_final(kind, **fields))
            if late is not None:
                raise late
