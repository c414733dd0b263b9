"""How a run ends: final hooks, typed output, suspension, the ending event, and ``RunResult``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, cast

from pydantic_core import to_json

from agentfsm.loop.events import (
    Handoff,
    LastEvent,
    PartialRunSummary,
    RunAborted,
    RunCancelled,
    RunCompleted,
    UserInputRequested,
)
from agentfsm.loop.extension import with_granted_default
from agentfsm.loop.failures import Failure
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import Message, Usage
from agentfsm.loop.prompts import without_memory
from agentfsm.loop.read_only import thaw
from agentfsm.loop.state import RunState
from agentfsm.loop.suspension import IN_STORE, sign_record
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.runtime.approval import run_hooks
from agentfsm.runtime.context import Context
from agentfsm.runtime.run_context import Output
from agentfsm.runtime.timeout import reraise_cancellation
from agentfsm.runtime.tools import describe_validation_error

if TYPE_CHECKING:
    from agentfsm.journal.records import Record


async def run_final_hooks(context: Context, final: bool) -> None:
    """Run the hooks of the state in which the run ends or waits, then update the memory. Neither can stop the run."""
    config, run = context.config, context.run
    if config.memory is not None or run.state in config.hooks:
        context.recorder.push()
    await run_hooks(context, run.state, after_end=True)
    if config.memory is not None and final:
        try:
            messages = [without_memory(message) for message in run.messages]
            await context.timeout.run(config.memory.remember(messages), run.guardrails.tool_timeout_s)
        except (Exception, asyncio.CancelledError) as error:
            reraise_cancellation(error)
            context.warn_memory_failed("memory could not store the run", error)


def typed_output(context: Context, output: Any) -> Any:
    """The output as a value of the agent's output type; as JSON data if it cannot be converted."""
    adapter = context.config.output_adapter
    if adapter is None or output is None:
        return thaw(output)
    try:
        return adapter.validate_json(to_json(output))
    except Exception as error:  # the type does not accept its own JSON, or its validator raises
        context.warn("the output is left as JSON", f"the output is left as JSON: {describe_validation_error(error)}")
        return thaw(output)


def suspend(context: Context) -> tuple[type[LastEvent], dict[str, Any]]:
    """Sign and journal the suspension record of a run that waits for a human: the last event's class and its fields."""
    run, host = context.run, context.config.host
    pending = run.pending_request or PendingRequest("question", f"The run waits in {str(run.state)!r}.")
    if run.expired and pending.quorum is not None:  # a row of a user's graph has led to another wait
        pending = replace(pending, quorum=replace(pending.quorum, asked_at=host.clock.time()))
    if pending.limit is not None:
        limit = with_granted_default(run, pending, pending.limit, context.config.machine.graph)
        pending = replace(pending, limit=limit)
    run.pending_request = pending
    context.emit_blocked()
    run.event_seq = context.next_seq
    record = sign_record(
        run,
        graph=context.config.machine.graph.fingerprint,
        keyring=host.keyring,
        record_id=host.new_id(),
        created_at=host.clock.time(),
        registry=_registry(context),
        withholder=context.config.open_withholder(),
    )
    expires = None if record.expires_at is None else int(record.expires_at * 1000)
    context.recorder.record(
        "run.suspended", {"waiting": pending, "id": record.record_id, "expires": expires, "events": run.event_seq}
    )
    fields: dict[str, Any] = {
        "kind": pending.kind,
        "question": pending.question,
        "context": pending.context,
        "choices": pending.choices,
        "tool": pending.tool,
        "arguments": pending.arguments,
        "asker": pending.asker,
        "quorum": pending.quorum,
        "limit": pending.limit,
        "form": pending.form,
        "suspension_record": record,
        "originating_failure_kind": pending.failure_kind,
    }
    return UserInputRequested, fields


def _registry(context: Context) -> str:
    """What knows whether the suspension record of the run was used."""
    if context.recorder.sink is not None:
        return IN_STORE
    is_subagent = context.run.parent is not None  # only the calling run's record can be resumed
    return "" if is_subagent else context.config.host.replay_guard.scope


