"""An agent as a tool: each call is a run of the sub-agent, within the remaining budget of the calling run.

The calling run provides the host, caps the sub-agent's limits by what is left of its own, and is charged for what
the sub-agent uses. Cancelling it, or its timeout, cancels the sub-agent. When the sub-agent waits for a human, the
calling run waits too and asks the same question; its signed record contains the sub-agent's, so one answer resumes
both, in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from agentfsm.agent.resume import load_run, open_suspended_state, parse_record
from agentfsm.errors import SuspensionRecordError, ToolError
from agentfsm.loop.events import Ending, Handoff, PartialRunSummary, RunCancelled, RunCompleted, UserInputRequested
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import ToolResult, Usage
from agentfsm.loop.state import CallState, HumanReply, PendingRequest, RunState, SuspendedSubRun
from agentfsm.runtime.context import Context
from agentfsm.runtime.driver import RunRequest
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import ending_event
from agentfsm.runtime.run import Run
from agentfsm.runtime.tools import BudgetShare, Tool, as_tool

if TYPE_CHECKING:
    from agentfsm.agent.agent import Agent

__all__ = ["SubagentFactory", "cap_guardrails", "subagent_factory", "subagent_tool"]


@dataclass(frozen=True)
class SubagentFactory:
    """What a sub-agent lends to a run that calls it.

    Attributes:
        start: Begins a run on the host of another, given limits, the task, the run's id, the conversation,
            and the run and call for which it works.
        resume: Goes on with a run that was held, from its record, with a person's answer; raises
            ``SuspensionRecordError`` where it cannot.
        load: A run as the host's store has it, by its id, the suspension that the answer is for, and the
            answer: one that goes on, or what is known of one that is over; None where it is not there.
        guardrails: The sub-agent's own limits.
        secret_arguments: Names of a tool's arguments that must not leave the sub-agent, by the tool's name.
    """

    start: Callable[[Host, AgentGuardrails, str, str, str, tuple[str, str]], Run]
    resume: Callable[[Host, SuspendedSubRun, HumanReply], Run]
    load: Callable[[Host, str, str, HumanReply | None], Run | RunState | None]
    guardrails: AgentGuardrails
    secret_arguments: Mapping[str, frozenset[str]]


def subagent_tool(name: str, description: str, factory: SubagentFactory) -> Tool:
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

    def delegate(context: Context, call_state: CallState, attempt: int, share: BudgetShare) -> SubRun:
        return SubRun(context, call_state, attempt, share, factory)

    return replace(as_tool(delegated, name=name), delegate=delegate)


class SubRun:
    """One call, answered by a sub-agent's run.

    Attributes:
        run_id: The sub-agent's run, once there is one.
        usage: What it has used up since this call of it began, or went on.
    """

    def __init__(
        self, context: Context, call_state: CallState, attempt: int, share: BudgetShare, factory: SubagentFactory
    ) -> None:
        self._context, self._call_state, self._attempt, self._factory = context, call_state, attempt, factory
        self._share = share
        self._state: RunState | None = None
        self._usage_before = Usage() if call_state.held is None else call_state.held.spent

    @property
    def run_id(self) -> str:
        """The sub-agent's run, once there is one."""
        return "" if self._state is None else self._state.run_id

    @property
    def usage(self) -> Usage:
        """What it has used up since this call of it began, or went on."""
        return Usage() if self._state is None else _usage_since(self._state.usage, self._usage_before)

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        """What the sub-agent's run came to; or the run, where it waits for a person.

        Raises:
            ToolError: It did not finish its task.
        """
        call = self._call_state.call
        run = self._open_run(str(arguments["task"]))
        if run is None:
            text = "Not run: nothing is left of the budget of this run for a sub-agent."
            return ToolResult(call.id, call.name, text, "skipped")
        if isinstance(run, RunState):  # it had ended, and this process knows it from the store
            self._state = run
            kind, fields = ending_event(run)
            return ToolResult(call.id, call.name, _result_text(kind(run_id=run.run_id, seq=0, time=0.0, **fields)))
        self._state = run.run_state
        outcome = (await run).outcome
        if isinstance(outcome, UserInputRequested):
            return self._suspended(outcome, run.run_state)
        return ToolResult(call.id, call.name, _result_text(outcome))

    def _open_run(self, task: str) -> Run | RunState | None:
        """The run, begun, going on or over; None where there is no budget left for one."""
        context, entry, lender = self._context, self._call_state, self._factory
        parent, host, held = context.run, context.config.host, entry.held
        run_id = self._run_id_for_call() if held is None else held.run_id
        stored = lender.load(host, run_id, "" if held is None else held.suspension, entry.answer)
        if stored is not None:
            return stored
        if held is not None and entry.answer is not None:
            try:
                return lender.resume(host, held, entry.answer)
            except SuspensionRecordError as error:
                raise ToolError(f"the sub-agent's run cannot go on: {error}") from error
        limits = cap_guardrails(lender.guardrails, parent, self._share)
        if limits is None:
            return None
        return lender.start(host, limits, task, run_id, parent.session_id, (parent.run_id, entry.call.id))

    def _run_id_for_call(self) -> str:
        """An id that tells which call the run works for; where a store keeps it, the same for every attempt."""
        parent, stored = self._context.run, self._context.config.host.store is not None
        place = next(i for i, c in enumerate(parent.batch) if c is self._call_state)
        again = f".{self._attempt}" if self._attempt > 1 and not stored else ""
        return f"{parent.run_id}-{parent.model_calls}.{place}{again}"

    def _suspended(self, request: UserInputRequested, run: RunState) -> SuspendedSubRun:
        call = self._call_state.call
        withheld = self._factory.secret_arguments.get(request.tool, frozenset())
        waiting = PendingRequest(
            request.kind,
            request.question,
            request.context,
            request.choices,
            call.id,
            request.tool,
            {k: "(secret)" if k in withheld else v for k, v in request.arguments.items()},
            request.originating_failure_kind,
            f"{call.name}/{request.asker}" if request.asker else call.name,
        )
        stored = self._context.config.host.store is not None
        record = request.suspension_record
        return SuspendedSubRun(
            run.run_id, waiting, record.record_id, "" if stored else record.to_json(), self.usage, run.usage
        )


