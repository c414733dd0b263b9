"""Resumes or dismisses a suspended run, from its signed record or from the store, and finds runs a crash left unfinished."""

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
"""How many hex digits of a record's hash are enough to name it."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """What somebody replies to a run.

    Attributes:
        human_input: The answer, or None.
        to: The hash of the record that they were shown, or at least its first 12 hex digits; empty where that
            is not known.
        by: Who they are, or an empty string.
    """

    human_input: HumanInput | None
    to: str = ""
    by: str = ""

    def to_human_reply(self, kind: str) -> HumanReply:
        """The answer as the loop keeps it.

        Args:
            kind: What the run waits for.

        Raises:
            SuspensionRecordError: It does not fit.
        """
        reply = replace(to_human_reply("" if self.human_input is None else self.human_input), by=self.by)
        check_human_reply(kind, reply)
        return reply

    def check_current(self, loaded: LoadedRun) -> None:
        """Make sure that it is to what a run asks by now.

        Raises:
            StaleHumanReplyError: It is to something else.
        """
        asked, waiting = loaded.resume_point.request_ref, loaded.run.pending_request
        if not self.to or asked is None or waiting is None:
            return
        if len(self.to) >= _MIN_DIGEST_DIGITS and asked[1].startswith(self.to):
            return
        about = f"{waiting.tool} {json.dumps(dict(waiting.arguments), default=str)}" if waiting.tool else ""
        more = (
            f" (its first {_MIN_DIGEST_DIGITS} digits or more are needed)" if len(self.to) < _MIN_DIGEST_DIGITS else ""
        )
        raise StaleHumanReplyError(
            f"the reply is to record {self.to[:_MIN_DIGEST_DIGITS]!r}{more}, and what run {loaded.run.run_id!r} asks now is record "
            f"{asked[0]} ({asked[1][:_MIN_DIGEST_DIGITS]}): {about or waiting.question}"
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
    """A run as its store has it.

    Raises:
        StoreError: The store does not have it, or cannot be read.
        JournalGraphError: It belongs to another graph.
    """
    from agentfsm.journal.load import load_stored_run  # the journal loads when a run comes from a store

    return load_stored_run(require_store(config), run_id, config.machine.graph, config.migrations)


def resume_run(config: AgentConfig, record: SuspensionRecord | str, request: ResumeRequest) -> Run:
    """The run of a record, or of the store, going on with a reply, or with none where it was cut off.

    Raises:
        SuspensionRecordError: The record or the reply is not good.
        StoreError: The store does not have the run, or cannot be read.
        JournalGraphError: It belongs to another graph.
    """
    if is_run_id(record):
        return _resume_from_store(config, str(record), request)
    opened = parse_record(record)
    state = open_suspended_state(config, opened)
    errand = RunRequest(suspension_record=opened, reply=request.to_human_reply(opened.kind))
    return _resume_from_record(config, opened, state, errand, request)


def dismiss_run(config: AgentConfig, record: SuspensionRecord | str, reason: str) -> Run:
    """The run of a record, or of the store, ended without a reply.

    Raises:
        SuspensionRecordError: The record is not good.
        StoreError: The store does not have the run, or cannot be read.
        JournalGraphError: It belongs to another graph.
    """
    if is_run_id(record):
        found = load_run(config, str(record))
        return Run(config, found.run, RunRequest(dismiss_reason=reason, resume_point=found.resume_point))
    opened = parse_record(record)
    state = open_suspended_state(config, opened, allow_expired=True)
    return _resume_from_record(
        config, opened, state, RunRequest(suspension_record=opened, dismiss_reason=reason), ResumeRequest(None)
    )


def _resume_from_store(config: AgentConfig, run_id: str, request: ResumeRequest) -> Run:
    found = load_run(config, run_id)
    expires = found.resume_point.expires_at
    if found.suspension_id is None:
        if request.human_input is not None:
            head = require_store(config).head(run_id)
            if head is not None and head.owner is not None:  # somebody else was quicker to answer
                raise StaleLease(run_id, head.owner, "is being run")
            if head is not None and head.seq != found.resume_point.seq:
                raise StaleLease(run_id, None, "has moved on since it was read")
            raise HumanReplyError(f"run {run_id!r} was cut off and waits for nobody: resume it without a reply")
        first = found.run.steps == 1
        prompt = found.run.messages[-1].content if first and found.run.messages else ""
        return Run(config, found.run, RunRequest(prompt, resume_point=found.resume_point))
    if expires is not None and config.host.clock.time() > expires:
        raise SuspensionExpiredError(f"nobody answered in time; end the run with agent.dismiss({run_id!r})")
    request.check_current(found)
    answer = request.to_human_reply(found.resume_point.kind)
    return Run(config, found.run, RunRequest(reply=answer, resume_point=found.resume_point))


def _resume_from_record(
    config: AgentConfig, record: SuspensionRecord, run_state: RunState, run_request: RunRequest, request: ResumeRequest
) -> Run:
    """A run that a record holds; where the host's store has it too, the store is where it goes on."""
    store = config.host.store
    if store is None or store.head(record.run_id) is None:
        if request.to:
            raise HumanReplyError(
                "no store keeps the run, so there is no record that the reply could be to: give no 'to'"
            )
        return Run(config, run_state, run_request)
    found = load_run(config, record.run_id)
    if found.suspension_id != record.record_id:
        raise SuspensionUsedError(f"run {record.run_id!r} has gone on since record {record.record_id!r} was written")
    request.check_current(found)
    return Run(config, found.run, replace(run_request, resume_point=found.resume_point))


