"""An agent as a tool: each call is a run of the sub-agent, within the remaining budget of the calling run.

The calling run provides the host and its permission policies, caps the sub-agent's limits by what is left of its own
whenever the sub-agent starts or continues, and is charged for what the sub-agent uses. Cancelling it, or its timeout,
cancels the sub-agent. When the sub-agent waits for a human, the calling run waits too and asks the same question; its
signed record contains the sub-agent's, so one answer resumes both, in any process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from agentfsm.agent.config import with_host
from agentfsm.agent.resume import check_agent, check_reply, load_run, open_suspended_state, parse_record
from agentfsm.errors import SuspensionRecordError, ToolError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.events import (
    Ending,
    Handoff,
    PartialRunSummary,
    RunAborted,
    RunCancelled,
    RunCompleted,
    UserInputRequested,
)
from agentfsm.loop.extension import EXTENDING_REPLIES, GUARDRAIL_OF_UNIT
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import HumanReply, PendingRequest, ReachedLimit, SuspendedSubRun
from agentfsm.loop.messages import ToolResult, Usage
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.loop.withholding import SecretOpener
from agentfsm.machine.graph import State
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.driver import RunRequest
from agentfsm.runtime.hooks import Hook
from agentfsm.runtime.result import ending_event
from agentfsm.runtime.run import Run, count_model_requests, live_state, send_events, start_run
from agentfsm.runtime.run_context import check_deps
from agentfsm.runtime.tools import CallingRun, Tool, as_tool, run_secrets

if TYPE_CHECKING:
    from agentfsm.journal.load import LoadedRun

__all__ = ["Spent", "SubRun", "SubagentFactory", "cap_guardrails", "subagent_tool"]

DISPATCH = State.DISPATCH_TOOL


def subagent_tool(name: str, description: str, config: AgentConfig) -> Tool:
    """A tool whose calls are answered by runs of another agent.

    Args:
        name: The tool's name.
        description: What it does, for the calling model.
        config: The sub-agent's configuration.

    Raises:
        ToolDefinitionError: The name is not valid for a tool.
    """

    async def delegated(task: str) -> str:
        raise ToolError(f"{name} is a sub-agent: only a run can call it")

    delegated.__doc__ = (
        f"{description}\n\nArgs:\n    task: The task in full, with all that it takes: nothing else of this "
        "conversation is known there.\n"
    )

    runs_on = {
        "graph": config.machine.graph.fingerprint,
        "rules": config.behavior.model_dump(mode="json"),
        "tools": {each.name: each.digest for each in config.tools.values()},
    }
    return replace(as_tool(delegated, name=name), delegate=SubagentFactory(config), definition=canonical_json(runs_on))


@dataclass(frozen=True, slots=True)
class SubagentFactory:
    """Starts, resumes and loads a sub-agent's runs.

    Attributes:
        config: The sub-agent's configuration.
    """

    config: AgentConfig

    def __call__(self, caller: CallingRun, call_state: CallState, attempt: int) -> SubRun:
        """The run that answers a call.

        Args:
            caller: The calling run.
            call_state: The call.
            attempt: Which attempt at the call this is, from 1.
        """
        return SubRun(caller, self.under(caller), call_state, attempt)

    async def check_reply(self, caller: CallingRun, held: SuspendedSubRun, reply: HumanReply) -> None:
        """Check that a suspended run can go on with a person's reply; nothing is changed.

        Args:
            caller: The calling run.
            held: The suspended run.
            reply: The reply.

        Raises:
            SuspensionRecordError: It cannot.
            JournalGraphError: It belongs to another graph, and no migration accepts it.
        """
        factory = self.under(caller)
        loaded = await factory.load(held.run_id)
        if isinstance(loaded, RunState):  # it has ended
            return
        if loaded is None:
            record, state = await factory.open(held)
            check_agent(factory.config, state, record.state)
        else:
            state = loaded.run
            check_agent(factory.config, state, loaded.pinned)
        await check_reply(factory.config, state, reply)

    @property
    def is_agent(self) -> bool:
        """True."""
        return True

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Its tools by name."""
        return self.config.tools

    @property
    def hooks(self) -> Mapping[str, tuple[Hook, ...]]:
        """Its hooks by state."""
        return self.config.hooks

    def under(self, caller: CallingRun) -> SubagentFactory:
        """The same sub-agent on the host of a calling run and under its permission policies."""
        config = with_host(self.config, caller.host)
        if caller.permissions:
            above = (Hook(DISPATCH, each, fail_open=False, name="permissions") for each in caller.permissions)
            config = replace(config, hooks={**config.hooks, DISPATCH: (*above, *config.hooks.get(DISPATCH, ()))})
        return SubagentFactory(config)

    def start(
        self,
        guardrails: AgentGuardrails,
        task: str,
        run_id: str,
        caller: CallingRun,
        call_id: str,
    ) -> Run[Any, Any]:
        """A new run.

        Args:
            guardrails: Its limits.
            task: The prompt.
            run_id: Its id.
            caller: The calling run: its session, requester, tags and metadata are those of the new run, too.
            call_id: The id of the call that it answers.

        Raises:
            RunError: The calling run's dependencies are not those that the sub-agent declares.
        """
        parent = caller.run
        return start_run(
            replace(self.config, guardrails=guardrails),
            task,
            session_id=parent.session_id,
            run_id=run_id,
            parent=(parent.run_id, call_id),
            actor=parent.requester,
            deps=self.deps_under(caller),
            details=replace(parent.details, has_deps=False),
        )

    def deps_under(self, caller: CallingRun) -> Any:
        """The dependencies of a run: those of the calling run, if the sub-agent declares their type and makes none.

        Args:
            caller: The calling run.

        Raises:
            RunError: The calling run has none of that type.
        """
        config = self.config
        if config.deps_type is None or config.deps_factory is not None:
            return None
        check_deps(config.deps_type, caller.deps, "the run that calls the sub-agent needs them")
        return caller.deps

    async def open(self, suspended: SuspendedSubRun) -> tuple[SuspensionRecord, RunState]:
        """A run that was suspended inside its caller's record.

        Raises:
            SuspensionRecordError: It cannot be resumed.
        """
        record = parse_record(suspended.record)
        # Expired records are accepted: the calling run decides how long a reply is valid.
        return record, await open_suspended_state(self.config, record, allow_expired=True)

    async def load(self, run_id: str) -> LoadedRun | RunState | None:
        """A run from the host's store: the final state of one that has ended, or None if the store does not have it.

        Args:
            run_id: Its id.
        """
        store = self.config.host.store
        head = None if store is None else await store.head(run_id)
        if store is None or head is None or not head.seq:
            return None
        if head.status == "finished":
            from agentfsm.journal.rehydrate import rehydrate  # only needed for runs in a store
            from agentfsm.journal.store import off_loop

            opener = SecretOpener(self.config.host.keyring)
            return (await off_loop(lambda rows: rehydrate(rows, opener), await store.records(run_id))).run
        return await load_run(self.config, run_id)


