"""An agent as a tool: each call is a run of the sub-agent, within the remaining budget of the calling run.

The calling run provides the host, caps the sub-agent's limits by what is left of its own, and is charged for what
the sub-agent uses. Cancelling it, or its timeout, cancels the sub-agent. When the sub-agent waits for a human, the
calling run waits too and asks the same question; its signed record contains the sub-agent's, so one answer resumes
both, in any process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_json

from agentfsm.agent.config import with_host
from agentfsm.agent.resume import load_run, open_suspended_state, parse_record
from agentfsm.errors import SuspensionRecordError, ToolError
from agentfsm.loop.events import Ending, Handoff, PartialRunSummary, RunCancelled, RunCompleted, UserInputRequested
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import ToolResult, Usage
from agentfsm.loop.state import CallState, HumanReply, PendingRequest, RunState, SuspendedSubRun
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.driver import RunRequest
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import ending_event
from agentfsm.runtime.run import Run, start_run
from agentfsm.runtime.tools import BudgetShare, Tool, as_tool, secret_arguments

__all__ = ["SubRun", "SubagentFactory", "cap_guardrails", "subagent_tool"]

_FULL_SHARE = BudgetShare()


def subagent_tool(name: str, description: str, config: AgentConfig) -> Tool:
    """A tool whose calls are answered by runs of another agent.

    Args:
        name: The tool's name.
        description: What it does, for the calling model.
        config: The sub-agent's configuration.

    Raises:
        ToolDefinitionError: The name is not valid for a tool.
    """
    factory = SubagentFactory(config)

    async def delegated(task: str) -> str:
        raise ToolError(f"{name} is a sub-agent: only a run can call it")

    delegated.__doc__ = (
        f"{description}\n\nArgs:\n    task: The task in full, with all that it takes: nothing else of this "
        "conversation is known there.\n"
    )

    def delegate(run: RunState, host: Host, call_state: CallState, attempt: int, share: BudgetShare) -> SubRun:
        return SubRun(run, factory.on_host(host), call_state, attempt, share)

    return replace(as_tool(delegated, name=name), delegate=delegate)


@dataclass(frozen=True, slots=True)
class SubagentFactory:
    """Starts, resumes and loads a sub-agent's runs.

    Attributes:
        config: The sub-agent's configuration.
    """

    config: AgentConfig

    def on_host(self, host: Host) -> SubagentFactory:
        """The same sub-agent on the host of a calling run."""
        return SubagentFactory(with_host(self.config, host))

    def start(
        self, guardrails: AgentGuardrails, task: str, run_id: str, session_id: str, parent: tuple[str, str]
    ) -> Run:
        """A new run.

        Args:
            guardrails: Its limits.
            task: The prompt.
            run_id: Its id.
            session_id: The conversation's id.
            parent: The calling run and the id of the call that it answers.
        """
        config = replace(self.config, guardrails=guardrails)
        return start_run(config, task, session_id=session_id, run_id=run_id, parent=parent)

    def resume(self, suspended: SuspendedSubRun, human_reply: HumanReply) -> Run:
        """A run that was suspended inside its caller's record, resumed with a human's reply.

        Raises:
            SuspensionRecordError: It cannot be resumed.
        """
        record = parse_record(suspended.record)
        # Expired records are accepted: the calling run decides how long a reply is valid.
        state = open_suspended_state(self.config, record, allow_expired=True)
        return Run(self.config, state, RunRequest(suspension_record=record, reply=human_reply))

    def load(self, run_id: str, suspension_id: str, human_reply: HumanReply | None) -> Run | RunState | None:
        """A run from the host's store.

        Args:
            run_id: Its id.
            suspension_id: The suspension that the reply answers, or an empty string.
            human_reply: The reply, or None.

        Returns:
            A run that continues, the final state of one that has ended, or None if the store does not have it.
        """
        store = self.config.host.store
        head = None if store is None else store.head(run_id)
        if store is None or head is None or not head.seq:
            return None
        if head.status == "finished":
            from agentfsm.journal.replay import rehydrate  # only needed for runs in a store

            return rehydrate(store.records(run_id)).run
        loaded = load_run(self.config, run_id)
        answers = loaded.suspension_id is not None and loaded.suspension_id == suspension_id
        request = RunRequest(reply=human_reply if answers else None, resume_point=loaded.resume_point)
        return Run(self.config, loaded.run, request)


class SubRun:
    """One tool call that is answered by a sub-agent's run.

    Args:
        parent: The calling run.
        factory: The sub-agent, on the calling run's host.
        call_state: The call.
        attempt: Which attempt at the call this is, from 1.
        share: Its share of the calling run's remaining budget.
    """

    def __init__(
        self, parent: RunState, factory: SubagentFactory, call_state: CallState, attempt: int, share: BudgetShare
    ) -> None:
        self._parent, self._factory, self._call_state = parent, factory, call_state
        self._attempt, self._share = attempt, share
        self._stored = factory.config.host.store is not None
        self._state: RunState | None = None
        self._usage_before = Usage() if call_state.held is None else call_state.held.spent

    @property
    def run_id(self) -> str:
        """The id of the sub-agent's run; empty until it exists."""
        return "" if self._state is None else self._state.run_id

    @property
    def usage(self) -> Usage:
        """What the run has used since this call started or resumed it."""
        return Usage() if self._state is None else _usage_since(self._state.usage, self._usage_before)

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        """The result of the sub-agent's run; or the suspended run, if it waits for a human.

        Raises:
            ToolError: It did not complete its task.
        """
        call = self._call_state.call
        run = self._open_run(str(arguments["task"]))
        if run is None:
            text = "Not run: nothing is left of the budget of this run for a sub-agent."
            return ToolResult(call.id, call.name, text, "skipped")
        if isinstance(run, RunState):  # it had ended before this process loaded it from the store
            self._state = run
            kind, fields = ending_event(run)
            return ToolResult(call.id, call.name, _result_text(kind(run_id=run.run_id, seq=0, time=0.0, **fields)))
        self._state = run.run_state
        outcome = (await run).outcome
        if isinstance(outcome, UserInputRequested):
            return self._suspended(outcome, run.run_state)
        return ToolResult(call.id, call.name, _result_text(outcome))

    def _open_run(self, task: str) -> Run | RunState | None:
        """The run: new, resumed or already over; None if there is no budget left for one."""
        parent, factory, suspended, answer = self._parent, self._factory, self._call_state.held, self._call_state.answer
        run_id = self._run_id_for_call() if suspended is None else suspended.run_id
        stored = factory.load(run_id, "" if suspended is None else suspended.suspension, answer)
        if stored is not None:
            return stored
        if suspended is not None and answer is not None:
            try:
                return factory.resume(suspended, answer)
            except SuspensionRecordError as error:
                raise ToolError(f"the sub-agent's run cannot be resumed: {error}") from error
        limits = cap_guardrails(factory.config.guardrails, parent, self._share)
        if limits is None:
            return None
        return factory.start(limits, task, run_id, parent.session_id, (parent.run_id, self._call_state.call.id))

    def _run_id_for_call(self) -> str:
        """An id derived from the call; with a store it is the same for every attempt, so that one continues another."""
        parent = self._parent
        index = next(i for i, c in enumerate(parent.batch) if c is self._call_state)
        retry = f".{self._attempt}" if self._attempt > 1 and not self._stored else ""
        return f"{parent.run_id}-{parent.model_calls}.{index}{retry}"

    def _suspended(self, request: UserInputRequested, run: RunState) -> SuspendedSubRun:
        call = self._call_state.call
        secret = secret_arguments(self._factory.config.tools).get(request.tool, frozenset())
        waiting = PendingRequest(
            request.kind,
            request.question,
            request.context,
            request.choices,
            call.id,
            request.tool,
            {k: "(secret)" if k in secret else v for k, v in request.arguments.items()},
            request.originating_failure_kind,
            f"{call.name}/{request.asker}" if request.asker else call.name,
        )
        record = request.suspension_record
        return SuspendedSubRun(
            run.run_id, waiting, record.record_id, "" if self._stored else record.to_json(), self.usage, run.usage
        )


