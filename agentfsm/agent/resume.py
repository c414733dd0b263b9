"""Resumes or dismisses suspended runs, from a signed record or from the store, and finds runs a crash interrupted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentfsm.errors import (
    ConfigurationError,
    HumanReplyError,
    JournalError,
    RunError,
    StaleHumanReplyError,
    StaleLease,
    SuspensionExpiredError,
    SuspensionFormatError,
    SuspensionRecordError,
    SuspensionUsedError,
)
from agentfsm.loop.state import HumanReply, RunState
from agentfsm.loop.suspension import SuspensionRecord, check_human_reply, open_record
from agentfsm.runtime.approval import HumanInput, to_human_reply
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.driver import RunRequest
from agentfsm.runtime.hooks import logger
from agentfsm.runtime.run import Run

if TYPE_CHECKING:
    from agentfsm.journal.load import LoadedRun
    from agentfsm.journal.store import Store

__all__ = [
    "ResumeRequest",
    "dismiss_run",
    "is_run_id",
    "load_run",
    "open_suspended_state",
    "parse_record",
    "require_store",
    "resume_run",
    "unfinished_runs",
]


_MIN_DIGEST_DIGITS = 12
"""How many hex digits of a record's hash are enough to identify it."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A human's reply to a run.

    Attributes:
        human_input: The reply, or None.
        to: The hash of the record that the human was shown, or at least its first 12 hex digits; empty if unknown.
        by: Who replied, or an empty string.
    """

    human_input: HumanInput | None
    to: str = ""
    by: str = ""

    def to_human_reply(self, kind: str) -> HumanReply:
        """The reply in the form that the run state stores.

        Args:
            kind: What the run waits for, such as ``approval`` or ``question``.

        Raises:
            HumanReplyError: The reply does not fit what the run waits for.
        """
        reply = replace(to_human_reply("" if self.human_input is None else self.human_input), by=self.by)
        check_human_reply(kind, reply)
        return reply

    def check_current(self, loaded: LoadedRun) -> None:
        """Check that the reply answers what the run asks now.

        Raises:
            StaleHumanReplyError: It answers something else.
        """
        request_ref, pending = loaded.resume_point.request_ref, loaded.run.pending_request
        if not self.to or request_ref is None or pending is None:
            return
        seq, digest = request_ref
        shown, too_short = self.to[:_MIN_DIGEST_DIGITS], len(self.to) < _MIN_DIGEST_DIGITS
        if digest.startswith(self.to) and not too_short:
            return
        request = f"{pending.tool} {json.dumps(dict(pending.arguments), default=str)}" if pending.tool else ""
        hint = f" (give at least its first {_MIN_DIGEST_DIGITS} digits)" if too_short else ""
        raise StaleHumanReplyError(
            f"the reply is to record {shown!r}{hint}, but run {loaded.run.run_id!r} now waits for a "
            f"reply to record {seq} ({digest[:_MIN_DIGEST_DIGITS]}): {request or pending.question}"
        )


def require_store(config: AgentConfig) -> Store:
    """The host's store.

    Raises:
        ConfigurationError: The host has none.
    """
    store = config.host.store
    if store is None:
        raise ConfigurationError("the agent's host has no store: Host(store=SqliteStore('runs.db'))")
    return store


def load_run(config: AgentConfig, run_id: str) -> LoadedRun:
    """A run from the host's store.

    Raises:
        ConfigurationError: The host has no store.
        StoreError: The run is not in the store, or the store cannot be read.
        JournalGraphError: The run belongs to another graph, and no migration accepts it.
    """
    from agentfsm.journal.load import load_stored_run  # only needed for runs in a store
    from agentfsm.journal.migration import Migration

    migrations = (*config.migrations, *map(Migration, sorted(config.former_graphs)))
    return load_stored_run(require_store(config), run_id, config.machine.graph, migrations)


def resume_run(config: AgentConfig, record: SuspensionRecord | str, request: ResumeRequest) -> Run:
    """Resume a suspended run with a reply, or an interrupted run without one.

    Args:
        config: The agent's configuration.
        record: The suspension record, its JSON text, or the id of a stored run.
        request: The reply.

    Raises:
        SuspensionRecordError: The record or the reply is invalid.
        StoreError: The run is not in the store, or the store cannot be read.
        JournalGraphError: The run belongs to another graph, and no migration accepts it.
    """
    if is_run_id(record):
        return _resume_from_store(config, str(record), request)
    parsed = parse_record(record)
    state = open_suspended_state(config, parsed)
    _require_calling_run(state)
    run_request = RunRequest(suspension_record=parsed, reply=request.to_human_reply(parsed.kind))
    return _resume_from_record(config, parsed, state, run_request, request)


def dismiss_run(config: AgentConfig, record: SuspensionRecord | str, reason: str) -> Run:
    """End a suspended or interrupted run without a reply.

    Args:
        config: The agent's configuration.
        record: The suspension record, its JSON text, or the id of a stored run.
        reason: Why; becomes ``RunCancelled.reason``.

    Raises:
        SuspensionRecordError: The record is invalid.
        StoreError: The run is not in the store, or the store cannot be read.
        JournalGraphError: The run belongs to another graph, and no migration accepts it.
    """
    if is_run_id(record):
        loaded = load_run(config, str(record))
        _require_calling_run(loaded.run)
        return Run(config, loaded.run, RunRequest(dismiss_reason=reason, resume_point=loaded.resume_point))
    parsed = parse_record(record)
    state = open_suspended_state(config, parsed, allow_expired=True)
    _require_calling_run(state)
    return _resume_from_record(
        config, parsed, state, RunRequest(suspension_record=parsed, dismiss_reason=reason), ResumeRequest(None)
    )


def _require_calling_run(state: RunState) -> None:
    """Refuse a sub-agent's run: only its calling run has the budgets and the permissions that apply to it.

    Raises:
        RunError: The run is a sub-agent's.
    """
    if state.parent is not None:
        raise RunError(
            f"run {state.run_id!r} is a sub-agent's run, called by run {state.parent[0]!r}: resume or dismiss that one"
        )


def _resume_from_store(config: AgentConfig, run_id: str, request: ResumeRequest) -> Run:
    loaded = load_run(config, run_id)
    _require_calling_run(loaded.run)
    expires = loaded.resume_point.expires_at
    if loaded.suspension_id is None:
        if request.human_input is not None:
            head = require_store(config).head(run_id)
            if head is not None and head.owner is not None:  # another process resumed it first
                raise StaleLease(run_id, head.owner, "is being run")
            if head is not None and head.seq != loaded.resume_point.seq:
                raise StaleLease(run_id, None, "has new records since it was loaded")
            raise HumanReplyError(f"run {run_id!r} was interrupted and asks nothing: resume it without a reply")
        first = loaded.run.steps == 1
        prompt = loaded.run.messages[-1].content if first and loaded.run.messages else ""
        return Run(config, loaded.run, RunRequest(prompt, resume_point=loaded.resume_point))
    if expires is not None and config.host.clock.time() > expires:
        raise SuspensionExpiredError(f"the request expired without a reply; end the run with agent.dismiss({run_id!r})")
    request.check_current(loaded)
    answer = request.to_human_reply(loaded.resume_point.kind)
    return Run(config, loaded.run, RunRequest(reply=answer, resume_point=loaded.resume_point))


def _resume_from_record(
    config: AgentConfig, record: SuspensionRecord, run_state: RunState, run_request: RunRequest, request: ResumeRequest
) -> Run:
    """A run restored from a record; if the host's store has the run too, it continues from the store."""
    store = config.host.store
    if store is None or store.head(record.run_id) is None:
        if request.to:
            raise HumanReplyError("'to' names a record of a stored run, and this run is not in a store: omit it")
        return Run(config, run_state, run_request)
    loaded = load_run(config, record.run_id)
    if loaded.suspension_id != record.record_id:
        raise SuspensionUsedError(f"run {record.run_id!r} has continued since record {record.record_id!r} was written")
    request.check_current(loaded)
    return Run(config, loaded.run, replace(run_request, resume_point=loaded.resume_point))


