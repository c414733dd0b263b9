"""How a run ends or is put aside: closing hooks and memory, the typed output, the record of a suspension."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from pydantic_core import to_json

from agentfsm.core.events import (
    Ending,
    UserInputRequested,
)
from agentfsm.core.state import Waiting
from agentfsm.core.suspension import write_record
from agentfsm.core.wording import raised
from agentfsm.runtime.calls import being_cancelled
from agentfsm.runtime.context import Context
from agentfsm.runtime.gates import ask_hooks
from agentfsm.runtime.tools import unfit

__all__ = ["close", "suspend", "typed_output", "whatever_comes"]


async def close(context: Context, final: bool) -> None:
    """Hooks at the door of the state that ends or waits, and the memory: too late to stop the run."""
    parts, run = context.parts, context.run
    if parts.memory is not None or run.state in parts.hooks:
        context.recorder.push()
    await ask_hooks(context, run.state, late=True)
    if parts.memory is not None and final:
        try:
            with context.watchdog.limit(run.guardrails.tool_timeout_s):
                await parts.memory.remember(run.messages)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            kind, text = type(error).__name__, "memory could not keep the run"
            context.warn(f"{text} ({kind})", f"{text} ({raised(error)})")


def typed_output(context: Context, output: Any) -> Any:
    """The output as a value of the agent's output type; where it does not come back from JSON, as JSON."""
    adapter = context.parts.output
    if adapter is None or output is None:
        return output
    try:
        return adapter.validate_json(to_json(output))
    except Exception as error:  # a type that does not come back from its own JSON, or whose validator raises
        context.warn("the output stays JSON", f"the output stays JSON: {unfit(error)}")
        return output


def suspend(context: Context) -> tuple[type[Ending], dict[str, Any]]:
    """Write the record of a run that waits for a person: the event that says so, and its fields."""
    run, host = context.run, context.parts.host
    waiting = run.waiting = run.waiting or Waiting("question", f"The run waits in {str(run.state)!r}.")
    record = write_record(
        run,
        graph=context.parts.machine.graph.fingerprint,
        secret=host.secret,
        record_id=host.new_id(),
        now=host.clock.time(),
    )
    expires = int(record.expires_at * 1000)
    context.recorder.note("run.suspended", {"waiting": waiting, "id": record.record_id, "expires": expires})
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


async def whatever_comes(coroutine: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
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