class SubRun:
    """One tool call that is answered by a sub-agent's run.

    Args:
        caller: The calling run.
        factory: The sub-agent, under the calling run.
        call_state: The call.
        attempt: Which attempt at the call this is, from 1.
    """

    def __init__(self, caller: CallingRun, factory: SubagentFactory, call_state: CallState, attempt: int) -> None:
        self._caller, self._factory, self._call_state, self._attempt = caller, factory, call_state, attempt
        self._stored = factory.config.host.store is not None
        self._run: Run[Any, Any] | None = None
        self._state: RunState | None = None
        self._model_calls_before = 0  # made before this object, and not charged to the calling run yet

    @property
    def run_id(self) -> str:
        """The id of the sub-agent's run; empty until it exists."""
        return "" if self._state is None else self._state.run_id

    @property
    def usage(self) -> Usage:
        """What the run has used since this call started or resumed it."""
        held = self._call_state.held
        return Usage() if self._state is None else _usage_since(self._state.usage, held.spent if held else Usage())

    @property
    def model_calls(self) -> int:
        """How many model calls were made for the run since then, the one that was cut off included."""
        return self._model_calls_before + (0 if self._run is None else count_model_requests(self._run))

    @property
    def secrets(self) -> tuple[Any, ...]:
        """What the run knows to be secret."""
        return () if self._state is None else run_secrets(self._state, self._factory.config.tools)

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        """The result of the sub-agent's run; or the suspended run, if it waits for a human.

        Raises:
            ToolError: It did not complete its task.
        """
        call = self._call_state.call
        run = await self._open_run(str(arguments["task"]))
        if run is None:
            text = "Not run: nothing is left of the budget of this run for a sub-agent."
            return ToolResult(call.id, call.name, text, "skipped")
        if isinstance(run, RunState):  # it had ended before this process loaded it from the store
            self._note_progress(run)
            kind, fields = ending_event(run)
            return ToolResult(call.id, call.name, _result_text(kind(run_id=run.run_id, seq=0, time=0.0, **fields)))
        self._run, self._state = run, live_state(run)
        if self._caller.on_event is not None:
            send_events(run, self._caller.on_event)
        outcome = (await run).outcome
        if isinstance(outcome, UserInputRequested):
            return self._suspended(outcome, run.run_state)
        return ToolResult(call.id, call.name, _result_text(outcome))

    async def _open_run(self, task: str) -> Run[Any, Any] | RunState | None:
        """The run: new, continued or already over; None if there is no budget left for one."""
        factory, held, reply = self._factory, self._call_state.held, self._call_state.answer
        run_id = self._run_id_for_call() if held is None else held.run_id
        loaded = await factory.load(run_id)
        if isinstance(loaded, RunState):
            return loaded
        if loaded is not None:
            answered = held is not None and held.suspension == loaded.suspension_id
            request = RunRequest(reply=reply if answered else None, resume_point=loaded.resume_point)
            return self._continue(loaded.run, request)
        if held is not None and reply is not None:
            try:
                record, state = await factory.open(held)
            except SuspensionRecordError as error:
                raise ToolError(f"the sub-agent's run cannot be resumed: {error}") from error
            return self._continue(state, RunRequest(suspension_record=record, reply=reply))
        limits = cap_guardrails(factory.config.guardrails, self._caller)
        if limits is None:
            return None
        run = factory.start(limits, task, run_id, self._caller, self._call_state.call.id)
        live_state(run).withheld = self._caller.secrets
        return run

    def _continue(self, state: RunState, request: RunRequest) -> Run[Any, Any] | None:
        """A run that continues within what is left now; None if a person extends a budget of which nothing is left."""
        self._note_progress(state)
        factory, uncharged = self._factory, Spent(self._model_calls_before, self.usage)
        limits = cap_guardrails(factory.config.guardrails, self._caller, state, uncharged, request.reply)
        if limits is None:
            return None
        deps = factory.deps_under(self._caller)
        return Run(factory.config, state, replace(request, guardrails=limits, deps=deps))

    def _note_progress(self, state: RunState) -> None:
        held = self._call_state.held
        self._state = state
        state.withheld = tuple(dict.fromkeys((*state.withheld, *self._caller.secrets)))
        self._model_calls_before = state.model_calls - (0 if held is None else held.total_model_calls)

    def _run_id_for_call(self) -> str:
        """An id derived from the call; with a store it is the same for every attempt, so that one continues another."""
        parent = self._caller.run
        index = next(i for i, c in enumerate(parent.batch) if c is self._call_state)
        retry = f".{self._attempt}" if self._attempt > 1 and not self._stored else ""
        return f"{parent.run_id}-{parent.turns}.{index}{retry}"

    def _suspended(self, request: UserInputRequested, run: RunState) -> SuspendedSubRun:
        call = self._call_state.call
        tool = self._factory.config.tools.get(request.tool)
        secret = frozenset[str]() if tool is None else tool.secret
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
            quorum=None if run.pending_request is None else run.pending_request.quorum,
            limit=self._own_default(request.limit),
            form=request.form,
        )
        record = request.suspension_record
        return SuspendedSubRun(
            run.run_id,
            waiting,
            record.record_id,
            "" if self._stored else record.to_json(),
            self.usage,
            run.usage,
            self.model_calls,
            run.model_calls,
        )

    def _own_default(self, limit: ReachedLimit | None) -> ReachedLimit | None:
        """A limit with what a reply grants by default: what the sub-agent's own limits say, and not what was left."""
        own = None if limit is None else getattr(self._factory.config.guardrails, GUARDRAIL_OF_UNIT[limit.unit])
        return limit if limit is None or own is None else replace(limit, default=own)


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
        case RunAborted(reason=reason):
            raise ToolError(f"the sub-agent's run was aborted: {reason}")
        case Ending():
            raise ToolError("the sub-agent did not finish")


