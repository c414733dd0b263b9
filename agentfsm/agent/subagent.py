"""An agent as a tool: each call is a run of the sub-agent, within the remaining budget of the calling run.

The calling run provides the host and its permission policies, caps the sub-agent's limits by what is left of its own
whenever the sub-agent starts or continues, and is charged for what the sub-agent uses. Cancelling it, or its timeout,
cancels the sub-agent. When the sub-agent waits for a human, the calling run waits too and asks the same question; its
signed record contains the sub-agent's, so one answer resumes both, in any process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from agentfsm.agent.config import with_host
from agentfsm.agent.pinned_approvals import as_strict_as_pinned
from agentfsm.agent.resume import config_with_tools, load_run, open_suspended_state, parse_record
from agentfsm.agent.resume_checks import check_agent, check_reply
from agentfsm.agent.shared_budget import Spent, cap_guardrails
from agentfsm.errors import ConfigurationError, SuspensionRecordError, ToolError
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
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import GUARDRAIL_OF_UNIT, HumanReply, PendingRequest, ReachedLimit, SuspendedSubRun
from agentfsm.loop.messages import NO_USAGE, Message, Role, ToolResult, Usage
from agentfsm.loop.recovery_policy import Recovery, RecoveryPolicy
from agentfsm.loop.state import CallState, RunState, RunView
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.loop.withholding import SecretOpener
from agentfsm.machine.graph import State
from agentfsm.runtime.context import AgentConfig, LongWait
from agentfsm.runtime.delegation import (
    CallingRun,
    SampledReply,
    Sampler,
    SampleRequest,
    answers_request,
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
    send_events,
    start_run,
)
from agentfsm.runtime.run_context import check_deps
from agentfsm.runtime.run_request import RunRequest
from agentfsm.runtime.tools import Tool, as_tool, run_secrets
from agentfsm.runtime.toolsets import Toolset, toolset_name

if TYPE_CHECKING:
    from agentfsm.journal.load import LoadedRun

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

    runs_on: dict[str, Any] = {
        "graph": config.machine.graph.fingerprint,
        "rules": config.behavior.model_dump(mode="json"),
        "tools": {each.name: each.digest for each in config.tools.values()},
    }
    if config.toolsets:
        runs_on["toolsets"] = [toolset_name(each) for each in config.toolsets]
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
        """Check that a suspended run can continue with a person's reply; nothing is changed.

        Raises:
            SuspensionRecordError: It cannot.
            JournalGraphError: It belongs to another graph, and no migration accepts it.
            RunError: Its toolsets need dependencies that there are not, or a toolset failed.
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
        config, deps, _ = await factory.config_to_continue(caller, state)
        await check_reply(config, state, reply, deps)

    async def dismiss(self, caller: CallingRun, run_id: str, reason: str) -> None:
        """End a run that waits or was cut off, and that nobody continues.

        Args:
            caller: The calling run.
            run_id: The run.
            reason: Why it ends.

        Raises:
            SuspensionRecordError: It cannot be continued.
            JournalError: It cannot be read, or belongs to another graph, and no migration accepts it.
            StoreError: The store cannot be read or written, or somebody else runs it.
        """
        factory = self.under(caller)
        loaded = await factory.load(run_id)
        if loaded is None or isinstance(loaded, RunState):
            return
        await Run(factory.config, loaded.run, RunRequest(dismiss_reason=reason, resume_point=loaded.resume_point))

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

    def sample(self, caller: CallingRun, call_id: str, run_id: str, request: SampleRequest) -> SampledRun:
        """The run that answers what a server asks a model during a call."""
        return SampledRun(caller, self, call_id, run_id, request)

    async def cut_off_replies(self, caller: CallingRun) -> Sequence[str]:
        """As ``Sampler.cut_off_replies``."""
        from agentfsm.journal.listing import iterate_runs  # only needed for runs in a store
        from agentfsm.journal.run_info import RunQuery

        store, run_id = caller.host.store, caller.run.run_id
        if store is None:
            return ()
        below = iterate_runs(store, RunQuery(parent=run_id, status="running"))
        return [info.run_id async for info in below if answers_request(info.run_id, run_id)]

    @property
    def is_agent(self) -> bool:
        """True."""
        return True

    @property
    def sampler(self) -> Sampler | None:
        """None: a sub-agent is no server."""
        return None

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
        """A run that continues.

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

    async def load(self, run_id: str) -> LoadedRun | RunState | None:
        """A run from the host's store: the final state of one that has ended, or None if the store does not have it."""
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


