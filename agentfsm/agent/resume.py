"""Resumes or dismisses suspended runs, from a signed record or from the store."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentfsm.agent.pinned_approvals import as_strict_as_pinned
from agentfsm.agent.resume_checks import check_agent, check_reply, may_read_messages
from agentfsm.agent.run_options import restore_options
from agentfsm.errors import (
    BlankHumanReplyError,
    ConfigurationError,
    HumanReplyError,
    MissingDepsError,
    RunError,
    StaleHumanReplyError,
    StaleLease,
    SuspensionExpiredError,
    SuspensionFormatError,
    SuspensionRegistryError,
    SuspensionUsedError,
)
from agentfsm.loop.human_input import HumanInput, HumanReply, to_human_reply
from agentfsm.loop.model import Model
from agentfsm.loop.state import RunState, withhold_secrets_of
from agentfsm.loop.suspension import IN_STORE, SuspensionRecord, check_digest, check_human_reply, open_record
from agentfsm.runtime.context import AgentConfig, Context
from agentfsm.runtime.event_filter import WITHHELD
from agentfsm.runtime.host import Host, InMemoryReplayGuard
from agentfsm.runtime.preparation import add_tools, make_deps
from agentfsm.runtime.run import Run, stored_run
from agentfsm.runtime.run_context import check_deps
from agentfsm.runtime.run_request import RunRequest, escalation_is_due, identify_actor

if TYPE_CHECKING:
    from agentfsm.journal.load import LoadedRun
    from agentfsm.journal.signals import Signal
    from agentfsm.journal.store import Store


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A human's reply to a run.

    Attributes:
        human_input: The reply, or None.
        to: The hash of the record that the human was shown, or at least its first 12 hex digits; None for whatever
            the run asks now.
        by: Who replied, as ``Host.identify`` takes it, or None.
        deps: The dependencies with which the run should continue, or None.
        model: The run's own model, given again, or None.
        signal: The signal in the store that has the reply and who gave it, in place of the fields above; or None.

    Raises:
        HumanReplyError: ``to`` is neither None nor a text that is not blank.
    """

    human_input: HumanInput | None
    to: str | None = None
    by: Any = field(default=None, repr=False)
    deps: Any = field(default=None, repr=False)
    model: Model | None = None
    signal: Signal | None = None

    def __post_init__(self) -> None:
        to: Any = self.to
        if to is not None and not (isinstance(to, str) and to.strip()):
            raise HumanReplyError(
                f"to={to!r} names no request: give the digest that was shown with it, or None for whatever the run "
                "asks now"
            )

    @property
    def has_reply(self) -> bool:
        """Whether there is a reply."""
        return self.human_input is not None or self.signal is not None

    @property
    def actor(self) -> Any:
        """Who replies: what ``Host.identify`` takes, or the actor of the signal."""
        return self.by if self.signal is None else self.signal.actor

    @property
    def signal_id(self) -> str:
        """The id of the signal, or an empty string."""
        return "" if self.signal is None else self.signal.id

    def to_human_reply(self, kind: str) -> HumanReply:
        """The reply in the form that the run state stores.

        Raises:
            HumanReplyError: The reply does not fit what the run waits for.
        """
        if self.signal is not None and self.signal.reply is not None:
            reply = self.signal.reply
        elif self.human_input is None:
            raise BlankHumanReplyError(
                f"the run waits for a reply ({kind.replace('_', ' ')}), and none is given: resume it with one. "
                "agent.next_run(run_id) and workers act on replies that were sent to the store, as Runs.answer does; "
                "the run stays suspended"
            )
        else:
            reply = to_human_reply(self.human_input)
        check_human_reply(kind, reply)
        return reply

    def check_current(self, config: AgentConfig, loaded: LoadedRun) -> None:
        """Check that the reply answers what the run asks now.

        Raises:
            StaleHumanReplyError: It answers something else.
        """
        request_ref, pending = loaded.resume_point.request_ref, loaded.run.pending_request
        if self.signal is not None and self.signal.to not in loaded.asked:
            raise StaleHumanReplyError(
                f"run {loaded.run.run_id!r} now waits for something other than what the reply of "
                f"{self.signal.actor or 'somebody'} answers"
            )
        if self.to is None:
            return
        if request_ref is None or pending is None:
            raise StaleHumanReplyError(f"run {loaded.run.run_id!r} asks nothing now, and the reply is to {self.to!r}")
        request = f"{pending.tool} {json.dumps(dict(pending.arguments), default=str)}" if pending.tool else ""
        withholder = config.open_withholder().with_mask(WITHHELD)  # others may read the error
        withhold_secrets_of(loaded.run, withholder)
        for secret in loaded.resume_point.secrets:
            withholder.add(secret)
        check_digest(self.to, loaded.run.run_id, request_ref, withholder.clean_text(request or pending.question))


