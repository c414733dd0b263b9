"""How a run ends: final hooks, typed output, suspension, the ending event, and ``RunResult``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import to_json

from agentfsm.loop.events import Ending, Handoff, PartialRunSummary, RunCancelled, RunCompleted, UserInputRequested
from agentfsm.loop.failures import Action, Failure, describe_exception
from agentfsm.loop.messages import Message, Usage
from agentfsm.loop.state import PendingRequest, RunState
from agentfsm.loop.suspension import sign_record
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import Graph
from agentfsm.runtime.approval import run_hooks
from agentfsm.runtime.context import Context
from agentfsm.runtime.tool_execution import being_cancelled
from agentfsm.runtime.tools import describe_validation_error

if TYPE_CHECKING:
    from agentfsm.journal.records import Record

__all__ = ["RunResult", "ending_event", "run_final_hooks", "shielded", "suspend", "typed_output"]


async def run_final_hooks(context: Context, final: bool) -> None:
    """Hooks at the door of the state that ends or waits, and the memory: too late to stop the run."""
    parts, run = context.config, context.run
    if parts.memory is not None or run.state in parts.hooks:
        context.recorder.push()
    await run_hooks(context, run.state, after_end=True)
    if parts.memory is not None and final:
        try:
            with context.timeout.start(run.guardrails.tool_timeout_s):
                await parts.memory.remember(run.messages)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            kind, text = type(error).__name__, "memory could not keep the run"
            context.warn(f"{text} ({kind})", f"{text} ({describe_exception(error)})")


def typed_output(context: Context, output: Any) -> Any:
    """The output as a value of the agent's output type; where it does not come back from JSON, as JSON."""
    adapter = context.config.output_adapter
    if adapter is None or output is None:
        return output
    try:
        return adapter.validate_json(to_json(output))
    except Exception as error:  # a type that does not come back from its own JSON, or whose validator raises
        context.warn("the output stays JSON", f"the output stays JSON: {describe_validation_error(error)}")
        return output


def suspend(context: Context) -> tuple[type[Ending], dict[str, Any]]:
    """Write the record of a run that waits for a person: the event that says so, and its fields."""
    run, host = context.run, context.config.host
    waiting = run.pending_request = run.pending_request or PendingRequest(
        "question", f"The run waits in {str(run.state)!r}."
    )
    record = sign_record(
        run,
        graph=context.config.machine.graph.fingerprint,
        secret=host.secret,
        record_id=host.new_id(),
        created_at=host.clock.time(),
    )
    expires = int(record.expires_at * 1000)
    context.recorder.record("run.suspended", {"waiting": waiting, "id": record.record_id, "expires": expires})
    fields: dict[str, Any] = {
        "kind": waiting.kind,
        "question": waiting.question,
        "context": waiting.context,
        "choices": waiting.choices,
        "tool": waiting.tool,
        "arguments": waiting.arguments,
        "asker": waiting.asker,
        "suspension_record": record,
        "originating_failure_kind": waiting.failure_kind,
    }
    return UserInputRequested, fields


async def shielded(coroutine: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
    """Await something to its end, and give back the first cancellation that came meanwhile."""
    late: asyncio.CancelledError | None = None
    task = asyncio.ensure_future(coroutine)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            late = late or error
    task.result()
    return late


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        output: The answer: a text, or a value of the agent's ``output_type``; None where there is none.
        outcome: The last event: which of the five endings it was, and with what.
        decisions: Every move in order, with the guards that were asked.
        run_state: Everything that the run knows.
        graph: The table that it ran on.
    """

    output: Any
    outcome: Ending
    decisions: tuple[Decision, ...] = field(repr=False)
    run_state: RunState = field(repr=False)
    graph: Graph = field(repr=False)
    _read_journal: Callable[[], list[Record]] | None = field(default=None, repr=False, compare=False)

    @property
    def journal(self) -> list[Record]:
        """What happened, as sealed records; written and hashed now, or read from the host's store.

        Raises:
            agentfsm.errors.JournalError: A record cannot be read.
        """
        return [] if self._read_journal is None else self._read_journal()

    @property
    def ok(self) -> bool:
        """Whether the run finished with an answer, recoveries or not."""
        return isinstance(self.outcome, RunCompleted)

    @property
    def state(self) -> str:
        """The declared state that the run is in: ``terminal`` or ``suspended``."""
        return self.run_state.state

    @property
    def messages(self) -> list[Message]:
        """The transcript, good as the ``message_history`` of a next run."""
        return list(self.run_state.messages)

    @property
    def usage(self) -> Usage:
        """Tokens and USD of all model calls."""
        return self.run_state.usage

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the word that everybody expects
        """The graph with this run's path on it: how often each row was taken, and where the run is.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text`` or ``plantuml``.

        Raises:
            ConfigurationError: There is no such form, or it shows no path.
        """
        from agentfsm.diagrams import RunPath, diagram  # a reader of graphs, loaded when one is drawn

        path = RunPath.from_ids((d.transition.id for d in self.decisions), self.run_state.state)
        return diagram(self.graph, format, overlay=path)


def ending_event(run: RunState) -> tuple[type[Ending], dict[str, Any]]:
    """With which event a run that is in ``terminal`` ends, and what it says."""
    if run.cancelled is not None:
        return RunCancelled, {"reason": run.cancelled}
    if run.expired:
        return RunCancelled, {"reason": "nobody answered in time"}
    if run.aborted is not None:
        return PartialRunSummary, _partial_summary(run, run.aborted)
    if run.ending == "done":
        return RunCompleted, {"output": run.ending_value}
    if run.ending == "unable":
        return Handoff, _handoff_by_tool(run)
    if run.failure is not None:
        if run.action is Action.handoff:
            return Handoff, _handoff_after_failure(run.failure)
        return PartialRunSummary, _partial_summary(run, run.failure)
    return RunCompleted, {"output": run.answer}


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


def _partial_summary(run: RunState, failure: Failure) -> dict[str, Any]:
    return {
        "missing": f"a final answer: {failure.explanation}",
        "learned_facts": tuple(f"{x.kind.value}: {x.explanation}" for x in run.lessons_learned),
        "next_step_plan": "start again with a larger budget or a smaller task" if run.aborted is None else "",
        "failure": failure,
    }
