"""A sub-agent as a tool: a call answered by a run of another agent, within what is left to the run that calls.

The run that calls lends its host (clock, secret, store), caps the sub-agent's limits by what is left of its
own, and is charged what the sub-agent's model calls use up. Cancelled or out of time, it cancels the
sub-agent. Where the sub-agent waits for a person, so does the run that calls: it asks the same question, and
its signed record holds the sub-agent's, so answering the one goes on with the other, in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_json

from agentfsm.core.events import Ending, Handoff, PartialRunSummary, RunCancelled, RunCompleted, UserInputRequested
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.messages import ToolResult, Usage
from agentfsm.core.state import CallState, Held, PersonReply, RunState, Waiting
from agentfsm.errors import RecordError, ToolError
from agentfsm.runtime.context import Context
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import ending_of
from agentfsm.runtime.run import Run
from agentfsm.runtime.tools import Share, Tool, as_tool

__all__ = ["Lender", "capped", "subagent_tool"]


@dataclass(frozen=True)
class Lender:
    """What a sub-agent lends to a run that calls it.

    Attributes:
        begin: Begins a run on the host of another, given limits, the task, the run's id, the conversation,
            and the run and call for which it works.
        go_on: Goes on with a run that was held, from its record, with a person's answer; raises
            ``RecordError`` where it cannot.
        stored: A run as the host's store has it, by its id, the suspension that the answer is for, and the
            answer: one that goes on, or what is known of one that is over; None where it is not there.
        guardrails: The sub-agent's own limits.
        secret: Names of a tool's arguments that must not leave the sub-agent, by the tool's name.
    """

    begin: Callable[[Host, AgentGuardrails, str, str, str, tuple[str, str]], Run]
    go_on: Callable[[Host, Held, PersonReply], Run]
    stored: Callable[[Host, str, str, PersonReply | None], Run | RunState | None]
    guardrails: AgentGuardrails
    secret: Mapping[str, frozenset[str]]


def subagent_tool(name: str, description: str, lender: Lender) -> Tool:
    """A tool whose calls are answered by runs of an agent.

    Raises:
        ToolDefinitionError: The name is none for a tool.
    """

    async def delegated(task: str) -> str:
        raise ToolError(f"{name} is a sub-agent: it answers calls of a run")

    delegated.__doc__ = (
        f"{description}\n\nArgs:\n    task: The task in full, with all that it takes: nothing else of this "
        "conversation is known there.\n"
    )

    def delegate(context: Context, entry: CallState, attempt: int, share: Share) -> SubRun:
        return SubRun(context, entry, attempt, share, lender)

    return replace(as_tool(delegated, name=name), delegate=delegate)


class SubRun:
    """One call, answered by a sub-agent's run.

    Attributes:
        run_id: The sub-agent's run, once there is one.
        usage: What it has used up since this call of it began, or went on.
    """

    def __init__(self, context: Context, entry: CallState, attempt: int, share: Share, lender: Lender) -> None:
        self._context, self._entry, self._attempt, self._lender = context, entry, attempt, lender
        self._share = share
        self._state: RunState | None = None
        self._before = Usage() if entry.held is None else entry.held.spent

    @property
    def run_id(self) -> str:
        """The sub-agent's run, once there is one."""
        return "" if self._state is None else self._state.run_id

    @property
    def usage(self) -> Usage:
        """What it has used up since this call of it began, or went on."""
        return Usage() if self._state is None else _difference(self._state.usage, self._before)

    async def answer(self, arguments: Mapping[str, Any]) -> ToolResult | Held:
        """What the sub-agent's run came to; or the run, where it waits for a person.

        Raises:
            ToolError: It did not finish its task.
        """
        call = self._entry.call
        run = self._opened(str(arguments["task"]))
        if run is None:
            text = "Not run: nothing is left of the budget of this run for a sub-agent."
            return ToolResult(call.id, call.name, text, "skipped")
        if isinstance(run, RunState):  # it had ended, and this process knows it from the store
            self._state = run
            kind, fields = ending_of(run)
            return ToolResult(call.id, call.name, _said(kind(run_id=run.run_id, seq=0, time=0.0, **fields)))
        self._state = run.state
        outcome = (await run).outcome
        if isinstance(outcome, UserInputRequested):
            return self._held(outcome, run.state)
        return ToolResult(call.id, call.name, _said(outcome))

    def _opened(self, task: str) -> Run | RunState | None:
        """The run, begun, going on or over; None where there is no budget left for one."""
        context, entry, lender = self._context, self._entry, self._lender
        parent, host, held = context.run, context.parts.host, entry.held
        run_id = self._new_id() if held is None else held.run_id
        stored = lender.stored(host, run_id, "" if held is None else held.suspension, entry.answer)
        if stored is not None:
            return stored
        if held is not None and entry.answer is not None:
            try:
                return lender.go_on(host, held, entry.answer)
            except RecordError as error:
                raise ToolError(f"the sub-agent's run cannot go on: {error}") from error
        limits = capped(lender.guardrails, parent, self._share)
        if limits is None:
            return None
        return lender.begin(host, limits, task, run_id, parent.session_id, (parent.run_id, entry.call.id))

    def _new_id(self) -> str:
        """An id that tells which call the run works for; where a store keeps it, the same for every attempt."""
        parent, stored = self._context.run, self._context.parts.host.store is not None
        place = next(i for i, c in enumerate(parent.batch) if c is self._entry)
        again = f".{self._attempt}" if self._attempt > 1 and not stored else ""
        return f"{parent.run_id}-{parent.model_calls}.{place}{again}"

    def _held(self, asked: UserInputRequested, run: RunState) -> Held:
        call = self._entry.call
        withheld = self._lender.secret.get(asked.tool, frozenset())
        waiting = Waiting(
            asked.kind,
            asked.question,
            asked.context,
            asked.choices,
            call.id,
            asked.tool,
            {k: "(secret)" if k in withheld else v for k, v in asked.arguments.items()},
            asked.originating_failure_kind,
            f"{call.name}/{asked.asker}" if asked.asker else call.name,
        )
        stored = self._context.parts.host.store is not None
        record = asked.suspension_record
        return Held(run.run_id, waiting, record.record_id, "" if stored else record.to_json(), self.usage, run.usage)