async def shielded(coroutine: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Await a coroutine to its end even if the task is cancelled, and return the first cancellation, if any."""
    cancellation: asyncio.CancelledError | None = None
    task = asyncio.ensure_future(coroutine)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = cancellation or error
    task.result()
    return cancellation


@dataclass(frozen=True, repr=False)
class RunResult(Generic[Output]):
    """The result of a run that has ended or is suspended.

    Attributes:
        output: The answer: a string, or a value of the agent's ``output_type``. None, whatever the type says, if the
            run has none: see ``ok``.
        outcome: The last event: one of ``RunCompleted``, ``Handoff``, ``PartialRunSummary``, ``RunCancelled``,
            ``RunAborted`` and ``UserInputRequested``; a ``match`` over these is complete.
        decisions: Every transition taken, in order, with the guards that were evaluated.
        run_state: Everything the run knows: transcript, usage, counters.
        graph: The transition table that it ran on.
    """

    output: Output
    outcome: LastEvent
    decisions: tuple[Decision, ...] = field(repr=False)
    run_state: RunState = field(repr=False)
    graph: Graph = field(repr=False)
    _read_journal: Callable[[], list[Record]] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return self.outcome.mask(f"RunResult(output={self.output!r}, outcome={self.outcome!r})")

    @property
    def journal(self) -> list[Record]:
        """What happened, as sealed records.

        For a run in a store these are the records as this process read and wrote them: one that was redacted since is
        still complete here. Without a store they are serialized now.

        Raises:
            agentfsm.errors.JournalError: A record cannot be read.
        """
        return [] if self._read_journal is None else self._read_journal()

    @property
    def run_id(self) -> str:
        """The run's id, by which its store finds it."""
        return self.run_state.run_id

    @property
    def ok(self) -> bool:
        """Whether the run completed with an answer (``outcome`` is ``RunCompleted``)."""
        return isinstance(self.outcome, RunCompleted)

    @property
    def state(self) -> str:
        """The name of the state that the run is in, such as ``terminal`` or ``suspended``."""
        return self.run_state.state

    @property
    def messages(self) -> list[Message]:
        """The transcript, which can be passed as the ``message_history`` of a later run."""
        return list(self.run_state.messages)

    @property
    def usage(self) -> Usage:
        """Tokens and USD of all model calls, including those of sub-agents."""
        return self.run_state.usage

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the conventional name for it
        """The graph with this run's path on it: how often each transition was taken, and where the run is.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text`` or ``plantuml``.

        Raises:
            ConfigurationError: There is no such format, or it cannot show a path.
        """
        from agentfsm.diagrams import RunPath, diagram  # loads only if a diagram is drawn

        path = RunPath.from_ids((d.transition.id for d in self.decisions), self.run_state.state)
        return diagram(self.graph, format, overlay=path)

    def _repr_svg_(self) -> str:
        """What a notebook shows: the picture of the run's path."""
        return self.diagram()


def ending_event(run: RunState) -> tuple[type[LastEvent], dict[str, Any]]:
    """The class and the fields of the last event of a run that has reached a final state, as its last row says."""
    return _ENDING_EVENTS[run.ended](run)


def _completed(run: RunState) -> tuple[type[LastEvent], dict[str, Any]]:
    return RunCompleted, {"output": run.ending_value if run.ending == "done" else run.answer}


def _handed_off(run: RunState) -> tuple[type[LastEvent], dict[str, Any]]:
    if run.ending == "unable":
        return Handoff, _handoff_by_tool(run)
    if run.failure is not None:
        return Handoff, _handoff_after_failure(run.failure)
    return Handoff, {"rationale": "the graph hands the task off here"}


def _partial(run: RunState) -> tuple[type[LastEvent], dict[str, Any]]:
    return PartialRunSummary, _partial_summary(run)


def _cancelled(run: RunState) -> tuple[type[LastEvent], dict[str, Any]]:
    expired = "the request expired without a reply" if run.expired else "the graph cancels the run here"
    return RunCancelled, {"reason": expired if run.cancelled is None else run.cancelled}


def _aborted(run: RunState) -> tuple[type[LastEvent], dict[str, Any]]:
    failure = run.aborted or run.failure
    reason = "the graph aborts the run here" if failure is None else failure.explanation
    return RunAborted, {"reason": reason, "failure": failure}


_ENDING_EVENTS: Mapping[str, Callable[[RunState], tuple[type[LastEvent], dict[str, Any]]]] = {
    "completed": _completed,
    "handed_off": _handed_off,
    "partial": _partial,
    "cancelled": _cancelled,
    "aborted": _aborted,
}


def _handoff_by_tool(run: RunState) -> dict[str, Any]:
    value = cast("Mapping[str, Any]", run.ending_value or {})
    return {
        "rationale": str(value.get("rationale", "")),
        "blockers": tuple(value.get("blockers", ())),
        "suggested_next_steps": tuple(value.get("suggested_next_steps", ())),
    }


def _handoff_after_failure(failure: Failure) -> dict[str, Any]:
    return {
        "rationale": failure.explanation,
        "blockers": failure.blockers or (failure.explanation,),
        "failure": failure,
    }


def _partial_summary(run: RunState) -> dict[str, Any]:
    failure = run.failure
    return {
        "missing": "a final answer" + ("" if failure is None else f": {failure.explanation}"),
        "learned_facts": tuple(f"{x.kind.value}: {x.explanation}" for x in run.lessons_learned),
        "next_step_plan": "start again with a larger budget or a smaller task",
        "failure": failure,
    }