def _usage_since(now: Usage, before: Usage) -> Usage:
    return Usage(*(getattr(now, name) - getattr(before, name) for name in Usage.__dataclass_fields__))


def _result_text(outcome: Ending) -> str:
    """The result for the calling model.

    Raises:
        ToolError: The run did not complete its task.
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
    own: AgentGuardrails,
    parent: RunState,
    share: BudgetShare = _FULL_SHARE,
) -> AgentGuardrails | None:
    """A sub-agent's limits, capped by what is left of the calling run's; None if nothing is left.

    Each of model calls, active time, tokens and USD is the smaller of the two. Tokens, USD and time spent by the
    sub-agent count as spent by the calling run too; model calls do not. Sub-agents that start together get equal
    shares of tokens and USD, so all of them together stay within what is left, except for the one reply by which
    each may exceed its share. Time is not divided, because it passes for all of them at once.

    Args:
        own: The sub-agent's own limits.
        parent: The calling run.
        share: The share of the remaining budget.
    """
    limits = parent.guardrails
    spent = parent.usage + share.uncharged
    budgets = {
        "max_iterations": (limits.max_iterations, parent.iterations, 1),
        "max_execution_time_s": (limits.max_execution_time_s, parent.elapsed_s, 1),
        "max_tokens": (limits.max_tokens, spent.total_tokens, share.shared_by),
        "max_cost_usd": (limits.max_cost_usd, spent.cost_usd, share.shared_by),
    }
    update: dict[str, Any] = {"validity_s": max(own.validity_s, limits.validity_s)}
    for name, (limit, used, shared_by) in budgets.items():
        if limit is None:
            continue
        remaining = limit - used
        if shared_by > 1:
            remaining = remaining // shared_by if isinstance(remaining, int) else remaining / shared_by
        if remaining <= 0:
            return None
        own_limit = getattr(own, name)
        update[name] = remaining if own_limit is None else min(own_limit, remaining)
    return own.model_copy(update=update)