def _usage_since(now: Usage, before: Usage) -> Usage:
    return Usage(*(getattr(now, name) - getattr(before, name) for name in Usage.__dataclass_fields__))


def _result_text(outcome: Ending) -> str:
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


def cap_guardrails(
    own: AgentGuardrails, parent: RunState, share: BudgetShare = BudgetShare()
) -> AgentGuardrails | None:  # frozen
    """A sub-agent's limits within what is left of those of the run that calls; None where nothing is left.

    Model calls, active time, tokens and USD are each the smaller of the two. What a sub-agent spends of the
    last three, the run above has spent too; its model calls are its own. Those that begin together each have an
    equal part of the tokens and USD, so that all of them stay within what is left, but for the one reply with
    which each may go over. Time passes for all of them at once.
    """
    limits = parent.guardrails
    spent = parent.usage + share.uncharged
    left = {
        "max_iterations": (limits.max_iterations, parent.iterations, 1),
        "max_execution_time_s": (limits.max_execution_time_s, parent.elapsed_s, 1),
        "max_tokens": (limits.max_tokens, spent.total_tokens, share.shared_by),
        "max_cost_usd": (limits.max_cost_usd, spent.cost_usd, share.shared_by),
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


def subagent_factory(agent: Agent) -> SubagentFactory:
    """What an agent lends to runs that call it."""
    lent = _HostedAgent(agent)
    secret = {t.name: t.secret for t in agent.config.tools.values() if t.secret}
    return SubagentFactory(lent.start, lent.resume, lent.load, agent.guardrails, secret)


@dataclass(frozen=True, slots=True)
class _HostedAgent:
    """An agent that works on hosts of others; see ``agentfsm.agent.subagent.Lender``."""

    agent: Agent

    def on_host(self, host: Host) -> Agent:
        return self.agent.with_config(replace(self.agent.config, host=host))

    def start(
        self, host: Host, guardrails: AgentGuardrails, task: str, run_id: str, session_id: str, parent: tuple[str, str]
    ) -> Run:
        run = self.on_host(host).run(task, session_id=session_id, run_id=run_id)
        run.run_state.guardrails, run.run_state.parent = guardrails, parent
        return run

    def resume(self, host: Host, suspended: SuspendedSubRun, human_reply: HumanReply) -> Run:
        parts, opened = self.on_host(host).config, parse_record(suspended.record)
        state = open_suspended_state(
            parts, opened, allow_expired=True
        )  # how long an answer is good is for the run above to say
        return Run(parts, state, RunRequest(suspension_record=opened, reply=human_reply))

    def load(
        self, host: Host, run_id: str, suspension_id: str, human_reply: HumanReply | None
    ) -> Run | RunState | None:
        head = None if host.store is None else host.store.head(run_id)
        if host.store is None or head is None or not head.seq:
            return None
        if head.status == "finished":
            from agentfsm.journal.replay import rehydrate  # the journal loads when a run comes from a store

            return rehydrate(host.store.records(run_id)).run
        parts = self.on_host(host).config
        found = load_run(parts, run_id)
        given = human_reply if found.suspension_id is not None and found.suspension_id == suspension_id else None
        return Run(parts, found.run, RunRequest(reply=given, resume_point=found.resume_point))