def open_suspended_state(config: AgentConfig, record: SuspensionRecord, allow_expired: bool = False) -> RunState:
    """What a record's run knows.

    Args:
        config: The agent's.
        record: The record.
        allow_expired: Whether an expired one is taken all the same.

    Raises:
        SuspensionRecordError: The record is not good.
    """
    host, graph = config.host, config.machine.graph.fingerprint
    stored = host.store is not None and host.store.head(record.run_id) is not None
    if stored and any(each.matches(record.graph) for each in config.migrations):
        graph = record.graph  # whether the run may change its graph is judged from its journal
    state = open_record(record, graph=graph, secret=host.secret, now=host.clock.time(), allow_expired=allow_expired)
    if host.replay_guard.is_used(record.record_id):
        raise SuspensionUsedError(f"record {record.record_id!r} was resumed already; each is good for one reply")
    return state


def parse_record(record: SuspensionRecord | str) -> SuspensionRecord:
    """A record, from its JSON text where it is one.

    Raises:
        SuspensionFormatError: It is neither.
    """
    if isinstance(record, SuspensionRecord):
        return record
    if not isinstance(record, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise SuspensionFormatError(f"a record is a SuspensionRecord or its JSON text, not {type(record).__name__}")
    return SuspensionRecord.from_json(record)


def is_run_id(record: SuspensionRecord | str) -> bool:
    """Whether a text is a run's id, and no record."""
    return isinstance(record, str) and not record.lstrip().startswith("{")


def unfinished_runs(config: AgentConfig) -> list[Run]:
    """The runs of the host's store that were cut off, ready to go on; a sub-agent's are not among them.

    One that cannot go on under this graph, or at all, is left as it is, with a warning in the log. Others of
    the same store may be at the same work: what they have gone on with meanwhile is left to them.

    Raises:
        ConfigurationError: The host has no store.
        StoreError: It cannot be read.
    """
    found: list[Run] = []
    for head in require_store(config).heads("running"):
        if head.owner is not None or not head.seq:
            continue
        try:
            run = resume_run(config, head.run_id, ResumeRequest(None))
        except JournalError as error:
            logger.warning("%s", error)
        except (SuspensionRecordError, RunError):  # since the list was read, it has ended, or come to wait for a person
            continue
        else:
            if run.run_state.parent is None:
                found.append(run)
    return found
