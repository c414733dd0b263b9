"""An agent as a tool: each call is a run of the sub-agent, and so is each request of a server for a model's reply.

Cancelling the calling run, or its timeout, cancels the sub-agent's run. When that waits for a human, the calling run
waits too and asks the same question; its signed record contains the sub-agent's, so one answer resumes both, in any
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from agentfsm.agent.recover import accepts_graph
from agentfsm.agent.subagent import Spent, Subagent, announce, cap_guardrails
from agentfsm.errors import ConfigurationError, SuspensionRecordError, ToolError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.events import (
    Handoff,
    LastEvent,
    PartialRunSummary,
    RunAborted,
    RunCancelled,
    RunCompleted,
    UserInputRequested,
)
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import GUARDRAIL_OF_UNIT, PendingRequest, ReachedLimit, SuspendedSubRun
from agentfsm.loop.messages import NO_USAGE, Message, Role, ToolResult, Usage
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.recovery_policy import Recovery, RecoveryPolicy
from agentfsm.loop.state import CallState, RunState, RunView
from agentfsm.runtime.context import AgentConfig, LongWait
from agentfsm.runtime.delegation import (
    CallingRun,
    SampledReply,
    SampleRequest,
    run_id_for_call,
)
from agentfsm.runtime.hooks import Hook
from agentfsm.runtime.result import ending_event
from agentfsm.runtime.run import (
    Run,
    advance,
    count_model_requests,
    hand_over,
    live_state,
    live_tools,
)
from agentfsm.runtime.run_request import RunRequest
from agentfsm.runtime.tools import Tool, as_tool, run_secrets
from agentfsm.runtime.toolsets import Toolset, toolset_name

if TYPE_CHECKING:
    from agentfsm.journal.load import LoadedRun


def subagent_tool(name: str, description: str, config: AgentConfig) -> Tool:
    """A tool whose calls are answered by runs of another agent.

    Raises:
        ToolDefinitionError: The name is not valid for a tool.
    """

    async def delegated(task: str) -> str:
        raise ToolError(f"{name} is a sub-agent: only a run can call it")

    delegated.__doc__ = (
        f"{description}\n\nArgs:\n    task: The task in full, with all that it takes: nothing else of this "
        "conversation is known there.\n"
    )

    runs_on: dict[str, Any] = {
        "graph": config.machine.graph.fingerprint,
        "rules": config.behavior.model_dump(mode="json"),
        "tools": {each.name: each.digest for each in config.tools.values()},
    }
    if config.toolsets:
        runs_on["toolsets"] = [toolset_name(each) for each in config.toolsets]
    return replace(as_tool(delegated, name=name), delegate=SubagentCalls(config), definition=canonical_json(runs_on))


@dataclass(frozen=True, slots=True)
class SubagentCalls(Subagent):
    """Answers the calls of the tool that an agent is, and the requests of servers."""

    def __call__(self, caller: CallingRun, call_state: CallState, attempt: int) -> SubRun:
        """The run that answers a call."""
        return SubRun(caller, self.under(caller), call_state, attempt)

    def sample(self, caller: CallingRun, call_id: str, run_id: str, request: SampleRequest) -> SampledRun:
        """The run that answers what a server asks a model during a call."""
        return SampledRun(caller, self, call_id, run_id, request)

    async def left_runs(self, caller: CallingRun) -> Sequence[str]:
        """The runs below a calling run that have not ended, and that began with a graph and tools that it has."""
        from agentfsm.journal.listing import iterate_runs  # only needed for runs in a store
        from agentfsm.journal.records import open_record
        from agentfsm.journal.run_info import RunQuery

        store, left = caller.host.store, list[str]()
        if store is None:
            return left
        async for info in iterate_runs(store, RunQuery(parent=caller.run.run_id, ending="")):
            for first in await store.records(info.run_id, limit=1):  # none, if it was only claimed
                began = open_record(first)
                knows = began.get("tools", {}).keys() <= self.config.tools.keys()
                if knows and accepts_graph(self.config, str(began["graph"]["fingerprint"])):
                    left.append(info.run_id)
        return left

    @property
    def is_agent(self) -> bool:
        """True."""
        return True

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Its tools by name."""
        return self.config.tools

    @property
    def toolsets(self) -> tuple[Toolset[Any], ...]:
        """What chooses the tools of its runs."""
        return self.config.toolsets

    @property
    def hooks(self) -> Mapping[str, tuple[Hook, ...]]:
        """Its hooks by state."""
        return self.config.hooks