def require_store(config: AgentConfig) -> Store:
    """The host's store.

    Raises:
        ConfigurationError: The host has none.
    """
    store = config.host.store
    if store is None:
        raise ConfigurationError("the agent's host has no store: Host(store=SqliteStore('runs.db'))")
    return store


async def load_run(config: AgentConfig, run_id: str, *, lazily: bool = False, to_end: bool = False) -> LoadedRun:
    """A run from the host's store.

    Args:
        config: The configuration of its agent.
        run_id: The run.
        lazily: Whether its older messages may be read when they are needed.
        to_end: Whether it is only to end, so that values that were redacted may be missing.

    Raises:
        ConfigurationError: The host has no store.
        StoreError: The run is not in the store, or the store cannot be read.
        JournalGraphError: The run belongs to another graph, and no migration accepts it.
    """
    from agentfsm.journal.load import load_stored_run  # only needed for runs in a store
    from agentfsm.journal.migration import Migration

    migrations = (*config.migrations, *map(Migration, sorted(config.former_graphs)))
    return await load_stored_run(
        require_store(config),
        run_id,
        config.machine.graph,
        config.host.keyring,
        migrations,
        lazily=lazily and not may_read_messages(config),
        to_end=to_end,
    )


def _check_deps(config: AgentConfig, state: RunState, deps: Any) -> None:
    """Check the dependencies of a run that continues, unless the agent's ``deps_factory`` will make them.

    Raises:
        MissingDepsError: The run was started with dependencies, and there are none now.
        RunError: They are not what the agent declares.
    """
    remedy = "agent.resume(..., deps=...), or give the agent a deps_factory"
    if deps is None and config.deps_factory is not None:
        return
    if deps is None and state.details.has_deps:
        raise MissingDepsError(
            f"run {state.run_id!r} was started with dependencies, which no journal holds: give them again with "
            f"{remedy}; nothing was changed"
        )
    check_deps(config.deps_type, deps, remedy)


def resume_run(config: AgentConfig, record: SuspensionRecord | str, request: ResumeRequest) -> Run[Any, Any]:
    """Resume a suspended run with a human's reply, or an interrupted run without one.

    The run is read and checked when it starts, or by ``Run.load``, with the errors that it has.

    Raises:
        SuspensionFormatError: The record is neither a record nor its JSON text.
        ConfigurationError: It is the id of a run, and the host has no store.
    """
    run_id, stored_or_record = _find(config, record)
    return stored_run(config, run_id, lambda: load_resumed(config, stored_or_record, request), request.deps)


def dismiss_run(
    config: AgentConfig, record: SuspensionRecord | str, reason: str, by: Any = None, signal: Signal | None = None
) -> Run[Any, Any]:
    """End a suspended or interrupted run without a reply.

    Args:
        config: The agent's configuration.
        record: The suspension record, its JSON text, or the id of a stored run.
        reason: Why; becomes ``RunCancelled.reason``.
        by: Who dismisses it, as ``Host.identify`` takes it, or None.
        signal: The signal in the store that cancels it, in place of ``reason`` and ``by``; or None.

    Raises:
        SuspensionFormatError: The record is neither a record nor its JSON text.
        ConfigurationError: It is the id of a run, and the host has no store.
    """
    run_id, stored_or_record = _find(config, record)
    return stored_run(config, run_id, lambda: load_dismissed(config, stored_or_record, reason, by, signal))


