"""Finds what the runs of a store wait for that this agent can do: continue after a crash, or act on an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentfsm.agent.pinned_approvals import is_as_strict
from agentfsm.agent.resume import ResumeRequest, dismiss_run, require_store, resume_run
from agentfsm.errors import (
    HumanReplyError,
    JournalError,
    MissingDepsError,
    MissingExtraError,
    MissingModelError,
    RunError,
    SuspensionApprovalError,
    SuspensionExpiredError,
    SuspensionRecordError,
    SuspensionToolError,
    ToolsetError,
)
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.hooks import logger
from agentfsm.runtime.run import Run

if TYPE_CHECKING:
    from agentfsm.journal.records import SealedRecord
    from agentfsm.journal.signals import Signal
    from agentfsm.journal.store import Head


def accepts_graph(config: AgentConfig, graph: str) -> bool:
    """Whether runs with a graph can continue with an agent."""
    return (
        graph == config.machine.graph.fingerprint
        or graph in config.former_graphs
        or any(each.matches(graph) for each in config.migrations)
    )


def began_with(config: AgentConfig, first: SealedRecord) -> bool:
    """Whether a run began with what an agent has: a graph that it accepts, and the same tools or some of them.

    Tools are compared by digest: one that only has the same name is another, which may need no approval. An agent that
    requires less approval than the one that the run began with does not fit.

    Raises:
        JournalError: The record cannot be read.
    """
    from agentfsm.journal.records import open_record  # only needed for runs in a store

    body = open_record(first)
    had: dict[str, str] = body.get("tools", {})
    has = {tool.name: tool.digest for tool in config.tools.values()}
    graph, approvals = str(body["graph"]["fingerprint"]), pinned_approvals(body)
    return accepts_graph(config, graph) and had.items() <= has.items() and is_as_strict(config, approvals, graph)


def pinned_approvals(first: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which calls people have to approve, as the first record of a run has it; empty for an earlier release's."""
    own: Mapping[str, Any] = first.get("approvals") or first.get("state", {}).get("details", {}).get("approvals", {})
    return own


async def unfinished_runs(config: AgentConfig) -> list[Run[Any, Any]]:
    """The runs of the host's store that have something to do, loaded and ready to be awaited.

    They are those that were interrupted, and those that were answered or cancelled with ``Runs``; without those of
    sub-agents. A run that cannot be resumed is skipped with a warning in the log. A run that another process has
    resumed in the meantime is skipped too.

    Raises:
        ConfigurationError: The host has no store.
        StoreError: The store cannot be read.
    """
    store = require_store(config)
    signalled = [signal.run_id for signal in await store.signals.pending()]
    interrupted = [head.run_id for head in await store.heads("cut off")]
    found = [await next_run(config, run_id) for run_id in dict.fromkeys([*interrupted, *signalled])]
    return [run for run in found if run is not None]


async def next_run(config: AgentConfig, run_id: str, *, lazily: bool = False) -> Run[Any, Any] | None:
    """A run, loaded and ready to be awaited, if it has something to do and nobody does it; else None.

    Answers and cancellations that fit the run no longer are removed. Instead of an answer that it cannot act on, the
    store then has the reason, which ``Runs.get``, ``agentfsm runs`` and the viewer show.

    Args:
        config: The agent's configuration.
        run_id: The run.
        lazily: Whether its older messages may stay unread until they are needed; see ``Run.load``.

    Raises:
        ConfigurationError: The host has no store.
        StoreError: The store cannot be read.
    """
    from agentfsm.journal.signals import read_signals  # only needed for runs in a store

    store = require_store(config)
    head = await store.head(run_id)
    if head is None or head.owner is not None or not head.seq:
        return None
    signals = await read_signals(store.signals, config.host.keyring, run_id)
    for signal in sorted(signals, key=_urgency):
        run = await _act_on(config, head, signal, lazily)
        if run is not None:
            return run
    if head.status != "running":
        return None
    return await _loaded(resume_run(config, run_id, ResumeRequest(None)), lazily)


def _urgency(signal: Signal) -> int:
    """What is acted on first: what keeps a call from being made, even if votes for it were sent before."""
    if signal.kind == "cancel":
        return 0
    return 1 if signal.reply is not None and signal.reply.kind == "deny" else 2


async def _act_on(config: AgentConfig, head: Head, signal: Signal, lazily: bool) -> Run[Any, Any] | None:
    """A run, loaded with what a signal says; None if it does not fit the run or this agent."""
    from agentfsm.journal.load import pending_digest  # only needed for runs in a store
    from agentfsm.journal.signals import refusal_of, seal_signal

    store = require_store(config)
    if signal.kind == "refusal" and head.status == "suspended" and signal.to[1] == await pending_digest(store, head):
        return None  # it is for whoever answered
    if signal.kind == "refusal" or head.status == "finished":
        await store.signals.remove(signal.id)
        return None
    if signal.kind == "cancel":
        run = dismiss_run(config, signal.run_id, signal.reason, signal=signal)
    elif head.status == "suspended":
        run = resume_run(config, signal.run_id, ResumeRequest(None, signal=signal))
    else:
        return None  # it was interrupted on the way to asking for it
    try:
        return await run.load(lazily=lazily)
    except (HumanReplyError, SuspensionExpiredError, SuspensionToolError) as error:
        logger.warning("run %s: a reply is refused: %s", signal.run_id, error)
        if signal.to[1] == await pending_digest(store, head):  # else it was overtaken
            refusal = refusal_of(signal, str(error), config.host.clock.time())
            await store.signals.send(seal_signal(refusal, config.host.keyring))
            if isinstance(error, SuspensionToolError):
                return None  # it stays for an agent that has the tool
        await store.signals.remove(signal.id)
    except (SuspensionRecordError, JournalError, RunError, MissingExtraError) as error:
        logger.warning("%s. The %s that was sent waits for an agent that can act on it", error, signal.kind)
    return None


async def _loaded(run: Run[Any, Any], lazily: bool) -> Run[Any, Any] | None:
    try:
        await run.load(lazily=lazily)
    except (JournalError, MissingDepsError, MissingModelError, SuspensionApprovalError, ToolsetError) as error:
        logger.warning("%s", error)
    except (SuspensionRecordError, RunError):  # it has ended or been suspended since the list was read
        pass
    else:
        return run if run.run_state.parent is None else None
    return None