@dataclass(frozen=True, slots=True)
class Spent:
    """What a sub-agent's run has used that the calling run has not been charged for yet."""

    model_calls: int = 0
    usage: Usage = field(default_factory=Usage)


class _Budget(NamedTuple):
    """One budget of a calling run and of its sub-agent's run.

    Attributes:
        name: The field of ``AgentGuardrails``.
        limit: The calling run's limit; None for none.
        spent: What the calling run has spent of it, and what it will be charged for.
        counted: How far the counter of the sub-agent's run stands.
        shared_by: How many sub-agents share what is left.
    """

    name: str
    limit: float | None
    spent: float
    counted: float
    shared_by: int


def _budgets(caller: CallingRun, state: RunState, uncharged: Spent) -> tuple[_Budget, ...]:
    run, share = caller.run, caller.share
    limits, n = run.guardrails, share.shared_by
    elapsed_s = run.elapsed_s + caller.uncharged_s
    usage, used = run.usage + share.uncharged + uncharged.usage, state.usage
    model_calls = run.iterations + share.uncharged_model_calls + uncharged.model_calls
    return (
        _Budget("max_iterations", limits.max_iterations, model_calls, state.iterations, n),
        _Budget("max_steps", limits.step_limit, run.steps, state.steps, n),
        _Budget("max_tokens", run.token_limit, usage.total_tokens, used.total_tokens, n),
        _Budget("max_cost_usd", run.cost_limit, usage.cost_usd, used.cost_usd, n),
        _Budget("max_execution_time_s", limits.max_execution_time_s, elapsed_s, state.elapsed_s, 1),
    )


