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
from collections import deque
from collections.abc import Callable, Generator
from inspect import isawaitable
from types import TracebackType
from typing import Any, cast

from agentfsm.core.events import (
    AgentError,
    Ending,
    Event,
    ModelReplied,
    RunResumed,
    RunStarted,
    Transitioned,
    UserInputRequested,
)
from agentfsm.core.failures import Action, Failure, FailureKind
from agentfsm.core.fold import apply, follow
from agentfsm.core.outcomes import Aborted, Answered, Cancelled, Expired, Outcome, Recovered, Replied
from agentfsm.core.state import PersonReply, RunState, Waiting
from agentfsm.core.suspension import SuspensionRecord, write_record
from agentfsm.errors import RecordUsedError, RunError
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import State
from agentfsm.runtime.context import Context, Parts
from agentfsm.runtime.gates import HookAbortError, ask_hooks
from agentfsm.runtime.result import RunResult, ending_of

__all__ = ["Run"]


class Run:
    """One run of an agent: await it for its result, or iterate it for its events (and await it then).

    A run does nothing until it is awaited or iterated, and goes on only while it is: whoever stops
    iterating stops the run between two steps, and may take it up again. It belongs to one task of one
    event loop at a time.
    """

    def __init__(
        self,
        parts: Parts,
        state: RunState,
        *,
        prompt: str = "",
        resumes: SuspensionRecord | None = None,
        reply: PersonReply | None = None,
        dismiss: str | None = None,
    ) -> None:
        self._context = Context(parts, state, prompt)
        self._parts = parts
        self._machine = parts.machine
        self._clock = parts.host.clock
        self._decisions: list[Decision] = []
        self._events: deque[Event] = deque()
        self._resumes, self._reply, self._dismiss = resumes, reply, dismiss
        self._begun = False
        self._mark = 0.0
        self._held_since: float | None = None
        self._cancel: str | None = None
        self._scope: asyncio.Timeout | None = None
        self._outcome: Ending | None = None
        self._output: Any = None
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None

    # -- what it is -----------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._context.run.run_id

    @property
    def state(self) -> RunState:
        """Everything that the run knows at this moment; read it, do not change it."""
        return self._context.run

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every move so far."""
        return tuple(self._decisions)

    @property
    def finished(self) -> bool:
        """Whether the run has ended or waits for a person: the last event is there."""
        return self._outcome is not None

    @property
    def result(self) -> RunResult:
        """What the run came to.

        Raises:
            RunError: It has not come to its end yet.
        """
        if self._outcome is None:
            raise RunError(f"run {self.run_id!r} is not finished: await it, or iterate it to its end")
        return RunResult(self._output, self._outcome, tuple(self._decisions), self._context.run, self._machine.graph)

    def cancel(self, reason: str = "cancelled") -> None:
        """Ask the run to stop: what it awaits is cut off, and it ends as ``RunCancelled``.

        Every call of the transcript still gets its result. Call it in the event loop's own thread; a run
        that has ended already stays as it is.
        """
        if self._outcome is None and self._cancel is None:
            self._cancel = reason
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time())

    # -- awaiting and iterating -----------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, RunResult]:
        return self._finish_it().__await__()

    async def _finish_it(self) -> RunResult:
        if self._task is not None:
            task, self._task = self._task, None
            await task
        while self._outcome is None:
            await self._advance()
        return self.result

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Event:
        context = self._context
        if context.sink is None:
            self._wake = asyncio.Event()
            context.sink = self._take
        if self._held_since is not None:
            self._mark += self._clock.monotonic() - self._held_since
            self._held_since = None
        while not self._events:
            if self._outcome is not None:
                raise StopAsyncIteration
            await self._pump()
        if self._task is None:
            self._held_since = self._clock.monotonic()
        return self._events.popleft()

    def _take(self, event: Event) -> None:
        self._events.append(event)
        if self._wake is not None:
            self._wake.set()

    async def _pump(self) -> None:
        """Go on until there is an event: the step runs as a task, so events come while it still awaits."""
        if self._task is None:
            self._task = asyncio.create_task(self._advance())
        wake = self._wake
        assert wake is not None  # noqa: S101  # set with the sink
        wake.clear()
        woken = asyncio.create_task(wake.wait())
        try:
            await asyncio.wait({self._task, woken}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            woken.cancel()
        if self._task.done():
            task, self._task = self._task, None
            task.result()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End a run that nobody goes on with: cancel it if it has not ended, and wait until it has."""
        self.cancel("closed")
        await self._finish_it()

    # -- one step -------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        """Await one effect, fold it in and step."""
        if not self._begun:
            self._begin()
        run = self._context.run
        started = self._clock.monotonic()
        silence = started - self._mark
        try:
            outcome = await self._perform(run.state)
        except asyncio.CancelledError:
            self._cancel = self._cancel or "the task was cancelled"
            self._settle(self._cut_off(), started, silence)
            await self._run_out()
            raise
        self._settle(outcome, started, silence)
        if self._machine.graph.spec(run.state).final or self._machine.graph.spec(run.state).waits:
            await self._end()

    def _begin(self) -> None:
        context = self._context
        run = context.run
        self._begun = True
        self._mark = self._clock.monotonic()
        if self._resumes is None:
            run.steps += 1
            context.emit(RunStarted, prompt=context.prompt)
            return
        if not self._parts.host.used.claim(self._resumes.record_id):
            self._begun = False
            raise RecordUsedError(f"record {self._resumes.record_id!r} was resumed already")
        context.emit(RunResumed, kind=self._resumes.kind)

    async def _perform(self, state: str) -> Outcome:
        """The outcome of a state's effect.

        Whatever user code raises becomes an outcome; only a cancellation from outside passes through.
        """
        if state == State.SUSPENDED:
            return self._from_outside()
        if self._cancel is not None:
            return Cancelled(self._cancel)
        effect = self._parts.effects[state]
        try:
            if self._parts.hooks.get(state) and state != State.DISPATCH_TOOL:
                async with asyncio.timeout(None) as self._scope:
                    await ask_hooks(self._context, state)
            outcome = effect(self._context)
            if not isawaitable(outcome):
                return cast("Outcome", outcome)
            async with asyncio.timeout(None) as self._scope:
                return cast("Outcome", await outcome)
        except TimeoutError as error:
            if self._cancel is not None:
                return self._cut_off()
            return self._abort(state, error)
        except HookAbortError as error:
            return Aborted(self._aborted(str(error), error.__cause__ or error), tuple(self._context.finished))
        except Exception as error:
            return self._abort(state, error)
        finally:
            self._scope = None

    def _from_outside(self) -> Outcome:
        if self._reply is not None and self._dismiss is None and self._cancel is None:
            return Answered(self._reply)
        late = self._resumes is not None and self._clock.time() > self._resumes.expires_at
        return Expired() if late else Cancelled(self._cancel or self._dismiss or "dismissed")

    def _cut_off(self) -> Cancelled:
        return Cancelled(self._cancel or "cancelled", tuple(self._context.finished))

    def _abort(self, state: str, error: Exception) -> Aborted:
        text = f"the effect of {state!r} raised {type(error).__name__}: {error}"
        return Aborted(self._aborted(text, error), tuple(self._context.finished))

    def _aborted(self, text: str, error: BaseException) -> Failure:
        return Failure(kind=FailureKind.aborted, explanation=text, metadata={"error_class": type(error).__name__})

    def _settle(self, outcome: Outcome, started: float, silence: float) -> None:
        """Fold an outcome in and move. Nothing here awaits."""
        context = self._context
        run = context.run
        ended = self._clock.monotonic()
        self._mark = ended
        apply(run, outcome, ended - started, silence)
        context.finished.clear()
        if self._cancel is not None and run.cancelled is None:
            apply(run, Cancelled(self._cancel))
        decision = self._machine.step(run)
        self._decisions.append(decision)
        self._tell(outcome)
        follow(run, decision)
        context.emit(Transitioned, decision=decision)

    def _tell(self, outcome: Outcome) -> None:
        context = self._context
        if isinstance(outcome, Replied):
            context.emit(ModelReplied, message=outcome.reply.message, usage=outcome.reply.usage)
        elif isinstance(outcome, Recovered) and outcome.action in (Action.retry, Action.narrow_scope):
            failure = context.run.failure
            if failure is not None:
                context.emit(
                    AgentError,
                    failure=failure,
                    action=outcome.action,
                    attempt=context.run.attempts(failure.kind),
                    backoff_s=outcome.backoff_s,
                )

    async def _run_out(self) -> None:
        """After a cancellation from outside: move on, with no effect, to the end."""
        while not self._machine.graph.spec(self._context.run.state).final:
            self._settle(Cancelled(self._cancel or "cancelled"), self._mark, 0.0)
        await self._end()

    # -- the end --------------------------------------------------------------------------------------

    async def _end(self) -> None:
        run = self._context.run
        if not self._machine.graph.spec(run.state).final:
            self._suspend()
            return
        await self._close()
        kind, fields = ending_of(run)
        self._output = self._typed(fields.get("output"))
        self._outcome = self._last(kind, fields)

    async def _close(self) -> None:
        """Hooks at the end, and the memory: whatever they raise, the run has ended."""
        context = self._context
        try:
            await ask_hooks(context, State.TERMINAL)
        except HookAbortError as error:
            context.warn(str(error))
        if context.parts.memory is not None:
            try:
                await context.parts.memory.remember(context.run.messages)
            except Exception as error:
                context.warn(f"memory could not keep the run ({type(error).__name__}: {error})")

    def _suspend(self) -> None:
        run = self._context.run
        if run.waiting is None:
            run.waiting = Waiting("question", f"The run waits in {run.state!r}.")
        record = write_record(
            run,
            graph=self._machine.graph.fingerprint,
            secret=self._parts.host.secret,
            record_id=self._parts.host.new_id(),
            now=self._clock.time(),
        )
        waiting = run.waiting
        self._outcome = self._last(
            UserInputRequested,
            {
                "kind": waiting.kind,
                "question": waiting.question,
                "context": waiting.context,
                "choices": waiting.choices,
                "tool": waiting.tool,
                "arguments": waiting.arguments,
                "suspension_record": record,
                "originating_failure_kind": waiting.failure_kind,
            },
        )

    def _last(self, kind: Callable[..., Event], fields: dict[str, Any]) -> Ending:
        event = self._context.end(kind, **fields)
        return cast("Ending", event)

    def _typed(self, output: Any) -> Any:
        adapter = self._parts.output
        return output if adapter is None or output is None else adapter.validate_python(output)