def _announce(run: Run[Any, Any], caller: CallingRun) -> None:
    """Tell the calling run of a run that is about to begin."""
    if caller.on_run is not None:
        caller.on_run(run)
    if caller.on_event is not None:
        send_events(run, caller.on_event)


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
        return self._factory.tools if self._run is None else live_tools(self._run)

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
        _announce(run, self._caller)
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
        factory, held, reply = self._factory, self._call_state.held, self._call_state.answer
        run_id = self._run_id_for_call() if held is None else held.run_id
        loaded = await factory.load(run_id)
        if isinstance(loaded, RunState):
            return loaded
        if loaded is not None:
            answered = held is not None and held.suspension == loaded.suspension_id
            request = RunRequest(reply=reply if answered else None, resume_point=loaded.resume_point)
            return await self._continue(loaded.run, request)
        if held is not None and reply is not None:
            try:
                record, state = await factory.open(held)
            except SuspensionRecordError as error:
                raise ToolError(f"the sub-agent's run cannot be resumed: {error}") from error
            return await self._continue(state, RunRequest(suspension_record=record, reply=reply))
        limits = cap_guardrails(factory.config.guardrails, self._caller)
        if limits is None:
            return None
        return factory.start(limits, task, run_id, self._caller, self._call_state.call.id)

    async def _continue(self, state: RunState, request: RunRequest) -> Run[Any, Any] | None:
        """A run that continues within what is left now; None if a person extends a budget of which nothing is left."""
        self._note_progress(state)
        factory, uncharged = self._factory, Spent(self._model_calls_before, self.usage)
        limits = cap_guardrails(factory.config.guardrails, self._caller, state, uncharged, request.reply)
        if limits is None:
            await factory.dismiss(self._caller, state.run_id, "nothing is left of the budget of the run that called it")
            return None
        request = replace(request, guardrails=limits)
        return await factory.continue_run(self._caller, state, request, "the sub-agent's run")

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
        return limit if limit is None or own is None or not limit.default else replace(limit, default=own)


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
class _Unattended:
    """A policy for runs that nobody attends: what would ask a person hands off, and a truncated reply is kept.

    Attributes:
        inner: The agent's policy.
    """

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
        self, caller: CallingRun, factory: SubagentFactory, call_id: str, run_id: str, request: SampleRequest
    ) -> None:
        self._caller, self._call_id, self.run_id, self._request = caller, call_id, run_id, request
        self._factory = _sampling_factory(factory.under(caller), request)
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
        loaded = await self._factory.load(self.run_id)
        if isinstance(loaded, RunState):
            self._state, self._model_calls_before = loaded, loaded.model_calls
            return self._read(loaded)
        before = None if loaded is None else loaded.run
        uncharged = Spent(model_calls, spent)
        if before is not None:
            self._state, self._model_calls_before = before, before.model_calls
            uncharged = Spent(model_calls + before.model_calls, spent + before.usage)
        limits = cap_guardrails(self._factory.config.guardrails, caller, before, uncharged)
        if limits is None:
            raise ToolError("nothing is left of the budget of this run for another model call")
        self._run = await self._open_run(loaded, limits)
        self._state = live_state(self._run)
        _announce(self._run, caller)
        return self._read((await self._run).run_state)

    async def _open_run(self, loaded: LoadedRun | None, limits: AgentGuardrails) -> Run[Any, Any]:
        factory, caller = self._factory, self._caller
        if loaded is not None:
            state, request = loaded.run, RunRequest(resume_point=loaded.resume_point, guardrails=limits)
            state.withheld = tuple(dict.fromkeys((*state.withheld, *caller.secrets)))
            return await factory.continue_run(caller, state, request, "the run that replies to the server")
        *history, last = self._request.messages
        if last.images:  # a prompt is a text
            history.append(Message.user("", last.images))
        return factory.start(limits, last.content, self.run_id, caller, self._call_id, history)

    def _read(self, run: RunState) -> SampledReply:
        kind, fields = ending_event(run)
        ending = kind(run_id=run.run_id, seq=0, time=0.0, **fields)
        last = next((each for each in reversed(run.messages) if each.role is Role.ASSISTANT), None)
        truncated = isinstance(ending, Handoff) and _is_truncation(ending.failure)
        if truncated and last is not None and last.content:
            return SampledReply(last.content, True, self._factory.config.model.name)
        return SampledReply(_result_text(ending), False, self._factory.config.model.name)


def _is_truncation(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is FailureKind.output_truncated


def _sampling_factory(factory: SubagentFactory, request: SampleRequest) -> SubagentFactory:
    """The agent as it answers one request: with the prompt, the settings and the maximum length that it asks for."""
    config = factory.config
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
    return SubagentFactory(changed)