def _find(config: AgentConfig, record: SuspensionRecord | str) -> tuple[str, SuspensionRecord | str]:
    """The id of a run, and its suspension record or again its id.

    Raises:
        SuspensionFormatError: The record is neither a record nor its JSON text.
        ConfigurationError: It is the id of a run, and the host has no store.
    """
    if isinstance(record, str) and is_run_id(record):
        require_store(config)
        return record, record
    parsed = parse_record(record)
    return parsed.run_id, parsed


async def load_resumed(
    config: AgentConfig, record: SuspensionRecord | str, request: ResumeRequest
) -> tuple[AgentConfig, RunState, RunRequest]:
    """A run that is resumed: its configuration, its state, and what is asked of it.

    Raises:
        MissingDepsError: The run was started with dependencies, and there are none now.
        MissingModelError: The run was started with a model of its own that is no longer available.
        SuspensionRecordError: The record or the reply is invalid.
        StoreError: The run is not in the store, or the store cannot be read.
        JournalGraphError: The run belongs to another graph, and no migration accepts it.
    """
    if isinstance(record, str):
        config, state, run_request = await _resume_from_store(config, record, request)
    else:
        config, state, run_request = await _check_resumed(config, record, request)
    _check_deps(config, state, run_request.deps)
    return config, state, run_request


async def _check_resumed(
    config: AgentConfig, record: SuspensionRecord, request: ResumeRequest
) -> tuple[AgentConfig, RunState, RunRequest]:
    state = await open_suspended_state(config, record)
    _require_calling_run(state)
    config, deps, admitted = await _config_for_run(config, state, request, record.graph)
    if request.human_input is None and escalation_is_due(config, state):
        run_request = RunRequest(suspension_record=record, deps=deps, admitted=admitted)
    else:
        reply = request.to_human_reply(record.kind)
        check_agent(config, state, record.state)
        await check_reply(config, state, reply, deps)
        run_request = RunRequest(suspension_record=record, reply=reply, by=request.by, deps=deps, admitted=admitted)
    return config, *await _resume_from_record(config, record, state, run_request, request)


async def _config_for_run(
    config: AgentConfig, state: RunState, request: ResumeRequest, graph: str
) -> tuple[AgentConfig, Any, tuple[str, ...]]:
    """The configuration with which a run continues, its dependencies, and what a migration admits to ask people less.

    The dependencies are made now only if the configuration needs them.

    Raises:
        MissingModelError: The run's model is no longer available.
        RunError: Its dependencies cannot be made, or it cannot have the tools of the agent's toolsets.
        SuspensionApprovalError: The agent would run calls that the run's own agent puts to people.
    """
    config, pending, deps = restore_options(config, state, request.model), state.pending_request, request.deps
    if config.toolsets or (pending is not None and pending.asker):
        _check_deps(config, state, deps)
        config, deps = await config_with_tools(config, state, deps)
    config, admitted = as_strict_as_pinned(config, state, graph)
    return config, deps, admitted


async def config_with_tools(config: AgentConfig, state: RunState, deps: Any) -> tuple[AgentConfig, Any]:
    """The configuration of a stored run with the tools of its agent's toolsets, and its dependencies.

    Raises:
        MissingDepsError: The run was started with dependencies, and there are none now.
        RunError: The dependencies cannot be made, or a toolset failed.
    """
    context = Context(config, state, deps=deps)
    await make_deps(context, dismissed=False)
    await add_tools(context)
    return context.config, context.deps