class SubRun:
    """One tool call that is answered by a sub-agent's run."""

    def __init__(self, caller: CallingRun, subagent: Subagent, call_state: CallState, attempt: int) -> None:
        self._caller, self._subagent, self._call_state, self._attempt = caller, subagent, call_state, attempt
        self._stored = subagent.config.host.store is not None
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
        return NO_USAGE if self._state is None else self._state.usage - (held.spent if held else NO_USAGE)

    @property
    def model_calls(self) -> int:
        """How many model calls were made for the run since then, the one that was cut off included."""
        return self._model_calls_before + (0 if self._run is None else count_model_requests(self._run))

    @property
    def secrets(self) -> tuple[Any, ...]:
        """What the run knows to be secret."""
        return () if self._state is None else run_secrets(self._state, self._tools)

    @property
    def _tools(self) -> Mapping[str, Tool]:
        return self._subagent.config.tools if self._run is None else live_tools(self._run)

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult | SuspendedSubRun:
        """The result of the sub-agent's run; or the suspended run, if it waits for a human.

        Raises:
            ToolError: It did not complete its task.
            LongWait: It is to wait for longer than its caller may be held. It is handed over.
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
        announce(run, self._caller)
        try:
            await advance(run, until=None, longest_wait_s=self._caller.longest_wait_s)
        except LongWait:
            await hand_over(run)
            raise
        outcome = run.result.outcome
        if isinstance(outcome, UserInputRequested):
            return self._suspended(outcome, run.run_state)
        return ToolResult(call.id, call.name, _result_text(outcome))

    async def _open_run(self, task: str) -> Run[Any, Any] | RunState | None:
        """The run: new, continued or already over; None if there is no budget left for one."""
        subagent, held, reply = self._subagent, self._call_state.held, self._call_state.answer
        run_id = self._run_id_for_call() if held is None else held.run_id
        loaded = await subagent.load(run_id)
        if isinstance(loaded, RunState):
            return loaded
        if loaded is not None:
            answered = held is not None and held.suspension == loaded.suspension_id
            request = RunRequest(reply=reply if answered else None, resume_point=loaded.resume_point)
            return await self._continue(loaded.run, request)
        if held is not None and reply is not None:
            try:
                record, state = await subagent.open(held)
            except SuspensionRecordError as error:
                raise ToolError(f"the sub-agent's run cannot be resumed: {error}") from error
            return await self._continue(state, RunRequest(suspension_record=record, reply=reply))
        limits = cap_guardrails(subagent.config.guardrails, self._caller)
        if limits is None:
            return None
        return subagent.start(limits, task, run_id, self._caller, self._call_state.call.id)

    async def _continue(self, state: RunState, request: RunRequest) -> Run[Any, Any] | None:
        """A run that continues within what is left now; None if a person extends a budget of which nothing is left."""
        self._note_progress(state)
        subagent, uncharged = self._subagent, Spent(self._model_calls_before, self.usage)
        limits = cap_guardrails(subagent.config.guardrails, self._caller, state, uncharged, request.reply)
        if limits is None:
            reason = "nothing is left of the budget of the run that called it"
            await subagent.dismiss(self._caller, state.run_id, reason)
            return None
        request = replace(request, guardrails=limits)
        return await subagent.continue_run(self._caller, state, request, "the sub-agent's run")

    def _note_progress(self, state: RunState) -> None:
        held = self._call_state.held
        self._state = state
        state.withheld = tuple(dict.fromkeys((*state.withheld, *self._caller.secrets)))
        self._model_calls_before = state.model_calls - (0 if held is None else held.total_model_calls)

    def _run_id_for_call(self) -> str:
        """An id derived from the call; with a store it is the same for every attempt, so that one continues another."""
        retry = f".{self._attempt}" if self._attempt > 1 and not self._stored else ""
        return f"{run_id_for_call(self._caller.run, self._call_state)}{retry}"

    def _suspended(self, request: UserInputRequested, run: RunState) -> SuspendedSubRun:
        call = self._call_state.call
        tool = self._tools.get(request.tool)
        secret = frozenset[str]() if tool is None else tool.secret
        quorum = None if run.pending_request is None else run.pending_request.quorum
        shown, shown_at = self._shown_before(request.tool, quorum)
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
            quorum=shown,
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
            shown_at=shown_at,
        )

    def _shown_before(self, tool: str, quorum: Quorum | None) -> tuple[Quorum | None, float]:
        """The votes on a request, of one that goes on with the time it has left, and until when that is counted."""
        held = self._call_state.held
        asked = None if held is None else held.waiting.quorum
        if held is None or quorum is None or asked is None:
            return quorum, 0.0
        if not quorum.votes or (held.waiting.tool, asked.rule) != (tool, quorum.rule):
            return quorum, 0.0
        return replace(quorum, asked_at=max(quorum.asked_at, asked.asked_at)), held.shown_at

    def _own_default(self, limit: ReachedLimit | None) -> ReachedLimit | None:
        """A limit with what a reply grants by default: what the sub-agent's own limits say, and not what was left."""
        own = None if limit is None else getattr(self._subagent.config.guardrails, GUARDRAIL_OF_UNIT[limit.unit])
        return limit if limit is None or own is None or not limit.default else replace(limit, default=own)


def _result_text(outcome: LastEvent) -> str:
    """The result for the calling model."""
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
        case UserInputRequested():
            raise ToolError("the sub-agent did not finish")