def _difference(now: Usage, before: Usage) -> Usage:
    return Usage(*(getattr(now, name) - getattr(before, name) for name in Usage.__dataclass_fields__))


def _said(outcome: Ending) -> str:
    """What the model that called is told.

    Raises:
        ToolError: The run did not finish its task.
    """
    match outcome:
        case RunCompleted(output=output):
            return output if isinstance(output, str) else to_json(output).decode()
        case Handoff(rationale=rationale, blockers=blockers, suggested_next_steps=steps):
            more = f" It suggests: {'; '.join(steps)}." if steps else ""
            raise ToolError(f"the sub-agent hands the task back: {rationale}.{more}", blockers=blockers)
        case PartialRunSummary(missing=missing, learned_facts=facts):
            more = f" It learned: {'; '.join(facts)}." if facts else ""
            raise ToolError(f"the sub-agent stopped early; what is missing is {missing}.{more}")
        case RunCancelled(reason=reason):
            raise ToolError(f"the sub-agent was cancelled: {reason}")
        case Ending():
            raise ToolError("the sub-agent did not finish")


def capped(own: AgentGuardrails, parent: RunState, share: Share = Share()) -> AgentGuardrails | None:  # noqa: B008  # frozen
    """A sub-agent's limits within what is left of those of the run that calls; None where nothing is left.

    Model calls, active time, tokens and USD are each the smaller of the two. What a sub-agent spends of the
    last three, the run above has spent too; its model calls are its own. Those that begin together each have an
    equal part of the tokens and USD, so that all of them stay within what is left, but for the one reply with
    which each may go over. Time passes for all of them at once.
    """
    limits = parent.guardrails
    spent = parent.usage + share.spent
    left = {
        "max_iterations": (limits.max_iterations, parent.iterations, 1),
        "max_execution_time_s": (limits.max_execution_time_s, parent.elapsed_s, 1),
        "max_tokens": (limits.max_tokens, spent.total_tokens, share.among),
        "max_cost_usd": (limits.max_cost_usd, spent.cost_usd, share.among),
    }
    update: dict[str, Any] = {"validity_s": max(own.validity_s, limits.validity_s)}
    for name, (limit, gone, among) in left.items():
        if limit is None:
            continue
        part = limit - gone
        if among > 1:
            part = part // among if isinstance(part, int) else part / among
        if part <= 0:
            return None
        mine = getattr(own, name)
        update[name] = part if mine is None else min(mine, part)
    return own.model_copy(update=update)
