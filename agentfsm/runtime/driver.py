"""The driver: await the state's effect, fold it in, step, until the run has ended or waits for a person.

    outcome  = await effects[run.state](context)    the only await
    apply(run, outcome)                             pure
    decision = machine.step(run)                    pure, atomic
    follow(run, decision)                           pure

There is no await between reading the guards and changing the state, so a step is atomic in its event
loop, and a cancellation can only land inside an effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from inspect import isawaitable
from types import CoroutineType
from typing import Any, cast

from agentfsm.core import wording
from agentfsm.core.events import (
    AgentError,
    Ending,
    ModelReplied,
    RunResumed,
    RunStarted,
    Transitioned,
)
from agentfsm.core.failures import Action, Failure, FailureKind
from agentfsm.core.fold import apply
from agentfsm.core.follow import follow
from agentfsm.core.outcomes import Aborted, Answered, Cancelled, Expired, Outcome, Recovered, Replied
from agentfsm.core.state import RunState
from agentfsm.errors import JournalError, RecordUsedError, StoreError
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import State
from agentfsm.runtime.calls import being_cancelled
from agentfsm.runtime.context import Context, Effect, Parts
from agentfsm.runtime.ending import close, suspend, typed_output, whatever_comes
from agentfsm.runtime.errand import Errand, beginning, moves, refuse_what_moves_nothing, resumed
from agentfsm.runtime.gates import HookAbortError, ask_hooks
from agentfsm.runtime.result import ending_of

__all__ = ["Driver"]


class Driver:
    """Drives one run, a step at a time.

    Attributes:
        context: The run and its parts.
        decisions: Every move so far.
        outcome: The last event, once it is there.
        output: The answer, as a value of the agent's output type.
    """

    def __init__(self, parts: Parts, run: RunState, errand: Errand) -> None:
        self.context = Context(parts, run, errand.prompt)
        self.decisions: list[Decision] = []
        self.outcome: Ending | None = None
        self.output: Any = None
        self._run = run
        self._parts = parts
        self._errand = errand
        self._now = parts.host.clock.monotonic
        self._step = parts.machine.step
        self._moved = self.context.recorder.moved
        self._finals = frozenset(s.name for s in parts.machine.graph.states if s.final)
        self._begun = False
        self._mark = 0.0
        self._cancel: str | None = None
        self._owner: asyncio.Task[Any]
        self._task: asyncio.Task[Any] | None = None
        self._struck = False

    def cancel(self, reason: str) -> None:
        """Ask for the end: what is being awaited is cut off. Any thread may ask."""
        if self.outcome is None and self._cancel is None:
            self._cancel = reason
            task = self._task
            if task is not None:
                task.get_loop().call_soon_threadsafe(self._strike, task)

    def _strike(self, task: asyncio.Task[Any]) -> None:
        if self._task is task and not self._struck:  # else the effect has ended by itself
            self._struck = True
            task.cancel()

    def excuse(self, since: float) -> None:
        """Do not count the time from then to now as silence: a consumer held an event, or left the run alone."""
        now = self._now()
        self._mark += max(0.0, now - max(since, self._mark))

    async def to_the_end(self) -> None:
        """Advance until the run has ended or waits for a person, all in the task at hand."""
        self._belong_to_this_task()
        while self.outcome is None:
            await self._advance()

    async def advance(self) -> None:
        """Await one effect, fold it in and step."""
        self._belong_to_this_task()
        await self._advance()

    def _belong_to_this_task(self) -> None:
        self._owner = self.context.watchdog.owner = cast("asyncio.Task[Any]", asyncio.current_task())

    async def _advance(self) -> None:
        run = self._run
        keeper = self.context.recorder.keeper
        if keeper is not None and keeper.error is not None:  # what was not kept did not happen: nothing comes behind
            await keeper.settle()  # it raises, and gives the run back
        if not self._begun:
            await self._begin()
            if run.state in self._parts.ends and self._nothing_comes():
                await self._end()
                return
        outcome = self._start(run.state)
        if type(outcome) is CoroutineType:
            started = self._now()
            silence = started - self._mark
            try:
                outcome = await self._awaited(run.state, cast("Coroutine[Any, Any, Outcome]", outcome))
            except asyncio.CancelledError:
                self._cancel = self._cancel or "the task was cancelled"
                self._settle(self._cut_off(), started, silence)
                await self._run_out()
                raise
            self._settle(outcome, started, silence)
        elif run.state == State.PRE_STEP:  # where time is judged, it must be known
            started = self._now()
            self._settle(outcome, started, started - self._mark)
        else:  # what takes no time to speak of is counted with what comes next
            self._settle(outcome)
        if run.state in self._parts.ends:
            await self._end()

    async def _begin(self) -> None:
        parts, run, errand, recorder = self._parts, self._run, self._errand, self.context.recorder
        record, taken_up = errand.record, errand.taken_up
        waits = self._parts.effects.get(run.state) is None and run.state not in self._finals
        if waits and (errand.reply is not None or errand.dismiss is not None):
            refuse_what_moves_nothing(parts.machine, run, self._from_outside())
        elif errand.dismiss is not None:  # it was cut off: what it was at is not done again
            self._cancel = self._cancel or errand.dismiss
        if parts.keep is not None:  # whoever has the run in the store has it alone, from here on
            recorder.keeper = await parts.keep(run.run_id, taken_up)
        if record is not None and not parts.host.used.claim(record.record_id):
            raise RecordUsedError(f"record {record.record_id!r} was resumed already")
        if taken_up is not None:
            recorder.tried(taken_up.attempts)
            self.context.left = taken_up.left
            self.context.finished.extend(taken_up.results.values())
            if taken_up.migrated:
                recorder.note("run.migrated", taken_up.migrated)
            recorder.note("run.resumed", resumed(errand))
        else:
            recorder.note("run.created", beginning(parts, run, errand))
        kind = taken_up.kind if taken_up is not None else record.kind if record is not None else None
        about = {"model": parts.model.name, "session_id": run.session_id, "parent": run.parent}
        if kind is not None:
            self.context.emit(RunResumed, kind=kind, **about)
        else:
            run.steps += 1
            self.context.emit(RunStarted, prompt=errand.prompt, **about)
        self._begun = True
        self._mark = self._now()

    def _nothing_comes(self) -> bool:
        """Whether a run that was cut off at its end, or at a wait, has only to say so."""
        errand = self._errand
        waits = errand.taken_up is not None and errand.reply is None and errand.dismiss is None
        return waits or self._run.state in self._finals

    # -- the effect -----------------------------------------------------------------------------------

    def _start(self, state: str) -> Any:
        """The outcome of a state's effect, or the coroutine that brings it."""
        parts = self._parts
        effect = parts.effects.get(state)
        if effect is None:
            return self._from_outside()
        if self._cancel is not None:
            return Cancelled(self._cancel, tuple(self.context.finished))  # of a run that was taken up, some are there
        if state in parts.hooks and state != State.DISPATCH_TOOL:
            return self._hooked(state, effect)
        try:
            return effect(self.context)
        except (Exception, asyncio.CancelledError) as error:  # plain code of the user's: nobody cancels it
            return self._raised(state, error)

    async def _hooked(self, state: str, effect: Effect) -> Outcome:
        self.context.recorder.push()
        await ask_hooks(self.context, state)
        outcome = effect(self.context)
        return cast("Outcome", await outcome if isawaitable(outcome) else outcome)

    async def _awaited(self, state: str, coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Await an effect, which ``cancel`` may cut off as ``asyncio.timeout`` would at its deadline.

        Whatever user code raises becomes an outcome; only a cancellation from outside passes through.
        """
        task = self._owner
        before = task.cancelling()
        self._task = task
        if self._cancel is not None:  # another thread asked just now, when there was no task to cut off
            task.get_loop().call_soon(self._strike, task)
        try:
            return await coroutine
        except asyncio.CancelledError as error:
            struck, self._struck = self._struck, False
            if struck and task.uncancel() <= before:
                return self._cut_off()
            if being_cancelled():
                raise
            return self._raised(state, error)  # it came out of what user code awaited, as any error may
        except HookAbortError as error:
            return self._aborted(str(error), error.__cause__ or error)
        except (StoreError, JournalError):  # what cannot be written down must not go on
            raise
        except Exception as error:
            return self._raised(state, error)
        finally:
            self._task = None
            if self._struck:  # the effect swallowed the cancellation, or ended beside it
                self._struck = False
                task.uncancel()

    def _from_outside(self) -> Outcome:
        errand, machine = self._errand, self._parts.machine
        cancelled = Cancelled(self._cancel or errand.dismiss or "dismissed")
        if errand.reply is not None and (self._cancel is None or not moves(machine, self._run, cancelled)):
            return Answered(errand.reply)
        late = errand.expires_at is not None and self._parts.host.clock.time() > errand.expires_at
        return Expired() if late and moves(machine, self._run, Expired()) else cancelled

    def _cut_off(self) -> Cancelled:
        return Cancelled(self._cancel or "cancelled", tuple(self.context.finished))

    def _raised(self, state: str, error: BaseException) -> Aborted:
        return self._aborted(f"the effect of {str(state)!r} raised {wording.raised(error)}", error)

    def _aborted(self, text: str, error: BaseException) -> Aborted:
        failure = Failure(kind=FailureKind.aborted, explanation=text, metadata={"error_class": type(error).__name__})
        return Aborted(failure, tuple(self.context.finished))

    # -- the step -------------------------------------------------------------------------------------

    def _settle(self, outcome: Outcome, started: float | None = None, silence: float = 0.0) -> None:
        """Fold an outcome in and move. Nothing here awaits.

        Args:
            outcome: What the effect came back with.
            started: When the effect began, where its time counts.
            silence: Seconds from the end of the last effect whose time counted to then.
        """
        context, run = self.context, self._run
        took_us = silence_us = 0
        if started is not None:
            self._mark = ended = self._now()
            # whole microseconds, so that a journal says exactly what was added up
            took_us, silence_us = round((ended - started) * 1e6), round(silence * 1e6)
        try:
            if took_us or silence_us:
                apply(run, outcome, took_us / 1e6, silence_us / 1e6)
            else:
                apply(run, outcome)
        except Exception as error:  # a model or an effect of the user's gave what cannot be folded in
            outcome, took_us, silence_us = self._raised(run.state, error), 0, 0
            apply(run, outcome)
        if context.finished:
            context.finished.clear()
        cancel = None
        if self._cancel is not None and run.cancelled is None:
            cancel = self._cancel
            apply(run, Cancelled(cancel))
        aborted = run.aborted
        decision = self._step(run)
        self.decisions.append(decision)
        raised = run.aborted if run.aborted is not aborted else None  # by a guard, while it was asked
        self._moved(outcome, cancel, took_us, silence_us, decision, raised)
        if context.heard:
            told = self._now()
            self._tell(outcome, decision)
            self._mark += self._now() - told  # what observers take is no silence
        follow(run, decision, decision.transition.target in self._finals)

    def _tell(self, outcome: Outcome, decision: Decision) -> None:
        context = self.context
        if isinstance(outcome, Replied):
            reply = outcome.reply
            context.emit(
                ModelReplied,
                message=reply.message,
                usage=reply.usage,
                finish_reason=reply.finish_reason,
                model=reply.model,
            )
        elif isinstance(outcome, Recovered) and outcome.action in (Action.retry, Action.narrow_scope):
            failure = self._run.failure
            if failure is not None:
                context.emit(
                    AgentError,
                    failure=failure,
                    action=outcome.action,
                    attempt=self._run.attempts(failure.kind),
                    backoff_s=outcome.backoff_s,
                )
        context.emit(Transitioned, decision=decision)

    async def _run_out(self) -> None:
        """After a cancellation from outside: move on, with no effect, to the end."""
        while self._run.state not in self._finals:
            self._settle(self._cut_off(), self._now(), 0.0)
        await self._end()

    # -- the end --------------------------------------------------------------------------------------

    async def _end(self) -> None:
        run = self._run
        final = run.state in self._finals
        try:
            await close(self.context, final)
        finally:  # a cancellation that lands here comes too late to change how the run ended
            self.context.watchdog.close()
            kind, fields = ending_of(run) if final else suspend(self.context)
            recorder = self.context.recorder
            if final:
                recorder.note("run.finished", {"ending": kind.__name__})
            late = None
            if recorder.keeper is not None:  # durable before anybody is told
                late = await whatever_comes(recorder.commit())
                if not final:
                    fields["digest"] = recorder.keeper.head
            self.output = typed_output(self.context, fields.get("output"))
            self.outcome = cast("Ending", self.context.end(kind, **fields))
            if late is not None:
                raise late