@dataclass(frozen=True, slots=True)
class _Unattended:
    """A policy for runs that nobody attends: what would ask a person hands off, and a truncated reply is kept."""

    inner: RecoveryPolicy

    def retry_budget(self, kind: FailureKind) -> int:
        """That of the agent's policy."""
        return self.inner.retry_budget(kind)

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """That of the agent's policy."""
        return self.inner.backoff(kind, attempt)

    def decide(self, failure: Failure, state: RunView) -> Action | Recovery:
        """What the agent's policy decides, if that asks nobody."""
        if failure.kind is FailureKind.output_truncated:
            return Action.handoff
        decided = self.inner.decide(failure, state)
        action = decided.action if isinstance(decided, Recovery) else decided
        return Action.handoff if action is Action.ask_user else decided


class SampledRun:
    """What a server asks a model during a call, answered by a run of an agent."""

    def __init__(
        self, caller: CallingRun, subagent: Subagent, call_id: str, run_id: str, request: SampleRequest
    ) -> None:
        self._caller, self._call_id, self.run_id, self._request = caller, call_id, run_id, request
        self._subagent = _sampling_factory(subagent.under(caller), request)
        self._run: Run[Any, Any] | None = None
        self._state: RunState | None = None
        self._model_calls_before = 0  # made in a process that ended

    @property
    def usage(self) -> Usage:
        """What the run has used."""
        return NO_USAGE if self._state is None else self._state.usage

    @property
    def model_calls(self) -> int:
        """How many model calls were made for it, the one that was cut off included."""
        return self._model_calls_before + (0 if self._run is None else count_model_requests(self._run))

    async def reply(self, spent: Usage, model_calls: int, elapsed_s: float) -> SampledReply:
        """The reply; of a run that had ended before a crash the one that it had.

        Args:
            spent: What the call has used before, for which the calling run is not charged yet.
            model_calls: How many model calls were made for it.
            elapsed_s: Seconds for which the call runs.

        Raises:
            ToolError: There is none: nothing is left of the budget, or the run did not complete.
        """
        caller = replace(self._caller, uncharged_s=self._caller.uncharged_s + elapsed_s)
        loaded = await self._subagent.load(self.run_id)
        if isinstance(loaded, RunState):
            self._state, self._model_calls_before = loaded, loaded.model_calls
            return self._read(loaded)
        before = None if loaded is None else loaded.run
        uncharged = Spent(model_calls, spent)
        if before is not None:
            self._state, self._model_calls_before = before, before.model_calls
            uncharged = Spent(model_calls + before.model_calls, spent + before.usage)
        limits = cap_guardrails(self._subagent.config.guardrails, caller, before, uncharged)
        if limits is None:
            raise ToolError("nothing is left of the budget of this run for another model call")
        self._run = await self._open_run(loaded, limits)
        self._state = live_state(self._run)
        announce(self._run, caller)
        return self._read((await self._run).run_state)

    async def _open_run(self, loaded: LoadedRun | None, limits: AgentGuardrails) -> Run[Any, Any]:
        subagent, caller = self._subagent, self._caller
        if loaded is not None:
            state, request = loaded.run, RunRequest(resume_point=loaded.resume_point, guardrails=limits)
            state.withheld = tuple(dict.fromkeys((*state.withheld, *caller.secrets)))
            return await subagent.continue_run(caller, state, request, "the run that replies to the server")
        *history, last = self._request.messages
        if last.images:  # a prompt is a text
            history.append(Message.user("", last.images))
        return subagent.start(limits, last.content, self.run_id, caller, self._call_id, history)

    def _read(self, run: RunState) -> SampledReply:
        kind, fields = ending_event(run)
        ending = kind(run_id=run.run_id, seq=0, time=0.0, **fields)
        last = next((each for each in reversed(run.messages) if each.role is Role.ASSISTANT), None)
        truncated = isinstance(ending, Handoff) and _is_truncation(ending.failure)
        if truncated and last is not None and last.content:
            return SampledReply(last.content, True, self._subagent.config.model.name)
        return SampledReply(_result_text(ending), False, self._subagent.config.model.name)


def _is_truncation(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is FailureKind.output_truncated


def _sampling_factory(subagent: Subagent, request: SampleRequest) -> Subagent:
    """The agent as it answers one request: with the prompt, the settings and the maximum length that it asks for."""
    config = subagent.config
    limit = min(request.max_tokens, config.guardrails.max_output_tokens or request.max_tokens)
    update = {"max_output_tokens": limit, "max_output_tokens_limit": limit, "on_limit": "handoff"}
    guardrails, policy = config.guardrails.model_copy(update=update), _Unattended(config.policy)
    instructions = "\n\n".join(filter(None, (config.instructions, request.instructions)))
    model = config.model
    if request.settings and hasattr(model, "with_settings"):  # settings that the model does not take are left out
        from agentfsm.models.settings import ModelSettings, with_settings  # only for requests with settings

        with suppress(ConfigurationError, ValueError):
            model = with_settings(model, ModelSettings.model_validate(dict(request.settings)))
    changed = replace(config, guardrails=guardrails, policy=policy, instructions=instructions, model=model)
    return Subagent(changed)