_EXTENDED_BY_REPLY = {
    FailureKind.iteration_limit: "max_iterations",
    FailureKind.time_limit: "max_execution_time_s",
}
"""The budgets whose counter a person's reply sets to zero."""

_GRANTED_BY_REPLY = {FailureKind.token_limit: "max_tokens", FailureKind.cost_limit: "max_cost_usd"}
"""The budgets of which a person's reply grants the same amount once more."""


def cap_guardrails(
    own: AgentGuardrails,
    caller: CallingRun,
    state: RunState | None = None,
    uncharged: Spent | None = None,
    reply: HumanReply | None = None,
) -> AgentGuardrails | None:
    """A sub-agent's limits, capped by what is left of the calling run's; None if nothing is left.

    Each of model calls, steps, active time, tokens and USD is the smaller of the two. Sub-agents that start or
    continue together get equal shares, so all of them together stay within what is left; of tokens and USD each may
    exceed its share by one reply. Time is not divided, because it passes for all of them at once.

    Args:
        own: The sub-agent's own limits.
        caller: The calling run.
        state: A run of the sub-agent that continues, or None for a new one.
        uncharged: What that run has used that the calling run has not been charged for.
        reply: The person's reply with which it continues, or None.
    """
    extends = reply is not None and reply.kind in EXTENDING_REPLIES
    request = state.pending_request if state is not None and extends else None
    kind = None if request is None else request.failure_kind
    extended, granted = (None, None) if kind is None else (_EXTENDED_BY_REPLY.get(kind), _GRANTED_BY_REPLY.get(kind))
    amount = 0.0 if reply is None else reply.amount
    validity_s = own.validity_s, caller.run.guardrails.validity_s
    update: dict[str, Any] = {"validity_s": max((each for each in validity_s if each is not None), default=None)}
    for budget in _budgets(caller, state or RunState(""), uncharged or Spent()):
        own_limit = _own_limit(own, budget.name, state, amount, extended or granted)
        if budget.limit is None:
            update[budget.name] = own_limit
            continue
        left = budget.limit - budget.spent
        if budget.shared_by > 1:
            left = left // budget.shared_by if isinstance(left, int) else left / budget.shared_by
        if left <= 0 and (state is None or budget.name in (extended, granted)):
            return None
        cap = max(left, 0) + (0 if budget.name == extended else budget.counted)
        cap = cap or 1  # a limit is never zero: the run that continues is at its end without another model call
        update[budget.name] = cap if own_limit is None else min(own_limit, cap)
    return own.model_copy(update=update)


def _own_limit(
    own: AgentGuardrails, name: str, state: RunState | None, amount: float, extended: str | None
) -> float | None:
    """A sub-agent's own limit on a budget, with what a person has granted, and grants now.

    Args:
        own: The sub-agent's own limits.
        name: The field of them.
        state: The run that continues, or None for a new one.
        amount: What the person's reply names; 0 for the default.
        extended: The field that the reply extends, or None.
    """
    if name == "max_steps":
        return own.step_limit
    limit: float | None = getattr(own, name)
    if limit is None or state is None:
        return limit
    if name == "max_execution_time_s":
        return (amount or limit) if name == extended else (state.granted_s or limit)
    if name not in _GRANTED_BY_REPLY.values():
        return limit
    granted = amount or limit if name == extended else 0
    if name == "max_tokens":
        granted = int(granted)
    return max(limit, getattr(state.guardrails, name) or limit) + granted