def open_suspended_state(config: AgentConfig, record: SuspensionRecord, allow_expired: bool = False) -> RunState:
    """The run state in a suspension record, after checking its signature, expiry, graph and first use.

    Args:
        config: The agent's configuration.
        record: The record.
        allow_expired: Whether to accept an expired record.

    Raises:
        SuspensionRecordError: The record is invalid.
    """
    host, graph = config.host, config.machine.graph.fingerprint
    stored = host.store is not None and host.store.head(record.run_id) is not None
    if stored and any(each.matches(record.graph) for each in config.migrations):
        graph = record.graph  # load_run checks from the journal whether the run may change graphs
    elif record.graph in config.former_graphs:
        graph = record.graph  # a suspended run of an earlier release, whose wait is the same
    state = open_record(record, graph=graph, secret=host.secret, now=host.clock.time(), allow_expired=allow_expired)
    if host.replay_guard.is_used(record.record_id):
        raise SuspensionUsedError(f"record {record.record_id!r} was already resumed; each record accepts one reply")
    return state


def parse_record(record: SuspensionRecord | str) -> SuspensionRecord:
    """A suspension record, parsed if it is JSON text.

    Raises:
        SuspensionFormatError: It is neither a record nor its JSON text.
    """
    if isinstance(record, SuspensionRecord):
        return record
    if not isinstance(record, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise SuspensionFormatError(f"a record is a SuspensionRecord or its JSON text, not {type(record).__name__}")
    return SuspensionRecord.from_json(record)


def is_run_id(record: SuspensionRecord | str) -> bool:
    """Whether the argument is a run's id rather than a suspension record."""
    return isinstance(record, str) and not record.lstrip().startswith("{")


def unfinished_runs(config: AgentConfig) -> list[Run]:
    """The interrupted runs of the host's store, ready to be awaited; runs of sub-agents are not included.

    A run that cannot be resumed is skipped with a warning in the log. A run that another process has resumed in the
    meantime is skipped too.

    Raises:
        ConfigurationError: The host has no store.
        StoreError: The store cannot be read.
    """
    runs: list[Run] = []
    for head in require_store(config).heads("running"):
        if head.owner is not None or not head.seq:
            continue
        try:
            run = resume_run(config, head.run_id, ResumeRequest(None))
        except JournalError as error:
            logger.warning("%s", error)
        except (SuspensionRecordError, RunError):  # it has ended or been suspended since the list was read
            continue
        else:
            if run.run_state.parent is None:
                runs.append(run)
    return runs