async def load_dismissed(
    config: AgentConfig, record: SuspensionRecord | str, reason: str, by: Any, signal: Signal | None = None
) -> tuple[AgentConfig, RunState, RunRequest]:
    """A run that is dismissed: its configuration, its state, and what is asked of it.

    Args:
        config: The agent's configuration.
        record: The suspension record, or the id of a stored run.
        reason: Why; becomes ``RunCancelled.reason``.
        by: Who dismisses it, as ``Host.identify`` takes it, or None.
        signal: The signal in the store that cancels it, in place of ``reason`` and ``by``; or None.

    Raises:
        SuspensionRecordError: The record is invalid.
        StoreError: The run is not in the store, or the store cannot be read.
        JournalGraphError: The run belongs to another graph, and no migration accepts it.
    """
    if isinstance(record, str):
        loaded = await load_run(config, record, to_end=True)
        _require_calling_run(loaded.run)
        request = RunRequest(dismiss_reason=reason, resume_point=loaded.resume_point, by=by)
        if signal is not None:
            from agentfsm.journal.signals import is_about

            records, (seq, _) = loaded.resume_point.records, signal.to
            if not is_about(signal, records[seq - 1].hash if 0 < seq <= len(records) else None):
                raise StaleHumanReplyError(f"run {record!r} is not the one that was to be cancelled")
            request = replace(request, dismiss_reason=signal.cancel_reason, by=signal.actor, signal_id=signal.id)
            await identify_actor(config, loaded.run, request)  # nobody waits for its error when the run starts
        return config, loaded.run, request
    state = await open_suspended_state(config, record, allow_expired=True)
    _require_calling_run(state)
    request = RunRequest(suspension_record=record, dismiss_reason=reason, by=by)
    return config, *await _resume_from_record(config, record, state, request, ResumeRequest(None))


def _require_calling_run(state: RunState) -> None:
    """Refuse a sub-agent's run: only its calling run has the budgets and the permissions that apply to it."""
    if state.parent is not None:
        raise RunError(
            f"run {state.run_id!r} is a sub-agent's run, called by run {state.parent[0]!r}: resume or dismiss that one"
        )


async def _resume_from_store(
    config: AgentConfig, run_id: str, request: ResumeRequest
) -> tuple[AgentConfig, RunState, RunRequest]:
    loaded = await load_run(config, run_id, lazily=True)
    _require_calling_run(loaded.run)
    graph = str(loaded.pinned["graph"]["fingerprint"])
    config, deps, admitted = await _config_for_run(config, loaded.run, request, graph)
    expires = loaded.resume_point.expires_at
    if loaded.suspension_id is None:
        if request.has_reply:
            head = await require_store(config).head(run_id)
            if head is not None and head.owner is not None:  # another process resumed it first
                raise StaleLease(run_id, head.owner, "is being run")
            if head is not None and head.seq != loaded.resume_point.seq:
                raise StaleLease(run_id, None, "has new records since it was loaded")
            raise HumanReplyError(f"run {run_id!r} was interrupted and asks nothing: resume it without a reply")
        first = loaded.run.steps == 1
        prompt = loaded.run.messages[-1].content if first and loaded.run.messages else ""
        return config, loaded.run, RunRequest(prompt, resume_point=loaded.resume_point, deps=deps, admitted=admitted)
    now = config.host.clock.time()
    # What was sent may have waited for this process.
    given_at = now if request.signal is None else min(now, request.signal.sent_at)
    if expires is not None and given_at > expires:
        raise SuspensionExpiredError(f"the request expired without a reply; end the run with agent.dismiss({run_id!r})")
    if not request.has_reply and escalation_is_due(config, loaded.run):
        return config, loaded.run, RunRequest(resume_point=loaded.resume_point, deps=deps, admitted=admitted)
    request.check_current(config, loaded)
    answer = request.to_human_reply(loaded.resume_point.kind)
    check_agent(config, loaded.run, loaded.pinned)
    await check_reply(config, loaded.run, answer, deps)
    run_request = RunRequest(
        reply=answer,
        resume_point=loaded.resume_point,
        by=request.actor,
        deps=deps,
        signal_id=request.signal_id,
        admitted=admitted,
    )
    if request.signal is not None:  # nobody waits for its error when the run starts
        await identify_actor(config, loaded.run, run_request)
    return config, loaded.run, run_request


