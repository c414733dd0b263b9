"""The runs of a sub-agent, within the remaining budget of the run that calls it.

The calling run provides the host and its permission policies, caps the sub-agent's limits by what is left of its own
whenever the sub-agent starts or continues, and is charged for what the sub-agent uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from agentfsm.agent.config import with_host
from agentfsm.agent.pinned_approvals import as_strict_as_pinned
from agentfsm.agent.resume import config_with_tools, load_run, open_suspended_state, parse_record
from agentfsm.agent.resume_checks import check_agent, check_reply
from agentfsm.errors import SuspensionRecordError, ToolError
from agentfsm.loop.extension import EXTENDING_REPLIES
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import HumanReply, SuspendedSubRun
from agentfsm.loop.messages import Message, Usage
from agentfsm.loop.state import RunState
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.loop.withholding import SecretOpener
from agentfsm.machine.graph import State
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.delegation import (
    CallingRun,
)
from agentfsm.runtime.hooks import Hook
from agentfsm.runtime.run import (
    Run,
    live_state,
    send_events,
    start_run,
)
from agentfsm.runtime.run_context import check_deps
from agentfsm.runtime.run_request import RunRequest

if TYPE_CHECKING:
    from agentfsm.journal.load import LoadedRun


@dataclass(frozen=True, slots=True)
class Subagent:
    """Starts, continues, loads and ends the runs of a sub-agent."""

    config: AgentConfig

    async def check_reply(self, caller: CallingRun, held: SuspendedSubRun, reply: HumanReply) -> None:
        """Check that a suspended run can continue with a person's reply; nothing is changed.

        Raises:
            SuspensionRecordError: It cannot.
            JournalGraphError: It belongs to another graph, and no migration accepts it.
            RunError: Its toolsets need dependencies that there are not, or a toolset failed.
        """
        subagent = self.under(caller)
        loaded = await subagent.load(held.run_id)
        if isinstance(loaded, RunState):  # it has ended
            return
        if loaded is None:
            record, state = await subagent.open(held)
            check_agent(subagent.config, state, record.state)
        else:
            state = loaded.run
            check_agent(subagent.config, state, loaded.pinned)
        config, deps, _ = await subagent.config_to_continue(caller, state)
        await check_reply(config, state, reply, deps)

    async def dismiss(self, caller: CallingRun, run_id: str, reason: str) -> None:
        """End a run that waits or was cut off, and that nobody continues.

        Raises:
            SuspensionRecordError: It cannot be continued.
            JournalError: It cannot be read, or belongs to another graph, and no migration accepts it.
            StoreError: The store cannot be read or written, or somebody else runs it.
        """
        subagent = self.under(caller)
        loaded = await subagent.load(run_id, to_end=True)
        if loaded is None or isinstance(loaded, RunState):
            return
        await Run(subagent.config, loaded.run, RunRequest(dismiss_reason=reason, resume_point=loaded.resume_point))

    async def config_to_continue(self, caller: CallingRun, state: RunState) -> tuple[AgentConfig, Any, tuple[str, ...]]:
        """The configuration with which a run continues, its dependencies, and what a migration lets ask less.

        Raises:
            SuspensionApprovalError: The sub-agent would run calls that the run's own puts to people.
            RunError: Its toolsets need dependencies that there are not, or a toolset failed.
        """
        config, deps = self.config, self.deps_under(caller)
        if config.toolsets:  # what they choose is compared, too
            config, deps = await config_with_tools(config, state, deps)
        config, admitted = as_strict_as_pinned(config, state, config.machine.graph.fingerprint)
        return config, deps, admitted

    def under(self, caller: CallingRun) -> Subagent:
        """The same sub-agent on the host of a calling run and under its permission policies."""
        config = with_host(self.config, caller.host)
        if caller.permissions:
            state = State.DISPATCH_TOOL
            above = (Hook(state, each, fail_open=False, name="permissions") for each in caller.permissions)
            config = replace(config, hooks={**config.hooks, state: (*above, *config.hooks.get(state, ()))})
        return Subagent(config)

    def start(
        self,
        guardrails: AgentGuardrails,
        task: str,
        run_id: str,
        caller: CallingRun,
        call_id: str,
        history: Sequence[Message] = (),
    ) -> Run[Any, Any]:
        """A new run.

        Args:
            guardrails: Its limits.
            task: The prompt.
            run_id: Its id.
            caller: The calling run: its session, requester, tags and metadata are those of the new run, too.
            call_id: The id of the call that it answers.
            history: The messages before the prompt.

        Raises:
            RunError: The calling run's dependencies are not those that the sub-agent declares.
        """
        parent = caller.run
        run = start_run(
            replace(self.config, guardrails=guardrails),
            task,
            message_history=history,
            session_id=parent.session_id,
            run_id=run_id,
            parent=(parent.run_id, call_id),
            actor=parent.requester,
            deps=self.deps_under(caller),
            details=replace(parent.details, has_deps=False),
        )
        live_state(run).withheld = caller.secrets
        return run

    async def continue_run(self, caller: CallingRun, state: RunState, request: RunRequest, what: str) -> Run[Any, Any]:
        """A run that continues; errors call it ``what``.

        Raises:
            ToolError: It cannot continue with the sub-agent as it is now.
            RunError: Its toolsets need dependencies that there are not, or a toolset failed.
        """
        try:
            config, deps, admitted = await self.config_to_continue(caller, state)
        except SuspensionRecordError as error:
            await self.dismiss(caller, state.run_id, f"it cannot be resumed: {error}")
            raise ToolError(f"{what} cannot be resumed: {error}") from error
        return Run(config, state, replace(request, deps=deps, admitted=admitted))

    def deps_under(self, caller: CallingRun) -> Any:
        """The dependencies of a run: those of the calling run, if the sub-agent declares their type and makes none.

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

    async def load(self, run_id: str, *, to_end: bool = False) -> LoadedRun | RunState | None:
        """A run from the host's store: the final state of one that has ended, or None if the store does not have it.

        ``to_end`` is whether it is only to end, so that values that were redacted may be missing.
        """
        store = self.config.host.store
        head = None if store is None else await store.head(run_id)
        if store is None or head is None or not head.seq:
            return None
        if head.status == "finished":
            from agentfsm.journal.rehydrate import rehydrate  # only needed for runs in a store
            from agentfsm.journal.store import off_loop

            opener = SecretOpener(self.config.host.keyring)
            records = await store.records(run_id)
            return (await off_loop(lambda rows: rehydrate(rows, opener, to_end=to_end), records)).run
        return await load_run(self.config, run_id, to_end=to_end)


def announce(run: Run[Any, Any], caller: CallingRun) -> None:
    """Tell the calling run of a run that is about to begin."""
    if caller.on_run is not None:
        caller.on_run(run)
    if caller.on_event is not None:
        send_events(run, caller.on_event)


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
        counted: The counter of the sub-agent's run.
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
    exceed its share by one reply. Time is not divided, because it passes for all of them at once. Where the calling run
    asks nobody about a limit (``on_limit``), the sub-agent's run does not either.

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
    if own.on_limit == "ask_user":
        update["on_limit"] = caller.run.guardrails.on_limit
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