async def _resume_from_record(
    config: AgentConfig, record: SuspensionRecord, run_state: RunState, run_request: RunRequest, request: ResumeRequest
) -> tuple[RunState, RunRequest]:
    """A run restored from a record; if the host's store has the run too, it continues from the store."""
    store = config.host.store
    if store is None or await store.head(record.run_id) is None:
        if request.to is not None:
            raise HumanReplyError("'to' names a record of a stored run, and this run is not in a store: omit it")
        return run_state, run_request
    loaded = await load_run(config, record.run_id)
    if loaded.suspension_id != record.record_id:
        raise SuspensionUsedError(f"run {record.run_id!r} has continued since record {record.record_id!r} was written")
    request.check_current(config, loaded)
    if run_request.reply is not None:
        check_agent(config, loaded.run, loaded.pinned)
        await check_reply(config, loaded.run, run_request.reply, run_request.deps)
    return loaded.run, replace(run_request, resume_point=loaded.resume_point)


async def open_suspended_state(config: AgentConfig, record: SuspensionRecord, allow_expired: bool = False) -> RunState:
    """The run state in a suspension record, after checking its signature, expiry, graph and first use.

    Raises:
        SuspensionRecordError: The record is invalid.
    """
    host, graph = config.host, config.machine.graph.fingerprint
    stored = host.store is not None and await host.store.head(record.run_id) is not None
    if stored and any(each.matches(record.graph) for each in config.migrations):
        graph = record.graph  # load_run checks from the journal whether the run may change graphs
    elif record.graph in config.former_graphs:
        graph = record.graph  # a suspended run of an earlier release, whose wait is the same
    state = open_record(
        record,
        graph=graph,
        keyring=host.keyring,
        now=host.clock.time(),
        secrets=(host.secret, *host.old_secrets),
        allow_expired=allow_expired,
    )
    if state.parent is not None:  # the calling run's record says whether it was used
        return state
    if not stored:  # else the store knows
        _require_registry(host, record)
    if host.replay_guard.is_used(record.record_id):
        raise SuspensionUsedError(f"record {record.record_id!r} was already resumed; each record accepts one reply")
    return state


def _require_registry(host: Host, record: SuspensionRecord) -> None:
    """Refuse a record of which the host cannot know whether it was used."""
    if record.registry == IN_STORE:
        raise SuspensionRegistryError(
            f"run {record.run_id!r} is in a store, which this host does not have: resume it on a host with that store "
            "(Host(store=...)), so that it is resumed once"
        )
    in_memory = isinstance(host.replay_guard, InMemoryReplayGuard)
    known = not in_memory if record.version == 1 else record.registry == host.replay_guard.scope
    if not known:
        raise SuspensionRegistryError(
            "this host cannot know whether the record was used already, because another process made it: give the "
            "same Host(replay_guard=FileReplayGuard(folder)), or the same store, to every process that suspends or "
            "resumes runs"
        )


def parse_record(record: SuspensionRecord | str) -> SuspensionRecord:
    """A suspension record, parsed if it is JSON text.

    Raises:
        SuspensionFormatError: It is neither a record nor its JSON text.
    """
    if isinstance(record, SuspensionRecord):
        return record
    if not isinstance(record, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise SuspensionFormatError(
            "what is resumed is a SuspensionRecord (result.outcome.suspension_record), its JSON text, or the id of a "
            f"stored run (result.run_id), not {type(record).__name__}"
        )
    return SuspensionRecord.from_json(record)


def is_run_id(record: SuspensionRecord | str) -> bool:
    """Whether the argument is a run's id rather than a suspension record."""
    return isinstance(record, str) and not record.lstrip().startswith("{")
